"""The numbers of all methods on all benchmarks: per set, unweighted means over sets, paired differences. Pure.

``methods.<name>.<benchmark>`` is `metrics.of_method`; ``overall.<name>`` means; ``paired.<name>_over_<other>`` relative
changes whose intervals come from the same resampled prompts on both sides.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ready_jax.bench_data import SEVEN
from ready_jax.intervals import interval, ratio, ratio_draws
from ready_jax.serve import metrics


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def overall(by_benchmark: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Unweighted means over benchmarks; what is missing in one is left out of that mean."""
    sets = list(by_benchmark.values())

    def mean(*path: str) -> float | None:
        found: list[Any] = sets
        for key in path:
            found = [one[key] for one in found]
        return _mean(found)

    names = ("acceptance_length", "acceptance_length_sglang", "acceptance_length_deepspec", "draft_acceptance_rate")
    names += ("decode_tokens_per_second", "end_to_end_tokens_per_second", "time_to_first_token_seconds")
    names += ("milliseconds_per_round", "exact_match", "loop_share", "distinct_4")
    return {name: mean(name) for name in names} | dict(
        survival=[_mean(one["survival"][k] for one in sets) for k in range(metrics.BLOCK)],
        non_loop=mean("non_loop", "acceptance_length"),
        loop=mean("loop", "acceptance_length"),
        accuracy=_mean(one["accuracy"]["rate"] for one in sets if one["accuracy"]),
        rounds=sum(one["rounds"] for one in sets),
        prompts=sum(one["prompts"] for one in sets),
        benchmarks=list(by_benchmark),
    )


def _mean_draws(draws: Sequence[NDArray]) -> NDArray[np.float64]:
    """Draws of the unweighted mean over sets; none if a set has none."""
    usable = bool(draws) and all(np.isfinite(one).any() for one in draws)
    return np.mean(draws, axis=0) if usable else np.zeros(0)


class Draws:
    """Resamples of every set by method and kind, made once: `acceptance_length`, `non_loop`, `speed`."""

    def __init__(self, by_set: dict[str, list[metrics.Record]], methods: Sequence[str]):
        self.draws: dict[tuple[str, str, str], NDArray] = {}
        self.values: dict[tuple[str, str, str], float | None] = {}
        for benchmark, records in by_set.items():
            keep = ~metrics.looping(records)
            seed = metrics.seed_of(benchmark)
            for method in methods:
                emitted_B, rounds_B = metrics.rounds_of(records, method)
                b = metrics.batch_columns(records, method)
                pairs = {
                    "acceptance_length": (emitted_B, rounds_B),
                    "non_loop": (emitted_B[keep], rounds_B[keep]),
                    "speed": (b["tokens"], b["decode"]),
                }
                for kind, (top, bottom) in pairs.items():
                    self.draws[benchmark, method, kind] = ratio_draws(top, bottom, seed=seed)
                    self.values[benchmark, method, kind] = ratio(top, bottom)

    def mean(self, method: str, kind: str, names: Sequence[str]) -> tuple[float | None, NDArray]:
        """The unweighted mean over sets that have a number, and its draws."""
        names = [name for name in names if self.values[name, method, kind] is not None]
        value = _mean(self.values[name, method, kind] for name in names)
        return value, _mean_draws([self.draws[name, method, kind] for name in names])

    def change(self, method: str, other: str, kind: str, names: Sequence[str]) -> dict[str, Any]:
        """``method / other - 1`` with its paired interval, over the unweighted mean of sets."""
        names = [name for name in names if self.values[name, method, kind] and self.values[name, other, kind]]
        (a, over), (b, under) = self.mean(method, kind, names), self.mean(other, kind, names)
        if not a or not b:
            return dict(change=None, ci95=None)
        return dict(change=a / b - 1, ci95=interval(over / under - 1))


def mean_sets(names: Iterable[str]) -> list[str]:
    """The sets that a mean is over: those of the seven that were run, or all if none of them was."""
    names = list(names)
    return [name for name in SEVEN if name in names] or names


def summary(records: Sequence[metrics.Record], grades: dict[tuple[str, str, str], Any] | None = None) -> dict[str, Any]:
    """``methods.<name>.<benchmark>``, ``overall.<name>`` and ``paired.<name>_over_<other>`` of all records.

    ``grades``: by (benchmark, prompt id, method), with a ``status``.
    """
    by_set: dict[str, list[metrics.Record]] = {}
    for record in records:
        by_set.setdefault(record["benchmark"], []).append(record)
    methods = list(records[0]["methods"]) if records else []
    grades = grades or {}
    found: dict[str, dict[str, Any]] = {}
    for method in methods:
        found[method] = {}
        for benchmark, some in by_set.items():
            keys = [(benchmark, record["id"], method) for record in some]
            statuses = [grades[key].status for key in keys if key in grades]
            found[method][benchmark] = metrics.of_method(some, method, benchmark, statuses)
    names, draws = mean_sets(by_set), Draws(by_set, methods)
    means = {}
    for method in methods:
        means[method] = overall({name: found[method][name] for name in names})
        for kind, key in (("acceptance_length", "ci95"), ("non_loop", "non_loop_ci95")):
            means[method][key] = interval(draws.mean(method, kind, names)[1])
        means[method]["decode_tokens_per_second_ci95"] = interval(draws.mean(method, "speed", names)[1])
        means[method]["speedup"] = draws.change(method, metrics.BASELINE, "speed", names)
    paired = {}
    for other, method in combinations([name for name in methods if name != metrics.BASELINE], 2):
        paired[f"{method}_over_{other}"] = dict(
            acceptance_length_change=draws.change(method, other, "acceptance_length", names),
            non_loop_change=draws.change(method, other, "non_loop", names),
            decode_tokens_per_second_change=draws.change(method, other, "speed", names),
            benchmarks={name: draws.change(method, other, "acceptance_length", [name]) for name in by_set},
        )
    return dict(methods=found, overall=means, paired=paired)
