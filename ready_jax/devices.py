"""What JAX runs on, how much memory it has, and a loud answer when that is not what was asked for."""

import os
import sys
import warnings
from dataclasses import dataclass

import jax

CUDA_INSTALL = "pip install 'ready-jax[cuda13]'  (from a checkout: .venv/bin/pip install -e '.[cuda13]')"
PLATFORMS = ("cpu", "gpu", "tpu")


class TooLateWarning(UserWarning):
    """A setting that JAX reads once, when it starts its backend, was made after that."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that one device's allocator reports; None where the backend reports nothing (the CPU)."""

    device: str
    in_use: int | None
    peak: int | None
    limit: int | None


def require_device(platform: str) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """The devices of `platform` ("cpu", "gpu" or "tpu"); never those of another one instead.

    Raises:
        ValueError: `platform` is none of the three.
        RuntimeError: JAX has no such device; the message says what it has and how to install the rest.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r} must be one of {', '.join(PLATFORMS)}")
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        present = sorted({f"{device.platform} ({device.device_kind})" for device in jax.devices()})
        chosen = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        lines = [f"{platform!r} was asked for, but jax {jax.__version__} has only: {', '.join(present)}"]
        if chosen:
            lines.append(f"jax was told to look at JAX_PLATFORMS={chosen!r} only")
        if platform == "gpu":
            lines.append(f"for NVIDIA GPUs install the CUDA build: {CUDA_INSTALL}")
        lines.append("`python -m ready_jax.doctor` shows versions, devices and driver")
        raise RuntimeError("\n".join(lines)) from error


def backend_is_up() -> bool:
    """Whether JAX has started a backend in this process: from then on it ignores the memory variables."""
    bridge = sys.modules.get("jax._src.xla_bridge")  # no public call tells without starting one (jax 0.11.2)
    return bool(bridge is not None and bridge.backends_are_initialized())


def set_preallocation(fraction: float | None) -> bool:
    """Set how much GPU memory JAX takes at first use; call it before anything touches a device.

    `fraction` of the memory is reserved up front (0 < fraction <= 1, JAX's own choice is 0.75); None reserves
    nothing and grows on demand, for a GPU shared with another framework. Only the environment of this process is
    changed.

    Returns:
        Whether it takes effect: False, with a `TooLateWarning`, where a backend is already up. The environment is
        left alone then.

    Raises:
        ValueError: the fraction is outside (0, 1].
    """
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must be in (0, 1], or None to reserve nothing up front")
    if backend_is_up():
        warnings.warn(
            f"too late: set_preallocation({fraction}) has no effect, because jax already started its "
            f"{jax.default_backend()} backend and reads this setting only then; restart and call it first",
            TooLateWarning,
            stacklevel=2,
        )
        return False
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false" if fraction is None else "true"
    if fraction is None:
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    else:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(fraction)
    return True


def memory() -> list[DeviceMemory]:
    """Memory of every local device of the default platform, in bytes."""
    report = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        report.append(
            DeviceMemory(
                device=str(device),
                in_use=stats.get("bytes_in_use"),
                peak=stats.get("peak_bytes_in_use"),
                limit=stats.get("bytes_limit"),
            )
        )
    return report


def enable_compile_cache(folder: str | os.PathLike) -> None:
    """Keep compiled programs in `folder` across processes, small ones included (JAX's default skips them)."""
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


#: Above this many bytes of weights a CPU run would take hours: it must be asked for by name.
LARGE_ON_CPU = 4 * 10**9


def refuse_large_on_cpu(num_bytes: int, device: str | None) -> None:
    """Raise RuntimeError where a model of `num_bytes` of weights would silently run on the CPU.

    `device="cpu"` says that the CPU is meant.
    """
    if num_bytes > LARGE_ON_CPU and device != "cpu" and jax.default_backend() == "cpu":
        raise RuntimeError(
            f"{num_bytes / 1e9:.1f} GB of weights would run on the CPU, the only device that jax {jax.__version__} "
            f"has here; install the CUDA build ({CUDA_INSTALL}), or say device='cpu' if the CPU is meant"
        )
