"""Grading: answers right, wrong, malformed and missing; code right, wrong and hostile."""

import json
import os
import subprocess
import sys
import time

import pytest

from ready_jax.bench_data import bench_prompts
from ready_jax.serve import answers, grade, sandbox

needs_math_verify = pytest.mark.skipif(not answers.math_verify_installed(), reason=answers.INSTALL)
needs_sandbox = pytest.mark.skipif(sandbox.why_not() is not None, reason=str(sandbox.why_not()))
FAST = sandbox.Limits(cpu_seconds=1, wall_seconds=1.5)


# Answers


@pytest.mark.parametrize(
    ("text", "written", "value"),
    [
        (r"first 7</think> so \boxed{1{,}234}", "1{,}234", 1234),
        ("#### -5.0", "-5.0", -5),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 0.5),
        ("10 apples, not 12. Answer: 10.", "10", 10),
        (r"\boxed{3}, no: \boxed{4}", "4", 4),
        (r"#### 3 and \boxed{4}", "4", 4),
        (r"\boxed{4} and \boxed{5", "4", 4),
        ("it costs $1,234.50 in all", "$1,234.50", 1234.5),
        (r"\boxed{25\%}", r"25\%", 25),
        (r"\boxed{5\text{ cm}}", r"5\text{ cm}", 5),
        (r"\boxed{-\dfrac{3}{4}}", r"-\dfrac{3}{4}", -0.75),
        ("half is 1/2", "1/2", 0.5),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left( 3, \frac{\pi}{2} \right)", None),
        (r"\boxed{1e999999999}", "1e999999999", None),
        (r"\boxed{1/0}", "1/0", None),
    ],
)
def test_where_the_answer_stands(text, written, value):
    """Field case F01."""
    found = answers.final_answer(text)
    assert found == written
    number = answers.number(written)
    assert number is None if value is None else float(number or 0) == value


@pytest.mark.parametrize("text", ["nothing", "", r"\boxed{", r"\boxed{}", "####"])
def test_no_answer_is_none_and_not_zero(text):
    assert answers.final_answer(text) is None
    assert grade.grade_math({"answer": "0"}, text, thinking=False, verifier=None).status == grade.NONE


def test_an_answer_inside_unfinished_reasoning_is_none():
    assert answers.final_answer("so 5", thinking=True) is None
    assert answers.final_answer("<think> so 5") is None
    assert answers.final_answer("so 5</think> it is 6", thinking=True) == "6"


def test_numbers_and_equal_texts_need_no_verifier():
    assert answers.same_value("1234", "1,234.0", None)
    assert answers.same_value("0.5", r"\frac{1}{2}", None)
    assert answers.same_value(r"\text{Evelyn}", "Evelyn", None)
    assert not answers.same_value(r"\text{(A)}", r"\text{(B)}", None)
    assert not answers.same_value("1e999999999", "1", None)


@needs_math_verify
def test_formulas_are_compared_by_meaning_and_never_hang():
    with answers.Verifier(seconds=8.0) as verify:
        assert answers.same_value(r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", verify)
        assert answers.same_value(r"2\sqrt{2}", r"\sqrt{8}", verify)
        assert not answers.same_value("p - q", "q - p", verify)
        assert not answers.same_value("p - q", "\\frac{\\", verify)
        assert verify.timeouts == 0
        verify.seconds = 0.5
        assert not answers.same_value("2", r"10^{10^{10^{10}}}", verify)
        assert verify.timeouts == 1


@needs_math_verify
def test_starting_is_not_counted_and_a_process_that_does_not_start_is_an_error(monkeypatch):
    with answers.Verifier(seconds=2.0) as verify:
        process = verify._process = verify._start()
        assert verify(r"\frac{1}{3}", r"\frac{2}{6}")
        assert verify._process is process
    monkeypatch.setattr(answers.Verifier, "START", 0.01)
    with answers.Verifier() as verify, pytest.raises(RuntimeError, match="did not start within 0 s"):
        verify("x", "y")


# Code

MBPP = {row["id"]: row for row in bench_prompts("mbpp")}
HUMANEVAL = {row["id"]: row for row in bench_prompts("humaneval")}


PASSED = grade.Grade(grade.CORRECT, "passed")


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nIt works."


def test_which_block_is_the_solution():
    assert grade.code_of("a\n```python\ndef f(): pass\n```\n```\nf()\n```") == "def f(): pass\n"
    assert grade.code_of("```python\ndef f():\n    return 1") == "def f():\n    return 1", "cut by the budget"
    assert grade.code_of("Sure.\n\ndef f():\n    return 1\n") == "def f():\n    return 1\n"
    assert grade.code_of("I cannot do that, by definition.") is None
    assert grade.code_of(fenced("def f(): pass"), thinking=True) is None


def test_the_function_that_mbpp_tests_call():
    assert grade.tested_name(MBPP["mbpp-11"]) == "remove_Occ"
    for row in MBPP.values():
        assert grade.tested_name(row) in grade._functions(row["code"])


def test_mbpp_tries_the_last_function_under_the_tests_name():
    row = MBPP["mbpp-11"]
    program = grade.program_of("mbpp", row, "def helper(): pass\ndef mine(s, c): pass", "token")
    assert "\nremove_Occ = mine\n" in program
    assert "remove_Occ = " not in grade.program_of("mbpp", row, "def remove_Occ(s, c): pass\ndef g(): pass", "token")


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "status"),
    [
        (fenced(MBPP["mbpp-11"]["code"]), grade.CORRECT),
        (fenced(MBPP["mbpp-11"]["code"].replace("remove_Occ", "anything")), grade.CORRECT),
        (fenced("def remove_Occ(s, ch):\n    return s"), grade.WRONG),
        (fenced("def remove_Occ(s, ch:\n    return"), grade.WRONG),
        ("no code", grade.NONE),
        (fenced("import os\ndef remove_Occ(s, ch):\n    os._exit(0)"), grade.WRONG),
        (fenced("raise SystemExit(0)\ndef remove_Occ(s, ch): pass"), grade.WRONG),
        (fenced("def remove_Occ(s, ch):\n    while True: pass"), grade.WRONG),
    ],
    ids=["right", "other name", "wrong", "malformed", "none", "leaves", "leaves early", "endless"],
)
def test_mbpp_solutions(text, status):
    assert grade.grade_code("mbpp", MBPP["mbpp-11"], text, limits=FAST).status == status


@needs_sandbox
def test_humaneval_gets_the_imports_of_its_prompt():
    row = HUMANEVAL["humaneval-0"]
    head = "def has_close_elements(numbers: List[float], threshold: float) -> bool:\n"
    found = grade.grade_code("humaneval", row, fenced(head + row["canonical_solution"]))
    assert found.status == grade.CORRECT
    assert grade.grade_code("humaneval", row, fenced(head + "    return True")).status == grade.WRONG


@needs_sandbox
@pytest.mark.slow
def test_every_reference_solution_passes():
    tasks = [("mbpp", row, fenced(row["code"])) for row in MBPP.values()]
    for row in HUMANEVAL.values():
        asked = row["turns"][0].split("```python\n")[1].split("```")[0]
        tasks.append(("humaneval", row, fenced(asked + row["canonical_solution"])))
    found = grade.grade_texts(tasks, thinking=False, allow_code_execution=True)
    assert [(task[1]["id"], each) for task, each in zip(tasks, found, strict=True) if each != PASSED] == []


def test_code_is_not_run_unless_that_is_allowed(monkeypatch):
    """Field case F05: without the flag it refuses, and says so; other sets are graded."""
    monkeypatch.setattr(sandbox, "run", lambda *_: pytest.fail("code was run"))
    lines: list[str] = []
    tasks = [
        ("mbpp", MBPP["mbpp-11"], fenced("def f(): pass")),
        ("gsm8k", {"answer": "4"}, "it is 4"),
        ("alpaca", {}, ""),
    ]
    found = grade.grade_texts(tasks, thinking=False, allow_code_execution=False, log=lines.append)
    assert [each and each.status for each in found] == [None, grade.CORRECT, None]
    assert "--allow-code-execution" in lines[-1]


# Hostile programs: nothing escapes, nothing hangs

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 60):
            try: os.close(number)
            except OSError: pass
        while True: time.sleep(0.01)
    os._exit(0)
"""
FORK_BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
STUBBORN = """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
"""
HOSTILE = {
    "endless loop": ("while True: pass", "timeout", ""),
    "sleeps": ("import time\ntime.sleep(60)", "timeout", ""),
    "ignores signals": (STUBBORN, None, ""),
    "fork bomb": (FORK_BOMB, "timeout", ""),
    "memory bomb": ("x = bytearray(4 << 30)", "failed", "MemoryError"),
    "recursion": ("def f(): f()\nf()", "failed", "RecursionError"),
    "output flood": ("while True: print('x' * 10000)", "failed", ""),
    "fills the disk": ("for i in range(10**6): open(str(i), 'w').write('x' * 10**5)", "failed", "No space left"),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)", "failed", "unreachable"),
    "name lookup": ("import socket\nsocket.getaddrinfo('example.org', 80)", "failed", "gaierror"),
    "reads files": ("open('TARGET').read()", "failed", "FileNotFoundError"),
    "writes files": ("open('TARGET', 'w')", "failed", "FileNotFoundError"),
    "removes files": ("import os\nos.remove('TARGET')", "failed", "FileNotFoundError"),
    "writes to the system": ("open('/usr/lib/escaped', 'w')", "failed", "Read-only"),
    "kills others": ("import os\nos.kill(PARENT, 9)", "failed", "ProcessLookupError"),
    "leaves its root": ("import os\nos.chroot('/work')", "failed", "PermissionError"),
    "a namespace of its own": ("import os\nos.unshare(os.CLONE_NEWUSER)", "failed", "PermissionError"),
    "outlives": (DAEMON, "passed", ""),
}


def running() -> set[str]:
    """Command lines of processes that run a program of ours."""
    found = set()
    for folder in os.scandir("/proc"):
        if folder.name.isdigit():
            try:
                with open(f"/proc/{folder.name}/cmdline", "rb") as file:
                    line = file.read()
            except OSError:
                continue
            if b"/program.py" in line or b"ready-jax-code-" in line:
                found.add(folder.name)
    return found


@needs_sandbox
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_reaches_nothing_and_leaves_nothing(name, tmp_path):
    """Field case F05."""
    import socket

    target = tmp_path / "untouched"
    target.write_text("whole")
    before = running()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        program, status, error = HOSTILE[name]
        for word, value in dict(PORT=server.getsockname()[1], TARGET=target, PARENT=os.getpid()).items():
            program = program.replace(word, str(value))
        begun = time.monotonic()
        found = sandbox.run(program, FAST)
        assert time.monotonic() - begun < FAST.wall_seconds + 1
        with pytest.raises(BlockingIOError):
            server.accept()
    assert found.status == status or (status is None and found.status != "passed"), found
    assert error in found.stderr
    assert len(found.stdout) <= FAST.output_bytes
    assert target.read_text() == "whole"
    assert running() <= before, "something is left running"


@needs_sandbox
def test_a_program_sees_no_one_elses_files_variables_or_descriptors(monkeypatch):
    monkeypatch.setenv("SECRET", "secret")
    program = """
import os
places = sorted(os.listdir("/"))
descriptors = []
for number in range(64):
    try: os.fstat(number)
    except OSError: continue
    descriptors.append(number)
print(places, sorted(os.environ), descriptors, os.getpid(), os.getuid())
"""
    found = sandbox.run(program)
    assert found.status == "passed"
    assert "'etc'" not in found.stdout
    assert "'home'" not in found.stdout
    assert "['HOME', 'LC_CTYPE', 'TMPDIR'] [0, 1, 2] 2 " in found.stdout
    assert not found.stdout.rstrip().endswith(" 0")


@needs_sandbox
def test_a_killed_evaluation_leaves_no_program(tmp_path):
    code = "from ready_jax.serve import sandbox as s; s.run('import time; time.sleep(60)', s.Limits(wall_seconds=60))"
    before = running()
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    while not any(True for pid in running() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    while running() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running() <= before


def test_where_programs_cannot_be_isolated_they_are_not_run(monkeypatch):
    monkeypatch.setattr(sandbox, "why_not", lambda: "this system has no namespaces")
    with pytest.raises(sandbox.SandboxError, match="this system has no namespaces"):
        sandbox.run("print(1)")


@needs_sandbox
def test_a_program_cannot_pretend_that_the_launcher_failed():
    assert sandbox.run("import os\nos._exit(97)").status == "failed"


# Regrading


def test_a_finished_evaluation_is_graded_again(tmp_path):
    from ready_jax.serve import records

    rows = bench_prompts("gsm8k", limit=2)
    conditions = dict(enable_thinking=False, benchmarks={"gsm8k": {"used": 2}})
    one = dict(finish_reason="stop", accepted=[0], emitted=[1], proposed=[0], prefill_seconds=1.0, decode_seconds=1.0)
    lines = []
    for i, row in enumerate(rows):
        methods = {"autoregressive": one | dict(token_ids=[1, 2], text=f"#### {row['answer'] if i else 'no'}")}
        where = dict(benchmark="gsm8k", index=i, id=row["id"], batch=str(i), batch_prompts=1)
        lines.append(where | dict(conditions=records.digest(conditions), methods=methods))
    file = tmp_path / "run.json"
    records.append(records.lines_file(file), lines)
    records.write_report(file, conditions, records.read(file, conditions), None, {"budget": {}})
    assert json.loads(file.read_text())["methods"]["autoregressive"]["gsm8k"]["accuracy"] is None
    assert grade.main([str(file)]) == 0
    found = json.loads(file.read_text())["methods"]["autoregressive"]["gsm8k"]["accuracy"]
    assert (found["rate"], found["none"]) == (0.5, 0)
