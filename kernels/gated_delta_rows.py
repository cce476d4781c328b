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
    """State after each row of one pass, and the convolution's inputs: ``W - 1`` from before, then the pass's own."""

    states: RowStates
    history_BWC: Float[Array, "B W C"]


def last_inputs(history_BWC, num_B, window: int):
    """The ``window`` conv inputs that precede token ``num_B`` of a pass, oldest first: a copy, no arithmetic.

    ``history`` holds the ``window`` inputs before the pass, then those of the pass itself.
    """
    index = num_B[:, None] + jnp.arange(window)[None]
    return jnp.take_along_axis(history_BWC, index[..., None], axis=1)


def rows(s_BMXY, p_BTI, tail_BWC, conv_WC, a_log_M, dt_bias_M, norm_Y, eps: float, *, keys: int, following=None):
    memories, width, values = s_BMXY.shape[1:]
    u_BTC, z, g, beta = split(p_BTI, a_log_M, dt_bias_M, conv_WC.shape[1], memories * values)
    history_BWC = jnp.concatenate([tail_BWC, u_BTC.astype(tail_BWC.dtype)], axis=1)
    q, k, v = convolve(history_BWC, conv_WC, p_BTI.shape[1], (keys, width), (memories, values), None)
    out, states = gated_delta_reference.verify(s_BMXY, q, k, v, g, beta)
    return gated_norm(out, z, norm_Y, eps), RowLog(states, history_BWC)


def commit(states, tails, logs, num_B):
    kept = [gated_delta_reference.commit(s, log.states, num_B) for s, log in zip(states, logs, strict=True)]
    return kept, [last_inputs(log.history_BWC, num_B, t.shape[1]) for t, log in zip(tails, logs, strict=True)]
