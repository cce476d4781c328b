"""One page from an evaluation: `python -m ready_jax.serve.report FILE.json --out FILE.html` (or `.md`).

    python -m ready_jax.serve.report compare A.json B.json [--out FILE]

The HTML holds everything, plots included (SVG), and needs no other file; Markdown has the tables. `compare` puts two
evaluations side by side and refuses those whose conditions differ, saying which; drafters and commits may differ.
"""

import argparse
import html
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ready_jax.serve import evaluate, plots, published, records

NANO_NOTE = (
    "nano is about twelve million parameters, trained for minutes, thinking off. Its order of methods says nothing "
    "about the 27B model that the published values are of; what it shows is that everything runs, exactly."
)
SPEED_NOTE = "Intervals are bootstraps over batches: one batch has none. A batch lasts as long as its slowest row."
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .6rem 0 1.2rem; font-size: 13px; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 2px solid #888; } img { max-width: 100%; } .note { color: #555; } td.wide { white-space: normal; }
"""


@dataclass(frozen=True)
class Table:
    """A table of text; ``note`` stands above it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td{_wide(cell)}>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        note = f'<p class="note">{html.escape(self.note)}</p>' if self.note else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<h2>{html.escape(self.title)}</h2>{note}{table}"

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", *([self.note, ""] if self.note else [])]
        lines += ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"


def _wide(cell: str) -> str:
    return ' class="wide"' if len(cell) > 80 else ""


@dataclass(frozen=True)
class Page:
    """What a report shows: tables, and plots by title."""

    title: str
    tables: list[Table]
    figures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def html(self) -> str:
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        images = "".join(
            f'<h2>{html.escape(name)}</h2><img alt="{html.escape(name)}" src="{uri}">'
            for name, uri in self.figures.items()
        )
        first, *rest = self.tables
        body = f"<h1>{html.escape(self.title)}</h1>{notes}{first.html()}{images}" + "".join(t.html() for t in rest)
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(self.title)}</title>'
            f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
        )

    def markdown(self) -> str:
        return "\n".join(
            [f"# {self.title}", "", *[f"{note}\n" for note in self.notes], *[t.markdown() for t in self.tables]]
        )


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def with_interval(value: float | None, interval: Sequence[float] | None, digits: int = 3) -> str:
    """A value with its 95 % interval."""
    if value is None or interval is None:
        return number(value, digits)
    return f"{value:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def change(found: dict[str, Any]) -> str:
    """A relative change with its paired interval, if it has one."""
    if found["change"] is None:
        return "-"
    if found["ci95"] is None:
        return f"{100 * found['change']:+.2f} %"
    low, high = found["ci95"]
    return f"{100 * found['change']:+.2f} % [{100 * low:+.2f}, {100 * high:+.2f}]"


# Tables


def overall_table(report: dict[str, Any]) -> Table:
    rows = []
    for name, one in report["overall"].items():
        survival = " ".join("-" if s is None else f"{100 * s:.0f}" for s in one["survival"])
        rows.append(
            [
                name,
                with_interval(one["acceptance_length"], one["ci95"]),
                with_interval(one["non_loop"], one["non_loop_ci95"]),
                number(one["acceptance_length_sglang"]),
                number(one["acceptance_length_deepspec"]),
                survival if name != "autoregressive" else "-",
                percent(one["draft_acceptance_rate"]),
                with_interval(one["decode_tokens_per_second"], one["decode_tokens_per_second_ci95"], 1),
                number(one["end_to_end_tokens_per_second"], 1),
                number(1e3 * one["time_to_first_token_seconds"], 1),
                number(one["milliseconds_per_round"], 2),
                percent(one["exact_match"], 2),
                percent(one["accuracy"]),
            ]
        )
    columns = ["method", "acceptance length [95 %]", "without loops", "SGLang's", "DeepSpec's", "survival at 1..7, %"]
    columns += [
        "drafts accepted",
        "decode tokens/s [95 %]",
        "end to end",
        "first token, ms",
        "ms/round",
        "exact",
        "right",
    ]
    sets = next(iter(report["overall"].values()))["benchmarks"]
    note = (
        f"Unweighted means over {', '.join(sets)}. Acceptance length: tokens per verify round, the target's own "
        "included, pooled over the rounds of a set; the two others are counted as those engines do. Intervals are "
        "bootstraps over prompts; they do not cover another training run."
    )
    return Table("Methods", columns, rows, note)


def benchmark_table(report: dict[str, Any], title: str, cell, note: str = "") -> Table:
    """One row per method, one column per benchmark."""
    names = list(next(iter(report["methods"].values())))
    rows = [[method, *[cell(by_set[name]) for name in names]] for method, by_set in report["methods"].items()]
    return Table(title, ["method", *names], rows, note)


def text_table(report: dict[str, Any]) -> Table:
    """What the texts are like; they are the same for every exact method."""
    plain = report["methods"]["autoregressive"]
    rows = [
        [name, str(one["prompts"]), str(one["tokens"]), percent(one["loop_share"]), number(one["distinct_4"])]
        for name, one in plain.items()
    ]
    note = (
        "A text loops when more than a fifth of its 6-grams stood in it before; distinct-4 is the share of new 4-grams."
        " Loops are easy to draft: acceptance is given without them too."
    )
    return Table("Texts", ["benchmark", "prompts", "tokens", "loop", "distinct-4"], rows, note)


def paired_table(report: dict[str, Any]) -> Table:
    rows = [
        [
            name.replace("_over_", " over "),
            change(one["acceptance_length_change"]),
            change(one["non_loop_change"]),
            change(one["decode_tokens_per_second_change"]),
        ]
        for name, one in report["paired"].items()
    ]
    note = "Relative change of the means, on the same resampled prompts: an interval that excludes 0 is a difference."
    columns = ["methods", "acceptance length", "without loops", "decode tokens/s"]
    return Table("Paired differences", columns, rows, note)


def differences_table(report: dict[str, Any], limit: int = 20) -> Table:
    found = [
        [method, one["benchmark"], one["id"], str(one["position"]), number(one["margin"], 4)]
        for method, by_set in report["methods"].items()
        for part in by_set.values()
        for one in part["differences"]
    ]
    note = (
        f"{len(found)} texts differ from the autoregressive ones{'.' if len(found) <= limit else f', {limit} shown.'}"
    )
    columns = ["method", "benchmark", "prompt", "first differing token", "logit margin there"]
    return Table("Exactness", columns, found[:limit], note)


def published_table(report: dict[str, Any]) -> Table:
    """Published values beside ours, each with its conditions."""
    rows = []
    for value in published.VALUES:
        ours = report["overall"].get(value.method) if not value.what else None
        rows.append(
            [
                value.method + (f", {value.what}" if value.what else ""),
                number(value.tokens_per_second, 2),
                number(value.acceptance_length, 4),
                number(value.milliseconds_per_round, 2),
                number(ours["decode_tokens_per_second"], 2) if ours else "-",
                number(ours["acceptance_length_sglang"], 4) if ours else "-",
                number(ours["milliseconds_per_round"], 2) if ours else "-",
            ]
        )
    for name, (dspark, ready) in published.SURVIVAL_AT_7.items():
        for method, value in (("dspark", dspark), ("ready", ready)):
            ours = report["methods"].get(method, {}).get(name)
            mine = percent(ours["survival"][6]) if ours else "-"
            rows.append([f"{method}, survival at 7 on {name}", "", percent(value), "", "", mine, ""])
    note = (
        f"{published.SOURCE}: {published.CONDITIONS}; ablations given in percent are recomputed from DSpark's values. "
        f"Here: {conditions_line(report)}. Not the same conditions."
    )
    columns = ["method", "published tokens/s", "acceptance", "ms/round", "here tokens/s", "acceptance", "ms/round"]
    return Table("Published values", columns, rows, note)


def conditions_line(report: dict[str, Any]) -> str:
    c, run = report["conditions"], report["run"]
    return (
        f"{c['model']}, {run['devices']} x {run['device_kind']}, {c['dtype']}, batch {c['batch_size']} per device, "
        f"greedy, thinking {'on' if c['enable_thinking'] else 'off'}, at most {c['max_new_tokens']} new tokens"
    )


def conditions_table(report: dict[str, Any]) -> Table:
    c, run = report["conditions"], report["run"]
    rows = [
        ["run", conditions_line(report)],
        ["budget", evaluate.budget_line(run["budget"])],
        ["prompts padded to", str(c["prompt_tokens"] or "the power of two of a set's longest")],
        ["versions", ", ".join(f"{name} {version}" for name, version in run["versions"].items())],
        ["commit", str(run["commit"])],
    ]
    rows += [[f"weights of {name}", _hashes(found)] for name, found in c["methods"].items() if found]
    rows.append(["weights of the target", _hashes(c["target_sha256"])])
    rows += [
        [
            f"prompts of {name}",
            f"{one['used']} of {one['in_file']}, at most {one['longest']} tokens, {one['prompts_sha256'][:16]}",
        ]
        for name, one in c["benchmarks"].items()
    ]
    return Table("Conditions", ["what", "value"], rows)


def _hashes(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {digest[:16]}" for name, digest in found.items())


def page(report: dict[str, Any]) -> Page:
    """The whole report. ValueError for an evaluation that is not finished."""
    if not report.get("complete"):
        raise ValueError("this evaluation is not finished: run its command again, it goes on where it stopped")
    right = lambda one: with_interval(one["accuracy"]["rate"], one["accuracy"]["ci95"]) if one["accuracy"] else "-"  # noqa: E731
    speed = lambda one: with_interval(  # noqa: E731
        one["decode_tokens_per_second"], one["decode_tokens_per_second_ci95"], 1
    )
    tables = [
        overall_table(report),
        paired_table(report),
        benchmark_table(report, "Acceptance length", lambda one: with_interval(one["acceptance_length"], one["ci95"])),
        benchmark_table(
            report, "Acceptance length without loops",
            lambda one: with_interval(one["non_loop"]["acceptance_length"], one["non_loop"]["ci95"]),
        ),
        benchmark_table(report, "Decode tokens/s", speed, SPEED_NOTE),
        benchmark_table(report, "Exact match with autoregressive decoding", lambda one: percent(one["exact_match"], 2)),
        benchmark_table(report, "Accuracy", right, "LiveCodeBench and the open-ended sets are not graded."),
        text_table(report),
        differences_table(report),
        published_table(report),
        conditions_table(report),
    ]  # fmt: skip
    drawn = {
        "Acceptance length by benchmark": plots.acceptance,
        "Decode tokens/s by benchmark": plots.throughput,
        "Survival": plots.survival,
        "A round's time": plots.round_times,
        "Loops": plots.loops,
    }
    figures = (
        {name: plots.data_uri(draw(report), name) for name, draw in drawn.items()} if len(report["methods"]) > 1 else {}
    )
    notes = [conditions_line(report) + "."]
    notes += [NANO_NOTE] if report["conditions"]["model"] == "nano" else []
    return Page("Speculative decoding, evaluated", tables, figures, notes)


# Two runs


def compare(first: dict[str, Any], second: dict[str, Any], names: tuple[str, str] = ("A", "B")) -> Page:
    """Two evaluations side by side. ValueError naming every condition in which they differ."""
    apart = records.differences(first, second)
    if apart:
        lines = [f"  {name}: {records.shorten(a)} and {records.shorten(b)}" for name, (a, b) in apart.items()]
        raise ValueError("these runs were made under other conditions, which differ in\n" + "\n".join(lines))
    shared = [name for name in first["methods"] if name in second["methods"]]
    tables = []
    for key, interval, title, digits in (
        ("acceptance_length", "ci95", "Acceptance length", 3),
        ("decode_tokens_per_second", "decode_tokens_per_second_ci95", "Decode tokens/s", 1),
        ("exact_match", "", "Exact match", 4),
    ):
        rows = []
        for method in shared:
            sets = {
                name: [each["methods"][method][name] for each in (first, second)] for name in first["methods"][method]
            }
            sets |= {"mean": [each["overall"][method] for each in (first, second)]}
            for name, pair in sets.items():
                a, b = (one[key] for one in pair)
                cells = [with_interval(one[key], one.get(interval), digits) for one in pair]
                rows.append([method, name, *cells, "-" if not a or b is None else f"{100 * (b / a - 1):+.2f} %"])
        tables.append(Table(title, ["method", "benchmark", *names, "change"], rows))
    hashes = [
        [name, *[_hashes(each["conditions"]["methods"].get(name, {})) or "-" for each in (first, second)]]
        for name in dict.fromkeys([*first["methods"], *second["methods"]])
    ]
    hashes.append(["commit", *[str(each["run"]["commit"]) for each in (first, second)]])
    tables.append(Table("What may differ", ["what", *names], hashes))
    return Page(f"{names[0]} and {names[1]}", tables, notes=[conditions_line(first) + "."])


def write(made: Page, out: Path | None) -> None:
    """HTML for a .html name, Markdown for any other or for standard output."""
    text = made.html() if out is not None and out.suffix == ".html" else made.markdown()
    if out is None:
        print(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    comparing = words[:1] == ["compare"]
    parser = argparse.ArgumentParser(
        prog="python -m ready_jax.serve.report" + (" compare" if comparing else ""), description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("file", type=Path, nargs=2 if comparing else 1, metavar="FILE.json")
    parser.add_argument("--out", type=Path, metavar="FILE", help=".html, or .md; default: Markdown on standard output")
    options = parser.parse_args(words[1:] if comparing else words)
    found = [json.loads(file.read_text(encoding="utf-8")) for file in options.file]
    try:
        made = compare(*found, names=tuple(file.stem for file in options.file)) if comparing else page(found[0])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    write(made, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
