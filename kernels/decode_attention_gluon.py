"""The first kernel of `decode_attention.py` for Hopper, in Gluon through jax-triton; the second is shared.

The Pallas kernel has a program for every split: at long contexts most of the bytes are read by two thirds of the
processors, each waiting for memory between its chunks. Here every processor has one program with about as many splits
as the others, which reads ahead without end: through TMA into 192 KiB of shared memory. What makes the bits of a row
its own is the same: splits and chunks at absolute positions, one tile of 64 query rows, sums in the order of slots.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp

from ready_jax.kernels import gluon
from ready_jax.kernels.decode_attention import MAX_ROWS, Splits, add_splits
from ready_jax.kernels.pallas_triton import gpu_only

#: Rows of a tensor core product, head width, and processors: programs of a launch, if the batch allows.
TILE, HEAD, PROGRAMS = 64, 256, 132
SPLITS = Splits(short=64, long=512, border=2048)
#: What a partial sum costs a program, in slots.
COST = 16


def why_not(*, rows=1, block=0, group=1, head=HEAD, types=frozenset({"bfloat16"}), **facts) -> str | None:
    reason = gpu_only(**facts)
    if reason is not None:
        return reason
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    if not re.search(r"\bG?H\d00\b", device.device_kind):
        return f"the device is {device.device_kind}; needs compute capability 9.0 (H100, H200): it multiplies by wgmma"
    if block:
        return "it has no block rows"
    if rows > MAX_ROWS or group * MAX_ROWS > TILE:
        return f"{rows} rows of {group} query heads a key head; the tile holds {MAX_ROWS} rows of {TILE // MAX_ROWS}"
    if head != HEAD:
        return f"head width {head}; needs {HEAD}"
    if types != {"bfloat16"}:
        return f"operands are {' and '.join(sorted(types))}; needs all bfloat16"
    return gluon.missing()


def shares(begin_BT, end_BT, slots: int, count: int, *, splits: Splits, chunk: int, cost: int):
    """Of every program: its first split, its first chunk, how many, and the range of slots that every row sees.

    The first program has the last splits. Each has one where they suffice; else what ends within a window of the cost,
    counted from the end: then no program has two long splits before all have one. Which program adds up a split
    changes no bit. All layers of a model ask the same, so XLA computes it once.
    """
    first_begin_B, last_begin_B, first_end_B, last_end_B = (  # slices, not reductions: so all of it is one kernel
        functools.reduce(take, list(x_BT.T)) for x_BT in (begin_BT, end_BT) for take in (jnp.minimum, jnp.maximum)
    )
    low_B, high_B = jnp.maximum(first_begin_B, 0), jnp.minimum(last_end_B, slots)
    first_B, last_B = splits.place(low_B), splits.place(high_B - 1) + 1
    priced = Splits(splits.short + cost, splits.long + cost, splits.border // splits.short * (splits.short + cost))
    cost_B = high_B + cost * last_B
    window_B = jax.lax.div(cost_B - priced.start(first_B) + count - 1, count)
    low_B1, high_B1, first_B1, last_B1, cost_B1, window_B1 = (
        x[:, None] for x in (low_B, high_B, first_B, last_B, cost_B, window_B)
    )
    share_N = jnp.arange(count, dtype=jnp.int32)[None]
    place_BN = priced.place(cost_B1 - (share_N + 1) * window_B1)
    stop_BN = jnp.where(share_N == 0, last_B1, priced.place(cost_B1 - share_N * window_B1))
    few_B1 = last_B1 - first_B1 <= count
    place_BN = jnp.maximum(jnp.where(few_B1, last_B1 - share_N - 1, place_BN), first_B1)
    stop_BN = jnp.where(few_B1, last_B1 - share_N, stop_BN)
    start_BN = jax.lax.div(jnp.maximum(splits.start(place_BN), low_B1), chunk)
    end_BN = jax.lax.div(jnp.minimum(splits.start(stop_BN), high_B1) + chunk - 1, chunk)
    chunks_BN = jnp.where(low_B1 < high_B1, end_BN - start_BN, 0)
    seen = (jnp.broadcast_to(x[:, None], place_BN.shape) for x in (last_begin_B, first_end_B))
    return jnp.stack([place_BN, start_BN, chunks_BN, *seen], axis=-1)


def decode_attention(
    query_BTQH, key_BSGH, value_BSGH, begin_BT, end_BT, *, block=None, gate_BTQH=None,
    splits=SPLITS, chunk=64, stages=3, programs=PROGRAMS, cost=COST, fan_in=64, sum_warps=4,
):  # fmt: skip
    """See ``kernels/attention.py``. ``chunk``: slots of one product; ``stages``: chunks in shared memory."""
    from ready_jax.kernels import decode_attention_gluon_source as source

    assert block is None
    batch, rows, heads, head = query_BTQH.shape
    slots, groups = key_BSGH.shape[1:3]
    count, places = max(1, programs // (batch * groups)), splits.count(slots)
    keys, values = (
        gluon.tensor(x.reshape(batch * slots, groups * head), (chunk, head), source.SHARED)
        for x in (key_BSGH, value_BSGH)
    )
    stats = jax.ShapeDtypeStruct((batch, groups, places, TILE), jnp.float32)
    share_BN = shares(begin_BT, end_BT, slots, count, splits=splits, chunk=chunk, cost=cost)
    parts = gluon.call()(
        share_BN, query_BTQH, keys, values, begin_BT, end_BT,
        kernel=source.splits, out_type=[stats, stats, jax.ShapeDtypeStruct((*stats.shape, head), jnp.float32)],
        grid=(count, groups, batch), num_warps=4,
        T=rows, Q=heads, G=groups, SLOTS=slots, PLACES=places, SHORT=splits.short, LONG=splits.long,
        BORDER=splits.border, CHUNK=chunk, STAGES=stages, SCALE=head**-0.5 * math.log2(math.e),
    )  # fmt: skip
    query = query_BTQH.reshape(batch, rows * heads, head)
    out = add_splits(
        query, begin_BT, end_BT, parts, gate_BTQH, heads=heads, splits=splits, fan_in=fan_in, num_warps=sum_warps
    )
    return out.reshape(query_BTQH.shape)
