"""Reading the final answer out of a worked solution, and whether it equals the right one.

Where an answer stands (field case F01): after the reasoning part, the last complete `\\boxed{}`, else what follows the
last `####`, else the last number. Plain numbers are compared here, exactly; everything else by `math-verify` in a
process of its own, which is ended when an expression takes too long to simplify.
"""

import functools
import importlib.util
import json
import re
import select
import subprocess
import sys
from fractions import Fraction
from typing import Any

END_OF_REASONING = "</think>"
_NUMBER = r"[-+]?\$?\s?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+)?"
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_WORDS = re.compile(r"\\(?:text|textbf|mbox|mathrm)\s*\{([^{}]*)\}")
INSTALL = "pip install 'ready-jax[evaluate]'"


def final_answer(text: str, *, thinking: bool = False) -> str | None:
    """The answer as it is written, or None: there is none, or the text ends inside its reasoning.

    >>> final_answer("so #### 12, no: \\\\boxed{1{,}234}")
    '1{,}234'
    """
    _, end, after = text.rpartition(END_OF_REASONING)
    if not end and (thinking or "<think>" in text):
        return None
    boxed = _boxed(after)
    if boxed:
        return boxed
    marked = re.findall(r"####\s*(\S[^\n]*)", after)
    if marked:
        return marked[-1].strip()
    numbers = re.findall(_NUMBER, after)
    return numbers[-1].strip() if numbers else None


def _boxed(text: str) -> str | None:
    """What the last `\\boxed{}` with balanced braces holds; None without one, or if it is empty."""
    found = None
    for start in re.finditer(r"\\f?boxed\s*\{", text):
        depth, place = 1, start.end()
        while depth and place < len(text):
            escaped = text[place - 1] == "\\" and text[place - 2] != "\\"
            depth += 0 if escaped else {"{": 1, "}": -1}.get(text[place], 0)
            place += 1
        if not depth:
            found = text[start.end() : place - 1].strip()
    return found or None


def plain(answer: str) -> str:
    """An answer without what does not change its value: dollar and percent signs, thousands commas, spacing."""
    text = _WORDS.sub(r"\1", answer.strip())
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", "").replace("\\%", "").replace("\\$", "")
    text = text.replace("\\left", "").replace("\\right", "").replace("^{\\circ}", "").replace("^\\circ", "")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"[\s$%]", "", text).rstrip(".")


def number(answer: str) -> Fraction | None:
    """The value of an answer that is a plain number or a fraction of two, units aside; None for anything else."""
    text = plain(_WORDS.sub("", answer))
    written = _FRACTION.fullmatch(text)
    try:
        if written:
            sign, top, bottom = written.groups()
            return Fraction(top) / Fraction(bottom) * (-1 if sign == "-" else 1)
        # A power of ten would be computed in full: 1e999999999 must not be.
        return Fraction(text) if re.fullmatch(r"[-+]?[\d./]{1,200}", text) else None
    except (ValueError, ZeroDivisionError):
        return None


def same_value(right: str, found: str, verifier: "Verifier | None") -> bool:
    """Whether two written answers mean the same. Without a verifier only numbers and equal texts do."""
    values = number(right), number(found)
    if None not in values:
        return values[0] == values[1]
    if plain(right) == plain(found):
        return True
    return verifier is not None and verifier(right, found)


@functools.cache
def math_verify_installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


class Verifier:
    """`math-verify` in a process that is started when needed, and again after it had to be ended.

    Called with (right answer, found answer); False too if that takes more than ``seconds`` or breaks. What the process
    takes to start on a busy machine is not counted. Close it.
    """

    START = 120.0

    def __init__(self, seconds: float = 10.0):
        if not math_verify_installed():
            raise RuntimeError(f"formulas are compared by math-verify, which is not installed: {INSTALL}")
        self.seconds = seconds
        self.timeouts = 0
        self._process: subprocess.Popen | None = None

    def __call__(self, right: str, found: str) -> bool:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([right, found]) + "\n")
            process.stdin.flush()
            answer = self._line(process, self.seconds)
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.timeouts += 1
            self.close()
        return answer.strip() == "true"

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "ready_jax.serve.answers"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        if not self._line(process, self.START):
            process.kill()
            process.communicate()
            raise RuntimeError(f"math-verify did not start within {self.START:.0f} s: {' '.join(command)}")
        return process

    @staticmethod
    def _line(process: subprocess.Popen, seconds: float) -> str:
        """Its next line; empty if it has ended, or says nothing for so long."""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        return process.stdout.readline() if ready else ""

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _serve() -> None:
    """The verifier's process: a line [right, found] in, `true` or `false` out."""
    import resource

    from math_verify import parse, verify

    no_timeout: Any = None  # its own timeouts are signals, which a long multiplication does not hear
    resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            right, found = (parse(f"${text}$", parsing_timeout=no_timeout) for text in json.loads(line))
            same = bool(right) and bool(found) and verify(right, found, timeout_seconds=no_timeout)
        except Exception:
            same = False
        print(json.dumps(bool(same)), flush=True)


if __name__ == "__main__":
    _serve()
