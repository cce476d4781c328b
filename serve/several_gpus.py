"""`python -m ready_jax.serve.several_gpus`: what several GPUs of one host gain, in one table and one JSON.

    python -m ready_jax.serve.several_gpus --tokens TOKENS --out results/two_gpus.json

Parts: links (collectives, bandwidth), nano_training and training_27b (data parallel, weights split), decode_27b (tensor
parallel), evaluation (data parallel). Every measurement is an entry point of this project in a process of its own, one
after another, on one GPU and on all that are asked for; an option of XLA is tried where it may help. The record is
written after every one of them and keeps what failed; parts of an earlier record in the same FILE stay. `TOKENS` is a
corpus of regenerated answers (`regenerated.npz.xz` of a training run with `files.save_tokens=True`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ready_jax import provenance
from ready_jax.kernel_times import is_collective
from ready_jax.pair import NANO
from ready_jax.serve import metrics
from ready_jax.serve.records import lines_file, write_json

TRAINER = "ready_jax.train."  # run by name: the trainer and this side never import each other
#: What XLA needs to put a round with its collectives into one graph; not its default.
ONE_GRAPH = "xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES"
#: The largest relative difference of a loss that counts as rounding: bf16 rows meet products of other shapes.
ROUNDING = 2e-3
#: Speed-ups over one GPU that are wanted on two, and the share of its time that a round may take.
WANTED = dict(data_parallel=1.9, weights_split=1.7, round=0.62)


@dataclass(frozen=True)
class Sizes:
    """How much each part does, and the seconds that it may take."""

    preset: str
    links: tuple[str, ...] = ()
    nano: tuple[str, ...] = ("optimizer.steps=60", "log.every=10")
    training: tuple[str, ...] = ("--steps", "3", "--accumulate", "4")
    decode: tuple[str, ...] = ("--rounds", "65", "--windows", "3")
    evaluation: tuple[str, ...] = ("--max-samples", "96", "--batch-size", "48", "--prompt-tokens", "512",
                                   "--draft", f"ready={NANO / 'ready'}")  # fmt: skip
    limits: Mapping[str, int] = field(
        default_factory=lambda: dict(links=60, nano_training=180, training_27b=560, decode_27b=560, evaluation=200)
    )


SIZES = {
    "qwen3_8_27b": Sizes("qwen3_8_27b"),
    "lookalike": Sizes(
        "lookalike",
        links=("--mib", "1", "--windows", "1"),
        nano=("optimizer.steps=4", "log.every=1", "rows.batch=4", "rows.length=64", "rows.anchors=4"),
        training=("--length", "64", "--anchors", "6", "--accumulate", "1", "--steps", "1"),
        decode=("--context", "64", "--rounds", "4", "--turns", "1", "3", "--windows", "1", "--ceiling-mib", "8"),
        evaluation=("--dataset", "gsm8k", "--max-samples", "3", "--batch-size", "2", "--prompt-tokens", "384",
                    "--max-new-tokens", "12"),
        limits=dict(links=120, nano_training=900, training_27b=900, decode_27b=900, evaluation=900),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One process: a module, its arguments, how many GPUs it sees, its folder, and the file that it leaves there."""

    name: str
    module: str
    arguments: tuple[str, ...]
    devices: int
    folder: Path
    output: Path


@dataclass(frozen=True)
class Part:
    """Runs, and what their outputs say together: ``gather`` takes those that are there, by name."""

    runs: tuple[Run, ...]
    gather: Callable[[dict[str, Any]], dict[str, Any]]


# What runs


def parts(sizes: Sizes, devices: int, work: Path, tokens: str) -> dict[str, Part]:
    """Every part by its name; the outputs lie under ``work``."""

    def measured(part: str, name: str, module: str, count: int, *arguments: str) -> Run:
        folder = work / part / name
        found = folder / "found.json"
        return Run(name, module, (*arguments, "--json", str(found)), count, folder, found)

    def nano(name: str, count: int) -> Run:
        folder = work / "nano_training" / name
        changes = (
            f"files.from_pretrained={NANO / 'dspark'}", f"files.target={NANO / 'target'}", f"files.tokens={tokens}",
            f"files.out={folder / 'run'}", f"mesh.data={count}", "rows.first=0", "log.save_every=0",
            "log.tensorboard=False", "log.progress=False",
        )  # fmt: skip
        arguments = ("nano_ready_stage2", *changes, *sizes.nano)
        return Run(name, f"{TRAINER}loop", arguments, count, folder, folder / "run" / "log.json")

    def training(name: str, count: int, *mesh: str) -> Run:
        arguments = ("--preset", sizes.preset, "--only", "stage2", "--profile", *sizes.training, *mesh)
        return measured("training_27b", name, f"{TRAINER}bench", count, *arguments)

    def decoding(name: str, count: int, *more: str) -> Run:
        steps = ("--only", "autoregressive", "ready", "exact", "--profile")
        arguments = ("--preset", sizes.preset, "--devices", str(count), *steps, *sizes.decode, *more)
        return measured("decode_27b", name, "ready_jax.serve.bench", count, *arguments)

    def evaluation(name: str, count: int) -> Run:
        arguments = ("--devices", str(count), "--no-grade", "--no-progress", *sizes.evaluation)
        return measured("evaluation", name, "ready_jax.serve.evaluate", count, *arguments)

    links = measured("links", "all", "ready_jax.serve.links", devices, "--devices", str(devices), *sizes.links)
    return dict(
        links=Part((links,), links_found),
        nano_training=Part((nano("one", 1), nano("data", devices)), nano_found),
        training_27b=Part(
            (
                training("one", 1),
                training("data", devices, "--data", str(devices)),
                training("shard", devices, "--shard", str(devices)),
            ),
            training_found,
        ),
        decode_27b=Part(
            (
                decoding("one", 1),
                decoding("all", devices),
                decoding("all_one_graph", devices, "--xla-option", ONE_GRAPH),
            ),
            decode_found,
        ),
        evaluation=Part((evaluation("one", 1), evaluation("all", devices)), evaluation_found),
    )


# What was found: pure functions of the outputs


def ratio(a: int | float | None, b: int | float | None) -> float | None:
    return None if a is None or not b else a / b


def links_found(outputs: dict[str, Any]) -> dict[str, Any]:
    return dict(outputs.get("all", {}))


def nano_found(outputs: dict[str, Any]) -> dict[str, Any]:
    """Samples/s, and how far the losses are apart."""
    found: dict[str, Any] = {name: nano_speed(log) for name, log in outputs.items()}
    if len(outputs) == 2:
        one, all_ = (
            {line["step"]: line["loss"] for line in outputs[name]["log"]} for name in ("one", "data")
        )  # means over the steps since the line before
        apart = [abs(all_[step] - loss) / max(abs(loss), 1e-9) for step, loss in one.items()]
        found |= dict(
            speed_up=ratio(found["data"]["samples_per_s"], found["one"]["samples_per_s"]),
            first_loss_difference=apart[0],
            largest_loss_difference=max(apart),
            same_losses=one.keys() == all_.keys() and max(apart) <= ROUNDING,
        )
    return found


def nano_speed(log: dict[str, Any]) -> dict[str, Any]:
    """Of the fastest stretch between two log lines: the first has the compilation's aftermath."""
    times = [line["seconds_per_step"] for line in log["log"] if "seconds_per_step" in line]
    rows = log["config"]["rows"]["batch"]
    return dict(
        samples_per_s=rows / min(times) if times else None,
        step_ms=1e3 * min(times) if times else None,
        losses=[line["loss"] for line in log["log"]],
    )


def training_found(outputs: dict[str, Any]) -> dict[str, Any]:
    """Samples/s, MFU, memory and communication of each layout, and speed-ups over one GPU."""
    found: dict[str, Any] = {}
    for name, record in outputs.items():
        detail = record["detail"].get("stage2")
        if detail is None:
            continue
        kept = ("samples_per_s", "step_ms", "mfu", "loss", "peak_gib_by_device", "temporary_gib", "argument_gib")
        found[name] = {key: detail.get(key) for key in kept} | dict(
            rows_of_a_micro_batch=record["rows_of_a_micro_batch"],
            micro_batches=record["micro_batches"],
            compile_seconds=record["compile_seconds"],
            communication=shares(detail.get("communication_us"), 1e3 * detail["step_ms"]),
        )
    one = found.get("one", {}).get("samples_per_s")
    for name in ("data", "shard"):
        if name in found:
            found[f"{name}_speed_up"] = ratio(found[name]["samples_per_s"], one)
    return found


def shares(microseconds: dict[str, float] | None, whole_us: float) -> dict[str, float] | None:
    """Communication of one turn beside the time that it takes without the profiler."""
    if not microseconds:
        return None
    collectives, exposed = microseconds["collectives"], microseconds["exposed"]
    return microseconds | dict(share=collectives / whole_us, exposed_share=exposed / whole_us)


def collectives(kernels: Sequence[dict[str, Any]], round_ms: float) -> dict[str, float]:
    """Kernels that talk to other devices, a round: nothing runs beside them."""
    found = [kernel for kernel in kernels if is_collective(kernel["kernel"])]
    launches, us = (sum(kernel[key] for kernel in found) for key in ("launches", "us"))
    return dict(launches=launches, collectives=us, share=us / (1e3 * round_ms))


def decode_found(outputs: dict[str, Any]) -> dict[str, Any]:
    """Times of a round and of an autoregressive token, collectives, exactness, and ratios to one GPU."""
    found: dict[str, Any] = {}
    for name, record in outputs.items():
        detail = record.get("detail", {}).get("ready", {})
        round_ms = record.get("ready_round_ms")
        found[name] = dict(
            autoregressive_ms=record.get("autoregressive_ms"),
            round_ms=round_ms,
            collectives_per_round=record.get("collectives_per_round"),
            bit_identical_rounds=record.get("bit_identical_rounds"),
            rounds_compared=record.get("rounds_compared"),
            peak_gib=record.get("peak_gib"),
            compile_seconds=record.get("compile_seconds"),
            communication=collectives(detail["kernels"], round_ms) if round_ms and "kernels" in detail else None,
        )
    one = found.get("one", {})
    for name in ("all", "all_one_graph"):
        if name in found:
            found[f"{name}_round_ratio"] = ratio(found[name]["round_ms"], one.get("round_ms"))
            found[f"{name}_token_ratio"] = ratio(found[name]["autoregressive_ms"], one.get("autoregressive_ms"))
    return found


def evaluation_found(outputs: dict[str, Any]) -> dict[str, Any]:
    """Prompts/s by method, and what differs between the reports but times."""
    found: dict[str, Any] = {}
    for name, report in outputs.items():
        found[name] = {
            method: sum(one["prompts"] for one in sets.values())
            / sum(one["prefill_seconds"] + one["decode_seconds"] for one in sets.values())
            for method, sets in report["methods"].items()
        }
    if len(outputs) == 2:
        plain = [
            {key: x for key, x in metrics.without_times(report).items() if key not in ("run", "lines")}
            for report in outputs.values()
        ]
        texts_of = [sorted_texts(report.get("lines", [])) for report in outputs.values()]
        apart, texts = differences(plain[0], plain[1]), differences(texts_of[0], texts_of[1])
        found |= dict(
            speed_up={method: ratio(found["all"][method], rate) for method, rate in found["one"].items()},
            same_metrics=not apart and not texts,
            differences=apart[:20] + [f"text of {place}" for place in texts[:20]],
        )
    return found


def sorted_texts(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens and rounds of every prompt and method, whatever batch it was in."""
    kept = ("token_ids", "accepted", "emitted", "finish_reason")
    return {
        f"{line['benchmark']} {line['index']}": {
            method: {key: one[key] for key in kept} for method, one in line["methods"].items()
        }
        for line in lines
    }


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """Dotted places where two trees differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [x for key in keys for x in differences(a.get(key), b.get(key), f"{place}.{key}" if place else str(key))]
    return [] if a == b else [place]


def rows_of(record: dict[str, Any]) -> list[tuple[str, Any, Any, Any, str]]:
    """Lines of the table: what, one GPU, all of them, their ratio, what is wanted."""
    found, rows = record["parts"], []

    def at(*path: str) -> Any:
        value: Any = found
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def add(what: str, one, several, ratio=None, wanted: str = "") -> None:
        if one is not None or several is not None:
            rows.append((what, one, several, ratio, wanted))

    for name, label in (("all_reduce_gb_s", "all-reduce"), ("all_gather_gb_s", "all-gather"), ("copy_gb_s", "copy")):
        add(f"{label}, GB/s of a link", None, at("links", name))
    add("all-reduce of 80 KiB, us", None, at("links", "short_all_reduce_us"))
    nano, big, decode = "nano_training", "training_27b", "decode_27b"
    data = f">= {WANTED['data_parallel']}"
    for part, label in ((nano, "nano stage 2"), (big, "27B stage 2")):
        one, several = at(part, "one", "samples_per_s"), at(part, "data", "samples_per_s")
        add(f"{label}, data parallel, samples/s", one, several, at(part, "speed_up") or at(part, "data_speed_up"), data)
    add("nano stage 2, largest difference of a loss", None, at(nano, "largest_loss_difference"), None, f"<= {ROUNDING}")
    split = f">= {WANTED['weights_split']}"
    one, several = at(big, "one", "samples_per_s"), at(big, "shard", "samples_per_s")
    add("27B stage 2, weights split, samples/s", one, several, at(big, "shard_speed_up"), split)
    for name, label in (("data", "data parallel"), ("shard", "weights split")):
        add(f"27B stage 2, {label}, MFU", at(big, "one", "mfu"), at(big, name, "mfu"))
        peaks = [at(big, layout, "peak_gib_by_device") for layout in ("one", name)]
        largest = [max(x) if x else None for x in peaks]
        add(f"27B stage 2, {label}, peak GiB of a GPU", largest[0], largest[1])
        add(f"27B stage 2, {label}, share of communication", None, at(big, name, "communication", "share"))
        add("  of it with nothing beside it", None, at(big, name, "communication", "exposed_share"))
    for name, label in (("all", ""), ("all_one_graph", ", one graph")):
        one, several = at(decode, "one", "round_ms"), at(decode, name, "round_ms")
        wanted = f"<= {WANTED['round']}"
        add(f"27B ReaDy round{label}, ms", one, several, at(decode, f"{name}_round_ratio"), wanted)
        one, several = at(decode, "one", "autoregressive_ms"), at(decode, name, "autoregressive_ms")
        add(f"27B token{label}, ms", one, several, at(decode, f"{name}_token_ratio"))
        equal = [ratio(at(decode, x, "bit_identical_rounds"), at(decode, x, "rounds_compared")) for x in ("one", name)]
        add(f"27B rounds equal bit for bit{label}", equal[0], equal[1], None, "1")
        add(f"27B round{label}, share of communication", None, at(decode, name, "communication", "share"))
    for method, rate in (at("evaluation", "one") or {}).items():
        several, speed_up = at("evaluation", "all", method), at("evaluation", "speed_up", method)
        add(f"nano evaluation, {method}, prompts/s", rate, several, speed_up, data)
    same = at("evaluation", "same_metrics")
    add("nano evaluation, same metrics but times", None, None if same is None else float(same), None, "1")
    return rows


def table(record: dict[str, Any]) -> str:
    """All of it in a few lines, failures below."""

    def shown(value: Any) -> str:
        return "-" if value is None else f"{value:.4g}"

    count = record["devices"]
    lines = [("", "one GPU", f"{count} GPUs", "ratio", "wanted")]
    lines += [(what, *map(shown, values), wanted) for what, *values, wanted in rows_of(record)]
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    text = [
        "  ".join(word.ljust(width) if i == 0 else word.rjust(width)
                  for i, (word, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    ]  # fmt: skip
    text += [f"FAILED {name}: {error}" for name, error in record["errors"].items()]
    return "\n".join(text)


# Running


def seen_by(devices: int) -> dict[str, str]:
    """The environment of a process that sees so many GPUs; most of their memory is its own."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(devices)]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(names[:devices]))
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    environment.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast can put a shared host's GPUs out of service
    return environment


def start(run: Run, seconds: float) -> str | None:
    """Run it to its end; what went wrong, if anything did. What it says goes to log.txt in its folder."""
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    log = run.folder / "log.txt"
    command = [sys.executable, "-m", run.module, *run.arguments]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=seen_by(run.devices), start_new_session=True
        )
        try:
            status = process.wait(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            return f"took more than its {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status == 0:
        return None
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit status {status}: {said[-1][:300] if said else 'it said nothing'}"


def read(file: Path) -> dict[str, Any] | None:
    """A run's output, with the lines of its prompts where it has some; None if it is not there."""
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    lines = lines_file(file)
    if lines.is_file():
        found["lines"] = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    return found


class Several:
    """The record, and the clock of all parts together."""

    def __init__(self, options: argparse.Namespace, *, launch: Callable[[Run, float], str | None] = start):
        self.options, self.launch, self.begun = options, launch, time.perf_counter()
        sizes = SIZES[options.preset]
        self.limits = dict(sizes.limits) | dict(options.limit)
        self.known: dict[str, Path] = dict(options.known)
        self.work = options.work.resolve()
        self.parts = parts(sizes, options.devices, self.work, options.tokens)
        wrong = sorted(set(self.known) - {f"{part}/{run.name}" for part, x in self.parts.items() for run in x.runs})
        if wrong:
            raise ValueError(f"--known {', '.join(wrong)}: no such run")
        self.record: dict[str, Any] = dict(
            preset=options.preset, devices=options.devices, wanted=WANTED,
            seeds=dict(rows=0, anchors=0, weights=[0, 1]), parts={}, errors={}, seconds={}, commands={}, conditions={},
        )  # fmt: skip
        if options.out.is_file():
            before = json.loads(options.out.read_text(encoding="utf-8"))
            if [before.get(key) for key in ("preset", "devices")] != [options.preset, options.devices]:
                raise ValueError(f"{options.out} holds a run of another preset or count of devices")
            self.record |= {key: before[key] for key in ("parts", "errors", "seconds", "commands", "conditions")}

    def __call__(self) -> dict[str, Any]:
        for name in self.options.only or self.parts:
            self.part(name)
        return self.record

    def command(self, run: Run) -> str:
        """What was run, with the places of this machine's files left out."""
        text = " ".join(["python", "-m", run.module, *run.arguments])
        places = {str(self.work): "WORK", str(NANO): "ready_jax/assets/nano", self.options.tokens: "TOKENS"}
        for place, name in places.items():
            text = text.replace(place, name) if place else text
        return text

    def part(self, name: str) -> None:
        """All runs of a part, what they say together, and the record on the disk."""
        record, part, begun = self.record, self.parts[name], time.perf_counter()
        for kind in ("errors", "seconds", "commands"):
            record[kind] = {key: x for key, x in record[kind].items() if key.split("/")[0] != name}
        outputs: dict[str, Any] = {}
        for run in part.runs:
            key, at = f"{name}/{run.name}", time.perf_counter()
            output = self.known.get(key, run.output)
            left = min(begun + self.limits[name], self.begun + self.options.total) - at
            error = None
            record["commands"][key] = self.command(run)
            if key not in self.known:
                error = self.launch(run, left) if left > 0 else "not started: the time is up"
            if (found := read(output)) is not None:
                outputs[run.name] = found
            elif error is None:
                error = f"it left no {output.name}"
            if error is not None:
                record["errors"][key] = error
            seconds = round(time.perf_counter() - at, 1)
            if key not in self.known:
                record["seconds"][key] = seconds
            print(f"{key}: {error or ('known' if key in self.known else 'done')} in {seconds} s", flush=True)
            self.keep(name, outputs)

    def keep(self, name: str, outputs: dict[str, Any]) -> None:
        """What the runs of a part say together so far, on the disk."""
        record, wrong = self.record, f"{name}/gather"
        record["errors"].pop(wrong, None)
        try:
            record["parts"][name] = self.parts[name].gather(outputs)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            record["errors"][wrong] = f"{type(error).__name__}: {error}"
        record["conditions"][name] = {run: conditions(found) for run, found in outputs.items()}
        record["commit"] = provenance.commit()
        write_json(self.options.out, record)


def conditions(output: dict[str, Any]) -> dict[str, Any]:
    """Device, versions and commit that an output was measured with."""
    place = output.get("run", output)
    names = ("device", "device_kind", "device_count", "versions", "commit", "xla_options")
    return {name: place[name] for name in names if name in place}


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"found {text!r}: NAME=VALUE is needed")
    return name, value


def _seconds(text: str) -> tuple[str, float]:
    name, value = _pair(text)
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}: seconds are a number") from None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ready_jax.serve.several_gpus", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    names = tuple(SIZES["lookalike"].limits)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the record; parts that it has already stay")
    add("--only", nargs="+", choices=names, metavar="PART", help=f"of {' '.join(names)}")
    add("--devices", type=int, default=2)
    add("--preset", choices=sorted(SIZES), default="qwen3_8_27b", help="lookalike: tiny, two simulated CPU devices do")
    add("--tokens", default="", metavar="FILE", help="corpus of answers for nano_training")
    add(
        "--known",
        type=_pair,
        action="append",
        default=[],
        metavar="PART/RUN=FILE",
        help="what its command left: not run",
    )
    add("--work", type=Path, default=Path("out/several_gpus"), metavar="DIR", help="outputs and logs of the runs")
    add("--limit", type=_seconds, action="append", default=[], metavar="PART=SECONDS")
    add("--total", type=float, default=1e9, metavar="SECONDS", help="of all parts together")
    options = parser.parse_args(arguments)
    options.known = [(name, Path(file)) for name, file in options.known]
    unknown = sorted({name for name, _ in options.limit} - set(names))
    if unknown:
        parser.error(f"--limit {', '.join(unknown)}: no such part; {', '.join(names)} are")
    if not options.tokens and "nano_training" in (options.only or names):
        parser.error("nano_training learns from a corpus of regenerated answers: --tokens FILE is needed")
    if options.devices < 2:
        parser.error(f"--devices {options.devices}: several are needed")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    record = Several(parse(arguments))()
    print(table(record), flush=True)
    return 1 if record["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
