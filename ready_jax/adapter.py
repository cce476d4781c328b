"""Folders that hold what was trained beside a base drafter: LoRA factors and a state reader, not merged.

    config.json                 the whole drafter's, reader included, and which base it belongs to
    adapter_config.json         LoRA's rank, alpha and targets, as PEFT writes them
    adapter_model.safetensors   base_model.model.{module}.lora_A.weight [rank, in], lora_B.weight [out, rank]
    reader.safetensors          ready_reader.*

``checkpoint.load_drafter`` opens such a folder like any other: base first, then what stands beside it. Factors and
reader are kept as they were trained (fp32), so that a loaded drafter equals the one that was saved bit for bit.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from ready_jax import lora, names, schema
from ready_jax.config import LoraConfig
from ready_jax.drafter import Drafter
from ready_jax.export import stored_tensors, write_json
from ready_jax.tensor_files import CONFIG, CheckpointError, Scan, StoredTensor, read_header, read_json, scan

LORA_CONFIG, LORA_WEIGHTS, READER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "reader.safetensors"
BASE, REVISION, FINGERPRINT = "base_model_name_or_path", "base_revision", "base_fingerprint"
_PREFIX = "base_model.model."


def fingerprint(found: Scan) -> str:
    """A hash of a checkpoint's names, shapes and the first bytes of every tensor: another training is noticed."""
    digest = hashlib.sha256()
    for tensor in sorted(found.tensors, key=lambda tensor: tensor.key):
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            head = file.read(min(4096, tensor.stop - tensor.start))
        digest.update(f"{tensor.key} {tensor.dtype} {tensor.shape}".encode() + head)
    return digest.hexdigest()


def save_adapter(
    drafter: Drafter, folder: str | Path, *, base: str | Path, base_folder: Path, revision: str | None = None
) -> None:
    """Write the LoRA factors and the reader of a drafter, whose other weights are those of ``base``.

    ``base`` is a folder (stored relative to ``folder``) or a hub name that was downloaded to ``base_folder``. Raises
    ValueError for a drafter with neither.
    """
    settings = lora.config_of(drafter)
    if settings is None and drafter.reader is None:
        raise ValueError("this drafter has neither LoRA updates nor a reader: save_pretrained writes whole drafters")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    is_folder = Path(base).is_dir()
    origin = {
        BASE: os.path.relpath(Path(base).resolve(), folder.resolve()) if is_folder else str(base),
        REVISION: revision,
        FINGERPRINT: fingerprint(scan(base_folder)),
    }
    for name, tensors in ((LORA_WEIGHTS, _factors(drafter)), (READER_WEIGHTS, _reader(drafter))):
        if tensors:
            save_file(tensors, folder / f".{name}.part", metadata={"format": "pt"})
            os.replace(folder / f".{name}.part", folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    (folder / LORA_CONFIG).unlink(missing_ok=True)
    if settings is not None:
        peft = dict(peft_type="LORA", task_type=None, bias="none", lora_dropout=0.0, inference_mode=True)
        peft |= dict(r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.targets))
        write_json(folder / LORA_CONFIG, peft | origin)
    write_json(folder / CONFIG, schema.to_raw(drafter.config, drafter.dtype.name) | origin)


def _factors(drafter: Drafter) -> dict[str, np.ndarray]:
    found = {}
    for module in lora.adapted(drafter):
        for name, down, up in zip(module.modules, module.down, module.up, strict=True):
            for which, factor in (("A", down), ("B", up)):
                found[f"{_PREFIX}{name}.lora_{which}.weight"] = np.ascontiguousarray(np.asarray(factor[...]).T)
    return found


def _reader(drafter: Drafter) -> dict[str, np.ndarray]:
    if drafter.reader is None:
        return {}
    leaves = [leaf for leaf in names.drafter_leaves(drafter.config) if leaf.path[0] == "reader"]
    return dict(stored_tensors(leaves, drafter))


def base_of(raw: dict[str, Any], folder: Path) -> tuple[str, str | None] | None:
    """(folder or hub name, revision) of the base that a ``config.json`` names; None for a complete checkpoint."""
    if BASE not in raw:
        return None
    beside = folder / raw[BASE]
    return str(beside) if beside.is_dir() else raw[BASE], raw.get(REVISION)


def origin(source: str | Path, revision: str | None, resolve) -> tuple[str, Path, str | None]:
    """(name, local folder, revision) of the complete drafter behind a checkpoint: itself, or an adapter's base.

    ``resolve`` is ``checkpoint.resolve``.
    """
    folder, _ = resolve(source, revision)
    base = base_of(read_json(folder / CONFIG), folder)
    return (str(source), folder, revision) if base is None else (base[0], resolve(*base)[0], base[1])


def scan_adapter(folder: Path, raw: dict[str, Any], base: Path) -> Scan:
    """The base's tensors, and the adapter's reader in place of one that the base has. CheckpointError if the base is
    not the one it was trained on."""
    found = scan(base)
    if BASE in read_json(base / CONFIG):
        raise CheckpointError(f"{folder}: its base {base} is an adapter itself, needed a complete drafter")
    if not found.problems and fingerprint(found) != raw.get(FINGERPRINT):
        raise CheckpointError(f"{folder}: {base} holds other weights than the base that this adapter was trained on")
    path = folder / READER_WEIGHTS
    if not path.is_file():
        return found
    try:
        own = read_header(path)
    except ValueError as error:
        return Scan(found.tensors, (*found.problems, f"{path}: {error}"), found.lost)
    keys = {tensor.key for tensor in own}
    return Scan((*(x for x in found.tensors if x.key not in keys), *own), found.problems, found.lost)


def attach_stored(drafter: Drafter, folder: Path, dtype: Any) -> Drafter:
    """The drafter with the LoRA factors that ``folder`` holds, as ``dtype``; without any, as it is.

    Raises CheckpointError naming every factor that is missing, misshapen or not known.
    """
    if not (folder / LORA_CONFIG).is_file():
        return drafter
    raw = read_json(folder / LORA_CONFIG)
    try:
        settings = LoraConfig(int(raw["r"]), float(raw["lora_alpha"]), tuple(raw["target_modules"]))
        tensors = {tensor.key: tensor for tensor in read_header(folder / LORA_WEIGHTS)}
        drafter = lora.attach(drafter, settings, rngs=nnx.Rngs(0), dtype=dtype)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{folder}: no LoRA adapter of this drafter: {error}") from None
    faults = []
    for module in lora.adapted(drafter):
        for name, down, up in zip(module.modules, module.down, module.up, strict=True):
            for which, factor in (("A", down), ("B", up)):
                key = f"{_PREFIX}{name}.lora_{which}.weight"
                found: StoredTensor | None = tensors.pop(key, None)
                if found is None or found.shape != factor.shape[::-1]:
                    shape = None if found is None else list(found.shape)
                    faults.append(f"{key}: found {shape or 'none'}, needed {list(factor.shape[::-1])}")
                else:
                    factor[...] = jnp.asarray(found.read().T, dtype)
    faults += [f"{key}: found, needed no such tensor" for key in tensors]
    if faults:
        raise CheckpointError(f"{folder / LORA_WEIGHTS}: " + "; ".join(faults))
    return drafter


def describe(drafter: Drafter) -> str:
    """What a drafter is made of, for a log line."""
    settings = lora.config_of(drafter)
    parts = [] if settings is None else [f"LoRA rank {settings.rank}"]
    if drafter.config.reader is not None:
        reader = drafter.config.reader
        own = "" if reader.reads == "own" else f" ({reader.reads} states)"
        parts.append(f"reader of layers {list(reader.state_layers)}{own}")
    window = drafter.config.sliding_window
    return ", ".join(parts + ([] if window is None else [f"window {window}"])) or "plain DSpark"
