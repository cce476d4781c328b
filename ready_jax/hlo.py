"""What a compiled program launches, read from its optimised HLO text (``compiled.as_text()``)."""

from __future__ import annotations

import re
from collections import Counter

#: Instructions that start nothing on a device: bookkeeping, and the ends of what another instruction started.
FREE = {
    "after-all", "async-update", "bitcast", "constant", "domain", "get-tuple-element", "opt-barrier",
    "optimization-barrier", "parameter", "partition-id", "replica-id", "tuple",
}  # fmt: skip
#: Instructions by which devices talk to each other.
COLLECTIVES = {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}
FREE_TARGETS = {"AllocateBuffer", "AssumeGatherIndicesInBound"}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAMES = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def _instruction(line: str) -> tuple[str, str] | None:
    """(opcode, rest of the line); None for lines that are no instruction."""
    _, found, text = line.partition(" = ")
    if not found:
        return None
    if text.startswith("("):  # a tuple type: up to its closing parenthesis
        depth = 0
        for i, character in enumerate(text):
            depth += (character == "(") - (character == ")")
            if depth == 0:
                text = text[i + 1 :]
                break
    else:
        text = text.partition(" ")[2]
    match = re.match(r"\s*([a-z][\w\-]*)\(", text)
    return (match[1], text) if match else None


def computations(text: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """Instructions of every computation by its name, and the name of the entry."""
    found: dict[str, list[tuple[str, str]]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            found[name] = []
            entry = name if header[1] else entry
        elif name and (instruction := _instruction(line.strip())):
            found[name].append(instruction)
    return found, entry


def launches(text: str, computation: str | None = None) -> Counter[str]:
    """How often one run of a computation (None: the entry) launches what: fusions, library calls, copies, ...

    Loops count as often as XLA knows them to run (once where it does not), conditionals by their larger branch. A
    library call counts once, whatever it launches inside.
    """
    parts, entry = computations(text)
    return _launches(parts, computation or entry)


def _launches(parts, name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for opcode, rest in parts.get(name, ()):
        inner = [n for n in _NAMES.findall(rest) if n in parts]
        if opcode == "while":
            trips = int(match[1]) if (match := _TRIPS.search(rest)) else 1
            for called in inner:
                total += Counter({kind: trips * count for kind, count in _launches(parts, called).items()})
        elif opcode == "conditional":
            branches = _BRANCHES.search(rest)
            names = [n.strip().lstrip("%") for n in branches[1].split(",")] if branches else inner
            total += max((_launches(parts, n) for n in names), key=Counter.total)
        elif opcode == "call" or opcode == "async-start":
            for called in inner:
                total += _launches(parts, called)
        elif opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', rest)
            if target and target[1] not in FREE_TARGETS:
                total[f"custom-call {target[1]}"] += 1
        elif opcode == "fusion":  # XLA's own kernel of a collective is a fusion around it
            kinds = {kind.removesuffix("-start") for called in inner for kind, _ in parts[called]} & COLLECTIVES
            total[min(kinds, default="fusion")] += 1
        elif opcode not in FREE and not opcode.endswith("-done"):
            total[opcode.removesuffix("-start")] += 1
    return total


def loop_launches(text: str) -> Counter[str]:
    """What one iteration of the entry's busiest ``while`` launches, its condition included: a round of ``decode``."""
    parts, entry = computations(text)
    loops = [_NAMES.findall(rest) for opcode, rest in parts.get(entry, ()) if opcode == "while"]
    rounds = [sum((_launches(parts, name) for name in names), Counter()) for names in loops]
    return max(rounds, key=Counter.total, default=Counter())
