"""Gluon source of `decode_attention_gluon.py`; imported only where triton is there.

A program is one warp group with a ring of chunks in shared memory, which the memory engine (TMA) fills: it reads ahead
over the borders of its splits, so that memory never waits for sums. The scores of the next chunk are multiplied while
those of the present one become weights.
"""

from __future__ import annotations

try:
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    #: Of chunks and queries in shared memory: what both TMA and tensor cores read.
    SHARED = gl.NVMMASharedLayout(128, 16)
except ImportError:  # the module must import everywhere; `gluon.missing` refuses to use it
    SHARED = None

    def jit(function):
        return function


@jit
def _fetch(tensor, ring, landed, stage, slot, column, wanted, BYTES: gl.constexpr):
    """Ask for the chunk at ``slot``."""
    mbarrier.expect(landed.index(stage), BYTES, pred=wanted)
    tma.async_copy_global_to_shared(tensor, [slot, column], landed.index(stage), ring.index(stage), pred=wanted)


@jit
def _stop(place, SHORT: gl.constexpr, LONG: gl.constexpr, BORDER: gl.constexpr):
    """The slot behind a split."""
    FEW: gl.constexpr = BORDER // SHORT
    return gl.minimum(place + 1, FEW) * SHORT + gl.maximum(place + 1 - FEW, 0) * LONG


@jit
def _seen_only(score, values, broken, slot, begins, ends, S: gl.constexpr, R: gl.constexpr,
               CHUNK: gl.constexpr):  # fmt: skip
    """Scores of a chunk that not every row sees whole; entries of its values that are not finite become zero.

    Where a row sees such an entry its score becomes NaN, and so does the row.
    """
    for i in gl.static_range(CHUNK // 16):
        part = values.slice(i * 16, 16)
        value = part.load(R)
        finite = gl.abs(value.to(gl.float32)) < float("inf")
        broken.slice(i * 16, 16).store(gl.max(gl.where(finite, 0, 1), axis=1))
        part.store(gl.where(finite, value, 0.0))
    fence_async_shared()
    gl.thread_barrier()
    slot = (slot + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, S)))[None, :]
    score = gl.where(broken.load(gl.SliceLayout(0, S))[None, :] > 0, float("nan"), score)
    return gl.where((slot >= begins[:, None]) & (slot < ends[:, None]), score, float("-inf"))


@jit
def _weights(score, top, total, SCALE: gl.constexpr):
    """Weights of a chunk, what the sums before it keep, and the running (top, sum)."""
    new = gl.maximum(top, gl.max(score, axis=1) * SCALE)
    base = gl.where(new == float("-inf"), 0.0, new)
    scale = gl.full(score.shape, SCALE, gl.float32, score.type.layout)
    score, minus = gl.broadcast(score, -base[:, None])
    weight = gl.exp2(gl.fma(score, scale, minus))
    keep = gl.exp2(top - base)
    return weight, keep, new, gl.fma(total, keep, gl.sum(weight, axis=1))


@jit
def _store(tops, sums, outs, at, top, total, out, live, S: gl.constexpr, W: gl.constexpr):
    """The partial sum of one split; ``live`` rows only."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    gl.store(tops + at * 64 + row, top, mask=row < live)
    gl.store(sums + at * 64 + row, total, mask=row < live)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, W))[:, None]
    column = gl.arange(0, 256, layout=gl.SliceLayout(0, W))[None, :]
    gl.store(outs + at * (64 * 256) + (row * 256 + column), out, mask=row < live)


@jit
def splits(
    shares, query, keys, values, begin, end, tops, sums, outs,
    T: gl.constexpr, Q: gl.constexpr, G: gl.constexpr, SLOTS: gl.constexpr, PLACES: gl.constexpr,
    SHORT: gl.constexpr, LONG: gl.constexpr, BORDER: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    SCALE: gl.constexpr,
):  # fmt: skip
    """Program (share of the splits, key head, sequence). A share is its first split, its first chunk and how many, and
    the slots [low, high) that every row sees."""
    GROUP: gl.constexpr = Q // G
    LIVE: gl.constexpr = T * GROUP
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])  # scores
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])  # outputs, wide
    P: gl.constexpr = gl.DotOperandLayout(0, W, 2)  # weights
    R: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])  # rows on their way
    g = gl.program_id(1)
    b = gl.program_id(2)
    shares += (b * gl.num_programs(0) + gl.program_id(0)) * 5
    place = gl.load(shares)
    start = gl.load(shares + 1)
    count = gl.load(shares + 2)
    low = gl.load(shares + 3)
    high = gl.load(shares + 4)
    key_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, 256], keys.layout)
    value_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, 256], values.layout)
    key_landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    broken = gl.allocate_shared_memory(gl.int32, [CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for j in gl.static_range(STAGES):
        mbarrier.init(key_landed.index(j), count=1)
        mbarrier.init(value_landed.index(j), count=1)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, R))[:, None]
    column = gl.arange(0, 256, layout=gl.SliceLayout(0, R))[None, :]
    row_at = query + ((b * T + row // GROUP) * Q + g * GROUP + row % GROUP) * 256 + column
    rows = gl.load(row_at, mask=row + 0 * column < LIVE, other=0.0)
    token = gl.arange(0, 64, layout=gl.SliceLayout(1, S)) // GROUP
    begins = gl.load(begin + b * T + token, mask=token < T, other=0)
    ends = gl.load(end + b * T + token, mask=token < T, other=0)
    if count > 0:
        here = b * SLOTS + start * CHUNK
        for j in gl.static_range(STAGES):
            _fetch(keys, key_ring, key_landed, j, here + j * CHUNK, g * 256, j < count, CHUNK * 512)
            _fetch(values, value_ring, value_landed, j, here + j * CHUNK, g * 256, j < count, CHUNK * 512)
        rows_s = gl.allocate_shared_memory(gl.bfloat16, [64, 256], keys.layout, rows)
        fence_async_shared()
        gl.thread_barrier()
        none = gl.zeros([64, CHUNK], gl.float32, S)
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
        top = total + float("-inf")
        out = gl.zeros([64, 256], gl.float32, W)
        border = _stop(place, SHORT, LONG, BORDER) // CHUNK - start
        at = (b * G + g).to(gl.int64) * PLACES
        stage = 0
        phase = 0
        mbarrier.wait(key_landed.index(0), 0)
        score = warpgroup_mma(rows_s, key_ring.index(0).permute((1, 0)), none, use_acc=False)
        for i in range(count - 1):
            # All threads are done with keys ``i`` and values ``i - 1``: their stages take what comes next.
            gl.thread_barrier()
            before = gl.where(stage == 0, STAGES, stage) - 1
            later = here + (i + STAGES) * CHUNK
            _fetch(keys, key_ring, key_landed, stage, later, g * 256, i + STAGES < count, CHUNK * 512)
            _fetch(values, value_ring, value_landed, before, later - CHUNK, g * 256,
                   (i > 0) & (i + STAGES - 1 < count), CHUNK * 512)  # fmt: skip
            slot = (start + i) * CHUNK
            if (slot < low) | (slot + CHUNK > high):
                mbarrier.wait(value_landed.index(stage), phase)
                score = _seen_only(score, value_ring.index(stage), broken, slot, begins, ends, S, R, CHUNK)
            after = gl.where(stage == STAGES - 1, 0, stage + 1)
            after_phase = gl.where(after == 0, 1 - phase, phase)
            mbarrier.wait(key_landed.index(after), after_phase)
            soon = warpgroup_mma(rows_s, key_ring.index(after).permute((1, 0)), none, use_acc=False, is_async=True)
            weight, keep, top, total = _weights(score, top, total, SCALE)
            out = out * gl.convert_layout(keep, gl.SliceLayout(1, W))[:, None]
            mbarrier.wait(value_landed.index(stage), phase)
            weight = gl.convert_layout(weight.to(gl.bfloat16), P)
            out = warpgroup_mma(weight, value_ring.index(stage), out, is_async=True)
            score, out = warpgroup_mma_wait(0, deps=(soon, out))
            stage = after
            phase = after_phase
            if i + 1 == border:
                _store(tops, sums, outs, at + place, top, total, out, LIVE, S, W)
                total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
                top = total + float("-inf")
                out = gl.zeros([64, 256], gl.float32, W)
                place += 1
                border = _stop(place, SHORT, LONG, BORDER) // CHUNK - start
        slot = (start + count - 1) * CHUNK
        mbarrier.wait(value_landed.index(stage), phase)
        if (slot < low) | (slot + CHUNK > high):
            score = _seen_only(score, value_ring.index(stage), broken, slot, begins, ends, S, R, CHUNK)
        weight, keep, top, total = _weights(score, top, total, SCALE)
        out = out * gl.convert_layout(keep, gl.SliceLayout(1, W))[:, None]
        out = warpgroup_mma(gl.convert_layout(weight.to(gl.bfloat16), P), value_ring.index(stage), out)
        _store(tops, sums, outs, at + place, top, total, out, LIVE, S, W)
