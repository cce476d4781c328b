"""`python -m ready_jax.serve.bench`: times of a full-size model with random weights, and a check of its exactness.

What a round costs does not depend on what the weights are, so they are drawn on the device, and the real drafter's
proposals are overruled by a script that is right as often as it says (`baselines.Forced`). A time is the slope over
rounds of one compiled `decode`: (t(high) - t(low)) / (high - low), the median of several windows. The record is
written after every step, so that a run that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ready_jax import collectives, devices, hlo, provenance
from ready_jax.baselines import Forced, Scripted
from ready_jax.config import DrafterConfig
from ready_jax.configs.qwen3_8_27b import PRESETS, Preset
from ready_jax.decode import Autoregressive, Decoding, DrafterShape, Limits, decode
from ready_jax.drafter import Drafter
from ready_jax.kernel_times import communication, kernel_times, traced
from ready_jax.lossless import MATRICES, bits_per_weight, compress
from ready_jax.programs import OPTIONS, Program
from ready_jax.pytree import register
from ready_jax.quantize import draft_fp8
from ready_jax.random_weights import random_drafter, random_memory, random_reader, random_target
from ready_jax.recorded import Recorded
from ready_jax.serve.bench_kernels import Kernels, slope
from ready_jax.serve.exact import Comparison, every_pair
from ready_jax.state import init_state
from ready_jax.target import Target
from ready_jax.tensor_parallel import Sharded, on_shards, place

#: The published acceptance length of ReaDy on this target (arXiv 2610.20503).
PUBLISHED_ACCEPTANCE = 4.5285
STEPS = (
    "ceiling", "prefill", "autoregressive", "verify", "dspark", "ready", "fp8", "readers", "exact", "kernels",
    "ablations",
)  # fmt: skip
KEYS = (
    "read_ceiling_tb_s", "autoregressive_ms", "verify_ms", "dspark_round_ms", "ready_round_ms",
    "ready_round_fp8_draft_ms", "round_minus_autoregressive_ms", "gated_delta_verify_us", "gated_delta_rows_us",
    "decode_attention_16k_us", "gated_delta_prefill_16k_ms", "fla_prefill_16k_ms", "prefill_2048_ms",
    "state_gather_us", "reader_us", "state_gather_unfused_us", "reader_unfused_us", "reader_slope_us",
    "bit_identical_rounds", "rounds_compared", "peak_gib", "peak_gib_16k", "kernels_per_round", "compile_seconds",
    "propose_ms", "ablation_round_ms", "collectives_per_round",
)  # fmt: skip


@register
@dataclass(frozen=True)
class Readers:
    """Several readers where one is expected, each on the positions that the ones before have updated."""

    readers: tuple

    def prepare(self, states):
        found = []
        for reader in self.readers:
            picked = {layer: states[layer] for layer in reader.config.state_layers}
            if found:  # else the parts that readers share would be computed once
                picked, found[-1] = jax.lax.optimization_barrier((picked, found[-1]))
            found.append(reader.prepare(picked))
        return tuple(found)

    def __call__(self, prep, hidden, site: int = 0):
        update = self.readers[0](prep[0], hidden, site)
        for reader, prepared in zip(self.readers[1:], prep[1:], strict=True):
            update = update + reader(prepared, hidden + update, site)
        return update


def size(tree) -> int:
    """Bytes of the arrays, or of their descriptions."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def arrays(model: Target | Drafter | Sharded) -> Any:
    """The module that holds a model's arrays."""
    return model.shards if isinstance(model, Sharded) else model


def traffic(target: Target | Sharded, drafter: Drafter | Sharded | None, tokens: int, batch: int = 1) -> dict[str, int]:
    """Bytes that one round must move (None: an autoregressive token): weights read once, states read and written."""
    c, parts = target.config, arrays(target)
    head = parts.embed_VD if parts.w_out_DV is None else parts.w_out_DV
    memory = jax.eval_shape(lambda t: init_state(c, batch, tokens, dtype=t.dtype), target)
    found = dict(
        target_weights=size(target) - (size(parts.embed_VD) if parts.w_out_DV is not None else 0),
        states=2 * size((memory.recurrent, memory.conv)),
        keys_values=size((memory.key, memory.value)),
    )
    if drafter is not None:
        context, draft = jax.eval_shape(lambda d: d.init_context(batch, tokens), drafter), arrays(drafter)
        found |= dict(
            draft_weights=size((draft.w_fuse_ID, draft.layers)),
            draft_head=size(head if draft.w_out_DV is None else draft.w_out_DV),
            markov=drafter.config.block_size * size(draft.markov.w2_RV) if draft.markov is not None else 0,
            draft_context=size((context.key, context.value)),
        )
        for reader in getattr(drafter.reader, "readers", (drafter.reader,) if drafter.reader is not None else ()):
            states = [memory.recurrent[layer] for layer in reader.config.state_layers]
            found["reader"] = found.get("reader", 0) + size(reader) + size(states)
    return found | dict(total=sum(found.values()))


class Bench(Recorded):
    """One configuration: its model, its memory at the asked-for context, and the record."""

    def __init__(self, options: argparse.Namespace, preset: Preset):
        self.options, self.preset, self.turns, self.file = options, preset, tuple(options.turns), options.json
        self.xla = dict(item.split("=", 1) for item in options.xla_option)
        reader = reader_config(preset, options.drafter, options.reader)
        self.config = preset.drafter(options.drafter, reader)
        self.block = self.config.block_size
        self.walks = walks(self.block, max(options.rounds, options.turns[1]), options.batch)
        self.slots = 8 + max(sum(a + 1 for a in walk) for walk in self.walks)
        self.capacity = -(-(options.context + self.slots) // 256) * 256
        self.record: dict[str, Any] = dict.fromkeys(KEYS) | dict(
            preset=preset.name,
            drafter=options.drafter,
            drafter_revisions=preset.revisions.get(options.drafter),
            reader=None if reader is None else {k: v for k, v in vars(reader).items() if v is not None},
            context=options.context,
            capacity=self.capacity,
            batch=options.batch,
            devices=options.devices,
            xla_options=OPTIONS | self.xla,
            turns=list(options.turns),
            windows=options.windows,
            weights="random",
            lossless=options.lossless,
            errors={},
            seconds={},
            **provenance.conditions(),
        )
        self.decode = Program(decode, options=self.xla)
        self.programs = [self.decode]
        self._text: np.ndarray | None = None
        found = jax.devices()
        if options.devices > len(found):
            raise ValueError(f"--devices {options.devices}: {len(found)} are here")
        self.mesh = Mesh(np.array(found[: options.devices]), ("model",)) if options.devices > 1 else None

    # The model and its memory

    def build(self) -> None:
        self.target = random_target(self.preset.target, mesh=self.mesh)
        if self.options.lossless:
            self.target = compress(self.target, self.options.lossless, consume=True)
        self.drafter = self.drafter_of(self.config)
        if self.options.lossless:
            self.record["bits_per_weight"] = bits_per_weight((self.target, self.drafter))
        self.bare = self.drafter.with_reader(None)
        jax.block_until_ready(jax.tree.leaves((self.target, self.drafter)))
        parts: dict[str, Any] = dict(target=self.target, drafter=self.bare, reader=self.drafter.reader)
        self.record["weight_bytes"] = {name: size(module) for name, module in parts.items()}
        batch = self.options.batch
        state = init_state(self.target.config, batch, self.capacity, dtype=self.target.dtype)
        context = self.bare.init_context(batch, self.capacity)
        self.empty = self.placed((state, context))
        self.state = self.placed(random_memory(state, self.options.context))
        self.context = self.placed(random_memory(context, self.options.context))
        self.anchor_B = jnp.ones((batch,), jnp.int32)
        self.record["filled_by"] = "random contents"

    def drafter_of(self, config: DrafterConfig) -> Any:
        drafter = random_drafter(config, mesh=self.mesh)
        return compress(drafter, consume=True) if self.options.lossless else drafter

    def placed(self, memory):
        """Memories where the devices expect their heads."""
        return memory if self.mesh is None else place(memory, self.mesh, batch=self.options.batch)

    def run(self, drafter=None, *, logits: bool = False) -> Decoding:
        """A generation at the asked-for context that has emitted its first token."""
        shape = self.options.batch, self.slots
        counters = jnp.zeros(shape, jnp.int32)
        zero_B = jnp.zeros_like(self.anchor_B)
        vocab = self.preset.target.vocab_size
        return Decoding(
            state=self.state, context=None if drafter is None else self.context, anchor_B=self.anchor_B,
            token_BN=counters.at[:, 0].set(self.anchor_B), num_emitted_B=zero_B + 1, num_rounds_B=zero_B,
            finish_B=zero_B, proposed_BN=counters, accepted_BN=counters, emitted_BN=counters,
            logits_BNV=jnp.zeros((*shape, vocab), jnp.float32) if logits else None,
        )  # fmt: skip

    def limits(self, draft: int, budget: Sequence[int] | int = 1 << 30) -> Limits:
        return Limits(
            budget_B=jnp.broadcast_to(jnp.asarray(budget, jnp.int32), (self.options.batch,)),
            stop_L=jnp.array([-1], jnp.int32),
            draft_B=jnp.full((self.options.batch,), draft, jnp.int32),
            threshold=jnp.float32(0),
            draft_limit=jnp.int32(self.preset.target.max_position_embeddings),
        )

    def arguments(self, drafter: Drafter | Sharded | None, **changes) -> dict[str, Any]:
        """What `decode` takes; without a drafter it proposes nothing."""
        if drafter is None:
            drafting: Any = Autoregressive(DrafterShape(self.block))
        else:
            length_B = np.full((self.options.batch,), self.options.context, np.int32)
            drafting = Forced(
                drafter,
                Scripted.by_round(length_B, self.text(), np.array(self.walks, np.int32), self.config.vocab_size),
            )
        draft = 0 if drafter is None else self.block
        return dict(target=self.target, drafter=drafting, run=self.run(drafter), limits=self.limits(draft)) | changes

    def text(self) -> np.ndarray:
        """The autoregressive continuation [B, slots], first token included."""
        if self._text is None:
            plain = self.decode(**self.arguments(None), max_rounds=jnp.int32(self.slots - 1))
            self._text = np.asarray(plain.token_BN)
        return self._text

    # Steps

    def ceiling(self) -> None:
        """Bytes per second of summing a large bf16 array."""
        array = jnp.ones((self.options.ceiling_mib << 20 >> 1,), jnp.bfloat16)
        total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
        seconds, _ = slope(lambda turns: [total(array) for _ in range(turns)], (2, 12), self.options.windows)
        self.record["read_ceiling_tb_s"] = array.nbytes / seconds / 1e12

    def prefill(self) -> None:
        """Fills the memory in chunks of one size, draft context included."""
        options, (state, context) = self.options, self.empty
        chunk = min(options.prefill_chunk, options.context)
        tokens = jax.random.randint(jax.random.key(3), (options.batch, options.context), 0, self.config.mask_token_id)
        padded_BT = jnp.pad(tokens, [(0, 0), (0, -options.context % chunk)])
        program = Program(consume, options=self.xla)
        self.programs.append(program)

        def consumed(count: int):
            found = state, context, None
            for start in range(0, count, chunk):
                num_B = jnp.full((options.batch,), min(chunk, count - start), jnp.int32)
                found = program(
                    target=self.target, drafter=self.bare, state=found[0], context=found[1],
                    token_BT=padded_BT[:, start : start + chunk], num_B=num_B,
                )  # fmt: skip
            return found

        self.state, self.context, anchor_B = consumed(options.context)
        self.anchor_B = jnp.asarray(np.asarray(anchor_B))
        self._text = None
        self.record["filled_by"] = f"prefill in chunks of {chunk}"
        count = min(2048, options.context)
        times = []
        for _ in range(options.windows):
            start = time.perf_counter()
            jax.block_until_ready(consumed(count))
            times.append(time.perf_counter() - start)
        self.record |= {f"prefill_{count}_ms": 1e3 * float(np.median(times)), "prefill_chunk": chunk}

    def timed(self, name: str, drafter: Drafter | Sharded | None) -> float:
        """Milliseconds per round; the record also gets the range over windows, bytes, launches and acceptance."""
        arguments = self.arguments(drafter)
        last: list[Decoding] = []

        def call(rounds):
            last[:] = [self.decode(**arguments, max_rounds=jnp.int32(rounds))]
            return last[0]

        seconds, spread = slope(call, self.turns, self.options.windows)
        ms = 1e3 * seconds
        moved = traffic(self.target, drafter, self.options.context, self.options.batch)
        compiled = self.decode.compiled(**arguments, max_rounds=jnp.int32(0))
        launches = hlo.loop_launches(compiled.as_text() or "")
        memory = compiled.memory_analysis()
        ceiling = self.record["read_ceiling_tb_s"]
        speed = moved["total"] / seconds / 1e12 / self.options.devices  # of each device
        self.record.setdefault("detail", {})[name] = dict(
            ms=ms,
            range_ms=1e3 * spread,
            bytes=moved,
            tb_s=speed,
            fraction_of_ceiling=speed / ceiling if ceiling else None,
            launches_per_round=dict(launches.most_common(), total=launches.total()),
            collectives_per_round={kind: n for kind, n in launches.items() if kind in hlo.COLLECTIVES},
            temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
            acceptance=histogram(last[0]),
        )
        if self.options.profile:
            few = 4
            events = traced(lambda: self.decode(**arguments, max_rounds=jnp.int32(few)))
            found = kernel_times(events, few)
            self.record["detail"][name] |= dict(kernels=found, communication_us=communication(events, few))
            for kernel in found[:12]:
                print("  {us:9.1f} us in {launches:6.1f} launches: {kernel}".format(**kernel), flush=True)
        return ms

    def autoregressive(self) -> None:
        self.record["autoregressive_ms"] = self.timed("autoregressive", None)

    def dspark(self) -> None:
        self.record["dspark_round_ms"] = self.timed("dspark", self.bare)

    def ready(self) -> None:
        ms = self.timed("ready", self.drafter)
        plain = self.record["autoregressive_ms"]
        lengths = dict(published=PUBLISHED_ACCEPTANCE, asked_for=self.options.acceptance_length)
        self.record |= dict(
            ready_round_ms=ms,
            round_minus_autoregressive_ms=None if plain is None else ms - plain,
            kernels_per_round=self.record["detail"]["ready"]["launches_per_round"]["total"],
            collectives_per_round=self.record["detail"]["ready"]["collectives_per_round"],
            tokens_per_second={
                f"acceptance {length}": self.options.batch * length / ms * 1e3 for length in lengths.values() if length
            },
        )

    def fp8(self) -> None:
        """The drafter and a copy of the head for it in fp8; the target stays as it is."""
        target = arrays(self.target)
        head = target.embed_VD[...].T if target.w_out_DV is None else target.w_out_DV[...]
        self.record["ready_round_fp8_draft_ms"] = self.timed("ready fp8 draft", draft_fp8(self.drafter, head))

    def readers(self) -> None:
        """What one more reader costs inside a round: rounds with 1, 5 and 9 of them."""
        readers = tuple(random_reader(self.config, seed) for seed in range(10, 19))
        counts = (1, 5, 9)
        times = [self.timed(f"{n} readers", self.drafter.with_reader(Readers(readers[:n]))) for n in counts]
        self.record["reader_slope_us"] = 1e3 * float(np.polyfit(counts, times, 1)[0])

    def ablations(self) -> None:
        """Rounds under other readers: what proposing costs with each, put in the place of proposing without one."""
        program = Program(propose_loop, options=self.xla)
        self.programs.append(program)

        def proposing(drafter) -> float:
            arguments = dict(target=self.target, drafter=drafter, context=self.context, states=self.state.recurrent)
            call = lambda turns: program(**arguments, anchor_B=self.anchor_B, turns=jnp.int32(turns))  # noqa: E731
            return 1e3 * slope(call, self.turns, self.options.windows)[0]

        plain, round_ms = proposing(self.bare), self.record["dspark_round_ms"]
        self.record["propose_ms"] = {"no reader": plain}
        self.record["ablation_round_ms"] = {}
        for change in ablations(self.preset, self.config.num_layers):
            reader = reader_config(self.preset, self.options.drafter, [change])
            drafter = self.drafter_of(self.preset.drafter(self.options.drafter, reader))
            self.record["propose_ms"][change] = ms = proposing(drafter)
            self.record["ablation_round_ms"][change] = None if round_ms is None else round_ms + ms - plain

    def verify(self) -> None:
        """Scoring a block without committing it: each pass reads the tokens that the last one chose."""
        program = Program(verify_loop, options=self.xla)
        self.programs.append(program)
        token_BT = jnp.ones((self.options.batch, self.block + 1), jnp.int32)
        arguments = dict(target=self.target, state=self.state, token_BT=token_BT)
        seconds, _ = slope(lambda turns: program(**arguments, turns=jnp.int32(turns)), self.turns, self.options.windows)
        self.record["verify_ms"] = 1e3 * seconds

    def exact(self) -> None:
        """Every pair of acceptance counts against the same executable proposing nothing, and against the plain one."""
        budget = [1 + sum(a + 1 for a in walk[: self.options.rounds]) for walk in self.walks]
        arguments = self.arguments(self.drafter, run=self.run(self.drafter, logits=True))
        most = jnp.int32(self.slots)
        found, wanted = (
            replace(self.decode(**(arguments | dict(limits=self.limits(draft, budget))), max_rounds=most), context=None)
            for draft in (self.block, 0)
        )
        same = Comparison()
        same.add(found, wanted)
        self.record |= dict(
            bit_identical_rounds=identical_rounds(found, wanted, same),
            rounds_compared=same.rounds,
            acceptance_pairs_covered=len(same.pairs),
            acceptance=histogram(found),
            exactness=same.record(),
        )
        plain = self.decode(**self.arguments(None, limits=self.limits(0, budget)), max_rounds=most)
        apart = Comparison()
        apart.add(plain, wanted)
        self.record["autoregressive_program"] = apart.record()

    def kernels(self) -> None:
        options = self.options
        each = Kernels(
            self.preset, self.config, batch=options.batch, slots=options.kernel_context,
            turns=tuple(options.kernel_turns), windows=options.windows, options=self.xla,
        )  # fmt: skip
        for name, measurement in each.measure().items():
            self.attempt(name, lambda name=name, measurement=measurement: self.record.update({name: measurement()}))

    # The order

    def settle(self) -> None:
        self.record["compile_seconds"] = round(sum(p.compile_seconds for p in self.programs), 2)
        self.record["trace_seconds"] = round(sum(p.trace_seconds for p in self.programs), 2)
        peaks = [memory.peak for memory in devices.memory() if memory.peak]
        if peaks:
            self.record["peak_gib"] = max(peaks) / 2**30
            if self.options.context >= 16000:
                self.record["peak_gib_16k"] = self.record["peak_gib"]

    def __call__(self) -> dict[str, Any]:
        self.attempt("build", self.build)
        skipped = {"readers"} - {"readers" if self.options.reader_slope else ""}
        skipped |= {"ablations"} - {"ablations" if self.options.ablations else ""}
        skipped |= {"fp8"} - {"fp8" if self.options.fp8_draft else ""}
        skipped |= {"readers", "ablations", "kernels"} if self.mesh is not None else set()
        skipped |= {"ready", "fp8", "readers", "ablations"} if self.config.reader is None else set()
        for name in STEPS:
            if name in (self.options.only or [s for s in STEPS if s not in skipped]):
                self.attempt(name, getattr(self, name))
        return self.record


def walks(block: int, rounds: int, batch: int) -> list[list[int]]:
    """Acceptance counts per row and round: every (previous, next) pair in ``(block + 1)**2 + 1`` rounds."""
    cycle = every_pair(block)[:-1]
    repeated = cycle * (2 + (rounds + batch) // len(cycle))
    return [repeated[b : b + rounds] for b in range(batch)]


def consume(target, drafter, state, context, token_BT, num_B):
    """One chunk of a prefill: state and context after it, and the token behind its last one."""
    if isinstance(target, Sharded):
        arguments = dict(target=target, drafter=drafter, state=state, context=context, token_BT=token_BT, num_B=num_B)
        return on_shards(consume, arguments, (state, context, num_B), batch=1)
    out, state = target.prefill(token_BT, state, num_B, taps=drafter.config.taps)
    last_B1D = jnp.take_along_axis(out.hidden_BTD, (num_B - 1)[:, None, None], axis=1)
    anchor_B = collectives.argmax(target.unembed(last_B1D)[:, 0])
    return state, drafter.absorb(context, out.taps_BTED, num_B), anchor_B


def verify_loop(target, state, token_BT, turns):
    if isinstance(target, Sharded):
        arguments = dict(target=target, state=state, token_BT=token_BT, turns=turns)
        return on_shards(verify_loop, arguments, (state, token_BT), batch=1)

    def body(_, carry):
        state, token_BT = carry
        out, pending = target.verify(token_BT, state)
        token_BT = collectives.argmax(target.unembed(out.hidden_BTD))
        return replace(state, key=pending.key, value=pending.value), token_BT

    return jax.lax.fori_loop(0, turns, body, (state, token_BT))


def propose_loop(target, drafter, context, states, anchor_B, turns):
    borrowed = () if drafter.config.own_embeddings else (target.embed, target.unembed)

    def body(_, anchor_B):
        held, anchor_B = jax.lax.optimization_barrier((states, anchor_B))  # else the states' part would leave the loop
        return drafter.propose(context, anchor_B, held, *borrowed).token_BP[:, -1]

    return jax.lax.fori_loop(0, turns, body, anchor_B)


def histogram(run: Decoding) -> dict[str, Any]:
    """Rounds by accepted proposals, and tokens per round."""
    rounds_B, accepted_BN = np.asarray(run.num_rounds_B), np.asarray(run.accepted_BN)
    counts = Counter(int(a) for row, n in zip(accepted_BN, rounds_B, strict=True) for a in row[:n])
    length = float(np.sum(np.asarray(run.num_emitted_B) - 1) / max(1, np.sum(rounds_B)))
    return dict(rounds={str(a): counts[a] for a in sorted(counts)}, acceptance_length=length)


def identical_rounds(found: Decoding, wanted: Decoding, compared: Comparison) -> int:
    """Leading rounds, over all rows, in which every logit has the same bits; none if the memory at the end differs."""
    if not compared.total_mismatches:
        return compared.rounds
    logits = [run.logits_BNV for run in (found, wanted) if run.logits_BNV is not None]
    if len(logits) < 2 or compared.mismatches["logits"] == 0:
        return 0
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint32) for x in logits]
    same_BN = np.asarray(jnp.all(jnp.equal(*bits), axis=-1))
    total = 0
    for row, rounds in enumerate(np.asarray(found.num_rounds_B)):
        ends = 1 + np.cumsum(np.asarray(found.emitted_BN)[row, :rounds])
        first = int(np.argmin(same_BN[row])) if not same_BN[row].all() else same_BN.shape[1]
        total += int(np.sum(ends <= first))
    return total


def ablations(preset: Preset, draft_layers: int) -> list[str]:
    """The readers whose speed the paper compares (arXiv 2610.20503), as changes of the final one."""
    first, middle, last = preset.reader_layers
    layers = [f"layers={last}", f"layers={middle},{last}", f"layers={first},{middle},{last}"]
    every_other = ",".join(str(i) for i in range(0, draft_layers, 2))
    target = preset.target
    full = min(target.linear_key_head_dim, target.linear_value_head_dim)
    return ["rank=8", f"rank={full}", *layers, "inject=last", f"inject={every_other}", "inject=all", "side=before"]


def reader_config(preset: Preset, revision: str, words: Sequence[str]):
    """`rank=8 layers=30,62 inject=last|4|0,2,4 side=after|before`, or `none`; unnamed parts are the final reader's."""
    if list(words) == ["none"]:
        return None
    changes: dict[str, Any] = {}
    layers = preset.drafter(revision).num_layers
    for word in words:
        name, _, value = word.partition("=")
        if name == "rank" and value:
            changes["rank"] = int(value)
        elif name == "layers" and value:
            changes["state_layers"] = tuple(int(x) for x in value.split(","))
        elif name == "inject" and value:
            named = dict(last=(layers - 1,), all=tuple(range(layers)))
            changes["inject_layers"] = named.get(value) or tuple(int(x) for x in value.split(","))
        elif name == "side" and value in ("after", "before"):
            changes["inject_side"] = f"{value}_attention"
        else:
            raise ValueError(f"--reader: found {word!r}; rank=, layers=, inject=, side=after|before or none is needed")
    return preset.reader(**changes)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3_8_27b")
    parser.add_argument("--drafter", choices=("v1", "v2"), default="v2", help="revision of the public drafter")
    parser.add_argument("--reader", nargs="+", default=[], metavar="PART", help=(reader_config.__doc__ or ""))
    parser.add_argument("--context", type=int, default=2048, help="tokens in memory before the first round")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="of this host, tensor parallel")
    parser.add_argument(
        "--lossless",
        nargs="*",
        choices=MATRICES,
        metavar="GROUP",
        help=f"store these of the target, and the drafter's, in 12 bits a weight; without names {' '.join(MATRICES)}",
    )
    parser.add_argument("--fp8-draft", action="store_true", help="also time the drafter in fp8")
    parser.add_argument("--reader-slope", action="store_true", help="also time rounds with 1, 5 and 9 readers")
    parser.add_argument("--ablations", action="store_true", help="also rounds under the readers the paper compares")
    parser.add_argument("--profile", action="store_true", help="also where each kind of round spends its time")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP", help=f"of {' '.join(STEPS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here, after every step")
    parser.add_argument("--acceptance-length", type=float, help="tokens per round for a second tokens/s")
    parser.add_argument("--rounds", type=int, default=200, help="rounds of the exactness check (65 cover every pair)")
    parser.add_argument("--turns", type=int, nargs=2, default=(3, 33), metavar=("LOW", "HIGH"), help="rounds timed")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--prefill-chunk", type=int, default=2048)
    parser.add_argument("--kernel-context", type=int, default=16384, help="tokens in the single-operation times")
    parser.add_argument("--kernel-turns", type=int, nargs=2, default=(1, 6), metavar=("LOW", "HIGH"))
    parser.add_argument("--ceiling-mib", type=int, default=2048)
    parser.add_argument("--compile-cache", metavar="DIR", help="keep compiled programs here")
    parser.add_argument("--xla-option", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(arguments)
    options.lossless = [] if options.lossless is None else options.lossless or list(MATRICES)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.compile_cache:
        devices.enable_compile_cache(options.compile_cache)
    preset = PRESETS[options.preset]
    devices.refuse_large_on_cpu(size(nnx.eval_shape(lambda: Target(preset.target, rngs=nnx.Rngs(0)))), None)
    print(f"device: {jax.default_backend()} ({jax.devices()[0].device_kind}), jax {jax.__version__}", flush=True)
    record = Bench(options, preset)()
    return 1 if record["errors"] or record["bit_identical_rounds"] != record["rounds_compared"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
