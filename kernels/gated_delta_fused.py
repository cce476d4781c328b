"""Decoding rows of a Gated DeltaNet layer in one kernel, from fused projection to gated norm, and their commit.

A program owns ``BLOCK`` value columns of one memory. It convolves, normalises and gates its rows, keeps its columns of
the state in registers while the rows go by, and logs what each row wrote: normalised key, corrected write ``u`` and
decay. The last program of a memory to finish applies the gated norm, which needs all columns.

``commit`` replays the logged writes of the rows that stand, ``S <- fma(k, u, exp(g) S)``, the very operations of the
scoring pass with the same roundings: keeping n rows leaves the bits that n single-row passes would. It runs many
layers in one launch, in place.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ready_jax.kernels.pallas_triton import WHOLE, barrier, count_up, fma, gpu_only, kernel_call, load, store

MAX_ROWS = 8
#: Layers that one commit launch covers.
LAYERS = 8


class Log(NamedTuple):
    """What the rows of one pass wrote, fp32: keys [B, T, K, X], writes [B, T, M, Y], decays [B, T, M]; and the
    convolution's inputs, still inside the fused projection [B, T, I]."""

    k_BTKX: jax.Array
    u_BTMY: jax.Array
    decay_BTM: jax.Array
    p_BTI: jax.Array


def why_not_interpreted(*, dtype=None, tokens=None, key_dim=None, value_dim=None, **_) -> str | None:
    if dtype is not None and dtype != jnp.bfloat16:
        return f"activations are {jnp.dtype(dtype).name}; needs bfloat16"
    if tokens is not None and tokens != MAX_ROWS:
        return f"the pass has {tokens} rows; needs {MAX_ROWS}"
    for name, size in (("key", key_dim), ("value", value_dim)):
        if size is not None and (size & (size - 1) or size < 16):
            return f"{name} width {size}; needs a power of two of at least 16"
    return None


def why_not(**facts) -> str | None:
    return gpu_only(**facts) or why_not_interpreted(**facts)


def _silu(x):
    return x / (1.0 + jnp.exp(-x))


def _rows_body(
    p_ref, tail_ref, conv_ref, rate_ref, bias_ref, norm_ref, s_ref, _,
    k_log, u_log, decay_log, raw_ref, query_ref, beta_ref, count_ref, out_ref,
    *, block: int, eps: float, interpret: bool,
):  # fmt: skip
    tokens, keys, width = k_log.shape[1:]
    memories, values = u_log.shape[2:]
    b, m, y = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head = m // (memories // keys)
    window, channels = conv_ref.shape
    madd = partial(fma, interpret=interpret)
    every, mine = pl.ds(0, tokens), pl.ds(y * block, block)

    def convolved(at, size):
        """[tokens, size] of channels ``at ..``: causal convolution, SiLU, rounded to the activation type; fp32."""
        column = (at + jax.lax.broadcasted_iota(jnp.int32, (tokens, size), 1),)
        row = jax.lax.broadcasted_iota(jnp.int32, (tokens, size), 0) - (window - 1)
        total = jnp.zeros((tokens, size), jnp.float32)
        for i in range(window):
            old = load(tail_ref.at[(b, jnp.minimum(row + i, -1) + window - 1, *column)], mask=row + i < 0, other=0.0)
            new = load(p_ref.at[(b, jnp.maximum(row + i, 0), *column)], mask=row + i >= 0, other=0.0)
            weight = load(conv_ref.at[jnp.int32(i), pl.ds(at, size)]).astype(jnp.float32)
            total = madd(jnp.where(row + i < 0, old, new).astype(jnp.float32), weight[None, :], total)
        return _silu(total).astype(p_ref.dtype).astype(jnp.float32)

    def normalised(x):
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=1) + 1e-6)[:, None]

    # What does not depend on the state, for all rows at once. It goes through memory, since a row cannot be cut out of
    # registers; programs that share a head write the same numbers.
    here = (b, every, head, pl.ds(0, width))
    store(query_ref.at[here], normalised(convolved(head * width, width)) * width**-0.5)
    store(k_log.at[here], normalised(convolved((keys + head) * width, width)))
    store(u_log.at[b, every, m, mine], convolved(2 * keys * width + m * values + y * block, block))
    gates = channels + memories * values
    strength = load(p_ref.at[b, every, gates + m]).astype(jnp.float32)
    x = load(p_ref.at[b, every, gates + memories + m]).astype(jnp.float32) + load(bias_ref.at[m]).astype(jnp.float32)
    softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    store(decay_log.at[b, every, m], jnp.exp(-jnp.exp(load(rate_ref.at[m]).astype(jnp.float32)) * softplus))
    store(beta_ref.at[b, every, m], 1.0 / (1.0 + jnp.exp(-strength)))
    s = load(s_ref.at[b, m, pl.ds(0, width), mine])
    barrier(interpret=interpret)

    def row(t, s):
        key, query = (load(x.at[b, t, head, pl.ds(0, width)])[:, None] for x in (k_log, query_ref))
        value = load(u_log.at[b, t, m, mine])
        s = s * load(decay_log.at[b, t, m])
        overlap = jnp.sum(key * query)
        read, seen = jnp.sum(s * key, axis=0), jnp.sum(s * query, axis=0)
        u = (value - read) * load(beta_ref.at[b, t, m])
        s = madd(key, u[None, :], s)
        store(raw_ref.at[b, t, m, mine], madd(overlap, u, seen))  # S^T q after the write
        store(u_log.at[b, t, m, mine], u)
        return s

    # Not unrolled: code that runs once is bound by the fetching of instructions.
    jax.lax.fori_loop(0, tokens, row, s)

    @pl.when(count_up(count_ref, b * memories + m, interpret=interpret) == values // block - 1)
    def _finish():
        o = load(raw_ref.at[b, every, m, pl.ds(0, values)]).astype(out_ref.dtype).astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.sum(o * o, axis=1) * (1.0 / values) + eps)
        weight = load(norm_ref.at[pl.ds(0, values)]).astype(out_ref.dtype)
        normed = (o * scale[:, None]).astype(out_ref.dtype) * weight[None, :]
        z = load(p_ref.at[b, every, pl.ds(channels + m * values, values)]).astype(jnp.float32)
        gated = (normed.astype(jnp.float32) * _silu(z)).astype(out_ref.dtype)
        store(out_ref.at[b, every, pl.ds(m * values, values)], gated)
        store(count_ref.at[b * memories + m], 0)


def _commit_body(*refs, layers: int, block: int, interpret: bool):
    num_ref, refs = refs[0], refs[1:]
    state_in, tail_in, logs, outs = (
        refs[:layers], refs[layers : 2 * layers], refs[2 * layers : 6 * layers], refs[6 * layers :],
    )  # fmt: skip
    state_out, tail_out = outs[:layers], outs[layers:]
    b, layer, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    num = load(num_ref.at[b])
    for i in range(layers):

        @pl.when(layer == i)
        def _one(i=i):
            k_log, u_log, decay_log, p_ref = logs[4 * i : 4 * i + 4]
            s_in, s_out, t_in, t_out = state_in[i], state_out[i], tail_in[i], tail_out[i]
            width = s_in.shape[2]
            memories, values = u_log.shape[2:]
            blocks = values // block
            m, y = part // blocks, part % blocks
            head = m // (memories // k_log.shape[2])

            @pl.when((m < memories) & (num > 0))
            def _state():
                here = (b, m, pl.ds(0, width), pl.ds(y * block, block))

                def replay(t, s):
                    k = load(k_log.at[b, t, head, pl.ds(0, width)])
                    u = load(u_log.at[b, t, m, pl.ds(y * block, block)])
                    return fma(k[:, None], u[None, :], s * load(decay_log.at[b, t, m]), interpret=interpret)

                store(s_out.at[here], jax.lax.fori_loop(0, num, replay, load(s_in.at[here])))

            span, window = 1024, t_in.shape[1]
            at = (part - memories * blocks) * span

            @pl.when((m >= memories) & (num > 0))
            def _tail():
                """Inputs num .. num + window - 1 of [tail ; rows]; all are read before any is overwritten."""
                cut = pl.ds(at, span)
                inside = at + jax.lax.broadcasted_iota(jnp.int32, (span,), 0) < t_in.shape[2]
                kept = []
                for w in range(window):
                    old = load(t_in.at[b, jnp.minimum(num + w, window - 1), cut], mask=inside, other=0.0)
                    new = load(p_ref.at[b, jnp.maximum(num + w - window, 0), cut], mask=inside, other=0.0)
                    kept.append(jnp.where(num + w < window, old, new.astype(old.dtype)))
                for w in range(window):
                    store(t_out.at[b, jnp.int32(w), cut], kept[w], mask=inside)


def rows(
    s_BMXY, p_BTI, tail_BWC, conv_WC, a_log_M, dt_bias_M, norm_Y, eps, *, keys: int, following=None,
    block: int = 64, warps: int = 8, interpret: bool = False,
):  # fmt: skip
    """Gated outputs [B, T, M*Y] of the rows, and their log. See :func:`ready_jax.kernels.gated_delta.rows`."""
    batch, tokens = p_BTI.shape[:2]
    memories, width, values = s_BMXY.shape[1:]
    block = min(block, values)
    f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    count = jnp.zeros((batch * memories,), jnp.int32)
    k, u, decay, *_, out = kernel_call(
        partial(_rows_body, block=block, eps=eps, interpret=interpret),
        name="gated_delta_rows",
        grid=(batch, memories, values // block),
        out_shape=[
            f32((batch, tokens, keys, width)),
            f32((batch, tokens, memories, values)),
            f32((batch, tokens, memories)),
            f32((batch, tokens, memories, values)),
            f32((batch, tokens, keys, width)),
            f32((batch, tokens, memories)),
            jax.ShapeDtypeStruct(count.shape, count.dtype),
            jax.ShapeDtypeStruct((batch, tokens, memories * values), p_BTI.dtype),
        ],
        in_specs=[WHOLE] * 8,
        out_specs=[WHOLE] * 8,
        num_warps=warps,
        aliases={7: 6},
        interpret=interpret,
    )(p_BTI, tail_BWC, conv_WC, a_log_M, dt_bias_M, norm_Y, s_BMXY, count)
    return out, Log(k, u, decay, p_BTI)


def commit(states, tails, logs, num_B, *, block: int = 32, warps: int = 4, interpret: bool = False):
    """(states, conv tails) of all layers after the first ``num_B[b]`` rows; in place, ``LAYERS`` layers a launch."""
    new_states, new_tails = [], []
    for first in range(0, len(states), LAYERS):
        some = slice(first, first + LAYERS)
        s, tail, log = states[some], tails[some], logs[some]
        layers, (batch, memories, _, values) = len(s), s[0].shape
        cut = min(block, values)
        parts = memories * (values // cut) + -(-tail[0].shape[2] // 1024)
        found = kernel_call(
            partial(_commit_body, layers=layers, block=cut, interpret=interpret),
            name="gated_delta_commit",
            grid=(batch, layers, parts),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*s, *tail)],
            in_specs=[WHOLE] * (1 + 6 * layers),
            out_specs=[WHOLE] * (2 * layers),
            num_warps=warps,
            aliases={1 + i: i for i in range(2 * layers)},
            interpret=interpret,
        )(num_B, *s, *tail, *(x for one in log for x in one))
        new_states += found[:layers]
        new_tails += found[layers:]
    return new_states, new_tails


class Interpreted:
    """The same kernels as plain XLA operations, on any platform."""

    rows = staticmethod(partial(rows, interpret=True))
    commit = staticmethod(partial(commit, interpret=True))
