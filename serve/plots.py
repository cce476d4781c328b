"""Plots of an evaluation's report: functions from the report to a matplotlib figure, nothing else."""

import base64
import io
from typing import Any

import numpy as np
from matplotlib.figure import Figure

#: One colour a method, in order of appearance (Okabe and Ito: told apart by colour-blind readers too).
COLOURS = ("#7F7F7F", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
WIDTH = 9.0


def colours(report: dict[str, Any]) -> dict[str, str]:
    """Colour by method, the same in every plot."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(report["methods"])}


def by_benchmark(report: dict[str, Any], key: str, interval: str, label: str, *, baseline: bool = True) -> Figure:
    """Grouped bars with 95 % intervals: benchmarks, then their mean."""
    methods = [name for name in report["methods"] if baseline or name != "autoregressive"]
    names = list(next(iter(report["methods"].values())))
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(methods), 1)
    for place, method in enumerate(methods):
        sets = [report["methods"][method][name] for name in names] + [report["overall"][method]]
        x = np.arange(len(sets)) + (place - (len(methods) - 1) / 2) * width
        value = np.array([one[key] or 0.0 for one in sets], float)
        ends = np.array([one.get(interval) or (v, v) for one, v in zip(sets, value, strict=True)], float)
        error = np.abs(ends.T - value)
        axes.bar(x, value, width, color=colours(report)[method], label=method)
        axes.errorbar(x, value, error, fmt="none", ecolor="#333333", elinewidth=0.8)
    axes.set_xticks(range(len(names) + 1), [*names, "mean"], rotation=15)
    axes.set_ylabel(label)
    axes.legend(fontsize="small", ncols=len(methods), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def acceptance(report: dict[str, Any]) -> Figure:
    """Acceptance length by benchmark and method."""
    return by_benchmark(report, "acceptance_length", "ci95", "tokens per verify round", baseline=False)


def throughput(report: dict[str, Any]) -> Figure:
    """Decode tokens/s by benchmark and method."""
    interval = "decode_tokens_per_second_ci95"
    return by_benchmark(report, "decode_tokens_per_second", interval, "decode tokens/s")


def survival(report: dict[str, Any]) -> Figure:
    """Share of rounds with at least k accepted proposals, k = 1..7: every benchmark, and the mean."""
    methods = [name for name in report["methods"] if name != "autoregressive"]
    names = list(next(iter(report["methods"].values())))
    panels = [(name, {m: report["methods"][m][name] for m in methods}) for name in names]
    panels.append(("mean", {m: report["overall"][m] for m in methods}))
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(WIDTH, 2.3 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, found) in zip(grid.flat, panels, strict=False):
        for method, one in found.items():
            share = [np.nan if s is None else s for s in one["survival"]]
            axes.plot(range(1, 8), share, marker="o", markersize=3, color=colours(report)[method], label=method)
        axes.set_title(name, fontsize="small")
        axes.set_ylim(0, 1)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("accepted proposals, at least", fontsize="small")
    figure.supylabel("share of rounds", fontsize="small")
    if methods:
        grid[0, 0].legend(fontsize="x-small")
    return figure


def round_parts(report: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Milliseconds of a round by method: the target's pass, and what a drafter adds to it.

    Autoregressive decoding runs the same verify pass (same width, same batch) with nothing proposed.
    """
    target = report["overall"]["autoregressive"]["milliseconds_per_round"]
    found = {name: one["milliseconds_per_round"] for name, one in report["overall"].items()}
    return {name: (min(target, ms), max(ms - target, 0.0)) for name, ms in found.items() if ms is not None and target}


def round_times(report: dict[str, Any]) -> Figure:
    """Where a round's time goes."""
    parts = round_parts(report)
    figure = Figure(figsize=(WIDTH, 0.8 + 0.4 * len(parts)), layout="constrained")
    axes = figure.subplots()
    target, draft = (np.array([pair[i] for pair in parts.values()]) for i in range(2))
    axes.barh(list(parts), target, color="#B0B0B0", label="target's pass (an autoregressive step)")
    axes.barh(list(parts), draft, left=target, color=[colours(report)[name] for name in parts])
    axes.barh([next(iter(parts))], [0.0], color="#0072B2", label="drafting, reading and committing more")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per round of the batch, mean over benchmarks")
    axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return figure


def loops(report: dict[str, Any]) -> Figure:
    """Acceptance on texts without loops against texts that loop: where a drafter's lead comes from."""
    methods = [name for name in report["methods"] if name != "autoregressive"]
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    axes = figure.subplots()
    for place, (key, label, shade) in enumerate((("non_loop", "without loops", 1.0), ("loop", "looping", 0.45))):
        x = np.arange(len(methods)) + (place - 0.5) * 0.38
        height = [report["overall"][name][key] or 0.0 for name in methods]
        axes.bar(x, height, 0.36, color=[colours(report)[name] for name in methods], alpha=shade, label=label)
    axes.set_xticks(range(len(methods)), methods)
    axes.set_ylabel("tokens per round")
    axes.legend(fontsize="small", frameon=False)
    return figure


def data_uri(figure: Figure, name: str) -> str:
    """The figure as an SVG that needs no other file; equal figures give equal text."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
