"""Weights in 12 bits: every bit comes back, products are those of the matrix, and what cannot be stored says why."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import threads
import tiny
from compiling import quick
from flax import nnx

from ready_jax.config import LoraConfig
from ready_jax.export import save_pretrained
from ready_jax.kernels import coded_weights, fragment_product_gluon
from ready_jax.layers import Coded, linear, product
from ready_jax.lora import attach
from ready_jax.lossless import bits_per_weight, compress, decode, encode
from ready_jax.pair import Pair
from ready_jax.quantize import draft_fp8, fp8
from ready_jax.tensor_parallel import shard


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


@pytest.mark.parametrize("kind", ["drawn", "any", "zero"])
def test_every_bit_comes_back(kind):
    w = dict(drawn=drawn(64, 16), any=adversarial(), zero=jnp.zeros((128, 32), jnp.bfloat16))[kind]
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
    assert sum(x.nbytes for x in jax.tree.leaves(stored)) * 8 / w.size < 12.3


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


def model(**changes) -> Any:
    """A target whose every matrix can be stored so."""
    sizes: dict[str, Any] = dict(hidden_size=64, vocab_size=112, linear_num_value_heads=8)
    return tiny.target(dtype="bfloat16", **(sizes | changes))


def drafter(**changes) -> Any:
    sizes: dict[str, Any] = dict(intermediate_size=64, num_key_value_heads=4)
    return tiny.drafter(dtype="bfloat16", config=model().config, **(sizes | changes))


def coded(tree) -> int:
    return sum(isinstance(x, Coded) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Coded)))


def test_what_is_compressed():
    target = jax.tree.map(lambda leaf: leaf, model())
    found, some = compress(target), compress(target, ["mlp_out", "head"])
    assert (coded(target), coded(found), coded(some)) == (0, 8 * 4 + 1, 8 + 1)
    assert isinstance(some.layers[3].mlp.w_out_FD[...], Coded)
    for a, b in ((target.layers[3].mixer.w_in_DI, found.layers[3].mixer.w_in_DI), (target.w_out_DV, found.w_out_DV)):
        np.testing.assert_array_equal(bits(decode(b[...])), bits(a[...]))
    assert compress(target, ["head"], consume=True) is target
    assert coded(target) == 1
    assert coded(compress(drafter(reader=True, own_embeddings=True))) == 2 * 5 + 2
    assert bits_per_weight(found) > 12


@pytest.mark.slow
def test_text_and_speculation():
    """The same program with fewer bits: speculation repeats it token for token."""
    pair = Pair(model(), drafter()).compressed(["mlp_out", "head"])
    assert (coded(pair.target), coded(pair.drafter)) == (9, 2 * 5 + 1)
    prompt, limit = tiny.prompt(9), tiny.limits(24)
    alone = tiny.generate(pair.target, None, [prompt], limit)
    run = tiny.generate(pair.target, pair.drafter, [prompt], limit)
    assert tiny.tokens(run) == tiny.tokens(alone)


def test_an_fp8_drafter_of_coded_matrices_is_that_of_the_originals():
    head = model().w_out_DV[...]
    wanted, found = draft_fp8(drafter(), head), draft_fp8(compress(drafter()), encode(head))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_misfits_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"entries are float32; needs bfloat16"):
        compress(tiny.target())
    with pytest.raises(ValueError, match=r"48 x 16; needs multiples of 64 x 16"):
        encode(jnp.zeros((48, 16), jnp.bfloat16))
    assert "at most 65536" in str(coded_weights.why_not(65536 + 64, 16, "bfloat16"))
    assert "33 rows" in str(fragment_product_gluon.why_not(rows=33, platform="gpu"))
    assert "float32" in str(fragment_product_gluon.why_not(dtype="float32", platform="gpu"))
    with pytest.raises(ValueError, match=r"layers.0.mixer.w_in_DI cannot .* it is 48 x"):
        compress(model(hidden_size=48))
    with pytest.raises(ValueError, match=r"found matrices \['mlp'\]; known are \['mixer_in'"):
        compress(model(), ["mlp"])
    with pytest.raises(ValueError, match=r"found no coded matrix"):
        bits_per_weight(model())
    with pytest.raises(ValueError, match=r"found coded matrices \(lossless.compress\); a checkpoint needs the model"):
        save_pretrained(compress(model(), ["head"]), tmp_path / "target")
    with pytest.raises(ValueError, match=r"in 12 bits, which cannot be cut"):
        shard(compress(model(), ["head"]), jax.make_mesh((1,), ("model",)))
    odd = jax.tree.map(lambda leaf: leaf, model())
    odd.layers[1].mlp.w_out_FD = nnx.Param(
        odd.layers[1].mlp.w_out_FD[...].at[:, 7].set((4.0 ** -jnp.arange(64)).astype(jnp.bfloat16))
    )
    with pytest.raises(ValueError, match=r"layers.1.mlp.w_out_FD would take .* bits .* leave out 'mlp_out'"):
        compress(odd, ["mlp_out"])
    adapted = attach(drafter(), LoraConfig(rank=4, alpha=8.0, targets=("q_proj",)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"has a LoRA update; merge it first"):
        compress(adapted, ["mixer_in"])


@pytest.mark.parametrize("rows", [7, 16, 30])
def test_threads_multiply_what_is_stored(rows):
    """The kernel's own instructions, run by NumPy (`threads.py`), on every kind of weight but what is not finite."""
    w = jnp.where(jnp.isfinite(adversarial()), adversarial(), 1).at[:, 33].set(1e-20)
    stored = encode(w)
    x = drawn(rows, 192, seed=3, scale=1.0)
    found = threads.coded_product(x, stored.words, stored.table, stored.rare, dtype=jnp.float32)
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64))
    assert (np.abs(np.asarray(found, np.float64) - wanted) <= 1e-6 * size + 1e-30).all()
    np.testing.assert_array_equal(bits(threads.decode(stored.words, stored.table, stored.rare)).T, bits(w))


@pytest.mark.gpu
@pytest.mark.parametrize(("terms", "columns"), [(64, 16), (192, 48), (512, 96), (5120, 1024), (17408, 512)])
def test_the_gpu_multiplies_what_is_stored(terms, columns):
    """For every number of rows; a row's bits are the same wherever it stands and whatever the others are."""
    w = drawn(terms, columns).at[:, 5].mul(100)
    stored = encode(w)
    np.testing.assert_array_equal(bits(decode(stored)), bits(w))
    eight, plain = fp8(w, ordered=True), fp8(w)
    for rows in (1, 7, 8, 9, 16, 32):
        x = drawn(rows, terms, seed=rows, scale=1.0)
        found = product(x, stored)
        wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
        assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)
        turned = product(jnp.roll(x, 1, axis=0).at[0].set(jnp.nan), stored)
        np.testing.assert_array_equal(turned[1:], found[:-1])
        near, far = product(x, eight), product(x.astype(jnp.float32), plain)
        assert np.linalg.norm(near - far) < 1e-5 * np.linalg.norm(far)
