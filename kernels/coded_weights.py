"""bf16 matrices in 12 bits a weight, exactly: the eight bits that hardly compress, and a code for the rest.

A trained or random matrix uses few exponents (about 2.6 bits of information in the eight, arXiv 2504.11651). Of a
weight's two bytes the lower one (last exponent bit, mantissa) is kept as it is; the upper one (sign, seven exponent
bits) becomes a sign and a 3-bit code into a table of 16 columns: 0, and the seven values most frequent there. A weight
that the table lacks is stored as zero and listed beside the matrix by column; about one in 3000 of a Gaussian matrix.

``words`` [G, B, 3, 32, 4] are in the order of `fragments.py`. Of a thread's twelve the first eight hold lower bytes,
byte ``2 h + e``; word 8 + f has the code of byte i of word ``2 f + q`` at bit ``16 q + 4 i``, and its sign at bit
``8 i + 7`` (q = 0) or ``8 i + 3``, between the codes.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Int

from ready_jax.kernels import fragments
from ready_jax.kernels.fragments import COLUMNS, U32

CODES = 8
#: Bit of the sign of byte 0, in the codes of an even and of an odd word.
SIGN = (7, 3)
#: The list of rare weights holds a multiple of this many for every column.
RARE = 8
#: Weights that are encoded at once: the temporaries of one such slice are about 30 bytes a weight.
SLICE = 1 << 25


def why_not(terms: int, columns: int, dtype: str) -> str | None:
    """Why a matrix cannot be stored so; None if it can."""
    if dtype != "bfloat16":
        return f"its entries are {dtype}; needs bfloat16"
    if terms > 1 << 16:
        return f"it has {terms} terms; needs at most {1 << 16}: rare weights keep theirs in 16 bits"
    return fragments.misfit(terms, columns)


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


def _joined(parts):
    found = parts[0]
    for part in parts[1:]:
        found = found | part
    return found


@partial(jax.jit, static_argnames=("rare",))
def _encode(w_KN, table, lost_KN, rare: int):
    (terms, columns), bits = w_KN.shape, _bits(w_KN).astype(U32)
    groups = columns // COLUMNS
    kept = jnp.where(lost_KN, 0, bits)
    upper = ((kept >> 8) & 0x7F).reshape(terms, groups, COLUMNS)
    code = jnp.asarray(sum(jnp.where(upper == table[None, :, None, i], U32(i), 0) for i in range(1, CODES)))
    low, code, sign = (fragments.pairs(x.reshape(terms, columns)) for x in (kept & 0xFF, code, kept >> 15))
    fours = [(h, e) for h in range(2) for e in range(2)]  # in the order of their bytes
    bytes_ = _joined([low(h, e) << U32(8 * i) for i, (h, e) in enumerate(fours)])
    codes = [
        code(h, e)[:, :, :, q] << U32(16 * q + 4 * i) | sign(h, e)[:, :, :, q] << U32(8 * i + SIGN[q])
        for i, (h, e) in enumerate(fours) for q in range(2)
    ]  # fmt: skip
    codes = _joined(codes).transpose(3, 0, 4, 1, 2).reshape(groups, -1, 32, 4)
    words = fragments.stacked(jnp.concatenate([fragments.by_thread(bytes_), codes], axis=-1))
    column = jnp.arange(columns)[None]
    place = jnp.where(lost_KN, jnp.cumsum(lost_KN, axis=0, dtype=jnp.int32) - 1, rare)
    entry = (jnp.arange(terms, dtype=U32)[:, None] << 16) | bits
    listed = jnp.zeros((groups, rare, COLUMNS), U32)
    listed = listed.at[column // COLUMNS, place, column % COLUMNS].set(entry, mode="drop")
    table = table.astype(U32).reshape(groups, 2, 4) << (8 * jnp.arange(4, dtype=U32))[None, None]
    table = jnp.pad(jnp.sum(table, axis=2, dtype=U32), ((0, 0), (0, 2)))
    return words, _as_int32(table), _as_int32(listed)


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


def decode(
    words: Int[Array, "groups blocks 3 32 4"], table: Int[Array, "groups 4"], rare: Int[Array, "groups rare 16"]
) -> Array:
    """The matrix, columns first: bf16 [N, K]."""
    groups = words.shape[0]
    thread = fragments.unstacked(words)  # [G, B, 32, 12]
    table, rare = (jax.lax.bitcast_convert_type(x, U32) for x in (table, rare))
    entries = (table[:, :2, None] >> (8 * jnp.arange(4, dtype=U32))[None, None]) & 0xFF
    entries = entries.reshape(groups, 1, 1, 1, CODES)

    def entry(h, e):
        i = 2 * h + e
        codes = thread[..., 8:]
        code = jnp.stack([(codes >> (16 * q + 4 * i)) & 7 for q in range(2)], axis=-1)
        sign = jnp.stack([(codes >> (8 * i + SIGN[q])) & 1 for q in range(2)], axis=-1)
        code, sign = (x.reshape(thread.shape[:3] + (8,)) for x in (code, sign))  # words 2 f + q
        upper = sum(jnp.where(code == n, entries[..., n], 0) for n in range(1, CODES))
        return (sign << 15 | upper << 8 | (thread[..., :8] >> (8 * i)) & 0xFF).astype(jnp.uint16)

    bits = fragments.matrix(entry)
    term, value = (rare >> 16).astype(jnp.int32), rare & 0xFFFF
    column = jnp.arange(groups)[:, None, None] * COLUMNS + jnp.arange(COLUMNS)[None, None]
    bits = bits.at[jnp.where(value == 0, bits.shape[0], column), term].set(value.astype(jnp.uint16), mode="drop")
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
