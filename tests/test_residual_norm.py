"""Residual and norm: the plain form is the layer's own, parts are added in fp32, the kernel says what it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quick

from ready_jax.kernels import dispatch, residual_norm, residual_norm_gluon
from ready_jax.layers import linear, partial_sums, rms_norm_1p


def drawn(*shape, seed=0, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_part_is_what_a_layer_does(dtype):
    x, y, weight = (drawn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(2, 3, 16), (2, 3, 16), (16,)]))
    found, normed = residual_norm.add(x, y[None], weight, 1e-6)
    np.testing.assert_array_equal(found, x + y)
    np.testing.assert_array_equal(normed, rms_norm_1p(x + y, weight, 1e-6))


def test_parts_are_added_in_fp32_and_rounded_once():
    x, weight = drawn(1, 2, 16), drawn(16, seed=2)
    part = jnp.round(1024 * drawn(8, 1, 2, 16, seed=1, dtype="float32")) / 1024  # sums are exact, bf16 is not enough
    found, normed = residual_norm.add(x, part, weight, 1e-6)
    total = jnp.asarray(np.sum(np.asarray(part, np.float64), axis=0), x.dtype)
    np.testing.assert_array_equal(found, x + total)
    np.testing.assert_array_equal(normed, rms_norm_1p(x + total, weight, 1e-6))


def test_a_product_is_left_in_parts_for_the_kernel_only(monkeypatch):
    x, w = drawn(1, 8, 2048), drawn(2048, 1024, seed=1)
    np.testing.assert_array_equal(partial_sums(x, w), linear(x, w)[None])
    monkeypatch.setattr(residual_norm_gluon.gluon, "missing", lambda: None)
    with dispatch.platform("gpu"):
        assert residual_norm.parts(x, 2048, 1024, impl="gluon") == residual_norm_gluon.PARTS
        assert residual_norm.parts(x, 2048 + 128, 1024, impl="gluon") == 1
        assert residual_norm.parts(x, 2048, 1024) == 1, "not timed yet: by name only"


def test_the_kernel_says_what_it_refuses():
    assert "17 rows" in str(residual_norm_gluon.why_not(rows=17, platform="gpu"))
    assert "1000" in str(residual_norm_gluon.why_not(width=1000, platform="gpu"))
    assert "float32" in str(residual_norm_gluon.why_not(dtype="float32", platform="gpu"))
    assert "cpu" in str(residual_norm_gluon.why_not(platform="cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8])
def test_the_kernel_at_full_width(tokens):
    x, part, weight = drawn(1, tokens, 5120), drawn(8, 1, tokens, 5120, seed=1, dtype="float32"), drawn(5120, seed=2)
    following = drawn(5120, 16512, seed=3)

    def add(impl):
        return quick(lambda x, y, w, n: residual_norm.add(x, y, w, 1e-6, next_IN=n, starts=4, impl=impl))

    found, wanted = (add(impl)(x, part, weight, following) for impl in ("gluon", "reference"))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.04, rtol=0.01)
