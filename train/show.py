"""What a run shows while it trains: a progress bar and log lines, `metrics.jsonl`, TensorBoard, W&B."""

from __future__ import annotations

import importlib.util
import json
import math
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


def cut_after(source: Path, path: Path, step: int) -> list[dict[str, Any]]:
    """Copy the records of steps up to ``step``, without a half-written last line; they are returned too."""
    kept = []
    for line in source.read_text().splitlines() if source.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["step"] <= step:
            kept.append(record)
    part = path.with_suffix(".part")
    part.write_text("".join(f"{json.dumps(record)}\n" for record in kept))
    part.replace(path)
    return kept


class Show:
    """Writers of one run; only the first process writes. ``log`` prints a line above the bar.

    ``before``: the records of the run up to step ``start``, which ``source`` holds.
    """

    def __init__(self, recipe: Recipe, out: Path, start: int, source: Path, *, log):
        self._log, self._writes = log, jax.process_index() == 0
        self._board = self._wandb = self._file = None
        self.before: list[dict[str, Any]] = []
        steps, shown = recipe.optimizer.steps, self._writes and recipe.log.progress
        self.bar = tqdm(total=steps, initial=start, unit="step", disable=None if shown else True)
        if not self._writes:
            return
        self.before = cut_after(source, out / METRICS, start)
        self._file = (out / METRICS).open("a")
        if recipe.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
            log("TensorBoard is off: it is not installed (pip install tensorboard)")
        elif recipe.log.tensorboard:
            from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]  optional

            self._board = Writer(str(out / "tensorboard"))
        if recipe.log.wandb:
            import wandb  # pyright: ignore[reportMissingImports]  optional, asked for by name

            self._wandb = wandb.init(project=recipe.log.wandb, config=asdict(recipe), dir=str(out), resume="allow")

    def __call__(self, step: int, values: dict[str, Any]) -> None:
        """Write a record of a step everywhere; a number that is not finite is null in JSON."""
        if not self._writes or self._file is None:
            return
        values = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in values.items()}
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

    def close(self) -> None:
        self.bar.close()
        for writer in (self._file, self._board):
            if writer is not None:
                writer.close()
        if self._wandb is not None:
            self._wandb.finish()
