"""Gated attention of the target (Qwen3.5: q/k norms, partial rotary, sigmoid output gate) and its KV buffer.

Keys and values are written at their absolute position *before* attention, whether they will be committed or not:
a slot at or past a row's length is invisible and is overwritten later. Splitting buffer and pending rows would
change the rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ready_jax.config import TargetConfig
from ready_jax.kernels import attention as kernel
from ready_jax.kernels import attention_inputs as inputs
from ready_jax.kernels.attention_inputs import write_rows
from ready_jax.layers import linear, normal, summed_linear


class GatedAttention(nnx.Module):
    """Weights ``w_in``: per query head [query | gate], then keys, then values, side by side."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype):
        self.config = config
        width = config.num_attention_heads * config.head_dim
        columns = 2 * width + 2 * config.num_key_value_heads * config.head_dim
        self.w_in_DI = nnx.Param(normal(rngs.params(), (config.hidden_size, columns), config.hidden_size, dtype))
        self.w_out_OD = nnx.Param(normal(rngs.params(), (width, config.hidden_size), width, dtype))
        self.q_norm_H = nnx.Param(jnp.zeros((config.head_dim,), dtype))
        self.k_norm_H = nnx.Param(jnp.zeros((config.head_dim,), dtype))

    def project(self, x_BTD, angles):
        """query and gate [B, T, Q, H], key and value [B, T, G, H]; normed and rotated."""
        c = self.config
        fused_BTI = linear(x_BTD, self.w_in_DI[...])
        norms = self.q_norm_H[...], self.k_norm_H[...]
        return inputs.project(fused_BTI, *norms, angles, c.num_key_value_heads, c.rms_norm_eps)

    def finish(self, out_BTQH, gate_BTQH):
        gated_BTQH = out_BTQH * jax.nn.sigmoid(gate_BTQH)
        return summed_linear(gated_BTQH.reshape(gated_BTQH.shape[:2] + (-1,)), self.w_out_OD[...])

    def mix(self, fused_BTI, angles, key_BSGH, value_BSGH, length_B):
        """From the fused projection of verify rows at ``length_B ..`` to what meets ``w_out``, and the buffers."""
        norms = self.q_norm_H[...], self.k_norm_H[...]
        query, gate, key_BSGH, value_BSGH = inputs.prepare(
            fused_BTI, *norms, angles, key_BSGH, value_BSGH, length_B, eps=self.config.rms_norm_eps
        )
        end_BT = length_B[:, None] + 1 + jnp.arange(fused_BTI.shape[1])[None]
        out = kernel.attend_rows(query, key_BSGH, value_BSGH, jnp.zeros_like(end_BT), end_BT, gate_BTQH=gate)
        return out.reshape(out.shape[:2] + (-1,)), key_BSGH, value_BSGH

    def rows(self, x_BTD, angles, key_BSGH, value_BSGH, length_B):
        """Verify rows at ``length_B ..``: output and the buffers that hold the rows."""
        fused_BTI = linear(x_BTD, self.w_in_DI[...])
        out_BTO, key_BSGH, value_BSGH = self.mix(fused_BTI, angles, key_BSGH, value_BSGH, length_B)
        return summed_linear(out_BTO, self.w_out_OD[...]), key_BSGH, value_BSGH

    def prefill(self, x_BTD, angles, key_BSGH, value_BSGH, length_B, num_B):
        """Any number of tokens after ``length_B`` committed ones; rows past ``num_B`` leave no trace."""
        query, gate, key, value = self.project(x_BTD, angles)
        key_BSGH = write_rows(key_BSGH, key, length_B, num_B)
        value_BSGH = write_rows(value_BSGH, value, length_B, num_B)
        row_T = jnp.arange(query.shape[1])
        end_BT = length_B[:, None] + jnp.minimum(row_T[None] + 1, num_B[:, None])
        out_BTQH = kernel.attend_ranges(query, key_BSGH, value_BSGH, jnp.zeros_like(end_BT), end_BT)
        return self.finish(out_BTQH, gate), key_BSGH, value_BSGH

    def sequence(self, x_BTD, angles, segment_BT):
        """Whole packed sequences from nothing: causal within equal segment ids."""
        query, gate, key, value = self.project(x_BTD, angles)
        row_T = jnp.arange(x_BTD.shape[1])
        changed_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], [(0, 0), (1, 0)])
        begin_BT = jax.lax.cummax(jnp.where(changed_BT, row_T[None], 0), axis=1)
        end_BT = jnp.broadcast_to(row_T[None] + 1, begin_BT.shape)
        return self.finish(kernel.attend_ranges(query, key, value, begin_BT, end_BT, differentiable=True), gate)
