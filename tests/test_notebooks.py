"""The notebooks run from top to bottom, on the CPU, in a kernel of their own."""

from pathlib import Path

import nbclient
import nbformat
import pytest

from ready_jax.pair import NANO

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_every_notebook_is_here():
    names = ["evaluate_and_plot", "quickstart", "train_your_own_drafter"]
    assert [file.stem for file in NOTEBOOKS] == names


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """Programs that one notebook compiled and another one uses too: all of them decode four prompts."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
@pytest.mark.filterwarnings("ignore")  # of the kernel's client, not ours
def test_a_notebook_runs(file, monkeypatch, compiled):
    assert (NANO / "dspark" / "config.json").is_file(), f"the notebooks load nano, which is not at {NANO}"
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    # Level 0, as in compiling.py, would take the time again where nano decodes and trains.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=1")
    notebook = nbformat.read(file, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(file.parent))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_kept_without_outputs(file):
    cells = [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)
