"""The kernels of `gated_delta_fused.py` in Gluon, through jax-triton: the same operations with layouts said outright.

Pallas' Triton backend lays a state tile over warps along the key axis, so that every row of a pass pays two
reductions across warps, through shared memory and barriers. Here a warp holds all keys of its columns: reductions are
three shuffles, and rows already normalised wait in shared memory. Two programs share a memory, as one cluster, and
exchange what the norm needs. Scoring and commit round alike: ``fma(k, u, S * decay)``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import jax
import jax.numpy as jnp

from ready_jax.kernels import gated_delta_fused, gluon
from ready_jax.kernels.gated_delta_fused import Log

#: Layers that one commit launch covers.
LAYERS = 16
#: Programs that share a memory, as one cluster.
PARTS = 2
#: Equal ranges of the following matrix whose first MiB is fetched while the rows run: XLA's product of 8 rows begins
#: at as many places. More was slower: it is the state's memory traffic, too.
RANGES = 8


def why_not(*, key_dim=None, value_dim=None, window=None, **facts) -> str | None:
    for name, size in (("key", key_dim), ("value", value_dim)):
        if size not in (None, 128):
            return f"{name} width {size}; needs 128: its layouts are written for that"
    if window not in (None, 4):
        return f"convolution window {window}; needs 4: its taps are written out"
    return gated_delta_fused.why_not(key_dim=key_dim, value_dim=value_dim, **facts) or gluon.missing()


def rows(
    s_BMXY, p_BTI, tail_BWC, conv_WC, a_log_M, dt_bias_M, norm_Y, eps, *, keys: int, following=None, warps: int = 8
):
    """Gated outputs [B, T, M*Y] of the rows, and their log. See :func:`ready_jax.kernels.gated_delta.rows`."""
    from ready_jax.kernels import gated_delta_gluon_source as source

    batch, tokens, columns = p_BTI.shape
    memories, width, values = s_BMXY.shape[1:]
    following = norm_Y if following is None else following
    span = following.size * following.dtype.itemsize // RANGES // 16 * 16  # bytes; the fetch needs multiples of 16
    fetch = span >= PARTS * 2048 * 32 * warps

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    key, u, decay, out, _ = gluon.call()(
        p_BTI, tail_BWC, conv_WC, a_log_M, dt_bias_M, norm_Y, s_BMXY, following,
        kernel=source.rows,
        out_type=[
            f32(batch, tokens, keys, width), f32(batch, tokens, memories, values), f32(batch, tokens, memories),
            jax.ShapeDtypeStruct((batch, tokens, memories * values), p_BTI.dtype),
            f32(batch, memories, PARTS, tokens),
        ],
        grid=(memories + (RANGES if fetch else 0), batch), num_warps=warps,
        RANGE=span, PARTS=PARTS,
        ROW=columns, C=conv_WC.shape[1], K=keys, M=memories, X=width, Y=values, T=tokens, WARPS=warps, EPS=eps,
    )  # fmt: skip
    return out, Log(key, u, decay, p_BTI)


def commit(states, tails, logs, num_B, *, block: int = 32, warps: int = 4):
    """(states, conv tails) of all layers after the first ``num_B[b]`` rows; in place, ``LAYERS`` layers a launch."""
    from ready_jax.kernels import gated_delta_gluon_source as source

    new_states, new_tails = [], []
    for first in range(0, len(states), LAYERS):
        some = slice(first, first + LAYERS)
        s, tail, log = states[some], tails[some], logs[some]
        layers, (batch, memories, width, values) = len(s), s[0].shape
        tokens, keys = log[0].k_BTKX.shape[1:3]
        found = gluon.call()(
            num_B, *(tuple(x) for x in zip(*log, strict=True)), tuple(s), tuple(tail),
            kernel=source.commit,
            out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*s, *tail)],
            grid=(memories * (values // block) + -(-tail[0].shape[2] // 1024), layers, batch),
            num_warps=warps, input_output_aliases={1 + 4 * layers + i: i for i in range(2 * layers)},
            LAYERS=layers, ROW=log[0].p_BTI.shape[2], C=tail[0].shape[2], K=keys, M=memories, X=width, Y=values,
            T=tokens, BLOCK=block, WARPS=warps,
        )  # fmt: skip
        new_states += found[:layers]
        new_tails += found[layers:]
    return new_states, new_tails
