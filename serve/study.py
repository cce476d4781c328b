"""The study of the training, put together: methods at draft windows, with seeds, on the same prompts.

`put_together` makes what `results/nano_training.json` holds: rows per method, window, seed and benchmark; means over
benchmarks; relative changes, paired by prompt, over the drafter without states of the same window and seed, over the
base, and of the reader over each control; facts of the training runs. "pooled" counts the rounds of all seeds of a
drafter together, prompt by prompt.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ready_jax.bench_data import SEVEN
from ready_jax.configs import named
from ready_jax.intervals import interval
from ready_jax.serve import metrics, records, report, summary

POOLED, UNLIMITED = "pooled", "unlimited"
BASE, STATELESS, READER = "dspark", "stateless", "ready"
METHODS = {
    BASE: "the base drafter, not trained further",
    STATELESS: "LoRA alone for the steps of both stages",
    READER: "the state reader, then reader and LoRA",
    "reads_identity": "parameter-matched: the same reader over identity matrices in place of states",
    "reads_zero": "the same reader over zeros",
    "reads_shuffled": "the same reader over another sequence's states",
}
READS = {STATELESS: "nothing", READER: "own"} | {f"reads_{what}": what for what in ("identity", "zero", "shuffled")}
RECIPES = {("lora",): "nano_stateless", ("reader",): "nano_ready_stage1", ("reader", "lora"): "nano_ready_stage2"}
NOTE = (
    "Means over benchmarks of tokens per verify round. Intervals are 95 % bootstraps over prompts: they say what other "
    "prompts would change, not what another training run would; two seeds hint at that."
)


@dataclass(frozen=True)
class Cell:
    """A drafter of the study under its name in the evaluation; ``window`` None: unlimited, ``seed`` None: the base."""

    name: str
    method: str
    window: int | None
    seed: int | str | None

    @property
    def key(self) -> dict[str, Any]:
        return dict(method=self.method, window=window_label(self.window), seed=self.seed)


def window_label(window: int | None) -> int | str:
    return UNLIMITED if window is None else window


# Numbers


def with_pooled(found: Sequence[metrics.Record], cells: Sequence[Cell]) -> tuple[list[metrics.Record], list[Cell]]:
    """The records with a further method per drafter of several seeds, which has the rounds of all of them."""
    groups: dict[tuple[str, int | None], list[str]] = {}
    for cell in cells:
        if cell.seed is not None:
            groups.setdefault((cell.method, cell.window), []).append(cell.name)
    pooled = {
        Cell(f"{names[0]}_{POOLED}", method, window, POOLED): names
        for (method, window), names in groups.items()
        if len(names) > 1
    }

    def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
        sums = ("emitted", "accepted", "proposed", "prefill_seconds", "decode_seconds")
        start = {key: parts[0][key] for key in sums}
        for part in parts[1:]:
            start = {key: start[key] + part[key] for key in sums}
        return start

    rows = [
        record
        | dict(
            methods=record["methods"]
            | {cell.name: joined([record["methods"][name] for name in names]) for cell, names in pooled.items()}
        )
        for record in found
    ]
    return rows, [*cells, *pooled]


def numbers(found: Sequence[metrics.Record], cells: Sequence[Cell]) -> dict[str, Any]:
    """Every number of the study; cells whose method the records lack are listed under ``missing``."""
    there = [cell for cell in cells if cell.name in found[0]["methods"]]
    rows, every = with_pooled(found, there)
    by_set: dict[str, list[metrics.Record]] = {}
    for record in rows:
        by_set.setdefault(record["benchmark"], []).append(record)
    names = summary.mean_sets(by_set)
    draws = summary.Draws(by_set, [cell.name for cell in every])
    calm = {
        name: [record for record, loops in zip(some, metrics.looping(some), strict=True) if not loops]
        for name, some in by_set.items()
    }
    measured = []
    for cell in there:
        for name, some in by_set.items():
            one = metrics.acceptance(some, cell.name, name) | dict(survival=metrics.survival(some, cell.name))
            one |= dict(non_loop=metrics.acceptance(calm[name], cell.name, name))
            measured.append(cell.key | dict(benchmark=name) | one)
    means = [cell.key | mean(draws, by_set, cell, names) for cell in every]
    at = {(cell.method, cell.window, cell.seed): cell for cell in every}
    trained = [cell for cell in every if cell.seed is not None]
    without = [cell for cell in trained if cell.method != STATELESS]
    controls = [cell for cell in without if cell.method != READER]

    def pairs(some: Iterable[Cell], other: Callable[[Cell], Cell | None], *, pooled: bool | None = None, turn=False):
        kept = [cell for cell in some if pooled is None or (cell.seed == POOLED) == pooled]
        both = [(cell, partner) for cell in kept if (partner := other(cell)) is not None]
        return [cell.key | gain(draws, *((b, cell) if turn else (cell, b)), names) for cell, b in both]

    def sibling(method: str) -> Callable[[Cell], Cell | None]:
        return lambda cell: at.get((method, cell.window, cell.seed))

    reader = pairs(controls, sibling(READER), turn=True)
    return dict(
        acceptance=measured,
        means=means,
        paired_vs_stateless=pairs(without, sibling(STATELESS), pooled=False),
        paired_vs_stateless_pooled=pairs(without, sibling(STATELESS), pooled=True),
        reader_vs_control=[dict(control=row.pop("method")) | row for row in reader],
        paired_vs_base=pairs(trained, lambda cell: at.get((BASE, cell.window, None))),
        seed_1_vs_seed_0=pairs(
            (cell for cell in trained if cell.seed == 1), lambda cell: at.get((cell.method, cell.window, 0))
        ),
        missing=[cell.name for cell in cells if cell not in there],
    )


def mean(draws: summary.Draws, by_set: dict[str, list], cell: Cell, names: Sequence[str]) -> dict[str, Any]:
    """Unweighted means over benchmarks with their intervals; survival of the rounds of each set, averaged."""
    length, spread = draws.mean(cell.name, "acceptance_length", names)
    calm, calm_spread = draws.mean(cell.name, "non_loop", names)
    shares = [metrics.survival(by_set[name], cell.name) for name in names]
    known = [share for share in shares if share[0] is not None]
    found = dict(
        acceptance_length=length,
        ci95=interval(spread),
        non_loop=calm,
        non_loop_ci95=interval(calm_spread),
        survival=[float(np.mean(column)) for column in zip(*known, strict=True)] or None,
        rounds=sum(len(record["methods"][cell.name]["emitted"]) for name in names for record in by_set[name]),
    )
    if cell.seed == POOLED:
        return found
    every = [record for some in by_set.values() for record in some]
    exact = metrics.exactness(every, cell.name)
    return found | dict(exact_match=exact["exact_match"], worst_margin=exact["worst_margin"])


def gain(draws: summary.Draws, cell: Cell, other: Cell, names: Sequence[str]) -> dict[str, Any]:
    """Percent by which a drafter's mean acceptance length exceeds another's, with all texts and without loops."""
    found = {}
    for kind, prefix in (("acceptance_length", ""), ("non_loop", "non_loop_")):
        change = draws.change(cell.name, other.name, kind, names)
        found[f"{prefix}gain_percent"] = None if change["change"] is None else 100 * change["change"]
        found[f"{prefix}ci95"] = None if change["ci95"] is None else [100 * x for x in change["ci95"]]
    return found


# Training runs


def training(cells: Sequence[Cell], folders: Sequence[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Facts of every training run from its ``log.json`` in one of the folders, and the runs without one.

    Raises ValueError for a log of another window, seed or reader than the run's name says.
    """
    rows, missing = [], []
    for cell in cells:
        if cell.seed is None:
            continue
        for run in [cell.name] if cell.method == STATELESS else [f"{cell.name}_stage1", cell.name]:
            file = next((f for folder in folders if (f := folder / run / "log.json").is_file()), None)
            if file is None:
                missing.append(run)
                continue
            log = json.loads(file.read_text(encoding="utf-8"))
            adapt, seed = log["config"]["adapt"], log["config"]["rows"]["seed"]
            reads = READS[STATELESS] if adapt["reader"] is None else adapt["reader"]["reads"]
            found, needed = (adapt["window"], seed, reads), (cell.window, cell.seed, READS[cell.method])
            if found != needed:
                raise ValueError(f"{file}: window, seed and what is read are {found}, {needed} are needed for {run}")
            rows.append(dict(run=run) | cell.key | facts(log))
    return rows, missing


def facts(log: dict[str, Any]) -> dict[str, Any]:
    """What a run did: its recipe and how its configuration differs from it, what it saw, its last logged losses."""
    config = log["config"]
    recipe = RECIPES[tuple(config["adapt"]["trains"])]
    usual, own = (dict(_flat(json.loads(json.dumps(one)))) for one in (asdict(named.recipe(recipe)), config))
    keep = {name: value for name, value in own.items() if usual.get(name, value) != value}
    steps, rows = config["optimizer"]["steps"], config["rows"]
    seen = steps * rows["batch"]
    last = log["log"][-1] if log["log"] else {}
    losses = ("loss", "ce_loss", "l1_loss", "tau_probabilistic", "top1@1", "seconds_per_step")
    return dict(
        recipe=recipe,
        changes={name: value for name, value in keep.items() if not name.startswith(("files.", "log."))},
        steps=steps,
        first_row=rows["first"],
        rows_seen=seen,
        tokens_seen=seen * rows["length"],
        anchors_seen=seen * rows["anchors"],
        **{name: last.get(name) for name in losses},
        skipped=log["skipped"],
        nonfinite=log["nonfinite"],
        packed_rows=log["rows"],
        tokens_sha256=log.get("tokens_sha256"),
        rows_sha256=log.get("rows_sha256"),
        device_kind=log["device_kind"],
        commit=log["commit"],
    )


def _flat(tree: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, value in tree.items():
        yield from _flat(value, f"{name}.{key}" if name else key)


def conditions(whole: dict[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """What the numbers were measured under; prompts by their hashes."""
    sets = {
        name: {key: one[key] for key in ("in_file", "used", "longest", "prompts_sha256", "file_sha256") if key in one}
        for name, one in whole["conditions"]["benchmarks"].items()
    }
    recipes = {name: asdict(named.recipe(name)) for name in RECIPES.values()}
    return (
        whole["conditions"]
        | {key: value for key, value in whole["run"].items() if key != "commit"}
        | dict(benchmarks=sets, seeds=sorted({cell.seed for cell in cells if isinstance(cell.seed, int)}))
        | dict(windows=list(dict.fromkeys(window_label(cell.window) for cell in cells)), recipes=recipes)
        | dict(method_names=METHODS, left_out=whole["left_out"], note=NOTE)
    )


def put_together(
    files: Sequence[Path], cells: Sequence[Cell], folders: Sequence[Path] = (), *, leave_out: bool = False
) -> dict[str, Any]:
    """The whole content of ``results/nano_training.json``."""
    whole, found = records.together(files, leave_out=leave_out)
    there = [cell for cell in cells if cell.name in whole["conditions"]["methods"]]
    runs, missing = training(there, folders)
    answers = list(dict.fromkeys(run["tokens_sha256"] for run in runs))
    return (
        dict(conditions=conditions(whole, there) | dict(training_tokens_sha256=answers))
        | numbers(found, cells)
        | dict(training=runs, training_missing=missing)
    )


def write(found: dict[str, Any], file: Path) -> None:
    """A JSON file with one row a line."""

    def text(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(json.dumps(_rounded(row)) for row in value) + "\n ]"
        return json.dumps(_rounded(value), indent=1).replace("\n", "\n ")

    file.parent.mkdir(parents=True, exist_ok=True)
    body = ",\n ".join(f"{json.dumps(key)}: {text(value)}" for key, value in found.items())
    file.write_text("{\n " + body + "\n}\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


# Tables


def page(found: dict[str, Any]) -> report.Page:
    """Windows by methods, paired gains, survival, training losses, conditions."""
    c = found["conditions"]
    tables = [
        by_window(found, "Acceptance length", "acceptance_length", "ci95"),
        by_window(found, "Acceptance length without loops", "non_loop", "non_loop_ci95"),
        gains(found, "Over the drafter without states, paired", "paired_vs_stateless"),
        gains(found, "The reader over each control, paired", "reader_vs_control"),
        gains(found, "Over the base at the same window, paired", "paired_vs_base"),
        gains(found, "Seed 1 over seed 0 of the same drafter", "seed_1_vs_seed_0"),
        survivals(found),
        losses(found),
        conditions_table(c),
    ]
    notes = [report.NANO_NOTE] if c["model"] == "nano" else []
    if len(c["training_tokens_sha256"]) > 1:
        notes.append(f"Drafters were trained on {len(c['training_tokens_sha256'])} sets of answers.")
    missing = found["missing"] + [f"log of {run}" for run in found["training_missing"]]
    notes += [f"Missing: {', '.join(missing)}."] if missing else []
    return report.Page("What training gives", [table for table in tables if table.rows], notes=[NOTE, *notes])


def by_window(found: dict[str, Any], title: str, key: str, spread: str) -> report.Table:
    """One row a method, one column a window: all seeds pooled where there are several."""
    windows = found["conditions"]["windows"]
    cells: dict[str, dict[Any, str]] = {}
    for row in found["means"]:  # pooled rows come last
        one = cells.setdefault(row["method"], {})
        one[row["window"]] = report.with_interval(row[key], row[spread])
    rows = [[name, *[cells[name].get(window, "-") for window in windows]] for name in METHODS if name in cells]
    note = "; ".join(f"{name}: {text}" for name, text in METHODS.items() if name in cells) + "."
    return report.Table(title, ["method", *[f"window {window}" for window in windows]], rows, note)


def gains(found: dict[str, Any], title: str, key: str) -> report.Table:
    """One row a window and drafter: percent per seed, pooled, and pooled without loops."""
    listed = [*found[key], *found.get(f"{key}_pooled", ())]
    who = "control" if listed and "control" in listed[0] else "method"
    seeds = sorted({row["seed"] for row in listed if isinstance(row["seed"], int)})
    by: dict[tuple, dict[Any, dict[str, Any]]] = {}
    for row in listed:
        by.setdefault((row["window"], row[who]), {})[row["seed"]] = row
    rows = []
    for (window, name), one in by.items():
        whole = one.get(POOLED)
        cells = [percent(one.get(seed)) for seed in seeds]
        rows.append([str(window), name, *cells, percent(whole), percent(whole, "non_loop_")])
    columns = ["window", who, *[f"seed {seed}" for seed in seeds], "pooled", "pooled, without loops"]
    return report.Table(title, columns, rows)


def percent(row: dict[str, Any] | None, prefix: str = "") -> str:
    """A gain of a row with its interval."""
    value, spread = (None, None) if row is None else (row[f"{prefix}gain_percent"], row[f"{prefix}ci95"])
    if value is None or spread is None:
        return "-"
    return f"{value:+.2f} % [{spread[0]:+.2f}, {spread[1]:+.2f}]"


def survivals(found: dict[str, Any]) -> report.Table:
    last = {(row["window"], row["method"]): row for row in found["means"]}
    rows = [
        [str(window), name, " ".join(f"{100 * share:.1f}" for share in row["survival"])]
        for (window, name), row in sorted(last.items(), key=lambda one: found["conditions"]["windows"].index(one[0][0]))
        if row["survival"]
    ]
    return report.Table("Survival at 1..7, %", ["window", "method", "survival"], rows)


def losses(found: dict[str, Any]) -> report.Table:
    rows = [
        [
            row["run"],
            str(row["steps"]),
            str(row["rows_seen"]),
            report.number(row["loss"], 4),
            report.number(row["tau_probabilistic"]),
            report.number(row["top1@1"]),
        ]
        for row in found["training"]
    ]
    columns = ["run", "steps", "rows", "last logged loss", "expected acceptance in training", "top-1 at slot 1"]
    return report.Table("Training runs", columns, rows)


def conditions_table(c: dict[str, Any]) -> report.Table:
    sets = ", ".join(f"{name} {one['used']}" for name, one in c["benchmarks"].items())
    rows = [
        ["run", report.conditions_line(dict(conditions=c, run=c))],
        ["evaluations joined", str(c["files"])],
        ["versions", ", ".join(f"{name} {version}" for name, version in c["versions"].items())],
        ["commits", ", ".join(map(str, c["commits"]))],
        ["seeds", ", ".join(map(str, c["seeds"]))],
        ["prompts", sets],
        ["prompts left out", str(len(c["left_out"]))],
        ["means are over", ", ".join([name for name in SEVEN if name in c["benchmarks"]] or c["benchmarks"])],
    ]
    return report.Table("Conditions", ["what", "value"], rows)
