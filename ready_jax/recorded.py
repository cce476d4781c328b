"""A benchmark that keeps what it has: steps that may fail, and a JSON record written after every one of them."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


class Recorded:
    """``record`` needs ``errors`` and ``seconds``, by step; ``file`` None writes nothing."""

    record: dict[str, Any]
    file: Path | None
    log = staticmethod(partial(print, flush=True))

    def settle(self) -> None:
        """What the record is to say after every step, whatever became of it."""

    def found(self, name: str, before: dict[str, Any]) -> dict[str, Any]:
        """What a step's line shows: here the entries that it changed in the record as it was ``before``."""
        return {key: value for key, value in self.record.items() if before.get(key) != value}

    def attempt(self, name: str, step: Callable[[], None]) -> None:
        """Run a step, keep its failure, write the record, print a line."""
        begun, before = time.perf_counter(), dict(self.record)
        try:
            step()
        except Exception as error:
            traceback.print_exc()
            self.record["errors"][name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self.record["seconds"][name] = round(time.perf_counter() - begun, 2)
        self.settle()
        self.write()
        failed = f"FAILED {self.record['errors'][name]}" if name in self.record["errors"] else "done"
        numbers = {key: value for key, value in self.found(name, before).items() if isinstance(value, int | float)}
        shown = ", ".join(f"{key} {value:.5g}" for key, value in numbers.items())
        self.log(f"{name}: {failed} in {self.record['seconds'][name]} s; {shown}")

    def write(self) -> None:
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.record, indent=2, default=str) + "\n", encoding="utf-8")
