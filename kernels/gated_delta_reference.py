"""The gated delta rule token by token: the oracle, and the step that decoding commits.

One ``lax.scan`` body scores a row and produces the state after it. Because it is one loop body, a row's rounding
depends neither on its place in the pass nor on the other rows; because commit selects among the states that this
body produced, scoring and commit cannot disagree.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST


class RowStates(NamedTuple):
    """State after each row of one verify pass."""

    s_TBMXY: Float[Array, "T B M X Y"]


def l2_normalise(x):
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last axis in fp32 (the epsilon is on the sum)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def step(s_BMXY, row):
    """Decay, error-correcting write, read: one token of the gated delta rule on ``M`` memories."""
    q_BKX, k_BKX, v_BMY, g_BM, beta_BM = row
    repeats = v_BMY.shape[1] // k_BKX.shape[1]
    q_BMX = jnp.repeat(l2_normalise(q_BKX) * q_BKX.shape[-1] ** -0.5, repeats, axis=1)
    k_BMX = jnp.repeat(l2_normalise(k_BKX), repeats, axis=1)
    s_BMXY = s_BMXY * jnp.exp(g_BM)[..., None, None]
    read_BMY = jnp.einsum("BMXY,BMX->BMY", s_BMXY, k_BMX, precision=HIGHEST)
    u_BMY = (v_BMY.astype(jnp.float32) - read_BMY) * beta_BM[..., None]
    s_BMXY = s_BMXY + k_BMX[..., None] * u_BMY[..., None, :]
    return s_BMXY, jnp.einsum("BMXY,BMX->BMY", s_BMXY, q_BMX, precision=HIGHEST)


def _rows(q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM):
    return tuple(jnp.swapaxes(x, 0, 1) for x in (q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM))


def verify(s_BMXY, q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM):
    def body(s, row):
        s, out_BMY = step(s, row)
        return s, (s, out_BMY)

    _, (s_TBMXY, out_TBMY) = jax.lax.scan(body, s_BMXY, _rows(q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM))
    return jnp.swapaxes(out_TBMY, 0, 1), RowStates(s_TBMXY)


def commit(s_BMXY, pending: RowStates, num_B: Int[Array, "B"]):
    index_TBMXY = jnp.maximum(num_B - 1, 0)[None, :, None, None, None]
    kept_BMXY = jnp.take_along_axis(pending.s_TBMXY, index_TBMXY, axis=0)[0]
    return jnp.where((num_B > 0)[:, None, None, None], kept_BMXY, s_BMXY)


def prefill(s_BMXY, q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM):
    """Output of every token and the last state; for tests and for short inputs."""
    s_BMXY, out_TBMY = jax.lax.scan(step, s_BMXY, _rows(q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM))
    return jnp.swapaxes(out_TBMY, 0, 1), s_BMXY
