"""The rows of a decoding pass, from fused projection to gated norm, and their commit: every implementation."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ready_jax.kernels import dispatch, gated_delta, gated_delta_fused, gated_delta_gluon
from ready_jax.programs import EXACT

BATCH, TOKENS, KEYS, MEMORIES, EPS = 2, 8, 2, 6, 1e-6
SIZES = {"scan": (16, 32), "interpret": (16, 32), "fused": (128, 128), "gluon": (128, 128)}
EVERY = ["scan", "interpret", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("fused", "gluon"))]
each = pytest.mark.parametrize("impl", EVERY)


def bf16(x):
    return np.asarray(x).astype(ml_dtypes.bfloat16)


@functools.cache
def inputs(impl: str, seed: int = 0):
    """(state, fused projection, conv tail) and (conv, a_log, dt_bias, norm); the projection is padded."""
    x, y = SIZES[impl]
    rng = np.random.default_rng(seed)
    channels = 2 * KEYS * x + MEMORIES * y
    columns = -(-(channels + MEMORIES * y + 2 * MEMORIES) // 128) * 128
    memory = (0.3 * rng.standard_normal((BATCH, MEMORIES, x, y))).astype(np.float32)
    p, tail = bf16(rng.standard_normal((BATCH, TOKENS, columns))), bf16(rng.standard_normal((BATCH, 3, channels)))
    weights = (
        bf16(rng.standard_normal((4, channels))),
        rng.standard_normal(MEMORIES).astype(np.float32),
        rng.standard_normal(MEMORIES).astype(np.float32),
        bf16(1 + 0.1 * rng.standard_normal(y)),
    )
    return (memory, p, tail), weights


@functools.cache
def programs(impl: str):
    rows = jax.jit(functools.partial(gated_delta.rows, keys=KEYS, impl=impl), compiler_options=EXACT, static_argnums=7)
    commit = jax.jit(functools.partial(gated_delta.commit_rows, impl=impl), compiler_options=EXACT)
    return lambda memory, p, tail, weights: rows(memory, p, tail, *weights, EPS), commit


def oracle(memory, p, tail, weights):
    """Outputs [B, T, M*Y] and the states after 0..T rows, float64, rounded to bf16 where activations are."""
    conv, a_log, dt_bias, norm = (np.asarray(w, np.float64) for w in weights)
    (batch, memories, x, y), channels = memory.shape, conv.shape[1]
    p = np.asarray(p, np.float64)
    history = np.concatenate([np.asarray(tail, np.float64), p[..., :channels]], axis=1)
    mixed = sum(history[:, i : i + TOKENS] * conv[i] for i in range(4))
    mixed = np.asarray(bf16(mixed / (1 + np.exp(-mixed))), np.float64)
    q, k, v = np.split(mixed, [KEYS * x, 2 * KEYS * x], axis=-1)
    z, b, a = (p[..., channels + i : channels + j] for i, j in ((0, memories * y), (memories * y, memories * (y + 1)),
               (memories * (y + 1), memories * (y + 2))))  # fmt: skip

    def unit(h):
        h = h.reshape(batch, TOKENS, KEYS, x)
        return np.repeat(h / np.sqrt(np.sum(h * h, axis=-1, keepdims=True) + 1e-6), memories // KEYS, axis=2)

    q, k, v = unit(q) / np.sqrt(x), unit(k), v.reshape(batch, TOKENS, memories, y)
    decay = np.exp(-np.exp(a_log) * np.logaddexp(a + dt_bias, 0))
    s, states, outs = np.asarray(memory, np.float64), [np.asarray(memory, np.float64)], []
    for t in range(TOKENS):
        s = s * decay[:, t][..., None, None]
        u = (v[:, t] - np.einsum("bmxy,bmx->bmy", s, k[:, t])) / (1 + np.exp(-b[:, t]))[..., None]
        s = s + k[:, t][..., None] * u[:, :, None]
        states.append(s)
        outs.append(np.einsum("bmxy,bmx->bmy", s, q[:, t]))
    out = np.asarray(bf16(np.stack(outs, axis=1)), np.float64)
    out = out / np.sqrt(np.mean(out * out, axis=-1, keepdims=True) + EPS) * norm
    return out.reshape(z.shape) * z / (1 + np.exp(-z)), states, history


def near(found, wanted, bound):
    wanted = np.asarray(wanted, np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=bound * np.abs(wanted).max(), rtol=0)


def same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@each
def test_outputs_and_every_commit_match_float64(impl: str):
    """Ragged commits: each sequence keeps its own number of rows. An activation may round to its bf16 neighbour."""
    (memory, p, tail), weights = inputs(impl)
    rows, commit = programs(impl)
    out, log = rows(memory, p, tail, weights)
    wanted, states, history = oracle(memory, p, tail, weights)
    near(out, wanted, 1e-2)
    for num in ((0, 8), (3, 1), (2, 7), (4, 5), (6, 0)):
        (s,), (t,) = commit([jnp.array(memory)], [jnp.array(tail)], [log], np.array(num))
        for row, n in enumerate(num):
            near(s[row], states[n][row], 2e-3)
            near(t[row], history[row, n : n + 3], 0)


@each
def test_rejected_rows_may_hold_anything(impl: str):
    """NaN from row 3 on: the rows before it and a commit of three keep their bits."""
    (memory, p, tail), weights = inputs(impl)
    rows, commit = programs(impl)
    junk = p.copy()
    junk[:, 3:] = np.nan
    num = np.array([3, 2])
    found = []
    for some in (p, junk):
        out, log = rows(memory, some, tail, weights)
        found.append((out[:, :3], commit([jnp.array(memory)], [jnp.array(tail)], [log], num)))
    same(*found)


@each
def test_row_by_row_leaves_what_one_pass_does(impl: str):
    """Bit by bit on a GPU and in the scan; the interpreter leaves roundings to XLA."""
    (memory, p, tail), weights = inputs(impl)
    rows, commit = programs(impl)
    out, log = rows(memory, p, tail, weights)
    whole = commit([jnp.array(memory)], [jnp.array(tail)], [log], np.array([8, 8]))
    s, t, outs = jnp.array(memory), jnp.array(tail), []
    for i in range(TOKENS):
        one = np.full_like(p, np.nan)
        one[:, 0] = p[:, i]
        out_i, log = rows(s, one, t, weights)
        (s,), (t,) = commit([s], [t], [log], np.array([1, 1]))
        outs.append(out_i[:, :1])
    if impl == "interpret":
        near(s, whole[0][0], 1e-6)
        near(jnp.concatenate(outs, axis=1), out, 1e-2)
    else:
        same((jnp.concatenate(outs, axis=1), [s], [t]), (out, *whole))


@each
def test_one_commit_covers_any_number_of_layers(impl: str):
    """Ten layers: more than one launch takes."""
    rows, commit = programs(impl)
    layers = [inputs(impl, seed) for seed in range(10)]
    logs = [rows(*some, weights)[1] for some, weights in layers]
    memories, tails = ([jnp.array(some[i]) for some, _ in layers] for i in (0, 2))
    num = np.array([5, 0])
    together = commit(memories, tails, logs, num)
    single = [commit([m], [t], [log], num) for m, t, log in zip(memories, tails, logs, strict=True)]
    same(together, tuple([x[i][0] for x in single] for i in (0, 1)))


def test_who_runs_where_and_why():
    def choose(platform: str, **changed) -> str:
        facts = dict(dtype=jnp.bfloat16, tokens=8, key_dim=128, value_dim=128)
        return dispatch.choose("rows", gated_delta.ROWS, platform=platform, **{**facts, **changed}).name

    has_triton = all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))
    assert choose("cpu") == "scan"
    assert choose("gpu") == ("gluon" if has_triton else "fused")
    assert choose("gpu", key_dim=64) == "fused"
    assert choose("gpu", partitioned=True) == "scan"
    why_not = gated_delta_fused.why_not
    assert why_not(platform="gpu", tokens=4) == "the pass has 4 rows; needs 8"
    assert why_not(platform="gpu", dtype=jnp.float32) == "activations are float32; needs bfloat16"
    assert why_not(platform="gpu", key_dim=96) == "key width 96; needs a power of two of at least 16"
    if has_triton:
        assert (
            gated_delta_gluon.why_not(platform="gpu", window=3)
            == "convolution window 3; needs 4: its taps are written out"
        )
        assert choose("gpu", window=3) == "fused"
    else:
        assert "is missing; pip install 'ready-jax[triton]'" in str(gated_delta_gluon.why_not(platform="gpu"))
    (memory, p, tail), weights = jax.tree.map(jnp.asarray, inputs("interpret"))
    three = functools.partial(gated_delta.rows, memory, p[:, :3], tail, *weights)
    with pytest.raises(NotImplementedError, match="the pass has 3 rows; needs 8"):
        three(EPS, keys=KEYS, impl="interpret")


def test_what_a_pass_left_decides_who_commits_it():
    """A kernel's log on the CPU goes to the interpreted kernel, never to the scan; naming the other one is an error."""
    (memory, p, tail), weights = jax.tree.map(jnp.asarray, inputs("interpret"))
    rows, commit = programs("interpret")
    _, log = rows(memory, p, tail, weights)
    same(
        gated_delta.commit_rows([memory], [tail], [log], jnp.array([3, 1])),
        commit([memory], [tail], [log], np.array([3, 1])),
    )
    with pytest.raises(ValueError, match="impl='scan' is unknown"):
        gated_delta.commit_rows([memory], [tail], [log], jnp.array([3, 1]), impl="scan")
