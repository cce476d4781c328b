"""`python -m ready_jax.doctor`: versions, devices, memory, and which implementation every op would take, and why.

The exit status is 1 where something is broken: no backend starts, or a kernel file does not import.
"""

import argparse
import importlib
import json
import os
import pkgutil
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from types import ModuleType
from typing import Any

import jax

import ready_jax.kernels
from ready_jax import devices
from ready_jax.kernels import dispatch
from ready_jax.provenance import installed_version

DISTRIBUTIONS = (
    *("ready-jax", "jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy", "ml-dtypes"),
    *("transformers", "tokenizers", "safetensors", "optax", "orbax-checkpoint", "datasets", "triton", "jax-triton"),
)
ENVIRONMENT_PREFIXES = ("JAX_", "XLA_", "CUDA_VISIBLE_DEVICES", "TF_GPU_ALLOCATOR")


def nvidia_driver() -> str | None:
    """The driver's version as nvidia-smi tells it, whether or not JAX can use it; None without one."""
    if (command := shutil.which("nvidia-smi")) is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0] if answer else None


def inspect_doors(package: ModuleType, platform_name: str) -> dict[str, dict[str, Any]]:
    """Per op of the doors in `package`: what it `takes` and the `reasons` of all; or the `error` of a broken door.

    A door is a module with `IMPLEMENTATIONS`: a tuple, or a dict from op to tuple where it has several ops. They
    are asked with the platform alone, so sizes may still rule an implementation out where it is called.
    """
    ops: dict[str, dict[str, Any]] = {}
    for found in pkgutil.iter_modules(package.__path__):
        try:
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            doors = getattr(module, "IMPLEMENTATIONS", ())
            if not isinstance(doors, Mapping):
                doors = {"": doors} if doors else {}
            for op, candidates in doors.items():
                reasons = dispatch.explain(candidates, platform=platform_name)
                takes = next((name for name, reason in reasons.items() if reason is None), None)
                label = f"{found.name}.{op}" if op else found.name
                ops[label] = {"takes": takes, "reasons": reasons, "error": None}
        except Exception as error:  # whatever is wrong with one file, the others still get their line
            ops[found.name] = {"takes": None, "reasons": {}, "error": f"{type(error).__name__}: {error}"}
    return ops


def examine() -> dict[str, Any]:
    """Everything the doctor knows, as JSON types. Starts JAX's backend."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: installed_version(name) for name in DISTRIBUTIONS},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT_PREFIXES)},
        "driver": nvidia_driver(),
        "platform": None,
        "devices": [],
        "memory": [],
        "ops": {},
        "problems": [],
    }
    try:
        report["platform"] = jax.default_backend()
        report["devices"] = [{"platform": d.platform, "kind": d.device_kind, "id": d.id} for d in jax.devices()]
        report["memory"] = [asdict(entry) for entry in devices.memory()]
    except RuntimeError as error:
        report["problems"].append(f"jax starts no backend: {error}")
        return report
    if report["driver"] and report["platform"] == "cpu":
        report["problems"].append(
            f"an NVIDIA driver ({report['driver']}) is here, but jax runs on the CPU: {devices.CUDA_INSTALL}"
        )
    report["ops"] = inspect_doors(ready_jax.kernels, report["platform"])
    for name, op in report["ops"].items():
        if op["error"] is not None:
            report["problems"].append(f"kernels/{name}.py is broken: {op['error']}")
        elif op["takes"] is None:
            report["problems"].append(f"{name} has no implementation for {report['platform']}")
    return report


def print_tables(report: dict[str, Any]) -> None:
    """The report for people."""
    from rich.console import Console
    from rich.table import Table

    def size(count: int | None) -> str:
        return "not reported" if count is None else f"{count / 2**30:.2f} GiB"

    facts = Table("what", "found", title="environment", title_justify="left")
    facts.add_row("python", f"{report['python']} ({report['executable']}), {report['system']}")
    for name, version in report["versions"].items():
        facts.add_row(name, version or "not installed")
    facts.add_row("platform", report["platform"] or "none")
    kinds = [f"{d['platform']} {d['id']}: {d['kind']}" for d in report["devices"]]
    facts.add_row("devices", "\n".join(kinds) or "none")
    facts.add_row("NVIDIA driver", report["driver"] or "none found")
    for entry in report["memory"]:
        used, limit = size(entry["in_use"]), size(entry["limit"])
        facts.add_row(f"memory of {entry['device']}", f"in use {used}, limit {limit}")
    for name, value in report["environment"].items():
        facts.add_row(name, value)

    ops = Table("op", "takes", "why not the others", title="implementations", title_justify="left")
    for name, op in report["ops"].items():
        others = {other: reason for other, reason in op["reasons"].items() if other != op["takes"]}
        lines = [f"{other}: {reason or 'would run, comes later in the order'}" for other, reason in others.items()]
        ops.add_row(name, op["takes"] or "nothing", op["error"] or "\n".join(lines) or "-")

    console = Console(markup=False, highlight=False)
    console.print(facts)
    console.print(ops)
    for problem in report["problems"]:
        console.print(f"PROBLEM: {problem}")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ready_jax.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(arguments)
    report = examine()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_tables(report)
    broken = report["platform"] is None or any(op["error"] is not None for op in report["ops"].values())
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
