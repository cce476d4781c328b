"""Softmax attention against float64, the bits of a decoding row, and the buffer that rows are written to."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ready_jax.attention import write_rows
from ready_jax.kernels import attention
from ready_jax.kernels.attention import attend, attend_ranges, attend_rows
from ready_jax.programs import EXACT

BATCH, TOKENS, SLOTS, QUERIES, GROUPS, HEAD = 3, 8, 24, 6, 2, 16
exact = functools.partial(jax.jit, compiler_options=EXACT)
attend_jit, write_jit = exact(attend), exact(write_rows)


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


#: Rows of two kernel tiles, ranges of packed texts, of a text after 40 committed slots, and of one with a window.
STARTS = np.array([[0, 100], [0, 0], [30, 30]]), np.array([0, 40, 35])


def ranges(tokens=140, slots=190, seed=5):
    rng = np.random.default_rng(seed)
    shapes = (3, tokens, QUERIES, HEAD), (3, slots, GROUPS, HEAD), (3, slots, GROUPS, HEAD)
    arrays = [2 * rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    end = STARTS[1][:, None] + 1 + np.arange(tokens)
    begin = np.where(end > STARTS[0][:, 1:], STARTS[0][:, 1:], STARTS[0][:, :1])
    return arrays, begin.astype(np.int32), end.astype(np.int32)


@functools.partial(exact, static_argnums=0)
def ranges_jit(impl, *operands):
    return attend_ranges(*operands, impl=impl)


@pytest.mark.parametrize(("impl", "dtype"), [("whole", "float32"), ("blocks", "float32"), ("interpret", "bfloat16")])
def test_rows_over_their_ranges(impl, dtype):
    """Every form against float64; what lies past all ranges changes no bit, NaN included."""
    arrays, begin, end = ranges()
    query, key, value = (jnp.asarray(x, dtype) for x in arrays)
    found = ranges_jit(impl, query, key, value, begin, end)
    slot = np.arange(key.shape[1])
    visible = (slot >= begin[..., None]) & (slot < end[..., None])
    bound = 5e-6 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(np.asarray(found, np.float64), float64(query, key, value, visible), atol=bound, rtol=0)
    past = (slot >= end.max(axis=1, keepdims=True))[..., None, None]
    for fill in (np.nan, np.inf):
        dirty = [jnp.where(past, jnp.asarray(fill, dtype), x) for x in (key, value)]
        same_bits(ranges_jit(impl, query, *dirty, begin, end), found)


def test_the_kernel_for_ranges_has_the_gradient_of_the_plain_form():
    arrays, begin, end = ranges(tokens=20, slots=60)
    operands = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    begin, end = jnp.asarray(begin), jnp.asarray(end)

    def loss(impl):
        return lambda q, k, v: jnp.sum(jnp.square(attend_ranges(q, k, v, begin, end, impl=impl).astype(jnp.float32)))

    found, wanted = (jax.jit(jax.grad(loss(impl), (0, 1, 2)))(*operands) for impl in ("interpret", "whole"))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.02 * float(jnp.abs(b).max()), rtol=0
        )


def test_gradients_need_a_form_that_has_them():
    found = [each.why_not(differentiable=True, platform="cpu") for each in attention.RANGES]
    assert "gpu" in str(found[0])
    assert "gradients" in str(found[1])
    assert found[2] is None


@pytest.mark.gpu
def test_ranges_on_the_gpu_at_full_width():
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((1, 500, 24, 256), (1, 900, 4, 256), (1, 900, 4, 256))
    )
    end = (301 + np.arange(500))[None].astype(np.int32)
    found, wanted = (ranges_jit(impl, query, key, value, np.zeros_like(end), end) for impl in ("flash", "whole"))
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), atol=8e-3, rtol=0)


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
