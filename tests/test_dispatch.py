"""The choice of an implementation: in order, by reason, never in silence."""

import importlib
import pkgutil
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest

import ready_jax.kernels
from ready_jax.kernels import dispatch
from ready_jax.kernels.dispatch import Implementation, always, choose, explain
from ready_jax.kernels.pallas_triton import gpu_only
from ready_jax.programs import Program


def why_not_fused(*, platform: str, num_rows: int | None = None, **_: object) -> str | None:
    if platform != "gpu":
        return f"platform is {platform}; needs gpu"
    if num_rows is not None and num_rows > 8:
        return f"num_rows={num_rows} is over 8: the rows of one verify pass"
    return None


FUSED = Implementation("fused", lambda x: x + 2, why_not_fused)
CHUNK = Implementation("chunk", lambda x: x + 1, lambda *, dtype=None, **_: "fp16" if dtype == "float16" else None)
REFERENCE = Implementation("reference", lambda x: x, always)
OP = (FUSED, CHUNK, REFERENCE)


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"platform": "gpu"}, "fused"),
        ({"platform": "gpu", "num_rows": 8}, "fused"),
        ({"platform": "gpu", "num_rows": 9}, "chunk"),
        ({"platform": "cpu"}, "chunk"),
        ({"platform": "cpu", "dtype": "float16"}, "reference"),
        ({"platform": "an unknown device", "dtype": "float16"}, "reference"),
    ],
)
def test_the_first_without_an_objection_is_taken(facts: dict, name: str):
    assert choose("op", OP, **facts).name == name


def test_the_platform_is_the_one_jax_runs_on_unless_given():
    assert explain(OP)["fused"] == explain(OP, platform=jax.default_backend())["fused"]
    assert explain(OP, platform="gpu") == {"fused": None, "chunk": None, "reference": None}


@pytest.mark.parametrize("name", ["chunk", "reference"])
def test_a_named_one_is_taken_out_of_order(name: str):
    assert choose("op", OP, impl=name, platform="gpu").name == name


def test_a_named_one_runs_or_raises_its_reason():
    assert choose("op", OP, impl="fused", platform="gpu") is FUSED
    with pytest.raises(NotImplementedError, match=r"op: impl='fused' .* platform is cpu; needs gpu"):
        choose("op", OP, impl="fused", platform="cpu")
    with pytest.raises(NotImplementedError, match="num_rows=9 is over 8"):
        choose("op", OP, impl="fused", platform="gpu", num_rows=9)


@pytest.mark.parametrize("name", ["cuda", "", "Fused"])
def test_an_unknown_name_lists_the_known_ones(name: str):
    with pytest.raises(ValueError, match=f"impl={name!r} is unknown; known, .*: fused, chunk, reference"):
        choose("op", OP, impl=name, platform="gpu")


def test_where_nothing_fits_every_reason_is_told():
    with pytest.raises(NotImplementedError, match="op: no implementation") as caught:
        choose("op", (FUSED, CHUNK), platform="tpu", dtype="float16")
    assert "fused: platform is tpu; needs gpu" in str(caught.value)
    assert "chunk: fp16" in str(caught.value)
    with pytest.raises(NotImplementedError, match="it has none"):
        choose("op", ())


def test_an_error_inside_why_not_is_not_an_objection():
    def broken(**_: object) -> str | None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        choose("op", (Implementation("broken", lambda x: x, broken), REFERENCE))


def test_the_choice_is_made_while_tracing_from_static_facts():
    asked = []

    def why_not(*, num_rows: int, **_: object) -> str | None:
        asked.append(num_rows)
        return None

    op = (Implementation("counted", lambda x: x * 2, why_not),)
    run = jax.jit(lambda x: choose("op", op, num_rows=x.shape[0]).call(x))
    for rows in (3, 3, 4):
        assert run(jnp.ones((rows,))).sum() == 2 * rows
    assert asked == [3, 4]


def test_every_door_answers_for_every_platform_from_the_platform_alone():
    for found in pkgutil.iter_modules(ready_jax.kernels.__path__):
        doors = getattr(importlib.import_module(f"ready_jax.kernels.{found.name}"), "IMPLEMENTATIONS", ())
        for candidates in doors.values() if isinstance(doors, Mapping) else [doors]:
            assert len({candidate.name for candidate in candidates}) == len(candidates), found.name
            for platform in ("cpu", "gpu", "tpu"):
                for name, reason in explain(candidates, platform=platform).items():
                    assert reason is None or (isinstance(reason, str) and reason), (found.name, name, platform)


def test_a_platform_can_be_set_around_a_trace():
    """And belongs to the trace: a function jitted under one platform is traced again under another."""
    f = jax.jit(lambda x: choose("op", OP).call(x))
    assert f(1) == 2
    with dispatch.platform("gpu"):
        assert explain(OP)["fused"] is None
        assert f(1) == 3
        assert explain(OP, platform="cpu")["fused"] is not None
    assert f(1) == 2


def test_a_program_over_a_mesh_takes_no_kernel():
    """XLA would gather whole operands for one; single-device programs of the same function still may."""
    seen = []

    def function(x):
        seen.append(dispatch.partitioned.value)
        return x + 1

    program = Program(function)
    program(x=jnp.zeros(4))
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("model",))
    program(x=jax.device_put(jnp.zeros(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))))
    assert seen == [False, True]
    assert "spread over a mesh" in str(gpu_only(platform="gpu", partitioned=True))
    assert gpu_only(platform="gpu") is None
