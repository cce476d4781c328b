"""One kernel from the fused projection of a few rows to queries, gates and the rows' slots of the buffers.

A program is one head of one row: a norm, a rotation and a store. The rotation's partner of each entry is loaded from
its own place, since a value cannot be sliced inside a kernel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ready_jax.kernels.pallas_triton import WHOLE, gpu_only, kernel_call, load, store


def misfit(*, head: int = 16, **_: object) -> str | None:
    """What about the operands rules the kernel out on any platform; None if nothing."""
    return f"head width {head}; needs a power of two" if head & (head - 1) else None


def why_not(**facts) -> str | None:
    """Needs a GPU and a power of two as head width."""
    return gpu_only(**facts) or misfit(**facts)


def _body(fused_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, _, __, length_ref, *outs, heads, groups, eps):
    """Program (query heads, then key heads, then value heads; row; sequence)."""
    query_ref, gate_ref, key_ref, value_ref = outs
    i, t, b = (pl.program_id(axis) for axis in range(3))
    head, half = q_norm_ref.shape[0], cos_ref.shape[3]
    is_query = i < heads
    start = jnp.where(is_query, 2 * i, i + heads) * head
    at = jnp.arange(head)
    partner = jnp.where(at < half, at + half, jnp.where(at < 2 * half, at - half, at))
    angle = jnp.minimum(at, partner)
    turns = at < 2 * half

    raw = load(fused_ref.at[b, t, start + at])
    x = raw.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(x * x) / head + eps)

    def normed(x, at):
        one = load(q_norm_ref.at[at], mask=jnp.broadcast_to(is_query, at.shape), other=0.0)
        other = load(k_norm_ref.at[at], mask=jnp.broadcast_to(jnp.logical_not(is_query), at.shape), other=0.0)
        weight = jnp.where(is_query, one, other).astype(jnp.float32)
        return (x.astype(jnp.float32) * scale * (1.0 + weight)).astype(raw.dtype)

    here, there = normed(raw, at), normed(load(fused_ref.at[b, t, start + partner]), partner).astype(jnp.float32)
    cos = load(cos_ref.at[b, t, 0, angle], mask=turns, other=0.0)
    sin = load(sin_ref.at[b, t, 0, angle], mask=turns, other=0.0)
    turned = here.astype(jnp.float32) * cos + jnp.where(at < half, -there, there) * sin
    turned = jnp.where(turns, turned.astype(raw.dtype), here)
    slot = length_ref[b] + t

    @pl.when(is_query)
    def _query():
        store(query_ref.at[b, t, i, at], turned)
        store(gate_ref.at[b, t, i, at], load(fused_ref.at[b, t, start + head + at]))

    @pl.when((i >= heads) & (i < heads + groups) & (slot < key_ref.shape[1]))
    def _key():
        store(key_ref.at[b, slot, i - heads, at], turned.astype(key_ref.dtype))

    @pl.when((i >= heads + groups) & (slot < value_ref.shape[1]))
    def _value():
        store(value_ref.at[b, slot, i - heads - groups, at], raw.astype(value_ref.dtype))


def attention_inputs(
    fused_BTI, q_norm_H, k_norm_H, angles, key_BSGH, value_BSGH, length_B, *, eps, num_warps=1, interpret=False
):
    """See ``kernels/attention_inputs.py``; the buffers are written in place."""
    (batch, rows, columns), groups, head = fused_BTI.shape, *key_BSGH.shape[2:]
    heads = (columns // head - 2 * groups) // 2
    query = jax.ShapeDtypeStruct((batch, rows, heads, head), fused_BTI.dtype)
    buffers = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key_BSGH, value_BSGH)]
    return kernel_call(
        functools.partial(_body, heads=heads, groups=groups, eps=eps),
        name="attention_inputs",
        grid=(heads + 2 * groups, rows, batch),
        out_shape=[query, query, *buffers],
        in_specs=[WHOLE] * 8,
        out_specs=[WHOLE] * 4,
        num_warps=num_warps,
        aliases={5: 2, 6: 3},
        interpret=interpret,
    )(fused_BTI, q_norm_H, k_norm_H, *angles, key_BSGH, value_BSGH, length_B)
