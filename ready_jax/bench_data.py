"""The benchmark prompt sets: the permissive ones ship beside nano, the others are read from a folder."""

import json
import re
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "assets" / "nano" / "bench"
BENCHMARKS = {
    "gsm8k": "gsm8k.jsonl",
    "math500": "math500.jsonl",
    "mbpp": "mbpp_sanitized.jsonl",
    "humaneval": "humaneval.jsonl",
    "livecodebench": "livecodebench.jsonl",
    "mt_bench": "mt_bench.jsonl",
    "alpaca": "alpaca.jsonl",
    "self_instruct": "self_instruct_user.jsonl",
}
#: The sets that published means are over.
SEVEN = ("gsm8k", "math500", "mbpp", "humaneval", "livecodebench", "mt_bench", "alpaca")
NOT_SHIPPED = {
    "alpaca": "its licence (CC-BY-NC-4.0) does not allow every use",
    "livecodebench": "its problem statements belong to contest sites",
}


def bench_file(name: str, data_dir: str | Path | None = None) -> Path:
    """The file of one set: in `data_dir` or its subfolder `bench`; without a `data_dir`, the shipped one.

    Raises:
        ValueError: the name is not in `BENCHMARKS`.
        FileNotFoundError: the file is not there; the message says which is needed.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"benchmark {name!r} is not known: one of {', '.join(BENCHMARKS)} is needed")
    file = BENCHMARKS[name]
    folders = [SHIPPED] if data_dir is None else [Path(data_dir), Path(data_dir) / "bench"]
    for folder in folders:
        if (folder / file).is_file():
            return folder / file
    if data_dir is None and name in NOT_SHIPPED:
        why = f"benchmark {name} is not shipped, since {NOT_SHIPPED[name]}"
        raise FileNotFoundError(f"{why}: give --data-dir, a folder that holds {file}")
    searched = " nor in ".join(map(str, folders))
    raise FileNotFoundError(f"benchmark {name} needs {file}, which is not in {searched}: --data-dir names a folder")


def bench_prompts(name: str, data_dir: str | Path | None = None, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a set, in DeepSpec's evaluation order: lowest `deepspec_rank` first, unranked rows last by `id`.

    The order of the file's lines does not matter.

    Each row has `id` and `prompt` (the first turn), beside the fields its grading needs (answer, tests, ...).
    """
    with bench_file(name, data_dir).open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    ranked = [{**row, "prompt": row["turns"][0], "deepspec_rank": row.get("deepspec_rank")} for row in rows]
    ranked.sort(key=lambda row: (row["deepspec_rank"] is None, row["deepspec_rank"] or 0, _natural(row["id"])))
    return ranked[:limit]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts x-2 before x-10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
