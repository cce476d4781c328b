"""Rows of a dataset, from local JSON lines or the hub, one at a time."""

import glob
import gzip
import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Messages = list[dict[str, Any]]

LAYOUTS = ("messages", "conversations", "text")
#: Speakers of `conversations`, as chat templates call them.
ROLES = {"human": "user", "gpt": "assistant"}
SHUFFLED = 10_000  # rows of a hub dataset that are shuffled together


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


def read_samples(
    where: str | Path, split: str = "train", *, revision: str | None = None, seed: int | None = None
) -> Iterator[Sample]:
    """Read a .jsonl(.gz) file, a folder of them (held-out files left out), a glob, or a hub dataset, streaming.

    Rows have `messages` (role and content), `conversations` (from and value) or `text`. ``revision`` and ``seed`` (to
    shuffle within a buffer; None: in order) are for the hub.
    """
    for number, row in enumerate(_rows(where, split, revision, seed)):
        found = [name for name in LAYOUTS if row.get(name) is not None]
        if len(found) != 1:
            keys = f"row {number} of {where} has the keys {sorted(row)}"
            raise ValueError(f"{keys}: exactly one of {', '.join(f'`{name}`' for name in LAYOUTS)} is needed")
        content = row[found[0]]
        messages, text = (None, content) if found[0] == "text" else (_messages(content), None)
        sample_id = str(row.get("id", f"{where}:{number}"))
        yield Sample(sample_id, row.get("source") or "", row.get("category") or "text", messages, text)


def _messages(turns: list[dict[str, Any]]) -> Messages:
    """Turns of either layout with role and content."""
    if not any("from" in turn for turn in turns):
        return turns
    speakers = [str(turn.get("from")) for turn in turns]
    return [{"role": ROLES.get(x, x), "content": turn.get("value")} for x, turn in zip(speakers, turns, strict=True)]


def draw(samples: Iterable[Sample], count: int, seed: int) -> list[Sample]:
    """``count`` samples whose places have the lowest hashes: evenly from all of them, one pass, shuffled."""
    placed = heapq.nsmallest(count, enumerate(samples), key=lambda pair: unit_hash(seed, str(pair[0])))
    return [sample for _, sample in placed]


def _rows(where: str | Path, split: str, revision: str | None, seed: int | None) -> Iterator[dict[str, Any]]:
    files = local_files(where)
    if not files:
        try:
            import datasets  # here, not above: local files need no hub library
        except ImportError as error:
            raise ImportError(
                f"{where} is no local file, and hub datasets need the package `datasets`, which is not installed: "
                "pip install 'ready-jax[train]', or give JSON lines"
            ) from error
        rows = datasets.load_dataset(str(where), split=split, revision=revision, streaming=True)
        yield from rows if seed is None else rows.shuffle(seed=seed, buffer_size=SHUFFLED)
    for file in files:
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{file}:{number} is no JSON ({error}): one object a line is needed") from error


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
