"""Strictness for every test: the CPU by name, four host devices, no silent rank promotion, checked annotations.

`JAX_PLATFORMS=cuda,cpu pytest -m gpu` runs the GPU tests instead.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that wants the hub is a bug, not a download

import jax
import jax.experimental.pallas.fuser
import pytest
from compiling import LEVEL, quickly
from jaxtyping import install_import_hook

#: It adds a setting to JAX: imported as late as the first interpreted kernel does, it voids all that was traced before.
assert jax.experimental.pallas.fuser
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("ready_jax", "beartype.beartype")  # the linked folders too: modules are matched by name


#: Files that compile for minutes, longest first: begun first, so that no worker is left alone with one at the end.
LONGEST = (
    "notebooks", "exact", "target", "loss", "training_mesh", "loop", "run_state", "gated_delta", "nano", "first_use",
    "pair", "field_e", "bench", "baselines", "field_a", "decode_golden", "reader", "tensor_parallel",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest files first; GPU tests are skipped, with the reason, where JAX's default platform is not a GPU."""
    place = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (platform := jax.default_backend()) != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU; jax runs on {platform}"))


def pytest_collection_finish() -> None:
    """Tracing makes many objects and little garbage: looked for rarely, and not among what was imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="module")
def quick_programs() -> Iterator[None]:
    """Programs of a pair compiled as in `compiling.py`: for files about what is done with tokens and counts."""
    from ready_jax import programs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "OPTIONS", programs.OPTIONS | LEVEL)
        yield


@pytest.fixture(scope="module")
def all_quick() -> Iterator[None]:
    """Everything compiled as in `compiling.py`, what is computed eagerly too."""
    with quickly():
        yield


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of tensors that the reference implementations produced."""
    return Path(__file__).parent / "golden"
