"""Where the time of a compiled program goes on GPUs: kernels by name and communication, from JAX's profiler."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

#: (kernel, begin, end) in nanoseconds.
Event = tuple[str, float, float]


def traced(call: Callable[[], Any]) -> list[list[Event]]:
    """Kernels of every GPU while ``call`` runs a second time; it returns arrays. No GPU: an empty list.

    The profiler runs kernels one by one instead of as a graph, so gaps between them are not those of a normal run.
    """
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (trace,) = Path(folder).rglob("*.xplane.pb")
        planes = [plane for plane in jax.profiler.ProfileData.from_file(str(trace)).planes if "GPU" in plane.name]
        found = [
            [
                (event.name, event.start_ns, event.start_ns + event.duration_ns)
                for line in plane.lines
                if "Stream" in line.name
                for event in line.events
            ]
            for plane in planes
        ]
    return [events for events in found if events]


def kernel_times(devices: list[list[Event]], turns: int) -> list[dict[str, Any]]:
    """Per kernel name (numbers stripped): launches and microseconds per turn and device, the longest total first."""
    total: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, begin, end in (event for events in devices for event in events):
        entry = total[re.sub(r"_?\d+", "", name)]
        entry[0] += 1
        entry[1] += (end - begin) / 1e3
    ordered, share = sorted(total.items(), key=lambda item: -item[1][1]), turns * max(len(devices), 1)
    return [dict(kernel=name, launches=n / share, us=round(us / share, 2)) for name, (n, us) in ordered]


def communication(devices: list[list[Event]], turns: int) -> dict[str, float] | None:
    """Microseconds per turn, means over devices; None without a device.

    ``collectives``: while a collective ran, waiting for the others included; ``exposed``: while nothing else ran
    beside it; ``span``: from the first kernel to the last.
    """
    if not devices:
        return None
    total = dict(collectives=0.0, exposed=0.0, span=0.0)
    for events in devices:
        busy, rest = covered(events), covered(event for event in events if not is_collective(event[0]))
        total["collectives"] += covered(event for event in events if is_collective(event[0]))
        total["exposed"] += busy - rest
        total["span"] += max(end for _, _, end in events) - min(begin for _, begin, _ in events)
    return {name: ns / 1e3 / turns / len(devices) for name, ns in total.items()}


def is_collective(name: str) -> bool:
    """NCCL's kernels, and the fusions of XLA that talk to other devices, which are named after what they do."""
    return re.match(r"nccl|psum|all[_-]|reduce[_-]scatter|ppermute|collective", name.lower()) is not None


def covered(events: Iterable[Event]) -> float:
    """Nanoseconds in which at least one of them runs."""
    total, until = 0.0, float("-inf")
    for _, begin, end in sorted(events, key=lambda event: event[1]):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
