"""Gluon source of `coded_product_gluon.py`; imported only where triton is there.

A program has 16 columns; its warps take turns at blocks of 64 terms, and every thread multiplies what it loads: words
become bf16 in registers, 11 instructions for eight weights, in the places where tensor cores want them.
"""

from __future__ import annotations

try:
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
except ImportError:  # the module must import everywhere; `gluon.missing` refuses to use it

    def jit(function):
        return function

    gl = None


def _decoded(x: str, low: str, high: str, table: tuple[str, str], out: tuple[str, str, str, str]) -> str:
    """PTX: eight weights from a word of codes and their lower bytes, as the four registers of a 16 x 16 operand."""
    return f"""
        and.b32 m, {x}, 0x77777777; shr.u32 s, m, 16; shl.b32 n, {x}, 4;
        prmt.b32 t, {table[0]}, {table[1]}, m; lop3.b32 t, {x}, 0x80808080, t, 0xEA;
        prmt.b32 u, {table[0]}, {table[1]}, s; lop3.b32 u, n, 0x80808080, u, 0xEA;
        prmt.b32 {out[0]}, {low}, t, 0x5140; prmt.b32 {out[1]}, {low}, t, 0x7362;
        prmt.b32 {out[2]}, {high}, u, 0x5140; prmt.b32 {out[3]}, {high}, u, 0x7362;"""


def _block(tiles: int) -> str:
    """PTX of one thread's part of a block: 32 weights with 16 terms of every tile of eight rows."""
    sums, words = 4 * tiles, 12
    codes = 4 * tiles + 8
    rows, table = sums + words, sums + words + 8 * tiles
    code = [".reg .b32 m, n, s, t, u, a0, a1, a2, a3; .reg .f32 " + ", ".join(f"c{i}" for i in range(sums)) + ";"]
    code += [f"mov.f32 c{i}, ${table + 4 + i};" for i in range(sums)]
    for f in range(4):
        low, high = f"${sums + 2 * f}", f"${sums + 2 * f + 1}"
        code.append(_decoded(f"${codes + f}", low, high, (f"${table}", f"${table + 1}"), ("a0", "a1", "a2", "a3")))
        for r in range(tiles):
            c = "{" + ", ".join(f"c{4 * r + i}" for i in range(4)) + "}"
            b = f"{{${rows + 8 * r + 2 * f}, ${rows + 8 * r + 2 * f + 1}}}"
            code.append(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c}, {{a0, a1, a2, a3}}, {b}, {c};")
    code += [f"mov.f32 ${i}, c{i};" for i in range(sums)]
    return "{" + "\n".join(code) + "}"


def _constraints(tiles: int) -> str:
    return ",".join(["=f"] * 4 * tiles + ["r"] * (12 + 8 * tiles + 4) + ["f"] * 4 * tiles)


def _whole() -> str:
    """PTX of one thread's part of a block, decoded: 16 terms each of columns r and 8 + r, as eight words."""
    code = [
        _decoded(f"${24 + f}", f"${16 + 2 * f}", f"${17 + 2 * f}", ("$28", "$29"),
                 (f"${2 * f}", f"${8 + 2 * f}", f"${2 * f + 1}", f"${9 + 2 * f}"))
        for f in range(4)
    ]  # fmt: skip
    return "{.reg .b32 m, n, s, t, u;" + "".join(code) + "}"


if gl is not None:
    BLOCK1, BLOCK2, BLOCK4 = (gl.constexpr(_block(n)) for n in (1, 2, 4))
    DECODED, DECODED_CONSTRAINTS = gl.constexpr(_whole()), gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 16))
    CONSTRAINTS1, CONSTRAINTS2, CONSTRAINTS4 = (gl.constexpr(_constraints(n)) for n in (1, 2, 4))


@jit
def _words(at):
    """Three words of every thread, past the first-level cache: each is read once."""
    return (
        gl.load(at, cache_modifier=".cg"),
        gl.load(at + 128, cache_modifier=".cg"),
        gl.load(at + 256, cache_modifier=".cg"),
    )


@jit
def _terms(x_at, live, ROW: gl.constexpr, tile: gl.constexpr):
    """A thread's 16 terms of its row in a tile of eight, as eight words; zeros past the last row."""
    at = x_at + tile * 8 * ROW
    return gl.load(at, mask=live, other=0), gl.load(at + 4, mask=live, other=0)


@jit
def _multiplied(a, b, c, x_at, table, sums, lane, ROW: gl.constexpr, T: gl.constexpr, TILES: gl.constexpr):
    """``sums`` plus a block of 64 terms, for every tile of eight rows."""
    x0, x1 = _terms(x_at, lane // 4 < T, ROW, 0)
    if TILES == 1:
        one = gl.inline_asm_elementwise(
            BLOCK1, CONSTRAINTS1, [a, b, c, x0, x1, table, sums[0]], dtype=gl.float32, is_pure=True, pack=4
        )
        found = (one,)
    else:
        y0, y1 = _terms(x_at, lane // 4 + 8 < T, ROW, 1)
        if TILES == 2:
            found = gl.inline_asm_elementwise(
                BLOCK2, CONSTRAINTS2, [a, b, c, x0, x1, y0, y1, table, sums[0], sums[1]],
                dtype=(gl.float32, gl.float32), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            z0, z1 = _terms(x_at, lane // 4 + 16 < T, ROW, 2)
            w0, w1 = _terms(x_at, lane // 4 + 24 < T, ROW, 3)
            found = gl.inline_asm_elementwise(
                BLOCK4, CONSTRAINTS4,
                [a, b, c, x0, x1, y0, y1, z0, z1, w0, w1, table, sums[0], sums[1], sums[2], sums[3]],
                dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=4,
            )  # fmt: skip
    return found


@jit
def product(
    x, words, table, rare, y,
    K: gl.constexpr, N: gl.constexpr, T: gl.constexpr, E: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Program (16 columns): ``y`` [T, N] of rows [T, K]."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    P: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    STEPS: gl.constexpr = K // 64 // WARPS
    ROW: gl.constexpr = K // 2
    g = gl.program_id(0)
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, L))[:, None]
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :]
    lane = thread % 32 + 0 * j
    at = words + g.to(gl.int64) * (K // 64 * 384) + (thread // 32 * 384 + lane * 4 + j)
    x_words = x.to(gl.pointer_type(gl.int32), bitcast=True)
    x_at = x_words + (lane // 4 * ROW + thread // 32 * 32 + lane % 4 * 8 + j)
    entries = gl.load(table + g * 4 + j + 0 * thread)
    zero = gl.zeros([32 * WARPS, 4], gl.float32, L)
    sums = (zero,)
    if TILES == 2:
        sums = (zero, zero)
    if TILES == 4:
        sums = (zero, zero, zero, zero)
    a, b, c = _words(at)
    if STEPS > 1:
        a1, b1, c1 = _words(at + WARPS * 384)
        for i in range(STEPS - 2):
            a2, b2, c2 = _words(at + (i + 2) * (WARPS * 384))
            sums = _multiplied(a, b, c, x_at + i * (WARPS * 32), entries, sums, lane, ROW, T, TILES)
            a = a1
            b = b1
            c = c1
            a1 = a2
            b1 = b2
            c1 = c2
        sums = _multiplied(a, b, c, x_at + (STEPS - 2) * (WARPS * 32), entries, sums, lane, ROW, T, TILES)
        a = a1
        b = b1
        c = c1
    sums = _multiplied(a, b, c, x_at + (STEPS - 1) * (WARPS * 32), entries, sums, lane, ROW, T, TILES)
    # entry p of a warp's sums: column n, row t of a tile
    p = gl.arange(0, 128, layout=gl.SliceLayout(0, P))
    n = p // 16 + 8 * (p % 4 // 2)
    t = 2 * (p // 4 % 4) + p % 2
    e = gl.arange(0, WARPS, layout=gl.SliceLayout(1, P))
    shared = gl.allocate_shared_memory(gl.float32, [32 * WARPS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    by_warp = shared._reinterpret(gl.float32, [WARPS, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for r in gl.static_range(TILES):
        shared.store(sums[r])
        gl.thread_barrier()
        total = by_warp.load(P)
        live = t + 8 * r < T
        for i in gl.static_range(E // WARPS):
            entry = gl.load(rare + (g * E + i * WARPS + e[:, None]) * 16 + n[None, :])
            weight = (entry << 16).to(gl.float32, bitcast=True)
            term = gl.load(
                x + (t + 8 * r)[None, :] * K + ((entry >> 16) & 0xFFFF), mask=live[None, :] & (entry != 0), other=0.0
            )
            total += weight * term.to(gl.float32)
        gl.store(y + (t + 8 * r) * N + g * 16 + n, gl.sum(total, axis=0).to(y.dtype.element_ty), mask=live)
        gl.thread_barrier()


@jit
def decode(words, table, rare, out, K: gl.constexpr, E: gl.constexpr, WARPS: gl.constexpr):
    """Program (16 columns): ``out`` [N, K]."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    R: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    g = gl.program_id(0)
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, L))[:, None]
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :]
    lane = thread % 32
    at = words + g.to(gl.int64) * (K // 64 * 384) + (thread // 32 * 384 + lane * 4 + j)
    entries = gl.load(table + g * 4 + j + 0 * thread)
    first = out + g.to(gl.int64) * (16 * K)
    row = first.to(gl.pointer_type(gl.int32), bitcast=True) + (
        lane // 4 * (K // 2) + thread // 32 * 32 + lane % 4 * 8 + j
    )
    for i in range(K // 64 // WARPS):
        a, b, c = _words(at + i * (WARPS * 384))
        p, q, r, s = gl.inline_asm_elementwise(
            DECODED, DECODED_CONSTRAINTS, [a, b, c, entries], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True, pack=4,
        )  # fmt: skip
        here = row + i * (WARPS * 32)
        gl.store(here, p)
        gl.store(here + 4, q)
        gl.store(here + 4 * K, r)
        gl.store(here + 4 * K + 4, s)
    gl.thread_barrier()
    e = gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(1, R))[:, None]
    n = gl.arange(0, 16, layout=gl.SliceLayout(0, R))[None, :]
    for i in range((E + 2 * WARPS - 1) // (2 * WARPS)):
        entry = gl.load(rare + (g * E + i * 2 * WARPS + e) * 16 + n, mask=i * 2 * WARPS + e < E, other=0)
        gl.store(
            first + n * K + ((entry >> 16) & 0xFFFF), entry.to(gl.int16).to(gl.bfloat16, bitcast=True), mask=entry != 0
        )
