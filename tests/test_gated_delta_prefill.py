"""The prefill kernels of the gated delta rule, interpreted: against float64, and what no rounding may change."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quick
from test_gated_delta import Inputs, at, oracle, random_inputs, same_bits

from ready_jax.kernels import gated_delta, gated_delta_prefill_fused

#: Three chunks, the last one short; three memories share the key head; both widths are small and unequal.
BATCH, TOKENS, MEMORIES, X, Y = 3, 150, 3, 16, 32
PREFIXES = np.array([[0, 1, 63, 64], [65, 127, 128, 149], [64, 64, 100, 150]], np.int32)


def rounded(inputs: Inputs) -> Inputs:
    """q, k and v as bf16 holds them."""
    q, k, v = (np.array(jnp.asarray(x).astype(jnp.bfloat16)) for x in inputs[1:4])
    return inputs._replace(q=q, k=k, v=v)


def some(seed: int, tokens=TOKENS, batch=BATCH, keys=1, memories=MEMORIES, x=X, y=Y) -> Inputs:
    return rounded(random_inputs(seed, batch, tokens, keys, memories, x, y, gate=0.3))


@functools.cache
def call(impl: str = "interpret"):
    def run(inputs: Inputs, live, segment, prefixes):
        return gated_delta.prefill(
            *inputs, live_BT=live, segment_BT=segment, states_at_BA=prefixes, impl=impl
        )  # fmt: skip

    return quick(run) if impl == "interpret" else jax.jit(run)


def prefill(inputs: Inputs, num: Any = TOKENS, segment=None, prefixes=PREFIXES, impl: str = "interpret"):
    """Outputs, the last state, and the states after prefixes, of which dead tokens may be any."""
    tokens = inputs.q.shape[1]
    live = np.arange(tokens)[None] < np.broadcast_to(num, (len(inputs.s),))[:, None]
    segment = np.zeros(live.shape, np.int32) if segment is None else segment
    return call(impl)(inputs, live, segment, prefixes), live


def close(found, wanted, bound: float = 8e-3, size: float = 0):
    """The bound of `first_use.py` for the largest error, and less for all together: bf16 keeps 2^-9."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted)
    scale = max(np.abs(wanted).max(), 1e-3)
    assert np.abs(found - wanted).max() <= 2e-2 * scale
    assert np.linalg.norm(found - wanted) <= bound * max(np.linalg.norm(wanted), size, 1e-3)


def first_heads(inputs: Inputs, keys: int) -> Inputs:
    """The first key heads and their memories: float64 takes long."""
    s, q, k, v, g, beta = inputs
    memories = v.shape[2] // k.shape[2] * keys
    return Inputs(
        s[:, :memories], q[:, :, :keys], k[:, :, :keys], v[:, :, :memories], *(x[:, :, :memories] for x in (g, beta))
    )


def added_up(inputs: Inputs, states, segment=None):
    """Norms [B, T+1, M] of what was added up to the states [B, T+1, M, X, Y]: roots of summed squares of the writes,
    decayed as they are. Writes that overwrite each other leave a small state, and all their roundings."""
    square = np.sum(states[:, 0] ** 2, axis=(2, 3))
    squares = [square]
    for t in range(states.shape[1] - 1):
        keep = np.exp(np.asarray(inputs.g[:, t], np.float64))
        if segment is not None and t:
            keep *= (segment[:, t] == segment[:, t - 1])[:, None]
        write = states[:, t + 1] - keep[..., None, None] * states[:, t]
        square = keep**2 * square + np.sum(write**2, axis=(2, 3))
        squares.append(square)
    return np.sqrt(np.stack(squares, axis=1))


def right(inputs: Inputs, segment=None, prefixes=PREFIXES, impl: str = "interpret", overwriting: bool = False):
    """``overwriting``: what the states are compared with is what was added up to them."""
    (out, state, found), _ = prefill(inputs, inputs.q.shape[1], segment, prefixes, impl)
    inputs = first_heads(inputs, 4)
    memories = inputs.v.shape[2]
    wanted, states = oracle(inputs, segment)
    close(out[:, :, :memories], wanted)
    for got, pick in ((state, lambda x: x[:, -1]), (found, lambda x: at(x, prefixes))):
        bound = (3e-3, np.linalg.norm(pick(added_up(inputs, states, segment)))) if overwriting else ()
        close(got[..., :memories, :, :], pick(states), *bound)


def a_case(name: str, inputs: Inputs) -> Inputs:
    if name == "strong decay":
        inputs.g[:] = -30
    elif name == "no decay":
        inputs.g[:] = 0
        inputs.beta[:] = 1
    elif name == "repeated keys":
        inputs.k[:] = inputs.k[:, :1]
        inputs.g[:] *= 1e-3
        inputs.beta[:] = 1 - 0.01 * inputs.beta
    elif name == "zero keys":
        inputs.k[:, 40:100] = 0
    elif name == "nothing written":
        inputs.beta[:, 30:70] = 0
    elif name == "large and tiny":
        inputs.k[:, ::2] *= 64
        inputs.k[:, 1::2] *= 2.0**-9
        inputs.q[:, ::3] *= 2.0**-9
    return inputs


CASES = ["plain", "strong decay", "no decay", "repeated keys", "zero keys", "nothing written", "large and tiny"]


@pytest.mark.parametrize("case", CASES)
def test_float64(case):
    """An odd length from an initial state, and states after prefixes."""
    right(a_case(case, some(1)))


def packings(tokens: int = TOKENS) -> np.ndarray:
    """Sequences that end within chunks and on their borders, and one of a single token."""
    cuts = [[5, 6, 70, 140], [64, 128], [63, 64, 65, 129]]
    return np.stack([np.searchsorted(row, np.arange(tokens), side="right") for row in cuts]).astype(np.int32)


def test_packed_sequences_do_not_see_each_other():
    right(some(2), packings(), np.array([[5, 6, 70, 71], [63, 64, 65, 128], [63, 64, 65, 150]], np.int32))


def test_dead_tokens_and_neighbours_leave_no_bit():
    """Whatever dead tokens hold, and whatever the other rows hold; padding is dead tokens behind the end."""
    inputs, num = some(3), np.array([0, 64, 101])
    (out, state, found), live = prefill(inputs, num, prefixes=np.minimum(PREFIXES, num[:, None]))
    wanted, states = oracle(inputs)
    close(np.asarray(out)[live], wanted[live])
    close(state, at(states, num[:, None])[:, 0])
    same_bits(np.asarray(state)[0], inputs.s[0])
    filled = Inputs(inputs.s, *(x.copy() for x in inputs[1:]))
    for x in filled[1:]:
        x[~live] = np.nan
    filled = filled._replace(s=np.concatenate([inputs.s[:2] * 3, inputs.s[2:]]))
    filled.v[1] *= -2
    (other_out, other, other_found), _ = prefill(filled, num, prefixes=np.minimum(PREFIXES, num[:, None]))
    same_bits(np.asarray(other_out)[2][live[2]], np.asarray(out)[2][live[2]])
    same_bits(np.asarray(other)[2], np.asarray(state)[2])
    same_bits(np.asarray(other_found)[2], np.asarray(found)[2])


def test_whole_chunks_without_options():
    """A prefix may end behind the last chunk; without dead tokens, segments or prefixes the kernels are others."""
    inputs, prefixes = some(4, tokens=64, batch=1), np.array([[64, 63]], np.int32)
    call = quick(lambda x, at: gated_delta.prefill(*x, states_at_BA=at, impl="interpret"))
    out, state, found = call(inputs, prefixes)
    wanted, states = oracle(inputs)
    close(out, wanted)
    close(state, states[:, -1])
    close(found, at(states, prefixes))


def test_the_gradient_is_that_of_the_chunk_form():
    """At the same inputs: rounding of the forward pass does not reach it."""
    inputs = some(5, tokens=20, batch=1, memories=1, x=16, y=16)
    weight = np.cos(np.arange(inputs.v.size, dtype=np.float32)).reshape(inputs.v.shape)

    def gradient(impl: str):
        def loss(inputs: Inputs):
            out, state, _ = gated_delta.prefill(*inputs, impl=impl, at_once=False)
            return jnp.sum(out * weight) + jnp.sum(state)

        return quick(jax.grad(loss))(inputs)

    for name, found, wanted in zip(Inputs._fields, gradient("interpret"), gradient("chunk"), strict=True):
        found, wanted = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
        assert np.abs(wanted).max() > 0, name
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(), err_msg=name)


def test_the_kernels_say_why_not():
    why_not = gated_delta_prefill_fused.why_not
    assert why_not(platform="gpu") is None
    assert why_not(platform="gpu", dtype=jnp.bfloat16, key_dim=128, value_dim=64, chunk=64) is None
    assert "needs gpu" in str(why_not(platform="cpu"))
    assert "q, k and v are float32" in str(why_not(platform="gpu", dtype=jnp.float32))
    assert why_not(platform="gpu", key_dim=96) == "key width 96; needs a power of two from 16 to 128"
    assert why_not(platform="gpu", value_dim=256) == "value width 256; needs a power of two from 16 to 128"
    assert why_not(platform="gpu", chunk=32) == "chunk=32; needs 64"
    assert "the kernel has its own" in str(why_not(platform="gpu", precision=jax.lax.Precision.DEFAULT))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_full_width_on_a_gpu(case):
    inputs = a_case(case, some(6, tokens=200, keys=16, memories=48, x=128, y=128))
    prefixes = np.array([[0, 1, 63, 64], [65, 127, 128, 199], [64, 64, 100, 200]], np.int32)
    right(inputs, None, prefixes, "fused")
    right(inputs, packings(200), prefixes, "fused", overwriting=case == "repeated keys")


@pytest.mark.gpu
def test_bits_on_a_gpu():
    """Equal on repetition, under padding behind the end, and beside other neighbours."""
    inputs = some(7, tokens=300, keys=16, memories=48, x=128, y=128)
    num, prefixes = 200, np.array([[0, 1, 63, 64], [65, 127, 128, 199], [64, 64, 100, 200]], np.int32)
    found = [prefill(inputs, num, prefixes=prefixes, impl="fused")[0] for _ in range(2)]
    short = prefill(inputs.tokens(0, num), num, prefixes=prefixes, impl="fused")[0]
    alone = prefill(Inputs(*(x[1:2] for x in inputs)), num, prefixes=prefixes[1:2], impl="fused")[0]
    for a, b, c, d in zip(*found, short, alone, strict=True):
        same_bits(a, b)
        cut = (lambda x: x[:, :num]) if a.shape[1] == 300 else (lambda x: x)
        same_bits(cut(a), c)
        same_bits(cut(a)[1:2], cut(d))
