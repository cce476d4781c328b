"""Gluon source of `gated_delta_gluon.py`; imported only where triton is there.

A state tile has all its keys in one warp: 8 lanes by 4 consecutive keys, four times over, and 4 lanes by 2 columns.
"""

from __future__ import annotations

try:
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
except ImportError:  # the module must import everywhere; `gated_delta_gluon.why_not` refuses to use it

    def jit(function):
        return function


@jit
def _silu(x):
    return x / (1.0 + gl.exp(-x))


@jit
def _convolved(
    p, tail, conv, at, ROW: gl.constexpr, C: gl.constexpr, T: gl.constexpr, N: gl.constexpr, L: gl.constexpr
):
    """[T, N] of channels ``at ..``: causal convolution of window 4, SiLU, rounded to the activation type; fp32."""
    t = gl.arange(0, T, layout=gl.SliceLayout(1, L))[:, None]
    c = at + gl.arange(0, N, layout=gl.SliceLayout(0, L))[None, :]
    total = gl.zeros([T, N], gl.float32, layout=L)
    for i in gl.static_range(4):
        row = t + (i - 3)
        before, _ = gl.broadcast(row < 0, c)
        after, _ = gl.broadcast(row >= 0, c)
        old = gl.load(tail + (row + 3) * C + c, mask=before, other=0.0)
        new = gl.load(p + row * ROW + c, mask=after, other=0.0)
        x = gl.where(row < 0, old, new).to(gl.float32)
        w, x = gl.broadcast(gl.load(conv + i * C + c).to(gl.float32), x)
        total = gl.fma(x, w, total)
    return _silu(total).to(gl.bfloat16).to(gl.float32)


@jit
def _shared_rows(x):
    """A tile in shared memory, of which ``index(t)`` is a row."""
    tile = gl.allocate_shared_memory(x.dtype, x.shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), x)
    return tile._reinterpret(x.dtype, x.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))


@jit
def rows(
    p, tail, conv, rate, bias, norm, s, following, k_log, u_log, decay_log, out,
    ROW: gl.constexpr, C: gl.constexpr, K: gl.constexpr, M: gl.constexpr, X: gl.constexpr, Y: gl.constexpr,
    T: gl.constexpr, WARPS: gl.constexpr, EPS: gl.constexpr, RANGE: gl.constexpr,
):  # fmt: skip
    """Programs ``(head, sequence)``, and behind the heads those that fetch ``following`` meanwhile."""
    if gl.program_id(0) >= M:
        if gl.program_id(1) == 0:
            _fetch(following + (gl.program_id(0) - M) * RANGE, WARPS)
    else:
        _rows(p, tail, conv, rate, bias, norm, s, k_log, u_log, decay_log, out, ROW, C, K, M, X, Y, T, WARPS, EPS)


@jit
def _fetch(start, WARPS: gl.constexpr):
    """Ask for 2 KiB a thread to be brought into the L2 cache."""
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    at = start.to(gl.int64) + thread.to(gl.int64) * 2048
    code: gl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 2048; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)


@jit
def _rows(
    p, tail, conv, rate, bias, norm, s, k_log, u_log, decay_log, out,
    ROW: gl.constexpr, C: gl.constexpr, K: gl.constexpr, M: gl.constexpr, X: gl.constexpr, Y: gl.constexpr,
    T: gl.constexpr, WARPS: gl.constexpr, EPS: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.BlockedLayout([4, 2], [8, 4], [1, WARPS], [1, 0])  # state
    R: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])  # rows
    BY_KEY: gl.constexpr = gl.SliceLayout(1, S)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    m = gl.program_id(0)
    b = gl.program_id(1)
    head = m // (M // K)
    p += b * T * ROW
    tail += b * 3 * C
    x_S = gl.arange(0, X, layout=BY_KEY)
    y_S = gl.arange(0, Y, layout=BY_COLUMN)
    # The state is on its way while the rows are prepared.
    state = gl.load(s + (b * M + m) * X * Y + x_S[:, None] * Y + y_S[None, :])

    t_R = gl.arange(0, T, layout=gl.SliceLayout(1, R))
    x_R = gl.arange(0, X, layout=gl.SliceLayout(0, R))
    q = _convolved(p, tail, conv, head * X, ROW, C, T, X, R)
    k = _convolved(p, tail, conv, (K + head) * X, ROW, C, T, X, R)
    v = _convolved(p, tail, conv, 2 * K * X + m * Y, ROW, C, T, Y, R)
    gates: gl.constexpr = C + M * Y
    strength = gl.load(p + t_R * ROW + gates + m).to(gl.float32)
    a = gl.load(p + t_R * ROW + gates + M + m).to(gl.float32) + gl.load(bias + m).to(gl.float32)
    z = gl.load(p + t_R[:, None] * ROW + C + m * Y + x_R[None, :])
    q = q * gl.rsqrt(gl.sum(q * q, axis=1) + 1e-6)[:, None] * (X**-0.5)
    k = k * gl.rsqrt(gl.sum(k * k, axis=1) + 1e-6)[:, None]
    if m % (M // K) == 0:
        gl.store(k_log + ((b * T + t_R[:, None]) * K + head) * X + x_R[None, :], k)
    softplus = gl.maximum(a, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(a)))
    decay = gl.exp(-gl.exp(gl.load(rate + m).to(gl.float32)) * softplus)
    beta = 1.0 / (1.0 + gl.exp(-strength))
    gl.store(decay_log + (b * T + t_R) * M + m, decay)
    overlap = gl.sum(q * k, axis=1)
    zero = gl.zeros([T, Y], gl.float32, layout=R)
    q_s = _shared_rows(q)
    k_s = _shared_rows(k)
    v_s = _shared_rows(v)
    decay_s = _shared_rows(zero + decay[:, None])
    beta_s = _shared_rows(zero + beta[:, None])
    overlap_s = _shared_rows(zero + overlap[:, None])
    o_tile = gl.allocate_shared_memory(gl.float32, [T, Y], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    o_s = o_tile._reinterpret(gl.float32, [T, Y], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.thread_barrier()

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
    o = o_tile.load(R).to(gl.bfloat16).to(gl.float32)
    o = (o * gl.rsqrt(gl.sum(o * o, axis=1) * (1.0 / Y) + EPS)[:, None]).to(gl.bfloat16)
    o = (o * gl.load(norm + x_R).to(gl.bfloat16)[None, :]).to(gl.float32)
    gl.store(out + (b * T + t_R[:, None]) * M * Y + m * Y + x_R[None, :], (o * _silu(z.to(gl.float32))).to(gl.bfloat16))


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
    if n > 0:
        if part < M * (Y // BLOCK):
            m = part // (Y // BLOCK)
            x = gl.arange(0, X, layout=BY_KEY)
            y = (part % (Y // BLOCK)) * BLOCK + gl.arange(0, BLOCK, layout=BY_COLUMN)
            here = s_l + (b * M + m) * X * Y + x[:, None] * Y + y[None, :]
            state = gl.load(here)
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
            gl.store(here, state)
        else:
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
