"""Field case C11: one command tells versions, devices, and which implementation each op takes and why."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import pytest

from ready_jax import doctor

DOOR = """
from ready_jax.kernels.dispatch import Implementation, always
def only_gpu(*, platform, **_):
    return None if platform == "gpu" else f"platform is {platform}; needs gpu"
FUSED, REFERENCE = Implementation("fused", None, only_gpu), Implementation("reference", None, always)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A kernels folder with every kind of file."""
    (tmp_path / "one.py").write_text(DOOR + "IMPLEMENTATIONS = (FUSED, REFERENCE)")
    (tmp_path / "several.py").write_text(
        DOOR + "IMPLEMENTATIONS = {'forward': (FUSED, REFERENCE), 'backward': (FUSED,)}"
    )
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere")
    found = ModuleType("fake_kernels")
    found.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "fake_kernels", found)
    yield found
    for name in [name for name in sys.modules if name.startswith("fake_kernels.")]:
        del sys.modules[name]


def test_each_op_says_what_it_takes_and_why_not_the_others(package: ModuleType):
    reason = "platform is cpu; needs gpu"
    ops = doctor.inspect_doors(package, "cpu")
    assert sorted(ops) == ["broken", "one", "several.backward", "several.forward"]
    assert ops["one"] == {"takes": "reference", "reasons": {"fused": reason, "reference": None}, "error": None}
    assert ops["several.forward"]["takes"] == "reference"
    assert ops["several.backward"] == {"takes": None, "reasons": {"fused": reason}, "error": None}
    assert "no_such_module_anywhere" in ops["broken"]["error"]
    assert doctor.inspect_doors(package, "gpu")["one"]["takes"] == "fused"


def test_the_json_is_complete_and_healthy_here(capsys: pytest.CaptureFixture[str]):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["jax"] == jax.__version__
    assert {"jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "triton", "jax-triton"} <= set(
        report["versions"]
    )
    assert report["platform"] == jax.default_backend()
    assert len(report["devices"]) == len(report["memory"]) == len(jax.devices())
    assert [name for name, op in report["ops"].items() if op["error"] or not op["takes"]] == []


def test_the_tables_say_it_in_words(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor.ready_jax, "kernels", package)
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name == "triton" else "1.2.3")
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: "580.1")
    monkeypatch.setenv("COLUMNS", "200")
    status = doctor.main([])
    lines = capsys.readouterr().out.splitlines()
    assert status == 1, "a kernel file does not import"

    def line_with(*words: str) -> bool:
        return any(all(word in line for word in words) for line in lines)

    assert line_with("triton", "not installed")
    assert line_with("NVIDIA driver", "580.1")
    if jax.default_backend() == "cpu":
        assert line_with("one", "reference", "fused: platform is cpu; needs gpu")
        assert line_with("PROBLEM", "several.backward has no implementation for cpu")
        assert line_with("PROBLEM", "jax runs on the CPU", "ready-jax[cuda13]")
    assert line_with("PROBLEM", "kernels/broken.py", "no_such_module_anywhere")


def test_no_backend_is_a_problem_and_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail() -> str:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "default_backend", fail)
    assert doctor.main([]) == 1
    assert "PROBLEM: jax starts no backend: Unable to initialize" in capsys.readouterr().out
