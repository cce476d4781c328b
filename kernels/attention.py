"""Softmax attention of grouped query heads over a key/value buffer.

``attend_rows`` is decoding: each of the few query rows is a batch entry of its own, so that its rounding depends
neither on its place in the pass nor on its neighbours, and every slot a row may not see is dropped by select before
it meets any arithmetic (a rejected row may hold anything, NaN included). ``attend`` is prefill and training: one
product for all queries, masked before the softmax. Scores, softmax and accumulation are fp32 in both; probabilities
meet the values in the values' type.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def _precision(x):
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _softmax(score, visible):
    score = jnp.where(visible, score, -jnp.inf)
    top = jnp.max(score, axis=-1, keepdims=True)
    weight = jnp.exp(score - jnp.where(jnp.isfinite(top), top, 0.0))
    return weight / jnp.sum(weight, axis=-1, keepdims=True)


def _grouped(query_BTQH, heads):
    return query_BTQH.reshape(query_BTQH.shape[:2] + (heads, -1, query_BTQH.shape[-1]))


def attend_rows(
    query_BTQH: Float[Array, "B T Q H"],
    key_BSGH: Float[Array, "B S G H"],
    value_BSGH: Float[Array, "B S G H"],
    visible_BTS: Bool[Array, "B T S"],
) -> Float[Array, "B T Q H"]:
    """Attention of each row over the slots it sees; scale ``H^-1/2``, ``Q/G`` query heads per key head."""
    query = _grouped(query_BTQH, key_BSGH.shape[2])
    scale = query_BTQH.shape[-1] ** -0.5
    shape = query.shape[:2] + key_BSGH.shape[1:]
    key = jnp.broadcast_to(key_BSGH[:, None], shape)
    value = jnp.where(visible_BTS[..., None, None], value_BSGH[:, None], jnp.zeros((), value_BSGH.dtype))
    score = jnp.einsum(
        "BTGqH,BTSGH->BTGqS", query, key, precision=_precision(query), preferred_element_type=jnp.float32
    )
    weight = _softmax(score * scale, visible_BTS[:, :, None, None])
    out = jnp.einsum(
        "BTGqS,BTSGH->BTGqH",
        weight.astype(value.dtype),
        value,
        precision=_precision(value),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(query_BTQH.shape).astype(query_BTQH.dtype)


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
