"""Right or wrong: `python -m ready_jax.serve.grade FILE.json [--data-dir DIR] [--allow-code-execution]`.

Grades the texts of a finished evaluation (again) and writes the accuracies into its file. Numbers and formulas are
compared with the reference answer; code is run against its tests, in `sandbox.py` and only where that is allowed;
LiveCodeBench (no tests here) and the open-ended sets are not graded. A missing answer is counted as such, not as zero.
"""

import argparse
import ast
import json
import os
import re
import secrets
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ready_jax import bench_data
from ready_jax.serve import answers, sandbox

MATH, CODE = ("gsm8k", "math500"), ("mbpp", "humaneval")
CORRECT, WRONG, NONE = "correct", "wrong", "none"
REFUSAL = (
    "grading {sets} runs code that a model wrote: --allow-code-execution says that this is wanted; without it these "
    "sets are not graded"
)


@dataclass(frozen=True)
class Grade:
    """``status``: "correct", "wrong" or "none" (no answer was found); ``answer`` as written, for code what happened."""

    status: str
    answer: str | None


def grade_math(row: dict, text: str, *, thinking: bool, verifier: answers.Verifier | None) -> Grade:
    """A solution of GSM8K or MATH500 against ``row["answer"]``."""
    found = answers.final_answer(text, thinking=thinking)
    if found is None:
        return Grade(NONE, None)
    return Grade(CORRECT if answers.same_value(row["answer"], found, verifier) else WRONG, found)


def code_of(text: str, *, thinking: bool = False) -> str | None:
    """The last fenced block that defines a function (the last of them need not be closed), else a bare definition."""
    _, end, after = text.rpartition(answers.END_OF_REASONING)
    if not end and (thinking or "<think>" in text):
        return None
    blocks = re.findall(r"```[^\n`]*\n(.*?)(?:```|\Z)", after, flags=re.DOTALL)
    defining = [block for block in blocks if re.search(r"^\s*(?:async )?def \w+", block, flags=re.MULTILINE)]
    if defining:
        return defining[-1]
    bare = re.search(r"^(?:from |import |def |class |@)", after, flags=re.MULTILINE)
    return after[bare.start() :] if bare and not blocks and "def " in after else None


def tested_name(row: dict) -> str:
    """The function that MBPP's tests call: one that the reference code defines."""
    defined = _functions(row["code"])
    called = [
        node.func.id
        for test in row["test_list"]
        for node in ast.walk(ast.parse(test))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return next((name for name in called if name in defined), defined[-1])


def _functions(code: str) -> list[str]:
    """Names of the functions defined at the top level, in order; [] for code that does not parse."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of its escape sequences
            body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def program_of(benchmark: str, row: dict, code: str, token: str) -> str:
    """Solution and tests as one program, which prints ``token`` after the last test.

    MBPP's prompts never name the function: if the tested name is missing, the last function defined is tried under it.
    """
    if benchmark == "humaneval":
        fence = re.search(r"```python\n(.*?)```", row["turns"][0], flags=re.DOTALL)
        asked = fence[1] if fence else ""
        imports = [line for line in asked.splitlines() if line.startswith(("import ", "from "))]
        tests = f"{row['test']}\ncheck({row['entry_point']})"
        code = "\n".join([*imports, code])
    else:
        wanted, defined = tested_name(row), _functions(code)
        if wanted not in defined and defined:
            code = f"{code}\n{wanted} = {defined[-1]}"
        tests = "\n".join([*row["test_imports"], *row["test_list"]])
    return f"{code}\n\n{tests}\nprint({token!r})\n"


def grade_code(
    benchmark: str, row: dict, text: str, *, thinking: bool = False, limits: sandbox.Limits | None = None
) -> Grade:
    """A solution of MBPP or HumanEval run against its tests. Leaving early is not passing."""
    code = code_of(text, thinking=thinking)
    if code is None:
        return Grade(NONE, None)
    token = secrets.token_hex(16)
    found = sandbox.run(program_of(benchmark, row, code, token), limits)
    if found.status == sandbox.PASSED:
        passed = found.stdout.rstrip().endswith(token)
        return Grade(CORRECT, "passed") if passed else Grade(WRONG, "ended before its tests")
    last = found.stderr.strip().splitlines()[-1:] or [f"exit status {found.exit_code}"]
    return Grade(WRONG, found.status if found.status == sandbox.TIMEOUT else last[0][:200])


def grade_texts(
    tasks: Sequence[tuple[str, dict, str]], *, thinking: bool, allow_code_execution: bool, log: Callable = print
) -> list[Grade | None]:
    """Grades of (benchmark, row of its file, text), None where there is nothing to grade by or it is not allowed.

    Raises SandboxError if code may be run but cannot be isolated here.
    """
    found: list[Grade | None] = [None] * len(tasks)
    formulas = [i for i, task in enumerate(tasks) if task[0] in MATH]
    code = [i for i, task in enumerate(tasks) if task[0] in CODE]
    if formulas:
        verifier = answers.Verifier() if answers.math_verify_installed() else None
        if verifier is None:
            log(f"without math-verify, formulas count as equal only if they are written alike: {answers.INSTALL}")
        try:
            for i in formulas:
                found[i] = grade_math(*tasks[i][1:], thinking=thinking, verifier=verifier)
        finally:
            if verifier is not None:
                verifier.close()
    if code and not allow_code_execution:
        log(REFUSAL.format(sets=", ".join(sorted({tasks[i][0] for i in code}))))
    elif code:
        with ThreadPoolExecutor(os.cpu_count()) as workers:
            graded = workers.map(lambda i: grade_code(*tasks[i], thinking=thinking), code)
            for i, grade in zip(code, graded, strict=True):
                found[i] = grade
    return found


def grade_records(
    records: list[dict[str, Any]], texts: Callable[[dict[str, Any]], dict[str, str | None]], *, data_dir,
    thinking: bool, allow_code_execution: bool, log: Callable = print,
) -> dict[tuple[str, str, str], Grade]:  # fmt: skip
    """Grades by (benchmark, prompt id, method) of an evaluation's records; equal texts are graded once."""
    rows = {
        (name, row["id"]): row
        for name in {record["benchmark"] for record in records}
        for row in (bench_data.bench_prompts(name, data_dir) if name in MATH + CODE else [])
    }
    where: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        if (record["benchmark"], record["id"]) in rows:
            for method, text in texts(record).items():
                if text is not None:
                    where.setdefault((record["benchmark"], record["id"], text), []).append(method)
    tasks = [(name, rows[name, key], text) for name, key, text in where]
    grades = grade_texts(tasks, thinking=thinking, allow_code_execution=allow_code_execution, log=log)
    return {
        (name, key, method): grade
        for ((name, key, _), methods), grade in zip(where.items(), grades, strict=True)
        for method in methods
        if grade is not None
    }


def main(arguments: Sequence[str] | None = None) -> int:
    from ready_jax.serve import records

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path, help="what `ready_jax.serve.evaluate` wrote; its .jsonl stands beside it")
    parser.add_argument("--data-dir", help="folder with the prompt sets that do not ship")
    parser.add_argument("--allow-code-execution", action="store_true", help="run generated code, isolated")
    options = parser.parse_args(arguments)
    report = json.loads(options.file.read_text())
    found = records.read(options.file, report["conditions"])
    grades = grade_records(
        found, records.texts, data_dir=options.data_dir, thinking=report["conditions"]["enable_thinking"],
        allow_code_execution=options.allow_code_execution,
    )  # fmt: skip
    records.write_report(options.file, report["conditions"], found, grades, report["run"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
