"""`python -m ready_jax.serve.exact`: nano's speculative decoding against its own autoregressive decoding, bit by bit.

Two comparisons per dtype: the shipped drafter on benchmark prompts, and a scripted drafter that forces every pair of
(previous, next) acceptance counts. Compared are the tokens, the bits of the logits behind every one of them, and the
bits of the memory at the end: recurrent states, convolution tails, visible keys and values. The exit status is 1 if
anything differs. Stop tokens are switched off, so that every prompt runs to its full length.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ready_jax
from ready_jax import bench_data, devices, provenance
from ready_jax.baselines import Scripted
from ready_jax.decode import Decoding, Limits, begin, decode
from ready_jax.pair import NANO, Pair
from ready_jax.programs import Program
from ready_jax.state import init_state

BATCH, LONGEST_PROMPT, CAPACITY_STEP = 8, 128, 256
BLOCK = 7
MEMORY = ("recurrent", "conv", "key", "value")


@dataclass
class Comparison:
    """How much was compared, and how much of it differed, by kind. Counts add up over batches."""

    prompts: int = 0
    rounds: int = 0
    tokens: int = 0
    logits: int = 0
    memory: int = 0
    mismatches: dict[str, int] = field(default_factory=lambda: dict(tokens=0, logits=0, lengths=0, memory=0))
    pairs: set[tuple[int, int]] = field(default_factory=set)

    @property
    def total_mismatches(self) -> int:
        return sum(self.mismatches.values())

    def add(self, found: Decoding, wanted: Decoding) -> None:
        """Compare two generations of the same prompts, as bit patterns: NaN equals itself, 0 is not -0."""
        a, b = jax.device_get((found, wanted))
        for row, count in enumerate(b.num_emitted_B.tolist()):
            self.prompts += 1
            self.rounds += int(a.num_rounds_B[row])
            self.tokens += count
            lengths = (a.num_emitted_B[row], a.state.length_B[row]) != (count, b.state.length_B[row])
            self.mismatches["lengths"] += int(lengths)
            self.mismatches["tokens"] += _different(a.token_BN[row, :count], b.token_BN[row, :count])
            if a.logits_BNV is not None and b.logits_BNV is not None:
                self.logits += count * b.logits_BNV.shape[-1]
                self.mismatches["logits"] += _different(a.logits_BNV[row, :count], b.logits_BNV[row, :count])
            for name in MEMORY:
                for x, y in zip(getattr(a.state, name), getattr(b.state, name), strict=True):
                    if y is not None:
                        visible = int(b.state.length_B[row]) if name in ("key", "value") else None
                        self.memory += y[row, :visible].size
                        self.mismatches["memory"] += _different(x[row, :visible], y[row, :visible])
            accepted = a.accepted_BN[row, : int(a.num_rounds_B[row])].tolist()
            self.pairs.update(pairwise(accepted))

    def record(self) -> dict[str, Any]:
        return dict(
            prompts=self.prompts,
            rounds=self.rounds,
            acceptance_length=round((self.tokens - self.prompts) / self.rounds, 4),
            tokens_compared=self.tokens,
            logits_compared=self.logits,
            memory_values_compared=self.memory,
            acceptance_pairs_covered=len(self.pairs),
            mismatches=self.total_mismatches,
            mismatches_by_kind=self.mismatches,
        )


def _different(a: np.ndarray, b: np.ndarray) -> int:
    """How many entries differ in their bits."""
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return int(np.sum(np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)))


def _start(target, drafter, token_BT, num_B, limits, *, capacity):
    state = init_state(target.config, token_BT.shape[0], capacity, dtype=target.dtype)
    return begin(target, drafter, state, token_BT, num_B, limits, keep_logits=True)


class Loop:
    """The decode loop on token ids, as a pair runs it, but handing out the memory too."""

    def __init__(self, pair: Pair):
        self.target = pair.target
        self._start, self._continue = Program(_start, static=("capacity",)), Program(decode)

    @property
    def compile_seconds(self) -> float:
        return sum(p.trace_seconds + p.compile_seconds for p in (self._start, self._continue))

    def run(self, drafter, prompts: list[list[int]], budgets: list[int], capacity: int) -> Decoding:
        """Decode ``budgets[b]`` tokens after each prompt; ``drafter`` None is autoregressive."""
        token_BT = np.zeros((len(prompts), LONGEST_PROMPT), np.int32)
        for row, prompt in zip(token_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        limits = Limits(
            budget_B=jnp.array(budgets, jnp.int32),
            stop_L=jnp.array([-1], jnp.int32),
            draft_B=jnp.full((len(prompts),), BLOCK if drafter is not None else 0, jnp.int32),
            threshold=jnp.float32(0),
            draft_limit=jnp.int32(self.target.config.max_position_embeddings),
        )
        shared: dict[str, Any] = dict(target=self.target, drafter=drafter, limits=limits)
        run = self._start(
            token_BT=jnp.asarray(token_BT),
            num_B=jnp.array([len(p) for p in prompts], jnp.int32),
            capacity=capacity,
            **shared,
        )
        return self._continue(run=run, max_rounds=jnp.int32(2**31 - 1), **shared)


def _capacity(tokens: int) -> int:
    """One size for both comparisons where it fits, so that the autoregressive program is compiled once."""
    return -(-(LONGEST_PROMPT + tokens) // CAPACITY_STEP) * CAPACITY_STEP


def compare_drafter(pair: Pair, prompts: list[list[int]], tokens: int, loop: Loop | None = None) -> Comparison:
    """The pair's own drafter against autoregressive decoding, ``tokens`` after each prompt, in batches of 8."""
    loop, result = loop or Loop(pair), Comparison()
    for batch in _batches(prompts):
        budgets = [tokens] * len(batch)
        plain = loop.run(None, batch, budgets, _capacity(tokens))
        result.add(loop.run(pair.drafter, batch, budgets, _capacity(tokens)), plain)
    return result


def compare_forced(pair: Pair, prompts: list[list[int]], loop: Loop | None = None) -> Comparison:
    """A drafter that is right exactly as often as scripted: every pair of acceptance counts, in every row."""
    loop, result = loop or Loop(pair), Comparison()
    cycle = every_pair(BLOCK)[:-1]
    walks = [cycle[b:] + cycle[: b + 1] for b in range(len(prompts))]
    budgets = [1 + sum(accepted + 1 for accepted in walk) for walk in walks]
    capacity = _capacity(max(budgets))
    plain = loop.run(None, prompts, budgets, capacity)
    script = Scripted.by_round(
        np.array([len(p) for p in prompts], np.int32),
        np.asarray(plain.token_BN),
        np.array(walks, np.int32),
        pair.target.config.vocab_size,
    )
    result.add(loop.run(script, prompts, budgets, capacity), plain)
    return result


def every_pair(block: int) -> list[int]:
    """A closed walk over 0..block in which every (previous, next) pair occurs once: a de Bruijn cycle of order 2."""
    left = {a: list(range(block + 1)) for a in range(block + 1)}
    walk, path = [0], []
    while walk:  # Hierholzer's circuit of the complete directed graph with loops
        if left[walk[-1]]:
            walk.append(left[walk[-1]].pop())
        else:
            path.append(walk.pop())
    return path[::-1]


def _batches(prompts: list[list[int]]) -> Iterable[list[list[int]]]:
    return (prompts[i : i + BATCH] for i in range(0, len(prompts), BATCH))


def shipped_prompts(pair: Pair, count: int) -> list[list[int]]:
    """Token ids of the first short prompts of the shipped benchmark sets, taken from each in turn, thinking off."""
    if pair.chat is None:
        raise ValueError("this pair was made without a tokenizer, which is needed to encode the benchmark prompts")
    names = [name for name in bench_data.BENCHMARKS if name not in bench_data.NOT_SHIPPED]
    columns = [bench_data.bench_prompts(name, limit=2 * count) for name in names]
    found = []
    for place in range(2 * count):
        for rows in columns:
            if place < len(rows):
                ids = pair.chat.encode(rows[place]["prompt"], enable_thinking=False)
                found += [ids] if len(ids) <= LONGEST_PROMPT else []
    if len(found) < count:
        raise ValueError(f"--prompts {count}: the shipped sets hold {len(found)} of at most {LONGEST_PROMPT} tokens")
    return found[:count]


def conditions(prompts: list[list[int]]) -> dict[str, Any]:
    """What the numbers were measured with."""
    weights = sorted([*NANO.glob("target/*.safetensors"), *NANO.glob("dspark/*.safetensors")])
    return dict(
        model="nano",
        **provenance.conditions(),
        data_sha256=hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        weights_sha256={f"{file.parent.name}/{file.name}": provenance.sha256(file) for file in weights},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--prompts", type=int, default=40, help="benchmark prompts (default 40)")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens after each (default 200)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append", help="default: both")
    parser.add_argument("--compile-cache", metavar="DIR", help="keep compiled programs here")
    options = parser.parse_args(arguments)
    if options.compile_cache:
        devices.enable_compile_cache(options.compile_cache)
    print(f"device: {jax.default_backend()} ({jax.devices()[0].device_kind}), jax {jax.__version__}")
    results, record = [], {}
    for dtype in options.dtype or ("float32", "bfloat16"):
        pair = ready_jax.load(dtype=dtype)
        prompts = shipped_prompts(pair, options.prompts)
        record = record or conditions(prompts)
        loop = Loop(pair)
        comparisons = {
            pair.method: partial(compare_drafter, pair, prompts, options.tokens, loop),
            "forced": partial(compare_forced, pair, prompts[:BATCH], loop),
        }
        for name, compare in comparisons.items():
            start, compiled = time.perf_counter(), loop.compile_seconds
            comparison = compare()
            compile_seconds = loop.compile_seconds - compiled
            seconds = time.perf_counter() - start - compile_seconds
            result = dict(dtype=dtype, drafter=name, batch=BATCH, **comparison.record())
            results.append(result | dict(seconds=round(seconds, 2), compile_seconds=round(compile_seconds, 2)))
            print(
                f"{dtype} {name}: {comparison.prompts} prompts, {comparison.tokens} tokens, {comparison.logits} logits "
                f"and {comparison.memory} memory values compared over {comparison.rounds} rounds "
                f"({len(comparison.pairs)} pairs of acceptance counts): {comparison.total_mismatches} mismatches; "
                f"{seconds:.1f} s, and {compile_seconds:.1f} s to compile",
                flush=True,
            )
    record |= dict(mismatches=sum(result["mismatches"] for result in results), results=results)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 1 if record["mismatches"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
