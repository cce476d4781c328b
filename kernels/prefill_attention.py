"""Attention of many query rows over a key/value buffer, row by row over a range of slots (FlashAttention, Dao 2023).

A program takes ``ROWS`` queries of one head over the chunks of slots that any of them sees; scores live in registers
only. A row's range begins and ends anywhere (causal prefill after a committed text, packed sequences); chunks that
every row sees whole get a loop without masks. Forward; gradients go through the plain form in `attention.py`.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ready_jax.kernels.pallas_triton import WHOLE, gpu_only, kernel_call, load, on_hopper, store

ROWS, WARPS, STAGES = 128, 8, 2


def why_not(**facts) -> str | None:
    """Needs a GPU, bfloat16 operands and a power of two as head width."""
    return gpu_only(**facts) or misfit(**facts)


def misfit(*, head: int = 16, types: frozenset = frozenset({"bfloat16"}), **_: object) -> str | None:
    """What about the operands rules the kernel out on any platform; None if nothing."""
    if not 16 <= head <= 256 or head & (head - 1):
        return f"head width {head}; needs a power of two from 16 to 256"
    if types != {"bfloat16"}:
        return f"operands are {' and '.join(sorted(types))}; needs bfloat16: fp32 has no tensor cores without TF32"
    return None


def _body(begin_ref, end_ref, query_ref, key_ref, value_ref, out_ref, *, tokens, rows, chunk, scale):
    """Program (block of queries, head, sequence)."""
    block = pl.num_programs(0) - 1 - pl.program_id(0)  # late queries see the most slots, and begin first
    h, b = pl.program_id(1), pl.program_id(2)
    slots, groups, head = key_ref.shape[1:]
    heads = query_ref.shape[1] // tokens
    g, column = h // (heads // groups), jnp.arange(head)
    token = block * rows + jnp.arange(rows)
    live = token < tokens
    begin, end = (load(ref.at[b, token], mask=live, other=0) for ref in (begin_ref, end_ref))
    far = jnp.int32(1 << 30)
    low, last_begin = jnp.min(jnp.where(live, begin, far)), jnp.max(begin)
    high, first_end = jnp.minimum(jnp.max(end), slots), jnp.min(jnp.where(live, end, far))
    query = load(query_ref.at[b, token[:, None] * heads + h, column[None]], mask=live[:, None], other=0.0)

    def join(c, carry, whole):
        top, total, out = carry
        slot = c * chunk + jnp.arange(chunk)
        mask, other = (None, None) if whole else ((slot < high)[:, None], 0.0)
        key, value = (
            load(r.at[b, pl.ds(c * chunk, chunk), g, :], mask=mask, other=other) for r in (key_ref, value_ref)
        )
        score = jnp.dot(query, key.T, preferred_element_type=jnp.float32)
        if not whole:
            score = jnp.where((slot[None] >= begin[:, None]) & (slot[None] < end[:, None]), score, -jnp.inf)
        new = jnp.maximum(top, jnp.max(score, axis=1) * scale)
        base = jnp.where(new == -jnp.inf, 0.0, new)
        weight, keep = jnp.exp2(score * scale - base[:, None]), jnp.exp2(top - base)
        product = jnp.dot(weight.astype(value.dtype), value, preferred_element_type=jnp.float32)
        return new, total * keep + jnp.sum(weight, axis=1), out * keep[:, None] + product

    first, last = low // chunk, pl.cdiv(high, chunk)
    inner = jnp.clip(pl.cdiv(last_begin, chunk), first, last)
    outer = jnp.clip(jnp.minimum(first_end, slots) // chunk, inner, last)
    empty = jnp.full((rows,), -jnp.inf, jnp.float32), jnp.zeros((rows,), jnp.float32)
    carry = (*empty, jnp.zeros((rows, head), jnp.float32))
    for lower, upper, whole in ((first, inner, False), (inner, outer, True), (outer, last, False)):
        carry = jax.lax.fori_loop(lower, upper, functools.partial(join, whole=whole), carry)
    out = (carry[2] / carry[1][:, None]).astype(out_ref.dtype)
    store(out_ref.at[b, token[:, None] * heads + h, column[None]], out, mask=live[:, None])


def prefill_attention(
    query_BTQH: Float[Array, "B T Q H"],
    key_BSGH: Float[Array, "B S G H"],
    value_BSGH: Float[Array, "B S G H"],
    begin_BT: Int[Array, "B T"],
    end_BT: Int[Array, "B T"],
    *,
    rows: int = ROWS,
    chunk: int | None = None,
    num_warps: int = WARPS,
    num_stages: int = STAGES,
    interpret: bool = False,
) -> Float[Array, "B T Q H"]:
    """See :func:`ready_jax.kernels.attention.attend_ranges`. ``chunk`` None: what spills no registers on the GPU."""
    chunk = chunk or (64 if on_hopper() else 32)
    batch, tokens, heads, head = query_BTQH.shape
    query = query_BTQH.reshape(batch, tokens * heads, head)
    body = functools.partial(_body, tokens=tokens, rows=rows, chunk=chunk, scale=head**-0.5 * math.log2(math.e))
    (out,) = kernel_call(
        body,
        name="prefill_attention",
        grid=(pl.cdiv(tokens, rows), heads, batch),
        out_shape=[jax.ShapeDtypeStruct(query.shape, query.dtype)],
        in_specs=[WHOLE] * 5,
        out_specs=[WHOLE],
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
    )(begin_BT, end_BT, query, key_BSGH, value_BSGH)
    return out.reshape(query_BTQH.shape)
