"""Gluon source of `fragment_product_gluon.py`; imported only where triton is there.

A program has 16 columns; its warps take turns at blocks of 64 terms, and every thread multiplies what it loads: words
become 16-bit weights in its registers, in the places where tensor cores want them. Nothing but sums is shared.
"""

from __future__ import annotations

import contextlib

from ready_jax.kernels.gluon import jit

with contextlib.suppress(ImportError):  # the module must import everywhere; `gluon.missing` refuses to use it
    from triton.experimental.gluon import language as gl


#: 16-byte loads of a thread for a block: of a coded matrix, of one in fp8.
CODED, FP8 = 3, 2
SCRATCH = ".reg .b32 m, n, s, t, u;"


def _coded(codes: str, even: str, odd: str, table: tuple[str, str], out: tuple[str, str, str, str]) -> str:
    """PTX: eight bf16 weights from their codes and two words of lower bytes, as columns r and 8 + r, twice over."""
    return f"""
        and.b32 m, {codes}, 0x77777777; shr.u32 s, m, 16; shl.b32 n, {codes}, 4;
        prmt.b32 t, {table[0]}, {table[1]}, m; lop3.b32 t, {codes}, 0x80808080, t, 0xEA;
        prmt.b32 u, {table[0]}, {table[1]}, s; lop3.b32 u, n, 0x80808080, u, 0xEA;
        prmt.b32 {out[0]}, {even}, t, 0x5140; prmt.b32 {out[1]}, {even}, t, 0x7362;
        prmt.b32 {out[2]}, {odd}, u, 0x5140; prmt.b32 {out[3]}, {odd}, u, 0x7362;"""


def _fp8(even: str, odd: str, out: tuple[str, str, str, str]) -> str:
    """PTX: the same from two words of e4m3, as fp16 that is 2^8 too small (see `scaled_weights.py`)."""
    return "".join(
        f"""
        and.b32 {first}, {word}, 0xBF80BF80; shl.b32 m, {word}, 7; shl.b32 n, {word}, 1;
        and.b32 m, m, 0x3F803F80; lop3.b32 {second}, n, 0x80008000, m, 0xEA;"""
        for word, first, second in ((even, out[0], out[1]), (odd, out[2], out[3]))
    )


def _block(loads: int, tiles: int) -> str:
    """PTX of one thread's part of a block: 32 weights with 16 terms of every tile of eight rows."""
    sums, words = 4 * tiles, 4 * loads
    rows = sums + words
    table, before = rows + 8 * tiles, rows + 8 * tiles + (4 if loads == CODED else 0)
    code = [f"{SCRATCH} .reg .b32 a0, a1, a2, a3; .reg .f32 " + ", ".join(f"c{i}" for i in range(sums)) + ";"]
    code += [f"mov.f32 c{i}, ${before + i};" for i in range(sums)]
    out = ("a0", "a1", "a2", "a3")
    for f in range(4):
        even, odd = f"${sums + 2 * f}", f"${sums + 2 * f + 1}"
        if loads == CODED:
            code.append(_coded(f"${sums + 8 + f}", even, odd, (f"${table}", f"${table + 1}"), out))
        else:
            code.append(_fp8(even, odd, out))
        kind = "bf16" if loads == CODED else "f16"
        for r in range(tiles):
            c = "{" + ", ".join(f"c{4 * r + i}" for i in range(4)) + "}"
            b = f"{{${rows + 8 * r + 2 * f}, ${rows + 8 * r + 2 * f + 1}}}"
            code.append(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {c}, {{a0, a1, a2, a3}}, {b}, {c};")
    code += [f"mov.f32 ${i}, c{i};" for i in range(sums)]
    return "{" + "\n".join(code) + "}"


def _constraints(loads: int, tiles: int) -> str:
    inputs = 4 * loads + 8 * tiles + (4 if loads == CODED else 0)
    return ",".join(["=f"] * 4 * tiles + ["r"] * inputs + ["f"] * 4 * tiles)


def _whole() -> str:
    """PTX of one thread's part of a coded block, decoded: 16 terms each of columns r and 8 + r, as eight words.

    A thread's eight words are a sector of memory, but a store takes four. So pairs of threads exchange: the first four
    words of both become those of the even thread's sector, the last four of both those of the odd thread's.
    """
    code = [
        _coded(f"${24 + f}", f"${16 + 2 * f}", f"${17 + 2 * f}", ("$28", "$29"),
               (f"${2 * f}", f"${8 + 2 * f}", f"${2 * f + 1}", f"${9 + 2 * f}"))
        for f in range(4)
    ]  # fmt: skip
    code.append("mov.u32 m, %laneid; and.b32 m, m, 1; setp.ne.u32 odd, m, 0;")
    code += [
        f"""
        selp.b32 s, ${i}, ${i + 4}, odd; shfl.sync.bfly.b32 t, s, 1, 0x1F, 0xFFFFFFFF;
        selp.b32 ${i}, t, ${i}, odd; selp.b32 ${i + 4}, ${i + 4}, t, odd;"""
        for i in (0, 1, 2, 3, 8, 9, 10, 11)
    ]
    return "{" + SCRATCH + ".reg .pred odd;" + "".join(code) + "}"


#: Of ``inline_asm_elementwise``: code and operands, for every format and number of tiles, and of ``decode``.
BLOCKS = {(loads, n): (_block(loads, n), _constraints(loads, n)) for loads in (CODED, FP8) for n in (1, 2, 4)}
WHOLE = _whole(), ",".join(["=&r"] * 16 + ["r"] * 16)


@jit
def _words(at, LOADS: gl.constexpr):
    """A thread's words of a block, past the first-level cache: each is read once."""
    found = (gl.load(at, cache_modifier=".cg"), gl.load(at + 128, cache_modifier=".cg"))
    if LOADS == 3:
        found = found + (gl.load(at + 256, cache_modifier=".cg"),)
    return found


@jit
def _terms(x_at, row, ROW: gl.constexpr, T: gl.constexpr, TILES: gl.constexpr):
    """A thread's 16 terms of its row in every tile of eight, as eight words; zeros past the last row."""
    found = (gl.load(x_at, mask=row < T, other=0), gl.load(x_at + 4, mask=row < T, other=0))
    for r in gl.static_range(1, TILES):
        at = x_at + r * 8 * ROW
        live = row + r * 8 < T
        found = found + (gl.load(at, mask=live, other=0), gl.load(at + 4, mask=live, other=0))
    return found


@jit
def _multiplied(words, x_at, row, entries, sums, ROW: gl.constexpr, T: gl.constexpr, TILES: gl.constexpr,
                CODE: gl.constexpr, OPERANDS: gl.constexpr):  # fmt: skip
    """The sums of every tile of eight rows plus a block of 64 terms."""
    operands = words + _terms(x_at, row, ROW, T, TILES) + entries + sums
    if TILES == 1:
        one = gl.inline_asm_elementwise(CODE, OPERANDS, operands, dtype=gl.float32, is_pure=True, pack=4)
        found = (one,)
    elif TILES == 2:
        both: gl.constexpr = (gl.float32, gl.float32)
        found = gl.inline_asm_elementwise(CODE, OPERANDS, operands, dtype=both, is_pure=True, pack=4)
    else:
        four: gl.constexpr = (gl.float32, gl.float32, gl.float32, gl.float32)
        found = gl.inline_asm_elementwise(CODE, OPERANDS, operands, dtype=four, is_pure=True, pack=4)
    return found


@jit
def _listed(at, STEP: gl.constexpr, COUNT: gl.constexpr):
    """The first of a warp's share of the rare weights of a column."""
    found = (gl.load(at),)
    for i in gl.static_range(1, COUNT):
        found = found + (gl.load(at + i * STEP),)
    return found


@jit
def _with_rare(sums, x, entry, t, K: gl.constexpr, T: gl.constexpr, TILES: gl.constexpr):
    found = ()
    for r in gl.static_range(TILES):
        live = (t + 8 * r < T) & (entry != 0)
        term = gl.load(x + (t + 8 * r) * K + ((entry >> 16) & 0xFFFF), mask=live, other=0.0)
        found = found + (sums[r] + (entry << 16).to(gl.float32, bitcast=True) * term.to(gl.float32),)
    return found


@jit
def product(
    x, words, table, rare, y,
    K: gl.constexpr, N: gl.constexpr, T: gl.constexpr, E: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr,
    STEPS: gl.constexpr, LOADS: gl.constexpr, CODE: gl.constexpr, OPERANDS: gl.constexpr,
):  # fmt: skip
    """Program (16 columns): ``y`` [T, N] of rows [T, K]. ``table``: of codes, or the fp32 scale of every column."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    P: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    BLOCK: gl.constexpr = LOADS * 128
    NEXT: gl.constexpr = WARPS * BLOCK
    ROW: gl.constexpr = K // 2
    NEXT_X: gl.constexpr = WARPS * 32
    SOON: gl.constexpr = min(E // WARPS, 4)  # rare weights that are loaded first; a matrix of few scales has no others
    g = gl.program_id(0)
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, L))[:, None]
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :]
    warp = thread // 32 + 0 * j
    lane = thread % 32 + 0 * j
    row = lane // 4
    at = words + g.to(gl.int64) * (K // 64 * BLOCK) + (warp * BLOCK + lane * 4 + j)
    x_at = x.to(gl.pointer_type(gl.int32), bitcast=True) + (row * ROW + warp * 32 + lane % 4 * 8 + j)
    # entry j of a thread's sums: column n, row t of a tile
    n = row + 8 * (j // 2)
    t = 2 * (lane % 4) + j % 2
    now = _words(at, LOADS)
    if STEPS > 1:
        soon = _words(at + NEXT, LOADS)
    if LOADS == 3:
        entries = (gl.load(table + g * 4 + j + 0 * thread),)
        rare_at = rare + (g * E + warp) * 16 + n
        listed = _listed(rare_at, 16 * WARPS, SOON)
    else:
        entries = ()
    zero = gl.zeros([32 * WARPS, 4], gl.float32, L)
    sums = (zero,)
    for _ in gl.static_range(1, TILES):
        sums = sums + (zero,)
    if STEPS > 1:
        for i in range(STEPS - 2):
            later = _words(at + (i + 2) * NEXT, LOADS)
            sums = _multiplied(now, x_at + i * NEXT_X, row, entries, sums, ROW, T, TILES, CODE, OPERANDS)
            now = soon
            soon = later
        sums = _multiplied(now, x_at + (STEPS - 2) * NEXT_X, row, entries, sums, ROW, T, TILES, CODE, OPERANDS)
        now = soon
    sums = _multiplied(now, x_at + (STEPS - 1) * NEXT_X, row, entries, sums, ROW, T, TILES, CODE, OPERANDS)
    if LOADS == 3:
        for i in gl.static_range(SOON):
            sums = _with_rare(sums, x, listed[i], t, K, T, TILES)
        for i in range(SOON, E // WARPS):
            sums = _with_rare(sums, x, gl.load(rare_at + i * 16 * WARPS), t, K, T, TILES)
    shared = gl.allocate_shared_memory(gl.float32, [32 * WARPS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    by_warp = shared._reinterpret(gl.float32, [WARPS, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    p = gl.arange(0, 128, layout=gl.SliceLayout(0, P))
    n = g * 16 + p // 16 + 8 * (p % 4 // 2)
    for r in gl.static_range(TILES):
        shared.store(sums[r])
        gl.thread_barrier()
        t = 2 * (p // 4 % 4) + p % 2 + 8 * r
        total = gl.sum(by_warp.load(P), axis=0)
        if LOADS == 2:
            total *= gl.load(table + n) * 256.0
        gl.store(y + t * N + n, total.to(y.dtype.element_ty), mask=t < T)
        gl.thread_barrier()


@jit
def _decoded(words, entries, here, K: gl.constexpr, CODE: gl.constexpr, OPERANDS: gl.constexpr):
    p, q, r, s = gl.inline_asm_elementwise(
        CODE, OPERANDS, words + (entries,), dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=4
    )
    gl.store(here, p)
    gl.store(here + 8, q)
    gl.store(here + 4 * K, r)
    gl.store(here + 4 * K + 8, s)


@jit
def decode(
    words, table, rare, out,
    K: gl.constexpr, E: gl.constexpr, WARPS: gl.constexpr, STEPS: gl.constexpr, CODE: gl.constexpr,
    OPERANDS: gl.constexpr,
):  # fmt: skip
    """Program (16 columns, part of the terms): ``out`` [N, K] of a coded matrix."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    R: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    NEXT: gl.constexpr = WARPS * 384
    NEXT_OUT: gl.constexpr = WARPS * 32
    TERMS: gl.constexpr = STEPS * WARPS * 64
    g = gl.program_id(0)
    part = gl.program_id(1)
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, L))[:, None]
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :]
    lane = thread % 32
    at = words + g.to(gl.int64) * (K // 64 * 384) + (part * STEPS * NEXT + thread // 32 * 384 + lane * 4 + j)
    first = out + g.to(gl.int64) * (16 * K)
    here = first.to(gl.pointer_type(gl.int32), bitcast=True) + lane // 4 * (K // 2) + part * STEPS * NEXT_OUT
    here += thread // 32 * 32 + lane % 4 * 8 - lane % 2 * 4 + j  # two threads fill a sector
    now = _words(at, 3)
    if STEPS > 1:
        soon = _words(at + NEXT, 3)
    entries = gl.load(table + g * 4 + j + 0 * thread)
    if STEPS > 1:
        for i in range(STEPS - 2):
            later = _words(at + (i + 2) * NEXT, 3)
            _decoded(now, entries, here + i * NEXT_OUT, K, CODE, OPERANDS)
            now = soon
            soon = later
        _decoded(now, entries, here + (STEPS - 2) * NEXT_OUT, K, CODE, OPERANDS)
        now = soon
    _decoded(now, entries, here + (STEPS - 1) * NEXT_OUT, K, CODE, OPERANDS)
    gl.thread_barrier()
    e = gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(1, R))[:, None]
    n = gl.arange(0, 16, layout=gl.SliceLayout(0, R))[None, :]
    for i in range((E + 2 * WARPS - 1) // (2 * WARPS)):
        entry = gl.load(rare + (g * E + i * 2 * WARPS + e) * 16 + n, mask=i * 2 * WARPS + e < E, other=0)
        weight, term = entry.to(gl.int16).to(gl.bfloat16, bitcast=True), (entry >> 16) & 0xFFFF
        gl.store(first + n * K + term, weight, mask=(entry != 0) & (term // TERMS == part))
