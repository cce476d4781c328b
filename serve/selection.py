"""Which prompts an evaluation decodes, in which order and in which batches; and a bigram table from text."""

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ready_jax import bench_data, provenance
from ready_jax.baselines import BaselineConfig, Bigram
from ready_jax.pair import Pair, prompt_bucket


@dataclass(frozen=True)
class Prompt:
    """A benchmark row as token ids; ``index`` is its place in the selection."""

    benchmark: str
    index: int
    id: str
    token_ids: list[int]


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together, padded to ``width`` tokens; ``name`` is unique in a run."""

    name: str
    width: int
    prompts: list[Prompt]


def select(
    pair: Pair, name: str, *, data_dir, limit: int | None, thinking: bool, longest: int
) -> tuple[list[Prompt], dict[str, Any]]:
    """The first ``limit`` prompts of a set that have at most ``longest`` tokens, and what identifies them."""
    if pair.chat is None or not pair.chat.has_tokenizer:
        raise ValueError("an evaluation needs the model's tokenizer and chat template, which its folder lacks")
    rows = bench_data.bench_prompts(name, data_dir)
    fitting, first = [], None
    for row in rows:
        if limit is not None and len(fitting) == limit:
            break
        text = pair.chat.render(row["prompt"], enable_thinking=thinking)
        ids = pair.chat.encode_text(text)
        if len(ids) <= longest:
            first = text if first is None else first
            fitting.append(Prompt(name, len(fitting), row["id"], ids))
    if not fitting:
        raise ValueError(f"no prompt of {name} has at most {longest} tokens: --prompt-tokens or --max-new-tokens")
    identity = dict(
        in_file=len(rows),
        used=len(fitting),
        longest=max(len(prompt.token_ids) for prompt in fitting),
        ids=[prompt.id for prompt in fitting],
        prompts_sha256=hashlib.sha256(json.dumps([p.token_ids for p in fitting]).encode()).hexdigest(),
        file_sha256=provenance.sha256(bench_data.bench_file(name, data_dir)),
        first_prompt=first,
    )
    return fitting, identity


def batches(prompts: Sequence[Prompt], size: int, width: int | None = None) -> Iterator[Batch]:
    """Batches of ``size`` in the given order; ``width`` None is the bucket of the set's longest prompt."""
    width = width or prompt_bucket(max(len(prompt.token_ids) for prompt in prompts))
    for place in range(0, len(prompts), size):
        name = f"{prompts[0].benchmark}/{place // size}"
        yield Batch(name, width, list(prompts[place : place + size]))


def bigram_of(file: Path, pair: Pair, config: BaselineConfig) -> Bigram:
    """A table of successors (.npy of `train.loop`), or one counted from the texts of a .jsonl(.gz) file."""
    if file.suffix == ".npy":
        return Bigram(jnp.asarray(np.load(file), jnp.int32), config)
    assert pair.chat is not None
    documents = []
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            turns = row.get("messages") or [dict(role="assistant", content=row["text"])]
            texts = [turn["content"] for turn in turns if turn["role"] == "assistant"]
            documents += [np.array(pair.chat.encode_text(text), np.int32) for text in texts]
    documents = [document for document in documents if len(document) > 1]
    if not documents:
        raise ValueError(f"{file}: no text to count successors in; rows need `messages` or `text`")
    return Bigram.count(documents, pair.target.config.vocab_size, config)
