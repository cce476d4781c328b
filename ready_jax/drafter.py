"""The DSpark drafter: one parallel pass over a block of anchor + masks, then sequential proposals.

Context features are the target's taps, fused once (projection, then norm); every layer turns them into keys and
values that join the block's own (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147, eq. 2-3). Context rows lie
strictly before the anchor, carry no per-layer input norm, and are all that is kept between rounds. Slot k sits at
position n + k and predicts the token at n + k + 1. All norms are plain ``w * rms(x)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ready_jax import collectives
from ready_jax.attention import write_rows
from ready_jax.config import DrafterConfig
from ready_jax.heads import ConfidenceHead, MarkovHead
from ready_jax.kernels import attention as kernel
from ready_jax.layers import Scaled, SwiGLU, linear, normal, product, rms_norm, rope_angles, rotate, summed_linear
from ready_jax.pytree import register
from ready_jax.reader import StateReader
from ready_jax.state import SPARE_ROWS


@register
@dataclass(frozen=True)
class DraftContext:
    """Keys and values of the committed tokens, per draft layer [B, S, G, H]; slots past ``length_B`` are unused."""

    length_B: Int[Array, "B"]
    key: tuple
    value: tuple
    capacity: int = field(metadata=dict(static=True))


@register
@dataclass(frozen=True)
class Draft:
    """One proposed block. ``confidence_BP`` (None without the head): survival of each slot given the ones before."""

    token_BP: Int[Array, "B P"]
    confidence_BP: Float[Array, "B P"] | None
    logits_BPV: Float[Array, "B P V"] | None


class DraftLayer(nnx.Module):
    """Qwen3-style layer; keys and values of context and block come from the same fused ``w_kv``."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype):
        c = self.config = config
        width, shared = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.norm_in_D = nnx.Param(jnp.ones((c.hidden_size,), dtype))
        self.norm_post_D = nnx.Param(jnp.ones((c.hidden_size,), dtype))
        self.w_q_DO = nnx.Param(normal(rngs.params(), (c.hidden_size, width), c.hidden_size, dtype))
        self.w_kv_DI = nnx.Param(normal(rngs.params(), (c.hidden_size, 2 * shared), c.hidden_size, dtype))
        self.w_out_OD = nnx.Param(normal(rngs.params(), (width, c.hidden_size), width, dtype))
        self.q_norm_H = nnx.Param(jnp.ones((c.head_dim,), dtype))
        self.k_norm_H = nnx.Param(jnp.ones((c.head_dim,), dtype))
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, rngs=rngs, dtype=dtype)

    def key_value(self, x_BTD, angles):
        """Normed, rotated keys and plain values [B, T, G, H] of context features or of normed block rows."""
        c = self.config
        shape = x_BTD.shape[:2] + (c.num_key_value_heads, c.head_dim)
        key, value = (x.reshape(shape) for x in jnp.split(linear(x_BTD, self.w_kv_DI[...]), 2, axis=-1))
        return rotate(rms_norm(key, self.k_norm_H[...], c.rms_norm_eps), angles), value

    def attend(self, x_BPD, angles, context, attend: Callable):
        """Attention of block rows over [context ; block rows] (``blocks`` or ``between``); ``x`` is already normed."""
        c = self.config
        query = linear(x_BPD, self.w_q_DO[...]).reshape(x_BPD.shape[:2] + (c.num_attention_heads, c.head_dim))
        query = rotate(rms_norm(query, self.q_norm_H[...], c.rms_norm_eps), angles)
        out = attend(query, context, self.key_value(x_BPD, angles))
        return summed_linear(out.reshape(x_BPD.shape[:2] + (-1,)), self.w_out_OD[...])


def _blocks(visible_BAT, query_BOQH, context, block):
    (key_BTGH, value_BTGH), (key_BOGH, value_BOGH) = context, block
    return kernel.attend_blocks(query_BOQH, key_BTGH, value_BTGH, key_BOGH, value_BOGH, visible_BAT)


def _between(begin_BP, end_BP, query_BPQH, context, block):
    key_BSGH, value_BSGH = context
    return kernel.attend_rows(query_BPQH, key_BSGH, value_BSGH, begin_BP, end_BP, block=block)


def blocks(visible_BAT: Bool[Array, "B A T"]) -> Callable:
    """Attention of ``A`` blocks side by side, each over the context slots it may see and itself: training."""
    return jax.tree_util.Partial(_blocks, visible_BAT)


def between(begin_BP: Int[Array, "B P"], end_BP: Int[Array, "B P"]) -> Callable:
    """Attention of one block's rows over the context slots [begin, end) and all of the block: decoding."""
    return jax.tree_util.Partial(_between, begin_BP, end_BP)


class Drafter(nnx.Module):
    """Parameters of a drafter. ``embed_VD`` and ``w_out_DV`` are None when it borrows the target's."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype="bfloat16"):
        c = self.config = config
        hidden = c.hidden_size
        own = c.own_embeddings
        self.embed_VD = nnx.data(
            nnx.Param(normal(rngs.params(), (c.vocab_size, hidden), hidden, dtype)) if own else None
        )
        self.w_out_DV = nnx.data(
            nnx.Param(normal(rngs.params(), (hidden, c.vocab_size), hidden, dtype)) if own else None
        )
        fused = len(c.taps) * hidden
        self.w_fuse_ID = nnx.Param(normal(rngs.params(), (fused, hidden), fused, dtype))
        self.norm_fuse_D = nnx.Param(jnp.ones((hidden,), dtype))
        self.layers = nnx.List([DraftLayer(c, rngs=rngs, dtype=dtype) for _ in range(c.num_layers)])
        self.norm_D = nnx.Param(jnp.ones((hidden,), dtype))
        self.markov = nnx.data(MarkovHead(c, rngs=rngs, dtype=dtype) if c.markov_rank else None)
        self.confidence = nnx.data(ConfidenceHead(c, rngs=rngs, dtype=dtype) if c.confidence_head else None)
        sites = len(c.inject_layers)
        self.reader = nnx.data(StateReader(c.reader, hidden, sites, rngs=rngs, dtype=dtype) if c.reader else None)

    @property
    def dtype(self):
        return self.norm_D[...].dtype

    def init_context(self, batch: int, capacity: int) -> DraftContext:
        """An empty context for ``batch`` sequences of at most ``capacity`` committed tokens."""
        c = self.config
        shape = (batch, capacity + SPARE_ROWS, c.num_key_value_heads, c.head_dim)
        buffers = tuple(jnp.zeros(shape, self.dtype) for _ in range(c.num_layers))
        return DraftContext(
            jnp.zeros((batch,), jnp.int32), buffers, tuple(jnp.zeros_like(x) for x in buffers), capacity
        )

    def fuse(self, taps_BTED: Float[Array, "B T E D"]) -> Float[Array, "B T D"]:
        """Context features: taps side by side, projected, then normed."""
        if taps_BTED.shape[2] != len(self.config.taps):
            raise ValueError(f"found {taps_BTED.shape[2]} taps, the drafter was made for {list(self.config.taps)}")
        flat = taps_BTED.reshape(taps_BTED.shape[:2] + (-1,))
        fused_BTD = collectives.whole(linear(flat, self.w_fuse_ID[...]))
        return rms_norm(fused_BTD, self.norm_fuse_D[...], self.config.rms_norm_eps)

    def absorb(self, context: DraftContext, taps_BTED: Float[Array, "B T E D"], num_B: Int[Array, "B"]) -> DraftContext:
        """Append the first ``num_B[b]`` rows (newly committed tokens) to the context; the rest leaves no trace."""
        feature_BTD = self.fuse(taps_BTED)
        position_BT = context.length_B[:, None] + jnp.arange(taps_BTED.shape[1])[None]
        angles = rope_angles(position_BT, self.config.rope)
        keys, values = [], []
        for layer, key, value in zip(self.layers, context.key, context.value, strict=True):
            new_key, new_value = layer.key_value(feature_BTD, angles)
            keys.append(write_rows(key, new_key, context.length_B, num_B))
            values.append(write_rows(value, new_value, context.length_B, num_B))
        return DraftContext(context.length_B + num_B, tuple(keys), tuple(values), context.capacity)

    def hidden(self, x_BPD, position_BP, context, attend: Callable, prep=None) -> Float[Array, "B P D"]:
        """Final-normed hidden states of block rows; the same function serves decoding and training.

        ``context``: per layer (key, value) [B, S, G, H]; ``attend``: ``blocks`` or ``between``.
        """
        c = self.config
        angles = rope_angles(position_BP, c.rope)
        inject = c.inject_layers or ((c.num_layers - 1,) if self.reader is not None else ())
        side = c.reader.inject_side if c.reader else "after_attention"
        into = c.reader.inject_target if c.reader else "mlp_input"
        for i, layer in enumerate(self.layers):

            def read(h_BPD, where, i=i):
                if self.reader is None or prep is None or i not in inject or where != side:
                    return None
                return self.reader(prep, h_BPD, *([inject.index(i)] if len(inject) > 1 else []))

            def injected(x_BPD, h_BPD, update_BPD):
                if update_BPD is None:
                    return x_BPD, h_BPD
                update_BPD = update_BPD.astype(h_BPD.dtype)
                return (
                    x_BPD + update_BPD if into in ("residual", "both") else x_BPD,
                    h_BPD + update_BPD if into in ("mlp_input", "both") else h_BPD,
                )

            h_BPD = rms_norm(x_BPD, layer.norm_in_D[...], c.rms_norm_eps)
            x_BPD, h_BPD = injected(x_BPD, h_BPD, read(h_BPD, "before_attention"))
            x_BPD = x_BPD + layer.attend(h_BPD, angles, context[i], attend)
            h_BPD = rms_norm(x_BPD, layer.norm_post_D[...], c.rms_norm_eps)
            x_BPD, h_BPD = injected(x_BPD, h_BPD, read(h_BPD, "after_attention"))
            x_BPD = x_BPD + layer.mlp(h_BPD)
        return rms_norm(x_BPD, self.norm_D[...], c.rms_norm_eps)

    def embedding(self, embed: Callable | None) -> Callable:
        """``embed`` if given, else the drafter's own; ValueError if it borrows the target's."""
        if embed is not None:
            return embed
        table = self.embed_VD
        if table is None:
            raise ValueError("this drafter has no embed of its own: pass embed=target.embed")
        return lambda token: table[...][token]

    def head(self, unembed: Callable | None) -> Callable:
        """``unembed`` if given, else the drafter's own; a stored head of its own is always preferred.

        Raises ValueError if there is neither.
        """
        weight = self.w_out_DV
        if unembed is not None and not (weight is not None and isinstance(weight[...], Scaled)):
            return unembed
        if weight is None:
            raise ValueError("this drafter has no unembed of its own: pass unembed=target.unembed")
        return lambda hidden_BTD: product(hidden_BTD, weight[...])

    def with_reader(self, reader) -> Drafter:
        """The same drafter with another state reader (None: none).

        Any object with ``prepare(states)`` and ``reader(prep, hidden_BPD)`` will do. One that is no pytree belongs to
        the compiled program and is recognised by identity: change it by making another.
        """
        other = jax.tree.map(lambda leaf: leaf, self)
        is_pytree = reader is None or not jax.tree_util.all_leaves([reader])
        other.reader = nnx.data(reader) if is_pytree else nnx.static(reader)
        return other

    def block_inputs(self, anchor_B: Int[Array, "B"], embed: Callable) -> Float[Array, "B P D"]:
        """Embeddings of [anchor, mask, mask, ...]."""
        masks = jnp.full((anchor_B.shape[0], self.config.block_size - 1), self.config.mask_token_id, anchor_B.dtype)
        return embed(jnp.concatenate([anchor_B[:, None], masks], axis=1)).astype(self.dtype)

    def propose(
        self,
        context: DraftContext,
        anchor_B: Int[Array, "B"],
        states=None,
        embed: Callable | None = None,
        unembed: Callable | None = None,
        *,
        with_logits: bool = False,
    ) -> Draft:
        """Propose a block after ``anchor_B`` (emitted, not yet consumed) from the committed context and states.

        ``states``: ``DecodeState.recurrent`` (needed by a drafter with a reader). ``embed``/``unembed`` None: the
        drafter's own. Greedy, left to right; slot k predicts position ``length_B + k + 1``.
        """
        c = self.config
        if self.reader is not None and states is None:
            raise ValueError("this drafter has a state reader: propose needs the committed recurrent states")
        if not isinstance(self.reader, StateReader | None):  # somebody's own reads every head, on every shard
            states = collectives.whole_states(states)
        prep = None if self.reader is None else self.reader.prepare(states)
        embed, unembed = self.embedding(embed), self.head(unembed)
        row_P = jnp.arange(c.block_size)
        position_BP = context.length_B[:, None] + row_P[None]
        end_BP = jnp.broadcast_to(context.length_B[:, None], position_BP.shape)
        begin_BP = jnp.zeros_like(end_BP) if c.sliding_window is None else jnp.maximum(end_BP - c.sliding_window, 0)
        cached = list(zip(context.key, context.value, strict=True))
        x_BPD = self.block_inputs(anchor_B, embed)
        hidden_BPD = self.hidden(x_BPD, position_BP, cached, between(begin_BP, end_BP), prep)
        return self.speak(hidden_BPD, anchor_B, unembed, with_logits=with_logits)

    def speak(self, hidden_BPD, anchor_B, unembed: Callable, *, with_logits: bool = False) -> Draft:
        """The sequential part: proposals left to right from the block's hidden states."""
        base_BPV = unembed(hidden_BPD)
        if self.markov is None:
            confidence = None if self.confidence is None else jax.nn.sigmoid(self.confidence(hidden_BPD, None))
            logits_BPV = collectives.whole(base_BPV) if with_logits else None
            return Draft(collectives.argmax(base_BPV), confidence, logits_BPV)
        carry = self.markov.start(anchor_B.shape[0])
        tokens, embeds, logits = [], [self.markov.embed(anchor_B, hidden_BPD.dtype)], []
        for slot in range(self.config.block_size):
            carry, latent_BR = self.markov.step(carry, embeds[-1], hidden_BPD[:, slot])
            if with_logits:
                logits.append(base_BPV[:, slot] + self.markov.bias(latent_BR))
                token_B = collectives.argmax(logits[-1])
                embed_BR = self.markov.embed(token_B, hidden_BPD.dtype)
            else:
                token_B, embed_BR = self.markov.greedy(base_BPV, slot, latent_BR)
            tokens.append(token_B)
            embeds.append(embed_BR)
        confidence = None
        if self.confidence is not None:
            confidence = jax.nn.sigmoid(self.confidence(hidden_BPD, jnp.stack(embeds[:-1], axis=1)))
        logits_BPV = collectives.whole(jnp.stack(logits, axis=1)) if with_logits else None
        return Draft(jnp.stack(tokens, axis=1), confidence, logits_BPV)
