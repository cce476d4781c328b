"""The causal convolution of many tokens as one kernel, straight from the fused projection to q, k and v.

A program takes ``TOKENS`` tokens of a block of channels that lies within q, k or v. Inputs are loaded once per tap, but
for the first time from the processor's cache: from the projection or, before the first token, from the tail.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ready_jax.kernels.pallas_triton import WHOLE, fma, gpu_only, kernel_call, load, store

#: Tokens of a program, and channels at most.
TOKENS, CHANNELS = 16, 256


def why_not(**facts) -> str | None:
    """Needs a GPU to itself."""
    return gpu_only(**facts)


def _body(*refs, edges, block, tokens, channels, packed, masked, interpret):
    """Program (block of tokens, block of channels, sequence)."""
    p_ref, tail_ref, weight_ref, *masks, q_ref, k_ref, v_ref = refs
    segment_ref, live_ref = masks[0] if packed else None, masks[-1] if masked else None
    token, b = pl.program_id(0) * block + jnp.arange(block), pl.program_id(2)
    channel = pl.program_id(1) * channels
    column, columns = channel + jnp.arange(channels)[None], pl.ds(channel, channels)
    window = weight_ref.shape[0]
    inside = token < tokens
    segment = load(segment_ref.at[b, token], mask=inside, other=0) if segment_ref is not None else None
    total = jnp.zeros((block, channels), jnp.float32)
    for i in range(window):
        back = window - 1 - i
        before = token - back
        term = load(p_ref.at[b, before[:, None], column], mask=((before >= 0) & inside)[:, None], other=0.0)
        term = term.astype(tail_ref.dtype)
        if back:
            old = before < 0
            at = jnp.where(old, before + window - 1, 0)
            tail = load(tail_ref.at[b, at[:, None], column], mask=(old & inside)[:, None], other=0.0)
            term = jnp.where(old[:, None], tail, term)
        term = term.astype(jnp.float32)
        if back and segment_ref is not None:
            earlier = load(segment_ref.at[b, jnp.maximum(before, 0)], mask=inside, other=0)
            term = jnp.where((earlier == segment)[:, None], term, 0.0)
        weight = load(weight_ref.at[jnp.int32(i), columns]).astype(jnp.float32)
        total = fma(term, weight[None], total, interpret=interpret)
    out = total / (1 + jnp.exp(-total))
    if live_ref is not None:
        live = load(live_ref.at[b, token], mask=inside, other=0) != 0
        out = jnp.where(live[:, None], out, 0.0)
    for ref, (low, high) in zip((q_ref, k_ref, v_ref), itertools.pairwise(edges), strict=True):

        @pl.when((low <= channel) & (channel < high))
        def _(ref=ref, low=low):
            store(ref.at[b, token[:, None], column - low], out.astype(ref.dtype), mask=inside[:, None])


def causal_conv(
    p_BTI, tail_BWC, conv_WC, segment_BT, live_BT, *,
    keys, values, block=TOKENS, channels=CHANNELS, num_warps=4, interpret=False,
):  # fmt: skip
    """See ``kernels/causal_conv.py``."""
    batch, tokens = p_BTI.shape[:2]
    edges = (0, keys, 2 * keys, 2 * keys + values)
    common = math.gcd(keys, values)
    channels = min(channels, common & -common)  # the largest power of two that divides every part
    masks = [mask.astype(jnp.int32) for mask in (segment_BT, live_BT) if mask is not None]
    operands = (p_BTI, tail_BWC, conv_WC, *masks)
    body = functools.partial(
        _body, edges=edges, block=block, tokens=tokens, channels=channels, packed=segment_BT is not None,
        masked=live_BT is not None, interpret=interpret,
    )  # fmt: skip
    return kernel_call(
        body,
        name="causal_conv",
        grid=(pl.cdiv(tokens, block), edges[-1] // channels, batch),
        out_shape=[jax.ShapeDtypeStruct((batch, tokens, width), tail_BWC.dtype) for width in (keys, keys, values)],
        in_specs=[WHOLE] * len(operands),
        out_specs=[WHOLE] * 3,
        num_warps=num_warps,
        interpret=interpret,
    )(*operands)
