"""``markov_step`` in two launches; the logits exist in registers only.

The first walks the vocabulary in blocks: ``programs`` programs take every ``programs``-th block each and keep, per
lane, the best logit and its index. The second reduces the programs' winners and looks up the embedding. Odd slots
walk backwards, so that they begin with the weights that the slot before left in the L2 cache.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ready_jax.kernels.pallas_triton import WHOLE, kernel_call, load, store
from ready_jax.kernels.scaled_weights import half

NOWHERE = 2**31 - 1  # the index of a lane that saw no logit
ROWS = 16  # of the tensor cores' smallest product; a batch is padded to it


def why_not(*, batch=1, rank=16, dtype="bfloat16", **_: object) -> str | None:
    if dtype != "bfloat16":
        return f"latents are {dtype}; needs bfloat16, which tensor cores multiply exactly"
    if batch > ROWS:
        return f"batch {batch}; needs at most {ROWS}, the rows of one product"
    if rank < 16 or rank & (rank - 1):
        return f"rank {rank}; needs a power of two, at least 16"
    return None


def _winner(value, index, axis=None):
    """The largest value along an axis and the lowest index that has it."""
    top = jnp.max(value, axis=axis, keepdims=axis is not None)
    index = jnp.min(jnp.where(value == top, index, NOWHERE), axis=axis)
    return (top if axis is None else jnp.max(value, axis=axis)), index


def _scan_body(*refs, slot, sizes, width, programs, backwards, scaled):
    base_ref, latent_ref, w2_ref, *rest = refs
    scale_ref, value_ref, index_ref = rest if scaled else (None, *rest)
    batch, rank, vocab = sizes
    program = pl.program_id(0)
    row, lane = jnp.arange(ROWS)[:, None], jnp.arange(width)
    r = jnp.arange(rank)
    latent = load(latent_ref.at[row, r[None, :]], mask=jnp.broadcast_to(row < batch, (ROWS, rank)), other=0)
    latent = half(latent) if scaled else latent
    trips = pl.cdiv(pl.cdiv(vocab, width), programs)

    def block(n, best):
        value, index = best
        column = (program + (trips - 1 - n if backwards else n) * programs) * width + lane
        inside = column < vocab
        if scaled:  # outputs first: neighbouring terms of a sum are one load
            every = jnp.broadcast_to(inside[:, None], (width, rank))
            weight = load(w2_ref.at[column[:, None], r[None, :]], mask=every, other=0.0).astype(latent.dtype).T
        else:
            every = jnp.broadcast_to(inside[None, :], (rank, width))
            weight = load(w2_ref.at[r[:, None], column[None, :]], mask=every, other=0.0)
        logit = jnp.dot(
            latent, weight, precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        if scale_ref is not None:
            logit = logit * load(scale_ref.at[column], mask=inside, other=0)[None, :]
        seen = (row < batch) & inside[None, :]
        logit += load(base_ref.at[row, slot, column[None, :]], mask=seen, other=-jnp.inf)
        logit = jnp.where(logit != logit, jnp.inf, logit)  # NaN wins, as in jnp.argmax
        here = jnp.where(inside, column, NOWHERE)[None, :]
        better = (logit > value) | ((logit == value) & (here < index))
        return jnp.where(better, logit, value), jnp.where(better, here, index)

    start = jnp.full((ROWS, width), -jnp.inf, jnp.float32), jnp.full((ROWS, width), NOWHERE, jnp.int32)
    value, index = _winner(*jax.lax.fori_loop(0, trips, block, start), axis=1)
    row = jnp.arange(ROWS)
    store(value_ref.at[row, program], value, mask=row < batch)
    store(index_ref.at[row, program], index, mask=row < batch)


def _pick_body(value_ref, index_ref, w1_ref, token_ref, embed_ref, *, programs, rank):
    row = pl.program_id(0)
    p, r = jnp.arange(pl.next_power_of_2(programs)), jnp.arange(rank)
    value = load(value_ref.at[row, p], mask=p < programs, other=-jnp.inf)
    index = load(index_ref.at[row, p], mask=p < programs, other=NOWHERE)
    _, token = _winner(value, index)
    store(token_ref.at[row], token)
    store(embed_ref.at[row, r], load(w1_ref.at[token, r]).astype(embed_ref.dtype))


def step(
    base_BPV, slot, latent_BR, w2, w1_VR, scale_V=None, gather=None, *,
    width: int = 64, programs: int = 264, warps: int = 4, stages: int = 3, interpret=False,
):  # fmt: skip
    """See ``markov_step.step``. ``width``: columns of a block; ``stages``: blocks in flight per program."""
    (batch, rank), vocab = latent_BR.shape, base_BPV.shape[2]
    programs = min(programs, pl.cdiv(vocab, width))
    operands = (base_BPV, latent_BR, w2) + (() if scale_V is None else (scale_V,))
    scan = kernel_call(
        partial(
            _scan_body, slot=slot, sizes=(batch, rank, vocab), width=width, programs=programs,
            backwards=slot % 2 == 1, scaled=scale_V is not None,
        ),
        name="markov_scan", grid=(programs,),
        out_shape=[jax.ShapeDtypeStruct((batch, programs), dtype) for dtype in (jnp.float32, jnp.int32)],
        in_specs=[WHOLE] * len(operands), out_specs=[WHOLE] * 2, num_warps=warps, num_stages=stages,
        interpret=interpret,
    )  # fmt: skip
    winners = scan(*operands)
    if gather is not None:
        winners = gather(*winners)
        programs = winners[0].shape[1]
    pick = kernel_call(
        partial(_pick_body, programs=programs, rank=rank), name="markov_pick", grid=(batch,),
        out_shape=[jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((batch, rank), latent_BR.dtype)],
        in_specs=[WHOLE] * 3, out_specs=[WHOLE] * 2, num_warps=2, interpret=interpret,
    )  # fmt: skip
    return tuple(pick(*winners, w1_VR))
