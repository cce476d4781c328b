"""Decoding rows of a Gated DeltaNet layer in plain jax.numpy: the scan of `gated_delta_reference` between its inputs
and its gated norm. Commit selects among the states that the scan produced."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ready_jax.kernels import gated_delta_reference
from ready_jax.kernels.gated_delta_inputs import convolve, gated_norm, of_history, split
from ready_jax.kernels.gated_delta_reference import RowStates


class RowLog(NamedTuple):
    """State after each row of one pass, and the convolution's inputs of the pass."""

    states: RowStates
    u_BTC: Float[Array, "B T C"]


def last_inputs(tail_BWC, u_BTC, num_B):
    """The conv inputs that precede token ``num_B`` of a pass, oldest first, as many as ``tail`` has from before it.

    A copy, no arithmetic.
    """
    window = tail_BWC.shape[1]
    index = (num_B[:, None] + jnp.arange(window)[None])[..., None]  # of the tail, then of the pass
    before = jnp.take_along_axis(tail_BWC, jnp.minimum(index, window - 1), axis=1)
    own = jnp.take_along_axis(u_BTC.astype(tail_BWC.dtype), jnp.maximum(index - window, 0), axis=1)
    return jnp.where(index < window, before, own)


def rows(s_BMXY, p_BTI, tail_BWC, conv_WC, a_log_M, dt_bias_M, norm_Y, eps: float, *, keys: int, following=None):
    memories, width, values = s_BMXY.shape[1:]
    u_BTC, z, g, beta = split(p_BTI, a_log_M, dt_bias_M, conv_WC.shape[1], memories * values)
    q, k, v = convolve(of_history(tail_BWC, u_BTC), conv_WC, (keys, width), (memories, values), None)
    out, states = gated_delta_reference.verify(s_BMXY, q, k, v, g, beta)
    return gated_norm(out, z, norm_Y, eps), RowLog(states, u_BTC)


def commit(states, tails, logs, num_B):
    kept = [gated_delta_reference.commit(s, log.states, num_B) for s, log in zip(states, logs, strict=True)]
    return kept, [last_inputs(tail, log.u_BTC, num_B) for tail, log in zip(tails, logs, strict=True)]
