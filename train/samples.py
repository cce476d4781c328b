"""Rows of a dataset, from local JSON lines or the hub, one at a time."""

import glob
import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """One row: a conversation or a text, never both."""

    id: str
    source: str = ""
    category: str = "text"
    messages: Messages | None = None
    text: str | None = None


def unit_hash(seed: int, sample_id: str) -> float:
    """A number in [0, 1) that depends on (seed, sample id) alone."""
    digest = hashlib.blake2b(f"{seed}:{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def read_samples(where: str | Path, split: str = "train") -> Iterator[Sample]:
    """Read a .jsonl(.gz) file, a folder of them (held-out files left out), a glob, or a hub dataset."""
    for number, row in enumerate(_rows(where, split)):
        messages, text = row.get("messages"), row.get("text")
        if (messages is None) == (text is None):
            found = f"row {number} of {where} has the keys {sorted(row)}"
            raise ValueError(f"{found}: exactly one of `messages` and `text` is needed")
        sample_id = str(row.get("id", f"{where}:{number}"))
        yield Sample(sample_id, row.get("source", ""), row.get("category", "text"), messages, text)


def _rows(where: str | Path, split: str) -> Iterator[dict[str, Any]]:
    files = local_files(where)
    if not files:
        import datasets  # here, not above: local files need no hub library

        yield from datasets.load_dataset(str(where), split=split, streaming=True)
    for file in files:
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def local_files(where: str | Path) -> list[Path]:
    """The files that `read_samples` reads, in its order; none when `where` can only be a hub name."""
    path = Path(where)
    if path.is_dir():
        files = [file for pattern in ("*.jsonl", "*.jsonl.gz") for file in path.glob(pattern)]
        files = [file for file in files if not file.name.startswith("heldout")]
    else:
        files = [path] if path.is_file() else [Path(name) for name in glob.glob(str(where))]
    looks_local = path.is_dir() or path.is_absolute() or any(mark in str(where) for mark in ("*", ".jsonl"))
    if not files and looks_local:
        raise ValueError(f"{where}: no .jsonl or .jsonl.gz file was found there")
    return sorted(files)
