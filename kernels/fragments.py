"""The order in which matrices are stored that threads multiply as they load them.

Tensor cores take 16 columns by 16 terms from 32 threads (PTX, ``mma.m16n8k16``): thread ``4 r + c`` gives columns r and
8 + r. Four such products cover a block of 64 terms, of which thread c of a row has 16 c .. 16 c + 15, four at a time:
its part of a row of activations is then 32 bytes in a row, and its part of the matrix whole 16-byte words.

``words`` [G, B, W, 32, 4] (int32) are those of 16 columns (G) by 64 terms (B), ``W`` times four for each thread.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

COLUMNS, TERMS = 16, 64
U32 = jnp.uint32


def misfit(terms: int, columns: int) -> str | None:
    """Why a matrix of this size has no such order; None if it has."""
    if terms % TERMS or columns % COLUMNS:
        return f"it is {terms} x {columns}; needs multiples of {TERMS} x {COLUMNS}"
    return None


def shape(words) -> tuple[int, int]:
    """(terms, columns) of the matrix that ``words`` hold."""
    return words.shape[1] * TERMS, words.shape[0] * COLUMNS


def pairs(x_KN):
    """[K, N] as fours that share a word: a function from (column half h, term parity e) to [B, c, f, q, G, r].

    The entries are columns ``8 h + r`` of a group and terms ``16 c + 4 f + 2 q + e`` of a block.
    """
    terms, columns = x_KN.shape
    x = x_KN.reshape(terms // TERMS, 4, 4, 2, 2, columns // COLUMNS, 2, 8)
    return lambda h, e: x[:, :, :, :, e, :, h]


def by_thread(x):
    """[B, c, f, q, G, r] as [G, B, 32, 8]: of every thread the words ``2 f + q``."""
    blocks, groups = x.shape[0], x.shape[4]
    return x.transpose(4, 0, 5, 1, 2, 3).reshape(groups, blocks, 32, 8)


def stacked(x):
    """[G, B, 32, 4 W] as ``words``."""
    groups, blocks, threads, words = x.shape
    found = x.reshape(groups, blocks, threads, words // 4, 4).transpose(0, 1, 3, 2, 4)
    return jax.lax.bitcast_convert_type(found, jnp.int32)


def unstacked(words):
    """The reverse: unsigned [G, B, 32, 4 W]."""
    groups, blocks, count = words.shape[:3]
    found = jax.lax.bitcast_convert_type(words, U32)
    return found.transpose(0, 1, 3, 2, 4).reshape(groups, blocks, 32, 4 * count)


def matrix(entry):
    """[N, K] from ``entry(h, e)``: [G, B, 32, 8], of every thread the entries in words ``2 f + q``."""
    rows = jnp.stack([jnp.stack([entry(h, e) for e in range(2)], axis=-1) for h in range(2)], axis=2)
    groups, blocks = rows.shape[:2]  # [G, B, h, (r, c), (f, q), e]
    rows = rows.reshape(groups, blocks, 2, 8, TERMS).transpose(0, 2, 3, 1, 4)
    return rows.reshape(groups * COLUMNS, blocks * TERMS)
