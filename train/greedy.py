"""Greedy continuations of many prompts at once: one row per step, for training loops and their measurement.

It decodes what `ready_jax.decode` decodes, up to rounding: batches here are wide and a pass has one row.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ready_jax.state import commit, init_state


@partial(jax.jit, static_argnames="new_tokens")
def _continue(target, token_BT, num_B, new_tokens: int):
    batch, width = token_BT.shape
    stop_L = jnp.asarray(target.config.eos_token_ids)
    state = init_state(target.config, batch, width + new_tokens, dtype="bfloat16")
    out, state = target.prefill(token_BT, state, num_B)

    def pick(hidden_B1D):
        return jnp.argmax(target.unembed(hidden_B1D)[:, 0], axis=-1).astype(jnp.int32)

    def running(carry):
        _, _, _, length_B, step = carry
        return (step < new_tokens) & jnp.any(length_B == 0)

    def body(carry):
        state, newest_B, token_BN, length_B, step = carry
        token_BN = jax.lax.dynamic_update_slice(token_BN, newest_B[:, None], (0, step))
        stopped_B = jnp.any(newest_B[:, None] == stop_L[None], axis=1)
        length_B = jnp.where((length_B == 0) & stopped_B, step + 1, length_B)
        out, pending = target.verify(newest_B[:, None], state)
        return commit(state, pending, jnp.ones_like(length_B)), pick(out.hidden_BTD), token_BN, length_B, step + 1

    first_B = pick(jnp.take_along_axis(out.hidden_BTD, (num_B - 1)[:, None, None], axis=1))
    token_BN = jnp.zeros((batch, new_tokens), jnp.int32)
    carry = (state, first_B, token_BN, jnp.zeros((batch,), jnp.int32), jnp.zeros((), jnp.int32))
    _, _, token_BN, length_B, _ = jax.lax.while_loop(running, body, carry)
    return token_BN, length_B


def continuations(
    target, prompts: Sequence[NDArray[np.integer]], *, width: int, new_tokens: int, batch: int = 1024
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    """Greedy continuations [prompts, new_tokens], their lengths (stop token included) and whether they stopped.

    `target` is a bf16 module; every prompt has at most `width` tokens. Tokens past a length are zero.
    """
    longest = max(map(len, prompts))
    if longest > width:
        raise ValueError(f"a prompt has {longest} tokens, at most width={width} are decoded")
    token_parts, length_parts = [], []
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        token_BT = np.zeros((batch, width), np.int32)
        num_B = np.ones(batch, np.int32)
        for row, prompt in enumerate(some):
            token_BT[row, : len(prompt)] = prompt
            num_B[row] = len(prompt)
        token_BN, length_B = _continue(target, token_BT, num_B, new_tokens)
        token_parts.append(np.asarray(token_BN)[: len(some)])
        length_parts.append(np.asarray(length_B)[: len(some)])
    token_BN, length_B = np.concatenate(token_parts), np.concatenate(length_parts)
    stopped_B = length_B > 0
    length_B = np.where(stopped_B, length_B, new_tokens).astype(np.int32)
    return np.where(np.arange(new_tokens)[None] < length_B[:, None], token_BN, 0), length_B, stopped_B
