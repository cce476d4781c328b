"""The split attention kernel, interpreted: against float64 around the borders of splits, and the bits of a row."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ready_jax.kernels import attention
from ready_jax.kernels.decode_attention import Splits, decode_attention, misfit, why_not
from ready_jax.programs import EXACT

SPLITS, CHUNK = Splits(short=16, long=32, border=32), 16
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # to compile
BATCH, ROWS, GROUPS, GROUP, HEAD, SLOTS, BLOCK = 2, 3, 2, 3, 16, 80, 3
ERROR = dict(float32=3e-6, bfloat16=4e-3)
#: First row's slots per sequence: nothing but the block, borders of chunks and splits, the end of the buffer.
LENGTHS = [(0, 15), (16, 17), (31, 32), (33, 63), (64, 77)]
WINDOW = 20


@functools.partial(jax.jit, static_argnames=("peel",), compiler_options=EXACT | QUICK)
def kernel(query, key, value, begin, end, block, gate, peel):
    sizes: dict[str, Any] = dict(splits=SPLITS, chunk=CHUNK, peel=peel, interpret=True)
    return decode_attention(query, key, value, begin, end, block=block, gate_BTQH=gate, **sizes)


def test_every_slot_lies_in_its_split_and_splits_follow_each_other():
    assert [SPLITS.count(SLOTS), SPLITS.count(20), Splits().count(2048 + 641)] == [4, 2, 34]
    ends = 0
    for place in range(SPLITS.count(SLOTS)):
        start, stop = (int(SPLITS.start(jnp.int32(place + i))) for i in (0, 1))
        assert (start, stop - start) == (ends, 16 if start < 32 else 32)
        assert [int(SPLITS.place(jnp.int32(slot))) for slot in range(start, stop)] == [place] * (stop - start)
        ends = stop
    assert ends >= SLOTS


def call(query, key, value, begin, end, block=None, gate=None, peel=False):
    """One compiled program for most tests: without a gate, twice the output of a gate of one half."""
    block = block_of(query.dtype) if block is None else block
    half = jnp.zeros_like(query) if gate is None else gate
    return kernel(query, key, value, begin, end, block, half, peel) * (2 if gate is None else 1)


def inputs(dtype, seed=0, lengths=(33, 63), window=None) -> tuple[Any, Any, Any, Any, Any]:
    """query, key, value, begin, end: row t of a sequence sees ``length + t`` slots, at most the last ``window``."""
    rng = np.random.default_rng(seed)
    shapes = (BATCH, ROWS, GROUPS * GROUP, HEAD), (BATCH, SLOTS, GROUPS, HEAD), (BATCH, SLOTS, GROUPS, HEAD)
    end = np.array(lengths)[:, None] + np.arange(ROWS)
    begin = np.maximum(end - (window or SLOTS), 0)
    arrays = [jnp.asarray(2 * rng.standard_normal(shape), dtype) for shape in shapes]
    return arrays[0], arrays[1], arrays[2], jnp.asarray(begin, jnp.int32), jnp.asarray(end, jnp.int32)


def block_of(dtype, seed=9) -> tuple[Any, Any]:
    draws = np.random.default_rng(seed).standard_normal((2, BATCH, BLOCK, GROUPS, HEAD))
    return jnp.asarray(draws[0], dtype), jnp.asarray(draws[1], dtype)


def float64(query, key, value, begin, end, block=None):
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros(query.shape)
    for b, t, q in np.ndindex(query.shape[:3]):
        seen, g = slice(begin[b, t], end[b, t]), q // GROUP
        keys, values = key[b, seen, g], value[b, seen, g]
        if block is not None:
            keys = np.concatenate([keys, np.asarray(block[0], np.float64)[b, :, g]])
            values = np.concatenate([values, np.asarray(block[1], np.float64)[b, :, g]])
        score = keys @ query[b, t, q] / np.sqrt(HEAD)
        weight = np.exp(score - score.max())
        out[b, t, q] = weight @ values / weight.sum()
    return out


def same_bits(found, wanted):
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.asarray(wanted).view(np.uint8))


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float64(dtype, lengths, window):
    arrays, block = inputs(dtype, lengths=lengths, window=window), block_of(dtype)
    wanted = float64(*arrays, block)
    error = np.asarray(call(*arrays), np.float64) - wanted
    assert np.linalg.norm(error) <= ERROR[dtype] * np.linalg.norm(wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_multiplies_the_output_in_its_type(dtype):
    arrays = inputs(dtype)
    gate = jnp.asarray(np.random.default_rng(1).standard_normal(arrays[0].shape), dtype)
    wanted = float64(*arrays, block_of(dtype)) / (1 + np.exp(-np.asarray(gate, np.float64)))
    error = np.asarray(call(*arrays, gate=gate), np.float64) - wanted
    assert np.linalg.norm(error) <= ERROR[dtype] * np.linalg.norm(wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_row_may_not_see_leaves_no_trace(dtype):
    """Slots outside its range, other rows' queries, its place in the pass: the bits of a row stay."""
    query, key, value, begin, end = inputs(dtype, 2, window=WINDOW)
    wanted = call(query, key, value, begin, end)
    slot = jnp.arange(SLOTS)[None]
    for row in range(ROWS):
        hidden = ((slot < begin[:, row, None]) | (slot >= end[:, row, None]))[..., None, None]
        for fill in (np.nan, np.inf, 7.0):
            other = jnp.full_like(query, fill).at[:, row].set(query[:, row])
            found = call(other, jnp.where(hidden, fill, key), jnp.where(hidden, fill, value), begin, end)
            same_bits(found[:, row], wanted[:, row])
        place = (row + 1) % ROWS
        moved = [x.at[:, place].set(x[:, row]) for x in (query, begin, end)]
        same_bits(call(moved[0], key, value, moved[1], moved[2])[:, place], wanted[:, row])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_alone_in_a_longer_buffer_has_the_same_bits(dtype):
    query, key, value, begin, end = inputs(dtype, 3, window=WINDOW)
    wanted = call(query, key, value, begin, end)
    longer = [jnp.concatenate([x, jnp.full_like(x, np.nan)], axis=1) for x in (key, value)]
    for row in range(ROWS):
        one = slice(row, row + 1)
        same_bits(call(query[:, one], longer[0], longer[1], begin[:, one], end[:, one]), wanted[:, one])


def test_a_value_that_is_seen_and_not_finite_makes_the_row_nan():
    query, key, value, begin, end = inputs("float32", 4)
    row = 1
    found = call(query, key, value.at[0, end[0, row] - 1, 0, 2].set(np.inf), begin, end)
    wrong = np.isnan(np.asarray(found[0]).reshape(ROWS, GROUPS, -1)).all(axis=-1)
    assert wrong.tolist() == [[False, False], [True, False], [True, False]]
    assert np.isfinite(np.asarray(found)).sum() == found.size - wrong.sum() * GROUP * HEAD


@pytest.mark.parametrize("lengths", LENGTHS)
def test_chunks_without_masks_give_the_same_bits(lengths):
    arrays = inputs("float32", 5, lengths, WINDOW)
    same_bits(call(*arrays, peel=True), call(*arrays))


def test_the_door_takes_the_kernel_by_name_only():
    arrays, block = inputs("float32", 6), block_of("float32")
    rows = attention.attend_rows(*arrays, block=block)
    error = rows - float64(*arrays, block)
    assert np.linalg.norm(error) <= ERROR["float32"] * np.linalg.norm(rows)
    named = jax.eval_shape(functools.partial(attention.attend_rows, block=block, impl="interpret"), *arrays)
    assert (named.shape, named.dtype) == (rows.shape, rows.dtype)
    with pytest.raises(NotImplementedError, match="platform is cpu; needs gpu"):
        attention.attend_rows(*arrays, impl="split")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(block=9), "9 rows"),
        (dict(head=96), "head width 96"),
        (dict(types=frozenset({"float32", "bfloat16"})), "bfloat16 and float32"),
    ],
)
def test_why_not(change: dict[str, Any], reason):
    good: dict[str, Any] = {"rows": 8, "block": 7, "head": 256, "types": frozenset({"bfloat16"})}
    assert why_not(platform="gpu", **good) is None
    assert "platform is cpu" in str(why_not(platform="cpu", **good))
    good.update(change)
    assert reason in str(misfit(**good))
    assert reason in str(why_not(platform="gpu", **good))
