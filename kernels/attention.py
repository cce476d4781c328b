"""Softmax attention of grouped query heads over a key/value buffer: ``softmax(q K^T H^-1/2) V``.

``attend_rows`` is decoding: a few query rows, each over the slots [begin, end) of the buffer, then over the rows of
``block``, if given, which every query sees. The bits of a row depend neither on its place in the pass nor on its
neighbours, and every slot a row may not see is dropped by select before it meets any arithmetic (a rejected row may
hold anything, NaN included). ``attend`` is prefill and training: one product for all queries, masked before softmax.
Scores, softmax and accumulation are fp32 in all; probabilities meet the values in the values' type.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ready_jax.kernels import decode_attention as split
from ready_jax.kernels import first_use
from ready_jax.kernels.dispatch import Implementation, always, choose


def _precision(x):
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _softmax(score, visible):
    score = jnp.where(visible, score, -jnp.inf)
    top = jnp.max(score, axis=-1, keepdims=True)
    weight = jnp.exp(score - jnp.where(jnp.isfinite(top), top, 0.0))
    return weight / jnp.sum(weight, axis=-1, keepdims=True)


def _grouped(query_BTQH, heads):
    return query_BTQH.reshape(query_BTQH.shape[:2] + (heads, -1, query_BTQH.shape[-1]))


def _rows(query_BTQH, key_BSGH, value_BSGH, begin_BT, end_BT, *, block=None, gate_BTQH=None):
    """Each row as a batch entry of its own."""
    slot_S = jnp.arange(key_BSGH.shape[1])[None, None]
    visible = (slot_S >= begin_BT[..., None]) & (slot_S < end_BT[..., None])
    if block is not None:
        both = zip((key_BSGH, value_BSGH), block, strict=True)
        key_BSGH, value_BSGH = (jnp.concatenate([old.astype(new.dtype), new], axis=1) for old, new in both)
        visible = jnp.pad(visible, [(0, 0), (0, 0), (0, block[0].shape[1])], constant_values=True)
    query = _grouped(query_BTQH, key_BSGH.shape[2])
    scale = query_BTQH.shape[-1] ** -0.5
    shape = query.shape[:2] + key_BSGH.shape[1:]
    key = jnp.broadcast_to(key_BSGH[:, None], shape)
    value = jnp.where(visible[..., None, None], value_BSGH[:, None], jnp.zeros((), value_BSGH.dtype))
    score = jnp.einsum(
        "BTGqH,BTSGH->BTGqS", query, key, precision=_precision(query), preferred_element_type=jnp.float32
    )
    weight = _softmax(score * scale, visible[:, :, None, None])
    out = jnp.einsum(
        "BTGqS,BTSGH->BTGqH",
        weight.astype(value.dtype),
        value,
        precision=_precision(value),
        preferred_element_type=jnp.float32,
    )
    out = out.reshape(query_BTQH.shape).astype(query_BTQH.dtype)
    return out if gate_BTQH is None else out * jax.nn.sigmoid(gate_BTQH)


IMPLEMENTATIONS = (
    Implementation("split", split.decode_attention, split.why_not, partial(first_use.attend_rows, _rows)),
    Implementation("rows", _rows, always),
    Implementation("interpret", partial(split.decode_attention, interpret=True), split.misfit),
)


def attend_rows(
    query_BTQH: Float[Array, "B T Q H"],
    key_BSGH: Float[Array, "B S G H"],
    value_BSGH: Float[Array, "B S G H"],
    begin_BT: Int[Array, "B T"],
    end_BT: Int[Array, "B T"],
    *,
    block: tuple[Float[Array, "B P G H"], Float[Array, "B P G H"]] | None = None,
    gate_BTQH: Float[Array, "B T Q H"] | None = None,
    impl: str | None = None,
) -> Float[Array, "B T Q H"]:
    """Attention of each row over the slots it sees; ``Q/G`` query heads per key head.

    ``block``: keys and values that every row sees beside its slots. With ``gate_BTQH`` the output, in its own type, is
    multiplied by ``sigmoid(gate)``. A row that sees nothing is NaN.
    """
    arrays = (query_BTQH, key_BSGH, value_BSGH, *(block or ()))
    facts = dict(
        rows=query_BTQH.shape[1],
        block=block[0].shape[1] if block else 0,
        head=query_BTQH.shape[3],
        types=frozenset(str(x.dtype) for x in arrays),
    )
    call = choose("attention.attend_rows", IMPLEMENTATIONS, impl, **facts).call
    return call(query_BTQH, key_BSGH, value_BSGH, begin_BT, end_BT, block=block, gate_BTQH=gate_BTQH)


def attend(
    query_BTQH: Float[Array, "B T Q H"],
    key_BSGH: Float[Array, "B S G H"],
    value_BSGH: Float[Array, "B S G H"],
    visible_BTS: Bool[Array, "B T S"],
) -> Float[Array, "B T Q H"]:
    """Attention of many queries at once. Slots that no query sees must hold finite values (see ``clean``)."""
    query = _grouped(query_BTQH, key_BSGH.shape[2])
    scale = query_BTQH.shape[-1] ** -0.5
    score = jnp.einsum(
        "BTGqH,BSGH->BGqTS", query, key_BSGH, precision=_precision(query), preferred_element_type=jnp.float32
    )
    weight = _softmax(score * scale, visible_BTS[:, None, None])
    out = jnp.einsum(
        "BGqTS,BSGH->BTGqH",
        weight.astype(value_BSGH.dtype),
        value_BSGH,
        precision=_precision(value_BSGH),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(query_BTQH.shape).astype(query_BTQH.dtype)


def clean(value_BSGH: Float[Array, "B S G H"], live_BS: Bool[Array, "B S"]) -> Float[Array, "B S G H"]:
    """Values with every slot that is not live replaced by zero, by select."""
    return jnp.where(live_BS[..., None, None], value_BSGH, jnp.zeros((), value_BSGH.dtype))
