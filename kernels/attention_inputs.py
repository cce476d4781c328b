"""What attention of the target needs from its fused projection (Qwen3.5, ``modeling_qwen3_5``).

``fused`` has, per query head, [query | gate], then the keys, then the values, side by side. With
``norm(x) = x / sqrt(mean(x^2) + eps) * (1 + weight)`` (fp32, one cast) and ``turn`` the half-split rotation of the
first ``2 half`` entries of a head (fp32, one cast; the rest passes through),

    query = turn(norm(query))      key = turn(norm(key))      gate, value as they are

``prepare`` also writes the keys and values of the rows at slots ``length ..`` of the buffers.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ready_jax.kernels import attention_inputs_fused as fused
from ready_jax.kernels import first_use
from ready_jax.kernels.dispatch import Implementation, always, choose


def write_rows(
    buffer_BSGH: Float[Array, "B S G H"],
    rows_BTGH: Float[Array, "B T G H"],
    start_B: Int[Array, "B"],
    num_B: Int[Array, "B"],
) -> Float[Array, "B S G H"]:
    """Rows ``0 .. num_B - 1`` at slots ``start_B ..``; the others are dropped.

    Slots past the end of the buffer are dropped too: the caller checks the capacity on the host.
    """
    slots, tokens = buffer_BSGH.shape[1], rows_BTGH.shape[1]
    row_BT = jnp.arange(tokens)[None]
    slot_BT = jnp.where(row_BT < num_B[:, None], start_B[:, None] + row_BT, slots)
    batch_BT = jnp.broadcast_to(jnp.arange(buffer_BSGH.shape[0])[:, None], slot_BT.shape)
    return buffer_BSGH.at[batch_BT, slot_BT].set(rows_BTGH.astype(buffer_BSGH.dtype), mode="drop")


def project(fused_BTI, q_norm_H, k_norm_H, angles, groups: int, eps: float):
    """query [B, T, Q, H], gate [B, T, Q, H], key and value [B, T, G, H] of any number of rows."""
    head, lead = q_norm_H.shape[0], fused_BTI.shape[:2]
    heads = (fused_BTI.shape[-1] // head - 2 * groups) // 2
    query_gate, key, value = jnp.split(fused_BTI, [2 * heads * head, (2 * heads + groups) * head], axis=-1)
    query, gate = jnp.split(query_gate.reshape(lead + (heads, 2 * head)), 2, axis=-1)
    key, value = (x.reshape(lead + (groups, head)) for x in (key, value))
    cos, sin = angles
    half = cos.shape[-1]

    def norm(x, weight_H):
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
        return (x32 * (1.0 + weight_H.astype(jnp.float32)[None, None, None])).astype(x.dtype)

    def turn(x):
        a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
        return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)

    return turn(norm(query, q_norm_H)), gate, turn(norm(key, k_norm_H)), value


def _reference(fused_BTI, q_norm_H, k_norm_H, angles, key_BSGH, value_BSGH, length_B, *, eps):
    query, gate, key, value = project(fused_BTI, q_norm_H, k_norm_H, angles, key_BSGH.shape[2], eps)
    every_B = jnp.full_like(length_B, fused_BTI.shape[1])
    key_BSGH = write_rows(key_BSGH, key, length_B, every_B)
    return query, gate, key_BSGH, write_rows(value_BSGH, value, length_B, every_B)


IMPLEMENTATIONS = (
    Implementation("fused", fused.attention_inputs, fused.why_not, partial(first_use.attention_inputs, _reference)),
    Implementation("reference", _reference, always),
    Implementation("interpret", partial(fused.attention_inputs, interpret=True), fused.misfit),
)


def prepare(
    fused_BTI: Float[Array, "B T I"],
    q_norm_H: Float[Array, "H"],
    k_norm_H: Float[Array, "H"],
    angles: tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]],
    key_BSGH: Float[Array, "B S G H"],
    value_BSGH: Float[Array, "B S G H"],
    length_B: Int[Array, "B"],
    *,
    eps: float,
    impl: str | None = None,
) -> tuple[Array, Array, Array, Array]:
    """query and gate [B, T, Q, H], and the buffers with all ``T`` rows at slots ``length_B ..``.

    ``angles``: cos and sin, fp32. Slots past the end of a buffer are dropped.
    """
    call = choose("attention_inputs", IMPLEMENTATIONS, impl, head=q_norm_H.shape[0]).call
    return tuple(call(fused_BTI, q_norm_H, k_norm_H, angles, key_BSGH, value_BSGH, length_B, eps=eps))
