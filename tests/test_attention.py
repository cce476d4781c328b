"""Softmax attention against float64, the bits of a decoding row, and the buffer that rows are written to."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ready_jax.attention import write_rows
from ready_jax.kernels.attention import attend, attend_rows, clean
from ready_jax.programs import EXACT

BATCH, TOKENS, SLOTS, QUERIES, GROUPS, HEAD = 3, 8, 24, 6, 2, 16
exact = functools.partial(jax.jit, compiler_options=EXACT)
attend_jit, write_jit = exact(attend), exact(write_rows)
clean_jit = exact(clean)


@exact
def rows_jit(query, key, value, visible):
    """``attend_rows`` under a mask that hides all slots from some slot on."""
    end = jnp.sum(visible, axis=-1, dtype=jnp.int32)
    return attend_rows(query, key, value, jnp.zeros_like(end), end, impl="rows")


def inputs(seed=0):
    """query, key, value, and rows at positions ``length ..`` that see the slots up to themselves."""
    rng = np.random.default_rng(seed)
    shapes = [(BATCH, TOKENS, QUERIES, HEAD), (BATCH, SLOTS, GROUPS, HEAD), (BATCH, SLOTS, GROUPS, HEAD)]
    query, key, value = (2 * rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    position = np.array([[0], [5], [16]]) + np.arange(TOKENS)
    return query, key, value, np.arange(SLOTS)[None, None] <= position[..., None]


def float64(query, key, value, visible):
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros(query.shape)
    for b, t, q in np.ndindex(query.shape[:3]):
        seen, group = np.flatnonzero(visible[b, t]), q // (query.shape[2] // key.shape[2])
        score = key[b, seen, group] @ query[b, t, q] / np.sqrt(query.shape[-1])
        weight = np.exp(score - score.max())
        out[b, t, q] = weight @ value[b, seen, group] / weight.sum()
    return out


def same_bits(found, wanted):
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.asarray(wanted).view(np.uint8))


@pytest.mark.parametrize("call", [attend_jit, rows_jit])
def test_float64(call):
    arrays = inputs()
    np.testing.assert_allclose(call(*arrays), float64(*arrays), atol=3e-6, rtol=0)


@pytest.mark.parametrize("call", [attend_jit, rows_jit])
def test_large_scores_do_not_overflow(call):
    query, key, value, visible = inputs(1)
    arrays = query * 30, key * 30, value, visible
    np.testing.assert_allclose(call(*arrays), float64(*arrays), atol=1e-3, rtol=0)


@pytest.mark.parametrize("call", [attend_jit, rows_jit])
def test_bf16_comes_back_as_bf16(call):
    *arrays, visible = inputs(2)
    rounded: list[Any] = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    out = call(*rounded, visible)
    assert out.dtype == jnp.bfloat16
    query, key, value = rounded
    wanted = float64(query, key, value, visible)
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=0.04, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_neighbours(dtype):
    """The bits of row 3 stay when all other rows hold junk or NaN, and when it stands elsewhere in the pass."""
    query, key, value, visible = (jnp.asarray(x) for x in inputs(3))
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    wanted = rows_jit(query, key, value, visible)
    for fill in (9.0, np.nan):
        other = jnp.full_like(query, fill).at[:, 3].set(query[:, 3])
        same_bits(rows_jit(other, key, value, visible)[:, 3], wanted[:, 3])
    for place in (0, 7):
        moved = query.at[:, place].set(query[:, 3]), key, value, visible.at[:, place].set(visible[:, 3])
        same_bits(rows_jit(*moved)[:, place], wanted[:, 3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_slots_it_may_not_see(dtype):
    """A rejected row may hold anything: NaN in keys and values of unseen slots changes no bit."""
    query, key, value, visible = (jnp.asarray(x) for x in inputs(4))
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    wanted = rows_jit(query, key, value, visible)
    for row in range(TOKENS):
        hidden = ~visible[:, row][..., None, None]
        for fill in (np.nan, np.inf, 7.0):
            found = rows_jit(query, jnp.where(hidden, fill, key), jnp.where(hidden, fill, value), visible)
            same_bits(found[:, row], wanted[:, row])


def test_cleaned_values_hide_dead_slots_from_many_queries():
    query, key, value, visible = inputs(5)
    live = np.arange(SLOTS)[None] < np.array([[8], [13], [24]])
    visible &= live[:, None]
    wanted = attend_jit(query, key, np.asarray(clean_jit(value, live)), visible)
    np.testing.assert_allclose(wanted, float64(query, key, value, visible), atol=3e-6, rtol=0)
    for fill in (np.nan, np.inf, -3.0):
        dirty = [np.where(live[..., None, None], x, np.float32(fill)) for x in (key, value)]
        cleaned = np.asarray(clean_jit(dirty[1], live))
        assert not cleaned[~live].any()
        same_bits(attend_jit(query, dirty[0], cleaned, visible), wanted)


def test_rows_past_num_and_past_the_buffer_are_dropped():
    """Neither clamped to the last slot nor wrapped around; whatever they hold."""
    rng = np.random.default_rng(6)
    buffer = rng.standard_normal((5, 10, GROUPS, HEAD)).astype(np.float32)
    rows = rng.standard_normal((5, 4, GROUPS, HEAD)).astype(np.float32)
    start, num = np.array([0, 3, 8, 10, 7]), np.array([4, 2, 4, 3, 0])
    wanted = buffer.copy()
    for b in range(5):
        for i in range(4):
            if i >= num[b]:
                rows[b, i] = np.nan
            elif start[b] + i < 10:
                wanted[b, start[b] + i] = rows[b, i]
    same_bits(write_jit(buffer, rows, start.astype(np.int32), num.astype(np.int32)), wanted)


def test_rows_are_stored_in_the_type_of_the_buffer():
    rows = np.full((1, 1, 1, 2), 1 + 2**-9, np.float32)
    found = write_rows(jnp.zeros((1, 2, 1, 2), jnp.bfloat16), jnp.asarray(rows), jnp.array([1]), jnp.array([1]))
    assert found.dtype == jnp.bfloat16
    assert np.asarray(found, np.float32).ravel().tolist() == [0, 0, 1, 1]
