"""Continuations of many prompts at once, for training loops and their measurement.

Rows of a batch are independent prompts of their own length, left unpadded through ``num_B``; one row is verified per
step, and a batch ends when its last row does. It decodes what ``ready_jax.decode`` decodes, up to rounding: batches
here are wide and a pass has one row.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ready_jax.programs import EXACT
from ready_jax.state import commit, init_state
from ready_jax.verify import is_stop


@partial(jax.jit, static_argnames=("new_tokens",), compiler_options=EXACT)
def generate_rows(target, key, token_BT, num_B, temperature_B, budget_B, stop_L, *, new_tokens: int):
    """(tokens [B, new_tokens], how many, whether a stop token ended them); 0 temperature is exactly greedy.

    Sampling adds temperature-scaled Gumbel noise to the logits before the argmax; ``temperature_B`` None draws none,
    and ``key`` may be None too. The stop token is among the tokens; those past the count are zero.
    """
    batch, tokens = token_BT.shape
    state = init_state(target.config, batch, tokens + new_tokens, dtype=target.dtype)
    out, state = target.prefill(token_BT, state, num_B)

    def pick(step, hidden_B1D):
        logits_BV = target.unembed(hidden_B1D)[:, 0]
        if temperature_B is not None:
            noise_BV = jax.random.gumbel(jax.random.fold_in(key, step), logits_BV.shape)
            logits_BV = jnp.where(temperature_B[:, None] > 0, logits_BV + temperature_B[:, None] * noise_BV, logits_BV)
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def running(carry):
        _, _, _, _, done_B, step = carry
        return (step < new_tokens) & ~jnp.all(done_B)

    def body(carry):
        state, newest_B, token_BN, count_B, done_B, step = carry
        out, pending = target.verify(newest_B[:, None], state)
        state = commit(state, pending, jnp.where(done_B, 0, 1))
        newest_B = jnp.where(done_B, newest_B, pick(step, out.hidden_BTD))
        token_BN = token_BN.at[:, step].set(jnp.where(done_B, 0, newest_B))
        count_B = count_B + jnp.where(done_B, 0, 1)
        done_B = done_B | is_stop(newest_B, stop_L) | (count_B >= budget_B)
        return state, newest_B, token_BN, count_B, done_B, step + 1

    last_B1D = jnp.take_along_axis(out.hidden_BTD, (num_B - 1)[:, None, None], axis=1)
    first_B = pick(0, last_B1D)
    live_B = budget_B > 0
    token_BN = jnp.zeros((batch, new_tokens), jnp.int32).at[:, 0].set(jnp.where(live_B, first_B, 0))
    done_B = ~live_B | is_stop(first_B, stop_L) | (budget_B <= 1)
    carry = (state, first_B, token_BN, live_B.astype(jnp.int32), done_B, jnp.ones((), jnp.int32))
    _, newest_B, token_BN, count_B, _, _ = jax.lax.while_loop(running, body, carry)
    return token_BN, count_B, live_B & is_stop(newest_B, stop_L)


def continuations(
    target, prompts: Sequence[NDArray[np.integer]], *, width: int, new_tokens: int, batch: int = 1024
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    """Greedy continuations [prompts, new_tokens], their lengths (stop token included) and whether they stopped.

    Every prompt has at most `width` tokens. Tokens past a length are zero.
    """
    longest = max(map(len, prompts))
    if longest > width:
        raise ValueError(f"a prompt has {longest} tokens, at most width={width} are decoded")
    stop_L = jnp.array(target.config.eos_token_ids or (-1,), jnp.int32)
    parts = []
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        token_BT = np.zeros((batch, width), np.int32)
        num_B, budget_B = np.ones(batch, np.int32), np.zeros(batch, np.int32)
        for row, prompt in enumerate(some):
            token_BT[row, : len(prompt)] = prompt
            num_B[row], budget_B[row] = len(prompt), new_tokens
        found = generate_rows(target, None, token_BT, num_B, None, budget_B, stop_L, new_tokens=new_tokens)
        parts.append([np.asarray(x)[: len(some)] for x in found])
    token_BN, length_B, stopped_B = (np.concatenate(x) for x in zip(*parts, strict=True))
    return token_BN, length_B, stopped_B
