"""Small random models and the plainest possible reference loop, shared by the decoding tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import ready_jax.programs
from ready_jax.baselines import Scripted
from ready_jax.config import FULL, LINEAR, DrafterConfig, ReaderConfig, RopeConfig, TargetConfig
from ready_jax.decode import Limits
from ready_jax.drafter import Drafter
from ready_jax.programs import EXACT, Program
from ready_jax.state import commit, init_state
from ready_jax.target import Target

PAD, EOS, MASK = 94, 95, 96


def target_config(**changes) -> TargetConfig:
    """``TT`` of the field cases: 8 layers L L L F L L L F, hidden 48, vocab 97."""
    fields: dict[str, Any] = dict(
        vocab_size=97, hidden_size=48, intermediate_size=64, layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=6,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4, rms_norm_eps=1e-6,
        rope=RopeConfig(1e4, 8), tie_word_embeddings=False, max_position_embeddings=1024,
    )  # fmt: skip
    return TargetConfig(**(fields | changes))


def drafter_config(target: TargetConfig, **changes) -> DrafterConfig:
    """``TD``: 2 layers, block 7, taps 1, 3, 5, Markov rank 8, borrowed embeddings."""
    fields: dict[str, Any] = dict(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, intermediate_size=40, num_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope=RopeConfig(1e4, 16),
        max_position_embeddings=1024, block_size=7, taps=(1, 3, 5), mask_token_id=MASK, markov_rank=8,
        markov_head_type="vanilla", confidence_head=True, confidence_head_with_markov=True, own_embeddings=False,
        num_target_layers=target.num_layers,
    )  # fmt: skip
    return DrafterConfig(**(fields | changes))


def reader_config(target: TargetConfig, **changes) -> ReaderConfig:
    """``TR``'s reader: states of layers 2 and 6, rank 4."""
    fields: dict[str, Any] = dict(
        rank=4, state_layers=(2, 6), memory_heads=target.linear_num_value_heads, mlp_hidden=16,
        key_dim=target.linear_key_head_dim, value_dim=target.linear_value_head_dim,
    )  # fmt: skip
    return ReaderConfig(**(fields | changes))


def randomised[T](make: Callable[[], T], seed: int, norm: float) -> T:
    """A module with every parameter drawn in NumPy: nothing is compiled, and no zero or one hides a fault.

    ``norm`` is what norm weights scatter around: 0 for the target's zero-centred ones, 1 for plain ones.
    """
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = next(str(key.name) for key in reversed(path) if getattr(key, "name", "value") != "value")
        noise = rng.standard_normal(leaf.shape)
        if name == "a_log_M":
            value = np.log(rng.uniform(0.5, 8, leaf.shape))
        elif name == "dt_bias_M":
            value = rng.uniform(-5, -1, leaf.shape)
        elif "norm" in name or name == "gain_ZJ":
            value = (1.0 if name in ("norm_Y", "gain_ZJ") else norm) + 0.1 * noise
        else:
            fan_in = leaf.shape[-1] if name in ("embed_VD", "w1_VR") else leaf.shape[0] if leaf.ndim == 2 else 10
            value = noise * fan_in**-0.5
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, nnx.eval_shape(make))


@functools.cache
def target(seed: int = 0, dtype: str = "float32", **changes) -> Target:
    config = target_config(**changes)
    return randomised(lambda: Target(config, rngs=nnx.Rngs(0), dtype=dtype), seed, norm=0.0)


@functools.cache
def drafter(
    seed: int = 1,
    dtype: str = "float32",
    reader: bool | ReaderConfig = False,
    config: TargetConfig | None = None,
    **changes,
) -> Drafter:
    config = config or target_config()
    if reader:
        changes["reader"] = reader_config(config) if reader is True else reader
    shape = drafter_config(config, **changes)
    return randomised(lambda: Drafter(shape, rngs=nnx.Rngs(0), dtype=dtype), seed, norm=1.0)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, PAD, length).tolist()


def limits(budget: int | list[int], *, stop=(), draft: int = 7, threshold: float = 0.0, reach: int = 1 << 30, batch=1):
    budgets = [budget] * batch if isinstance(budget, int) else budget
    return Limits(
        budget_B=jnp.array(budgets, jnp.int32),
        stop_L=jnp.array(list(stop) + [-1] * (4 - len(stop)), jnp.int32),
        draft_B=jnp.full((len(budgets),), draft, jnp.int32),
        threshold=jnp.float32(threshold),
        draft_limit=jnp.int32(reach),
    )


def padded(prompts: list[list[int]], width: int = 32) -> tuple[jax.Array, jax.Array]:
    token_BT = np.full((len(prompts), width), PAD, np.int32)
    for row, ids in zip(token_BT, prompts, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(token_BT), jnp.array([len(p) for p in prompts], jnp.int32)


@functools.partial(jax.jit, compiler_options=EXACT)
def _one(model, token_BT, state):
    """One token per row, through a pass of a single row: no speculation code."""
    out, pending = model.verify(token_BT, state)
    return model.unembed(out.hidden_BTD)[:, 0], commit(state, pending, jnp.ones_like(state.length_B))


class Plain:
    """Greedy decoding one token at a time, and the memory after it: ``AR`` and ``STATE`` of the field cases."""

    def __init__(self, model: Target, capacity: int = 256):
        self.model, self.capacity = model, capacity

    def feed(self, tokens: list[int], state=None):
        """Memory and last logits after feeding tokens one by one."""
        state = state or init_state(self.model.config, 1, self.capacity, dtype=self.model.dtype)
        logits = jnp.zeros((1, self.model.config.vocab_size))
        for token in tokens:
            logits, state = _one(self.model, jnp.array([[token]], jnp.int32), state)
        return logits, state

    def greedy(self, ids: list[int], count: int, stop=()) -> list[int]:
        logits, state = self.feed(ids)
        tokens = []
        while True:
            tokens.append(int(jnp.argmax(logits[0])))
            if len(tokens) == count or tokens[-1] in stop:
                return tokens
            logits, state = self.feed(tokens[-1:], state)


def memory_close(found, wanted, bound: float = 1e-4) -> None:
    """Two memories of one sequence: equal lengths; states, conv tails and visible keys and values within a bound."""
    assert found.length_B.tolist() == wanted.length_B.tolist()
    length = int(wanted.length_B[0])
    for name in ("recurrent", "conv", "key", "value"):
        for a, b in zip(getattr(found, name), getattr(wanted, name), strict=True):
            if a is None:
                assert b is None
                continue
            if name in ("key", "value"):
                a, b = a[:, :length], b[:, :length]
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=bound, rtol=0)


def memory_equal(found, wanted, row: int | None = None) -> bool:
    """Bit for bit: lengths, states, conv tails, and the keys and values that are visible."""
    rows = range(found.length_B.shape[0]) if row is None else [row]
    if np.asarray(found.length_B)[list(rows)].tolist() != np.asarray(wanted.length_B)[list(rows)].tolist():
        return False
    for name in ("recurrent", "conv", "key", "value"):
        for a, b in zip(getattr(found, name), getattr(wanted, name), strict=True):
            for r in rows if a is not None else ():
                x, y = np.asarray(a)[r], np.asarray(b)[r]
                if name in ("key", "value"):
                    length = int(wanted.length_B[r])
                    x, y = x[:length], y[:length]
                if not np.array_equal(x.view(np.uint8), y.view(np.uint8)):
                    return False
    return True


def programs() -> tuple[Program, Program]:
    """``begin`` and ``decode`` as a pair compiles them."""
    from ready_jax.pair import _continue, _start

    return Program(_start, static=("capacity", "keep_logits")), Program(_continue)


@functools.cache
def _shared_programs(options: tuple) -> tuple[Program, Program]:
    return programs()


def shared_programs() -> tuple[Program, Program]:
    """Those of all tests that compile alike."""
    return _shared_programs(tuple(ready_jax.programs.OPTIONS.items()))


def generate(
    model, drafting, prompts: list[list[int]], limit: Limits, *,
    capacity=256, rounds=2**31 - 1, keep_logits=False, width=32,
):  # fmt: skip
    """The decode loop on token ids: what ``Pair`` does, without buckets and text."""
    start, go_on = shared_programs()
    token_BT, num_B = padded(prompts, max(width, max(len(p) for p in prompts)))
    run = start(
        target=model, drafter=drafting, token_BT=token_BT, num_B=num_B, limits=limit, capacity=capacity,
        keep_logits=keep_logits,
    )  # fmt: skip
    return go_on(target=model, drafter=drafting, run=run, limits=limit, max_rounds=jnp.int32(rounds))


def tokens(run, row: int = 0) -> list[int]:
    return np.asarray(run.token_BN)[row, : int(run.num_emitted_B[row])].tolist()


def per_round(run, name: str, row: int = 0) -> list[int]:
    return np.asarray(getattr(run, f"{name}_BN"))[row, : int(run.num_rounds_B[row])].tolist()


def script(prompts: list[list[int]], texts: list[list[int]], accepts: list[list[int]], vocab: int = 97) -> Scripted:
    """``SCRIPT(a1, a2, ...)`` per row: knows the continuation, is right as often as asked in each round."""
    width = max(map(len, texts)) + 8
    text_BN = np.array([text + [0] * (width - len(text)) for text in texts], np.int32)
    rounds = max(map(len, accepts))
    accept_BR = np.array([row + [0] * (rounds - len(row)) for row in accepts], np.int32)
    return Scripted.by_round(np.array([len(p) for p in prompts], np.int32), text_BN, accept_BR, vocab)
