"""The paper's study at nano's size: which drafters to train, how to evaluate them, one table per question.

    python -m ready_jax.serve.ablate plan --out DIR --tokens FILE > ablate.sh   # commands, for a shell
    python -m ready_jax.serve.ablate tables DIR/ablation.json --out FILE.html   # the answers

Every variant is ReaDy's two stages over the shipped base (`configs/nano_ready.py`) with changed fields, on the same
rows; the reference is the recipe as it stands, the control without states trains LoRA alone for as many steps. A
variant whose folder is complete is not trained again. `arXiv 2610.20503` asks the same questions at 27B.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ready_jax.config import ReaderConfig
from ready_jax.pair import NANO
from ready_jax.serve import report

REFERENCE, STATELESS, BASE = "ready", "stateless", "dspark"
EVALUATION = "--batch-size 64 --max-samples 200 --prompt-tokens 1024 --prompt-lookup"  # shuffled states need a batch
TRAINER = "python -m ready_jax.train.loop"  # called by the shell: the trainer and this side never import each other
STAGES = ("nano_ready_stage1", "nano_ready_stage2")


@dataclass(frozen=True)
class Variant:
    """A drafter to train: its name, changes of the recipes' fields, and whether it has a reader (else only LoRA)."""

    name: str
    changes: tuple[str, ...] = ()
    reader: bool = True


@dataclass(frozen=True)
class Question:
    """Variants that are compared with ``reference``."""

    name: str
    title: str
    variants: tuple[Variant, ...]
    reference: str = REFERENCE


def _controls() -> tuple[Variant, ...]:
    reads = get_args(get_type_hints(ReaderConfig)["reads"])
    return tuple(Variant(f"reads_{what}", (f"adapt.reader.reads={what}",)) for what in reads if what != "own")


def _windows() -> tuple[Variant, ...]:
    pairs = ((f"window_{size}", size) for size in (16, 64, 128))
    return tuple(
        Variant(f"{name}_{kind}", (f"adapt.window={size}",), kind == REFERENCE)
        for name, size in pairs
        for kind in (STATELESS, REFERENCE)
    )


_THE = Variant(REFERENCE)
_WITHOUT = Variant(STATELESS, reader=False)
QUESTIONS = (
    Question(
        "states",
        "Does the reader gain by what it reads? Against controls of the same size",
        (_WITHOUT, *_controls(), _THE),
        STATELESS,
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
                Variant("layers_" + "_".join(map(str, layers)), (f"adapt.reader.state_layers={layers}",))
                for layers in ((0,), (2,), (6,), (0, 2, 6))
            ),
            _THE,
        ),
    ),
    Question(
        "injection",
        "Where the update enters (last draft layer, after attention, is the reference)",
        (
            Variant("inject_0", ("adapt.reader.inject_layers=(0,)",)),
            Variant("inject_0_1", ("adapt.reader.inject_layers=(0, 1)",)),
            Variant("inject_before_attention", ("adapt.reader.inject_side=before_attention",)),
            _THE,
        ),
    ),
    Question(
        "window",
        "Does the state help where the draft context is cut? Reader and control at each window, in tokens",
        (*_windows(), _WITHOUT, _THE),
        STATELESS,
    ),
)


def variants(questions: Sequence[Question] = QUESTIONS) -> list[Variant]:
    """Every variant once, the controls and the reference first."""
    found = {v.name: v for v in (_WITHOUT, _THE)} | {v.name: v for q in questions for v in q.variants}
    return list(found.values())


def recipes(variant: Variant, out: Path, *, tokens: str | None = None, steps: tuple[int, int] | None = None):
    """(recipe, changes) of each training run of a variant, in order; the last one's ``merged`` is evaluated."""
    shared = list(variant.changes) + ([f"files.tokens={tokens}"] if tokens else [])
    if not variant.reader:
        count = [f"optimizer.steps={sum(steps)}"] if steps else []
        return [("nano_stateless", [*shared, *count, f"files.out={out / variant.name}"])]
    first, second = out / f"{variant.name}_stage1", out / variant.name
    counts = [[f"optimizer.steps={n}"] for n in steps] if steps else [[], []]
    # The second stage begins behind the rows that the first one saw.
    behind = [f"rows.first={64 * steps[0]}"] if steps else []
    return [
        (STAGES[0], [*shared, *counts[0], f"files.out={first}"]),
        (
            STAGES[1],
            [*shared, *counts[1], *behind, f"files.from_pretrained={first / 'adapter'}", f"files.out={second}"],
        ),
    ]


def folder(variant: Variant, out: Path) -> Path:
    """Where a variant's trained drafter is."""
    return out / variant.name / "merged"


def plan(
    questions: Sequence[Question], out: Path, *, tokens: str | None = None, steps: tuple[int, int] | None = None,
    evaluation: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Shell lines: what is left to train, then the evaluation of everything."""
    lines = []
    for variant in variants(questions):
        if (folder(variant, out) / "config.json").is_file():
            continue
        for recipe, changes in recipes(variant, out, tokens=tokens, steps=steps):
            done = next(change.partition("=")[2] for change in changes if change.startswith("files.out="))
            if not (Path(done) / "merged" / "config.json").is_file():
                lines.append(f"{TRAINER} {shlex.join([recipe, *changes, 'files.resume_from=auto'])}")
    drafts = [f"{BASE}={NANO / 'dspark'}"] + [f"{v.name}={folder(v, out)}" for v in variants(questions)]
    words = ["python", "-m", "ready_jax.serve.evaluate"]
    words += [word for draft in drafts for word in ("--draft", draft)]
    words += [*evaluation, "--json", str(out / "ablation.json")]
    return [*lines, shlex.join(words)]


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
    names = [variant.name for variant in question.variants if variant.name in found["overall"]]
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


def page(found: dict[str, Any]) -> report.Page:
    """One table per question that the evaluation answers. ValueError if it answers none."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ready_jax.serve.ablate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="print the commands that train and evaluate")
    planning.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the trained drafters go")
    planning.add_argument(
        "--tokens", metavar="FILE", help="regenerated.npz.xz, so that every variant sees the same rows"
    )
    planning.add_argument("--question", nargs="+", choices=[q.name for q in QUESTIONS], help="default: all")
    planning.add_argument("--steps", type=int, nargs=2, metavar=("STAGE1", "STAGE2"), help="default: the recipes'")
    planning.add_argument(
        "--evaluate", default=EVALUATION, metavar="WORDS", help=f"its options (default: {EVALUATION})"
    )
    reading = commands.add_parser("tables", help="one table per question from an evaluation")
    reading.add_argument("file", type=Path, metavar="FILE.json")
    reading.add_argument("--out", type=Path, metavar="FILE", help=".html, or .md; default: Markdown on standard output")
    options = parser.parse_args(arguments)
    if options.command == "plan":
        questions = [q for q in QUESTIONS if options.question is None or q.name in options.question]
        steps = None if options.steps is None else (options.steps[0], options.steps[1])
        words = shlex.split(options.evaluate)
        print("\n".join(plan(questions, options.out, tokens=options.tokens, steps=steps, evaluation=words)))
    else:
        report.write(page(json.loads(options.file.read_text(encoding="utf-8"))), options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
