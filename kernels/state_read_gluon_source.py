"""Gluon source of `state_read_gluon.py`; imported only where triton is there.

A state tile has all its keys in one warp, as in `gated_delta_gluon_source.py`: a product with a vector over the keys
is three shuffles.
"""

from __future__ import annotations

import contextlib

from ready_jax.kernels.gluon import jit

with contextlib.suppress(ImportError):  # the module must import everywhere; `gluon.missing` refuses to use it
    from triton.experimental.gluon import language as gl


@jit
def _shared_columns(w, N: gl.constexpr, J: gl.constexpr, WARPS: gl.constexpr):
    """``w`` [N, J] in shared memory, fp32, of which ``index(j)`` is a column."""
    L: gl.constexpr = gl.BlockedLayout([1, J], [32, 1], [WARPS, 1], [1, 0])
    n = gl.arange(0, N, layout=gl.SliceLayout(1, L))
    j = gl.arange(0, J, layout=gl.SliceLayout(0, L))
    columns = gl.permute(gl.load(w + n[:, None] * J + j[None, :]).to(gl.float32), (1, 0))
    tile = gl.allocate_shared_memory(gl.float32, [J, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), columns)
    return tile._reinterpret(gl.float32, [J, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@jit
def prepare(
    u, v, states, a, scale,
    LAYERS: gl.constexpr, M: gl.constexpr, X: gl.constexpr, Y: gl.constexpr, J: gl.constexpr, ZU: gl.constexpr,
    ZV: gl.constexpr, FACTOR: gl.constexpr, EPS: gl.constexpr, LOG: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Program (pair, sequence)."""
    S: gl.constexpr = gl.BlockedLayout([4, 2], [8, 4], [1, WARPS], [1, 0])
    R: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    Z: gl.constexpr = LAYERS * M
    z = gl.program_id(0)
    b = gl.program_id(1)
    s = states[0]
    for i in gl.static_range(1, LAYERS):
        if z // M == i:
            s = states[i]
    x = gl.arange(0, X, layout=gl.SliceLayout(1, S))
    y = gl.arange(0, Y, layout=gl.SliceLayout(0, S))
    state = gl.load(s + (b * M + z % M) * X * Y + x[:, None] * Y + y[None, :])
    u_s = _shared_columns(u + (z // (Z // ZU)) * X * J, X, J, WARPS)
    v_s = _shared_columns(v + (z // (Z // ZV)) * Y * J, Y, J, WARPS)
    gl.thread_barrier()
    rho = gl.sqrt(gl.sum(gl.sum(state * state, axis=0), axis=0) / (X * Y) + EPS)
    t_tile = gl.allocate_shared_memory(gl.float32, [J, Y], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    t_s = t_tile._reinterpret(gl.float32, [J, Y], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(J):
        t_s.index(i).store(gl.sum(state * u_s.index(i).load(gl.SliceLayout(1, S))[:, None], axis=0))
    gl.thread_barrier()
    t = t_tile.load(R)
    row = gl.arange(0, J, layout=gl.SliceLayout(1, R))
    for j in gl.static_range(J):
        entry = gl.sum(t * v_s.index(j).load(gl.SliceLayout(0, R))[None, :], axis=1) * (FACTOR / rho)
        gl.store(a + ((b * Z + z) * J + j) * J + row, entry)
    gl.store(scale + b * Z + z, gl.log(rho) if LOG else rho)
