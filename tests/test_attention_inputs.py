"""Attention's inputs from the fused projection: against float64, the fused kernel interpreted, and where rows land."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ready_jax.kernels import attention_inputs
from ready_jax.programs import EXACT

BATCH, TOKENS, QUERIES, GROUPS, HEAD, HALF, SLOTS, EPS = 3, 3, 3, 1, 16, 3, 10, 1e-6
#: The last sequence's rows begin one slot before the end of the buffer.
LENGTH = np.array([0, 4, SLOTS - 1])


@functools.partial(jax.jit, static_argnames=("impl",), compiler_options=EXACT)
def prepare(*arrays, impl):
    return attention_inputs.prepare(*arrays, eps=EPS, impl=impl)


def same_bits(found, wanted):
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.asarray(wanted).view(np.uint8))


def inputs(dtype, seed=0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 6, (BATCH, TOKENS, 1, HALF))
    columns, buffer = 2 * (QUERIES + GROUPS) * HEAD, (BATCH, SLOTS, GROUPS, HEAD)
    shapes = (BATCH, TOKENS, columns), (HEAD,), (HEAD,), buffer, buffer
    fused, q_norm, k_norm, key, value = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    angles = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    return fused, q_norm, k_norm, angles, key, value, jnp.asarray(LENGTH, jnp.int32)


def float64(fused, q_norm, k_norm, angles, key, value, length):
    fused, q_norm, k_norm, key, value = (np.array(x, np.float64) for x in (fused, q_norm, k_norm, key, value))
    cos, sin = (np.asarray(x, np.float64) for x in angles)

    def turned(x, weight):
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * (1 + weight)
        a, b, rest = x[..., :HALF], x[..., HALF : 2 * HALF], x[..., 2 * HALF :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    pairs = fused[..., : 2 * QUERIES * HEAD].reshape(BATCH, TOKENS, QUERIES, 2, HEAD)
    rows = fused[..., 2 * QUERIES * HEAD :].reshape(BATCH, TOKENS, 2, GROUPS, HEAD)
    new_key = turned(rows[:, :, 0], k_norm)
    for b, t in np.ndindex(BATCH, TOKENS):
        if length[b] + t < SLOTS:
            key[b, length[b] + t], value[b, length[b] + t] = new_key[b, t], rows[b, t, 1]
    return turned(pairs[..., 0, :], q_norm), pairs[..., 1, :], key, value


@pytest.mark.parametrize("impl", ["reference", "interpret"])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 2**-7)])
def test_float64(dtype, error, impl):
    arrays = inputs(dtype)
    for found, wanted in zip(prepare(*arrays, impl=impl), float64(*arrays), strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=error, atol=error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_neighbours_and_touches_its_slot_only(dtype):
    """Gates, values and every slot that no row owns keep their bits, whatever stands there."""
    fused, q_norm, k_norm, angles, key, value, length = inputs(dtype, 1)
    key, value = (x.at[:, ::2].set(jnp.nan) for x in (key, value))
    wanted = prepare(fused, q_norm, k_norm, angles, key, value, length, impl="interpret")
    dirty = jnp.full_like(fused, jnp.nan).at[:, 1].set(fused[:, 1])
    found = prepare(dirty, q_norm, k_norm, angles, key, value, length, impl="interpret")
    for a, b in zip(found[:2], wanted[:2], strict=True):
        same_bits(a[:, 1], b[:, 1])
    gate = fused[..., : 2 * QUERIES * HEAD].reshape(BATCH, TOKENS, QUERIES, 2, HEAD)[..., 1, :]
    same_bits(wanted[1], gate)
    slot = np.arange(SLOTS)[None]
    owned = (slot >= LENGTH[:, None]) & (slot < LENGTH[:, None] + TOKENS)
    for old, new, other in zip((key, value), wanted[2:], found[2:], strict=True):
        same_bits(np.asarray(new)[~owned], np.asarray(old)[~owned])
        for b in range(BATCH - 1):
            same_bits(other[b, LENGTH[b] + 1], new[b, LENGTH[b] + 1])
