"""Weights in 12 bits: every bit comes back, products are those of the matrix, and what cannot be stored says why."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import quick

from ready_jax.export import save_pretrained
from ready_jax.kernels import coded_product, coded_product_gluon, coded_weights
from ready_jax.layers import Coded, linear, product
from ready_jax.lora import attach
from ready_jax.lossless import bits_per_weight, compress, decode, encode
from ready_jax.quantize import draft_fp8


def drawn(*shape, seed=0, scale=0.02):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, jnp.bfloat16)


def bits(x):
    return np.asarray(x).view(np.uint16)


def adversarial():
    """Every kind of number, and columns of other scales than their neighbours."""
    w = drawn(192, 48)
    w = w.at[:, 5].mul(1e4).at[:, 20].mul(1e-30).at[3].set(0).at[4].set(-0.0)
    for i, x in enumerate((np.nan, np.inf, -np.inf, 1e-40, -1e-40, 3e38, 1e-38)):
        w = w.at[i * 9, 33].set(x)
    return w


@pytest.mark.parametrize("w", [drawn(64, 16), adversarial(), jnp.zeros((128, 32), jnp.bfloat16)], ids=str)
def test_every_bit_comes_back(w):
    stored = encode(w)
    assert stored.shape == w.shape
    np.testing.assert_array_equal(bits(decode(stored)), bits(w))


def test_all_bf16_numbers():
    """A column holds all 65536 of them: most are listed, none is lost."""
    w = jax.lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint16), jnp.bfloat16)
    w = jnp.tile(w[:, None], (1, 16))
    np.testing.assert_array_equal(bits(decode(encode(w))), bits(w))


def test_slices_are_those_of_the_whole(monkeypatch):
    w = adversarial()
    whole = encode(w)
    monkeypatch.setattr(coded_weights, "SLICE", 192 * 16)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(encode(w)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_stored():
    """12 bits a weight, the list of a Gaussian matrix's rare weights among them as short as its fullest column."""
    w = drawn(1024, 256, scale=1.0)
    stored = encode(w)
    assert stored.words.nbytes * 8 == 12 * w.size
    rare = np.asarray(stored.rare)
    upper = (bits(w) >> 8) & 0x7F
    table = np.asarray(stored.table)[:, :2].copy().view(np.uint8).reshape(-1, 8)
    lost = ~(upper.reshape(1024, 16, 16, 1) == table[None, :, None]).any(-1).reshape(1024, 256)
    assert (table[:, 0] == 0).all()
    assert (rare != 0).sum() == lost.sum() < w.size / 1500
    assert rare.shape[1] == -(-lost.sum(axis=0).max() // 8) * 8 == 8
    assert bits_per_weight(compress(tiny_target(256))) < 12.6


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (40,)], ids=str)
def test_products_are_those_of_the_matrix(rows, dtype):
    w = drawn(128, 32)
    x = jnp.asarray(drawn(*rows, 128, seed=1, scale=1.0), dtype)
    stored = encode(w)
    for f in (product, linear):
        wanted, found = quick(f)(x, w), quick(f)(x, stored)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        tolerance = 1e-5 if found.dtype == jnp.float32 else 1e-2
        np.testing.assert_allclose(
            np.asarray(found, np.float64), np.asarray(wanted, np.float64), rtol=0, atol=tolerance
        )


def test_gradients_pass_to_the_rows():
    w, x = drawn(64, 32), drawn(3, 64, seed=2, scale=1.0)
    stored = encode(w)
    found, wanted = (jax.grad(lambda x, w=w: jnp.sum(jnp.sin(product(x, w))))(x) for w in (stored, w))
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), atol=2e-3)


def tiny_target(hidden=64, **changes) -> Any:
    return tiny.target(dtype="bfloat16", hidden_size=hidden, **changes)


def test_misfits_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"entries are float32; needs bfloat16"):
        encode(jnp.zeros((64, 16)))
    with pytest.raises(ValueError, match=r"48 x 16; needs multiples of 64 x 16"):
        encode(jnp.zeros((48, 16), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"at most 65536"):
        coded = coded_weights.why_not(65536 + 64, 16, "bfloat16")
        raise ValueError(coded)
    assert "33 rows" in str(coded_product_gluon.why_not(rows=33, platform="gpu"))
    assert "float32" in str(coded_product_gluon.why_not(dtype="float32", platform="gpu"))
