"""Gluon source of `residual_norm_gluon.py`; imported only where triton is there."""

from __future__ import annotations

try:
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
except ImportError:  # the module must import everywhere; `gluon.missing` refuses to use it

    def jit(function):
        return function


from ready_jax.kernels.gated_delta_gluon_source import fetch, meet


@jit
def add(
    x, part, weight, following, out, normed, squares,
    ROWS: gl.constexpr, D: gl.constexpr, S: gl.constexpr, PROGRAMS: gl.constexpr, BLOCK: gl.constexpr,
    PIECES: gl.constexpr, RANGE: gl.constexpr, EPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Programs ``(PROGRAMS row + place)``: a row's are one cluster. Behind them, those that fetch."""
    row = gl.program_id(0) // PROGRAMS
    place = gl.program_id(0) % PROGRAMS
    if row >= ROWS:
        piece = gl.program_id(0) - ROWS * PROGRAMS
        fetch(following + (piece // PIECES) * RANGE + (piece % PIECES) * (1024 * 32 * WARPS), WARPS)
    else:
        N: gl.constexpr = D // PROGRAMS
        i = gl.arange(0, BLOCK, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
        inside = i < N
        at = row * D + place * N + i
        old = gl.load(x + at, mask=inside, other=0.0).to(gl.float32)
        scale = gl.load(weight + place * N + i, mask=inside, other=0.0).to(gl.float32) + 1.0
        total = gl.load(part + at, mask=inside, other=0.0).to(gl.float32)
        for s in gl.static_range(1, S):
            total += gl.load(part + s * ROWS * D + at, mask=inside, other=0.0)
        new = (old + total.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16)
        gl.store(out + at, new, mask=inside)
        new = new.to(gl.float32)
        gl.store(squares + row * PROGRAMS + place, gl.sum(new * new, axis=0))
        each = gl.arange(0, PROGRAMS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        total_square = gl.sum(gl.load(squares + row * PROGRAMS + meet(each, PROGRAMS), cache_modifier=".cg"), axis=0)
        gl.store(normed + at, (new * gl.rsqrt(total_square / D + EPS) * scale).to(gl.bfloat16), mask=inside)
