"""Compiled programs with their cost in sight: how many were built, and how long building took."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

#: bf16 must be rounded where the code says so: XLA may otherwise keep fp32 inside a fusion, and which values are
#: fused differs between programs.
EXACT = {"xla_allow_excess_precision": False}


class Program:
    """A jitted function that compiles ahead of its first call and keeps count.

    ``trace_seconds`` (Python to StableHLO, paid by every process), ``compile_seconds`` (XLA, what a compilation cache
    saves) and ``num_compiles`` say what a run paid before it ran; calls with shapes seen before pay nothing.
    ``static`` names keyword arguments that are part of the program.
    """

    def __init__(self, function: Callable, *, static: tuple[str, ...] = (), donate: tuple[str, ...] = ()):
        self._jitted = jax.jit(function, static_argnames=static, donate_argnames=donate, compiler_options=EXACT)
        self._static = static
        self._compiled: dict = {}
        self.trace_seconds = self.compile_seconds = 0.0

    @property
    def num_compiles(self) -> int:
        return len(self._compiled)

    def __call__(self, **arguments):
        arrays = {name: value for name, value in arguments.items() if name not in self._static}
        leaves, structure = jax.tree.flatten(arrays)
        kinds = tuple((leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves)
        key = (structure, kinds, tuple(arguments[name] for name in self._static))
        if key not in self._compiled:
            start = time.perf_counter()
            lowered = self._jitted.lower(**arguments)
            middle = time.perf_counter()
            self._compiled[key] = lowered.compile()
            self.trace_seconds += middle - start
            self.compile_seconds += time.perf_counter() - middle
        return self._compiled[key](**arrays)
