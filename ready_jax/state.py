"""What a target remembers: committed memory, and what one verify pass would add to it.

The two are different types on purpose. ``commit`` keeps the first rows of a pass and forgets the rest; there is no
rollback, because nothing uncommitted ever reaches a :class:`DecodeState`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from ready_jax.config import FULL, LINEAR, TargetConfig
from ready_jax.kernels import gated_delta
from ready_jax.pytree import register

#: Slots behind the capacity, so that a full verify pass at the very end writes inside the buffer.
SPARE_ROWS = 8


@register
@dataclass(frozen=True)
class DecodeState:
    """Committed memory of ``B`` sequences. Tuples are indexed by absolute layer number; None where a layer has none.

    ``recurrent``: fp32 [B, M, X, Y], read as ``S^T q``; ``conv``: the last W-1 inputs of the convolution
    [B, W-1, C], oldest first; ``key``, ``value``: [B, S, G, H], slots at or past ``length_B`` invisible.
    ``capacity``: tokens each sequence may hold.
    """

    length_B: Int[Array, "B"]
    recurrent: tuple
    conv: tuple
    key: tuple
    value: tuple
    capacity: int = field(metadata=dict(static=True))


@register
@dataclass(frozen=True)
class PendingWrites:
    """What one verify pass produced: nothing here is committed.

    ``recurrent`` is whatever the recurrence's implementation needs to commit a prefix of states and conv inputs;
    ``key``, ``value`` the buffers with the pass written at its absolute positions.
    """

    recurrent: tuple
    key: tuple
    value: tuple


def init_state(config: TargetConfig, batch: int, capacity: int, *, dtype="bfloat16") -> DecodeState:
    """An empty memory for ``batch`` sequences of at most ``capacity`` tokens (prompt and output together).

    Raises ValueError if ``capacity`` exceeds the positions the target was made for.
    """
    if not 0 < capacity <= config.max_position_embeddings:
        raise ValueError(
            f"capacity={capacity} tokens must lie in 1..max_position_embeddings={config.max_position_embeddings}"
        )
    memory = (batch, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    tail = (batch, config.linear_conv_kernel_dim - 1, config.conv_channels)
    slots = (batch, capacity + SPARE_ROWS, config.num_key_value_heads, config.head_dim)

    def per_layer(kind, shape, dtype):
        return tuple(jnp.zeros(shape, dtype) if layer == kind else None for layer in config.layer_types)

    return DecodeState(
        length_B=jnp.zeros((batch,), jnp.int32),
        recurrent=per_layer(LINEAR, memory, jnp.float32),
        conv=per_layer(LINEAR, tail, dtype),
        key=per_layer(FULL, slots, dtype),
        value=per_layer(FULL, slots, dtype),
        capacity=capacity,
    )


def commit(state: DecodeState, pending: PendingWrites, num_B: Int[Array, "B"]) -> DecodeState:
    """Keep the first ``num_B[b]`` rows of a pass and forget the rest; 0 changes nothing at all.

    Bit-identity: committing n rows at once leaves what n single-row passes would.
    """
    layers = [i for i, pending_i in enumerate(pending.recurrent) if pending_i is not None]
    recurrent, conv = list(state.recurrent), list(state.conv)
    if layers:
        states, tails, rows = ([memory[i] for i in layers] for memory in (recurrent, conv, pending.recurrent))
        for i, s, tail in zip(layers, *gated_delta.commit_rows(states, tails, rows, num_B), strict=True):
            recurrent[i], conv[i] = s, tail
    return replace(
        state,
        length_B=state.length_B + num_B,
        recurrent=tuple(recurrent),
        conv=tuple(conv),
        key=pending.key,
        value=pending.value,
    )
