"""Softmax attention of grouped query heads over a key/value buffer: ``softmax(q K^T H^-1/2) V``.

``attend_rows`` is decoding: a few query rows, each over the slots [begin, end) of the buffer, then over the rows of
``block``, if given, which every query sees. The bits of a row depend neither on its place in the pass nor on its
neighbours, and every slot a row may not see is dropped by select before it meets any arithmetic (a rejected row may
hold anything, NaN included). ``attend_ranges`` is prefill and training: many query rows, each over its own range;
``attend`` is its plain form, one product for all queries, masked before softmax.
Scores, softmax and accumulation are fp32 in all; probabilities meet the values in the values' type.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ready_jax.kernels import decode_attention as split
from ready_jax.kernels import first_use
from ready_jax.kernels import prefill_attention as flash
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


ROWS = (
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
    call = choose("attention.attend_rows", ROWS, impl, **facts).call
    return call(query_BTQH, key_BSGH, value_BSGH, begin_BT, end_BT, block=block, gate_BTQH=gate_BTQH)


def attend(
    query_BTQH: Float[Array, "B T Q H"],
    key_BSGH: Float[Array, "B S G H"],
    value_BSGH: Float[Array, "B S G H"],
    visible_BTS: Bool[Array, "B T S"],
) -> Float[Array, "B T Q H"]:
    """Attention of many queries at once. Slots that no query sees must hold finite values."""
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


#: Queries that meet the buffer at once where there is no kernel.
QUERY_BLOCK = 64


def _ranges(begin_BT, end_BT, slots):
    slot = jnp.arange(slots)[None, None]
    return (slot >= begin_BT[..., None]) & (slot < end_BT[..., None])


def _clean(value_BSGH, end_BT):
    """Zero, by select, where no row may look."""
    live_BS = jnp.arange(value_BSGH.shape[1])[None] < jnp.max(end_BT, axis=1, keepdims=True)
    return jnp.where(live_BS[..., None, None], value_BSGH, jnp.zeros((), value_BSGH.dtype))


def _whole(query_BTQH, key_BSGH, value_BSGH, begin_BT, end_BT):
    """All scores at once; differentiable."""
    seen_BTS = _ranges(begin_BT, end_BT, key_BSGH.shape[1])
    return attend(query_BTQH, key_BSGH, _clean(value_BSGH, end_BT), seen_BTS)


def _blocks(query_BTQH, key_BSGH, value_BSGH, begin_BT, end_BT):
    """Blocks of queries, so that scores do not grow with the number of rows."""
    tokens, slots = query_BTQH.shape[1], key_BSGH.shape[1]
    blocks = -(-tokens // QUERY_BLOCK)
    clean_BSGH = _clean(value_BSGH, end_BT)

    def padded(x):
        return jnp.pad(x, [(0, 0), (0, blocks * QUERY_BLOCK - tokens)] + [(0, 0)] * (x.ndim - 2))

    begin_BT, end_BT = padded(begin_BT), padded(end_BT)

    def block(i, rows_BTQH):
        part = partial(jax.lax.dynamic_slice_in_dim, start_index=i * QUERY_BLOCK, slice_size=QUERY_BLOCK, axis=1)
        out_BTQH = attend(part(rows_BTQH), key_BSGH, clean_BSGH, _ranges(part(begin_BT), part(end_BT), slots))
        return jax.lax.dynamic_update_slice_in_dim(rows_BTQH, out_BTQH, i * QUERY_BLOCK, axis=1)

    # Outputs take the place of their queries: XLA makes a stacked result's buffer before the first layer and keeps
    # those of all layers till used.
    return jax.lax.fori_loop(0, blocks, block, padded(query_BTQH))[:, :tokens]


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(query_BTQH, key_BSGH, value_BSGH, begin_BT, end_BT, interpret=False):
    return flash.prefill_attention(query_BTQH, key_BSGH, value_BSGH, begin_BT, end_BT, interpret=interpret)


def _flash_forward(*operands):
    return _flash(*operands), operands[:5]


def _flash_backward(_, operands, gradient):
    *arrays, begin_BT, end_BT = operands
    _, pull = jax.vjp(lambda q, k, v: _whole(q, k, v, begin_BT, end_BT), *arrays)
    return *pull(gradient), None, None


_flash.defvjp(_flash_forward, _flash_backward)


def _in_place(*, differentiable: bool = False, **_: object) -> str | None:
    return "its loop updates in place; gradients need another form" if differentiable else None


RANGES = (
    Implementation("flash", _flash, flash.why_not, partial(first_use.attend_ranges, _whole)),
    Implementation("blocks", _blocks, _in_place),
    Implementation("whole", _whole, always),
    Implementation("interpret", partial(_flash, interpret=True), flash.misfit),
)
IMPLEMENTATIONS = {"attend_rows": ROWS, "attend_ranges": RANGES}


def attend_ranges(
    query_BTQH: Float[Array, "B T Q H"],
    key_BSGH: Float[Array, "B S G H"],
    value_BSGH: Float[Array, "B S G H"],
    begin_BT: Int[Array, "B T"],
    end_BT: Int[Array, "B T"],
    *,
    differentiable: bool = False,
    impl: str | None = None,
) -> Float[Array, "B T Q H"]:
    """Attention of row t over the slots [begin, end) of the buffer, for any number of rows.

    Slots at or past every row's end may hold anything. A row that sees nothing is undefined.
    """
    types = frozenset(str(x.dtype) for x in (query_BTQH, key_BSGH, value_BSGH))
    facts = dict(head=query_BTQH.shape[3], types=types, differentiable=differentiable)
    call = choose("attention.attend_ranges", RANGES, impl, **facts).call
    return call(query_BTQH, key_BSGH, value_BSGH, begin_BT, end_BT)


def attend_blocks(
    query_BOQH: Float[Array, "B O Q H"],
    key_BTGH: Float[Array, "B T G H"],
    value_BTGH: Float[Array, "B T G H"],
    key_BOGH: Float[Array, "B O G H"],
    value_BOGH: Float[Array, "B O G H"],
    visible_BAT: Bool[Array, "B A T"],
) -> Float[Array, "B O Q H"]:
    """Attention of ``A`` blocks of ``O / A`` rows: each sees the ``T`` slots that its mask allows and all of itself.

    Blocks never see each other, so their own scores are small; one softmax runs over slots and block.
    """
    batch, rows, heads, width = query_BOQH.shape
    groups, count = key_BTGH.shape[2], visible_BAT.shape[1]
    query = query_BOQH.reshape(batch, count, rows // count, groups, -1, width)
    own_key, own_value = (x.reshape(batch, count, -1, groups, width) for x in (key_BOGH, value_BOGH))
    product = partial(jnp.einsum, precision=_precision(query), preferred_element_type=jnp.float32)
    far = product("BAPGqH,BTGH->BAGqPT", query, key_BTGH.astype(query.dtype))
    near = product("BAPGqH,BASGH->BAGqPS", query, own_key)
    own = jnp.ones((batch, count, own_key.shape[2]), bool)
    seen = jnp.concatenate([visible_BAT, own], axis=-1)[:, :, None, None, None]
    weight = _softmax(jnp.concatenate([far, near], axis=-1) * width**-0.5, seen).astype(value_BOGH.dtype)
    slots = key_BTGH.shape[1]
    out = product("BAGqPT,BTGH->BAPGqH", weight[..., :slots], value_BTGH.astype(weight.dtype))
    out += product("BAGqPS,BASGH->BAPGqH", weight[..., slots:], own_value)
    return out.reshape(batch, rows, heads, width).astype(query_BOQH.dtype)
