"""Answers of the target itself to training prompts: what a drafter must learn to predict.

DSpark trains on regenerated answers (arXiv 2607.05147, section 4.1). Evaluation here is greedy, so most answers are
greedy and a share is sampled at a temperature.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ready_jax.configs.drafter_training import RegenerateConfig
from ready_jax.train.corpus import Corpus
from ready_jax.train.greedy import generate_rows


@dataclass(frozen=True)
class Prompt:
    """Where a prompt comes from: a document of the corpus, cut before one of its answers."""

    document: int
    length: int


def choose_prompts(corpus: Corpus, config: RegenerateConfig) -> list[Prompt]:
    """One answer per conversation, drawn by seed, whose prompt fits; at most ``max_per_source`` of a source.

    A prompt is everything before the answer. In random order, at most ``num_prompts``.
    """
    rng = np.random.default_rng(config.seed)
    counts = np.zeros(len(corpus.sources), np.int64)
    chosen: list[Prompt] = []
    for document in rng.permutation(len(corpus)):
        begins = corpus.document_spans(document)[:, 0]
        begins = begins[(begins > 0) & (begins <= config.prompt_tokens)]
        source = corpus.source_ids[document]
        if len(begins) == 0 or counts[source] >= config.max_per_source:
            continue
        counts[source] += 1
        chosen.append(Prompt(int(document), int(rng.choice(begins))))
        if len(chosen) == config.num_prompts:
            break
    if not chosen:
        raise ValueError(f"no conversation has a prompt of at most prompt_tokens={config.prompt_tokens} tokens")
    return chosen


def regenerate(target, corpus: Corpus, config: RegenerateConfig, *, log=print) -> Corpus:
    """The chosen prompts with the target's answers as a corpus: supervised are the answers, end token included.

    Answers shorter than ``min_answer`` tokens are dropped; those cut by the budget are kept without an end token.
    """
    prompts = choose_prompts(corpus, config)
    # Short prompts first, batches of near equal length: each batch is padded to the next multiple of 128 only.
    prompts.sort(key=lambda prompt: prompt.length)
    greedy_from = np.random.default_rng((config.seed, 1)).random(len(prompts)) >= config.sampled_share
    stop_L = jnp.array(target.config.eos_token_ids or (-1,), jnp.int32)
    documents: list[NDArray[np.integer]] = []
    spans: list[tuple[int, int]] = []
    kept: list[int] = []
    begun, stopped = time.perf_counter(), 0

    def collect(first, pending):
        nonlocal stopped
        token_BN, count_B, stop_B = (np.asarray(x) for x in pending)
        for row, prompt in enumerate(prompts[first : first + config.batch]):
            stopped += bool(stop_B[row])
            if count_B[row] < config.min_answer:
                continue
            question = corpus.document(prompt.document)[: prompt.length]
            documents.append(np.concatenate([question, token_BN[row, : count_B[row]]]).astype(corpus.tokens.dtype))
            spans.append((prompt.length, prompt.length + int(count_B[row])))
            kept.append(prompt.document)

    waiting = None
    for first in range(0, len(prompts), config.batch):
        some = prompts[first : first + config.batch]
        width = -(-max(prompt.length for prompt in some) // 128) * 128
        token_BT, num_B = np.zeros((config.batch, width), np.int32), np.ones(config.batch, np.int32)
        budget_B, temperature_B = np.zeros(config.batch, np.int32), np.zeros(config.batch, np.float32)
        for row, prompt in enumerate(some):
            token_BT[row, : prompt.length] = corpus.document(prompt.document)[: prompt.length]
            num_B[row], budget_B[row] = prompt.length, config.new_tokens
            temperature_B[row] = 0.0 if greedy_from[first + row] else config.temperature
        key = jax.random.fold_in(jax.random.key(config.seed), first)
        rows = (token_BT, num_B, temperature_B, budget_B)
        found = generate_rows(target, key, *rows, stop_L, new_tokens=config.new_tokens)
        if waiting is not None:
            collect(*waiting)
        waiting = (first, found)
        if first // config.batch % 10 == 0:
            log(f"regenerate: {first} of {len(prompts)} prompts, {time.perf_counter() - begun:.1f} s")
    if waiting is not None:
        collect(*waiting)
    seconds = time.perf_counter() - begun
    new = sum(end - begin for begin, end in spans)
    info = {
        "prompts": len(prompts), "kept": len(spans), "answer_tokens": new, "stopped": stopped / len(prompts),
        "seconds": round(seconds, 1), "corpus": corpus.info.get("files_sha256", {}),
    }  # fmt: skip
    log(f"regenerate: {info['kept']} answers, {new} tokens, {info['stopped']:.1%} ended by themselves, {seconds:.1f} s")
    if not kept:
        raise ValueError(f"no answer has min_answer={config.min_answer} tokens: found {len(prompts)} shorter ones")
    return Corpus(
        np.concatenate(documents),
        np.cumsum([0, *map(len, documents)], dtype=np.int64),
        np.array(spans, np.int32),
        np.arange(len(spans) + 1, dtype=np.int64),
        corpus.category_ids[kept],
        corpus.source_ids[kept],
        corpus.categories,
        corpus.sources,
        info,
    )


def digest(corpus: Corpus) -> str:
    """A hash of tokens and supervision, for the result file."""
    found = hashlib.sha256(np.ascontiguousarray(corpus.tokens).tobytes())
    found.update(np.ascontiguousarray(corpus.spans).tobytes())
    return found.hexdigest()
