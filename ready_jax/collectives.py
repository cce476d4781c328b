"""What the shards of a model tell each other: the few sums and gathers of tensor-parallel decoding.

``axis`` names the mesh axis that the modules being traced are spread over (``tensor_parallel.py`` sets it). Where it is
None every function here is the plain operation, and a program is the same bit for bit.
"""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp

#: Part of JAX's tracing key: no trace is shared with a program that is not spread.
axis = jax.make_user_context(default_value=None)


def total(part):
    """The sum of all shards' parts, the same bits on every shard and wherever an element lies.

    A ring of more than two adds different places in different orders; then the bits of a row would depend on its
    place in the pass. The sum of two does not depend on their order.
    """
    if axis.value is None:
        return part
    if jax.lax.axis_size(axis.value) == 2:
        return jax.lax.psum(part, axis.value)
    return reduce(jnp.add, jax.lax.all_gather(part, axis.value))


def whole(part, dim: int = -1):
    """All shards' slices side by side, in shard order."""
    if axis.value is None:
        return part
    return jax.lax.all_gather(part, axis.value, axis=dim % part.ndim, tiled=True)


def whole_states(states):
    """Recurrent states by layer with all heads; what is not used costs nothing."""
    if axis.value is None:
        return states
    return tuple(None if s_BMXY is None else whole(s_BMXY, 1) for s_BMXY in states)


def winners(value, index, columns: int):
    """Best values [B, N] and their places among a shard's ``columns``, of all shards, places counted over all."""
    index = index + jax.lax.axis_index(axis.value) * columns
    both = whole(jnp.stack([jax.lax.bitcast_convert_type(value, jnp.int32), index]), 2)
    return jax.lax.bitcast_convert_type(both[0], value.dtype), both[1]


def argmax(logits):
    """The lowest index of the largest fp32 value along the last axis, over the columns of all shards; NaN wins."""
    index = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if axis.value is None:
        return index
    best = jnp.take_along_axis(logits, index[..., None], axis=-1)
    value, place = winners(best.reshape(-1, 1), index.reshape(-1, 1), logits.shape[-1])
    first = jnp.argmax(value, axis=-1, keepdims=True)
    return jnp.take_along_axis(place, first, axis=-1).reshape(index.shape)


def lookup(table_VD, token):
    """Rows of a table whose rows are spread over the shards."""
    if axis.value is None:
        return table_VD[token]
    place = token - jax.lax.axis_index(axis.value) * table_VD.shape[0]
    mine = (place >= 0) & (place < table_VD.shape[0])
    rows = table_VD[jnp.where(mine, place, 0)]
    return total(jnp.where(mine[..., None], rows, jnp.zeros((), rows.dtype)))
