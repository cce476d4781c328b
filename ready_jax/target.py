"""The target: a Gated DeltaNet / gated attention hybrid (``qwen3_5`` text family), forwards only.

Modules hold parameters; memory goes in and comes out. ``prefill`` takes any number of tokens in chunks, ``verify``
the few rows of a decoding round, ``sequence`` packed training rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ready_jax import collectives
from ready_jax.attention import GatedAttention
from ready_jax.config import LINEAR, TargetConfig
from ready_jax.deltanet import GatedDeltaNet
from ready_jax.layers import SwiGLU, normal, precision_for, product, rms_norm_1p, rope_angles
from ready_jax.pytree import register
from ready_jax.state import SPARE_ROWS, DecodeState, PendingWrites


@register
@dataclass(frozen=True)
class Output:
    """Result of a pass over ``T`` tokens.

    ``hidden_BTD`` is after the final norm: ``target.unembed`` turns it into logits. ``taps_BTED`` are residual
    streams after the layers asked for, in that order (-1: the embedding output); None without taps.
    ``states``: absolute layer -> [B, A, M, X, Y], the recurrent states after the prefixes asked for.
    """

    hidden_BTD: Float[Array, "B T D"]
    taps_BTED: Float[Array, "B T E D"] | None
    states: dict[int, Float[Array, "B A M X Y"]]


class Block(nnx.Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: TargetConfig, kind: str, *, rngs: nnx.Rngs, dtype):
        self.eps = config.rms_norm_eps
        self.norm_in_D = nnx.Param(jnp.zeros((config.hidden_size,), dtype))
        self.norm_post_D = nnx.Param(jnp.zeros((config.hidden_size,), dtype))
        mixer = GatedDeltaNet if kind == LINEAR else GatedAttention
        self.mixer = mixer(config, rngs=rngs, dtype=dtype)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, rngs=rngs, dtype=dtype)

    def norm(self, x_BTD):
        return rms_norm_1p(x_BTD, self.norm_in_D[...], self.eps)

    def residual(self, x_BTD, mixed_BTD):
        x_BTD = x_BTD + mixed_BTD
        return x_BTD + self.mlp(rms_norm_1p(x_BTD, self.norm_post_D[...], self.eps))


class Target(nnx.Module):
    """Parameters of the target. ``w_out_DV`` is None when the head is tied to the embedding."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype="bfloat16"):
        self.config = config
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embed_VD = nnx.Param(normal(rngs.params(), (vocab, hidden), hidden, dtype))
        self.layers = nnx.List([Block(config, kind, rngs=rngs, dtype=dtype) for kind in config.layer_types])
        self.norm_D = nnx.Param(jnp.zeros((hidden,), dtype))
        head = None if config.tie_word_embeddings else nnx.Param(normal(rngs.params(), (hidden, vocab), hidden, dtype))
        self.w_out_DV = nnx.data(head)

    @property
    def dtype(self):
        return self.embed_VD[...].dtype

    def embed(self, token_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        if self.config.tie_word_embeddings:  # then its rows are the head's columns, which shards divide
            return collectives.lookup(self.embed_VD[...], token_BT)
        return self.embed_VD[...][token_BT]

    def unembed(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """fp32 logits of final-normed hidden states; of its own columns on a shard."""
        if self.w_out_DV is not None:
            return product(hidden_BTD, self.w_out_DV[...])
        return jnp.einsum(
            "BTD,VD->BTV",
            hidden_BTD,
            self.embed_VD[...].astype(hidden_BTD.dtype),
            precision=precision_for(hidden_BTD.dtype),
            preferred_element_type=jnp.float32,
        )

    def _check_taps(self, taps):
        wrong = [i for i in taps if not -1 <= i < self.config.num_layers]
        if wrong:
            raise ValueError(
                f"taps name layers {wrong}: the target has layers 0..{self.config.num_layers - 1}, -1 embeds"
            )

    def _check_state_layers(self, state_layers):
        wrong = [i for i in state_layers if i not in self.config.linear_layers]
        if wrong:
            raise ValueError(
                f"state_layers names {wrong}: only layers {list(self.config.linear_layers)} hold a recurrent state"
            )

    def _run(self, x_BTD, taps, mix):
        """All blocks over ``x``; ``mix(i, mixer, normed)`` is the mode (rows, prefill)."""
        self._check_taps(taps)
        tapped = {-1: x_BTD}
        for i, block in enumerate(self.layers):
            x_BTD = block.residual(x_BTD, mix(i, block.mixer, block.norm(x_BTD)))
            tapped[i] = x_BTD
        hidden_BTD = rms_norm_1p(x_BTD, self.norm_D[...], self.config.rms_norm_eps)
        return Output(hidden_BTD, jnp.stack([tapped[i] for i in taps], axis=2) if taps else None, {})

    def verify(
        self, token_BT: Int[Array, "B T"], state: DecodeState, taps: tuple[int, ...] = ()
    ) -> tuple[Output, PendingWrites]:
        """Score up to 8 rows after the committed tokens; nothing is committed.

        Row i sees the committed tokens and rows 0..i of the pass. Its bits do not depend on the other rows nor on
        how the same tokens are cut into passes, at equal batch and row count.
        """
        rows = token_BT.shape[1]
        if rows > SPARE_ROWS:
            raise ValueError(f"verify takes at most {SPARE_ROWS} rows, found {rows}: longer inputs belong to prefill")
        recurrent, key, value = ([None] * self.config.num_layers for _ in range(3))
        angles = rope_angles(state.length_B[:, None] + jnp.arange(rows)[None], self.config.rope)

        def mix(i, mixer, x_BTD):
            if isinstance(mixer, GatedDeltaNet):
                y_BTD, recurrent[i] = mixer.rows(x_BTD, state.recurrent[i], state.conv[i])
            else:
                y_BTD, key[i], value[i] = mixer.rows(x_BTD, angles, state.key[i], state.value[i], state.length_B)
            return y_BTD

        out = self._run(self.embed(token_BT), taps, mix)
        return out, PendingWrites(tuple(recurrent), tuple(key), tuple(value))

    def prefill(
        self,
        token_BT: Int[Array, "B T"],
        state: DecodeState,
        num_B: Int[Array, "B"],
        taps: tuple[int, ...] = (),
        states_at_BA: Int[Array, "B A"] | None = None,
        state_layers: tuple[int, ...] = (),
    ) -> tuple[Output, DecodeState]:
        """Consume the first ``num_B[b]`` of ``T`` tokens and commit them; the padding behind them leaves no trace.

        ``states_at_BA`` asks for the recurrent states of ``state_layers`` after that many tokens of this pass.
        No recurrent state is kept per token. The caller checks ``length_B + num_B <= capacity`` on the host.
        """
        self._check_state_layers(state_layers)
        tokens = token_BT.shape[1]
        recurrent, conv, key, value = (list(x) for x in (state.recurrent, state.conv, state.key, state.value))
        angles = rope_angles(state.length_B[:, None] + jnp.arange(tokens)[None], self.config.rope)
        live_BT = jnp.arange(tokens)[None] < num_B[:, None]
        states = {}

        def mix(i, mixer, x_BTD):
            if isinstance(mixer, GatedDeltaNet):
                at = states_at_BA if i in state_layers else None
                y_BTD, recurrent[i], conv[i], found = mixer.sequence(
                    x_BTD, recurrent[i], conv[i], live_BT=live_BT, states_at_BA=at
                )
                if found is not None:
                    states[i] = found
            else:
                y_BTD, key[i], value[i] = mixer.prefill(x_BTD, angles, key[i], value[i], state.length_B, num_B)
            return y_BTD

        out = self._run(self.embed(token_BT), taps, mix)
        state = replace(
            state,
            length_B=state.length_B + num_B,
            recurrent=tuple(recurrent),
            conv=tuple(conv),
            key=tuple(key),
            value=tuple(value),
        )
        return replace(out, states=states), state

    def sequence(
        self,
        token_BT: Int[Array, "B T"],
        segment_BT: Int[Array, "B T"],
        taps: tuple[int, ...] = (),
        states_at_BA: Int[Array, "B A"] | None = None,
        state_layers: tuple[int, ...] = (),
        precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
        remat: bool = False,
        layer_at: Callable[[int, Any], tuple[Block, Any]] | None = None,
    ) -> Output:
        """Packed training rows from empty memory: segments (equal contiguous ids, 0 = padding) see only themselves.

        Differentiable; ``precision`` lowers the delta-rule products, ``remat`` recomputes each block backward.
        ``layer_at(i, x_BTD)`` gives layer i and the stream back, before layer i - 1 has run: where its weights are
        elsewhere, they can come meanwhile.
        """
        self._check_taps(taps)
        self._check_state_layers(state_layers)
        c = self.config
        batch, tokens = token_BT.shape
        live_BT = segment_BT > 0
        angles = rope_angles(jnp.broadcast_to(jnp.arange(tokens)[None], token_BT.shape), c.rope)
        x_BTD = self.embed(token_BT)
        tail_BWC = jnp.zeros((batch, c.linear_conv_kernel_dim - 1, c.conv_channels), x_BTD.dtype)
        s_BMXY = jnp.zeros(
            (batch, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim), jnp.float32
        )

        def layer(block, x_BTD, at):
            if isinstance(block.mixer, GatedDeltaNet):
                y_BTD, _, _, found = block.mixer.sequence(
                    block.norm(x_BTD), s_BMXY, tail_BWC,
                    live_BT=live_BT, segment_BT=segment_BT, states_at_BA=at, precision=precision,
                    at_once=True,
                )  # fmt: skip
            else:
                y_BTD, found = block.mixer.sequence(block.norm(x_BTD), angles, segment_BT), None
            return block.residual(x_BTD, y_BTD), found

        layer_at = layer_at or (lambda i, x_BTD: (self.layers[i], x_BTD))
        run = jax.checkpoint(layer) if remat else layer
        states, tapped, last = {}, {-1: x_BTD}, c.num_layers - 1
        following, x_BTD = layer_at(0, x_BTD)
        for i in range(c.num_layers):
            block = following
            if i < last:
                following, x_BTD = layer_at(i + 1, x_BTD)
            x_BTD, found = run(block, x_BTD, states_at_BA if i in state_layers else None)
            tapped[i] = x_BTD
            if found is not None:
                states[i] = found
        hidden_BTD = rms_norm_1p(x_BTD, self.norm_D[...], c.rms_norm_eps)
        return Output(hidden_BTD, jnp.stack([tapped[i] for i in taps], axis=2) if taps else None, states)
