"""Fused kernels are compared with their reference the first time a process takes them on a device.

Compilers have miscompiled kernels in silence before; a small random case costs a second once and makes that an error.
Inputs are fresh in every process. Each ``check`` gets the implementation's ``call``; `dispatch.choose` runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ready_jax.kernels import coded_weights as coded
from ready_jax.kernels import scaled_weights
from ready_jax.kernels.dispatch import WrongValue

OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}  # bf16 is rounded where the code says so


def _compare(run: Callable, call, reference, arguments: tuple, bound: float) -> None:
    """Raises WrongValue where an output of ``run(call, *arguments)`` is further than ``bound`` from the
    reference's, relative to its largest value."""
    found, wanted = (
        jax.tree.leaves(jax.jit(partial(run, x), compiler_options=OPTIONS)(*arguments)) for x in (call, reference)
    )
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        error = float(jnp.max(jnp.abs(a - b))) / max(float(jnp.max(jnp.abs(b))), 1e-6)
        if not error <= bound:  # NaN is not
            raise WrongValue(
                f"output {i} of {a.shape} is off by {error:.2e} of its largest value, at most {bound:.0e} is right: "
                "this compiler or device computes the kernel wrongly"
            )


def _normal(*shapes, scale=1.0, dtype=jnp.bfloat16) -> list[Any]:
    keys = jax.random.split(jax.random.key(time.time_ns() & 0xFFFFFFFF), len(shapes))
    return [(jax.random.normal(key, shape) * scale).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def gated_delta_rows(reference, module) -> None:
    """Eight rows on four memories of two key heads, and the commit of three and of all of them."""
    p, tail, conv = _normal((2, 8, 1664), (2, 3, 1024), (4, 1024))
    s, rate, bias, norm = _normal((2, 4, 128, 128), (4,), (4,), (128,), scale=0.3, dtype=jnp.float32)

    def run(module, s, tail):
        out, log = module.rows(s, p, tail, conv, rate, bias, norm.astype(p.dtype), 1e-6, keys=2)
        return out, module.commit([s, s], [tail, tail * 2], [log, log], jnp.array([3, 8]))

    _compare(run, module, reference, (s, tail), 2e-2)


def gated_delta_prefill(reference, call) -> None:
    """100 tokens in three sequences, the last ones dead, four memories of two key heads, and states within."""
    q, k, v = _normal((1, 100, 2, 128), (1, 100, 2, 128), (1, 100, 4, 128))
    s, gate, beta = _normal((1, 4, 128, 128), (1, 100, 4), (1, 100, 4), scale=0.3, dtype=jnp.float32)
    token = jnp.arange(100)[None]
    options = dict(
        live_BT=token < 91,
        segment_BT=(token > 50).astype(jnp.int32) + (token > 70),
        states_at_BA=jnp.array([[30, 64, 91]]),
    )

    def run(call, s, q, k):
        return call(s, q, k, v, -jnp.abs(gate), jax.nn.sigmoid(beta), **options)

    _compare(run, call, reference, (s, q, k), 2e-2)


def attend_rows(reference, call) -> None:
    """Eight rows over 150 slots, with and without a block of the drafter's."""
    q, gate, k, v, bk, bv = _normal((2, 8, 6, 64), (2, 8, 6, 64), *[(2, 150, 2, 64)] * 2, *[(2, 7, 2, 64)] * 2)
    end = jnp.array([[100], [140]]) + jnp.arange(1, 9)[None]
    begin = jnp.zeros_like(end)

    def run(call, q, k, v):
        return (
            call(q, k, v, begin, end, block=None, gate_BTQH=gate),
            call(q, k, v, begin + 30, end, block=(bk, bv), gate_BTQH=None),
        )

    _compare(run, call, reference, (q, k, v), 2e-2)


def attend_ranges(reference, call) -> None:
    """150 causal rows after 40 committed slots, of which every row forgets the first 9 in one sequence."""
    q, k, v = _normal((2, 150, 6, 64), (2, 200, 2, 64), (2, 200, 2, 64))
    end = jnp.broadcast_to(41 + jnp.arange(150)[None], (2, 150))

    def run(call, *arrays):
        return call(*arrays, jnp.zeros_like(end).at[1].set(9), end)

    _compare(run, call, reference, (q, k, v), 2e-2)


def attention_inputs(reference, call) -> None:
    """Eight rows of six heads, written at slots 5 and 70 of 80."""
    fused, k, v = _normal((2, 8, (2 * 6 + 2 * 2) * 64), (2, 80, 2, 64), (2, 80, 2, 64))
    q_norm, k_norm = _normal((64,), (64,), scale=0.1)
    angle = jnp.linspace(0.0, 9.0, 2 * 8 * 8).reshape(2, 8, 1, 8)

    def run(call, fused, *memory):
        return call(fused, q_norm, k_norm, (jnp.cos(angle), jnp.sin(angle)), *memory, eps=1e-6)

    _compare(run, call, reference, (fused, k, v, jnp.array([5, 70])), 2e-2)


def causal_conv(reference, call) -> None:
    """Forty tokens in two sequences, the last ones dead, with three segments and without; parts of 256, 256 and 768
    channels, and others behind them."""
    p, tail, conv = _normal((2, 40, 1536), (2, 3, 1280), (4, 1280))
    segment = jnp.array([[0] * 7 + [1] * 14 + [2] * 19, [3] * 2 + [4] * 37 + [5]])
    live = jnp.arange(40)[None] < jnp.array([[33], [38]])

    def run(call, *arrays):
        return [call(*arrays, packed, live, keys=256, values=768) for packed in (segment, None)]

    _compare(run, call, reference, (p, tail, conv), 2e-2)


def markov_step(reference, call) -> None:
    """The token must be the same: the best logit leads by more than rounding."""
    base, w2, w1 = _normal((1, 7, 5000), (256, 5000), (5000, 256))
    base = base.astype(jnp.float32).at[0, 3, 4321].set(1e4)

    def run(call, base, latent, w2, w1):
        return call(base, 3, latent, w2, w1, None)

    _compare(run, call, reference, (base, w1[:1], w2, w1), 1e-6)


def scaled_product(reference, call) -> None:
    """Seven rows and twenty."""
    x, y, w = _normal((7, 256), (20, 256), (320, 256))
    scale, words = jnp.linspace(0.5, 2.0, 320), scaled_weights.encode(w.astype(jnp.float8_e4m3fn))
    _compare(lambda call, *arrays: [call(a, words, scale) for a in arrays], call, reference, (x, y), 1e-4)


def _coded():
    """A matrix of several steps of a program, of which some weights are rare, in every way."""
    (w,) = _normal((3072, 96), scale=0.05)
    return coded.encode(w.at[:, 3].mul(40).at[[7, 3000], 9].set(1e-30).at[500].set(0).at[8, 8].set(-0.0))


def coded_product(reference, call) -> None:
    """Seven rows and twenty; and a matrix of which most of a column is rare."""
    x, y, w = _normal((7, 3072), (20, 3072), (3072, 16))
    odd = coded.encode(w.at[:, 3].mul(2.0 ** (jnp.arange(3072) % 64).astype(w.dtype)))

    def run(call, x, y, *stored):
        return [call(rows, *each, dtype=jnp.float32) for rows in (x, y) for each in (stored[:3], stored[3:])]

    _compare(run, call, reference, (x, y, *_coded(), *odd), 1e-5)


def coded_weights(reference, call) -> None:
    """Every bit."""

    def run(call, *stored):
        return jax.lax.bitcast_convert_type(call(*stored), jnp.uint16)

    _compare(run, call, reference, _coded(), 0.0)


def state_prepare(reference, call) -> None:
    """Two layers of four memories at rank 8."""
    s, u, v = _normal((1, 4, 128, 128), (8, 128, 8), (8, 128, 8), dtype=jnp.float32)

    def run(call, s, u, v):
        return call((s, s * 2), u, v, width=128, eps=1e-6, heads=None, rms_axes="head", feature="pair")

    _compare(run, call, reference, (s, u, v), 1e-4)


def state_read(reference, call) -> None:
    """Seven positions, eight pairs at rank 8."""
    latent, gain = _normal((1, 7, 64), (8, 8))
    a, scale = _normal((1, 8, 8, 8), (1, 8), dtype=jnp.float32)

    def run(call, *arguments):
        return call(*arguments, eps=1e-6, norm_axes="rank")

    _compare(run, call, reference, (latent, gain, a, scale), 2e-2)
