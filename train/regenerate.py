"""Answers of the target itself to training prompts: what a drafter must learn to predict.

DSpark trains on regenerated answers (arXiv 2607.05147, section 4.1). Evaluation here is greedy, so most answers are
greedy and a share is sampled at a temperature. Rows of a batch are independent prompts of their own length, left
unpadded through ``num_B``; one row is verified per step, and a batch ends when its last row does.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ready_jax.configs.drafter_training import RegenerateConfig
from ready_jax.programs import EXACT
from ready_jax.state import commit, init_state
from ready_jax.train.corpus import Corpus
from ready_jax.verify import is_stop


@dataclass(frozen=True)
class Prompt:
    """Where a prompt comes from: a document of the corpus, cut before one of its answers."""

    document: int
    length: int


@partial(jax.jit, static_argnames=("new_tokens",), compiler_options=EXACT)
def generate_rows(target, key, token_BT, num_B, temperature_B, budget_B, stop_L, *, new_tokens: int):
    """(tokens [B, new_tokens], how many, whether a stop token ended them); 0 temperature is exactly greedy.

    Sampling adds temperature-scaled Gumbel noise to the logits before the argmax. The stop token is among the tokens.
    """
    batch, tokens = token_BT.shape
    state = init_state(target.config, batch, tokens + new_tokens, dtype=target.dtype)
    out, state = target.prefill(token_BT, state, num_B)

    def pick(key, hidden_B1D):
        logits_BV = target.unembed(hidden_B1D)[:, 0]
        noise_BV = jax.random.gumbel(key, logits_BV.shape)
        logits_BV = jnp.where(temperature_B[:, None] > 0, logits_BV + temperature_B[:, None] * noise_BV, logits_BV)
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def running(carry):
        _, _, _, _, done_B, step = carry
        return (step < new_tokens) & ~jnp.all(done_B)

    def body(carry):
        state, newest_B, token_BN, count_B, done_B, step = carry
        out, pending = target.verify(newest_B[:, None], state)
        state = commit(state, pending, jnp.where(done_B, 0, 1))
        newest_B = jnp.where(done_B, newest_B, pick(jax.random.fold_in(key, step), out.hidden_BTD))
        token_BN = token_BN.at[:, step].set(jnp.where(done_B, 0, newest_B))
        count_B = count_B + jnp.where(done_B, 0, 1)
        done_B = done_B | is_stop(newest_B, stop_L) | (count_B >= budget_B)
        return state, newest_B, token_BN, count_B, done_B, step + 1

    last_B1D = jnp.take_along_axis(out.hidden_BTD, (num_B - 1)[:, None, None], axis=1)
    first_B = pick(jax.random.fold_in(key, 0), last_B1D)
    live_B = budget_B > 0
    token_BN = jnp.zeros((batch, new_tokens), jnp.int32).at[:, 0].set(jnp.where(live_B, first_B, 0))
    done_B = ~live_B | is_stop(first_B, stop_L) | (budget_B <= 1)
    carry = (state, first_B, token_BN, live_B.astype(jnp.int32), done_B, jnp.ones((), jnp.int32))
    _, newest_B, token_BN, count_B, _, _ = jax.lax.while_loop(running, body, carry)
    return token_BN, count_B, live_B & is_stop(newest_B, stop_L)


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
