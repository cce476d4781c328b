"""Hugging Face folders and hub names: load a target or a drafter, look into a folder.

Headers are read and every fault is reported before a device holds anything; then tensors go one leaf at a time from
the mapped file into their final type. Which stored tensor fills which leaf stands in :mod:`ready_jax.names`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ready_jax import adapter, names, schema, sharding
from ready_jax.config import DrafterConfig, TargetConfig
from ready_jax.drafter import Drafter
from ready_jax.export import save_pretrained
from ready_jax.load_report import LoadReport, Plan, match
from ready_jax.target import Target
from ready_jax.tensor_files import CONFIG, GENERATION, CheckpointError, Scan, StoredTensor, read_json, scan

__all__ = [
    "CheckpointError",
    "LoadReport",
    "bytes_to_download",
    "inspect",
    "load_drafter",
    "load_drafter_with_report",
    "load_target",
    "load_target_with_report",
    "parameter_bytes",
    "resolve",
    "save_pretrained",
]

#: Bytes of a stored matrix from which transposing it takes more than one thread.
_THREADED_FROM = 1 << 24
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt"]


def resolve(source: str | Path, revision: str | None = None) -> tuple[Path, str | None]:
    """The local folder of a checkpoint and its commit hash, if known; a folder wins over a hub name.

    Hub names (``owner/name``) are downloaded once into the hub's cache; pin ``revision`` to a commit hash.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise CheckpointError(f"{source}: found a file, needed a folder with {CONFIG} and safetensors files")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
            raise CheckpointError(f"{source}: found no such folder, and it is no hub name (owner/name) either")
        folder = _download(str(source), revision)
    at = folder.resolve()
    is_snapshot = at.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", at.name)
    return folder, at.name if is_snapshot else None


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # slow import, only needed here

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:  # network, permissions, no such repository or revision: all end here
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"{name}: found no such folder here, and the hub could not deliver {name}{at}: {error}"
        ) from error


def bytes_to_download(source: str | Path, revision: str | None = None) -> int:
    """Bytes of the safetensors files behind a hub name; 0 for a folder, or where the hub does not tell."""
    if Path(source).expanduser().exists():
        return 0
    from huggingface_hub import model_info  # slow import, only needed here

    try:
        files = model_info(str(source), revision=revision, files_metadata=True).siblings or []
    except Exception:  # offline, or no such name: `resolve` finds a cached copy or reports it
        return 0
    return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))


def _read_config(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / CONFIG
    if not path.is_file():
        found = sorted(entry.name for entry in folder.iterdir())
        raise CheckpointError(f"{path}: not there; the folder holds {found[:20] or 'nothing'}")
    return read_json(path), str(path)


def _read_generation(folder: Path) -> dict[str, Any] | None:
    path = folder / GENERATION
    return read_json(path) if path.is_file() else None


def _plan_target(source: str | Path, revision: str | None) -> tuple[TargetConfig, Plan]:
    folder, commit = resolve(source, revision)
    raw, where = _read_config(folder)
    config = schema.target_config(raw, where, _read_generation(folder))
    plan = match(
        "target",
        folder,
        commit,
        scan(folder),
        names.target_leaves(config),
        names.canonical_target,
        tied=config.tie_word_embeddings,
    )
    return config, plan


def load_target_with_report(
    source: str | Path, *, revision: str | None = None, dtype: Any = "bfloat16", mesh: Any = None, strict: bool = True
) -> tuple[Target, LoadReport]:
    """As :func:`load_target`, with the account of what was loaded, left out or initialised."""
    dtype = _dtype(dtype)
    config, plan = _plan_target(source, revision)
    plan.report.raise_if_wrong(strict)
    return _fill(lambda: Target(config, rngs=nnx.Rngs(0), dtype=dtype), plan, mesh), plan.report


def load_target(
    source: str | Path, *, revision: str | None = None, dtype: Any = "bfloat16", mesh: Any = None, strict: bool = True
) -> Target:
    """A target from a folder or hub name, as ``dtype`` (decay parameters stay fp32), on ``mesh`` if given.

    Raises CheckpointError (a ValueError) naming every fault. ``strict=False`` leaves what is
    missing or misshapen at random values: use :func:`load_target_with_report` to see which.
    """
    return load_target_with_report(source, revision=revision, dtype=dtype, mesh=mesh, strict=strict)[0]


def _plan_drafter(
    source: str | Path, revision: str | None, mask_token_id: int | None, reader: bool
) -> tuple[DrafterConfig, Plan]:
    folder, commit = resolve(source, revision)
    raw, where = _read_config(folder)
    notes = []
    if not reader and raw.pop("ready_reader", None) is not None:
        notes.append("reader=False: the state reader of this checkpoint is left out, it drafts as plain DSpark")
    config = schema.drafter_config(raw, where, mask_token_id=mask_token_id)
    base = adapter.base_of(raw, folder)
    found = scan(folder) if base is None else adapter.scan_adapter(folder, raw, resolve(*base)[0])
    own = _own_embeddings(found)
    if own is not None and own != config.own_embeddings:
        config = replace(config, own_embeddings=own)
        notes.append("embedding and head: the checkpoint's own" if own else "embedding and head: the target's")
    plan = match(
        "drafter",
        folder,
        commit,
        found,
        names.drafter_leaves(config),
        names.canonical_drafter,
        skip={"verifier_": "verifier"} | ({} if reader else {names.READER_PREFIX: "reader"}),
        notes=tuple(notes),
    )
    return config, plan


def _own_embeddings(found: Scan) -> bool | None:
    """Whether embedding and head are both stored, or both not; None if only one of them is."""
    keys = {names.canonical_drafter(key) for key in (*(tensor.key for tensor in found.tensors), *found.lost)}
    stored = keys & {"embed_tokens.weight", "lm_head.weight"}
    return None if len(stored) == 1 else bool(stored)


def load_drafter_with_report(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: Any = "bfloat16",
    mesh: Any = None,
    strict: bool = True,
    reader: bool = True,
    mask_token_id: int | None = None,
) -> tuple[Drafter, LoadReport]:
    """As :func:`load_drafter`, with the account of what was loaded, left out or initialised."""
    dtype = _dtype(dtype)
    config, plan = _plan_drafter(source, revision, mask_token_id, reader)
    plan.report.raise_if_wrong(strict)
    drafter = _fill(lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype), plan, mesh)
    adapted = adapter.attach_stored(drafter, Path(plan.report.source), dtype)
    return adapted if mesh is None else sharding.place(adapted, mesh), plan.report


def load_drafter(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: Any = "bfloat16",
    mesh: Any = None,
    strict: bool = True,
    reader: bool = True,
    mask_token_id: int | None = None,
) -> Drafter:
    """A drafter from a folder or hub name; parameters as in :func:`load_target`.

    ``reader=False`` leaves a state reader out (plain DSpark). ``mask_token_id`` overrides the checkpoint's; one of
    the two must be there. ``schema.check_pair`` tells whether it fits a target.
    """
    return load_drafter_with_report(
        source,
        revision=revision,
        dtype=dtype,
        mesh=mesh,
        strict=strict,
        reader=reader,
        mask_token_id=mask_token_id,
    )[0]


def inspect(source: str | Path, *, revision: str | None = None) -> LoadReport:
    """What loading a target or drafter would find, from the headers alone; faults are reported, not raised.

    Raises ConfigError where ``config.json`` does not say which tensors are needed.
    """
    folder, _ = resolve(source, revision)
    raw, _ = _read_config(folder)
    if schema.is_drafter(raw):
        return _plan_drafter(folder, None, None, True)[1].report
    return _plan_target(folder, None)[1].report


def parameter_bytes(folder: str | Path) -> int:
    """Stored bytes of what would be loaded, from the headers alone; unreadable files count nothing."""
    return sum(tensor.stop - tensor.start for tensor in scan(Path(folder)).tensors if not names.skipped(tensor.key))


def _dtype(dtype: Any) -> np.dtype:
    found = jnp.dtype(dtype)
    if found not in (jnp.dtype("bfloat16"), jnp.dtype("float32")):
        raise ValueError(f"dtype={found.name}: needed bfloat16 or float32")
    return found


def _fill(make: Callable[[], Any], plan: Plan, mesh: Any) -> Any:
    """The module with every planned leaf read; leaves that lack a tensor keep what ``make`` draws."""
    graph, state = nnx.split(nnx.eval_shape(make))
    flat = nnx.to_flat_state(state)
    leaves: dict[tuple[Any, ...], names.Leaf] = {leaf.path: leaf for leaf in plan.leaves}
    unmatched = {path for path, _ in flat} ^ set(leaves)
    if unmatched:
        raise AssertionError(f"module and name table disagree about {sorted(unmatched, key=str)}")
    drawn = _draw(make, {path for path, leaf in leaves.items() if any(p.name not in plan.tensors for p in leaf.pieces)})
    filled = []
    for path, variable in flat:
        value: Any = assemble(leaves[path], variable.get_value(), plan.tensors, drawn.get(path))
        if mesh is None:  # with a mesh leaves stay on the host until they are placed
            value = jax.block_until_ready(jax.device_put(value))
        filled.append((path, variable.replace(value)))
    model = nnx.merge(graph, nnx.from_flat_state(filled))
    return model if mesh is None else sharding.place(model, mesh)


def _draw(make: Callable[[], Any], paths: set[tuple[Any, ...]]) -> dict[tuple[Any, ...], np.ndarray]:
    """Random values of some leaves; under jit, so that the others are never drawn."""
    if not paths:
        return {}
    order = [path for path, _ in nnx.to_flat_state(nnx.state(nnx.eval_shape(make))) if path in paths]

    def some():
        values = dict(nnx.to_flat_state(nnx.state(make())))
        return [values[path].get_value() for path in order]

    return dict(zip(order, map(np.asarray, jax.jit(some)()), strict=True))


def assemble(leaf: names.Leaf, like: Any, tensors: dict[str, StoredTensor], start: np.ndarray | None) -> np.ndarray:
    """One leaf on the host: stored tensors side by side from column 0, zero (or ``start``) where there is none."""
    out = np.zeros(like.shape, like.dtype) if start is None else np.array(start, like.dtype)
    if leaf.form != "transposed":
        stored = tensors.get(leaf.pieces[0].name)
        if stored is not None:
            found = stored.read()
            found = found[:, 0].T if leaf.form == "conv" else found.reshape(like.shape)
            out[...] = found
        return out
    for piece, columns in names.column_ranges(leaf):
        if piece.name in tensors:
            _paste_transposed(out[:, columns], tensors[piece.name].read())
    return out


def _paste_transposed(out: np.ndarray, stored: np.ndarray, tile: int = 128) -> None:
    """``out[...] = stored.T`` in tiles, by several threads where it is large.

    A plain strided copy of a large matrix misses the cache on every element; equal types are copied as integers,
    for which NumPy lets other threads run.
    """
    if out.dtype == stored.dtype:
        integer = np.dtype(f"u{out.dtype.itemsize}")
        out, stored = out.view(integer), stored.view(integer)

    def paste(row: int) -> None:
        for column in range(0, stored.shape[1], tile):
            out[column : column + tile, row : row + tile] = stored[row : row + tile, column : column + tile].T

    rows = range(0, stored.shape[0], tile)
    if stored.nbytes < _THREADED_FROM:
        for row in rows:
            paste(row)
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(paste, rows))
