"""Attention of a few query rows over a long key/value buffer, split over the slots (flash-decoding, Dao et al. 2023).

Two kernels. The first gives, per split of the slots and per row i with scores ``x_s = q_i k_s H^-1/2 log2 e``,

    top_i = max_s x_s      sum_i = sum_s 2^(x_s - top_i)      out_i = sum_s 2^(x_s - top_i) v_s

and the second adds the splits in the order of their slots. What makes the bits of a row its own:

* splits and the chunks inside begin at absolute positions, whatever the length, the capacity or the pass: short
  splits first, that a short text keeps many programs busy, then long ones, since every split costs a partial sum;
* the tile of queries is always that of ``MAX_ROWS`` rows, so one row and eight meet the same tensor core instructions;
* slots that a row may not see are dropped by select. Rows share the tile of values, and 0 x NaN is NaN: so chunks that
  not every row sees whole meet values whose non-finite entries are zeroed, and rows that do see one become NaN;
* a chunk that a row sees nothing of rescales by 2^0 and adds 0; a split it sees nothing of is not read.

Every query head of one key head is in the tile, so keys and values are read once. Splits that no row sees exit at once.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ready_jax.kernels.pallas_triton import WHOLE, fma, gpu_only, kernel_call, load, store

#: Query rows, and rows of a block, that one call takes.
MAX_ROWS = 8
#: Splits that the second kernel adds at once, and columns of one of its programs.
FAN_IN, COLUMNS = 32, 128


class Splits(NamedTuple):
    """Splits of ``short`` slots up to slot ``border``, of ``long`` slots from there on; multiples of the chunk."""

    short: int = 64
    long: int = 640
    border: int = 2048

    def place(self, slot):
        """The split that holds a slot."""
        near, far = jnp.clip(slot, 0, self.border), jnp.maximum(slot - self.border, 0)
        return jax.lax.div(near, self.short) + jax.lax.div(far, self.long)

    def start(self, place):
        """The first slot of a split; split ``place`` ends where the next begins."""
        few = self.border // self.short
        return jnp.minimum(place, few) * self.short + jnp.maximum(place - few, 0) * self.long

    def count(self, slots: int) -> int:
        """Splits of a buffer."""
        return pl.cdiv(min(slots, self.border), self.short) + pl.cdiv(max(slots - self.border, 0), self.long)


SPLITS = Splits()


def why_not(**facts) -> str | None:
    """Needs a GPU, at most 8 rows (and block rows), a power of two as head width, and one type of operands."""
    return gpu_only(**facts) or misfit(**facts)


def misfit(*, rows: int = 1, block: int = 0, head: int = 16, types: frozenset = frozenset(), **_: object) -> str | None:
    """What about the operands rules the kernel out on any platform; None if nothing."""
    if max(rows, block) > MAX_ROWS:
        return f"{max(rows, block)} rows; the tile of queries or block rows has {MAX_ROWS}"
    if not 16 <= head <= 256 or head & (head - 1):
        return f"head width {head}; needs a power of two from 16 to 256"
    if len(types) > 1 or not types <= {"bfloat16", "float32"}:
        return f"operands are {' and '.join(sorted(types))}; needs all bfloat16 or all float32"
    return None


def _dot(a, b):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None  # the default is TF32
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _step(query, key, value, seen, carry, *, scale, interpret):
    """One chunk joins the running (top, sum, out); ``seen`` [rows, slots] is None where every row sees all of it."""
    top, total, out = carry
    score = _dot(query[0], key[0].T)
    for a, b in zip(query[1:], key[1:], strict=True):
        score += _dot(a, b.T)
    masked = score if seen is None else jnp.where(seen, score, -jnp.inf)
    new = jnp.maximum(top, jnp.max(masked, axis=1) * scale)
    base = jnp.where(new == -jnp.inf, 0.0, new)
    weight = jnp.exp2(fma(score, scale, -base[:, None], interpret=interpret))
    if seen is not None:
        finite = jnp.abs(value.astype(jnp.float32)) < jnp.inf
        broken = jnp.max(jnp.where(finite, 0, 1), axis=1) > 0
        weight = jnp.where(seen, jnp.where(broken[None], jnp.nan, weight), 0.0)
        value = jnp.where(finite, value, jnp.zeros_like(value))
    keep = jnp.exp2(top - base)
    total = fma(total, keep, jnp.sum(weight, axis=1), interpret=interpret)
    return new, total, out * keep[:, None] + _dot(weight.astype(value.dtype), value)


def _split_body(*refs, rows, block, group, splits, chunk, tile, width, scale, peel, interpret):
    """Program (key head and columns of the values, split, sequence); split 0 is the block, if there is one."""
    begin_ref, end_ref, query_ref, key_ref, value_ref, *block_refs, top_ref, sum_ref, out_ref = refs
    slots, head = key_ref.shape[1], key_ref.shape[3]
    parts = head // width
    g, part, b = pl.program_id(0) // parts, pl.program_id(0) % parts, pl.program_id(2)
    place = pl.num_programs(1) - 1 - pl.program_id(1)  # the long splits begin first
    begin, end = ([ref[b, t] for t in range(rows)] for ref in (begin_ref, end_ref))
    first_begin, last_begin = (functools.reduce(f, begin) for f in (jnp.minimum, jnp.maximum))
    first_end, last_end = (functools.reduce(f, end) for f in (jnp.minimum, jnp.maximum))
    row = jnp.arange(tile)
    token, live = row // group, row < rows * group
    in_pass = (token * key_ref.shape[2] + g) * group + row % group
    column, columns = jnp.arange(width), pl.ds(part * width, width)

    def run(chunks):
        """``chunks(query, carry)`` from an empty carry, stored."""
        query = [
            load(query_ref.at[b, in_pass[:, None], i * width + column[None]], mask=live[:, None], other=0.0)
            for i in range(parts)
        ]
        empty = jnp.full((tile,), -jnp.inf, jnp.float32), jnp.zeros((tile,), jnp.float32)
        top, total, out = chunks(query, (*empty, jnp.zeros((tile, width), jnp.float32)))
        store(out_ref.at[b, g, place, pl.ds(0, tile), columns], out, mask=live[:, None])
        store(top_ref.at[b, g, place, pl.ds(0, tile)], top, mask=live)
        store(sum_ref.at[b, g, place, pl.ds(0, tile)], total, mask=live)

    step = functools.partial(_step, scale=scale, interpret=interpret)
    if block:

        @pl.when(place == 0)
        def _():
            here = jnp.arange(16) < block
            from_block = [
                load(block_refs[0].at[b, pl.ds(0, 16), g, pl.ds(i * width, width)], mask=here[:, None], other=0.0)
                for i in range(parts)
            ]
            value = load(block_refs[1].at[b, pl.ds(0, 16), g, columns], mask=here[:, None], other=0.0)
            seen = jnp.broadcast_to(here[None], (tile, 16))
            run(lambda query, carry: step(query, from_block, value, seen, carry))

    offset = 1 if block else 0
    start, stop = splits.start(place - offset), splits.start(place - offset + 1)
    low, high = jnp.maximum(start, first_begin), jnp.minimum(jnp.minimum(stop, last_end), slots)

    @pl.when((place >= offset) & (low < high))
    def _():
        begins, ends = (load(ref.at[b, token], mask=live, other=0) for ref in (begin_ref, end_ref))

        def join(c, carry, query, whole):
            slot = c * chunk + jnp.arange(chunk)
            here = slot < high
            at, mask, other = pl.ds(c * chunk, chunk), *((None, None) if whole else (here[:, None], 0.0))
            key = [load(key_ref.at[b, at, g, pl.ds(i * width, width)], mask=mask, other=other) for i in range(parts)]
            value = load(value_ref.at[b, at, g, columns], mask=mask, other=other)
            seen = None if whole else (slot[None] >= begins[:, None]) & (slot[None] < ends[:, None])
            return step(query, key, value, seen, carry)

        def chunks(query, carry):
            first, last = low // chunk, pl.cdiv(high, chunk)
            inner = jnp.clip(pl.cdiv(last_begin, chunk), first, last)
            outer = jnp.clip(first_end // chunk, inner, last)
            peeled = (first, inner, False), (inner, outer, True), (outer, last, False)
            for lower, upper, whole in peeled if peel else ((first, last, False),):
                body = functools.partial(join, query=query, whole=whole)
                carry = jax.lax.fori_loop(lower, upper, body, carry)
            return carry

        run(chunks)


def _sum_body(*refs, block, group, splits, width, gated, interpret):
    """Program (query head and columns, row, sequence): the splits that the row sees, in the order of their slots."""
    begin_ref, end_ref, top_ref, sum_ref, part_ref, *gate_ref, out_ref = refs
    parts = out_ref.shape[2] // width
    h, t, b = pl.program_id(0) // parts, pl.program_id(1), pl.program_id(2)
    columns = (pl.program_id(0) % parts) * width + jnp.arange(width)
    g, row = h // group, t * group + h % group
    at = b, t * (pl.num_programs(0) // parts) + h, columns
    gate = load(gate_ref[0].at[at]).astype(jnp.float32) if gated else None
    offset, places = (1 if block else 0), top_ref.shape[2]
    begin, end = jnp.maximum(begin_ref[b, t], 0), end_ref[b, t]
    first = splits.place(begin) + offset
    last = jnp.where(begin < end, jnp.minimum(splits.place(end - 1) + 1 + offset, places), first)

    def join(i, carry):
        top, total, out = carry
        place = i * FAN_IN + offset + jnp.arange(FAN_IN)
        seen = (place >= first) & (place < last)
        tops = load(top_ref.at[b, g, place, row], mask=seen, other=-jnp.inf)
        sums = load(sum_ref.at[b, g, place, row], mask=seen, other=0.0)
        parts = load(part_ref.at[b, g, place[:, None], row, columns[None]], mask=seen[:, None], other=0.0)
        new = jnp.maximum(top, jnp.max(tops))
        base = jnp.where(new == -jnp.inf, 0.0, new)
        weight, keep = jnp.exp2(tops - base), jnp.exp2(top - base)
        total = total * keep + jnp.sum(weight * sums)
        return new, total, fma(out, keep, jnp.sum(weight[:, None] * parts, axis=0), interpret=interpret)

    top, total, out = jnp.float32(-jnp.inf), jnp.float32(0), jnp.zeros((width,), jnp.float32)
    if block:
        top, total, out = top_ref[b, g, 0, row], sum_ref[b, g, 0, row], load(part_ref.at[b, g, 0, row, columns])
    lower, upper = (first - offset) // FAN_IN, pl.cdiv(last - offset, FAN_IN)
    _, total, out = jax.lax.fori_loop(lower, upper, join, (top, total, out))
    out = out / total
    out = jnp.where(out == 0, 0.0, out).astype(out_ref.dtype)  # one sign of zero, however many empty chunks were added
    if gate is not None:
        out = out * (1 / (1 + jnp.exp(-gate))).astype(out.dtype)
    store(out_ref.at[at], out)


def decode_attention(
    query_BTQH: Float[Array, "B T Q H"],
    key_BSGH: Float[Array, "B S G H"],
    value_BSGH: Float[Array, "B S G H"],
    begin_BT: Int[Array, "B T"],
    end_BT: Int[Array, "B T"],
    *,
    block: tuple[Float[Array, "B P G H"], Float[Array, "B P G H"]] | None = None,
    gate_BTQH: Float[Array, "B T Q H"] | None = None,
    splits: Splits = SPLITS,
    chunk: int | None = None,
    num_warps: int | None = None,
    num_stages: int = 3,
    peel: bool = True,
    interpret: bool = False,
) -> Float[Array, "B T Q H"]:
    """See ``kernels/attention.py``. ``chunk``: slots that meet the tensor cores at once.

    ``peel``: chunks that every row sees whole get a loop without masks; the bits are the same.
    """
    batch, rows, heads, head = query_BTQH.shape
    slots, groups = key_BSGH.shape[1:3]
    group = heads // groups
    tile = max(16, pl.next_power_of_2(MAX_ROWS * group))
    exact = query_BTQH.dtype == jnp.float32
    width = min(head, 32) if exact else head  # products without tensor cores keep their operands in registers
    chunk = chunk or (16 if exact else 32)
    num_warps = num_warps or (8 if exact else 4)
    places = splits.count(slots) + (1 if block else 0)
    query, block_rows = query_BTQH.reshape(batch, rows * heads, head), block[0].shape[1] if block else 0
    stats = jax.ShapeDtypeStruct((batch, groups, places, tile), jnp.float32)
    body = functools.partial(
        _split_body, rows=rows, block=block_rows, group=group, splits=splits, chunk=chunk, tile=tile, width=width,
        scale=head**-0.5 * math.log2(math.e), peel=peel, interpret=interpret,
    )  # fmt: skip
    operands = (begin_BT, end_BT, query, key_BSGH, value_BSGH, *(block or ()))
    parts = kernel_call(
        body,
        name="decode_attention_splits",
        grid=(groups * (head // width), places, batch),
        out_shape=[stats, stats, jax.ShapeDtypeStruct((*stats.shape, head), jnp.float32)],
        in_specs=[WHOLE] * len(operands),
        out_specs=[WHOLE] * 3,
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
    )(*operands)
    columns = min(head, COLUMNS)
    gate = () if gate_BTQH is None else (gate_BTQH.reshape(query.shape),)
    (out,) = kernel_call(
        functools.partial(
            _sum_body,
            block=block_rows,
            group=group,
            splits=splits,
            width=columns,
            gated=bool(gate),
            interpret=interpret,
        ),
        name="decode_attention_sum",
        grid=(heads * (head // columns), rows, batch),
        out_shape=[jax.ShapeDtypeStruct(query.shape, query.dtype)],
        in_specs=[WHOLE] * (5 + len(gate)),
        out_specs=[WHOLE],
        num_warps=4,
        interpret=interpret,
    )(begin_BT, end_BT, *parts, *gate)
    return out.reshape(query_BTQH.shape)
