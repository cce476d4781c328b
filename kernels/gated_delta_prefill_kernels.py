"""The two launches of `gated_delta_prefill_fused.py`.

``solve`` treats all chunks of 64 tokens side by side: decays, overlaps of keys, and the inverse of each chunk's unit
lower triangular system, by substitution in fp32 within blocks of 16 rows and pairwise merges of blocks. It never sees
values. ``walk`` takes the chunks of a sequence in order. It holds the state transposed, [Y, X]: whatever depends on the
state is then the left operand of a product and stays in registers, and right operands go from memory to the tensor
cores as they lie.

Raw q, k and v are multiplied, exact in bf16; norms, decays and gates are fp32 factors of rows and columns. Rounded to
bf16 are the inverse, the overlaps, and the (fp32) state and writes where they are operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ready_jax.kernels.gated_delta_chunk import BLOCK
from ready_jax.kernels.pallas_triton import WHOLE, barrier, exp2, fma, kernel_call, load, log2, on_hopper, store

CHUNK = 64
BLOCKS = CHUNK // BLOCK
PART = 8
LOG2_E = 1 / math.log(2)
BF16, FP16, FP32 = jnp.bfloat16, jnp.float16, jnp.float32


class Solved(NamedTuple):
    """Of each chunk, what the state's walk needs: ``writes = inverse (v + minus k S)``, outputs =
    ``q_in q S + reading writes``, state after = ``keep S + k^T (k_out writes)``. The writes lack the factor beta,
    which ``reading`` and ``k_out`` have."""

    inverse_BNMCC: jax.Array
    reading_BNMCC: jax.Array
    factors_BNMFC: jax.Array  # of a chunk's rows: minus, q_in, k_out; and keep, the same for all


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=FP32)


def _chunk_of(ref, b, number, length: int, *at):
    """A chunk's rows of ``ref[b]``; zeros behind the end."""
    rows = ref.at[(b, pl.ds(number * CHUNK, CHUNK), *at)]
    if length % CHUNK == 0:
        return load(rows)
    inside = number * CHUNK + jnp.arange(CHUNK) < length
    for size in (x.size for x in at if isinstance(x, pl.Slice)):
        inside = jnp.broadcast_to(inside[:, None], (CHUNK, size))
    return load(rows, mask=inside, other=0.0)


def _substitute(lower, stored: Callable, interpret: bool):
    """``(1 - L)^-1`` of the blocks ``L`` that lie under each other in ``lower`` [CHUNK, BLOCK], zero above their
    diagonals: from ``X = 1 + X L``, column ``c`` of ``X`` is ``e_c + sum_{r > c} X[:, r] L[r, c]``, the last one first.

    A thread holds rows of ``X`` in parts of ``PART`` columns; ``stored(column, row)`` loads from the blocks' transposes
    under each other, and one load brings a thread the factors of a part.
    """
    shape = (BLOCKS, BLOCK, PART)
    block, inner = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 2))
    parts = [jnp.zeros(shape, FP32)] * (BLOCK // PART)
    for c in reversed(range(BLOCK)):
        total = jnp.zeros(shape, FP32)
        for n in range((c + 1) // PART, BLOCK // PART):
            if interpret:  # the same numbers; a load becomes many operations there
                column = lower.reshape(BLOCKS, BLOCK, BLOCK)[:, n * PART : (n + 1) * PART, c]
                factor = jnp.broadcast_to(column[:, None, :], shape)
            else:
                factor = stored(block * BLOCK + c, inner + n * PART)
            total = fma(factor, parts[n], total, interpret=interpret)
        column = jnp.where(jnp.arange(BLOCK)[None, :] == c, 1.0, jnp.sum(total, axis=2))
        parts[c // PART] = jnp.where(inner == c % PART, column[:, :, None], parts[c // PART])
    found = jnp.zeros((BLOCKS, BLOCK, BLOCK // PART, PART), FP32)
    for n, part in enumerate(parts):
        found = jnp.where(jnp.arange(BLOCK // PART)[None, None, :, None] == n, part[:, :, None], found)
    return found.reshape(CHUNK, BLOCK)


def _solve_body(*refs, length: int, packed: bool, interpret: bool):
    """One chunk of one memory. Memories of a key head follow each other: all but the first find it in the cache."""
    q_ref, k_ref, g_ref, beta_ref, *refs = refs
    segment_ref, refs = (refs[0], refs[1:]) if packed else (None, refs)
    inverse_ref, reading_ref, factor_ref, lower_ref = refs
    m, number, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    (keys, width), memories = k_ref.shape[2:], g_ref.shape[2]
    every, place = pl.ds(0, CHUNK), jnp.arange(CHUNK)
    i, j = place[:, None], place[None, :]
    q, k = (_chunk_of(ref, b, number, length, m // (memories // keys), pl.ds(0, width)) for ref in (q_ref, k_ref))
    g, beta = (_chunk_of(ref, b, number, length, m) for ref in (g_ref, beta_ref))
    lower, first, last, together = i >= j, None, None, None
    if segment_ref is not None:
        segment = load(segment_ref.at[b, jnp.minimum(number * CHUNK + place, length - 1)])
        before = load(segment_ref.at[b, jnp.maximum(number * CHUNK - 1, 0)])
        after = load(segment_ref.at[b, jnp.minimum(number * CHUNK + CHUNK, length) - 1])
        lower &= segment[:, None] == segment[None, :]
        first, last, together = segment == before, segment == after, before == after

    def squares(x):
        """Of the rows' norms; on the diagonal of what tensor cores multiply."""
        return jnp.sum(jnp.where(i == j, _dot(x, x.T), 0.0), axis=1) + 1e-6

    def exponential(mask, x):
        """``2^x``, zero outside the mask; None: all of it."""
        return exp2(x if mask is None else jnp.where(mask, x, -jnp.inf), interpret=interpret)

    q_norm, k_squares = jax.lax.rsqrt(squares(q)) * width**-0.5, squares(k)
    k_norm = jax.lax.rsqrt(k_squares)
    decay = jnp.cumsum(g * LOG2_E)
    total = jnp.sum(jnp.where(place == CHUNK - 1, decay, 0.0))
    since, until = exponential(first, decay), exponential(last, total - decay)
    keep = exponential(together, jnp.broadcast_to(total, (CHUNK,)))
    for at, factor in enumerate((-k_norm * since, q_norm * since, k_norm * until * beta, keep)):
        store(factor_ref.at[b, number, m, jnp.int32(at), every], factor)

    # Factors of columns, as exponents: one vector fewer to turn, one product of tiles fewer.
    column = log2(beta, interpret=interpret) - 0.5 * log2(k_squares, interpret=interpret) - decay
    ratio = exponential(lower, decay[:, None] + column[None, :])
    store(reading_ref.at[b, number, m, every, every], (_dot(q, k.T) * ratio * q_norm[:, None]).astype(BF16))
    overlap = _dot(k, k.T) * ratio * -k_norm[:, None]  # its diagonal is finite, and multiplied by zero

    # The diagonal blocks go through memory, columns as rows: a row cannot be cut out of registers.
    own = (place // BLOCK)[:, None, None] == jnp.arange(BLOCKS)[None, :, None]
    blocks = jnp.sum(jnp.where(own, overlap.reshape(CHUNK, BLOCKS, BLOCK), 0.0), axis=1)
    store(lower_ref.at[b, number, m, i // BLOCK * BLOCK + jnp.arange(BLOCK)[None, :], i % BLOCK], blocks)
    barrier(interpret=interpret)
    rows = _substitute(blocks, lambda *at: load(lower_ref.at[b, number, m, *at]), interpret)
    # Blocks to their place by a product: layouts then agree with those of the products below.
    spread = (jnp.arange(BLOCK)[:, None] == place[None, :] % BLOCK).astype(FP16)
    inverse = jnp.where(i // BLOCK == j // BLOCK, _dot(rows.astype(FP16), spread), 0.0)
    overlap, size = overlap.astype(FP16), BLOCK
    while size < CHUNK:
        # [[a, 0], [-x, b]] has the inverse [[a', 0], [b' x a', b']]; entries are of order 1. Elsewhere the products
        # hold what is dropped; between blocks they do not mix.
        half = inverse.astype(FP16)
        merged = _dot(_dot(half, overlap).astype(FP16), half)
        inverse = jnp.where((i // size % 2 == 1) & (j // size == i // size - 1), merged, inverse)
        size *= 2
    store(inverse_ref.at[b, number, m, every, every], inverse.astype(BF16))


def solve(q_BTKX, k_BTKX, g_BTM, beta_BTM, segment_BT=None, *, warps: int = 4, interpret: bool = False) -> Solved:
    (batch, length), memories = q_BTKX.shape[:2], g_BTM.shape[2]
    count = pl.cdiv(length, CHUNK)
    shape = partial(jax.ShapeDtypeStruct, dtype=FP32)
    square = shape((batch, count, memories, CHUNK, CHUNK), dtype=BF16)
    blocks = shape((batch, count, memories, CHUNK, BLOCK))
    operands = (q_BTKX, k_BTKX, g_BTM, beta_BTM) + (() if segment_BT is None else (segment_BT,))
    found = kernel_call(
        partial(_solve_body, length=length, packed=segment_BT is not None, interpret=interpret),
        name="gated_delta_prefill_solve",
        grid=(memories, count, batch),
        out_shape=[square, square, shape((batch, count, memories, 4, CHUNK)), blocks],
        in_specs=[WHOLE] * len(operands),
        out_specs=[WHOLE] * 4,
        num_warps=warps,
        interpret=interpret,
    )(*operands)
    return Solved(*found[:3])


def _walk_body(*refs, logged: bool, block: int):
    """``block`` columns of one memory, through all chunks."""
    s_ref, q_ref, k_ref, v_ref, inverse_ref, reading_ref, factor_ref, *refs = refs
    slot_ref, refs = (refs[0], refs[1:]) if logged else (None, refs)
    out_ref, last_ref, *log = refs
    y, m, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    (_, length, memories, _), (keys, width) = v_ref.shape, k_ref.shape[2:]
    head, x, mine, every = m // (memories // keys), pl.ds(0, width), pl.ds(y * block, block), pl.ds(0, CHUNK)
    row, column = jnp.arange(width)[None, :], (y * block + jnp.arange(block))[:, None]
    count, first = pl.cdiv(length, CHUNK), jnp.int32(0)

    def factor(number, i, at=every):
        return load(factor_ref.at[b, number, m, jnp.int32(i), at])

    def chunk(number, carry):
        s, keep = carry
        following = factor(jnp.minimum(number + 1, count - 1), 3, first)
        q, k = (_chunk_of(ref, b, number, length, head, x) for ref in (q_ref, k_ref))
        v = _chunk_of(v_ref, b, number, length, m, mine)
        inverse, reading = (load(ref.at[b, number, m, every, every]) for ref in (inverse_ref, reading_ref))
        # The compiler fetches ahead what a product's operand depends on. ``minus <= 0 <= q_in``, so that the minimum is
        # ``minus``; ``keep`` is carried instead. The order leaves no more than 255 registers a thread alive.
        operand = s.astype(BF16)
        read = _dot(operand, k.T)
        out = _dot(operand, q.T)
        q_in = factor(number, 1)
        out *= q_in[None, :]
        read = (read * jnp.minimum(factor(number, 0), q_in)[None, :]).astype(BF16)
        writes = _dot(v.T, inverse.T) + _dot(read, inverse.T)
        out += _dot(writes.astype(BF16), reading.T)
        token = number * CHUNK + jnp.arange(CHUNK)[None, :]
        inside = jnp.broadcast_to(token < length, (block, CHUNK)) if length % CHUNK else None
        store(out_ref.at[b, token, m, column], out.astype(out_ref.dtype), mask=inside)
        if slot_ref is not None:
            slot = load(slot_ref.at[b, number])

            @pl.when(slot >= 0)
            def _keep():
                store(log[0].at[b, slot, m, row, column], s)
                store(log[1].at[b, slot, m, jnp.arange(CHUNK)[None, :], column], writes)

        s = s * keep + _dot((writes * factor(number, 2)[None, :]).astype(BF16), k)
        return s, following

    s, _ = jax.lax.fori_loop(0, count, chunk, (load(s_ref.at[b, m, row, column]), factor(first, 3, first)))
    store(last_ref.at[b, m, row, column], s)


def walk(
    s_BMXY, q_BTKX, k_BTKX, v_BTMY, solved: Solved, slot_BN=None, slots: int = 0, *,
    block: int = 64, warps: int | None = None, stages: int = 3, interpret: bool = False,
):  # fmt: skip
    """Outputs in the values' type, the last state; with ``slot_BN`` also, for chunks whose slot is not negative, the
    state before the chunk [B, slots, M, X, Y] and its writes [B, slots, M, C, Y], both fp32.

    Four warps were the fastest on an H200, where they just do not spill registers; elsewhere, or with ``slot_BN``, they
    would."""
    warps = warps or (4 if slot_BN is None and on_hopper() else 8)
    batch, memories, width, values = s_BMXY.shape
    block = min(block, values)
    shape = partial(jax.ShapeDtypeStruct, dtype=FP32)
    out_shape = [shape(v_BTMY.shape, dtype=v_BTMY.dtype), shape(s_BMXY.shape)]
    operands = (s_BMXY, q_BTKX, k_BTKX, v_BTMY, *solved)
    if slot_BN is not None:
        operands += (slot_BN,)
        out_shape += [shape((batch, slots, memories, size, values)) for size in (width, CHUNK)]
    return kernel_call(
        partial(_walk_body, logged=slot_BN is not None, block=block),
        name="gated_delta_prefill_walk",
        grid=(values // block, memories, batch),
        out_shape=out_shape,
        in_specs=[WHOLE] * len(operands),
        out_specs=[WHOLE] * len(out_shape),
        num_warps=warps,
        num_stages=stages,
        interpret=interpret,
    )(*operands)
