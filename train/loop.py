"""Train a drafter: `python -m ready_jax.train.loop RECIPE [section.field=value ...] [--dry-run]`.

One process from data to checkpoint: a frozen target computes features online, the drafter (all of it, or a state
reader and LoRA over a pretrained one) learns from them, real acceptance is decoded on held-out prompts on the way.
Recipes are in `configs/`; sections and fields in `configs/drafter_training.py`. Writes `metrics.jsonl`, `state/`
(resumable), `log.json`, and the result as Hugging Face folders: `dspark/` where the drafter itself trained, else
`adapter/` (what trained, beside its base) and `merged/`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ready_jax import adapter, checkpoint, lora, provenance, schema
from ready_jax.baselines import Bigram
from ready_jax.configs.drafter_training import Recipe
from ready_jax.configs.named import recipe as named_recipe
from ready_jax.configs.qwen3_8_27b import PRESETS
from ready_jax.tensor_files import CONFIG, read_json
from ready_jax.train import acceptance, estimate, warm_start
from ready_jax.train import step as steps
from ready_jax.train.batches import Stream, rows_for, with_length
from ready_jax.train.diagnose import bad_rows
from ready_jax.train.features import cast
from ready_jax.train.mesh import gather_options, gathered, join_processes, make_mesh, placed, placement, traced_for
from ready_jax.train.run_state import RunState, check_same, flat_config, same_folder
from ready_jax.train.show import METRICS, Show

#: Steps that may be under way before the counters of the oldest are read.
LAG = 2


class NonFiniteError(FloatingPointError):
    """Too many steps in a row had a loss or gradient that is not finite; the last saved state is intact."""


@dataclass(frozen=True)
class RunResult:
    """What a run leaves: the drafter in the compute type, log lines, held-out measurements, counters, its folder."""

    drafter: Any
    history: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    steps: int
    skipped: int
    nonfinite: int
    best_score: float | None
    out: Path


@dataclass
class Run:
    """A run in progress."""

    recipe: Recipe
    target: Any
    stream: Stream
    frozen: steps.Frozen
    state: steps.TrainState
    store: RunState
    show: Show
    mesh: Any
    heldout: dict[str, list]
    config: Any  # of the drafter
    identity: dict[str, Any]  # what a resumed run must agree on
    history: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    recent: list[dict[str, Any]] = field(default_factory=list)
    busy: float = 0.0  # seconds of training since the last log line, and the steps they took
    timed: int = 0

    def train(self) -> None:
        """Steps from where the state stands to the end of the schedule."""
        recipe, last = self.recipe, self.recipe.optimizer.steps
        optimizer = steps.make_optimizer(recipe.optimizer)
        step = steps.make_step(
            self.config, optimizer, recipe.loss, num_anchors=recipe.rows.anchors,
            accumulate=recipe.optimizer.accumulate, group=recipe.rows.group, placement=placement(self.state, self.mesh),
            compiler_options=gather_options(self.target, self.mesh),
        )  # fmt: skip
        under_way: deque[tuple[int, Any]] = deque()
        begun, first = time.perf_counter(), True
        for number in range(int(self.state.step) + 1, last + 1):
            with traced_for(self.mesh):
                self.state, found = step(self.state, self.frozen, self.target, *self.stream.batch(number - 1))
            self.recent.append(found)
            under_way.append((number, found["streak"]))
            while len(under_way) > (0 if number == last else LAG):
                self.check(*under_way.popleft())
            self.show.advance(number)
            if first:
                jax.block_until_ready(self.state)
                self.show.line(f"first step after {time.perf_counter() - begun:.1f} s, loss {float(found['loss']):.4f}")
                begun, first = time.perf_counter(), False
            else:
                self.timed += 1
            due = [every > 0 and (number % every == 0 or number == last) for every in self.intervals]
            if any(due):
                jax.block_until_ready(self.state)
                self.busy += time.perf_counter() - begun
                self.pause(number, *due)
                begun = time.perf_counter()

    @property
    def intervals(self) -> tuple[int, int, int]:
        """Steps between log lines, evaluations, and saves (0: only at the end, which `finish` does)."""
        return self.recipe.log.every, self.recipe.evaluate.every, self.recipe.log.save_every

    def pause(self, number: int, logged: bool, measured: bool, saved: bool) -> None:
        loss = self.log_line(number) if logged else None
        score = self.measure(number) if measured and self.heldout else None
        if saved or score is not None:
            self.save(score)
        self.show.advance(number, loss)

    def check(self, number: int, streak) -> None:
        """Say which rows made a step useless; stop after too many in a row."""
        streak = int(streak)
        if not streak:
            return
        index, batch = self.stream.index(number - 1), self.stream.batch(number - 1)
        with traced_for(self.mesh):
            bad, terms = bad_rows(self.recipe, self.frozen.whole(self.state.masters), self.target, batch, self.mesh)
        rows = index[bad].tolist() or index.tolist()
        self.show.line(
            f"step {number}: loss or gradient is not finite, the step was skipped ({streak} in a row); "
            f"rows {rows} of the data; {terms}"
        )
        if streak >= self.recipe.optimizer.max_nonfinite:
            raise NonFiniteError(
                f"{streak} steps in a row up to step {number} were not finite, the last on rows {rows}; "
                f"{self.store.folder} holds what was saved before"
            )

    def read_recent(self) -> list[dict[str, float]]:
        """Metrics of the steps since the last log line, as numbers."""
        self.recent = [{name: float(x) for name, x in one.items()} for one in jax.device_get(self.recent)]
        return self.recent

    def log_line(self, number: int) -> float:
        """Means over the steps since the last line that changed something, and totals of those that did not."""
        recipe, read = self.recipe, self.read_recent()
        useful = [one for one in read if one["anchors"] and not one["streak"]] or read
        line = {name: float(np.mean([one[name] for one in useful])) for name in read[0] if name != "streak"}
        line |= self.counters()
        seconds = self.busy / self.timed if self.timed else float("nan")
        rows = recipe.rows.batch
        flops = estimate.row_flops(self.target.config, self.config, recipe).total * rows
        peak, devices = estimate.peak_flops(), recipe.mesh.data * recipe.mesh.shard
        speed = {
            "seconds_per_step": seconds,
            "tokens_per_second": rows * recipe.rows.length / seconds,
            "mfu": None if peak is None else flops / seconds / (peak * devices),
            "eta_seconds": seconds * (recipe.optimizer.steps - number),
        }
        line |= {name: value for name, value in speed.items() if value is not None and np.isfinite(value)}
        self.recent, self.busy, self.timed = [], 0.0, 0
        self.history.append({"step": number} | line)
        self.show(number, line)
        shown = f"{1000 * seconds:.1f} ms/step, {speed['tokens_per_second']:,.0f} tokens/s"
        shown += "" if speed["mfu"] is None else f", MFU {speed['mfu']:.1%}"
        self.show.line(
            f"step {number}/{recipe.optimizer.steps}: loss {line['loss']:.4f} ce {line['ce_loss']:.3f} "
            f"l1 {line['l1_loss']:.4f} tau {line['tau_probabilistic']:.3f} top1 {line['top1@1']:.3f} "
            f"norm {line['grad_norm']:.3f} supervised {line['supervised']:.1%}; {shown}, "
            f"{speed['eta_seconds'] / 60:.1f} min to go"
        )
        return line["loss"]

    def counters(self) -> dict[str, int]:
        return {name: int(getattr(self.state, name)) for name in ("skipped", "nonfinite")}

    def measure(self, number: int) -> float | None:
        """Real greedy acceptance over the held-out prompts, logged beside the loss; the mean over sets."""
        begun, evaluate = time.perf_counter(), self.recipe.evaluate
        prompts = [prompt for some in self.heldout.values() for prompt in some]
        edges = np.cumsum([0, *(len(some) for some in self.heldout.values())])
        shape = acceptance.Shape(min(evaluate.batch, len(prompts)), evaluate.prompt_tokens, evaluate.new_tokens)
        with traced_for(self.mesh):
            found = acceptance.decode_prompts(self.target, self.frozen.drafter(self.state.masters), prompts, shape)
        record: dict[str, Any] = {}
        for i, name in enumerate(self.heldout):
            one = acceptance.summary({key: x[edges[i] : edges[i + 1]] for key, x in found.items()})
            record[name] = {key: one[key] for key in ("acceptance_length", "survival", "rounds", "loop_share")}
        lengths = [one["acceptance_length"] for one in record.values() if one["acceptance_length"] is not None]
        whole = acceptance.summary(found)
        score = float(np.mean(lengths)) if lengths else None
        record = {"acceptance_length": score, "survival": whole["survival"], "sets": record}
        self.evaluations.append({"step": number} | record)
        self.show(number, {"heldout": record, "heldout_seconds": time.perf_counter() - begun})
        survival = " ".join("-" if x is None else f"{x:.2f}" for x in whole["survival"])
        self.show.line(f"step {number}: held-out acceptance {score}, survival {survival}")
        return score

    def save(self, score: float | None = None) -> None:
        recent = list(self.read_recent())  # a list of its own: it is written while steps go on
        self.store.save(self.state, {"config": self.identity, "recent": recent}, score)


def run(recipe: Recipe, *, target=None, log=print) -> RunResult:
    """Train what the recipe describes, or go on with a run; ``target`` is a module to use instead of loading one.

    Raises ValueError where files, recipe and models do not fit or a resumed run had another configuration (both values
    are shown), NonFiniteError after too many useless steps in a row.
    """
    files, out = recipe.files, Path(recipe.files.out)
    mesh = make_mesh(recipe.mesh)
    resume = resumed(recipe)
    out.mkdir(parents=True, exist_ok=True)
    if target is None:
        target = checkpoint.load_target(files.target, revision=files.target_revision or None, mesh=mesh)
    else:
        target = placed(target, mesh)
    drafter = warm_start.starting_drafter(recipe, target.config)
    estimate.check_disk(out, estimate.run_bytes(drafter, recipe), "this run's states and exports")
    with traced_for(mesh):
        packed, answers, data = rows_for(target, recipe, log=log)
    target = placed(target, mesh)  # loaded by its letters, as decoding wants it
    recipe = with_length(recipe, packed)
    identity = flat_config(recipe) | {"rows_sha256": data["rows_sha256"]}
    stream = Stream(packed, recipe.rows.batch, recipe.rows.seed, recipe.rows.first, mesh)
    if files.bigram and answers is not None and jax.process_index() == 0:
        table = Bigram.count([answers.document(i) for i in range(len(answers))], target.config.vocab_size)
        np.save(out / "bigram.npy", np.asarray(table.next_V))

    optimizer = steps.make_optimizer(recipe.optimizer)
    state, frozen = steps.start(
        drafter, optimizer, trained=steps.trained_filter(recipe.adapt.trains), compute_dtype=target.dtype.name
    )
    norms, config = steps.norms(frozen.drafter(state.masters)), drafter.config
    log(f"{adapter.describe(drafter)}; trains {', '.join(recipe.adapt.trains)}")
    del drafter
    state, frozen = placed(state, mesh), placed(frozen, mesh)
    store = RunState(out / "state", recipe.log.keep)
    recent = []
    if resume is not None:
        source = store if same_folder(resume, out) else RunState(resume / "state")
        check_same(identity, source.record()["config"], str(resume))
        state, stored = source.restore(state)
        recent = stored["recent"]
        if source is not store:
            source.close()
            store.best_score = source.best_score
        log(f"resuming {resume} after step {int(state.step)}")
    shape = acceptance.Shape(recipe.evaluate.batch, recipe.evaluate.prompt_tokens, recipe.evaluate.new_tokens)
    sources = [Path(name) if name else None for name in (recipe.evaluate.prompts, recipe.evaluate.heldout)]
    heldout = {}
    if recipe.evaluate.every:
        heldout = acceptance.prompt_sets(sources[0], sources[1], shape, recipe.evaluate.max_samples)[0]
    show = Show(recipe, out, int(state.step), (resume or out) / METRICS, log=log)
    history = [line for line in show.before if "loss" in line]
    evaluations = [{"step": line["step"]} | line["heldout"] for line in show.before if "heldout" in line]
    work = Run(
        recipe, target, stream, frozen, state, store, show, mesh, heldout, config, identity, history, evaluations,
        recent,
    )  # fmt: skip
    try:
        work.train()
        work.save()
    finally:
        show.close()
        store.close()
    masters, frozen = gathered((work.state.masters, work.frozen), mesh)
    trained, counters = frozen.drafter(masters), work.counters()
    if jax.process_index() == 0:
        export(recipe, frozen.whole(masters), target.dtype, out, log=log)
        record = provenance.conditions() | {"config": asdict(recipe), "log": work.history} | data | counters
        record |= {
            "evaluations": work.evaluations,
            "norms_unchanged": steps.norms_unchanged(norms, steps.norms(trained)),
        }
        (out / "log.json").write_text(json.dumps(record, indent=1) + "\n")
    return RunResult(
        trained, work.history, work.evaluations, int(work.state.step), counters["skipped"], counters["nonfinite"],
        store.best_score, out,
    )  # fmt: skip


def resumed(recipe: Recipe) -> Path | None:
    """The folder of the run to go on with; None for a new one.

    Raises ValueError where there is none, where its configuration differs, or where a new run would overwrite one.
    """
    out, wanted = Path(recipe.files.out), recipe.files.resume_from
    there = RunState.exists(out / "state")
    if wanted == "auto":
        wanted = str(out) if there else ""
    if there and not (wanted and same_folder(wanted, out)):
        raise ValueError(
            f"{out} holds a run already: files.resume_from={out} (or auto) goes on with it, "
            "another files.out starts anew"
        )
    if not wanted:
        return None
    if not RunState.exists(Path(wanted) / "state"):
        raise ValueError(f"files.resume_from={wanted}: there is no saved state of a run")
    store = RunState(Path(wanted) / "state")
    stored = store.record()["config"]
    store.close()
    known = flat_config(recipe)
    late = {"rows_sha256"} | ({"rows.length"} if recipe.files.shards else set())  # known once rows have been read
    check_same(known | {name: stored[name] for name in late}, stored, wanted)
    return Path(wanted)


def export(recipe: Recipe, whole, dtype, out: Path, *, log=print) -> None:
    """Write the trained drafter, fp32 where it trained, as Hugging Face folders."""
    files, merged = recipe.files, cast(lora.merge(whole), dtype)
    if "drafter" in recipe.adapt.trains:
        checkpoint.save_pretrained(merged, out / "dspark")
        log(f"saved {out / 'dspark'}")
        return
    base, folder, revision = adapter.origin(files.from_pretrained, files.revision or None, checkpoint.resolve)
    adapter.save_adapter(whole, out / "adapter", base=base, base_folder=folder, revision=revision)
    checkpoint.save_pretrained(merged, out / "merged")
    log(f"saved {out / 'adapter'} and {out / 'merged'}")


def dry_run(recipe: Recipe, kind: str | None = None) -> list[str]:
    """What the run would take, from configurations alone: nothing is allocated and no weights are read."""
    preset = PRESETS.get(recipe.preset)
    if preset is not None and not Path(recipe.files.target).is_dir():  # an estimate downloads nothing
        target, start = preset.target, recipe.drafter or preset.drafter("v2")
    else:
        folder = checkpoint.resolve(recipe.files.target, recipe.files.target_revision or None)[0]
        target = schema.target_config(read_json(folder / CONFIG), str(folder / CONFIG))
        start = warm_start.pretrained_config(recipe)
    config = warm_start.starting_config(recipe, start)
    schema.check_pair(target, config)
    return estimate.report(target, config, recipe, kind or jax.devices()[0].device_kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("changes", nargs="*", metavar="section.field=value")
    parser.add_argument("--dry-run", action="store_true", help="print what the run would take, and stop")
    parser.add_argument("--device-kind", help="with --dry-run: estimate time for this device, such as 'NVIDIA H200'")
    parser.add_argument("--coordinator", help="host:port of the first of several processes")
    parser.add_argument("--num-processes", type=int, default=1)
    parser.add_argument("--process-id", type=int, default=0)
    args = parser.parse_args()
    recipe = named_recipe(args.recipe, args.changes)
    if args.dry_run:
        print("\n".join(dry_run(recipe, args.device_kind)))
        return
    if args.coordinator:
        join_processes(args.coordinator, args.num_processes, args.process_id)
    run(recipe, log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
