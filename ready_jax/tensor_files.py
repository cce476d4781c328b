"""Folders of safetensors files: headers, everything that is wrong with them, and single tensors by memory map.

Only headers are read until a tensor is asked for, and every fault is collected: nothing here raises for a damaged
file. Bits are kept as they are (bf16 through ``ml_dtypes``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
#: Stored element types that a parameter may have; the others are quantised or no floats.
FLOATS = {"F32": np.dtype("float32"), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("float16")}
_BYTES = dict(F64=8, F32=4, BF16=2, F16=2, I64=8, I32=4, I16=2, I8=1, U64=8, U32=4, U16=2, U8=1, BOOL=1)
_HINT = "is the download complete?"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it is; the message lists every fault that was found."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: bytes ``start .. stop - 1`` of ``file``."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> np.ndarray:
        """A read-only view of the file; nothing is copied."""
        if self.start == self.stop:
            return np.zeros(self.shape, FLOATS[self.dtype])
        raw = np.memmap(self.file, np.uint8, "r", offset=self.start, shape=(self.stop - self.start,))
        return raw.view(FLOATS[self.dtype]).reshape(self.shape)


def _no_contradiction(pairs):
    found = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"key {key!r} stands twice, as {found[key]!r} and as {value!r}")
        found[key] = value
    return found


def read_json(path: Path) -> dict:
    """A JSON object from a file. CheckpointError names the file if it is no such thing or contradicts itself."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_contradiction)
    except ValueError as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: found a JSON {type(found).__name__}, needed an object")
    return found


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one file, without reading them. ValueError says what is wrong with the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            raise ValueError(f"found a Git LFS pointer of {size} bytes, needed the file it stands for; {_HINT}")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or 8 + length > size:
            raise ValueError(f"found {size} bytes, needed at least {8 + length} for the header alone; {_HINT}")
        try:
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_no_contradiction)
        except ValueError as error:
            raise ValueError(f"its header is no safetensors header: {error}") from None
    header.pop("__metadata__", None)
    base = 8 + length
    tensors = [
        StoredTensor(
            path,
            key,
            entry["dtype"],
            tuple(entry["shape"]),
            base + entry["data_offsets"][0],
            base + entry["data_offsets"][1],
        )
        for key, entry in header.items()
    ]
    needed = max((tensor.stop for tensor in tensors), default=base)
    if size < needed:
        raise ValueError(f"found {size} bytes, needed {needed}: the file was cut off; {_HINT}")
    if size > needed:
        raise ValueError(f"found {size} bytes, needed {needed}: {size - needed} bytes belong to no tensor")
    end = base
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != end:
            raise ValueError(f"{tensor.key}: found its data at byte {tensor.start}, needed at {end}: overlap or hole")
        end = tensor.stop
        elements = int(np.prod(tensor.shape, dtype=np.int64))
        if tensor.dtype in _BYTES and elements * _BYTES[tensor.dtype] != tensor.stop - tensor.start:
            raise ValueError(
                f"{tensor.key}: found {tensor.stop - tensor.start} bytes, needed "
                f"{elements * _BYTES[tensor.dtype]} for {tensor.dtype} {list(tensor.shape)}"
            )
    return tensors


def _listed_files(folder: Path, problems: list[str]) -> tuple[list[Path], dict[str, str]]:
    """The files to open, and the index's {key: file}; an index rules, other files beside it are ignored."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if single.is_file():
            return [single], {}
        others = sorted(
            path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".gguf", ".pt")
        )
        problems.append(f"{folder}: found {others or 'no weights'}, needed {SINGLE} or {INDEX}; {_HINT}")
        return [], {}
    try:
        weight_map = read_json(index).get("weight_map")
    except ValueError as error:
        problems.append(f"{error}; {_HINT}")
        return [], {}
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{index}: found no weight_map, needed an object {{key: file}}")
        return [], {}
    names = sorted({str(name) for name in weight_map.values()})
    if SINGLE not in names and single.is_file():
        problems.append(f"{folder}: found {SINGLE} and an {INDEX} that does not list it: which is meant? Remove one")
    outside = [name for name in names if Path(name).name != name]
    problems += [f"{index}: names the file {name!r}, needed a plain file name in the same folder" for name in outside]
    return [folder / name for name in names if name not in outside], {k: str(v) for k, v in weight_map.items()}


@dataclass(frozen=True)
class Scan:
    """What a checkpoint folder holds: readable tensors, faults of its files, keys of the index in unreadable files."""

    tensors: tuple[StoredTensor, ...]
    problems: tuple[str, ...]
    lost: frozenset[str]


def scan(folder: Path) -> Scan:
    """Read every header of a checkpoint folder."""
    problems: list[str] = []
    files, weight_map = _listed_files(folder, problems)
    tensors: dict[str, StoredTensor] = {}
    unreadable = set()
    for path in files:
        try:
            if not path.is_file():
                raise ValueError(f"{INDEX} names this file, but it is not there; incomplete download?")
            found = read_header(path)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OSError) as error:
            reason = error if isinstance(error, ValueError) else f"its header is malformed ({error!r})"
            problems.append(f"{path}: {reason}")
            unreadable.add(path.name)
            continue
        for tensor in found:
            if tensor.key in tensors:
                problems.append(f"{tensor.key}: found in {tensors[tensor.key].file} and again in {path}, needed once")
            else:
                tensors[tensor.key] = tensor
    for key, name in weight_map.items():
        found_in = tensors[key].file.name if key in tensors else None
        if found_in != name and name not in unreadable:
            problems.append(f"{folder / INDEX}: says {key} is in {name}, found it in {found_in or 'none of the files'}")
    lost = frozenset(key for key, name in weight_map.items() if name in unreadable)
    return Scan(tuple(tensors.values()), tuple(problems), lost)
