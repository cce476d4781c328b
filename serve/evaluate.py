"""`python -m ready_jax.serve.evaluate`: benchmarks under several methods, with exactness, acceptance, speed, accuracy.

    python -m ready_jax.serve.evaluate --model FOLDER --draft dspark=FOLDER --draft ready=FOLDER \\
        --dataset gsm8k,mbpp --max-samples 200 --batch-size 64 --max-new-tokens 256 --data-dir DIR --json FILE

Every batch is decoded by every method in turn, autoregressive decoding first: the same prompts, order, width, padding
and budget, greedy. Programs are compiled and run once before anything is timed. One line per prompt goes to the .jsonl
beside FILE, so a killed run goes on where it stopped; FILE gets conditions and numbers (`metrics.py`), and
`ready_jax.serve.report` draws it. The exit status is 1 if a text differs from the autoregressive one (in lower
precision than fp32: by more than a near-tie).

Several devices: `--devices N` spreads rows over N of this host, `--batch-size` each. Several processes or hosts: the
same command with `--num-processes N --process-id I` and a shared folder; who finishes last writes the numbers.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm.auto import tqdm

import ready_jax
from ready_jax import bench_data, checkpoint, devices, provenance
from ready_jax.baselines import BaselineConfig, PromptLookup, Stale
from ready_jax.bench_data import SEVEN
from ready_jax.generation import Generation
from ready_jax.pair import AUTOREGRESSIVE, NANO, Pair
from ready_jax.serve import grade, metrics, records
from ready_jax.serve.selection import Batch, batches, bigram_of, select

SHIPPED_DRAFTERS = ("dspark", "stateless", "ready")
PROMPT_LOOKUP, BIGRAM = "prompt_lookup", "bigram"


Ways = dict[str, tuple[Pair, str | None]]


def methods(pair: Pair, drafters: dict[str, Any]) -> Ways:
    """Pairs and what ``generate`` is asked for, autoregressive decoding first and by passes of the same width."""
    pairs = {name: pair.with_drafter(drafter) for name, drafter in drafters.items()}
    blocks = {name: drafter.config.block_size for name, drafter in drafters.items()}
    if len(set(blocks.values())) > 1:
        raise ValueError(f"blocks of {blocks} tokens: methods are compared at one width of a verify pass")
    first = next(iter(pairs.values()), pair)
    ways: Ways = {metrics.BASELINE: (first, AUTOREGRESSIVE)}
    return ways | {name: (each, None) for name, each in pairs.items()}


# Decoding


def run_batch(batch: Batch, ways: Ways, rows: int, budget: int) -> list[dict[str, Any]]:
    """The records of a batch under all methods. Rows that are left over repeat the first prompt and are dropped."""
    ids = [prompt.token_ids for prompt in batch.prompts]
    ids += [ids[0]] * (rows - len(ids))
    found: list[dict[str, Any]] = [
        dict(benchmark=p.benchmark, index=p.index, id=p.id, prompt_tokens=len(p.token_ids), batch=batch.name,
             batch_prompts=len(batch.prompts), methods={})
        for p in batch.prompts
    ]  # fmt: skip
    plain: list[Generation] = []
    for name, (pair, method) in ways.items():
        results = pair.generate(ids, method=method, max_new_tokens=budget, pad_prompts_to=batch.width)
        plain = plain or results
        for record, result, wanted in zip(found, results, plain, strict=False):
            record["methods"][name] = recorded(result, wanted)
    for prompt, record in zip(batch.prompts, found, strict=True):
        for name in ways:
            place = metrics.first_difference(metrics.tokens_of(record, name), metrics.tokens_of(record, AUTOREGRESSIVE))
            if place is not None:
                before = prompt.token_ids + metrics.tokens_of(record, AUTOREGRESSIVE)[:place]
                record["methods"][name]["margin"] = margin(ways[AUTOREGRESSIVE][0], before, rows)
    return found


def recorded(result: Generation, plain: Generation) -> dict[str, Any]:
    """What is kept of a generation; tokens and text only where they are not the baseline's."""
    own = result is plain or result.token_ids != plain.token_ids
    return dict(
        token_ids=result.token_ids if own else None,
        text=result.text if own else None,
        finish_reason=result.finish_reason,
        accepted=result.accepted_per_round,
        emitted=result.emitted_per_round,
        proposed=result.proposed_per_round,
        prefill_seconds=result.timing.prefill_seconds,
        decode_seconds=result.timing.decode_seconds,
    )


def margin(pair: Pair, token_ids: list[int], rows: int) -> float:
    """The target's best logit minus its second best after these tokens, by a prefill."""
    found = pair.generate([token_ids] * rows, method=AUTOREGRESSIVE, max_new_tokens=1, keep_logits=True)[0]
    second, best = np.sort(found.logits[0])[-2:]
    return float(best - second)


class Clock:
    """Where the time of this process goes, in seconds; what earlier processes of the same run spent is added."""

    NAMES = ("load", "compile", "warm_up", "decode", "grade")

    def __init__(self, before: dict[str, float] | None = None):
        self.seconds = dict.fromkeys(self.NAMES, 0.0) | (before or {})
        self.begun = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self.begun
        self.begun = now

    def move(self, source: str, name: str, seconds: float) -> None:
        self.seconds[source] -= seconds
        self.seconds[name] += seconds


def warm_up(work: Sequence[Batch], ways, rows: int, budget: int, clock: Clock) -> None:
    """Compile and run once what every width of prompts needs under every method."""
    for width in dict.fromkeys(batch.width for batch in work):
        for pair, method in ways.values():
            timing = pair.warm_up(rows, width, method=method, max_new_tokens=budget)
            clock.move("warm_up", "compile", timing.compile_seconds)
    clock.lap("warm_up")


def budget_of(clock: Clock) -> dict[str, Any]:
    """Seconds and peak bytes so far. The allocator's peak never falls, so it is one number for all methods."""
    peaks = [one.peak for one in devices.memory() if one.peak is not None]
    limits = [one.limit for one in devices.memory() if one.limit is not None]
    return dict(
        seconds={name: round(seconds, 3) for name, seconds in clock.seconds.items()},
        device_peak_bytes=max(peaks) if peaks else None,
        device_limit_bytes=min(limits) if limits else None,
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


def budget_line(budget: dict[str, Any]) -> str:
    """Memory and time in one line."""
    peak, limit = budget["device_peak_bytes"], budget["device_limit_bytes"]
    host = f"host peak {budget['host_peak_bytes'] / 2**30:.2f} GiB"
    memory = host if peak is None else f"device peak {peak / 2**30:.2f} of {(limit or 0) / 2**30:.1f} GiB, {host}"
    parts = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in budget["seconds"].items())
    return f"budget: {memory}; seconds: {parts}, total {sum(budget['seconds'].values()):.1f}"


# The run


def load_methods(options: argparse.Namespace) -> tuple[Pair, Ways, dict[str, Any]]:
    """The target alone, the methods, and the hashes of their weights."""
    mesh = data_mesh(options.devices)
    model = options.model or NANO / "target"
    pair = ready_jax.load(
        model, dtype=options.dtype, device=options.device, compile_cache=options.compile_cache, mesh=mesh
    )
    drafters: dict[str, Any] = dict(options.draft)
    weights = {"target": weights_sha256(model)} | {name: weights_sha256(folder) for name, folder in drafters.items()}
    drafters = {name: pair.with_drafter(folder).drafter for name, folder in drafters.items()}
    for name in options.stale:
        drafters[f"{name}_stale"], weights[f"{name}_stale"] = Stale(drafters[name]), weights[name]
    blocks = [drafter.config.block_size for drafter in drafters.values()]
    config = BaselineConfig(block_size=blocks[0]) if blocks else BaselineConfig()
    if options.prompt_lookup:
        drafters[PROMPT_LOOKUP] = PromptLookup(config)
    if options.bigram:
        drafters[BIGRAM] = bigram_of(options.bigram, pair, config)
        weights[BIGRAM] = {options.bigram.name: provenance.sha256(options.bigram)}
    return pair, methods(pair, drafters), weights


def data_mesh(count: int) -> Mesh | None:
    """Rows over ``count`` devices of this host, each with whole models; None for one."""
    if count == 1:
        return None
    if count > jax.local_device_count():
        raise ValueError(f"--devices {count}: this host has {jax.local_device_count()} {jax.default_backend()} devices")
    return Mesh(np.array(jax.local_devices()[:count]).reshape(count, 1), ("data", "model"))


def weights_sha256(source: str | Path) -> dict[str, str]:
    """Hashes of a checkpoint's weight files."""
    folder = checkpoint.resolve(source)[0]
    return {file.name: provenance.sha256(file) for file in sorted(folder.glob("*.safetensors"))}


def plan(options: argparse.Namespace, pair: Pair, names: Sequence[str], weights: dict) -> tuple[dict, list[Batch]]:
    """The conditions of the run, and its batches."""
    reach = pair.target.config.max_position_embeddings - options.max_new_tokens
    longest = min(options.prompt_tokens or reach, reach)
    rows = options.batch_size * options.devices
    work, sets = [], {}
    for name in options.dataset:
        prompts, sets[name] = select(
            pair, name, data_dir=options.data_dir, limit=options.max_samples, thinking=options.enable_thinking,
            longest=longest,
        )  # fmt: skip
        work += batches(prompts, rows, options.prompt_tokens)
    conditions = dict(
        model=str(options.model or "nano"),
        dtype=options.dtype,
        enable_thinking=options.enable_thinking,
        temperature=0.0,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        prompt_tokens=options.prompt_tokens,
        target_sha256=weights["target"],
        methods={name: weights.get(name, {}) for name in names},
        benchmarks=sets,
    )
    return conditions, work


def started(options: argparse.Namespace, conditions: dict[str, Any]) -> dict[str, float]:
    """Seconds that earlier processes of this run spent. ValueError if FILE belongs to another run."""
    file, run = options.json, dict(setting(options), budget=dict(seconds={}))
    mine = records.lines_file(file, options.process_id if options.num_processes > 1 else None)
    if options.restart:
        for path in (file, mine):
            path.unlink(missing_ok=True)
    if not file.is_file():
        records.write_report(file, conditions, [], None, run)
        return {}
    before = json.loads(file.read_text())
    apart = records.differences(before, dict(conditions=conditions, run=run))
    if before["conditions"]["methods"] != conditions["methods"]:
        apart["methods"] = (before["conditions"]["methods"], conditions["methods"])
    if apart:
        lines = [f"  {name}: there {records.shorten(a)}, here {records.shorten(b)}" for name, (a, b) in apart.items()]
        raise ValueError(
            f"{file} holds a run under other conditions:\n" + "\n".join(lines) + "\nanother --json FILE is needed, or "
            "--restart to overwrite it"
        )
    return before["run"]["budget"]["seconds"]


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """Where the run happens."""
    found = provenance.conditions()
    return found | dict(device_count=jax.device_count(), devices=options.devices, processes=options.num_processes)


def evaluate(options: argparse.Namespace, *, log=print) -> dict[str, Any]:
    """Run what the options describe, or what is left of it, and return the report."""
    clock = Clock()
    pair, ways, weights = load_methods(options)
    conditions, work = plan(options, pair, list(ways), weights)
    clock.lap("load")
    for name, seconds in started(options, conditions).items():
        clock.seconds[name] += seconds
    rows = options.batch_size * options.devices
    done = {(record["benchmark"], record["index"]) for record in records.read(options.json, conditions)}
    mine = work[options.process_id :: options.num_processes]
    left = [batch for batch in mine if any((p.benchmark, p.index) not in done for p in batch.prompts)]
    widest = max(batch.width for batch in work)
    biggest = max(ways.values(), key=lambda way: sum(way[0].memory().values()))[0]
    memory = sum(biggest.memory().values()) + biggest.cache_bytes(rows, widest + options.max_new_tokens)
    log(
        f"device: {jax.default_backend()} ({jax.devices()[0].device_kind}) x {options.devices}, {options.dtype}, "
        f"thinking {'on' if options.enable_thinking else 'off'}; {', '.join(ways)}; "
        f"{sum(len(b.prompts) for b in work)} prompts in {len(work)} batches of {rows}, of which {len(left)} are left "
        f"for this process; one method's weights and memory take {memory / 2**30:.2f} GiB"
    )
    path = records.lines_file(options.json, options.process_id if options.num_processes > 1 else None)
    stamp = records.digest(conditions)
    if left:
        log("compiling and warming up ...")
        warm_up(left, ways, rows, options.max_new_tokens, clock)
    with tqdm(total=sum(len(b.prompts) for b in left), unit="prompt", disable=not options.progress) as bar:
        for batch in left:
            bar.set_description(batch.name)
            found = run_batch(batch, ways, rows, options.max_new_tokens)
            records.append(path, [record | dict(conditions=stamp) for record in found])
            bar.update(len(found))
    clock.lap("decode")
    finished = records.read(options.json, conditions)
    if len(finished) < sum(len(batch.prompts) for batch in work):
        log(f"{len(finished)} prompts are done; the other processes' are missing: the last one writes the numbers")
        return dict(conditions=conditions, run=setting(options), complete=False)
    grades = None
    if options.grade:
        grades = grade.grade_records(
            finished, records.texts, data_dir=options.data_dir, thinking=options.enable_thinking,
            allow_code_execution=options.allow_code_execution, log=log,
        )  # fmt: skip
    clock.lap("grade")
    run = setting(options) | dict(budget=budget_of(clock))
    log(budget_line(run["budget"]))
    return records.write_report(options.json, conditions, finished, grades, run)


def table(report: dict[str, Any]) -> str:
    """The means over benchmarks, one line per method."""
    lines = [f"mean of {', '.join(next(iter(report['overall'].values()))['benchmarks'])}:"]
    for name, one in report["overall"].items():
        spread = "" if one["ci95"] is None else " [{:.3f}, {:.3f}]".format(*one["ci95"])
        non_loop = "-" if one["non_loop"] is None else f"{one['non_loop']:.3f}"
        right = "" if one["accuracy"] is None else f", accuracy {one['accuracy']:.1%}"
        lines.append(
            f"  {name}: acceptance {one['acceptance_length'] or float('nan'):.3f}{spread}, "
            f"without loops {non_loop}, {one['decode_tokens_per_second']:.1f} tokens/s, "
            f"exact {one['exact_match']:.2%}{right}"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with what depends on others filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m ready_jax.serve.evaluate", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", help="target: folder or hub name (default: the shipped nano)")
    add("--draft", action="append", type=_named, metavar="NAME=FOLDER", help="a drafter; may be repeated")
    add("--stale", action="append", default=[], metavar="NAME", help="also that drafter with states one round old")
    add("--prompt-lookup", action="store_true", help="also draft by prompt lookup")
    add("--bigram", type=Path, metavar="FILE", help="also draft by a table of successors: .npy, or text as .jsonl(.gz)")
    add("--dataset", type=lambda text: text.split(","), help=f"of {','.join(bench_data.BENCHMARKS)}, with commas")
    add("--max-samples", type=int, help="prompts per set (default: all)")
    add("--batch-size", type=int, default=1, help="rows decoded together, per device (default 1, as published)")
    add("--max-new-tokens", type=int, default=256)
    add("--prompt-tokens", type=int, help="pad every prompt to this many tokens, leave longer ones out: one program")
    add("--enable-thinking", action=argparse.BooleanOptionalAction, help="default: on, but off for nano")
    add("--data-dir", help="folder with the prompt sets that do not ship")
    add("--json", type=Path, required=True, metavar="FILE", help="the report; the .jsonl beside it has every prompt")
    add("--restart", action="store_true", help="overwrite what FILE holds")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--device", choices=devices.PLATFORMS, help="refuse to run on anything else")
    add("--devices", type=int, default=1, help="of this host, a batch each")
    add("--num-processes", type=int, default=1)
    add("--process-id", type=int, default=0)
    add("--grade", action=argparse.BooleanOptionalAction, default=True, help="grade the texts at the end")
    add("--allow-code-execution", action="store_true", help="grade code by running it, isolated")
    add("--margin-limit", type=float, default=0.25, help="largest logit margin of a near-tie below fp32")
    add("--compile-cache", metavar="DIR", help="keep compiled programs here")
    add("--progress", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(arguments)
    shipped = [name for name in SEVEN if options.data_dir or name not in bench_data.NOT_SHIPPED]
    options.dataset = options.dataset or shipped
    unknown = [name for name in options.dataset if name not in bench_data.BENCHMARKS]
    if unknown or len(set(options.dataset)) < len(options.dataset):
        parser.error(f"--dataset: found {','.join(options.dataset)}; each of {','.join(bench_data.BENCHMARKS)} once")
    if not options.draft:
        options.draft = [] if options.model else [(name, NANO / name) for name in SHIPPED_DRAFTERS]
    drafts = [name for name, _ in options.draft]
    taken = [*drafts, AUTOREGRESSIVE, PROMPT_LOOKUP, BIGRAM]
    if not set(options.stale) <= set(drafts):
        parser.error(f"--stale: found {', '.join(options.stale)}; names of --draft are needed")
    if options.stale and options.devices > 1:
        parser.error(f"--stale with --devices {options.devices}: states one round old are kept on one device only")
    taken += [f"{name}_stale" for name in options.stale]
    if len(set(taken)) < len(taken):
        parser.error(f"--draft: every name once, and none of {AUTOREGRESSIVE}, {PROMPT_LOOKUP}, {BIGRAM}")
    if not 0 <= options.process_id < options.num_processes:
        parser.error(f"--process-id {options.process_id} must lie in 0..{options.num_processes - 1}")
    if options.enable_thinking is None:
        options.enable_thinking = options.model is not None
    return options


def _named(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name.isidentifier() and equals and folder):
        raise argparse.ArgumentTypeError(f"found {text!r}: NAME=FOLDER is needed, such as ready=runs/ready/merged")
    return name, folder


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    report = evaluate(options)
    if not report["complete"]:
        return 0
    print(table(report))
    exact = [one for by_set in report["methods"].values() for one in by_set.values()]
    status, text = metrics.verdict(exact, options.dtype, options.margin_limit)
    print(text)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
