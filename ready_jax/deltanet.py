"""The Gated DeltaNet mixer of the target: fused projections, causal convolution, gates, recurrence, gated norm.

Source of the equations: the Qwen3.5 reference (``modeling_qwen3_5``). beta is evaluated in fp32 (the reference
rounds it to the activation type; paths that differ only there end 2e-3 apart in state).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ready_jax.config import TargetConfig
from ready_jax.kernels import gated_delta
from ready_jax.layers import linear, normal, rms

#: Fused projection columns are padded to a multiple of this: odd widths hit slow matrix kernels.
COLUMN_MULTIPLE = 128


def fused_columns(config: TargetConfig) -> int:
    """Columns of q, k, v, z, b and a side by side, padded (16512 for Qwen3.8-27B)."""
    columns = config.conv_channels + config.value_width + 2 * config.linear_num_value_heads
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def last_inputs(history_BWC: Float[Array, "B W C"], num_B: Int[Array, "B"], window: int) -> Float[Array, "B W2 C"]:
    """The ``window`` conv inputs that precede token ``num_B`` of a pass, oldest first.

    ``history`` holds the ``window`` inputs before the pass, then those of the pass itself: a copy, no arithmetic.
    """
    index = num_B[:, None] + jnp.arange(window)[None]
    return jnp.take_along_axis(history_BWC, index[..., None], axis=1)


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
        """Conv inputs [B, T, C], output gate z [B, T, M*Y], fp32 log-decay g <= 0 and beta [B, T, M]."""
        c = self.config
        memories = c.linear_num_value_heads
        edges = [c.conv_channels, c.conv_channels + c.value_width]
        edges += [edges[-1] + memories, edges[-1] + 2 * memories]
        u_BTC, z, b_BTM, a_BTM, _ = jnp.split(linear(x_BTD, self.w_in_DI[...]), edges, axis=-1)
        beta_BTM = jax.nn.sigmoid(b_BTM.astype(jnp.float32))
        rate_BTM = jnp.exp(self.a_log_M[...].astype(jnp.float32))[None, None]
        bias_BTM = self.dt_bias_M[...].astype(jnp.float32)[None, None]
        g_BTM = -rate_BTM * jax.nn.softplus(a_BTM.astype(jnp.float32) + bias_BTM)
        return u_BTC, z, g_BTM, beta_BTM

    def convolve(self, history_BWC, tokens: int, segment_BT=None):
        """Depthwise causal convolution and SiLU of the last ``tokens`` inputs, split into q, k, v heads."""
        c = self.config
        window = c.linear_conv_kernel_dim
        w_WC = self.conv_WC[...].astype(jnp.float32)
        total = 0.0
        for i in range(window):
            term = history_BWC[:, i : i + tokens].astype(jnp.float32)
            back = window - 1 - i
            if segment_BT is not None and back:
                earlier = jnp.pad(segment_BT, [(0, 0), (back, 0)], mode="edge")[:, :tokens]
                term = jnp.where((earlier == segment_BT)[..., None], term, 0.0)
            total = total + term * w_WC[i][None, None]
        mixed = jax.nn.silu(total).astype(history_BWC.dtype)
        keys = c.linear_num_key_heads * c.linear_key_head_dim
        q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        lead = mixed.shape[:2]
        head = (c.linear_num_key_heads, c.linear_key_head_dim)
        return (
            q.reshape(lead + head),
            k.reshape(lead + head),
            v.reshape(lead + (c.linear_num_value_heads, c.linear_value_head_dim)),
        )

    def finish(self, out_BTMY, z_BTO):
        """Norm per memory, then plain weight, then SiLU gate, then the output projection."""
        out = out_BTMY.astype(z_BTO.dtype)
        normed = (
            rms(out, self.config.rms_norm_eps).astype(out.dtype) * self.norm_Y[...].astype(out.dtype)[None, None, None]
        )
        gate = jax.nn.silu(z_BTO.astype(jnp.float32)).reshape(out.shape)
        gated = (normed.astype(jnp.float32) * gate).astype(out.dtype)
        return linear(gated.reshape(z_BTO.shape), self.w_out_OD[...])

    def rows(self, x_BTD, s_BMXY, tail_BWC):
        """Verify rows: output, pending writes of the recurrence, conv history of the pass."""
        u_BTC, z, g, beta = self.project(x_BTD)
        history_BWC = jnp.concatenate([tail_BWC, u_BTC.astype(tail_BWC.dtype)], axis=1)
        q, k, v = self.convolve(history_BWC, x_BTD.shape[1])
        out, pending = gated_delta.verify(s_BMXY, q, k, v, g, beta)
        return self.finish(out, z), pending, history_BWC

    def sequence(self, x_BTD, s_BMXY, tail_BWC, *, live_BT, segment_BT=None, states_at_BA=None, **options):
        """Any number of tokens in chunks: output, last state, conv history, states after ``states_at_BA`` tokens."""
        # The parts of the fused projection are taken out here, so that it is not held until z is needed.
        u_BTC, z, g, beta = jax.lax.optimization_barrier(self.project(x_BTD))
        history_BWC = jnp.concatenate([tail_BWC, u_BTC.astype(tail_BWC.dtype)], axis=1)
        q, k, v = self.convolve(history_BWC, x_BTD.shape[1], segment_BT)
        out, s_BMXY, states = gated_delta.prefill(
            s_BMXY, q, k, v, g, beta, live_BT=live_BT, segment_BT=segment_BT, states_at_BA=states_at_BA, **options
        )
        return self.finish(out, z), s_BMXY, history_BWC, states
