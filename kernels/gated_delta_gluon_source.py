"""Gluon source of `gated_delta_gluon.py`; imported only where triton is there.

A state tile has all its keys in one warp: 8 lanes by 4 consecutive keys, four times over, and 4 lanes by 2 columns.
"""

from __future__ import annotations

import contextlib

from ready_jax.kernels.gluon import jit

with contextlib.suppress(
    ImportError
):  # the module must import everywhere; `gated_delta_gluon.why_not` refuses to use it
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy


@jit
def _silu(x):
    return x / (1.0 + gl.exp(-x))


@jit
def _tap(p, tail, conv, at, i: gl.constexpr, ROW: gl.constexpr, C: gl.constexpr, T: gl.constexpr, N: gl.constexpr,
         L: gl.constexpr):  # fmt: skip
    """Inputs [T, N] and weights [1, N] of tap ``i`` of the causal convolution, channels ``at ..``."""
    row = gl.arange(0, T, layout=gl.SliceLayout(1, L))[:, None] + (i - 3)
    c = at + gl.arange(0, N, layout=gl.SliceLayout(0, L))[None, :]
    here = gl.where(row < 0, tail + (row + 3) * C + c, p + row * ROW + c)
    return gl.load(here), gl.load(conv + i * C + c)


@jit
def _taps(p, tail, conv, at, ROW: gl.constexpr, C: gl.constexpr, T: gl.constexpr, N: gl.constexpr, L: gl.constexpr):
    x0, w0 = _tap(p, tail, conv, at, 0, ROW, C, T, N, L)
    x1, w1 = _tap(p, tail, conv, at, 1, ROW, C, T, N, L)
    x2, w2 = _tap(p, tail, conv, at, 2, ROW, C, T, N, L)
    x3, w3 = _tap(p, tail, conv, at, 3, ROW, C, T, N, L)
    return x0, x1, x2, x3, w0, w1, w2, w3


@jit
def _times(x, w, total):
    w, x = gl.broadcast(w.to(gl.float32), x.to(gl.float32))
    return gl.fma(x, w, total)


@jit
def _convolved(x0, x1, x2, x3, w0, w1, w2, w3):
    """Convolution of window 4, SiLU, rounded to the activation type; fp32."""
    w, x = gl.broadcast(w0.to(gl.float32), x0.to(gl.float32))
    total = _times(x3, w3, _times(x2, w2, _times(x1, w1, x * w)))
    return _silu(total).to(gl.bfloat16).to(gl.float32)


@jit
def _shared_rows(x):
    """A tile in shared memory, of which ``index(t)`` is a row."""
    tile = gl.allocate_shared_memory(x.dtype, x.shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), x)
    return tile._reinterpret(x.dtype, x.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))


@jit
def _meet(x):
    """``x``, once all threads of the cluster's two programs are here; what they stored before is then visible.

    Every thread must hold one entry of ``x``. The loads behind must depend on the result: only that keeps the compiler
    from lifting them over it. The comment tells `gluon.py` how many programs a cluster has.
    """
    gl.thread_barrier()
    code: gl.constexpr = (
        "/* cluster of 2 */ barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; "
        "mov.b32 $0, $1;"
    )
    return gl.inline_asm_elementwise(code, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@jit
def _fetch(start, WARPS: gl.constexpr):
    """Ask for 2 KiB a thread to be brought into the L2 cache."""
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    at = start + thread.to(gl.int64) * 2048
    code: gl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 2048; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)


@jit
def rows(
    p, tail, conv, rate, bias, norm, s, following, k_log, u_log, decay_log, out, squares,
    ROW: gl.constexpr, C: gl.constexpr, K: gl.constexpr, M: gl.constexpr, X: gl.constexpr, Y: gl.constexpr,
    T: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr, EPS: gl.constexpr, RANGE: gl.constexpr,
):  # fmt: skip
    """Programs ``(PARTS memory + part, sequence)``: a memory's parts are one cluster. Behind them, those that fetch."""
    m = gl.program_id(0) // PARTS
    part = gl.program_id(0) % PARTS
    if m >= M:
        if gl.program_id(1) == 0:
            start = following.to(gl.int64) + (m - M).to(gl.int64) * RANGE + part * (2048 * 32 * WARPS)
            _fetch(start, WARPS)
    else:
        _rows(p, tail, conv, rate, bias, norm, s, k_log, u_log, decay_log, out, squares, m, part,
              ROW, C, K, M, X, Y, T, PARTS, WARPS, EPS)  # fmt: skip


@jit
def _rows(
    p, tail, conv, rate, bias, norm, s, k_log, u_log, decay_log, out, squares, m, part,
    ROW: gl.constexpr, C: gl.constexpr, K: gl.constexpr, M: gl.constexpr, X: gl.constexpr, Y: gl.constexpr,
    T: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr, EPS: gl.constexpr,
):  # fmt: skip
    """A part has ``N = Y / PARTS`` columns of the state; only the norm of the outputs needs the other part."""
    N: gl.constexpr = Y // PARTS
    S: gl.constexpr = gl.BlockedLayout([4, 2], [8, 4], [1, WARPS], [1, 0])  # state
    R: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])  # rows of keys
    V: gl.constexpr = gl.BlockedLayout([1, N // 32], [1, 32], [WARPS, 1], [1, 0])  # rows of values
    F: gl.constexpr = gl.BlockedLayout([1, 4], [128 // N, N // 4], [WARPS, 1], [1, 0])  # state on its way
    BY_KEY: gl.constexpr = gl.SliceLayout(1, S)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    b = gl.program_id(1)
    head = m // (M // K)
    p += b * T * ROW
    tail += b * 3 * C
    # The state is on its way while the rows are prepared. Swizzled: a warp reads 8 keys of 32 bytes each at once.
    s_tile = gl.allocate_shared_memory(gl.float32, [X, N], gl.SwizzledSharedLayout(8, 4, 4, [1, 0]))
    x_F = gl.arange(0, X, layout=gl.SliceLayout(1, F))[:, None]
    y_F = gl.arange(0, N, layout=gl.SliceLayout(0, F))[None, :]
    async_copy.async_copy_global_to_shared(s_tile, s + (b * M + m) * X * Y + x_F * Y + part * N + y_F)
    async_copy.commit_group()

    t_R = gl.arange(0, T, layout=gl.SliceLayout(1, R))
    x_R = gl.arange(0, X, layout=gl.SliceLayout(0, R))
    t_V = gl.arange(0, T, layout=gl.SliceLayout(1, V))
    y_V = part * N + gl.arange(0, N, layout=gl.SliceLayout(0, V))
    # All loads first, so that they wait for memory together.
    q0, q1, q2, q3, qa, qb, qc, qd = _taps(p, tail, conv, head * X, ROW, C, T, X, R)
    k0, k1, k2, k3, ka, kb, kc, kd = _taps(p, tail, conv, (K + head) * X, ROW, C, T, X, R)
    v0, v1, v2, v3, va, vb, vc, vd = _taps(p, tail, conv, 2 * K * X + m * Y + part * N, ROW, C, T, N, V)
    gates: gl.constexpr = C + M * Y
    strength = gl.load(p + t_V * ROW + gates + m).to(gl.float32)
    a = gl.load(p + t_V * ROW + gates + M + m).to(gl.float32) + gl.load(bias + m).to(gl.float32)
    z = gl.load(p + t_V[:, None] * ROW + C + m * Y + y_V[None, :])
    scale = gl.load(norm + y_V)
    speed = gl.load(rate + m).to(gl.float32)
    q = _convolved(q0, q1, q2, q3, qa, qb, qc, qd)
    k = _convolved(k0, k1, k2, k3, ka, kb, kc, kd)
    v = _convolved(v0, v1, v2, v3, va, vb, vc, vd)
    q = q * gl.rsqrt(gl.sum(q * q, axis=1) + 1e-6)[:, None] * (X**-0.5)
    k = k * gl.rsqrt(gl.sum(k * k, axis=1) + 1e-6)[:, None]
    if (m % (M // K) == 0) & (part == 0):
        gl.store(k_log + ((b * T + t_R[:, None]) * K + head) * X + x_R[None, :], k)
    softplus = gl.maximum(a, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(a)))
    decay = gl.exp(-gl.exp(speed) * softplus)
    beta = 1.0 / (1.0 + gl.exp(-strength))
    gl.store(decay_log + (b * T + t_V) * M + m, decay)
    overlap = gl.convert_layout(gl.sum(q * k, axis=1), gl.SliceLayout(1, V))
    zero = gl.zeros([T, N], gl.float32, layout=V)
    q_s = _shared_rows(q)
    k_s = _shared_rows(k)
    v_s = _shared_rows(v)
    decay_s = _shared_rows(zero + decay[:, None])
    beta_s = _shared_rows(zero + beta[:, None])
    overlap_s = _shared_rows(zero + overlap[:, None])
    o_tile = gl.allocate_shared_memory(gl.float32, [T, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    o_s = o_tile._reinterpret(gl.float32, [T, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    async_copy.wait_group(0)
    gl.thread_barrier()
    state = s_tile.load(S)
    y_S = part * N + gl.arange(0, N, layout=BY_COLUMN)

    for t in range(T):  # not unrolled: code that runs once waits for its instructions
        key = k_s.index(t).load(BY_KEY)[:, None]
        query = q_s.index(t).load(BY_KEY)[:, None]
        state = state * decay_s.index(t).load(BY_COLUMN)[None, :]
        read = gl.sum(state * key, axis=0)
        seen = gl.sum(state * query, axis=0)
        u = (v_s.index(t).load(BY_COLUMN) - read) * beta_s.index(t).load(BY_COLUMN)
        o_s.index(t).store(gl.fma(overlap_s.index(t).load(BY_COLUMN), u, seen))  # S^T q after the write
        gl.store(u_log + ((b * T + t) * M + m) * Y + y_S, u)
        key, write = gl.broadcast(key, u[None, :])
        state = gl.fma(key, write, state)

    gl.thread_barrier()
    o = o_tile.load(V).to(gl.bfloat16).to(gl.float32)
    total = gl.sum(o * o, axis=1)
    if PARTS == 2:
        mine = squares + ((b * M + m) * 2 + part) * T
        gl.store(mine + t_V, total)
        total += gl.load(mine + (1 - 2 * part) * T + _meet(t_V), cache_modifier=".cg")
    o = (o * gl.rsqrt(total * (1.0 / Y) + EPS)[:, None]).to(gl.bfloat16)
    o = (o * scale.to(gl.bfloat16)[None, :]).to(gl.float32)
    gl.store(out + (b * T + t_V[:, None]) * M * Y + m * Y + y_V[None, :], (o * _silu(z.to(gl.float32))).to(gl.bfloat16))


@jit
def commit(
    num, k, u, decay, p, s, tail,
    LAYERS: gl.constexpr, ROW: gl.constexpr, C: gl.constexpr, K: gl.constexpr, M: gl.constexpr, X: gl.constexpr,
    Y: gl.constexpr, T: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.BlockedLayout([4, 4], [8, 4], [2, WARPS // 2], [1, 0])
    R: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    BY_KEY: gl.constexpr = gl.SliceLayout(1, S)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    part = gl.program_id(0)
    layer = gl.program_id(1)
    b = gl.program_id(2)
    n = gl.load(num + b)
    k_l = k[0]
    u_l = u[0]
    decay_l = decay[0]
    p_l = p[0]
    s_l = s[0]
    tail_l = tail[0]
    for i in gl.static_range(1, LAYERS):
        if layer == i:
            k_l = k[i]
            u_l = u[i]
            decay_l = decay[i]
            p_l = p[i]
            s_l = s[i]
            tail_l = tail[i]
    if part < M * (Y // BLOCK):
        m = part // (Y // BLOCK)
        x = gl.arange(0, X, layout=BY_KEY)
        y = (part % (Y // BLOCK)) * BLOCK + gl.arange(0, BLOCK, layout=BY_COLUMN)
        here = s_l + (b * M + m) * X * Y + x[:, None] * Y + y[None, :]
        state = gl.load(here)  # before n is known: one wait for memory, not two
        t = gl.arange(0, T, layout=gl.SliceLayout(1, R))[:, None]
        column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, R))[None, :]
        key_row = gl.arange(0, X, layout=gl.SliceLayout(0, R))[None, :]
        k_s = _shared_rows(gl.load(k_l + ((b * T + t) * K + m // (M // K)) * X + key_row))
        u_s = _shared_rows(gl.load(u_l + ((b * T + t) * M + m) * Y + (part % (Y // BLOCK)) * BLOCK + column))
        decay_s = _shared_rows(gl.load(decay_l + (b * T + t) * M + m + 0 * column))
        gl.thread_barrier()
        for row in range(n):
            key, write = gl.broadcast(k_s.index(row).load(BY_KEY)[:, None], u_s.index(row).load(BY_COLUMN)[None, :])
            state = gl.fma(key, write, state * decay_s.index(row).load(BY_COLUMN)[None, :])
        if n > 0:
            gl.store(here, state)
    elif n > 0:
        # The convolution's last three inputs: rows n .. n + 2 of [tail ; rows], all read before any is written.
        L: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
        c = (part - M * (Y // BLOCK)) * 1024 + gl.arange(0, 1024, layout=L)
        inside = c < C
        old_l = tail_l + b * 3 * C + c
        new_l = p_l + b * T * ROW + c
        first = gl.where(n < 3, gl.load(old_l + n * C, mask=inside & (n < 3), other=0.0),
                         gl.load(new_l + (n - 3) * ROW, mask=inside & (n >= 3), other=0.0))  # fmt: skip
        second = gl.where(n < 2, gl.load(old_l + (n + 1) * C, mask=inside & (n < 2), other=0.0),
                          gl.load(new_l + (n - 2) * ROW, mask=inside & (n >= 2), other=0.0))  # fmt: skip
        third = gl.load(new_l + (n - 1) * ROW, mask=inside)
        gl.store(old_l, first, mask=inside)
        gl.store(old_l + C, second, mask=inside)
        gl.store(old_l + 2 * C, third, mask=inside)
