"""Norms and rotary embedding against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ready_jax.config import RopeConfig, YarnConfig
from ready_jax.layers import SwiGLU, linear, rms_norm, rms_norm_1p, rope_angles, rope_frequencies, rotate

ATTENTION_FACTOR = 0.1 * np.log(32) + 1
#: The drafter of Qwen3.8-27B.
LARGE = RopeConfig(1e7, 128, YarnConfig(32.0, 8192, 32.0, 1.0, ATTENTION_FACTOR))
#: The small fixture of the reference page, section 8.4; its truncated bounds are 0 and 2.
SMALL = RopeConfig(1e7, 16, YarnConfig(4.0, 64, 32.0, 1.0, 0.1 * np.log(4) + 1))


def base(theta, dim):
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


@pytest.mark.parametrize(("theta", "dim"), [(1e7, 64), (1e4, 8), (1e6, 128)])
def test_plain_frequencies(theta, dim):
    found, factor = rope_frequencies(RopeConfig(theta, dim))
    np.testing.assert_allclose(found, base(theta, dim), rtol=1e-6)
    assert factor == 1.0


def test_yarn_of_the_27b_drafter():
    """Indices 0-14 untouched, 29-63 divided by 32, a straight ramp between; q.k grows by 1.81326."""
    found, factor = rope_frequencies(LARGE)
    plain = base(1e7, 128)
    np.testing.assert_allclose(found[:15], plain[:15], rtol=1e-6)
    np.testing.assert_allclose(found[29:], plain[29:] / 32, rtol=1e-6)
    ramp = (np.arange(15, 29) - 14) / 15
    np.testing.assert_allclose(found[15:29], plain[15:29] * (1 - ramp + ramp / 32), rtol=1e-6)
    assert factor == pytest.approx(1.34657359, abs=1e-8)
    assert factor**2 == pytest.approx(1.81326, abs=1e-5)


def test_yarn_of_the_small_fixture():
    found, factor = rope_frequencies(SMALL)
    np.testing.assert_allclose(found / base(1e7, 16), [1, 0.625, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25], rtol=1e-6)
    assert factor == pytest.approx(1.138629, abs=1e-6)


@pytest.mark.parametrize("config", [RopeConfig(1e4, 8), SMALL])
def test_rotation_pairs_the_halves(config):
    """Entry i turns with entry i + rotary_dim/2 by position times frequency; the rest of the head passes through."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 20)).astype(np.float32)
    position = np.array([[0, 1, 2, 3, 4], [100, 7, 500, 1000, 0]], np.int32)
    found = np.asarray(rotate(jnp.asarray(x), rope_angles(jnp.asarray(position), config)))
    frequency, factor = rope_frequencies(config)
    half = config.rotary_dim // 2
    wanted = x.astype(np.float64)
    for b, t in np.ndindex(position.shape):
        for i in range(half):
            angle = float(position[b, t]) * float(frequency[i])
            cos, sin = factor * np.cos(angle), factor * np.sin(angle)
            first, second = x[b, t, :, i].astype(np.float64), x[b, t, :, i + half].astype(np.float64)
            wanted[b, t, :, i], wanted[b, t, :, i + half] = first * cos - second * sin, second * cos + first * sin
    np.testing.assert_allclose(found, wanted, atol=2e-4, rtol=0)  # fp32 angles of 1000 radians
    np.testing.assert_allclose(found[0], wanted[0], atol=2e-6, rtol=0)
    np.testing.assert_array_equal(found[..., config.rotary_dim :], x[..., config.rotary_dim :])


def test_the_attention_factor_acts_at_position_zero_too():
    cos, sin = rope_angles(jnp.zeros((1, 1), jnp.int32), LARGE)
    np.testing.assert_allclose(cos, np.full((1, 1, 1, 64), ATTENTION_FACTOR), rtol=1e-6)
    np.testing.assert_array_equal(sin, np.zeros((1, 1, 1, 64)))


def test_only_distances_matter():
    rng = np.random.default_rng(1)
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(at, other):
        turned = [rotate(x, rope_angles(jnp.array([[n]]), RopeConfig(1e4, 8))) for x, n in ((query, at), (key, other))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(4, 9)) > 1e-2


@pytest.mark.parametrize(("norm", "add"), [(rms_norm, 0.0), (rms_norm_1p, 1.0)])
def test_norms(norm, add):
    """The target's weight is an offset from one, the drafter's is the factor itself; epsilon is under the root."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((4, 3, 8))
    x[0] *= 1e-3  # where an epsilon of 1e-5 or outside the root would show
    weight = rng.standard_normal(8)
    wanted = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (weight + add)
    found = norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 1e-6)
    np.testing.assert_allclose(found, wanted, atol=3e-6, rtol=0)


def test_where_norms_round():
    """bf16: the drafter's norm rounds before the weight, the target's rounds once at the end; statistics are fp32."""
    x = jnp.asarray(np.random.default_rng(3).standard_normal((64, 32)) * 100, jnp.bfloat16)
    weight = jnp.asarray(np.random.default_rng(4).standard_normal(32), jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    normed = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + np.float32(1e-6))
    once = jnp.asarray(normed * (1 + np.asarray(weight, np.float32)), jnp.bfloat16)
    twice = jnp.asarray(normed, jnp.bfloat16) * weight[None]
    for found, wanted in ((rms_norm_1p(x, weight, 1e-6), once), (rms_norm(x, weight, 1e-6), twice)):
        assert found.dtype == jnp.bfloat16
        assert np.mean(np.asarray(found) == np.asarray(wanted)) > 0.99


def test_linear_casts_masters_and_keeps_the_activation_type():
    rng = np.random.default_rng(5)
    x, w, bias = rng.standard_normal((2, 3, 16)), rng.standard_normal((16, 5)), rng.standard_normal(5)
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, w, bias)]
    np.testing.assert_allclose(linear(*arrays), x @ w + bias, atol=1e-5, rtol=0)
    assert linear(arrays[0].astype(jnp.bfloat16), *arrays[1:]).dtype == jnp.bfloat16


def test_swiglu():
    from flax import nnx

    mlp = SwiGLU(6, 10, rngs=nnx.Rngs(0), dtype="float32")
    x = np.random.default_rng(6).standard_normal((2, 3, 6))
    w_in, w_out = (np.asarray(w[...], np.float64) for w in (mlp.w_in_DI, mlp.w_out_FD))
    gate, up = np.split(x @ w_in, 2, axis=-1)
    wanted = (gate / (1 + np.exp(-gate)) * up) @ w_out
    np.testing.assert_allclose(jax.jit(mlp)(jnp.asarray(x, jnp.float32)), wanted, atol=1e-5, rtol=0)
