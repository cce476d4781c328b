"""Prefill by the gated delta rule on tensor cores: two launches, and states after prefixes from what they keep.

For bf16 activations; see `gated_delta_prefill_kernels.py` for what is rounded. The gradient is the chunk form's. Chunks
begin at multiples of 64 tokens whatever the length, so that a row's bits depend neither on padding behind it nor on
its neighbours.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ready_jax.kernels import gated_delta_chunk
from ready_jax.kernels.gated_delta_chunk import Chunk
from ready_jax.kernels.gated_delta_prefill_kernels import CHUNK, solve, walk
from ready_jax.kernels.gated_delta_reference import HIGHEST
from ready_jax.kernels.pallas_triton import gpu_only


def why_not_interpreted(
    *, dtype=None, key_dim=None, value_dim=None, chunk=None, precision=None, **_: object
) -> str | None:
    if dtype is not None and dtype != jnp.bfloat16:
        return f"q, k and v are {jnp.dtype(dtype).name}; needs bfloat16, which tensor cores multiply exactly"
    if precision not in (None, HIGHEST):
        return f"precision={precision} was asked for; needs the default: the kernel has its own"
    if chunk not in (None, CHUNK):
        return f"chunk={chunk}; needs {CHUNK}"
    for name, size in (("key", key_dim), ("value", value_dim)):
        if size is not None and (size & (size - 1) or not 16 <= size <= 128):
            return f"{name} width {size}; needs a power of two from 16 to 128"
    return None


def why_not(**facts) -> str | None:
    return gpu_only(**facts) or why_not_interpreted(**facts)


def _slots(states_at_BA, count: int):
    """Distinct chunks that prefixes end in: the slot of each chunk [B, N] (-1: none), and the chunk of each slot
    [B, S] for the ``S`` slots that as many prefixes need at most."""
    slots = min(states_at_BA.shape[1], count)
    chunk_BA = jnp.minimum(states_at_BA // CHUNK, count - 1)
    wanted_BN = jnp.any(chunk_BA[:, :, None] == jnp.arange(count)[None, None], axis=1)
    slot_BN = jnp.where(wanted_BN, jnp.cumsum(wanted_BN, axis=1) - 1, -1).astype(jnp.int32)
    return slot_BN, jnp.argsort(~wanted_BN, axis=1, stable=True)[:, :slots]


def _states_at(states_at_BA, last_BMXY, slot_BN, chunk_BS, before, writes, k_BTKX, g_BTM, beta_BTM, segment_BT):
    """The chunk form's states after prefixes, on the chunks that prefixes end in as if there were no others."""
    length, slots = k_BTKX.shape[1], chunk_BS.shape[1]
    count = slot_BN.shape[1]

    def picked(x, mode="constant"):
        """Slots first: [S, B, C, ...]."""
        x = jnp.pad(x, [(0, 0), (0, count * CHUNK - length)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        x = x.reshape((x.shape[0], count, CHUNK) + x.shape[2:])
        return jnp.moveaxis(jax.vmap(lambda row, at: row[at])(x, chunk_BS), 0, 1)

    def heads_first(x):
        return jnp.moveaxis(picked(x).astype(jnp.float32), 2, 3)

    segment_SBC = picked(segment_BT, "edge")
    before_BS = jax.vmap(lambda row, at: row[at])(segment_BT, jnp.maximum(chunk_BS * CHUNK - 1, 0))
    k, g = heads_first(k_BTKX), heads_first(g_BTM)
    writes = jnp.moveaxis(writes, 0, 1) * heads_first(beta_BTM)[..., None]
    # Neither q, v nor beta is looked at.
    pieces = Chunk(q=k, k=k, v=k, g=g, beta=g, segment=segment_SBC, before=before_BS.T)
    # A prefix of whole chunks ends on a border: behind the last chunk there is the last state.
    border_BA = states_at_BA == count * CHUNK
    slot_BA = jnp.take_along_axis(slot_BN, jnp.minimum(states_at_BA // CHUNK, count - 1), axis=1)
    at_BA = jnp.where(border_BA, slots * CHUNK, slot_BA * CHUNK + states_at_BA % CHUNK)
    boundary = jnp.concatenate([jnp.moveaxis(before, 0, 1), last_BMXY[None]])
    return gated_delta_chunk.states_at(at_BA, boundary, writes, pieces, CHUNK, HIGHEST)


def _forward(arrays, masks, interpret: bool, tuning: dict):
    s_BMXY, q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM = arrays
    live_BT, segment_BT, states_at_BA = masks
    if live_BT is not None:
        q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM = (
            jnp.where(live_BT.reshape(live_BT.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
            for x in (q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM)
        )
    s_BMXY, g_BTM, beta_BTM = (x.astype(jnp.float32) for x in (s_BMXY, g_BTM, beta_BTM))
    solved = solve(q_BTKX, k_BTKX, g_BTM, beta_BTM, segment_BT, interpret=interpret)
    states, operands = None, (s_BMXY, q_BTKX, k_BTKX, v_BTMY, solved)
    if states_at_BA is None:
        out_BTMY, last_BMXY = walk(*operands, interpret=interpret, **tuning)
    else:
        slot_BN, chunk_BS = _slots(states_at_BA, solved.factors_BNMFC.shape[1])
        out_BTMY, last_BMXY, before, writes = walk(*operands, slot_BN, chunk_BS.shape[1], interpret=interpret, **tuning)
        segment_BT = jnp.zeros(k_BTKX.shape[:2], jnp.int32) if segment_BT is None else segment_BT
        states = _states_at(
            states_at_BA, last_BMXY, slot_BN, chunk_BS, before, writes, k_BTKX, g_BTM, beta_BTM, segment_BT
        )  # fmt: skip
    return out_BTMY.astype(jnp.float32), last_BMXY, states


def prefill(
    s_BMXY, q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM, *,
    live_BT=None, segment_BT=None, states_at_BA=None, chunk: int = CHUNK, precision=HIGHEST, at_once: bool = False,
    interpret: bool = False, **tuning,
):  # fmt: skip
    """See :func:`ready_jax.kernels.gated_delta.prefill`; outputs carry the precision of ``v``."""

    def slow(arrays, masks):
        live, segment, at = masks
        return gated_delta_chunk.prefill(
            *arrays, live_BT=live, segment_BT=segment, states_at_BA=at, chunk=chunk, precision=precision,
            at_once=at_once,
        )  # fmt: skip

    call = jax.custom_vjp(partial(_forward, interpret=interpret, tuning=tuning))

    def backward(saved, cotangents):
        arrays, masks = saved
        return *jax.vjp(lambda arrays: slow(arrays, masks), arrays)[1](cotangents), None

    call.defvjp(lambda *args: (_forward(*args, interpret=interpret, tuning=tuning), args), backward)
    return call((s_BMXY, q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM), (live_BT, segment_BT, states_at_BA))
