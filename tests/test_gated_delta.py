"""The gated delta rule: every implementation against float64 and the reference tensors, and laws none can fake."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ready_jax.kernels import gated_delta, gated_delta_reference
from ready_jax.kernels.gated_delta_chunk import unit_lower_inverse
from ready_jax.programs import EXACT

CASES = ["one", "one_init", "len65_gva2", "len130_gva3_init", "strong_decay", "tiny_norm", "no_decay_beta1"]
CASES += ["repeated_key"]
CHUNKS = [16, 32, 64]
#: One shape for most tests: 200 tokens are no multiple of a chunk, 3 memories share a key head, X and Y differ.
BATCH, TOKENS, KEYS, MEMORIES, X, Y = 9, 200, 2, 6, 8, 12
NUM_PREFIXES = 12

#: Compiling dominates these tests; values checked within a bound do not need optimised code.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Inputs(NamedTuple):
    """NumPy or JAX arrays: states [B, M, X, Y], then [B, T, ...]."""

    s: Any
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any

    def tokens(self, start: int, stop: int | None = None) -> "Inputs":
        return Inputs(self.s, *(x[:, start:stop] for x in self[1:]))


def random_inputs(seed, batch=BATCH, tokens=TOKENS, keys=KEYS, memories=MEMORIES, x=X, y=Y, gate=1.0) -> Inputs:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return Inputs(
        normal(batch, memories, x, y),
        normal(batch, tokens, keys, x),
        normal(batch, tokens, keys, x),
        normal(batch, tokens, memories, y),
        -gate * rng.random((batch, tokens, memories), np.float32),
        rng.random((batch, tokens, memories), np.float32),
    )


def oracle(inputs: Inputs, segment=None):
    """Outputs [B, T, M, Y] and the states before and after every token [B, T+1, M, X, Y], in float64."""
    s, q, k, v, g, beta = (np.asarray(x, np.float64) for x in inputs)
    group = v.shape[2] // k.shape[2]

    def unit(x):
        return np.repeat(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6), group, axis=2)

    q, k = unit(q) / np.sqrt(q.shape[-1]), unit(k)
    outs, states = [], [s]
    for t in range(q.shape[1]):
        if segment is not None and t:
            s = np.where((segment[:, t] == segment[:, t - 1])[:, None, None, None], s, 0.0)
        s = s * np.exp(g[:, t])[..., None, None]
        u = beta[:, t, :, None] * (v[:, t] - np.einsum("bmxy,bmx->bmy", s, k[:, t]))
        s = s + k[:, t][..., None] * u[:, :, None]
        outs.append(np.einsum("bmxy,bmx->bmy", s, q[:, t]))
        states.append(s)
    return np.stack(outs, axis=1), np.stack(states, axis=1)


def close(found, wanted, bound):
    np.testing.assert_allclose(np.asarray(found), wanted, atol=bound * max(1.0, np.abs(wanted).max()), rtol=0)


def same_bits(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


# Every implementation, one body


@functools.cache
def verify_pass(impl: str) -> Callable:
    def one(num_B, inputs: Inputs):
        out, pending = gated_delta.verify(*inputs, impl=impl)
        return out, gated_delta.commit(inputs.s, pending, num_B, impl=impl)

    return quick(one)


def by_passes(impl: str, inputs: Inputs):
    """Verify passes of 8 rows; the last is filled up with NaN rows that are not committed."""
    length, outs = inputs.q.shape[1], []
    for start in range(0, length, 8):
        rows = inputs.tokens(start, start + 8)
        live = rows.q.shape[1]
        fill = [np.pad(x, [(0, 0), (0, 8 - live)] + [(0, 0)] * (x.ndim - 2), constant_values=np.nan) for x in rows[1:]]
        out, s = verify_pass(impl)(np.full(len(inputs.s), live, np.int32), Inputs(inputs.s, *fill))
        inputs = inputs._replace(s=s)
        outs.append(out[:, :live])
    return np.concatenate(outs, axis=1), inputs.s


@functools.cache
def prefill_call(impl: str | None) -> Callable:
    if impl is None:
        return quick(lambda inputs: gated_delta_reference.prefill(*inputs))
    return quick(lambda inputs: gated_delta.prefill(*inputs, impl=impl)[:2])


def implementations():
    found = [pytest.param(lambda x: prefill_call(None)(x), id="prefill-reference")]
    for door, run in [("verify", by_passes), ("prefill", lambda impl, x: prefill_call(impl)(x))]:
        for candidate in gated_delta.IMPLEMENTATIONS[door]:
            reason = candidate.why_not(platform=jax.default_backend(), dtype=jnp.float32)
            skip = [pytest.mark.skip(reason=reason)] if reason else []
            found.append(
                pytest.param(functools.partial(run, candidate.name), id=f"{door}-{candidate.name}", marks=skip)
            )
    return found


each_implementation = pytest.mark.parametrize("run", implementations())


@pytest.fixture(scope="module")
def stored(golden):
    return np.load(golden / "ops_gdn.npz")


@each_implementation
@pytest.mark.parametrize("case", CASES)
def test_the_reference_tensors(stored, run, case):
    tensors = [stored[f"{case}.{name}"][None] for name in ("q", "k", "v", "g", "beta")]
    wanted = stored[f"{case}.state"]
    start = stored[f"{case}.initial_state"] if f"{case}.initial_state" in stored else np.zeros_like(wanted)
    out, state = run(Inputs(start[None], *tensors))
    loose = 10 if case == "strong_decay" else 1  # differences of large cumulative sums lose digits
    np.testing.assert_allclose(out[0], stored[f"{case}.out"], atol=1e-6 * loose, rtol=0)
    np.testing.assert_allclose(state[0], wanted, atol=3e-6 * loose, rtol=0)


@each_implementation
@pytest.mark.parametrize("group", [1, 2, 3])
def test_float64_with_unequal_widths(run, group):
    inputs = random_inputs(group, batch=2, tokens=21, keys=2, memories=2 * group, x=6, y=10)
    out, states = oracle(inputs)
    found, state = run(inputs)
    close(found, out, 2e-6)
    close(state, states[:, -1], 2e-6)


@each_implementation
def test_a_key_head_serves_neighbouring_memories(run):
    """Field case C07: 2 key heads, 6 memories; a tiled order would silence 0, 2, 4."""
    inputs = random_inputs(7, batch=2, tokens=21, x=6, y=10)
    inputs.s[:], inputs.k[:, :, 0], inputs.q[:, :, 0] = 0, 0, 0
    out, state = (np.asarray(x) for x in run(inputs))
    assert not out[:, :, :3].any()
    assert not state[:, :3].any()
    assert (np.abs(out[:, :, 3:]).max(axis=(0, 1, 3)) > 1e-2).all()
    spread = inputs._replace(q=np.repeat(inputs.q, 3, axis=2), k=np.repeat(inputs.k, 3, axis=2))
    same_out, same_state = run(spread)
    close(out, same_out, 1e-6)
    close(state, same_state, 1e-6)


@pytest.mark.parametrize("call", [gated_delta.verify, gated_delta.prefill])
def test_heads_that_do_not_divide_are_refused(call):
    with pytest.raises(ValueError, match="memory_heads=5 must be a multiple of key_heads=2"):
        call(*map(jnp.asarray, random_inputs(0, batch=1, tokens=3, memories=5)))


# Chunks


@functools.cache
def chunked(chunk: int) -> Callable:
    """prefill of [BATCH, TOKENS] with all options as arrays: one program per chunk size."""

    @jax.jit
    def call(inputs: Inputs, live, segment, prefixes):
        return gated_delta.prefill(
            *inputs, live_BT=live, segment_BT=segment, states_at_BA=prefixes, chunk=chunk, impl="chunk"
        )

    def run(inputs: Inputs, num=TOKENS, segment=None, prefixes=None):
        num = np.broadcast_to(num, (BATCH,))
        segment = np.zeros((BATCH, TOKENS), np.int32) if segment is None else segment
        prefixes = np.zeros((BATCH, NUM_PREFIXES), np.int32) if prefixes is None else prefixes
        return call(inputs, np.arange(TOKENS)[None] < num[:, None], segment, prefixes)

    return run


def dead(inputs: Inputs, num, fill) -> Inputs:
    """The same inputs with everything from token ``num[b]`` on replaced."""
    late = np.arange(TOKENS)[None] >= np.broadcast_to(num, (BATCH,))[:, None]
    spread = [late.reshape(late.shape + (1,) * (x.ndim - 2)) for x in inputs[1:]]
    return Inputs(inputs.s, *(np.where(m, np.float32(fill), x) for m, x in zip(spread, inputs[1:], strict=True)))


def border_prefixes(chunk: int, num) -> np.ndarray:
    """0, 1, both sides of chunk borders, and the end of every row."""
    num = np.broadcast_to(num, (BATCH,))
    wanted = [0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, 3 * chunk, 100, 128, TOKENS - 1, TOKENS]
    return np.minimum(np.array(wanted)[None], num[:, None]).astype(np.int32)


def at(states, prefixes):
    return np.stack([rows[n] for rows, n in zip(states, prefixes, strict=True)])


@pytest.mark.parametrize("gate", [1.0, 8.0])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_any_length_in_any_chunk(chunk, gate):
    """Field case C01, all lengths as rows of one batch; states of prefixes equal those of fresh runs of the prefix."""
    num = np.array([1, 15, 16, 63, 64, 65, 100, 127, 130])
    inputs = random_inputs(1, gate=gate)
    prefixes = border_prefixes(chunk, num)
    out, state, found = chunked(chunk)(dead(inputs, num, np.nan), num, prefixes=prefixes)
    wanted, states = oracle(inputs)
    live = np.arange(TOKENS)[None] < num[:, None]
    close(np.asarray(out)[live], wanted[live], 5e-6)
    close(state, at(states, num[:, None])[:, 0], 5e-6)
    close(found, at(states, prefixes), 5e-6)


def test_the_state_after_a_whole_number_of_chunks():
    """The last prefix then ends on a border behind which there is no chunk."""
    inputs, prefixes = random_inputs(15, batch=2, tokens=32), np.array([[32, 31, 16], [0, 17, 32]], np.int32)
    call = quick(lambda x, at: gated_delta.prefill(*x, states_at_BA=at, chunk=16, impl="chunk"))
    _, state, found = call(inputs, prefixes)
    states = oracle(inputs)[1]
    close(state, states[:, -1], 5e-6)
    close(found, at(states, prefixes), 5e-6)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_dead_tokens_leave_no_trace(chunk):
    num = np.array([0, 1, 16, 17, 64, 65, 128, 199, 200])
    inputs, run = random_inputs(2), chunked(chunk)
    live = np.arange(TOKENS)[None] < num[:, None]
    results = [run(dead(inputs, num, fill), num) for fill in (np.nan, 1e30, -3.0)]
    for out, state, _ in results:
        same_bits(np.asarray(out)[live], np.asarray(results[0][0])[live])
        same_bits(state, results[0][1])
    same_bits(results[0][1][0], inputs.s[0])


@pytest.mark.parametrize("length", [64, 200])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_strong_decay_is_finite_and_right(chunk, length):
    """Field case C03, forward; gradients below."""
    inputs = random_inputs(3)
    inputs.g[:] = -30
    out, state, _ = chunked(chunk)(inputs, length)
    wanted, states = oracle(inputs)
    close(out[:, :length], wanted[:, :length], 2e-6)
    close(state, states[:, length], 2e-6)


def packings() -> np.ndarray:
    """Segment ids of BATCH rows; row 0 is the field case's [5, 1, 64, 70], then ends on chunk borders, then random."""
    rng = np.random.default_rng(4)
    lengths = [[5, 1, 64, 70, 60], [64, 64, 64, 8], [16, 16, 32, 128, 8], [200], [1] * 20 + [180], [63, 1, 1, 135]]
    while len(lengths) < BATCH:
        cuts = np.sort(rng.choice(np.arange(1, TOKENS), 6, replace=False))
        lengths.append(np.diff([0, *cuts, TOKENS]).tolist())
    return np.stack([np.repeat(np.arange(1, len(row) + 1), row) for row in lengths]).astype(np.int32)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_packed_segments_do_not_see_each_other(chunk):
    """Field case C05: the incoming state belongs to the first segment; also the states inside packed rows."""
    inputs, segment = random_inputs(5), packings()
    prefixes = border_prefixes(chunk, TOKENS)
    prefixes[0, :5] = [4, 5, 6, 70, 71]
    out, state, found = chunked(chunk)(inputs, segment=segment, prefixes=prefixes)
    wanted, states = oracle(inputs, segment)
    close(out, wanted, 5e-6)
    close(state, states[:, -1], 5e-6)
    close(found, at(states, prefixes), 5e-6)


def test_packed_equals_each_segment_alone():
    inputs, lengths = random_inputs(6), [5, 1, 64, 70]
    run = chunked(32)
    segment = np.repeat(np.arange(5), [*lengths, TOKENS - 140])[None].repeat(BATCH, axis=0).astype(np.int32)
    out = run(inputs, 140, segment)[0]
    start, last = 0, None
    for i, length in enumerate(lengths):
        s = inputs.s if i == 0 else np.zeros_like(inputs.s)
        moved = Inputs(s, *(np.roll(x, -start, axis=1) for x in inputs[1:]))
        alone, last, _ = run(moved, length)
        close(out[:, start : start + length], np.asarray(alone[:, :length]), 2e-6)
        start += length
    close(run(inputs, 140, np.minimum(segment, 3))[1], np.asarray(last), 2e-6)


@pytest.mark.parametrize("cuts", [[64, 136], [50, 150], [199, 1], [1, 1, 1, 197], [16, 48, 3, 133]])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_prompt_may_be_prefilled_in_pieces(chunk, cuts):
    """Field case C09 for the recurrence alone."""
    inputs, run = random_inputs(8), chunked(chunk)
    whole, last, _ = run(inputs)
    s, outs, start = inputs.s, [], 0
    for length in cuts:
        out, s, _ = run(Inputs(s, *(np.roll(x, -start, axis=1) for x in inputs[1:])), length)
        outs.append(out[:, :length])
        start += length
    close(np.concatenate(outs, axis=1), np.asarray(whole), 2e-6)
    close(s, np.asarray(last), 2e-6)


def test_prefill_then_single_rows_equals_one_prefill():
    inputs, run = random_inputs(9), chunked(64)
    out, last, _ = run(inputs)
    _, s, _ = run(inputs, 95)
    rows, state = by_passes("scan", inputs.tokens(95)._replace(s=s))
    close(rows, np.asarray(out[:, 95:]), 2e-6)
    close(state, np.asarray(last), 2e-6)


@pytest.mark.parametrize("correlation", [0.9, 1.0])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_correlated_keys(chunk, correlation):
    """Repeated tokens give repeated keys; with no decay and beta near 1 an unstable inverse grows to 1e8 here."""
    inputs = random_inputs(10, gate=1e-3)
    common = np.random.default_rng(1).standard_normal((BATCH, 1, KEYS, X)).astype(np.float32)
    k = np.float32(correlation) * common + np.float32(np.sqrt(1 - correlation**2)) * inputs.k
    inputs = inputs._replace(k=k, beta=1 - np.float32(0.01) * inputs.beta)
    out, state, _ = chunked(chunk)(inputs)
    wanted, states = oracle(inputs)
    close(out, wanted, 1e-5)
    close(state, states[:, -1], 1e-5)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_zero_keys_write_nothing(chunk):
    inputs = random_inputs(11)
    inputs.k[:, 40:150] = 0
    out, state, found = chunked(chunk)(inputs, prefixes=np.full((BATCH, NUM_PREFIXES), 150, np.int32))
    wanted, states = oracle(inputs)
    close(out, wanted, 5e-6)
    close(state, states[:, -1], 5e-6)
    close(states[:, 150], states[:, 40] * np.exp(inputs.g[:, 40:150].astype(float).sum(1))[..., None, None], 1e-9)
    close(found[:, 0], states[:, 150], 5e-6)


# Gradients


def loss(inputs: Inputs, live, out, state):
    """A weighted sum of live outputs and of the last state, with weights that depend on nothing but the shape."""
    weights = jnp.cos(jnp.arange(out[0].size).reshape(out[0].shape) * 0.37)[None]
    return jnp.sum(jnp.where(live[..., None, None], out * weights, 0.0)) + jnp.sum(state * jnp.float32(0.3))


@functools.cache
def chunk_gradient(chunk: int) -> Callable:
    def value(inputs: Inputs, live, segment):
        out, state, _ = gated_delta.prefill(
            *inputs, live_BT=live, segment_BT=segment, chunk=chunk, impl="chunk"
        )  # fmt: skip
        return loss(inputs, live, out, state)

    return quick(jax.grad(value))


@quick
@jax.grad
def reference_gradient(inputs: Inputs, live, segment):
    """Autodiff of the token-by-token scan: dead tokens have g = beta = 0, segments start from a zeroed state."""
    first = jnp.concatenate([jnp.zeros_like(segment[:, :1], bool), segment[:, 1:] != segment[:, :-1]], axis=1)
    first &= live
    _, *rows = inputs._replace(
        g=jnp.where(live[..., None], inputs.g, 0), beta=jnp.where(live[..., None], inputs.beta, 0)
    )

    def body(s, row):
        new, *row = row
        return gated_delta_reference.step(jnp.where(new[:, None, None, None], 0.0, s), row)

    state, out = jax.lax.scan(body, inputs.s, tuple(jnp.swapaxes(x, 0, 1) for x in (first, *rows)))
    return loss(inputs, live, jnp.swapaxes(out, 0, 1), state)


def gradient_case(name: str):
    inputs = random_inputs(12, batch=4)
    live = np.arange(TOKENS)[None] < np.array([[TOKENS], [140], [64], [1]])
    segment = np.zeros((4, TOKENS), np.int32)
    if name == "packed":
        live[:], segment[:] = True, packings()[:4]
    elif name == "strong decay":
        inputs.g[:] = -30
    elif name == "repeated keys":
        inputs.k[:] = inputs.k[:, :1]
        inputs.beta[:] = 0.99
        inputs.g[:] *= 1e-3
    elif name == "zero keys":
        inputs.k[:, 10:90] = 0
    return inputs, live, segment


@pytest.mark.parametrize("case", ["plain", "packed", "strong decay", "repeated keys", "zero keys"])
@pytest.mark.parametrize("chunk", [16, 64])
def test_gradients_equal_those_of_the_scan(chunk, case):
    """Field cases C03 and C05, backward: of the incoming state and of all five inputs."""
    inputs, live, segment = gradient_case(case)
    found, wanted = chunk_gradient(chunk)(inputs, live, segment), reference_gradient(inputs, live, segment)
    for name, a, b in zip(Inputs._fields, found, wanted, strict=True):
        assert np.isfinite(a).all(), name
        scale = np.abs(b).max()
        assert scale > 0, name
        np.testing.assert_allclose(a, b, atol=3e-5 * max(scale, 1.0), rtol=0, err_msg=name)


@pytest.mark.parametrize("fill", [7.0, np.nan])
def test_dead_tokens_send_no_gradient_to_live_ones(fill):
    inputs, live, segment = gradient_case("plain")
    spread = [live.reshape(live.shape + (1,) * (x.ndim - 2)) for x in inputs[1:]]
    filled = [np.where(m, x, np.float32(fill)) for m, x in zip(spread, inputs[1:], strict=True)]
    wanted = chunk_gradient(16)(inputs, live, segment)
    found = chunk_gradient(16)(Inputs(inputs.s, *filled), live, segment)
    same_bits(found.s, wanted.s)
    for a, b in zip(found[1:], wanted[1:], strict=True):
        same_bits(np.asarray(a)[live], np.asarray(b)[live])
        if np.isfinite(fill):
            assert not np.asarray(a)[~live].any()


# Commit


VERIFY_NAMES = [c.name for c in gated_delta.VERIFY if c.why_not(platform=jax.default_backend()) is None]


@functools.cache
def exact_pass(impl: str) -> tuple[Callable, Callable]:
    verify = jax.jit(lambda x: gated_delta.verify(*x, impl=impl), compiler_options=EXACT)
    return verify, jax.jit(functools.partial(gated_delta.commit, impl=impl), compiler_options=EXACT)


@pytest.mark.parametrize("impl", VERIFY_NAMES)
def test_committing_n_rows_leaves_the_bits_of_n_single_rows(impl):
    """Rows of a batch keep 0..8 rows of the pass; the rows behind hold NaN, and so do those of the single passes."""
    verify, commit = exact_pass(impl)
    num = np.arange(9)
    inputs = random_inputs(13, tokens=8)
    late = np.arange(8)[None] >= num[:, None]
    rows = [np.where(late.reshape(late.shape + (1,) * (x.ndim - 2)), np.float32(np.nan), x) for x in inputs[1:]]
    out, pending = verify(Inputs(inputs.s, *rows))
    at_once = commit(inputs.s, pending, num)
    s, singles = inputs.s, []
    for i in range(8):
        one = [np.roll(x, -i, axis=1) for x in rows]
        for x in one:
            x[:, 1:] = np.nan
        row, pending = verify(Inputs(s, *one))
        s = commit(s, pending, (i < num).astype(np.int32))
        singles.append(row[:, 0])
    same_bits(at_once, s)
    same_bits(np.asarray(out)[~late], np.stack(singles, axis=1)[~late])
    close(at_once, at(oracle(inputs)[1], num[:, None])[:, 0], 2e-6)


@pytest.mark.parametrize("impl", VERIFY_NAMES)
def test_committing_nothing_leaves_every_bit(impl):
    verify, commit = exact_pass(impl)
    inputs = random_inputs(14, tokens=8)
    inputs.s[0, 0, 0, :3] = [-0.0, np.float32(1e-42), np.inf]
    filled = inputs._replace(k=np.full_like(inputs.k, np.nan))
    same_bits(commit(inputs.s, verify(filled)[1], np.zeros(BATCH, np.int32)), inputs.s)


# The triangular inverse


@pytest.mark.parametrize("size", [1, 4, 16, 32, 64])
def test_the_inverse_of_identical_keys(size):
    """I + A with A = 1 below the diagonal: the inverse has entries 0 and +-1; doubling loses all digits."""
    a = np.tril(np.ones((2, size, size), np.float32), -1)
    a[1] *= 0.9 ** np.arange(size, dtype=np.float32)[:, None]
    wanted = np.linalg.inv(np.eye(size) + a.astype(np.float64))
    np.testing.assert_allclose(quick(unit_lower_inverse)(a), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [4, 32])
def test_the_inverse_has_the_right_gradient(size):
    """Against central differences in float64, entry by entry; nothing flows to the diagonal and above."""
    rng = np.random.default_rng(size)
    a = np.tril(rng.uniform(-0.3, 0.3, (size, size)), -1)
    weight = rng.standard_normal((size, size))
    found = quick(jax.grad(lambda a: jnp.sum(unit_lower_inverse(a) * weight.astype(np.float32))))(a.astype(np.float32))
    rows, columns = np.tril_indices(size, -1)
    moved = np.zeros((len(rows), size, size))
    moved[np.arange(len(rows)), rows, columns] = 1e-5
    above, below = (np.sum(np.linalg.inv(np.eye(size) + a + sign * moved) * weight, axis=(1, 2)) for sign in (1, -1))
    wanted = np.zeros((size, size))
    wanted[rows, columns] = (above - below) / 2e-5
    close(found, wanted, 1e-5)
