"""Training state on disk.

`Store` is Orbax, for resuming: atomic, asynchronous, and always restored onto today's devices through an abstract
target (without one Orbax rebuilds the sharding that was saved, and fails on another number of devices).
`save_parts` and `load_parts` are plain safetensors files of bounded size, for weights that travel.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file, save_file

Flat = dict[str, Any]


class Store:
    """Checkpoints of a run: `params`, `optimizer` and the JSON `run` (step, totals) under one number each."""

    def __init__(self, folder: str | Path, keep: int = 2):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        # Handlers by name: without them a new process can neither list the shapes nor name the items.
        handlers = {
            "params": ocp.StandardCheckpointHandler(),
            "optimizer": ocp.StandardCheckpointHandler(),
            "run": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(Path(folder).absolute(), options=options, item_handlers=handlers)

    def save(self, step: int, params: Any, optimizer: Any, run: dict[str, Any]) -> None:
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                optimizer=ocp.args.StandardSave(optimizer),
                run=ocp.args.JsonSave(run),
            ),
        )

    def latest(self) -> int | None:
        self._manager.wait_until_finished()
        return self._manager.latest_step()

    def shapes(self, step: int) -> Any:
        """The stored parameters' shapes and dtypes; reads no data and needs no particular number of devices."""
        return self._manager.item_metadata(step)["params"]

    def run(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]

    def params(self, step: int, like: Any) -> Any:
        """The parameters alone, placed as `like` (arrays, or ShapeDtypeStructs with a sharding)."""
        args = ocp.args.Composite(params=ocp.args.StandardRestore(abstract(like)))
        return self._manager.restore(step, args=args)["params"]

    def restore(self, step: int, params: Any, optimizer: Any) -> tuple[Any, Any, dict[str, Any]]:
        """(params, optimizer, run), placed as the trees given."""
        found = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(abstract(params)),
                optimizer=ocp.args.StandardRestore(abstract(optimizer)),
                run=ocp.args.JsonRestore(),
            ),
        )
        return found["params"], found["optimizer"], found["run"]

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and today's shardings of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def save_parts(
    folder: str | Path, name: str, flat: Flat, *, dtype: Callable[[str], str], limit: int = 15 << 20
) -> list[Path]:
    """Write `{name}-0.safetensors`, ... of at most `limit` bytes each; `dtype(key)` is the type a key is stored in."""
    parts: list[Flat] = [{}]
    size = 0
    for key, value in sorted(flat.items()):
        value = np.asarray(value).astype(dtype(key))
        if size + value.nbytes > limit and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][key] = value
        size += value.nbytes
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{name}-*.safetensors"):
        stale.unlink()
    paths = [folder / f"{name}-{number}.safetensors" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        save_file(part, path, metadata={"parts": json.dumps(len(parts))})
    return paths


def load_parts(folder: str | Path, name: str) -> Flat:
    """What `save_parts` wrote, in the types it was stored in."""
    paths = sorted(Path(folder).glob(f"{name}-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no {name}-*.safetensors: a finished training run is needed")
    flat: Flat = {}
    for path in paths:
        flat |= load_file(path)
    return flat
