"""Decoding rows of a Gated DeltaNet layer in plain jax.numpy: the scan of `gated_delta_reference` between its inputs
and its gated norm. Commit selects among the states that the scan produced."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ready_jax.kernels import gated_delta_reference
from ready_jax.kernels.gated_delta_inputs import convolve, gated_norm, split
from ready_jax.kernels.gated_delta_reference import RowStates


class RowLog(NamedTuple):
    """State after each row of one pass, and the convolution's inputs in it."""

    states: RowStates
    inputs_BTC: Float[Array, "B T C"]


def last_inputs(tail_BWC, own_BTC, num_B):
    """The conv inputs that precede token ``num_B`` of a pass, oldest first, as many as the tail has: no arithmetic."""
    window, tokens = tail_BWC.shape[1], own_BTC.shape[1]
    index_BW = num_B[:, None] + jnp.arange(window)[None]  # in the tail, then the pass's own
    old = jnp.take_along_axis(tail_BWC, jnp.minimum(index_BW, window - 1)[..., None], axis=1)
    new = jnp.take_along_axis(own_BTC, jnp.clip(index_BW - window, 0, tokens - 1)[..., None], axis=1)
    return jnp.where((index_BW < window)[..., None], old, new.astype(tail_BWC.dtype))


def rows(s_BMXY, p_BTI, tail_BWC, conv_WC, a_log_M, dt_bias_M, norm_Y, eps: float, *, keys: int, following=None):
    memories, width, values = s_BMXY.shape[1:]
    u_BTC, z, g, beta = split(p_BTI, a_log_M, dt_bias_M, conv_WC.shape[1], memories * values)
    history_BWC = jnp.concatenate([tail_BWC, u_BTC.astype(tail_BWC.dtype)], axis=1)
    mixed_BTC = convolve(history_BWC, conv_WC, p_BTI.shape[1])
    heads = (keys, width), (keys, width), (memories, values)
    parts = jnp.split(mixed_BTC, [keys * width, 2 * keys * width], axis=-1)
    q, k, v = (x.reshape(x.shape[:2] + of) for x, of in zip(parts, heads, strict=True))
    out, states = gated_delta_reference.verify(s_BMXY, q, k, v, g, beta)
    return gated_norm(out, z, norm_Y, eps), RowLog(states, u_BTC)


def commit(states, tails, logs, num_B):
    kept = [gated_delta_reference.commit(s, log.states, num_B) for s, log in zip(states, logs, strict=True)]
    return kept, [last_inputs(t, log.inputs_BTC, num_B) for t, log in zip(tails, logs, strict=True)]
