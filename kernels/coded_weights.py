"""bf16 matrices in 12 bits a weight, exactly: the eight bits that hardly compress, and a code for the rest.

A trained or random matrix uses few exponents (about 2.6 bits of information in the eight, arXiv 2504.11651). Of a
weight's two bytes the lower one (last exponent bit, mantissa) is kept as it is; the upper one (sign, seven exponent
bits) becomes a sign and a 3-bit code into a table of 16 columns: 0, and the seven values most frequent there. A weight
that the table lacks is stored as zero and listed beside the matrix by column; about one in 3000 of a Gaussian matrix.

Order: where a thread finds what tensor cores take from it (PTX, `mma.m16n8k16`). ``words`` [G, B, 3, 32, 4] are those
of 16 columns (G) by 64 terms (B): for thread ``4 r + c`` columns ``8 h + r`` (h = 0, 1) and terms ``16 c + 4 f + k``
(f, k = 0..3). Parts 0 and 1 hold lower bytes, word ``2 f + k // 2``, byte ``2 h + k % 2``; part 2 holds, in word f,
the code of byte i of either word at bit ``16 (k // 2) + 4 i``, its sign at bit ``8 i + 7`` or ``8 i + 3``.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Int

COLUMNS, TERMS = 16, 64
CODES = 8
#: The list of rare weights holds a multiple of this many for every column.
RARE = 8
#: Weights that are encoded at once: the temporaries of one such slice are about 30 bytes a weight.
SLICE = 1 << 25

U32 = jnp.uint32


def why_not(terms: int, columns: int, dtype: str) -> str | None:
    """Why a matrix cannot be stored so; None if it can."""
    if dtype != "bfloat16":
        return f"its entries are {dtype}; needs bfloat16"
    if terms % TERMS or columns % COLUMNS:
        return f"it is {terms} x {columns}; needs multiples of {TERMS} x {COLUMNS}"
    if terms > 1 << 16:
        return f"it has {terms} terms; needs at most {1 << 16}: rare weights keep theirs in 16 bits"
    return None


def _bits(w):
    return jax.lax.bitcast_convert_type(w, jnp.uint16)


def _as_int32(x):
    return jax.lax.bitcast_convert_type(x, jnp.int32)


@jax.jit
def _survey(w_KN):
    """Table [G, 8] of every 16 columns, which weights it lacks [K, N], and the most of them in one column."""
    terms, columns = w_KN.shape
    upper_KGC = ((_bits(w_KN) >> 8) & 0x7F).reshape(terms, -1, COLUMNS)
    count_VG = jax.lax.map(lambda v: jnp.sum(upper_KGC == v, axis=(0, 2), dtype=jnp.int32), jnp.arange(128, dtype="u2"))
    _, frequent = jax.lax.top_k(count_VG.at[0].set(-1).T, CODES - 1)
    table = jnp.pad(frequent, ((0, 0), (1, 0))).astype(jnp.uint16)
    lost_KN = jnp.all(upper_KGC[..., None] != table[None, :, None], axis=-1).reshape(terms, columns)
    return table, lost_KN, jnp.max(jnp.sum(lost_KN, axis=0, dtype=jnp.int32))


@partial(jax.jit, static_argnames=("rare",))
def _encode(w_KN, table, lost_KN, rare: int):
    (terms, columns), bits = w_KN.shape, _bits(w_KN).astype(U32)
    groups, blocks = columns // COLUMNS, terms // TERMS
    kept = jnp.where(lost_KN, 0, bits)
    upper = ((kept >> 8) & 0x7F).reshape(terms, groups, COLUMNS)
    code = sum(jnp.where(upper == table[None, :, None, i], U32(i), 0) for i in range(1, CODES))
    fields = (kept & 0xFF, jnp.asarray(code), kept >> 15)
    # terms as (block, c, f, pair, k % 2), columns as (group, h, r)
    low, code, sign = (x.reshape(blocks, 4, 4, 2, 2, groups, 2, 8) for x in fields)

    def gathered(x, bit):
        """[B, 4, 4, 2, G, 8]: the four entries that share a word, entry i shifted to ``bit(i)``."""
        parts = [x[:, :, :, :, k, :, h] << U32(bit(2 * h + k)) for h in range(2) for k in range(2)]
        return parts[0] | parts[1] | parts[2] | parts[3]

    lower = gathered(low, lambda i: 8 * i).transpose(4, 0, 5, 1, 2, 3)
    codes = [gathered(code[:, :, :, q : q + 1], lambda i, q=q: 16 * q + 4 * i) for q in range(2)]
    signs = [gathered(sign[:, :, :, q : q + 1], lambda i, q=q: 8 * i + (7, 3)[q]) for q in range(2)]
    rest = (codes[0] | codes[1] | signs[0] | signs[1])[:, :, :, 0].transpose(3, 0, 4, 1, 2)
    lower = lower.reshape(groups, blocks, 32, 2, 4).transpose(0, 1, 3, 2, 4)
    words = jnp.concatenate([lower, rest.reshape(groups, blocks, 1, 32, 4)], axis=2)
    column = jnp.arange(columns)[None]
    place = jnp.where(lost_KN, jnp.cumsum(lost_KN, axis=0, dtype=jnp.int32) - 1, rare)
    entry = (jnp.arange(terms, dtype=U32)[:, None] << 16) | bits
    listed = jnp.zeros((groups, rare, COLUMNS), U32)
    listed = listed.at[column // COLUMNS, place, column % COLUMNS].set(entry, mode="drop")
    table = table.astype(U32).reshape(groups, 2, 4) << (8 * jnp.arange(4, dtype=U32))
    table = jnp.pad(jnp.sum(table, axis=2, dtype=U32), ((0, 0), (0, 2)))
    return _as_int32(words), _as_int32(table), _as_int32(listed)


def encode(w_KN: BFloat16[Array, "K N"]) -> tuple[Array, Array, Array]:
    """``words`` [G, B, 3, 32, 4], ``table`` [G, 4] and ``rare`` [G, E, 16], all int32, of a matrix [terms, columns].

    ``table`` holds eight upper bytes in its first two words; an entry of ``rare`` its term above its bits, or zero.
    ``E`` is what the fullest column needs, so a column of another scale than its neighbours costs memory and time.
    Not for tracing: ``E`` depends on the values. Raises ValueError for a matrix that ``why_not`` objects to.
    """
    terms, columns = w_KN.shape
    reason = why_not(terms, columns, w_KN.dtype.name)
    if reason is not None:
        raise ValueError(f"a matrix cannot be stored in 12 bits a weight: {reason}")
    groups = columns // COLUMNS
    pieces = next(n for n in range(-(-groups * COLUMNS * terms // SLICE), groups + 1) if n and groups % n == 0)
    slices = jnp.split(w_KN, pieces, axis=1) if pieces > 1 else [w_KN]
    surveys = [_survey(w) for w in slices]
    most = max(int(found[2]) for found in surveys)
    rare = max(-(-most // RARE), 1) * RARE
    encoded = [_encode(w, *found[:2], rare=rare) for w, found in zip(slices, surveys, strict=True)]
    words, table, listed = (jnp.concatenate(x) if pieces > 1 else x[0] for x in zip(*encoded, strict=True))
    return words, table, listed


def decode(words: Int[Array, "G B 3 32 4"], table: Int[Array, "G 4"], rare: Int[Array, "G E 16"]) -> Array:
    """The matrix, columns first: bf16 [N, K]."""
    groups, blocks = words.shape[:2]
    words, table, rare = (jax.lax.bitcast_convert_type(x, U32) for x in (words, table, rare))
    entries = (table[:, :2, None] >> (8 * jnp.arange(4, dtype=U32))) & 0xFF
    entries = entries.reshape(groups, 1, 1, CODES)
    lower = words[:, :, :2].transpose(0, 1, 3, 2, 4).reshape(groups, blocks, 32, 4, 2)
    pieces = {}
    for q in range(2):
        for i in range(4):
            code = (words[:, :, 2] >> (16 * q + 4 * i)) & 7
            sign = (words[:, :, 2] >> (8 * i + (7, 3)[q])) & 1
            upper = sum(jnp.where(code == n, entries[..., n, None], 0) for n in range(1, CODES))
            pieces[q, i] = sign << 15 | upper << 8 | (lower[..., q] >> (8 * i)) & 0xFF  # [G, B, 32, f]
    rows = [jnp.stack([pieces[q, 2 * h + k] for q in range(2) for k in range(2)], axis=-1) for h in range(2)]
    bits = jnp.stack(rows, axis=2).astype(jnp.uint16)  # [G, B, h, (r, c), f, k]
    bits = bits.reshape(groups, blocks, 2, 8, TERMS).transpose(0, 2, 3, 1, 4).reshape(groups * COLUMNS, blocks * TERMS)
    term, value = (rare >> 16).astype(jnp.int32), rare & 0xFFFF
    column = jnp.arange(groups)[:, None, None] * COLUMNS + jnp.arange(COLUMNS)
    bits = bits.at[jnp.where(value == 0, bits.shape[0], column), term].set(value.astype(jnp.uint16), mode="drop")
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def shape(words) -> tuple[int, int]:
    """(terms, columns) of the matrix that ``words`` hold."""
    return words.shape[1] * TERMS, words.shape[0] * COLUMNS


def bits_per_weight(words, table, rare) -> float:
    return 8 * sum(x.nbytes for x in (words, table, rare)) / float(np.prod(shape(words)))
