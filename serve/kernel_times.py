"""Where the time of a compiled program goes on a GPU: kernels by name, from JAX's profiler."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(call: Callable[[], Any], turns: int) -> list[dict[str, Any]]:
    """Per kernel name (numbers stripped): launches and microseconds per turn, the longest total first.

    ``call`` runs a program of ``turns`` equal turns and returns its arrays. The profiler runs kernels one by one
    instead of as a graph, so gaps between them are not in here. Empty where the profiler sees no GPU.
    """
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (trace,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(trace)).planes
        total: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for line in (line for plane in planes if "GPU" in plane.name for line in plane.lines if "Stream" in line.name):
            for event in line.events:
                entry = total[re.sub(r"_?\d+", "", event.name)]
                entry[0] += 1
                entry[1] += event.duration_ns / 1e3
    ordered = sorted(total.items(), key=lambda item: -item[1][1])
    return [dict(kernel=name, launches=n / turns, us=round(us / turns, 2)) for name, (n, us) in ordered]
