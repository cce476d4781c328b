"""What a run will take, from its configuration alone: parameters, arithmetic, memory, time, disk.

Model FLOPs count every product once forward and as often backward as its inputs and weights need gradients; what is
recomputed to save memory is not counted, so that MFU means useful work.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from ready_jax import lora
from ready_jax.config import DrafterConfig, TargetConfig
from ready_jax.configs.drafter_training import Recipe
from ready_jax.drafter import Drafter
from ready_jax.target import Target
from ready_jax.train.step import trained_filter

#: Dense bf16 peaks, FLOP/s, by what JAX calls the device (vendor data sheets).
PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA B200": 2250e12, "NVIDIA A100-SXM4-80GB": 312e12}
#: The share of the peak that an estimate of time assumes.
ASSUMED_MFU = 0.35


def peak_flops(kind: str | None = None) -> float | None:
    """bf16 peak of a device kind (None: of this process's first device); None where it is not known, as on a CPU."""
    return PEAK.get(jax.devices()[0].device_kind if kind is None else kind)


def elements(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def abstract_models(target: TargetConfig, drafter: DrafterConfig, recipe: Recipe) -> tuple[Any, Any]:
    """Target and drafter (LoRA attached) without arrays."""
    adapt = recipe.adapt

    def make():
        model = Drafter(drafter, rngs=nnx.Rngs(0), dtype="bfloat16")
        return model if adapt.lora is None else lora.attach(model, adapt.lora, rngs=nnx.Rngs(0))

    return nnx.eval_shape(lambda: Target(target, rngs=nnx.Rngs(0), dtype="bfloat16")), nnx.eval_shape(make)


def backward_layers(drafter: DrafterConfig, recipe: Recipe) -> int:
    """Draft layers that gradients pass through: for a reader alone those from its first injection on."""
    if recipe.adapt.trains != ("reader",) or drafter.reader is None:
        return drafter.num_layers
    return drafter.num_layers - min(drafter.inject_layers or (drafter.num_layers - 1,))


@dataclass(frozen=True)
class Flops:
    """Model FLOPs of one row, by part."""

    target: float
    draft: float
    loss: float

    @property
    def total(self) -> float:
        return self.target + self.draft + self.loss


def row_flops(target: TargetConfig, drafter: DrafterConfig, recipe: Recipe) -> Flops:
    """Of one row of ``rows.length`` tokens with ``rows.anchors`` blocks."""
    t, d = target, drafter
    tokens, rows = recipe.rows.length, recipe.rows.anchors * d.block_size
    attention = 2 * t.num_attention_heads * t.head_dim + 2 * t.num_key_value_heads * t.head_dim
    attention += t.num_attention_heads * t.head_dim  # out
    delta = t.conv_channels + 2 * t.linear_num_value_heads + 2 * t.value_width
    weights = t.hidden_size * (len(t.full_layers) * attention + len(t.linear_layers) * delta)
    weights += t.num_layers * 3 * t.hidden_size * t.intermediate_size
    scores = len(t.full_layers) * 2 * tokens * t.num_attention_heads * t.head_dim  # causal: half of 4 T
    state = 6 * t.linear_num_value_heads * t.linear_key_head_dim * t.linear_value_head_dim * len(t.linear_layers)
    forward = tokens * (2 * weights + scores + state)

    kv = 2 * d.num_key_value_heads * d.head_dim
    heads = d.num_attention_heads * d.head_dim
    context = 2 * tokens * d.hidden_size * (len(d.taps) * d.hidden_size + d.num_layers * kv)
    mlp = 3 * d.hidden_size * d.intermediate_size
    seen = tokens / 2 if d.sliding_window is None else min(tokens / 2, d.sliding_window)
    layer = rows * (2 * (d.hidden_size * (2 * heads + kv) + mlp) + 4 * heads * (seen + d.block_size))
    # Backward: inputs need gradients; weights too where they train. Context rows only carry gradients to weights.
    full, depth = "drafter" in recipe.adapt.trains, backward_layers(d, recipe)
    back = depth * layer
    if depth < d.num_layers and d.reader is not None and d.reader.inject_side == "after_attention":
        back -= layer - 2 * rows * mlp  # of the first layer that is read into only what follows the reader
    draft = d.num_layers * layer + (2 if full else 1) * back
    draft += (3 if full else 2 if "lora" in recipe.adapt.trains else 1) * context
    vocabulary = 2 * rows * d.vocab_size
    head = vocabulary * d.hidden_size * 3  # draft, teacher, and the draft's inputs backward
    markov = vocabulary * d.markov_rank * (3 if full else 1)
    return Flops(float(forward), float(draft), float(head + markov))


def memory(target: TargetConfig, drafter: DrafterConfig, recipe: Recipe) -> dict[str, float]:
    """Bytes on one device, roughly: weights, what trains, features of a micro-batch, activations, logits."""
    big, small = abstract_models(target, drafter, recipe)
    trained = elements(nnx.state(small, trained_filter(recipe.adapt.trains)))
    devices, shard = recipe.mesh.data * recipe.mesh.shard, recipe.mesh.shard
    rows = max(recipe.rows.batch // recipe.optimizer.accumulate // devices, 1)
    tokens, anchors, d = recipe.rows.length, recipe.rows.anchors, drafter
    reader = drafter.reader
    state = 0 if reader is None else len(reader.state_layers) * reader.memory_heads * reader.key_dim * reader.value_dim
    group, layers, hidden = (recipe.rows.group or anchors) * d.block_size, backward_layers(d, recipe), d.hidden_size
    activations = rows * group * layers * 2 * (8 * hidden + 4 * d.intermediate_size)
    scores = rows * d.num_attention_heads * group * tokens * 4 * (2 * layers + 1)
    blocks = max(recipe.loss.slice_blocks // rows, 1) * rows
    return {
        "target": num_bytes(big) / shard,
        "drafter": num_bytes(small) / shard,
        "masters_moments_gradients": 16 * trained / shard,
        "features": rows * tokens * 2 * hidden * (len(d.taps) + 1) * 2.0,
        "states_at_anchors": rows * anchors * state * 4.0,
        "target_pass": rows * tokens * (12 * target.intermediate_size + 8.0 * tokens * target.num_attention_heads),
        "draft_activations": float(activations + scores),
        "logits": 3.0 * min(blocks, rows * anchors) * d.block_size * d.vocab_size * 4,
    }  # fmt: skip


def feature_bytes(samples: int, tokens: int, taps: int, width: int, itemsize: int = 2) -> int:
    """What a feature cache on disk would take (taps alone): the reason why features are computed online."""
    return samples * tokens * taps * width * itemsize


def check_disk(folder: Path, needed: int, what: str) -> None:
    """OSError before anything is computed, where the disk cannot hold what a run would write."""
    at = folder
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free
    if needed > free:
        raise OSError(f"{what} needs {needed / 1e6:.1f} MB in {folder}, {free / 1e6:.1f} MB are free")


def run_bytes(drafter: Any, recipe: Recipe) -> int:
    """What a run writes: states (masters, moments), `latest` and `best`, one more while it is replaced; exports."""
    trained = elements(nnx.state(drafter, trained_filter(recipe.adapt.trains)))
    return 12 * trained * (recipe.log.keep + 2) + 2 * 2 * elements(drafter)


def report(target: TargetConfig, drafter: DrafterConfig, recipe: Recipe, kind: str) -> list[str]:
    """The lines of a dry run."""
    big, small = abstract_models(target, drafter, recipe)
    parts = memory(target, drafter, recipe)
    flops = row_flops(target, drafter, recipe)
    rows = recipe.optimizer.steps * recipe.rows.batch
    devices = recipe.mesh.data * recipe.mesh.shard
    trained = {
        name: elements(nnx.state(small, trained_filter((name,)))) for name in recipe.adapt.trains
    }  # fmt: skip
    lines = [
        f"target {elements(big):,} parameters, drafter {elements(small):,}",
        "trains " + ", ".join(f"{name} {count:,}" for name, count in trained.items()),
        f"{recipe.optimizer.steps} steps of {recipe.rows.batch} rows x {recipe.rows.length} tokens, "
        f"{recipe.rows.anchors} anchors x {drafter.block_size}, {recipe.optimizer.accumulate} micro-batches",
        f"memory per device about {sum(parts.values()) / 2**30:.2f} GiB: "
        + ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items()),
        f"{flops.total * recipe.rows.batch / 1e12:.2f} TFLOP a step: target {flops.target / flops.total:.0%}, "
        f"draft {flops.draft / flops.total:.0%}, loss {flops.loss / flops.total:.0%}",
        f"disk {run_bytes(small, recipe) / 1e6:.0f} MB; a feature cache, which is not written, would take "
        f"{feature_bytes(rows, recipe.rows.length, len(drafter.taps), drafter.hidden_size) / 1e9:,.1f} GB",
    ]
    peak = peak_flops(kind)
    if peak is None:
        lines.append(f"time: not estimated, the peak of {kind!r} is not known (NVIDIA H200 and others are)")
    else:
        hours = flops.total * rows / (peak * devices * ASSUMED_MFU) / 3600
        lines.append(f"time about {hours:.2f} h on {devices} x {kind} at {ASSUMED_MFU:.0%} of its peak")
    return lines
