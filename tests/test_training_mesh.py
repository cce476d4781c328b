"""Runs over several devices and processes: the losses of one device, whatever is split; a save fits any count."""

import socket
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run as small
from flax import nnx

from ready_jax.configs.drafter_training import MeshConfig
from ready_jax.drafter import Drafter
from ready_jax.kernels import dispatch
from ready_jax.train import loop
from ready_jax.train.mesh import gather_options, make_mesh, placed, placement, traced_for

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def quiet(line: str) -> None:
    pass


class Place:
    """A folder with rows, of which the first device of two gets none that has an anchor; the losses of one device."""

    def __init__(self, folder: Path, cache: Path):
        self.folder, self.cache = folder, cache
        rows = small.packed()
        first = loop.Stream(rows, small.ROWS, 0).index(0)
        rows.mask_BT[first[: small.ROWS // 2]] = False
        self.shards = small.shards(folder, rows)
        self.one = self.run("one")

    def run(self, name: str, *, say=quiet, **sections) -> loop.RunResult:
        recipe = small.recipe(self.folder / name, self.shards, **sections)
        return loop.run(recipe, target=small.target(), log=say)

    def close(self, found: dict[int, float]) -> None:
        """The losses of one device, to rounding."""
        wanted = small.curve(self.folder / "one")
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    cache = small.cache(tmp_path_factory)
    with small.quickly(cache):
        yield Place(tmp_path_factory.mktemp("mesh"), cache)


def near(a, b) -> None:
    """Equal on average: AdamW makes a whole step of a gradient that is nothing but rounding."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.abs(np.asarray(x) - np.asarray(y)).mean() < 1e-5


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("data", "shard"), [(2, 2), *(pytest.param(*counts, marks=slow) for counts in ((2, 1), (4, 1), (1, 2), (1, 4)))]
)
def test_losses_are_those_of_one_device(place, monkeypatch, data, shard):
    """The first batch has no anchor at all on half of the devices. Weights and moments stay split; one program, in
    which kernels are chosen as on one device."""
    programs, states, partitioned = [], [], []
    make, features = loop.steps.make_step, loop.steps.features

    def asked(*args, **options):
        partitioned.append(dispatch.partitioned.value)
        return features(*args, **options)

    def watched(*args, **options):
        step = make(*args, **options)
        programs.append(step)

        def both(state, *inputs):
            new, found = step(state, *inputs)
            states.append(new)
            return new, found

        return both

    monkeypatch.setattr(loop.steps, "make_step", watched)
    monkeypatch.setattr(loop.steps, "features", asked)
    run = place.run(f"{data}x{shard}", mesh=dict(data=data, shard=shard))
    place.close(small.curve(run.out))
    assert run.skipped == run.nonfinite == 0
    assert programs[0]._cache_size() == 1
    assert set(partitioned) == {False}
    parts = jax.tree.leaves(states[-1].optimizer, is_leaf=lambda x: hasattr(x, "mu"))
    (moments,) = (part for part in parts if hasattr(part, "mu"))
    for tree in (states[-1].masters, moments.mu, moments.nu):
        weight = tree["layers"][0]["mlp"]["w_in_DI"].get_value()
        assert len(weight.sharding.device_set) == data * shard
        assert weight.addressable_data(0).shape[0] == weight.shape[0] // shard
    assert {x.devices() == {jax.devices()[0]} for x in jax.tree.leaves(run.drafter)} == {True}
    near(run.drafter, place.one.drafter)


def one_step(data: int, shard: int):
    """Loss, and what gradient descent changes in one step of two micro-batches."""
    steps, mesh = loop.steps, make_mesh(MeshConfig(data, shard))
    recipe = small.recipe(Path("unused"), adapt=small.STAGE1)
    drafter = Drafter(replace(small.DRAFTER, reader=small.READER), rngs=nnx.Rngs(0), dtype="float32")
    optimizer = optax.sgd(1.0)
    state, frozen = steps.start(drafter, optimizer, trained=steps.TRAINED, compute_dtype="float32")
    before = jax.device_get(state.masters)
    target, state, frozen = (placed(x, mesh) for x in (small.target(), state, frozen))
    step = steps.make_step(
        drafter.config, optimizer, recipe.loss, num_anchors=4, accumulate=2, placement=placement(state, mesh),
        compiler_options=gather_options(target, mesh),
    )  # fmt: skip
    batch = loop.Stream(small.packed(), small.ROWS, 0, mesh=mesh).batch(0)
    with traced_for(mesh):
        state, found = step(state, frozen, target, *batch)
    return float(found["loss"]), jax.tree.map(np.subtract, before, jax.device_get(state.masters))


@slow
@pytest.mark.parametrize(("data", "shard"), [(2, 1), (1, 2)])
def test_gradients_are_those_of_one_device(tmp_path_factory, data, shard):
    with small.quickly(small.cache(tmp_path_factory)):
        loss, gradients = one_step(1, 1)
        found, others = one_step(data, shard)
    assert found == pytest.approx(loss, abs=1e-5)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(gradients))
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(y, x, rtol=0, atol=1e-5 * max(largest, 1))


def test_micro_batches_must_divide_the_rows_of_a_device(place):
    with pytest.raises(ValueError, match=r"accumulate=8 must divide the 4 rows of a device"):
        place.run("uneven", mesh=dict(data=2), optimizer=dict(accumulate=8))


@slow
@pytest.mark.parametrize("counts", [dict(data=2), dict(shard=2)])
def test_a_run_on_two_devices_goes_on_with_one(place, counts):
    """The losses after the change are those of one device: of the next step, and of all others."""
    name = "moved" + "".join(counts)
    stop = dict(log=dict(every=1, save_every=3))

    class Stop(Exception):
        pass

    def log(line: str) -> None:
        if line.startswith("step 4/"):
            raise Stop

    with pytest.raises(Stop):
        place.run(name, say=log, mesh=counts, **stop)
    lines: list[str] = []
    run = place.run(name, say=lines.append, files=dict(resume_from="auto"), **stop)
    assert any("after step 3" in line for line in lines)
    place.close(small.curve(run.out))
    back = place.run(name + "back", files=dict(resume_from=str(run.out)), mesh=counts)
    place.close(small.curve(back.out))


@slow
def test_bad_rows_are_named_on_a_mesh(place):
    graph, state = nnx.split(small.target())
    target = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    target.embed_VD[...] = target.embed_VD[...].at[93].set(np.nan)
    rows = small.packed()
    rows.token_BT[rows.token_BT == 93] = 0
    rows.token_BT[5, 10] = 93
    data, lines = small.shards(place.folder / "bad", rows), []
    recipe = small.recipe(place.folder / "bad/out", data, mesh=dict(data=2, shard=2), optimizer=dict(steps=3))
    run = loop.run(recipe, target=target, log=lines.append)
    assert run.nonfinite == 1
    assert [line for line in lines if "not finite" in line and "rows [5] of the data" in line]


@slow
@pytest.mark.parametrize("counts", [dict(data=2), dict(shard=2)])
def test_two_processes_give_the_losses_of_one(place, counts):
    """Each with one CPU device, joined by `jax.distributed`; the first one writes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    out = place.folder / ("joined" + "".join(counts))
    processes = [
        small.process(
            out, place.shards, place.cache / str(index), devices=1, join=(coordinator, 2, index), mesh=counts,
            evaluate=small.heldout(place.folder),
        )
        for index in range(2)
    ]  # fmt: skip
    said = Path(f"{out}.log")
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0], said.read_text()
    finally:
        for process in processes:
            process.kill()
    place.close(small.curve(out))
    found = loop.checkpoint.load_drafter(out / "dspark", dtype="float32")
    near(found, place.one.drafter)
    assert len([line for line in small.metrics(out) if "heldout" in line]) == 2


def test_one_gather_takes_the_matrices_of_the_largest_layer():
    target = small.target()
    found = gather_options(target, make_mesh(MeshConfig(1, 2)))
    sizes = [sum(x.nbytes for x in jax.tree.leaves(layer) if x.ndim > 1) for layer in target.layers]
    assert len(set(sizes)) > 1
    assert found == {"xla_gpu_all_gather_combine_threshold_bytes": max(sizes)}
    assert gather_options(target, make_mesh(MeshConfig(2, 1))) == gather_options(target, None) == {}
