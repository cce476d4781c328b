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
from ready_jax.layers import linear, normal

#: Queries of a prefill that meet the buffer at once.
QUERY_BLOCK = 64


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
        return linear(gated_BTQH.reshape(gated_BTQH.shape[:2] + (-1,)), self.w_out_OD[...])

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
        return linear(out_BTO, self.w_out_OD[...]), key_BSGH, value_BSGH

    def prefill(self, x_BTD, angles, key_BSGH, value_BSGH, length_B, num_B):
        """Any number of tokens after ``length_B`` committed ones; rows past ``num_B`` leave no trace."""
        query, gate, key, value = self.project(x_BTD, angles)
        key_BSGH = write_rows(key_BSGH, key, length_B, num_B)
        value_BSGH = write_rows(value_BSGH, value, length_B, num_B)
        slot_BS = jnp.arange(key_BSGH.shape[1])[None]
        live_BS = slot_BS < (length_B + num_B)[:, None]
        clean_BSGH = kernel.clean(value_BSGH, live_BS)

        def attend(block, rows_BTQH):
            start = block * QUERY_BLOCK
            query_BTQH = jax.lax.dynamic_slice_in_dim(rows_BTQH, start, QUERY_BLOCK, axis=1)
            row_T = start + jnp.arange(QUERY_BLOCK)
            seen_BTS = slot_BS[:, None] <= length_B[:, None, None] + row_T[None, :, None]
            out_BTQH = kernel.attend(query_BTQH, key_BSGH, clean_BSGH, seen_BTS & live_BS[:, None])
            return jax.lax.dynamic_update_slice_in_dim(rows_BTQH, out_BTQH, start, axis=1)

        # Blocks of queries, so that scores do not grow with the length of the pass. Outputs take the place of their
        # queries: XLA makes a stacked result's buffer before the first layer and keeps those of all layers till used.
        tokens, blocks = query.shape[1], -(-query.shape[1] // QUERY_BLOCK)
        padded = jnp.pad(query, [(0, 0), (0, blocks * QUERY_BLOCK - tokens), (0, 0), (0, 0)])
        out_BTQH = jax.lax.fori_loop(0, blocks, attend, padded)[:, :tokens]
        return self.finish(out_BTQH, gate), key_BSGH, value_BSGH

    def sequence(self, x_BTD, angles, segment_BT):
        """Whole packed sequences from nothing: causal within equal segment ids."""
        query, gate, key, value = self.project(x_BTD, angles)
        row = jnp.arange(x_BTD.shape[1])
        causal_BTS = (row[:, None] >= row[None])[None] & (segment_BT[:, :, None] == segment_BT[:, None])
        return self.finish(kernel.attend(query, key, value, causal_BTS), gate)
