"""The Hopper kernel of decode attention: its source run by NumPy (`ring.py`), and on a GPU its bits."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring

from ready_jax.kernels import attention
from ready_jax.kernels.decode_attention import Splits
from ready_jax.kernels.decode_attention_gluon import decode_attention, shares, why_not

HEAD, SMALL = 256, Splits(short=64, long=256, border=128)
#: Ends of the first row: around the borders of chunks and splits.
ENDS = [1, 63, 64, 65, 2047, 2048, 2049, 2560, 5000, 16384]


def inputs(first_end, rows=8, heads=24, groups=4, slots=None, batch=1, seed=0) -> tuple[Any, ...]:
    """query, key, value, begin, end: row t sees ``first_end + t`` slots; what no row sees is NaN."""
    rng, slots = np.random.default_rng(seed), slots or first_end + 13
    end = first_end + np.arange(rows) + 5 * np.arange(batch)[:, None]
    shapes = (batch, rows, heads, HEAD), (batch, slots, groups, HEAD), (batch, slots, groups, HEAD)
    query, key, value = (rng.standard_normal(shape, np.float32) for shape in shapes)
    for memory, b in itertools.product((key, value), range(batch)):
        memory[b, end[b, -1] :] = np.nan
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (2 * query, key, value)]
    return *arrays, jnp.zeros_like(end, dtype=jnp.int32), jnp.asarray(end, jnp.int32)


def plain(*arrays):
    return np.asarray(attention.attend_rows(*arrays, impl="rows"), np.float32)


def close(found, wanted, bound=4e-3):
    error = np.linalg.norm(np.asarray(found, np.float32) - wanted)
    assert error <= bound * np.linalg.norm(wanted)  # not if NaN


def same_bits(found, wanted):
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), np.asarray(wanted).view(np.uint16))


@pytest.mark.parametrize(
    ("end", "sizes"),
    [
        (1, {}), (64, {}), (190, {}), (700, dict(programs=2)), (700, dict(programs=8, stages=2)),
        (900, dict(chunk=32, stages=5, programs=6)),
    ],
)  # fmt: skip
def test_what_is_fetched_arrives_where_it_is_multiplied(end, sizes):
    arrays = inputs(end, rows=3, heads=4, groups=2, batch=2)
    close(ring.decode_attention(*arrays, splits=SMALL, **sizes), plain(*arrays))


def test_rows_with_windows_of_their_own_and_what_they_may_not_see():
    query, key, value, _, end = inputs(600, rows=4, heads=2, groups=1)
    begin = jnp.array([[0, 500, 130, 601]], jnp.int32)
    wanted = plain(query, key, value, begin, end)
    key, value = (x.at[:, 600].set(jnp.nan) for x in (key, value))  # what the first row and the last do not see
    found = ring.decode_attention(query, key, value, begin, end, splits=SMALL, programs=3)
    close(found[:, ::3], wanted[:, ::3])
    assert np.isnan(np.asarray(found[:, 1:3], np.float32)).all()


@pytest.mark.parametrize("splits", [Splits(64, 512, 2048), SMALL])
@pytest.mark.parametrize("count", [1, 5, 33])
def test_every_split_has_one_program(splits, count):
    rng = np.random.default_rng(0)
    high = np.array([*ENDS, 16392, 33000])
    low = rng.integers(high)
    begin, end = (jnp.asarray(np.stack([x, x + 1], axis=1)) for x in (low, high - 1))
    found = np.asarray(shares(begin, end, 40000, count, splits=splits, chunk=64, cost=16))
    for b, share_N in enumerate(found):
        first, last = (int(splits.place(jnp.int32(slot))) for slot in (low[b], high[b] - 1))
        starts = [max(int(splits.start(jnp.int32(i))), low[b]) // 64 for i in range(first, last + 1)]
        mine = [x for x in share_N[::-1] if x[2] > 0]
        assert [x[1] for x in mine] == [starts[x[0] - first] for x in mine]
        assert [x[1] + x[2] for x in mine] == [x[1] for x in mine[1:]] + [-(-high[b] // 64)]
        assert mine[0][0] == first
        assert share_N[:, 2].max() <= max(np.diff([*starts, -(-high[b] // 64)]).max(), 1.2 * share_N[:, 2].mean()) + 8
        assert (share_N[:, 3:] == [low[b] + 1, high[b] - 1]).all()


FITS: dict[str, Any] = dict(platform="gpu", rows=8, group=6, head=256, types=frozenset({"bfloat16"}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(platform="cpu"), "platform is cpu"),
        ({}, "the device is cpu; needs compute capability 9.0"),
        (dict(kind="NVIDIA B200"), "the device is NVIDIA B200"),
        (dict(kind="NVIDIA H200", block=7), "no block rows"),
        (dict(kind="NVIDIA H200", group=9), "8 rows of 9 query heads"),
        (dict(kind="NVIDIA H200", head=128), "head width 128"),
        (dict(kind="NVIDIA H200", types=frozenset({"float32"})), "operands are float32"),
    ],
)
def test_why_not(change, reason):
    facts = FITS | change
    kind = facts.pop("kind", None)
    device = kind and jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert reason in str(why_not(**facts))


@pytest.mark.gpu
@pytest.mark.parametrize("end", ENDS)
def test_the_bits_of_a_row_on_the_gpu(end):
    """Alone or among eight, at another place, in a longer buffer, beside rejected slots that hold NaN."""
    call = jax.jit(decode_attention)
    query, key, value, begin, ends = inputs(end)
    wanted = call(query, key, value, begin, ends)
    close(wanted, plain(query, key, value, begin, ends))
    longer = [jnp.concatenate([x, jnp.full((1, 700, *x.shape[2:]), jnp.nan, x.dtype)], axis=1) for x in (key, value)]
    same_bits(call(query, *longer, begin, ends), wanted)
    for row in (0, 3, 7):
        one = slice(row, row + 1)
        same_bits(call(query[:, one], key, value, begin[:, one], ends[:, one]), wanted[:, one])
        place = (row + 2) % 8
        moved = [x.at[:, place].set(x[:, row]) for x in (query, begin, ends)]
        same_bits(call(moved[0], key, value, moved[1], moved[2])[:, place], wanted[:, row])
        for fill in (jnp.nan, jnp.inf):
            hidden = [x.at[:, end + row :].set(fill) for x in (key, value)]
            same_bits(call(query, *hidden, begin, ends)[:, : row + 1], wanted[:, : row + 1])


@pytest.mark.gpu
def test_windows_batches_and_the_gate_on_the_gpu():
    query, key, value, begin, end = inputs(3000, batch=2)
    begin = begin.at[:, 3].set(2500).at[0, 5].set(70).at[1].set(1234)
    wanted = plain(query, key, value, begin, end) * np.asarray(jax.nn.sigmoid(query.astype(jnp.float32)))
    close(jax.jit(decode_attention)(query, key, value, begin, end, gate_BTQH=query), wanted, 8e-3)  # rounded twice
