"""Training state on another number of devices, parameters alone, shapes without data; weights in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ready_jax.train.store import Store, load_parts, save_parts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def placed(devices: int, params, optimizer):
    """The same values with rows over this many devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))

    def put(x):
        spec = PartitionSpec("data") if x.ndim else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, params), jax.tree.map(put, optimizer)


def values():
    params = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.arange(8, dtype=jnp.bfloat16)}
    return params, {"count": jnp.array(7), "mu": jax.tree.map(lambda x: x * 2, params)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    store = Store(folder)
    store.save(12, *placed(4, *values()), {"pretrain": 5})
    store.close()
    return folder


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_saved_on_4_devices_restored_on(devices, saved):
    store = Store(saved)
    zeros = jax.tree.map(jnp.zeros_like, values())
    like = placed(devices, *zeros)
    assert store.latest() == 12
    params, optimizer, run = store.restore(12, *like)
    assert run == {"pretrain": 5}
    for found, wanted, place in zip(
        jax.tree.leaves((params, optimizer)), jax.tree.leaves(values()), jax.tree.leaves(like), strict=True
    ):
        assert found.sharding == place.sharding
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
    store.close()


def test_parameters_alone_and_metadata_on_one_device(saved):
    store = Store(saved)
    shapes = store.shapes(12)
    assert tuple(shapes["w"].shape) == (8, 4)
    assert shapes["b"].dtype == jnp.bfloat16
    like, _ = placed(1, *jax.tree.map(jnp.zeros_like, values()))
    params = store.params(12, like)
    np.testing.assert_array_equal(params["w"], values()[0]["w"])
    assert params["w"].sharding == like["w"].sharding
    store.close()


def test_parts_hold_everything_below_the_limit(tmp_path):
    flat = {f"w{i}": np.full((100, 10), i, np.float32) for i in range(5)} | {"a_log": np.ones(3, np.float32)}

    def dtype(key):
        return "float32" if key == "a_log" else "bfloat16"

    paths = save_parts(tmp_path, "params", flat, dtype=dtype, limit=4500)
    assert len(paths) == 3
    assert all(path.stat().st_size < 5500 for path in paths)
    found = load_parts(tmp_path, "params")
    assert found.keys() == flat.keys()
    assert found["a_log"].dtype == np.float32
    assert found["w1"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["w3"].astype(np.float32), flat["w3"])


def test_no_parts_says_what_is_needed(tmp_path):
    with pytest.raises(FileNotFoundError, match="a finished training run is needed"):
        load_parts(tmp_path, "params")
