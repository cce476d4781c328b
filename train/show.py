"""What a run shows while it trains: a progress bar and log lines, `metrics.jsonl`, TensorBoard, W&B."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from ready_jax.configs.drafter_training import Recipe

METRICS = "metrics.jsonl"


def scalars(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a nested record under names with slashes; lists are numbered from 1."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            found |= scalars({str(i + 1): x for i, x in enumerate(value)}, f"{prefix}{name}@")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = float(value)
    return found


def cut_after(path: Path, step: int) -> None:
    """Drop the lines of a metrics file that belong to later steps than ``step``, and a half-written last one."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    part = path.with_suffix(".part")
    part.write_text("".join(f"{line}\n" for line in kept))
    part.replace(path)


class Show:
    """Writers of one run; only the first process writes. ``log`` prints a line above the bar."""

    def __init__(self, recipe: Recipe, out: Path, start: int, *, log):
        self._log, self._steps, self._start = log, recipe.optimizer.steps, start
        self._writes = jax.process_index() == 0
        self._begun = time.perf_counter()
        self._board = self._wandb = self._file = None
        self.bar = tqdm(
            total=self._steps, initial=start, unit="step", disable=not (self._writes and recipe.log.progress) or None
        )
        if not self._writes:
            return
        cut_after(out / METRICS, start)
        self._file = (out / METRICS).open("a")
        if recipe.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
            log("TensorBoard is off: it is not installed (pip install 'ready-jax[train]')")
        elif recipe.log.tensorboard:
            from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]  optional

            self._board = Writer(str(out / "tensorboard"))
        if recipe.log.wandb:
            import wandb  # pyright: ignore[reportMissingImports]  optional, asked for by name

            self._wandb = wandb.init(project=recipe.log.wandb, config=asdict(recipe), dir=str(out), resume="allow")

    def __call__(self, step: int, values: dict[str, Any]) -> None:
        """Write a record of a step everywhere."""
        if not self._writes or self._file is None:
            return
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()
        numbers = scalars(values)
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def line(self, text: str) -> None:
        if self._writes:
            self._log(text)

    def advance(self, step: int, loss: float | None = None) -> None:
        self.bar.update(step - self.bar.n)
        if loss is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)

    def eta(self, step: int) -> float:
        """Seconds to go at the pace since the start."""
        done = max(step - self._start, 1)
        return (time.perf_counter() - self._begun) / done * (self._steps - step)

    def close(self) -> None:
        self.bar.close()
        for writer in (self._file, self._board):
            if writer is not None:
                writer.close()
        if self._wandb is not None:
            self._wandb.finish()
