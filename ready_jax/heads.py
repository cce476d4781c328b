"""The sequential heads of DSpark: what turns one parallel block pass into left-to-right proposals.

A Markov head adds ``W2 . latent(previous token, hidden)`` to the base logits (DSpark, arXiv 2607.05147, section
3.1): vanilla ``W1[prev]``, gated ``sigmoid(Wg [h; W1[prev]] + b) * W1[prev]``, rnn a gated recurrence over the
block. The confidence head estimates that a proposal survives given that its predecessors did.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ready_jax import collectives
from ready_jax.config import DrafterConfig
from ready_jax.kernels import markov_step
from ready_jax.layers import Scaled, linear, normal, product


class MarkovHead(nnx.Module):
    """Latents of width ``R`` that depend on the token proposed just before."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype):
        rank, hidden, vocab = config.markov_rank, config.hidden_size, config.vocab_size
        if rank < 1:
            raise ValueError(f"markov_rank={rank} must be at least 1 for a Markov head")
        self.kind = config.markov_head_type
        self.w1_VR = nnx.Param(normal(rngs.params(), (vocab, rank), rank, dtype))
        self.w2_RV = nnx.Param(jnp.zeros((rank, vocab), dtype))
        width = {"vanilla": None, "gated": (hidden + rank, rank), "rnn": (2 * rank + hidden, 3 * rank)}[self.kind]
        self.w_mix = nnx.data(None if width is None else nnx.Param(normal(rngs.params(), width, width[0], dtype)))
        self.b_mix = nnx.data(None if width is None else nnx.Param(jnp.zeros((width[1],), dtype)))

    def start(self, batch: int):
        """Recurrent state before the first slot of a block; None for heads without one."""
        if self.kind != "rnn":
            return None
        return jnp.zeros((batch, self.w1_VR.shape[1]), self.w1_VR[...].dtype)

    def embed(self, prev_B: Int[Array, "B"], dtype) -> Float[Array, "B R"]:
        """Markov embeddings of tokens."""
        return self.w1_VR[...][prev_B].astype(dtype)

    def step(self, carry, embed_BR: Float[Array, "B R"], hidden_BD: Float[Array, "B D"]):
        """(carry, latent [B, R]) of one slot, given the Markov embedding of the token just before it."""
        if self.w_mix is None or self.b_mix is None:  # vanilla
            return carry, embed_BR
        if self.kind == "gated":
            mixed = linear(jnp.concatenate([hidden_BD, embed_BR], axis=-1), self.w_mix[...], self.b_mix[...])
            return carry, jax.nn.sigmoid(mixed) * embed_BR
        joined = jnp.concatenate([carry.astype(hidden_BD.dtype), embed_BR, hidden_BD], axis=-1)
        gate, candidate, output = jnp.split(linear(joined, self.w_mix[...], self.b_mix[...]), 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        carry = gate * carry.astype(gate.dtype) + (1 - gate) * jnp.tanh(candidate)
        return carry, jnp.tanh(output)

    def latents(self, prev_BP: Int[Array, "B P"], hidden_BPD: Float[Array, "B P D"]):
        """Teacher-forced latents and Markov embeddings [B, P, R] of whole blocks."""
        carry, latents, embeds = self.start(prev_BP.shape[0]), [], []
        for slot in range(prev_BP.shape[1]):
            embeds.append(self.embed(prev_BP[:, slot], hidden_BPD.dtype))
            carry, latent = self.step(carry, embeds[-1], hidden_BPD[:, slot])
            latents.append(latent)
        return jnp.stack(latents, axis=1), jnp.stack(embeds, axis=1)

    def greedy(self, base_BPV: Float[Array, "B P V"], slot: int, latent_BR: Float[Array, "B R"], impl=None):
        """The best token of a slot and its Markov embedding, without logits: see ``kernels/markov_step.py``."""
        w2 = self.w2_RV[...]
        weight, scale_V = (w2.weight, w2.scale) if isinstance(w2, Scaled) else (w2, None)
        spread = collectives.axis.value is not None
        gather = partial(collectives.winners, columns=base_BPV.shape[2]) if spread else None
        return markov_step.step(
            base_BPV, slot, latent_BR, weight, self.w1_VR[...], scale_V=scale_V, gather=gather, impl=impl
        )

    def bias(self, latent):
        """fp32 addition to the base logits, over the last axis."""
        return product(latent, self.w2_RV[...])


class ConfidenceHead(nnx.Module):
    """Logit of "this proposal survives", from the hidden state and (optionally) the Markov embedding; fp32."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype):
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.w_I = nnx.Param(normal(rngs.params(), (width,), width, dtype))
        self.b = nnx.Param(jnp.zeros((), dtype))

    def __call__(self, hidden, embed):
        """Logits over all leading axes of ``hidden`` [..., D] and ``embed`` [..., R]."""
        x = jnp.concatenate([hidden, embed], axis=-1) if self.with_markov else hidden
        weight = self.w_I[...].astype(jnp.float32)
        return jnp.matmul(x.astype(jnp.float32), weight, precision="highest") + self.b[...].astype(jnp.float32)
