"""Tokenised documents in flat arrays, the file that holds them, and fixed-length rows packed from them."""

import io
import json
import lzma
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Place = tuple[int, int, int, int]  # row, column, begin in the flat tokens, size
# Two-byte alignment, for uint16 tokens.
LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 2, "lp": 1, "pb": 1}]


class Packed(NamedTuple):
    """Training rows. `segment_BT` numbers a row's documents from 1; 0 is padding, with mask False."""

    token_BT: NDArray[np.integer]
    mask_BT: NDArray[np.bool_]
    segment_BT: NDArray[np.uint16]


@dataclass(frozen=True)
class Corpus:
    """Documents one after another. Spans are (begin, end) in tokens of their document, end excluded."""

    tokens: NDArray[np.integer]
    offsets: NDArray[np.int64]
    spans: NDArray[np.int32]
    span_offsets: NDArray[np.int64]
    category_ids: NDArray[np.uint8]
    source_ids: NDArray[np.uint8]
    categories: tuple[str, ...]
    sources: tuple[str, ...]
    info: dict = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.category_ids)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """True where a token is a label: the whole corpus at once, aligned with `tokens`."""
        starts = np.repeat(self.offsets[:-1], np.diff(self.span_offsets))
        step = np.zeros(len(self.tokens) + 1, np.int32)
        np.add.at(step, self.spans[:, 0] + starts, 1)
        np.add.at(step, self.spans[:, 1] + starts, -1)
        return np.cumsum(step[:-1]) > 0

    def document(self, index: int) -> NDArray[np.integer]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def document_spans(self, index: int) -> NDArray[np.int32]:
        return self.spans[self.span_offsets[index] : self.span_offsets[index + 1]]

    def of_category(self, name: str) -> NDArray[np.int64]:
        """The indices of a category's documents, for `select`."""
        return np.flatnonzero(self.category_ids == self.categories.index(name))

    def select(self, index: Sequence[int] | NDArray[np.integer]) -> "Corpus":
        """These documents in this order; an index given twice gives its document twice."""
        index = np.asarray(index, np.int64)
        token_at, offset = _gather(self.offsets, index)
        span_at, span_offset = _gather(self.span_offsets, index)
        return Corpus(
            self.tokens[token_at], offset, self.spans[span_at], span_offset,
            self.category_ids[index], self.source_ids[index], self.categories, self.sources, self.info,
        )  # fmt: skip


def _gather(offsets: NDArray[np.int64], index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of the chosen stretches in the flat array, and the offsets they have once gathered."""
    size = np.diff(offsets)[index]
    new_offset = np.concatenate([[0], np.cumsum(size)])
    return np.repeat(offsets[:-1][index] - new_offset[:-1], size) + np.arange(new_offset[-1]), new_offset


def pack(corpus: Corpus, length: int, seed: int, *, split: bool = False, pad: int = 0, buffer: int = 8192) -> Packed:
    """Shuffle the documents by `seed` and pack them into rows of `length` tokens.

    `split=False` keeps documents whole (best fit within a shuffled `buffer`; only one longer than a row is
    cut, each piece a segment). `split=True` fills every row to its end and cuts documents there.
    Nothing is dropped: every token of the corpus stands exactly once in the rows.
    """
    if len(corpus) == 0:
        raise ValueError("an empty corpus cannot be packed: at least one document is needed")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(corpus))
    places = _concatenate(corpus, order, length) if split else _best_fit(corpus, order, length, buffer)
    num_rows = 1 + max(row for row, *_ in places)
    shuffled = rng.permutation(num_rows)
    token_BT = np.full((num_rows, length), pad, corpus.tokens.dtype)
    mask_BT = np.zeros((num_rows, length), np.bool_)
    segment_BT = np.zeros((num_rows, length), np.uint16)
    last_segment = np.zeros(num_rows, np.uint16)
    for row, column, begin, size in places:
        row = shuffled[row]
        last_segment[row] += 1
        token_BT[row, column : column + size] = corpus.tokens[begin : begin + size]
        mask_BT[row, column : column + size] = corpus.mask[begin : begin + size]
        segment_BT[row, column : column + size] = last_segment[row]
    return Packed(token_BT, mask_BT, segment_BT)


def _concatenate(corpus: Corpus, order: NDArray[np.int64], length: int) -> list[Place]:
    places: list[Place] = []
    filled = 0
    for document in order:
        begin, end = int(corpus.offsets[document]), int(corpus.offsets[document + 1])
        while begin < end:
            size = min(end - begin, length - filled % length)
            places.append((filled // length, filled % length, begin, size))
            begin, filled = begin + size, filled + size
    return places


def _best_fit(corpus: Corpus, order: NDArray[np.int64], length: int, buffer: int) -> list[Place]:
    """Best-fit decreasing, buffer after buffer: a row mixes only neighbours in the shuffle."""
    places: list[Place] = []
    num_rows = 0
    for first in range(0, len(order), buffer):
        pieces = [
            (min(length, end - begin), begin)
            for document in order[first : first + buffer]
            for end in [int(corpus.offsets[document + 1])]
            for begin in range(int(corpus.offsets[document]), end, length)
        ]
        pieces.sort(key=lambda piece: -piece[0])
        room: list[tuple[int, int]] = []  # (free tokens, row), kept sorted
        for size, begin in pieces:
            at = bisect_left(room, (size, -1))
            free, row = room.pop(at) if at < len(room) else (length, num_rows)
            num_rows = max(num_rows, row + 1)
            places.append((row, length - free, begin, size))
            if free > size:
                insort(room, (free - size, row))
    return places


def write_arrays(path: Path, arrays: dict[str, NDArray], info: dict) -> int:
    """Write an .npz under xz, and `info` as readable JSON beside it. Returns the bytes written."""
    raw = io.BytesIO()
    np.savez(raw, allow_pickle=False, info=np.array(json.dumps(info)), **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(raw.getvalue(), filters=LZMA))
    sidecar(path).write_text(json.dumps(info, indent=1) + "\n")
    return path.stat().st_size


def read_arrays(path: Path) -> tuple[dict[str, NDArray], dict]:
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes())), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads(str(arrays.pop("info")))


def sidecar(path: Path) -> Path:
    return path.with_name(path.name.split(".")[0] + ".json")


def write_shard(path: Path, packed: Packed, info: dict) -> int:
    return write_arrays(path, packed._asdict(), info)


def read_shard(path: Path) -> tuple[Packed, dict]:
    arrays, info = read_arrays(path)
    return Packed(**arrays), info


def write_corpus(path: Path, corpus: Corpus) -> int:
    """Write with lengths and counts in place of offsets: small numbers compress."""
    arrays = {
        "tokens": corpus.tokens,
        "lengths": corpus.lengths.astype(np.int32),
        "spans": corpus.spans,
        "num_spans": np.diff(corpus.span_offsets).astype(np.int32),
        "category_ids": corpus.category_ids,
        "source_ids": corpus.source_ids,
        "categories": np.array(corpus.categories),
        "sources": np.array(corpus.sources),
    }
    return write_arrays(path, arrays, corpus.info)


def read_corpus(path: str | Path) -> Corpus:
    """Read a corpus (.npz.xz), or a stream (.npy.xz) whose documents end with its JSON's `separator`."""
    path = Path(path)
    if path.name.endswith(".npy.xz"):
        return _read_stream(path)
    arrays, info = read_arrays(path)
    offsets = np.concatenate([[0], np.cumsum(arrays["lengths"], dtype=np.int64)])
    span_offsets = np.concatenate([[0], np.cumsum(arrays["num_spans"], dtype=np.int64)])
    return Corpus(
        arrays["tokens"],
        offsets,
        arrays["spans"],
        span_offsets,
        arrays["category_ids"],
        arrays["source_ids"],
        tuple(map(str, arrays["categories"])),
        tuple(map(str, arrays["sources"])),
        info,
    )


def write_stream(path: Path, tokens: NDArray[np.integer], info: dict) -> int:
    """Write one flat .npy under xz; `info["separator"]` is the id that ends each document."""
    raw = io.BytesIO()
    np.save(raw, tokens, allow_pickle=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(raw.getvalue(), filters=LZMA))
    sidecar(path).write_text(json.dumps(info, indent=1) + "\n")
    return path.stat().st_size


def _read_stream(path: Path) -> Corpus:
    tokens = np.load(io.BytesIO(lzma.decompress(path.read_bytes())), allow_pickle=False)
    info = json.loads(sidecar(path).read_text())
    ends = np.flatnonzero(tokens == info["separator"]) + 1
    if len(ends) == 0 or ends[-1] != len(tokens):
        raise ValueError(f"{path} does not end with the separator {info['separator']} that {sidecar(path).name} names")
    offsets = np.concatenate([[0], ends])
    spans = np.stack([np.zeros(len(ends)), np.diff(offsets)], axis=1).astype(np.int32)
    zeros = np.zeros(len(ends), np.uint8)
    return Corpus(tokens, offsets, spans, np.arange(len(ends) + 1), zeros, zeros, ("text",), ("text",), info)
