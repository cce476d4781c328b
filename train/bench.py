"""`python -m ready_jax.train.bench`: times of a drafter's full-size training steps, with random weights.

What a step costs does not depend on what the weights are, so models are drawn on the device and rows are random. It
runs the recipes of `configs/qwen3_8_27b_training.py` as they are but for the size of a batch, and writes no feature
file. Regeneration of the answers is timed as speculative decoding of many rows whose proposals are overruled by a
script of the stated acceptance (`baselines.Forced`). The record is written after every step; what it assumes is under
`assumptions`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ready_jax import devices, lora, provenance
from ready_jax.baselines import Forced, Scripted
from ready_jax.configs import qwen3_8_27b_training as recipes
from ready_jax.configs.drafter_training import MeshConfig, Recipe
from ready_jax.configs.qwen3_8_27b import PRESETS, Preset
from ready_jax.decode import Decoding, Limits, decode
from ready_jax.drafter import Drafter
from ready_jax.kernel_times import communication, kernel_times, traced
from ready_jax.programs import Program
from ready_jax.random_weights import random_drafter, random_memory, random_target
from ready_jax.recorded import Recorded
from ready_jax.state import init_state
from ready_jax.target import Target
from ready_jax.train import estimate
from ready_jax.train import loss as losses
from ready_jax.train import step as steps
from ready_jax.train.anchors import block_labels, sample_anchors, step_key
from ready_jax.train.features import Features, block_hidden, features, filled
from ready_jax.train.mesh import gather_options, make_mesh, placed, specs, traced_for

#: Tokens per round of the drafter that answers are regenerated with: the public DSpark, as published by ReaDy's
#: authors (arXiv 2610.20503).
PUBLISHED_ACCEPTANCE = 4.1739
STAGES = {"stage1": recipes.qwen3_8_27b_ready_stage1, "stage2": recipes.qwen3_8_27b_ready_stage2}
STEPS = ("stage1", "stage2", "parts", "target", "regeneration")
KEYS = (
    "stage1_samples_per_s", "stage2_samples_per_s", "mfu", "peak_gib", "hours_both_stages", "hours_regeneration",
    "split_ms", "micro_batch", "feature_file_bytes", "assumptions", "compile_seconds",
)  # fmt: skip
GIB = 2**30


@dataclass
class Stage:
    """A stage that is ready to run: its compiled step, state and batch."""

    recipe: Recipe
    compiled: Any
    state: Any
    frozen: Any
    batch: tuple[jax.Array, ...]


class Bench(Recorded):
    """One configuration: models, rows, and the record."""

    def __init__(self, options: argparse.Namespace, preset: Preset):
        self.options, self.preset, self.file = options, preset, options.json
        self.xla = dict(item.split("=", 1) for item in options.xla_option)
        self.mesh_config = MeshConfig(options.data, options.shard)
        self.mesh = make_mesh(self.mesh_config)
        self.devices = options.data * options.shard
        self.config = preset.drafter(options.drafter, preset.reader())
        self.compile_seconds = self.trace_seconds = 0.0
        self.programs: list[Program] = []
        self.record: dict[str, Any] = dict.fromkeys(KEYS) | dict(
            preset=preset.name,
            drafter=options.drafter,
            drafter_revisions=preset.revisions.get(options.drafter),
            weights="random",
            mesh=vars(self.mesh_config),
            rows_of_a_micro_batch=options.rows,
            micro_batches=options.accumulate,
            length=options.length,
            anchors=options.anchors,
            block=self.config.block_size,
            group=options.group,
            slice_blocks=options.slice_blocks,
            timed_steps=options.steps,
            xla_options=self.xla,
            feature_file_bytes=0,  # features live on the device from the target's pass to the step's end
            assumptions={},
            detail={},
            errors={},
            seconds={},
            **provenance.conditions(),
        )

    def recipe(self, name: str) -> Recipe:
        """A stage's recipe with this run's batch."""
        options, recipe = self.options, STAGES[name](self.preset)
        rows = dict(length=options.length, anchors=options.anchors, group=options.group, first=0)
        rows["batch"] = options.rows * options.accumulate * self.devices
        return replace(
            recipe,
            rows=replace(recipe.rows, **rows),
            optimizer=replace(recipe.optimizer, accumulate=options.accumulate),
            loss=replace(recipe.loss, slice_blocks=options.slice_blocks * options.rows),
            mesh=self.mesh_config,
        )

    # Models and rows

    def build(self) -> None:
        leaves, structure = jax.tree.flatten(random_target(self.preset.target))
        if self.mesh is not None:  # one by one: the first device has no room for all of them twice
            for i, spec in enumerate(specs(leaves, self.mesh)):
                leaves[i] = jax.block_until_ready(jax.device_put(leaves[i], NamedSharding(self.mesh, spec)))
        self.target = jax.block_until_ready(jax.tree.unflatten(structure, leaves))
        sizes = dict(target=self.target, drafter=nnx.eval_shape(lambda: Drafter(self.config, rngs=nnx.Rngs(0))))
        self.record["weight_bytes"] = {name: estimate.num_bytes(module) for name, module in sizes.items()}

    def batch(self, rows: int) -> tuple[jax.Array, ...]:
        """Random rows, spread over the mesh: two texts each, of which five sixths are supervised; and ``draw``."""
        rng, length = np.random.default_rng(0), self.options.length
        token_BT = rng.integers(0, self.config.mask_token_id, (rows, length)).astype(np.int32)
        cut_B1 = rng.integers(length // 3, 2 * length // 3, (rows, 1))
        place_T = np.arange(length)[None]
        inside_BT = np.where(place_T < cut_B1, place_T, place_T - cut_B1)
        mask_BT = inside_BT >= np.where(place_T < cut_B1, cut_B1, length - cut_B1) // 6
        segment_BT = np.where(place_T < cut_B1, 1, 2).astype(np.int32)
        arrays, draw = (token_BT, mask_BT, segment_BT), np.zeros(2, np.int32)
        if self.mesh is None:
            return *(jax.device_put(x) for x in arrays), jax.device_put(draw)
        spread, whole = (NamedSharding(self.mesh, PartitionSpec(*axes)) for axes in ((self.mesh.axis_names,), ()))
        return *(jax.device_put(x, spread) for x in arrays), jax.device_put(draw, whole)

    def start(self, recipe: Recipe) -> tuple[Any, Any]:
        """State and frozen part of a stage before its first step."""
        drafter = random_drafter(self.config)
        if recipe.adapt.lora is not None:
            drafter = lora.attach(drafter, recipe.adapt.lora, rngs=nnx.Rngs(1))
        trained = steps.trained_filter(recipe.adapt.trains)
        optimizer = steps.make_optimizer(recipe.optimizer)
        found = steps.start(drafter, optimizer, trained=trained, compute_dtype=self.target.dtype)
        return placed(found[0], self.mesh), placed(found[1], self.mesh)

    def ready(self, name: str) -> Stage:
        """A stage with its step compiled."""
        recipe = self.recipe(name)
        state, frozen = self.start(recipe)
        placement = None if self.mesh is None else jax.tree.map(lambda x: x.sharding, state)
        step = steps.make_step(
            self.config, steps.make_optimizer(recipe.optimizer), recipe.loss, num_anchors=recipe.rows.anchors,
            accumulate=recipe.optimizer.accumulate, group=recipe.rows.group, placement=placement,
            compiler_options=gather_options(self.target, self.mesh),
        )  # fmt: skip
        batch = self.batch(recipe.rows.batch)
        return Stage(recipe, self.compiled(step, state, frozen, self.target, *batch), state, frozen, batch)

    def compiled(self, function, *arguments):
        """A jitted function compiled for these arguments; its time is counted."""
        start = time.perf_counter()
        with traced_for(self.mesh):
            lowered = function.lower(*arguments)
        middle = time.perf_counter()
        found = lowered.compile(compiler_options=self.xla or None)
        self.trace_seconds += middle - start
        self.compile_seconds += time.perf_counter() - middle
        return found

    # Steps

    def stage(self, name: str) -> None:
        """Seconds of a step: the median over the timed ones, after one that is not."""
        stage = self.ready(name)
        rows, times, found = stage.recipe.rows.batch, [], {}
        for _ in range(1 + self.options.steps):
            begun = time.perf_counter()
            stage.state, found = stage.compiled(stage.state, stage.frozen, self.target, *stage.batch)
            jax.block_until_ready((stage.state, found))
            times.append(time.perf_counter() - begun)
        seconds = float(np.median(times[1:]))
        flops = estimate.row_flops(self.preset.target, self.config, stage.recipe)
        peak = estimate.peak_flops()
        memory = stage.compiled.memory_analysis()
        detail = dict(
            step_ms=1e3 * seconds,
            micro_batch_ms=1e3 * seconds / self.options.accumulate,
            range_ms=1e3 * (max(times[1:]) - min(times[1:])),
            samples_per_s=rows / seconds,
            tokens_per_s=rows * self.options.length / seconds,
            row_tflop={key: value / 1e12 for key, value in vars(flops).items()},
            mfu=None if peak is None else flops.total * rows / seconds / (peak * self.devices),
            trained=estimate.elements(stage.state.masters),
            loss=float(found["loss"]),
            anchors=float(found["anchors"]),
            nonfinite=int(stage.state.nonfinite),
            peak_gib=peak_gib(),
            peak_gib_by_device=[memory.peak / GIB for memory in devices.memory() if memory.peak],
            temporary_gib=memory.temp_size_in_bytes / GIB,
            argument_gib=memory.argument_size_in_bytes / GIB,
        )
        if self.options.profile:
            detail |= self.profiled(stage)
        if detail["nonfinite"]:
            raise FloatingPointError(f"{name}: {detail['nonfinite']} steps were not finite, loss {detail['loss']}")
        self.record["detail"][name] = detail
        self.record |= {f"{name}_samples_per_s": detail["samples_per_s"], "peak_gib": detail["peak_gib"]}
        self.record["mfu"] = detail["mfu"]
        self.record["micro_batch"] = self.room(detail)
        rates = [self.record["detail"][each]["samples_per_s"] for each in STAGES if each in self.record["detail"]]
        if len(rates) == len(STAGES):
            samples = (recipes.SAMPLES1, recipes.SAMPLES2)
            self.record["hours_both_stages"] = sum(n / rate for n, rate in zip(samples, rates, strict=True)) / 3600
            self.record["assumptions"] |= dict(samples=[recipes.SAMPLES1, recipes.SAMPLES2], sample="one row")

    def profiled(self, stage: Stage) -> dict[str, Any]:
        """Kernels of one step, and its communication: mean microseconds of a device."""

        def call():
            stage.state, found = stage.compiled(stage.state, stage.frozen, self.target, *stage.batch)
            return stage.state, found

        events = traced(call)
        return dict(kernels=kernel_times(events, 1)[:40], communication_us=communication(events, 1))

    def room(self, detail: dict[str, Any]) -> dict[str, Any]:
        """How many rows a micro-batch could have, if temporaries grow with them in proportion."""
        limits = [memory.limit for memory in devices.memory() if memory.limit]
        found = dict(rows=self.options.rows, temporary_gib_of_a_row=detail["temporary_gib"] / self.options.rows)
        if limits:
            free = min(limits) / GIB - detail["argument_gib"]
            found |= dict(
                limit_gib=min(limits) / GIB, rows_that_fit_in_proportion=int(free // found["temporary_gib_of_a_row"])
            )
        return found

    def stage1(self) -> None:
        self.stage("stage1")

    def stage2(self) -> None:
        self.stage("stage2")

    def timed(self, function: Callable, *arguments) -> tuple[float, Any]:
        """Milliseconds of a program (median) and what it returned last; its first call counts as compiling."""
        program = jax.jit(function, compiler_options=self.xla or None)
        found, times = None, []
        with traced_for(self.mesh):
            for _ in range(1 + self.options.steps):
                del found
                begun = time.perf_counter()
                found = jax.block_until_ready(program(*arguments))
                times.append(time.perf_counter() - begun)
        self.compile_seconds += times[0]
        return 1e3 * float(np.median(times[1:])), found

    def micro_batch(self) -> tuple[Any, ...]:
        """Tokens, mask, segments and anchors of one micro-batch."""
        *batch, _ = self.batch(self.options.rows * self.devices)
        return *batch, sample_anchors(step_key(0, 0), batch[1], batch[2], self.options.anchors)

    def target_pass(self) -> None:
        """The frozen target alone: what `features` takes of one micro-batch."""
        token_BT, _, segment_BT, anchors = self.micro_batch()

        def run(target, token_BT, segment_BT, anchors):
            return features(target, self.config, token_BT, segment_BT, anchors)

        ms, _ = self.timed(run, self.target, token_BT, segment_BT, anchors)
        self.record["split_ms"] = (self.record["split_ms"] or {}) | dict(target_alone=ms)

    def parts(self) -> None:
        """Drafter, loss and optimiser of stage 2 in programs of their own, over one micro-batch of random features.

        The target's part of a step is what remains; `--only ... target` measures it alone.
        """
        recipe = self.recipe("stage2")
        state, frozen = self.start(recipe)
        token_BT, mask_BT, segment_BT, anchors = self.micro_batch()
        found = jax.jit(self.random_features)(token_BT, filled(anchors))
        labels = block_labels(anchors, token_BT, mask_BT, segment_BT, self.config.block_size)
        group, dtype = recipe.rows.group, frozen.dtype

        def hidden(masters, frozen, target, found, token_BT, segment_BT, anchors):
            drafter = frozen.whole(masters)
            embed = None if drafter.config.own_embeddings else target.embed
            return block_hidden(
                drafter, found.taps_BTED, token_BT, segment_BT, anchors, embed, found.states, group=group, dtype=dtype
            )

        def backward(masters, *rest):
            return jax.grad(lambda masters: jnp.sum(hidden(masters, *rest).astype(jnp.float32)))(masters)

        rest = (frozen, self.target, found, token_BT, segment_BT, anchors)
        draft_ms, gradients = self.timed(backward, state.masters, *rest)
        shape = jax.eval_shape(hidden, state.masters, *rest)
        hidden_BAPD = jax.random.normal(jax.random.key(5), shape.shape, shape.dtype)

        def loss(hidden_BAPD, masters, frozen, target, teacher_BTD, labels):
            drafter = frozen.whole(masters)

            def terms(hidden_BAPD):
                head = drafter.head(None if drafter.config.own_embeddings else target.unembed)
                sums = losses.sums(
                    drafter, hidden_BAPD, teacher_BTD, labels, head, recipe.loss, teacher_unembed=target.unembed,
                    dtype=dtype,
                )  # fmt: skip
                return sums.objective, sums

            return jax.value_and_grad(terms, has_aux=True)(hidden_BAPD)

        loss_ms, ((_, sums), _) = self.timed(
            loss, hidden_BAPD, state.masters, frozen, self.target, found.hidden_BTD, labels
        )
        optimizer = steps.make_optimizer(recipe.optimizer)

        def update(state, gradients, sums):
            return steps.update(state, gradients, sums, optimizer)

        update_ms, _ = self.timed(update, state, gradients, sums)
        split = dict(draft=draft_ms, loss=loss_ms, optimizer=update_ms / self.options.accumulate)
        whole = self.record["detail"].get("stage2", {}).get("micro_batch_ms")
        if whole is not None:
            split |= dict(whole=whole, target=whole - draft_ms - loss_ms - split["optimizer"])
        flops, rows = estimate.row_flops(self.preset.target, self.config, recipe), self.options.rows * self.devices
        self.record["tflop_per_s"] = {
            part: value * rows / split[part] / 1e9 for part, value in vars(flops).items() if part in split
        }
        self.record["split_ms"] = (self.record["split_ms"] or {}) | split

    def random_features(self, token_BT, position_BA) -> Features:
        """What a target would find of such rows, up to its values."""
        c, reader, dtype = self.preset.target, self.preset.reader(), self.target.dtype
        keys = jax.random.split(jax.random.key(4), 2 + len(reader.state_layers))
        shape = (*position_BA.shape, reader.memory_heads, reader.key_dim, reader.value_dim)
        return Features(
            jax.random.normal(keys[0], (*token_BT.shape, len(self.config.taps), c.hidden_size), dtype),
            jax.random.normal(keys[1], (*token_BT.shape, c.hidden_size), dtype),
            {layer: jax.random.normal(key, shape) for layer, key in zip(reader.state_layers, keys[2:], strict=True)},
        )

    def regeneration(self) -> None:
        """Rounds of a batch of answers at half their length, with the stated number of tokens per round."""
        options, config = self.options, self.config
        bare = replace(config, reader=None)
        drafter = random_drafter(bare)
        batch, block = options.decode_batch, config.block_size
        filled_to = options.prompt_tokens + options.answer_tokens // 2
        low, high = options.turns
        walks = even_walks(options.acceptance_length, high, batch, block)
        slots = 8 + max(sum(a + 1 for a in walk) for walk in walks)
        capacity = -(-(filled_to + slots) // 256) * 256
        state = jax.eval_shape(lambda t: init_state(t.config, batch, capacity, dtype=t.dtype), self.target)
        context = jax.eval_shape(lambda d: d.init_context(batch, capacity), drafter)
        counters, zero_B = jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32)
        run = Decoding(
            state=random_memory(state, filled_to), context=random_memory(context, filled_to), anchor_B=zero_B + 1,
            token_BN=counters.at[:, 0].set(1), num_emitted_B=zero_B + 1, num_rounds_B=zero_B, finish_B=zero_B,
            proposed_BN=counters, accepted_BN=counters, emitted_BN=counters, logits_BNV=None,
        )  # fmt: skip
        program = Program(decode, options=self.xla)
        self.programs.append(program)

        def call(rounds: int, draft: int, text_BN) -> Decoding:
            script = Scripted.by_round(np.full(batch, filled_to), text_BN, np.array(walks), config.vocab_size)
            limits = Limits(
                zero_B + (1 << 30), jnp.array([-1], jnp.int32), zero_B + draft, jnp.float32(0),
                jnp.int32(config.max_position_embeddings),
            )  # fmt: skip
            arguments = dict(target=self.target, drafter=Forced(drafter, script), run=run, limits=limits)
            return jax.block_until_ready(program(**arguments, max_rounds=jnp.int32(rounds)))

        text_BN = np.asarray(call(slots - 1, 0, np.zeros((batch, slots), np.int32)).token_BN)  # nothing proposed
        times: dict[int, list[float]] = {low: [], high: []}
        done = None
        for _ in range(options.steps):
            for rounds in times:
                begun = time.perf_counter()
                done = call(rounds, block, text_BN)
                times[rounds].append(time.perf_counter() - begun)
        assert done is not None
        seconds = (np.median(times[high]) - np.median(times[low])) / (high - low)
        length = float(np.sum(np.asarray(done.num_emitted_B) - 1) / np.sum(np.asarray(done.num_rounds_B)))
        rate = batch * length / seconds
        split = self.record["split_ms"] or {}
        target_ms = split.get("target_alone", split.get("target"))
        detail: dict[str, Any] = dict(
            batch=batch,
            round_ms=1e3 * seconds,
            acceptance_length=length,
            tokens_per_s=rate,
            tokens_in_memory=filled_to,
            peak_gib=peak_gib(),
        )
        self.record["detail"]["regeneration"] = detail
        samples = recipes.SAMPLES1 + recipes.SAMPLES2
        self.record["assumptions"] |= dict(
            acceptance_length=options.acceptance_length,
            answer_tokens=options.answer_tokens,
            prompt_tokens=options.prompt_tokens,
            regenerated=samples,
            batch="its rows end together, or others take their places; all at half the answer's length",
            prompts="consumed at the rate of the target's part of a training step",
        )
        if target_ms is None:
            raise ValueError("the time of prompts comes from `parts` after `stage2`, or from `target`: neither has run")
        prompt_seconds = options.prompt_tokens * target_ms / 1e3 / (options.rows * self.devices * options.length)
        detail["prompt_tokens_per_s"] = options.prompt_tokens / prompt_seconds
        self.record["hours_regeneration"] = samples * (options.answer_tokens / rate + prompt_seconds) / 3600

    # The order

    def settle(self) -> None:
        for name, own in (("compile_seconds", self.compile_seconds), ("trace_seconds", self.trace_seconds)):
            self.record[name] = round(own + sum(getattr(program, name) for program in self.programs), 2)

    def found(self, name: str, before: dict[str, Any]) -> dict[str, Any]:
        of_parts = self.record["split_ms"] if name in ("parts", "target") else None
        return self.record["detail"].get(name) or of_parts or {}

    def __call__(self) -> dict[str, Any]:
        self.attempt("build", self.build)
        chosen = self.options.only or [name for name in STEPS if name != "target"]
        run = {name: getattr(self, name) for name in STEPS if name != "target"} | dict(target=self.target_pass)
        for name in STEPS:
            if name in chosen and not (name == "regeneration" and self.mesh is not None):
                self.attempt(name, run[name])
        return self.record


def peak_gib() -> float | None:
    """The most that any device has held so far; None where the backend does not tell."""
    peaks = [memory.peak for memory in devices.memory() if memory.peak]
    return max(peaks) / GIB if peaks else None


def even_walks(length: float, rounds: int, batch: int, block: int) -> list[list[int]]:
    """Accepted proposals per row and round whose mean is ``length - 1``, as even as whole numbers allow.

    Raises ValueError for a length that a block cannot give.
    """
    if not 1 <= length <= block + 1:
        raise ValueError(f"acceptance length {length} must lie in 1..{block + 1}: a block has {block} proposals")
    edges = np.floor(np.arange(batch * rounds + 1) * (length - 1) + 1e-9).astype(int)
    return np.diff(edges).reshape(rounds, batch).T.tolist()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3_8_27b")
    parser.add_argument("--drafter", choices=("v1", "v2"), default="v2", help="revision of the public drafter")
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch, on each device")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches of a step (the recipes have 64)")
    parser.add_argument("--length", type=int, default=recipes.ROWS.length, help="tokens of a row")
    parser.add_argument("--anchors", type=int, default=recipes.ROWS.anchors, help="of a row")
    parser.add_argument("--group", type=int, default=recipes.ROWS.group, help="anchors recomputed at once (0: kept)")
    parser.add_argument("--slice-blocks", type=int, default=recipes.LOSS.slice_blocks, help="of a row, in the loss")
    parser.add_argument("--steps", type=int, default=3, help="timed, of each kind")
    parser.add_argument("--data", type=int, default=1, help="devices that rows are spread over")
    parser.add_argument("--shard", type=int, default=1, help="devices that weights are split over")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP", help=f"of {' '.join(STEPS)}")
    parser.add_argument("--profile", action="store_true", help="also where a step spends its time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here, after every step")
    parser.add_argument("--decode-batch", type=int, default=64, help="answers regenerated at once")
    parser.add_argument("--acceptance-length", type=float, default=PUBLISHED_ACCEPTANCE, help="of regeneration")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of a sample, on average")
    parser.add_argument("--answer-tokens", type=int, default=1280, help="of a sample, on average")
    parser.add_argument("--turns", type=int, nargs=2, default=(2, 12), metavar=("LOW", "HIGH"), help="rounds timed")
    parser.add_argument("--compile-cache", metavar="DIR", help="keep compiled programs here")
    parser.add_argument("--xla-option", action="append", default=[], metavar="NAME=VALUE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.compile_cache:
        devices.enable_compile_cache(options.compile_cache)
    preset = PRESETS[options.preset]
    devices.refuse_large_on_cpu(
        estimate.num_bytes(nnx.eval_shape(lambda: Target(preset.target, rngs=nnx.Rngs(0)))), None
    )
    print(f"device: {jax.default_backend()} ({jax.devices()[0].device_kind}), jax {jax.__version__}", flush=True)
    record = Bench(options, preset)()
    return 1 if record["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
