"""Compiled programs with their cost in sight: how many were built, and how long building took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ready_jax.kernels import dispatch

#: bf16 must be rounded where the code says so: XLA may otherwise keep fp32 inside a fusion, and which values are
#: fused differs between programs.
EXACT = {"xla_allow_excess_precision": False}

#: What programs are compiled with. Merged products of one input would copy their weights together in every round.
OPTIONS = EXACT | {"xla_gpu_dot_merger_threshold_mb": 0}


class Program:
    """A jitted function that compiles ahead of its first call and keeps count.

    ``trace_seconds`` (Python to StableHLO, paid by every process), ``compile_seconds`` (XLA, what a compilation cache
    saves) and ``num_compiles`` say what a run paid before it ran; calls with shapes seen before pay nothing.
    ``static`` names keyword arguments that are part of the program; ``options`` are further XLA options.
    """

    def __init__(
        self,
        function: Callable,
        *,
        static: tuple[str, ...] = (),
        donate: tuple[str, ...] = (),
        options: Mapping[str, Any] | None = None,
    ):
        compiler_options = OPTIONS | dict(options or {})
        self._jitted = jax.jit(
            function, static_argnames=static, donate_argnames=donate, compiler_options=compiler_options
        )
        self._static = static
        self._compiled: dict = {}
        self.trace_seconds = self.compile_seconds = 0.0

    @property
    def num_compiles(self) -> int:
        return len(self._compiled)

    def __call__(self, **arguments):
        compiled, arrays = self._lookup(arguments)
        return compiled(**arrays)

    def compiled(self, **arguments):
        """The executable that a call with such arguments runs (``jax.stages.Compiled``), built if it is new.

        Arguments may be ``jax.ShapeDtypeStruct``.
        """
        return self._lookup(arguments)[0]

    def _lookup(self, arguments):
        arrays = {name: value for name, value in arguments.items() if name not in self._static}
        leaves, structure = jax.tree.flatten(arrays)
        kinds = tuple((leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves)
        key = (structure, kinds, tuple(arguments[name] for name in self._static))
        if key not in self._compiled:
            start = time.perf_counter()
            spread = any(len(getattr(kind[2], "device_set", ())) > 1 for kind in kinds)
            with dispatch.partitioned(spread):
                lowered = self._jitted.lower(**arguments)
            middle = time.perf_counter()
            self._compiled[key] = lowered.compile()
            self.trace_seconds += middle - start
            self.compile_seconds += time.perf_counter() - middle
        return self._compiled[key], arrays
