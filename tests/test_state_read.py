"""The reader's kernels, interpreted, and their reference against float64; what they refuse; their gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quick

from ready_jax.kernels import state_read

BATCH, MEMORIES, X, Y, EPS = 2, 3, 8, 20, 1e-3
IMPLS = ["reference", "interpret"]


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def problem(layers: int, heads, rank: int, maps: str, seed=0):
    """States of very different sizes, U and V per pair, per layer or for all."""
    rng = np.random.default_rng(seed)
    size = jnp.asarray(10.0 ** rng.uniform(-3, 1, (layers, BATCH, MEMORIES, 1, 1)), jnp.float32)
    states = tuple(size[n] * draw(rng, BATCH, MEMORIES, X, Y) for n in range(layers))
    number = {"pair": layers * len(heads or range(MEMORIES)), "layer": layers, "all": 1}[maps]
    return states, draw(rng, number, X, rank), draw(rng, number, Y, rank)


@functools.partial(quick, static_argnames=("width", "eps", "heads", "rms_axes", "feature", "impl"))
def prepare(states, u, v, **options):
    return state_read.prepare(states, u, v, **options)


@functools.partial(quick, static_argnames=("eps", "norm_axes", "impl"))
def read(*operands, **options):
    return state_read.read(*operands, **options)


def oracle(states, u, v, heads, width):
    """Pair by pair: (A, rho)."""
    u, v = np.asarray(u, np.float64), np.asarray(v, np.float64)
    picked = heads or tuple(range(MEMORIES))
    pairs = [(layer, head) for layer in range(len(states)) for head in picked]
    a, rho = np.zeros((BATCH, len(pairs), u.shape[2], u.shape[2])), np.zeros((BATCH, len(pairs)))
    for b in range(BATCH):
        for m, (layer, head) in enumerate(pairs):
            s = np.asarray(states[layer], np.float64)[b, head]
            rho[b, m] = np.sqrt(np.mean(s**2) + EPS)
            at = {len(pairs): m, len(states): layer, 1: 0}
            a[b, m] = v[at[len(v)]].T @ s.T @ u[at[len(u)]] / (rho[b, m] * np.sqrt(width))
    return a, rho


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("layers", "heads", "rank", "maps", "feature"),
    [
        (2, None, 4, "pair", "pair"),
        (1, None, 3, "all", "raw"),
        (3, (2, 0), 6, "layer", "none"),
        (2, (1,), 1, "pair", "pair"),
    ],
)
def test_prepare(impl, layers, heads, rank, maps, feature):
    states, u, v = problem(layers, heads, rank, maps)
    wanted, rho = oracle(states, u, v, heads, X)
    a, scale = prepare(states, u, v, width=X, eps=EPS, heads=heads, feature=feature, impl=impl)
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, wanted, atol=3e-6 * np.abs(wanted).max(), rtol=0)
    assert np.abs(wanted).max() > 0.05
    if feature == "none":
        assert scale is None
    else:
        np.testing.assert_allclose(scale, np.log(rho) if feature == "pair" else rho, atol=3e-6, rtol=3e-6)


def rows(rank: int, pairs: int, latents: int, positions=3, seed=0):
    rng = np.random.default_rng(seed)
    latent = 3 * draw(rng, BATCH, positions, latents * rank)
    return latent, draw(rng, pairs, rank), draw(rng, BATCH, pairs, rank, rank), draw(rng, BATCH, pairs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rank", "latents", "norm"), [(4, 6, "rank"), (3, 2, "rank"), (5, 1, "none")])
def test_read(impl, rank, latents, norm):
    pairs = 6
    operands = rows(rank, pairs, latents)
    latent, gain, a, _ = (np.asarray(x, np.float64) for x in operands)
    z = latent.reshape(latent.shape[:2] + (latents, rank))
    if norm == "rank":
        z = z / np.sqrt(np.mean(z**2, axis=-1, keepdims=True) + EPS)
    z = np.repeat(z, pairs // latents, axis=2) * gain
    wanted = np.einsum("bzji,bpzi->bpzj", a, z).reshape(latent.shape[:2] + (-1,))
    found = read(*operands, eps=EPS, norm_axes=norm, impl=impl)
    np.testing.assert_allclose(found[..., :-pairs], wanted, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(found[..., -pairs:], np.broadcast_to(operands[3][:, None], (BATCH, 3, pairs)))
    if norm == "none":
        without = read(*operands[:3], None, eps=EPS, norm_axes=norm, impl=impl)
        np.testing.assert_array_equal(without, found[..., :-pairs])


def test_feature_rows_come_in_the_type_of_the_latents():
    latent, *rest = rows(4, 6, 6)
    found = [read(latent.astype(jnp.bfloat16), *rest, eps=EPS, impl=impl) for impl in IMPLS]
    assert all(x.dtype == jnp.bfloat16 for x in found)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in found), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("layers", "heads", "maps", "feature"),
    [(1, (1,), "pair", "pair"), (2, None, "all", "raw"), (2, (2, 0), "layer", "none")],
)
def test_the_kernels_have_the_references_gradient(layers, heads, maps, feature):
    states, u, v = problem(layers, heads, 2, maps)
    pairs = layers * len(heads or range(MEMORIES))
    latent, gain, *_ = rows(2, pairs, 1, positions=1)

    @functools.partial(quick, static_argnums=0)
    def gradient(impl, *arguments):
        def loss(states, u, v, latent, gain):
            a, scale = state_read.prepare(states, u, v, width=X, eps=EPS, heads=heads, feature=feature, impl=impl)
            return jnp.sum(jnp.square(state_read.read(latent, gain, a, scale, eps=EPS, impl=impl)))

        return jax.tree.leaves(jax.grad(loss, argnums=(0, 1, 2, 3, 4))(*arguments))

    for found, wanted in zip(*(gradient(impl, states, u, v, latent, gain) for impl in IMPLS), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)
        assert np.abs(wanted).max() > 1e-3


def test_what_the_kernels_do_not_cover_is_refused_with_a_reason():
    states, u, v = problem(1, None, 2, "pair")
    refused: dict[str, Any] = {
        "state_rms_axes='row'": dict(rms_axes="row", feature="none"),
        "state_rms_axes='layer'": dict(rms_axes="layer"),
        "scale_feature='layer'": dict(feature="layer"),
    }
    for reason, changes in refused.items():
        with pytest.raises(NotImplementedError, match=reason):
            state_read.prepare(states, u, v, width=X, eps=EPS, impl="interpret", **changes)
        plain = functools.partial(state_read.prepare, width=X, eps=EPS, **changes)
        assert jax.eval_shape(plain, states, u, v)[0].shape == (BATCH, MEMORIES, 2, 2)
    large = (jnp.zeros((1, 1, 256, 256)),)
    with pytest.raises(NotImplementedError, match="65536 elements"):
        state_read.prepare(large, jnp.zeros((1, 256, 2)), jnp.zeros((1, 256, 2)), width=X, eps=EPS, impl="interpret")
    latent, gain, a, scale = rows(4, 6, 6)
    with pytest.raises(NotImplementedError, match="query_norm_axes='all'"):
        state_read.read(latent, gain, a, scale, eps=EPS, norm_axes="all", impl="interpret")
    with pytest.raises(NotImplementedError, match="2 scale features for 6 pairs"):
        state_read.read(latent, gain, a, scale[:, :2], eps=EPS, impl="interpret")
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="needs gpu"):
            state_read.read(latent, gain, a, scale, eps=EPS, impl="fused")
