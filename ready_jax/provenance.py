"""What a measured number was measured with: device, versions, commit, content hashes. For result files."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("ready-jax", "jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "numpy", "jax-triton", "triton")
COMMIT = "READY_JAX_COMMIT"


def installed_version(distribution: str) -> str | None:
    """The version in this environment without importing it: a broken package must not break a report."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, marked `-dirty` if tracked files differ from it; None outside a checkout.

    A machine that got the files without their history is told by the environment variable `READY_JAX_COMMIT`.
    """
    if told := os.environ.get(COMMIT):
        return told
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--abbrev=40", "--dirty"]
    command += ["--exclude=*"]  # the hash itself, never a tag's name
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def sha256(path: str | Path) -> str:
    """Hash of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def conditions() -> dict[str, Any]:
    """Device, versions and commit of this process, as JSON types. Starts JAX's backend."""
    return dict(
        device=jax.default_backend(),
        device_kind=jax.devices()[0].device_kind,
        device_count=jax.device_count(),
        machine=platform.machine(),
        python=platform.python_version(),
        versions={name: version for name in PACKAGES if (version := installed_version(name))},
        commit=commit(),
    )
