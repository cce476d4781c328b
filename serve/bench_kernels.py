"""Times of single operations at a model's shapes, through the doors of `kernels/` and the reader's two calls.

Each runs over distinct buffers (more than a cache holds, where the shapes are large) inside one compiled loop; the
time is the slope over the number of turns. "Unfused" is the plain implementation, chosen as on a CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from ready_jax.config import DrafterConfig
from ready_jax.configs.qwen3_8_27b import Preset
from ready_jax.deltanet import fused_columns
from ready_jax.kernels import attention, dispatch, gated_delta
from ready_jax.programs import Program
from ready_jax.random_weights import random_reader
from ready_jax.reader import StateReader

SETS, SLOTS = 16, 4  # distinct states and readers; distinct key/value buffers
ROUNDS = 4  # times that a step goes over fewer buffers, so that the loop around it weighs little
REPEATS = 32


def slope(call: Callable[[int], Any], turns: tuple[int, int], windows: int) -> tuple[float, float]:
    """Seconds per turn, (t(high) - t(low)) / (high - low): the median over windows, and their range."""
    for count in turns:  # compiles, and lets XLA record its graphs
        jax.block_until_ready(call(count))
    found = []
    for _ in range(windows):
        times = []
        for count in turns:
            start = time.perf_counter()
            jax.block_until_ready(call(count))
            times.append(time.perf_counter() - start)
        found.append((times[1] - times[0]) / (turns[1] - turns[0]))
    return statistics.median(found), max(found) - min(found)


def normals(seed: int, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


class Kernels:
    """The microbenchmarks of one preset; every method returns seconds per operation."""

    def __init__(
        self,
        preset: Preset,
        draft: DrafterConfig,
        *,
        batch: int,
        slots: int,
        turns: tuple[int, int],
        windows: int,
        options: Mapping[str, Any] | None = None,
    ):
        self.config, self.draft = preset.target, draft
        self.batch, self.slots, self.turns, self.windows, self.options = batch, slots, turns, windows, options
        self.rows = draft.block_size + 1

    def per_operation(self, step: Callable, carry, constants, operations: int, *, repeats: int = REPEATS) -> float:
        """``step(carry, constants) -> carry`` does so many operations.

        A turn repeats it in a loop of fixed length: the host, which decides on every turn, is not in the way there.
        """

        def loop(carry, constants, turns):
            def turn(_, carry):
                return jax.lax.fori_loop(0, repeats, lambda _, carry: step(carry, constants), carry)

            return jax.lax.fori_loop(0, turns, turn, carry)

        program = Program(loop, options=self.options)
        run = lambda turns: program(carry=carry, constants=constants, turns=jnp.int32(turns))  # noqa: E731
        return slope(run, self.turns, self.windows)[0] / (operations * repeats)

    def states(self, count: int) -> list[jax.Array]:
        c = self.config
        shape = (self.batch, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        return normals(5, *[shape] * count, dtype=jnp.float32)

    def gated_delta_verify(self, commit: bool = True) -> float:
        """A layer's rows of a block from projection to gated norm, with ``commit`` also that of half of them."""
        c, batch = self.config, self.batch
        memories, keys = c.linear_num_value_heads, c.linear_num_key_heads
        columns, window = fused_columns(c), c.linear_conv_kernel_dim
        projected = normals(1, *[(batch, self.rows, columns)] * SETS)
        tails = normals(2, *[(batch, window - 1, c.conv_channels)] * SETS)
        conv = normals(3, *[(window, c.conv_channels)] * SETS)
        gates = normals(4, (memories,), (memories,), dtype=jnp.float32)
        norm_Y = jnp.ones((c.linear_value_head_dim,), jnp.bfloat16)
        outs = [jnp.zeros((batch, self.rows, c.value_width), jnp.bfloat16)] * SETS
        num_B = jnp.full((batch,), self.rows // 2, jnp.int32)

        def step(carry, constants):
            (states, tails, outs), (projected, conv, (a_log_M, dt_bias_M), norm_Y, num_B) = carry, constants
            if not commit:  # else nothing would change from turn to turn, and all of it leave the loop
                projected, outs = jax.lax.optimization_barrier((projected, outs))
            found = [
                gated_delta.rows(s, p, tail, w, a_log_M, dt_bias_M, norm_Y, c.rms_norm_eps, keys=keys)
                for s, p, tail, w in zip(states, projected, tails, conv, strict=True)
            ]
            if commit:
                states, tails = gated_delta.commit_rows(states, tails, [log for _, log in found], num_B)
            return list(states), list(tails), [out for out, _ in found]

        constants = projected, conv, gates, norm_Y, num_B
        return self.per_operation(step, (self.states(SETS), tails, outs), constants, SETS)

    def decode_attention(self) -> float:
        """One layer's attention of a block over `slots` committed tokens."""
        c = self.config
        query = normals(1, (self.batch, self.rows, c.num_attention_heads, c.head_dim))[0]
        buffer = (self.batch, self.slots + self.rows, c.num_key_value_heads, c.head_dim)
        memory = list(zip(normals(2, *[buffer] * SLOTS), normals(3, *[buffer] * SLOTS), strict=True))
        end_BT = jnp.broadcast_to(self.slots + 1 + jnp.arange(self.rows)[None], (self.batch, self.rows))

        def step(query, constants):
            memory, end_BT = constants
            for key, value in memory * ROUNDS:
                query = attention.attend_rows(query, key, value, jnp.zeros_like(end_BT), end_BT)
            return query

        return self.per_operation(step, query, (memory, end_BT), SLOTS * ROUNDS)

    def gated_delta_prefill(self) -> float:
        """`slots` tokens of one layer."""

        def step(carry, operands):
            out, s, _ = gated_delta.prefill(carry[0], *operands)
            return s, out.astype(operands[2].dtype)  # as the norm behind it takes it in a layer

        c, lead = self.config, (self.batch, self.slots)
        key, gate = (*lead, c.linear_num_key_heads, c.linear_key_head_dim), (*lead, c.linear_num_value_heads)
        q, k, v = normals(7, key, key, (*gate, c.linear_value_head_dim))
        g, beta = normals(8, gate, gate, dtype=jnp.float32)
        operands = q, k, v, -jnp.exp(g), jax.nn.sigmoid(beta)
        out = jax.eval_shape(step, (self.states(1)[0], None), operands)[1]
        carry = (self.states(1)[0], jnp.zeros(out.shape, out.dtype))
        return self.per_operation(step, carry, operands, 1, repeats=1)

    def readers(self) -> tuple[list[StateReader], list[dict[int, jax.Array]]]:
        """Distinct readers, and for each the states that it reads."""
        readers = [random_reader(self.draft, seed) for seed in range(SETS // 2)]
        reads = readers[0].config.state_layers
        states = iter(self.states(len(readers) * len(reads)))
        return readers, [{layer: next(states) for layer in reads} for _ in readers]

    def _empty_preps(self, readers, states):
        shapes = [jax.eval_shape(type(r).prepare, r, memory) for r, memory in zip(readers, states, strict=True)]
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def state_gather(self, readers, states) -> float:
        """A reader's pass over the states: scales and small maps of all pairs."""

        def step(preps, constants):
            (readers, states), before, found = constants, preps[-1], []
            for reader, memory in zip(readers * ROUNDS, states * ROUNDS, strict=True):
                memory, before = jax.lax.optimization_barrier((memory, before))  # else it would leave the loop
                before = reader.prepare(memory)
                found.append(before)
            return found

        preps = self._empty_preps(readers, states) * ROUNDS
        return self.per_operation(step, preps, (readers, states), len(preps))

    def reader(self, readers, states) -> float:
        """The rest of a reader, once the states are prepared: queries, reads and the update of the block."""
        hidden = normals(9, (self.batch, self.rows - 1, self.config.hidden_size))[0]

        def step(hidden, constants):
            readers, preps = constants
            for reader, prep in zip(readers * ROUNDS, preps * ROUNDS, strict=True):
                hidden = reader(prep, hidden)
            return hidden

        constants = readers, self._empty_preps(readers, states)
        return self.per_operation(step, hidden, constants, len(readers) * ROUNDS)

    def measure(self) -> dict[str, Callable[[], float]]:
        """Key of the record -> the measurement, in the key's unit."""
        label = f"{self.slots // 1024}k" if self.slots % 1024 == 0 else str(self.slots)
        found: dict[str, Callable[[], float]] = {
            "gated_delta_verify_us": lambda: 1e6 * self.gated_delta_verify(),
            "gated_delta_rows_us": lambda: 1e6 * self.gated_delta_verify(commit=False),
            f"decode_attention_{label}_us": lambda: 1e6 * self.decode_attention(),
            f"gated_delta_prefill_{label}_ms": lambda: 1e3 * self.gated_delta_prefill(),
        }
        if find_spec("torch") and find_spec("fla"):
            found[f"fla_prefill_{label}_ms"] = lambda: (
                1e3 * fla_prefill(self.config, self.batch, self.slots, self.windows)
            )
        if self.draft.reader is None:
            return found
        readers = self.readers()

        def plain(measurement):
            with dispatch.platform("cpu"):
                return 1e6 * measurement(*readers)

        return found | {
            "state_gather_us": lambda: 1e6 * self.state_gather(*readers),
            "reader_us": lambda: 1e6 * self.reader(*readers),
            "state_gather_unfused_us": lambda: plain(self.state_gather),
            "reader_unfused_us": lambda: plain(self.reader),
        }


def fla_prefill(config, batch: int, tokens: int, windows: int) -> float:
    """flash-linear-attention's chunked forward in torch, where both are installed and torch has a GPU."""
    import torch  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    heads = (batch, tokens, config.linear_num_value_heads)
    kind = dict(device="cuda", dtype=torch.bfloat16)
    q, k = (torch.randn(*heads, config.linear_key_head_dim, **kind) for _ in range(2))
    v = torch.randn(*heads, config.linear_value_head_dim, **kind)
    beta, g = torch.rand(*heads, **kind), -torch.rand(*heads, device="cuda")

    def call(turns):
        for _ in range(turns):
            chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        torch.cuda.synchronize()

    return slope(call, (3, 13), windows)[0]
