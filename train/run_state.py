"""The state of a run on disk: `latest` and `best`, saved in the background, complete or not there at all.

A killed process leaves the last finished save; Orbax renames a save into place when everything of it is written.
Arrays are stored under their names, and restored onto today's devices, however many there are.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from ready_jax.configs.drafter_training import Recipe
from ready_jax.train.step import COUNTERS, TrainState
from ready_jax.train.store import Store

#: Sections and fields in which a resumed run may differ from what it was: where it runs and what it shows.
FREE = ("files.out", "files.resume_from", "files.save_tokens", "files.bigram", "log", "mesh", "evaluate")


def named(tree: Any) -> dict[str, jax.Array]:
    """Leaves by their path: how they are stored, whatever containers a library's next version uses."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(_word(key) for key in path): leaf for path, leaf in leaves}


def _word(key: Any) -> str:
    return str(next(getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name)))


def flat_config(recipe: Recipe) -> dict[str, Any]:
    """``section.field`` -> JSON value of everything that a resumed run must agree on."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if any(prefix == free or prefix.startswith(f"{free}.") for free in FREE):
            return
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else name, inner)
        else:
            flat[prefix] = list(value) if isinstance(value, tuple) else value

    walk("", asdict(recipe))
    return flat


def check_same(now: dict[str, Any], stored: dict[str, Any], where: str) -> None:
    """ValueError that shows both values of every field in which a flat configuration differs from the run's own."""
    differ = [
        f"{name}: the run has {stored.get(name)!r}, this configuration {now.get(name)!r}"
        for name in sorted(now.keys() | stored.keys())
        if now.get(name) != stored.get(name)
    ]
    if differ:
        raise ValueError(
            f"{where} was trained with another configuration: " + "; ".join(differ) + ". To start a new run from its "
            "weights, set files.from_pretrained instead of files.resume_from"
        )


def same_folder(a: str | Path, b: str | Path) -> bool:
    return Path(a).resolve() == Path(b).resolve()


class RunState:
    """``folder/latest`` and ``folder/best``; ``best`` is the highest score so far."""

    def __init__(self, folder: str | Path, keep: int = 2):
        self.folder = Path(folder)
        self._latest = Store(self.folder / "latest", keep)
        self._best = Store(self.folder / "best", 1)
        self.best_score: float | None = None

    @staticmethod
    def exists(folder: str | Path) -> bool:
        """Whether a finished save is there."""
        return any(child.name.isdigit() for child in (Path(folder) / "latest").glob("*"))

    def save(self, state: TrainState, record: dict[str, Any], score: float | None = None) -> None:
        """Begin saving; returns as soon as the arrays have left the devices. ``record`` is JSON (config, history)."""
        step = int(state.step)
        better = score is not None and (self.best_score is None or score > self.best_score)
        if better:
            self.best_score = score
        record = record | {"best_score": self.best_score}
        params, rest = named(state.masters), _rest(state)
        if better and self._best.latest() != step:  # a killed run may have got as far as this
            self._best.save(step, params, rest, record)
            self._best.latest()  # written before the record that knows its score
        if self._latest.latest() != step:
            self._latest.save(step, params, rest, record)

    def restore(self, like: TrainState, which: str = "latest") -> tuple[TrainState, dict[str, Any]]:
        """(state placed as ``like``, the record saved with it). FileNotFoundError without a finished save."""
        store = self._latest if which == "latest" else self._best
        masters, rest, record = store.restore(self._finished(store), named(like.masters), _rest(like))
        self.best_score = record.get("best_score")
        masters = jax.tree.unflatten(jax.tree.structure(like.masters), [masters[name] for name in named(like.masters)])
        moments = {name.removeprefix("optimizer."): x for name, x in rest.items() if name.startswith("optimizer.")}
        optimizer = jax.tree.unflatten(
            jax.tree.structure(like.optimizer), [moments[name] for name in named(like.optimizer)]
        )
        counters = {name: rest[name] for name in COUNTERS}
        return TrainState(**counters, masters=masters, optimizer=optimizer), record

    def record(self) -> dict[str, Any]:
        """What was saved beside the latest state. FileNotFoundError without one."""
        return self._latest.run(self._finished(self._latest))

    def _finished(self, store: Store) -> int:
        step = store.latest()
        if step is None:
            raise FileNotFoundError(f"{self.folder} holds no finished save of a run")
        return step

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._latest.close()
        self._best.close()


def _rest(state: TrainState) -> dict[str, jax.Array]:
    counters = {name: getattr(state, name) for name in COUNTERS}
    return counters | {f"optimizer.{name}": x for name, x in named(state.optimizer).items()}
