"""What `fragment_product_gluon_source.py` makes threads do, done by NumPy: its PTX instruction by instruction."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ready_jax.kernels import fragment_product_gluon as kernel
from ready_jax.kernels import fragment_product_gluon_source as source
from ready_jax.kernels import fragments
from ready_jax.kernels.scaled_weights import half

ROW, LANE = np.arange(32) // 4, np.arange(32) % 4


def prmt(a, b, selector):
    """Four bytes of the eight of ``b a``, by the four lowest nibbles of ``selector``; no sign is replicated."""
    assert not np.any(selector & np.uint32(0x8888))
    pool = [(x >> np.uint32(8 * i)) & np.uint32(0xFF) for x in (a, b) for i in range(4)]
    out = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(selector)), np.uint32)
    for i in range(4):
        which = (selector >> np.uint32(4 * i)) & np.uint32(7)
        out |= np.choose(which, pool).astype(np.uint32) << np.uint32(8 * i)
    return out


def halves(x, kind):
    """The two 16-bit numbers of every register."""
    return [((x >> np.uint32(16 * e)) & np.uint32(0xFFFF)).astype(np.uint16).view(kind).astype("f8") for e in range(2)]


def mma(kind, a, b, c):
    """``mma.m16n8k16``: registers of 32 threads as the PTX manual lays them out."""
    left, right = np.zeros(a[0].shape[:-1] + (16, 16)), np.zeros(b[0].shape[:-1] + (16, 8))
    for i, x in enumerate(a):
        for e, number in enumerate(halves(x, kind)):
            left[..., ROW + 8 * (i % 2), 2 * LANE + 8 * (i // 2) + e] = number
    for i, x in enumerate(b):
        for e, number in enumerate(halves(x, kind)):
            right[..., 2 * LANE + 8 * i + e, ROW] = number
    found = left @ right
    return [x + found[..., ROW + 8 * (i // 2), 2 * LANE + i % 2] for i, x in enumerate(c)]


OPERATIONS: dict[str, Callable] = {
    "and.b32": np.bitwise_and, "shl.b32": np.left_shift, "shr.u32": np.right_shift, "prmt.b32": prmt,
    "mov.f32": lambda a: a, "mov.u32": lambda a: a, "setp.ne.u32": np.not_equal,
    "selp.b32": lambda a, b, p: np.where(p, a, b),
    "shfl.sync.bfly.b32": lambda a, mask, *_: a[..., np.arange(32) ^ mask],
    "lop3.b32": lambda a, b, c, table: (a & b) | c,
}  # fmt: skip


def run(code: str, values: list) -> list:
    """The outputs of a block of PTX whose operands are ``values`` (None: an output), each [..., 32]."""
    registers = {f"${i}": x for i, x in enumerate(values)} | {"%laneid": np.arange(32, dtype=np.uint32)}
    outputs = [name for name, x in registers.items() if x is None]
    for line in re.split(r";\s*", code.strip()[1:-1]):
        name, _, rest = line.strip().partition(" ")
        if name.startswith("mma"):
            kind = ml_dtypes.bfloat16 if "bf16" in name else np.float16
            d, *operands = (re.split(r",\s*", x) for x in re.findall(r"\{(.*?)\}", rest))
            found = mma(kind, *([registers[x] for x in operand] for operand in operands))
            registers |= dict(zip(d, found, strict=True))
        elif name and name != ".reg":
            to, *words = re.split(r",\s*", rest)
            assert name != "lop3.b32" or words[3] == "0xEA"
            values = [np.uint32(int(w, 0)) if w[0].isdigit() else registers[w] for w in words]
            registers[to] = OPERATIONS[name](*values)
    return [registers[name] for name in outputs]


def by_part(words):
    """[G, B, W, 32, 4] as a thread's operands: 4 W of [G, B, 32]."""
    words = np.asarray(words).view(np.uint32)
    return [words[:, :, part, :, j] for part in range(words.shape[2]) for j in range(4)]


def _product(x, words, table, rare, dtype):
    """Sums [T, N], columns of 16 by 64 terms at a time."""
    (rows, terms), (groups, blocks, loads) = x.shape, words.shape[:3]
    tiles = next(n for n in (1, 2, 4) if n * kernel.TILE >= rows)
    padded = np.zeros((tiles * kernel.TILE, terms), x.dtype)
    padded[:rows] = x
    pairs = padded.view(np.uint32).reshape(tiles, kernel.TILE, blocks, 4, 8)  # of a thread c, its 16 terms
    of_rows = [pairs[r, ROW, :, LANE, i].T for r in range(tiles) for i in range(8)]
    operands = by_part(words) + of_rows
    if loads == source.CODED:
        operands += [np.asarray(table).view(np.uint32)[:, j, None, None] for j in range(4)]
    zero = [np.zeros((groups, blocks, 32))] * (4 * tiles)
    found = run(source._block(loads, tiles), [None] * (4 * tiles) + operands + zero)
    y = np.zeros((groups, tiles, 16, 8))
    for i, total in enumerate(found):
        y[:, i // 4, ROW + 8 * (i % 4 // 2), 2 * LANE + i % 2] = total.sum(axis=1)
    y = y.transpose(1, 3, 0, 2).reshape(tiles * kernel.TILE, -1)[:rows]
    if loads == source.CODED:
        rare = np.asarray(rare).view(np.uint32)
        weight = (rare << np.uint32(16)).view(np.float32).astype("f8")
        y = y + np.einsum("TGEC,GEC->TGC", np.where(rare == 0, 0, x[:, rare >> np.uint32(16)]), weight).reshape(y.shape)
    else:
        y = y * np.asarray(table) * 256
    return y.astype(dtype)


def _decode(words, table):
    """[N, K] but for the rare weights."""
    operands = by_part(words) + [np.broadcast_to(np.asarray(table).view(np.uint32)[:, j, None, None],
                                                 (*words.shape[:2], 32)) for j in range(4)]  # fmt: skip
    found = run(source._whole(), [None] * 16 + operands)
    # G, B, r, threads 2 i and 2 i + 1, columns r and 8 + r, stores, four words: a store fills the sector of one of both
    out = np.stack(found, -1).reshape(*words.shape[:2], 8, 2, 2, 2, 2, 4)
    out = out.transpose(0, 1, 2, 3, 6, 5, 4, 7).reshape(*words.shape[:2], 8, 4, 2, 8)  # G, B, r, c, h, 8 words
    terms, columns = fragments.shape(words)
    return np.ascontiguousarray(out.transpose(0, 4, 2, 1, 3, 5)).view(np.uint16).reshape(columns, terms)


def coded_product(x_TK, words, table, rare, *, dtype):
    shape = jax.ShapeDtypeStruct((x_TK.shape[0], fragments.shape(words)[1]), dtype)

    def sums(x, words, table, rare):
        return _product(np.asarray(x), np.asarray(words), np.asarray(table), np.asarray(rare), dtype)

    return jax.pure_callback(sums, shape, x_TK, words, table, rare)


def scaled_product(x_TK, words, scale_N):
    shape = jax.ShapeDtypeStruct((x_TK.shape[0], fragments.shape(words)[1]), jnp.float32)

    def sums(x, words, scale):
        return _product(np.asarray(x), np.asarray(words), np.asarray(scale), None, np.float32)

    return jax.pure_callback(sums, shape, half(x_TK), words, scale_N)


def decode(words, table, rare):
    """As the kernel: rare weights are written over the zeros in their places."""
    terms, columns = fragments.shape(words)

    def whole(words, table, rare):
        bits, rare = _decode(np.asarray(words), np.asarray(table)), np.asarray(rare).view(np.uint32)
        group, _, column = np.nonzero(rare)
        bits[group * 16 + column, rare[rare != 0] >> np.uint32(16)] = rare[rare != 0] & np.uint32(0xFFFF)
        return bits.view(ml_dtypes.bfloat16)

    return jax.pure_callback(whole, jax.ShapeDtypeStruct((columns, terms), jnp.bfloat16), words, table, rare)
