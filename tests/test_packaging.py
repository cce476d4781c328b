"""The locks are fresh and name no machine; the built wheel holds everything and runs on its own."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).with_name("uv")
LINKED = ("kernels", "configs", "train", "serve")
INDEX = ("--default-index", "https://pypi.org/simple")  # whatever mirror this machine is set up to use
EXPORT = "--frozen --extra dev --no-hashes --no-emit-project --no-header --no-annotate"


def run(*command: str | Path, **options) -> str:
    """The command's standard output; its error output is in the failure's message."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


# Locks (no network: a lock that satisfies pyproject.toml is accepted as it is, with an empty cache too)


def test_uv_lock_is_fresh():
    run(UV, "lock", "--check", "--offline", *INDEX, "--python", sys.executable, cwd=ROOT)


def test_requirements_lock_is_the_export_of_uv_lock():
    exported = run(UV, "export", *EXPORT.split(), "--offline", "--quiet", "--python", sys.executable, cwd=ROOT)
    assert (ROOT / "requirements.lock").read_text() == exported, "run `make lock`"
    assert f"EXPORT := {EXPORT}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", ["uv.lock", "requirements.lock"])
def test_the_locks_name_the_public_index_and_no_machine(name: str):
    text = (ROOT / name).read_text()
    assert set(re.findall(r"https?://([^/\"\s]+)", text)) <= {"pypi.org", "files.pythonhosted.org"}
    assert re.findall(r"file:|find-links|--index|/home/|/root/|/work/|/opt/|/tmp/", text) == []
    assert set(re.findall(r'registry = "([^"]*)"', text)) <= {"https://pypi.org/simple"}


def test_the_lock_holds_the_jax_of_the_measurements():
    assert re.search(r"^jax==0\.11\.2 ", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)


def test_the_core_needs_neither_torch_nor_triton_nor_the_trainer():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]}
    assert core.isdisjoint({"torch", "triton", "jax-triton", "optax", "orbax-checkpoint", "datasets"})
    assert "torch" not in re.findall(r"^[\w-]+", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)


# The wheel

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import ready_jax
walked = ["ready_jax"]
for found in pkgutil.walk_packages(ready_jax.__path__, "ready_jax."):
    importlib.import_module(found.name)
    walked.append(found.name)
for folder in ("kernels", "configs", "train", "serve"):  # namespace folders, which walk_packages passes over
    package = importlib.import_module(f"ready_jax.{folder}")
    for found in pkgutil.walk_packages(package.__path__, f"ready_jax.{folder}."):
        importlib.import_module(found.name)
        walked.append(found.name)
for name in walked:
    place = sys.modules[name].__file__
    assert place is not None and place.startswith(sys.prefix), f"{name} comes from {place}"
print("\\n".join(sorted(set(walked))))
"""

LOAD_NANO = """
import ready_jax
pair = ready_jax.load()
print(pair.generate("1 + 1 =", max_new_tokens=4).token_ids)
"""


def source_files() -> set[str]:
    """Paths inside the wheel of everything that the package's folder holds, through the links."""
    folder = ROOT / "ready_jax"
    paths = {p for p in folder.rglob("*") if p.is_file()}
    paths |= {p for name in LINKED for p in (folder / name).rglob("*") if p.is_file()}  # rglob follows no links
    return {str(p.relative_to(ROOT)) for p in paths if "__pycache__" not in p.parts}


def clean_environment() -> dict[str, str]:
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in hidden} | {"JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as `pip install` from an index without wheels would."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an empty environment with the wheel; it sees the dependencies of this one, not the checkout."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    place = environment / "lib" / version / "site-packages"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=environment, env=clean_environment())  # in the checkout, pip takes its egg-info for installed
    # A plain line in a .pth adds a path whose own .pth files, and so the editable install, are not processed.
    (place / "dependencies.pth").write_text(f"{Path(pytest.__file__).parent.parent}\n")
    return python


@pytest.mark.slow
def test_the_wheel_holds_every_file(wheel: Path):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == source_files()
    assert {name.split("/")[0] for name in held} == {"ready_jax"}, "a bare `kernels` or `train` would clash with others"


@pytest.mark.slow
def test_the_wheel_imports_every_module(installed: Path, tmp_path: Path):
    walked = set(run(installed, "-c", IMPORT_EVERYTHING, cwd=tmp_path, env=clean_environment()).split())
    ours = {name.removesuffix(".py").removesuffix("/__init__") for name in source_files() if name.endswith(".py")}
    assert {name.replace("/", ".") for name in ours} <= walked


@pytest.mark.slow
def test_the_wheel_runs_the_doctor(installed: Path, tmp_path: Path):
    run(installed, "-m", "ready_jax.doctor", "--json", cwd=tmp_path, env=clean_environment())


@pytest.mark.slow
def test_the_wheel_loads_nano(installed: Path, tmp_path: Path):
    run(installed, "-c", LOAD_NANO, cwd=tmp_path, env=clean_environment())
