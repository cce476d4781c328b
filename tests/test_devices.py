"""Field cases E03 (memory is reserved before the user can say no) and E07 (silently on the CPU)."""

import os
import subprocess
import sys
import warnings

import jax
import pytest

from ready_jax import devices

VARIABLES = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)


def has(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def test_cpu_devices_are_given_by_name():
    assert [device.platform for device in devices.require_device("cpu")] == ["cpu"] * 4


@pytest.mark.skipif(has("gpu"), reason="this machine has a GPU")
def test_asking_for_a_gpu_where_there_is_none_says_what_to_install():
    with pytest.raises(RuntimeError) as caught:
        devices.require_device("gpu")
    message = str(caught.value)
    assert "'gpu' was asked for" in message
    assert "has only: cpu" in message
    assert "pip install 'ready-jax[cuda13]'" in message
    assert "JAX_PLATFORMS='cpu'" in message


def test_an_unknown_platform_lists_the_known_ones():
    with pytest.raises(ValueError, match="platform='cuda:0' must be one of cpu, gpu, tpu"):
        devices.require_device("cuda:0")


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize("fraction", [None, 0.5])
def test_setting_preallocation_after_the_backend_is_up_is_too_late(fraction: float | None):
    jax.devices()
    assert devices.backend_is_up()
    with pytest.warns(devices.TooLateWarning, match="too late: .* already started"):
        assert devices.set_preallocation(fraction) is False
    assert not any(name in os.environ for name in VARIABLES)


@pytest.mark.usefixtures("clean_environment")
def test_setting_preallocation_before_reaches_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "backend_is_up", lambda: False)
    with warnings.catch_warnings(action="error"):
        assert devices.set_preallocation(0.25) is True
        assert [os.environ[name] for name in VARIABLES] == ["true", "0.25"]
        assert devices.set_preallocation(None) is True
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction: float):
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
        devices.set_preallocation(fraction)


def test_importing_us_starts_no_backend():
    program = (
        "import ready_jax, ready_jax.devices as d, ready_jax.doctor\n"
        "assert not d.backend_is_up(), 'the import started a backend'\n"
        "assert d.set_preallocation(None)\n"
        "import jax; jax.devices()\n"
        "assert d.backend_is_up()\n"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], check=True)


def test_memory_has_a_line_for_every_device():
    report = devices.memory()
    assert [entry.device for entry in report] == [str(device) for device in jax.local_devices()]


@pytest.mark.gpu
def test_a_gpu_reports_its_memory():
    assert devices.require_device("gpu")
    entry = devices.memory()[0]
    assert entry.limit is not None
    assert entry.in_use is not None
    assert 0 <= entry.in_use <= entry.limit
