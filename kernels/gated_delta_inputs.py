"""What surrounds the recurrence of a Gated DeltaNet layer: split projection, gates, causal convolution, gated norm.

Source of the equations: the Qwen3.5 reference (``modeling_qwen3_5``). beta is evaluated in fp32 (the reference rounds
it to the activation type; paths that differ only there end 2e-3 apart in state).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def split(p_BTI, a_log_M, dt_bias_M, channels: int, width: int):
    """The fused projection [conv inputs | z | b | a | padding]: conv inputs [B, T, C], output gate z [B, T, width],
    fp32 log-decay g <= 0 and beta [B, T, M]."""
    memories = a_log_M.shape[0]
    edges = [channels, channels + width, channels + width + memories, channels + width + 2 * memories]
    u_BTC, z, b_BTM, a_BTM, _ = jnp.split(p_BTI, edges, axis=-1)
    beta_BTM = jax.nn.sigmoid(b_BTM.astype(jnp.float32))
    rate_BTM = jnp.exp(a_log_M.astype(jnp.float32))[None, None]
    bias_BTM = dt_bias_M.astype(jnp.float32)[None, None]
    return u_BTC, z, -rate_BTM * jax.nn.softplus(a_BTM.astype(jnp.float32) + bias_BTM), beta_BTM


def convolve(history_BWC, conv_WC, tokens: int, segment_BT=None):
    """Depthwise causal convolution and SiLU of the last ``tokens`` inputs: [B, tokens, C].

    With ``segment_BT``, taps do not reach into another segment.
    """
    window = conv_WC.shape[0]
    w_WC = conv_WC.astype(jnp.float32)
    total = 0.0
    for i in range(window):
        term = history_BWC[:, i : i + tokens].astype(jnp.float32)
        back = window - 1 - i
        if segment_BT is not None and back:
            earlier = jnp.pad(segment_BT, [(0, 0), (back, 0)], mode="edge")[:, :tokens]
            term = jnp.where((earlier == segment_BT)[..., None], term, 0.0)
        total = total + term * w_WC[i][None, None]
    return jax.nn.silu(total).astype(history_BWC.dtype)


def gated_norm(out_BTMY, z_BTO, norm_Y, eps: float):
    """[B, T, M*Y]: norm per memory, then plain weight, then SiLU gate."""
    out = out_BTMY.astype(z_BTO.dtype)
    x = out.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    normed = x.astype(out.dtype) * norm_Y.astype(out.dtype)[None, None, None]
    gate = jax.nn.silu(z_BTO.astype(jnp.float32)).reshape(out.shape)
    return (normed.astype(jnp.float32) * gate).astype(out.dtype).reshape(z_BTO.shape)
