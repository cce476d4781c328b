"""How much a continuation repeats itself. Pure NumPy; evaluation and training share these definitions.

A position is *repeated* at order n when the n tokens that end there stood, in this order, earlier in the same
continuation (overlaps count, the prompt does not). `repeated_share` is the share of a continuation's n-grams that
are repeated; a continuation *loops* when more than a fifth of its 6-grams are.
"""

import numpy as np
from numpy.typing import NDArray

NGRAM = 6
LOOP_SHARE = 0.2


def repeated(token_BT: NDArray[np.integer], length_B: NDArray[np.integer], n: int = NGRAM) -> NDArray[np.bool_]:
    """True where the n-gram that ends at a position occurred before in its row; never at or past `length_B`."""
    batch, width = token_BT.shape
    mark_BT = np.zeros((batch, width), np.bool_)
    if width < n:
        return mark_BT
    gram_BTn = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(token_BT), n, axis=1)
    live_BT = np.arange(n, width + 1)[None] <= np.asarray(length_B)[:, None]
    row_B, column = np.nonzero(live_BT)
    # One sort of (row, n-gram); np.unique returns the first place of each in row-major order.
    key = np.concatenate([row_B[:, None], gram_BTn[row_B, column]], axis=1).astype(np.int64)
    _, first, which = np.unique(_hash(key), return_index=True, return_inverse=True)
    mark_BT[row_B, column + n - 1] = first[which] < np.arange(len(key))
    return mark_BT


def _hash(key: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 bits per row of `key`: FNV-like mixing, collisions of two given rows about 2^-64."""
    value = np.full(len(key), 0xCBF29CE484222325, np.uint64)
    for column in key.T:
        value = (value ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return value


def repeated_share(token_BT: NDArray[np.integer], length_B: NDArray[np.integer], n: int = NGRAM) -> NDArray[np.float64]:
    """Share of repeated n-grams per row; 0 for a row shorter than n tokens."""
    count_B = np.maximum(np.asarray(length_B) - n + 1, 0)
    return repeated(token_BT, length_B, n).sum(axis=1) / np.maximum(count_B, 1)


def loop_share(token_BT: NDArray[np.integer], length_B: NDArray[np.integer]) -> float:
    """Share of rows that loop."""
    return float(np.mean(repeated_share(token_BT, length_B) > LOOP_SHARE))
