"""A training run on models of a few thousand parameters, in this process or, as a script, in one that may be killed.

Programs are compiled without optimisation, once for all processes that share a cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before JAX starts
    os.environ["JAX_PLATFORMS"] = "cpu"
    devices = json.loads(sys.argv[1])["devices"]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"

import jax
import numpy as np
import tiny
from jax.experimental.compilation_cache import compilation_cache

from ready_jax.config import FULL, LINEAR, DrafterConfig, LoraConfig, ReaderConfig
from ready_jax.configs.drafter_training import (
    AdaptConfig,
    EvaluateConfig,
    FilesConfig,
    LogConfig,
    OptimizerConfig,
    Recipe,
    RowsConfig,
)
from ready_jax.train import loop
from ready_jax.train.corpus import Corpus, Packed, write_corpus, write_shard
from ready_jax.train.mesh import join_processes

TARGET = tiny.target_config(
    hidden_size=32, intermediate_size=32, layer_types=(LINEAR, FULL), linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=16, vocab_size=100, eos_token_ids=(tiny.EOS,),
)  # fmt: skip
DRAFTER: DrafterConfig = tiny.drafter_config(TARGET, taps=(-1, 0), num_layers=1, intermediate_size=32, markov_rank=4)
READER = ReaderConfig(rank=2, state_layers=(0,), memory_heads=4, key_dim=8, value_dim=16, mlp_hidden=8)
LORA = LoraConfig(rank=2, alpha=4.0)
STEPS, ROWS, LENGTH = 6, 8, 48


def target():
    """The frozen target, fp32."""
    fields = {name: getattr(TARGET, name) for name in TARGET.__dataclass_fields__}
    return tiny.target(**fields)


def packed(rows: int = 24, length: int = LENGTH, seed: int = 3) -> Packed:
    """Rows of two documents, each a prompt and an answer."""
    rng = np.random.default_rng(seed)
    column = np.broadcast_to(np.arange(length), (rows, length))
    edge = rng.integers(length // 3, length // 2, (rows, 1))
    segment_BT = np.where(column < edge, 1, 2).astype(np.uint16)
    mask_BT = np.where(column < edge, column, column - edge) >= 4
    return Packed(rng.integers(0, tiny.PAD, (rows, length)).astype(np.uint16), mask_BT, segment_BT)


def shards(folder: Path, rows: Packed | None = None) -> str:
    """The glob of one written shard."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "rows.npz.xz", packed() if rows is None else rows, {"made": "by a test"})
    return str(folder / "rows.npz.xz")


def corpus(count: int = 8, seed: int = 5) -> Corpus:
    """Conversations of one prompt and one answer."""
    rng = np.random.default_rng(seed)
    sizes, prompts = rng.integers(16, 28, count), rng.integers(3, 7, count)
    tokens = rng.integers(0, tiny.PAD, int(sizes.sum())).astype(np.uint16)
    zero = np.zeros(count, np.uint8)
    return Corpus(
        tokens, np.cumsum([0, *sizes], dtype=np.int64), np.stack([prompts, sizes], 1).astype(np.int32),
        np.arange(count + 1, dtype=np.int64), zero, zero, ("text",), ("made",), {},
    )  # fmt: skip


def heldout(folder: Path) -> str:
    write_corpus(folder / "heldout.npz.xz", corpus())
    return str(folder / "heldout.npz.xz")


def recipe(out: Path, data: str = "", *, evaluate: str = "", **sections) -> Recipe:
    """A base drafter from scratch, logged at every step; ``sections`` replace fields of sections."""
    made = Recipe(
        drafter=DRAFTER,
        optimizer=OptimizerConfig(learning_rate=1e-2, steps=STEPS),
        rows=RowsConfig(batch=ROWS, length=LENGTH, anchors=4),
        evaluate=EvaluateConfig(every=3, heldout=evaluate, batch=4, max_samples=4, prompt_tokens=8, new_tokens=8)
        if evaluate
        else EvaluateConfig(),
        files=FilesConfig(out=str(out), shards=data),
        log=LogConfig(every=1, save_every=2, tensorboard=False, progress=False),
    )
    for name, changes in sections.items():
        value = replace(getattr(made, name), **changes) if isinstance(changes, dict) else changes
        made = replace(made, **{name: value})
    return made


STAGE1 = AdaptConfig(trains=("reader",), reader=READER)
STAGE2 = AdaptConfig(trains=("reader", "lora"), reader=READER, lora=LORA)
STATELESS = AdaptConfig(trains=("lora",), lora=LORA)


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out: Path) -> dict[int, float]:
    """Step -> logged loss; a step that was logged twice is a fault."""
    lines = [line for line in metrics(out) if "loss" in line]
    found = {line["step"]: line["loss"] for line in lines}
    assert len(found) == len(lines)
    return found


SETTINGS: dict[str, Any] = {
    "jax_disable_most_optimizations": True,
    "jax_persistent_cache_min_compile_time_secs": 0.3,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def cache(tmp_path_factory) -> Path:
    """Of one pytest process: several files train the same tiny drafter."""
    return tmp_path_factory.getbasetemp() / "programs"


@contextlib.contextmanager
def quickly(folder: Path) -> Iterator[None]:
    """Every program that is compiled inside is compiled quickly, and once."""
    wanted = SETTINGS | {"jax_compilation_cache_dir": str(folder)}
    before = {name: jax.config.values[name] for name in wanted}  # not all of them are attributes
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX decides once per process whether there is a cache
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def process(out: Path, data: str, programs: Path, *, devices: int = 4, join=(), **sections) -> subprocess.Popen:
    """The run in a process of its own, writing OUT.log; of several, where ``join`` is what ``join_processes`` takes."""
    words = dict(out=str(out), data=data, programs=str(programs), devices=devices, join=join, sections=sections)
    with Path(f"{out}.log").open("a") as log:
        command = [sys.executable, __file__, json.dumps(words)]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def main(words: dict[str, Any]) -> None:
    if words["join"]:
        join_processes(*words["join"])
    with quickly(Path(words["programs"])):
        made = recipe(Path(words["out"]), words["data"], **words["sections"])
        loop.run(made, target=target(), log=lambda line: sys.stdout.write(line + "\n"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
