"""The convolution of many tokens: against float64, the kernel interpreted, its gradient, and the inputs it leaves."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quick

from ready_jax.kernels.causal_conv import causal_conv
from ready_jax.kernels.gated_delta_rows import last_inputs

KEYS, VALUES, WINDOW, COLUMNS = 32, 48, 4, 128
CHANNELS = 2 * KEYS + VALUES
#: Segments of one, two and more tokens, begun at and beside the borders of the kernel's programs.
SEGMENT = np.repeat([0, 1, 2, 3, 4, 5], [1, 2, 13, 1, 15, 3]), np.repeat([7, 8, 9], [16, 2, 17])


def plain(*arrays, impl):
    segment, live = (*arrays[3:], None)[:2]
    return causal_conv(*arrays[:3], keys=KEYS, segment_BT=segment, live_BT=live, impl=impl)


conv = quick(plain, static_argnames=("impl",))


def inputs(tokens: int, dtype="float32", seed=0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    shapes = (2, tokens, COLUMNS), (2, WINDOW - 1, CHANNELS), (WINDOW, CHANNELS)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def float64(p, tail, weight, segment=None):
    p, tail, weight = (np.asarray(x, np.float64) for x in (p, tail, weight))
    own = p[..., :CHANNELS]
    total = np.zeros_like(own)
    for b, t in np.ndindex(own.shape[:2]):
        for back in range(WINDOW):
            before = t - back
            if segment is not None and segment[b][max(before, 0)] != segment[b][t]:
                continue
            total[b, t] += (own[b, before] if before >= 0 else tail[b, before]) * weight[WINDOW - 1 - back]
    mixed = total / (1 + np.exp(-total))
    return np.split(mixed, [KEYS, 2 * KEYS], axis=-1)


@pytest.mark.parametrize("impl", ["reference", "interpret", pytest.param("fused", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 2**-6)])
def test_float64(impl, packed, dtype, error):
    arrays = inputs(35, dtype)
    segment = np.stack(SEGMENT) if packed else None
    found = conv(*arrays, segment, impl=impl)
    for part, wanted in zip(found, float64(*arrays, segment=segment), strict=True):
        assert part.dtype == dtype
        np.testing.assert_allclose(np.asarray(part, np.float64), wanted, atol=error, rtol=error)


@pytest.mark.parametrize("tokens", [1, 2, 16, 17])
def test_any_length(tokens):
    arrays = inputs(tokens, seed=tokens)
    for part, wanted in zip(conv(*arrays, None, impl="interpret"), float64(*arrays), strict=True):
        np.testing.assert_allclose(np.asarray(part, np.float64), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "interpret", pytest.param("fused", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("packed", [False, True])
def test_dead_tokens_are_zeros_whatever_they_hold(impl, packed):
    """And leave no bit in the tokens before them, nor in other segments."""
    arrays, segment = inputs(35), np.stack(SEGMENT) if packed else None
    live = (np.stack(SEGMENT) % 3 != 2) if packed else np.arange(35)[None] < np.array([[20], [0]])
    dead = arrays[0] + jnp.where(live[..., None], 0, jnp.nan), *arrays[1:]
    for part, wanted in zip(conv(*dead, segment, live, impl=impl), conv(*arrays, segment, impl=impl), strict=True):
        np.testing.assert_array_equal(part, jnp.where(live[..., None], wanted, 0))


@pytest.mark.parametrize(("keys", "columns"), [(56, COLUMNS), (KEYS, CHANNELS - 1)])
def test_widths_that_do_not_fit_are_named(keys, columns):
    p, *others = inputs(3)
    with pytest.raises(ValueError, match=rf"found 112 channels with keys={keys}, and {columns} columns"):
        causal_conv(p[..., :columns], *others, keys=keys)


def test_the_kernel_has_the_gradient_of_the_reference():
    arrays, segment = inputs(20), jnp.stack([x[:20] for x in SEGMENT])
    live = jnp.arange(20)[None] < jnp.array([[20], [17]])

    def loss(impl, *arrays):
        return sum(jnp.sum(jnp.sin(x) * (i + 1)) for i, x in enumerate(plain(*arrays, segment, live, impl=impl)))

    found, wanted = (
        quick(jax.grad(functools.partial(loss, impl), (0, 1, 2)))(*arrays) for impl in ("interpret", "reference")
    )
    for a, b in zip(found, wanted, strict=True):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_last_inputs_are_a_window_of_the_tail_and_the_pass(tokens):
    """Whatever lies behind it: NaN there does not come in."""
    _, tail, _ = inputs(tokens)
    own = inputs(tokens, seed=1)[0][..., :CHANNELS]
    for count in range(tokens + 1):
        dead = own.at[:, count:].set(jnp.nan)
        found = last_inputs(tail, dead, jnp.array([count, 0]))
        both = np.concatenate([tail, own], axis=1)
        np.testing.assert_array_equal(found[0], both[0, count : count + WINDOW - 1])
        np.testing.assert_array_equal(found[1], tail[1])
