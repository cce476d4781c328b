"""Write a target or a drafter as a Hugging Face folder that other programs open."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from ready_jax import lora, names, schema
from ready_jax.drafter import Drafter
from ready_jax.layers import Coded, Scaled
from ready_jax.target import Target
from ready_jax.tensor_files import CONFIG, GENERATION, INDEX, SINGLE
from ready_jax.tensor_parallel import Sharded


def save_pretrained(
    model: Target | Drafter | Sharded,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write ``config.json`` and safetensors in Hugging Face names; a target opens in the reference library.

    A state reader's weights stand under ``ready_reader.``, its settings under that key of the config: a plain DSpark
    consumer leaves both out. Files are replaced one by one, the same model gives the same bytes. ``tokenizer``
    (anything with ``save_pretrained``) is saved beside them. Earlier weights in the folder are removed. Raises
    ValueError for a model with fp8 or coded matrices or LoRA updates that are not merged.
    """
    if isinstance(model, Sharded):
        model = model.whole()
    stored = {type(leaf) for leaf in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, Scaled | Coded))}
    for kind, what in ((Scaled, "fp8 matrices (quantize.draft_fp8)"), (Coded, "coded matrices (lossless.compress)")):
        if kind in stored:
            raise ValueError(f"found {what}; a checkpoint needs the model that they were made from")
    if isinstance(model, Drafter) and lora.config_of(model) is not None:
        raise ValueError(
            "found LoRA updates: save_pretrained writes whole drafters (lora.merge), adapter.py the updates"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    is_target = isinstance(model, Target)
    leaves = names.target_leaves(model.config) if is_target else names.drafter_leaves(model.config)
    shards = list(_shards(leaves, names.stored_target if is_target else str, _flat(model), max_shard_bytes))
    stale = {path.name for path in folder.glob("model*.safetensors*")}
    weight_map: dict[str, str] = {}
    for i, pieces in enumerate(shards):
        name = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({key: make() for key, make in pieces}, folder / f".{name}.part", metadata={"format": "pt"})
        os.replace(folder / f".{name}.part", folder / name)
        weight_map |= dict.fromkeys((key for key, _ in pieces), name)
    written = set(weight_map.values())
    if len(shards) > 1:
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
        written.add(INDEX)
    for name in stale - written:
        (folder / name).unlink()
    write_json(folder / CONFIG, schema.to_raw(model.config, model.dtype.name))
    if is_target and model.config.eos_token_ids:
        write_json(folder / GENERATION, {"eos_token_id": schema.to_raw(model.config)["eos_token_id"]})
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file whole: a reader never sees half of it."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, path)


def _flat(model: Any) -> dict[tuple[Any, ...], Any]:
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}


def stored_tensors(leaves: list[names.Leaf], model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(stored name, array as it is stored) of some leaves of a model."""
    for group in _shards(leaves, str, _flat(model), 1 << 62):
        for name, make in group:
            yield name, make()


def _shards(
    leaves: list[names.Leaf], stored_name: Callable[[str], str], values: dict[tuple[Any, ...], Any], limit: int
) -> Iterator[list[tuple[str, Callable[[], np.ndarray]]]]:
    """Groups of (stored name, how to make the array) of at most ``limit`` bytes each, in the order of the table."""
    group: list[tuple[str, Callable[[], np.ndarray]]] = []
    used = 0
    for leaf in leaves:
        value = values[leaf.path]
        fetch = cache(partial(np.asarray, value))  # a fused leaf leaves the device once
        for piece, columns in names.column_ranges(leaf):
            size = int(np.prod(piece.shape)) * value.dtype.itemsize
            if group and used + size > limit:
                yield group
                group, used = [], 0
            group.append((stored_name(piece.name), partial(_stored, leaf, piece, columns, fetch)))
            used += size
    yield group


def _stored(leaf: names.Leaf, piece: names.Piece, columns: slice, fetch: Callable[[], np.ndarray]) -> np.ndarray:
    """One stored tensor out of its leaf: the inverse of ``checkpoint.assemble``."""
    host = fetch()
    if leaf.form == "transposed":
        host = host[:, columns].T
    elif leaf.form == "conv":
        host = host.T[:, None]
    return np.ascontiguousarray(host.reshape(piece.shape))
