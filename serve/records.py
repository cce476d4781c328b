"""Files of an evaluation: FILE.json (conditions, numbers) and, beside it, FILE.jsonl (one line per prompt).

Lines are written a batch at a time and carry a digest of the conditions, so a run that was killed goes on where it
stopped and never mixes two settings. Several processes write ``FILE.part-<i>.jsonl``; reading takes them all.
Evaluations of other methods on the same prompts, each with its own FILE, are put `together`.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ready_jax.serve import metrics, summary

Record = metrics.Record


def digest(conditions: dict[str, Any]) -> str:
    """Short hash of the conditions that a record was measured under."""
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:16]


def lines_file(file: Path, process: int | None = None) -> Path:
    """Where the lines of a report stand."""
    return file.with_suffix(".jsonl" if process is None else f".part-{process}.jsonl")


def read(file: Path, conditions: dict[str, Any]) -> list[Record]:
    """Finished prompts in the order of the benchmarks. A torn last line and the rest of its batch are left out.

    Raises ValueError for lines that belong to other conditions.
    """
    wanted, order = digest(conditions), list(conditions["benchmarks"])
    found: dict[tuple[str, int], Record] = {}
    for path in [lines_file(file), *sorted(file.parent.glob(f"{file.stem}.part-*.jsonl"))]:
        for record in _whole_batches(path):
            if record["conditions"] != wanted:
                raise ValueError(
                    f"{path} holds prompts of a run under other conditions ({record['conditions']}, here {wanted}): "
                    "another --json FILE, or --restart to overwrite it"
                )
            found[record["benchmark"], record["index"]] = record  # a repeated batch replaces a torn one
    return sorted(found.values(), key=lambda record: (order.index(record["benchmark"]), record["index"]))


def _whole_batches(path: Path) -> list[Record]:
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # torn by a kill
    counts: dict[str, int] = {}
    for record in records:
        counts[record["batch"]] = counts.get(record["batch"], 0) + 1
    return [record for record in records if counts[record["batch"]] >= record["batch_prompts"]]


def append(path: Path, records: Iterable[Record]) -> None:
    """Write the prompts of one batch, to the disk."""
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + text)
        file.flush()
        os.fsync(file.fileno())


def texts(record: Record) -> dict[str, str | None]:
    """The text by method; a method that equals the baseline has its text."""
    plain = record["methods"][metrics.BASELINE]["text"]
    return {name: plain if m["token_ids"] is None else m["text"] for name, m in record["methods"].items()}


def write_report(
    file: Path, conditions: dict[str, Any], records: Sequence[Record], grades: dict | None, run: dict[str, Any]
) -> dict[str, Any]:
    """Write (in one step) and return the whole report: conditions, how it was run, and every number."""
    expected = sum(one["used"] for one in conditions["benchmarks"].values())
    report = dict(conditions=conditions, run=run, complete=len(records) == expected)
    if records:
        report |= summary.summary(records, grades)
    write_json(file, report)
    return report


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file so that a reader never sees half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(part, file)


#: How and where a report was measured, as far as two reports must agree to be compared or continued.
SETTING = ("device_kind", "devices", "versions")


def differences(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Conditions (and the setting) in which two reports differ, by dotted name; methods and commits may differ."""
    found: dict[str, tuple[Any, Any]] = {}

    def look(name: str, a: Any, b: Any) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in dict.fromkeys([*a, *b]):
                look(f"{name}.{key}" if name else key, a.get(key), b.get(key))
        elif a != b:
            found[name] = (a, b)

    parts = [
        {key: value for key, value in report["conditions"].items() if key != "methods"}
        | {key: report["run"].get(key) for key in SETTING}
        for report in (first, second)
    ]
    look("", *parts)
    return found


def shorten(value: Any, width: int = 60) -> str:
    """A value for an error message."""
    text = json.dumps(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def together(files: Sequence[Path], *, leave_out: bool = False) -> tuple[dict[str, Any], list[Record]]:
    """The conditions of all evaluations, and their records with the methods of all.

    Raises ValueError naming what differs: conditions, prompts, batches, weights under one name, or the autoregressive
    tokens, where ``leave_out`` drops those prompts instead.
    """
    whole: dict[str, Any] = {}
    joined: dict[tuple[str, int], Record] = {}
    apart: dict[tuple[str, int], str] = {}
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not found.get("complete"):
            raise ValueError(f"{file} is not finished: run its command again, it goes on where it stopped")
        own = {(record["benchmark"], record["index"]): record for record in read(file, found["conditions"])}
        if not whole:
            whole, joined = {key: found[key] for key in ("conditions", "run", "complete")}, own
            whole["run"] = whole["run"] | dict(commits=[found["run"]["commit"]], files=1)
            continue
        _check(whole, found, files[0], file)
        whole["conditions"]["methods"] |= found["conditions"]["methods"]
        whole["run"] = _runs(whole["run"], found["run"])
        if joined.keys() != own.keys():
            raise ValueError(f"{file} holds other prompts than {files[0]}: {sorted(joined.keys() ^ own.keys())[:5]}")
        for key, record in own.items():
            first = joined[key]
            wrong = [name for name in ("id", "prompt_tokens", "batch", "batch_prompts") if record[name] != first[name]]
            if wrong:
                raise ValueError(f"{file} and {files[0]}: prompt {key} differs in {', '.join(wrong)}")
            if metrics.tokens_of(record, metrics.BASELINE) != metrics.tokens_of(first, metrics.BASELINE):
                apart[key] = str(file)
            joined[key] = first | dict(methods=record["methods"] | first["methods"])
    if apart and not leave_out:
        some = ", ".join(f"{name} {index} ({file})" for (name, index), file in list(apart.items())[:5])
        raise ValueError(
            f"{len(apart)} of {len(joined)} autoregressive texts differ from those of {files[0]}: {some}; methods can "
            "be compared on equal texts only: evaluate again with one --compile-cache, or leave these prompts out"
        )
    whole["left_out"] = [list(key) for key in apart]
    return whole, [record for key, record in joined.items() if key not in apart]


def _check(whole: dict[str, Any], found: dict[str, Any], first: Path, file: Path) -> None:
    apart = differences(whole, found)
    weights = (whole["conditions"]["methods"], found["conditions"]["methods"])
    shared = [name for name in weights[0] if name in weights[1]]
    apart |= {f"weights of {name}": (a, b) for name in shared if (a := weights[0][name]) != (b := weights[1][name])}
    if apart:
        lines = [f"  {name}: {shorten(a)} and {shorten(b)}" for name, (a, b) in apart.items()]
        raise ValueError(f"{first} and {file} were made under other conditions, which differ in\n" + "\n".join(lines))


def _runs(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How two evaluations ran: seconds add up, peaks are the larger one's."""
    a, b = one["budget"], other["budget"]

    def largest(key: str):
        return max((x[key] for x in (a, b) if x[key] is not None), default=None)

    budget = {key: largest(key) for key in a if key != "seconds"}
    budget["seconds"] = {name: a["seconds"][name] + b["seconds"][name] for name in a["seconds"]}
    commits = list(dict.fromkeys([*one["commits"], other["commit"]]))
    return one | dict(budget=budget, commits=commits, files=one["files"] + 1)
