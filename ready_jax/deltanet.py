"""The Gated DeltaNet mixer of the target: fused projections, causal convolution, gates, recurrence, gated norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ready_jax.config import TargetConfig
from ready_jax.kernels import gated_delta
from ready_jax.kernels import gated_delta_inputs as inputs
from ready_jax.kernels.causal_conv import causal_conv
from ready_jax.kernels.gated_delta_rows import last_inputs
from ready_jax.layers import Coded, linear, normal, summed_linear

#: Fused projection columns are padded to a multiple of this: odd widths hit slow matrix kernels.
COLUMN_MULTIPLE = 128


def fused_columns(config: TargetConfig) -> int:
    """Columns of q, k, v, z, b and a side by side, padded (16512 for Qwen3.8-27B)."""
    columns = config.conv_channels + config.value_width + 2 * config.linear_num_value_heads
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


class GatedDeltaNet(nnx.Module):
    """Weights ``w_in``: q, k, v (convolved), z, b, a side by side, then zero padding."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype):
        self.config = config
        memories = config.linear_num_value_heads
        width, hidden = config.value_width, config.hidden_size
        used = config.conv_channels + width + 2 * memories
        w_in_DI = jnp.zeros((hidden, fused_columns(config)), dtype)
        self.w_in_DI = nnx.Param(w_in_DI.at[:, :used].set(normal(rngs.params(), (hidden, used), hidden, dtype)))
        window = config.linear_conv_kernel_dim
        self.conv_WC = nnx.Param(normal(rngs.params(), (window, config.conv_channels), window, dtype))
        # Decay rates as in Mamba-2: A uniform in [1, 16], dt log-uniform in [1e-3, 1e-1] through softplus.
        rate = jax.random.uniform(rngs.params(), (memories,), jnp.float32, 1.0, 16.0)
        dt = jnp.exp(jax.random.uniform(rngs.params(), (memories,), jnp.float32, jnp.log(1e-3), jnp.log(1e-1)))
        self.a_log_M = nnx.Param(jnp.log(rate))
        self.dt_bias_M = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))
        self.norm_Y = nnx.Param(jnp.ones((config.linear_value_head_dim,), dtype))
        self.w_out_OD = nnx.Param(normal(rngs.params(), (width, hidden), width, dtype))

    def project(self, x_BTD):
        """Fused projection [B, T, I]."""
        return linear(x_BTD, self.w_in_DI[...])

    def rows(self, x_BTD, s_BMXY, tail_BWC):
        """Verify rows: output, and what commit needs of them."""
        c = self.config
        weights = (self.conv_WC[...], self.a_log_M[...], self.dt_bias_M[...], self.norm_Y[...])
        w_out_OD = self.w_out_OD[...]
        gated_BTO, pending = gated_delta.rows(
            s_BMXY,
            self.project(x_BTD),
            tail_BWC,
            *weights,
            c.rms_norm_eps,
            keys=c.linear_num_key_heads,
            following=w_out_OD.words if isinstance(w_out_OD, Coded) else w_out_OD,
        )
        return summed_linear(gated_BTO, w_out_OD), pending

    def sequence(self, x_BTD, s_BMXY, tail_BWC, *, live_BT, segment_BT=None, states_at_BA=None, **options):
        """Any number of tokens in chunks: output, last state, the conv inputs before the first dead token (as many as
        in ``tail``), states after ``states_at_BA`` tokens."""
        c = self.config
        p_BTI, conv_WC = self.project(x_BTD), self.conv_WC[...]
        keys = c.linear_num_key_heads * c.linear_key_head_dim
        mixed = causal_conv(p_BTI, tail_BWC, conv_WC, keys=keys, segment_BT=segment_BT, live_BT=live_BT)
        u_BTC, z, g, beta = inputs.split(p_BTI, self.a_log_M[...], self.dt_bias_M[...], c.conv_channels, c.value_width)
        # All of a dead token is zero: it writes nothing and leaves the state as it is.
        g, beta = (jnp.where(live_BT[..., None], x, 0.0) for x in (g, beta))
        tail_BWC = last_inputs(tail_BWC, u_BTC, jnp.sum(live_BT, axis=1))
        # Taken out of the fused projection here, so that it is not held for them (for z it is, until the norm).
        tail_BWC, g, beta = jax.lax.optimization_barrier((tail_BWC, g, beta))
        key_heads = (c.linear_num_key_heads, c.linear_key_head_dim)
        heads = key_heads, key_heads, (c.linear_num_value_heads, c.linear_value_head_dim)
        q, k, v = (x.reshape(x.shape[:2] + of) for x, of in zip(mixed, heads, strict=True))
        out, s_BMXY, states = gated_delta.prefill(
            s_BMXY, q, k, v, g, beta, segment_BT=segment_BT, states_at_BA=states_at_BA, **options
        )
        gated_BTO = inputs.gated_norm(out, z, self.norm_Y[...], c.rms_norm_eps)
        return summed_linear(gated_BTO, self.w_out_OD[...]), s_BMXY, tail_BWC, states
