"""The paper's study at nano's size: which drafters to train, how to evaluate them, one table per question.

    python -m ready_jax.serve.ablate plan --out DIR --tokens FILE > ablate.sh   # commands, for a shell
    python -m ready_jax.serve.ablate tables DIR/ablation.json --out FILE.html   # the answers

Every variant is ReaDy's two stages over the shipped base (`configs/nano_ready.py`) with changed fields, on the same
rows; the reference is the recipe as it stands, the control without states trains LoRA alone for as many steps. A
variant whose folder is complete is not trained again. `arXiv 2610.20503` asks the same questions at 27B.

Every line stands for itself, so that several run at once; `--question training` is every method at every window with
two seeds:

    python -m ready_jax.serve.ablate plan --question training --out DIR --tokens FILE --print train |
        xargs -d '\\n' -P 6 -I{} bash -c '{}'
    python -m ready_jax.serve.ablate plan --question training --out DIR --print evaluate --processes 6 > evaluate.sh
    head -n 1 evaluate.sh | bash && tail -n +2 evaluate.sh | xargs -d '\\n' -P 6 -I{} bash -c '{}'

The first line of an evaluation in parts is the base's: with a shared `--compile-cache` it leaves the others the
autoregressive program, so that all of them decode the same texts. `training` puts the parts together and says what
differs where they do not belong together; `tables` takes several files too:

    python -m ready_jax.serve.ablate training DIR/ablation_*.json --json results/nano_training.json --out FILE.html
"""

import argparse
import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ready_jax import schema
from ready_jax.config import ReaderConfig
from ready_jax.configs import named
from ready_jax.export import write_json
from ready_jax.pair import NANO
from ready_jax.serve import records, report, study, summary
from ready_jax.serve.study import BASE, STATELESS, UNLIMITED
from ready_jax.serve.study import READER as REFERENCE
from ready_jax.tensor_files import CONFIG, read_json

WINDOWS, SEEDS = (16, 64, 128, None), (0, 1)  # of the study of the training; None: all of the draft context
# Shuffled states are those of the row half a batch away. Rows left over repeat the first prompt, which would read its
# own copy in a batch that is not half full: with these sizes the seven sets have none.
EVALUATION = "--batch-size 96 --max-samples 192 --prompt-tokens 1024 --prompt-lookup"
TRAINER = "python -m ready_jax.train.loop"  # called by the shell: the trainer and this side never import each other
HERE = "python -m ready_jax.serve.ablate"
STAGES = ("nano_ready_stage1", "nano_ready_stage2")
WITHOUT_STATES = "nano_stateless"


@dataclass(frozen=True)
class Variant:
    """A drafter to train: a method (changes of the recipes' fields; without ``reader`` only LoRA), a window, a seed.

    ``window``: tokens of draft context, None for all; ``seed``: of rows, anchors and fresh weights.
    """

    method: str
    changes: tuple[str, ...] = ()
    reader: bool = True
    window: int | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        return windowed_name(self.method, self.window) + (f"_s{self.seed}" if self.seed else "")

    @property
    def fields(self) -> list[str]:
        """All changes of a recipe, the same in every stage."""
        window = [] if self.window is None else [f"adapt.window={self.window}"]
        return [*self.changes, *window, f"rows.seed={self.seed}"]


def windowed_name(name: str, window: int | None) -> str:
    return name if window is None else f"{name}_w{window}"


@dataclass(frozen=True)
class Question:
    """Variants that are compared with ``reference``."""

    name: str
    title: str
    variants: tuple[Variant, ...]
    reference: str = REFERENCE
    untrained: tuple[str, ...] = ()  # methods of the same weights that the table has too


def _controls() -> tuple[Variant, ...]:
    reads = get_args(get_type_hints(ReaderConfig)["reads"])
    return tuple(Variant(f"reads_{what}", (f"adapt.reader.reads={what}",)) for what in reads if what != "own")


_THE = Variant(REFERENCE)
_WITHOUT = Variant(STATELESS, reader=False)
METHODS = (_WITHOUT, _THE, *_controls())
# Values are written without brackets and spaces, so that no line needs quotes.
QUESTIONS = (
    Question(
        "states",
        "Does the reader gain by what it reads? Against controls of the same size",
        (_WITHOUT, *_controls(), _THE),
        STATELESS,
        (f"{REFERENCE}_stale",),
    ),
    Question(
        "rank",
        "Rank of the reader (8 is the reference; the paper: 8 and 128)",
        (*(Variant(f"rank_{rank}", (f"adapt.reader.rank={rank}",)) for rank in (2, 4, 16, 64)), _THE),
    ),
    Question(
        "layers",
        "Which states are read (layers 2 and 6 are the reference; the paper: 2, 30, 62, 30+62, 2+30+62)",
        (
            *(
                Variant(f"layers_{layers.replace(',', '_')}", (f"adapt.reader.state_layers={layers},",))
                for layers in ("0", "2", "6", "0,2,6")
            ),
            _THE,
        ),
    ),
    Question(
        "injection",
        "Where the update enters (last draft layer, after attention, is the reference)",
        (
            Variant("inject_0", ("adapt.reader.inject_layers=0,",)),
            Variant("inject_0_1", ("adapt.reader.inject_layers=0,1",)),
            Variant("inject_before_attention", ("adapt.reader.inject_side=before_attention",)),
            _THE,
        ),
    ),
    Question(
        "window",
        "Does the state help where the draft context is cut? Reader and control at each window, in tokens",
        tuple(replace(method, window=window) for window in WINDOWS for method in (_WITHOUT, _THE)),
        STATELESS,
    ),
)
TRAINING = Question(
    "training",
    "Every method at every window, two seeds",
    tuple(replace(method, window=window, seed=seed) for window in WINDOWS for seed in SEEDS for method in METHODS),
    STATELESS,
)


def variants(questions: Sequence[Question] = QUESTIONS) -> list[Variant]:
    """Every variant once, the controls and the reference first."""
    found = {v.name: v for v in (_WITHOUT, _THE)} | {v.name: v for q in questions for v in q.variants}
    return list(found.values())


def recipes(
    variant: Variant, out: Path, *, tokens: str | None = None, steps: tuple[int, int] | None = None,
    changes: Sequence[str] = (),
) -> list[tuple[str, list[str]]]:  # fmt: skip
    """(recipe, changes) of each training run of a variant, in order; the last one's ``merged`` is evaluated.

    ``changes`` are made in all of them. The second stage begins behind the rows of the first, the control without
    states takes the steps, and so the rows, of both.
    """
    shared = [*variant.fields, *([f"files.tokens={tokens}"] if tokens else []), *changes]
    first, second = (named.recipe(stage, shared).optimizer.steps for stage in STAGES) if steps is None else steps
    if not variant.reader:
        return [(WITHOUT_STATES, [*shared, f"optimizer.steps={first + second}", f"files.out={out / variant.name}"])]
    stage1, stage2 = out / f"{variant.name}_stage1", out / variant.name
    behind = f"rows.first={first * named.recipe(STAGES[0], shared).rows.batch}"
    start = f"files.from_pretrained={stage1 / 'adapter'}"
    return [
        (STAGES[0], [*shared, f"optimizer.steps={first}", f"files.out={stage1}"]),
        (STAGES[1], [*shared, f"optimizer.steps={second}", behind, start, f"files.out={stage2}"]),
    ]


def folder(variant: Variant, out: Path) -> Path:
    """Where a variant's trained drafter is."""
    return out / variant.name / "merged"


def bases(chosen: Sequence[Variant], out: Path) -> dict[str, Path]:
    """The drafter that all variants start from, as it is and with each of their windows: name and folder."""
    windows = dict.fromkeys(variant.window for variant in chosen if variant.window is not None)
    return {BASE: NANO / BASE} | {name: out / name for name in (windowed_name(BASE, window) for window in windows)}


def with_window(base: Path, window: int, out: Path) -> None:
    """Write the drafter of ``base`` with a draft window of so many tokens: the same weights, another config.json."""
    raw = read_json(base / CONFIG)
    config = replace(schema.drafter_config(raw, str(base / CONFIG)), sliding_window=window)
    out.mkdir(parents=True, exist_ok=True)
    for file in base.glob("*.safetensors*"):
        shutil.copyfile(file, out / file.name)
    write_json(out / CONFIG, schema.to_raw(config, raw["dtype"]))


def training(
    chosen: Sequence[Variant], out: Path, *, tokens: str | None = None, steps: tuple[int, int] | None = None,
    changes: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Shell lines that make what is not there yet, one per drafter and in any order; stages are joined by ``&&``."""
    lines = []
    for variant in chosen:
        if not _there(folder(variant, out)):
            runs = recipes(variant, out, tokens=tokens, steps=steps, changes=changes)
            left = [run for run in runs if not _there(Path(_value(run[1], "files.out")) / "merged")]
            words = ([recipe, *fields, "files.resume_from=auto"] for recipe, fields in left)
            lines.append(" && ".join(f"{TRAINER} {shlex.join(one)}" for one in words))
    windows = {windowed_name(BASE, variant.window): variant.window for variant in chosen}
    for name, where in bases(chosen, out).items():
        if name != BASE and not _there(where):
            lines.append(f"{HERE} window {shlex.join([str(windows[name]), '--out', str(where)])}")
    return lines


def _there(drafter: Path) -> bool:
    return (drafter / CONFIG).is_file()


def _value(changes: Sequence[str], name: str) -> str:
    return next(change.partition("=")[2] for change in changes if change.startswith(f"{name}="))


def evaluations(
    chosen: Sequence[Variant], out: Path, *, words: Sequence[str] = (), processes: int = 1
) -> dict[Path, str]:
    """A shell line by the report it writes: one for everything, or the bases' and then ``processes`` for the variants.

    All have the same ``words``, so that prompts and batches are the same. Drafters that differ in their weights alone
    share their programs and stay together.
    """
    parts = [bases(chosen, out)]
    if processes == 1:
        parts[0] |= {variant.name: folder(variant, out) for variant in chosen}
    else:
        parts += [{} for _ in range(processes)]
        groups: dict[tuple, dict[str, Path]] = {}
        for variant in chosen:
            program = (variant.window, variant.changes, variant.reader)
            groups.setdefault(program, {})[variant.name] = folder(variant, out)
        for group in groups.values():
            min(parts[1:], key=len).update(group)
    lines = {}
    for number, part in enumerate(part for part in parts if part):
        file = out / ("ablation.json" if processes == 1 else f"ablation_{number}.json")
        line = ["python", "-m", "ready_jax.serve.evaluate"]
        line += [word for name, where in part.items() for word in ("--draft", f"{name}={where}")]
        line += ["--stale", REFERENCE] if REFERENCE in part else []
        lines[file] = shlex.join([*line, *words, "--json", str(file)])
    return lines


def change_over(found: dict[str, Any], name: str, other: str, key: str) -> str:
    """A paired change of an evaluation's report, whichever way round it was stored."""
    forward, backward = found["paired"].get(f"{name}_over_{other}"), found["paired"].get(f"{other}_over_{name}")
    if forward is not None:
        return report.change(forward[key])
    if backward is None or backward[key]["change"] is None:
        return "-"
    low, high = backward[key]["ci95"]
    turned = [1 / (1 + x) - 1 for x in (backward[key]["change"], high, low)]
    return report.change({"change": turned[0], "ci95": turned[1:]})


def table(found: dict[str, Any], question: Question) -> report.Table | None:
    """The answer to one question; None if the evaluation lacks its reference or all else."""
    named = [*(variant.name for variant in question.variants), *question.untrained]
    names = [name for name in named if name in found["overall"]]
    if question.reference not in found["overall"] or names in ([], [question.reference]):
        return None
    rows = []
    for name in dict.fromkeys([BASE, *names]):
        one = found["overall"].get(name)
        if one is not None:
            own = name == question.reference
            keys = ("acceptance_length_change", "non_loop_change")
            changes = ["reference" if own else change_over(found, name, question.reference, key) for key in keys]
            rows.append(
                [
                    name,
                    report.with_interval(one["acceptance_length"], one["ci95"]),
                    changes[0],
                    report.with_interval(one["non_loop"], one["non_loop_ci95"]),
                    changes[1],
                    " ".join("-" if s is None else f"{100 * s:.1f}" for s in one["survival"]),
                    report.number(one["milliseconds_per_round"], 2),
                ]
            )
    columns = ["drafter", "acceptance length [95 %]", f"over {question.reference}, paired", "without loops [95 %]"]
    columns += [f"over {question.reference}, paired", "survival at 1..7, %", "ms/round"]
    return report.Table(question.title, columns, rows)


def cells() -> list[study.Cell]:
    """The drafters of the study of the training: the base at every window, then what was trained."""
    base = [study.Cell(windowed_name(BASE, window), BASE, window, None) for window in WINDOWS]
    return base + [study.Cell(v.name, v.method, v.window, v.seed) for v in TRAINING.variants]


def evaluated(files: Sequence[Path]) -> dict[str, Any]:
    """The report of an evaluation, or of several put together."""
    if len(files) == 1:
        return json.loads(files[0].read_text(encoding="utf-8"))
    whole, found = records.together(files)
    whole["run"]["commit"] = ", ".join(map(str, whole["run"]["commits"]))
    return whole | summary.summary(found)


def page(found: dict[str, Any]) -> report.Page:
    """One table per question that the evaluation answers. ValueError if it answers none."""
    if "paired_vs_stateless" in found:
        return study.page(found)
    tables = [made for question in QUESTIONS if (made := table(found, question)) is not None]
    if not tables:
        needed = ", ".join(variant.name for variant in variants())
        raise ValueError(f"found the methods {', '.join(found.get('overall', {}))}; needed are some of {needed}")
    notes = [report.conditions_line(found) + "."]
    notes.append(
        "Means over benchmarks; intervals are bootstraps over prompts and do not cover another training run: a "
        "difference between two drafters of one seed each may be the seed's."
    )
    return report.Page("Ablations at nano's size", [*tables, report.conditions_table(found)], notes=notes)


def window_of(text: str) -> int | None:
    """A window on the command line."""
    return None if text == UNLIMITED else int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ready_jax.serve.ablate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="print the commands that train and evaluate")
    add = planning.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where the trained drafters go")
    add("--tokens", metavar="FILE", help="regenerated.npz.xz, so that every variant sees the same rows")
    questions = {question.name: question for question in (*QUESTIONS, TRAINING)}
    add("--question", nargs="+", choices=list(questions), help="default: all but training")
    add("--windows", nargs="+", type=window_of, metavar="TOKENS", help="only these (numbers, or unlimited)")
    add("--seeds", nargs="+", type=int, metavar="SEED", help="only these")
    add("--steps", type=int, nargs=2, metavar=("STAGE1", "STAGE2"), help="default: the recipes'")
    add("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="further changes of every training run")
    add("--print", choices=("train", "evaluate"), help="default: both")
    add("--trained", action="store_true", help="evaluate only drafters that are there already")
    add("--processes", type=int, default=1, metavar="N", help="that evaluate at once, besides that of the base")
    add("--evaluate", default=EVALUATION, metavar="WORDS", help=f"its options (default: {EVALUATION})")
    making = commands.add_parser("window", help="copy a drafter, with a draft window")
    making.add_argument("window", type=int, metavar="TOKENS")
    making.add_argument("--base", type=Path, default=NANO / BASE, metavar="FOLDER", help="default: the shipped one")
    making.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    joining = commands.add_parser("training", help="the numbers of the training question, from its evaluations")
    joining.add_argument("file", type=Path, nargs="+", metavar="FILE.json", help="their .jsonl must lie beside them")
    joining.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the numbers go")
    joining.add_argument("--runs", type=Path, nargs="+", metavar="DIR", help="trained drafters (default: beside FILE)")
    joining.add_argument("--leave-out", action="store_true", help="leave out prompts whose autoregressive texts differ")
    reading = commands.add_parser("tables", help="one table per question from an evaluation")
    reading.add_argument("file", type=Path, nargs="+", metavar="FILE.json", help="evaluations, or what training wrote")
    for each in (joining, reading):
        each.add_argument("--out", type=Path, metavar="FILE", help=".html or .md; default: Markdown to standard output")
    options = parser.parse_args(arguments)
    if options.command == "plan":
        chosen = variants([questions[name] for name in options.question] if options.question else QUESTIONS)
        chosen = [v for v in chosen if options.windows is None or v.window in options.windows]
        chosen = [v for v in chosen if options.seeds is None or v.seed in options.seeds]
        steps = None if options.steps is None else (options.steps[0], options.steps[1])
        lines = []
        if options.print != "evaluate":
            lines += training(chosen, options.out, tokens=options.tokens, steps=steps, changes=options.set)
        if options.trained:
            chosen = [v for v in chosen if _there(folder(v, options.out))]
        if options.print != "train":
            words = shlex.split(options.evaluate)
            lines += evaluations(chosen, options.out, words=words, processes=options.processes).values()
        print("\n".join(lines))
    elif options.command == "window":
        with_window(options.base, options.window, options.out)
    elif options.command == "training":
        runs = options.runs or list(dict.fromkeys(file.parent for file in options.file))
        study.write(study.put_together(options.file, cells(), runs, leave_out=options.leave_out), options.json)
        report.write(page(json.loads(options.json.read_text(encoding="utf-8"))), options.out)
    else:
        report.write(page(evaluated(options.file)), options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
