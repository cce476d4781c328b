"""Answers of the target itself to training prompts: what a drafter must learn to predict.

    python -m ready_jax.train.regenerate --target FOLDER --draft-model FOLDER --corpus PROMPTS.npz.xz --out FILE.npz.xz
    python -m ready_jax.train.regenerate --recipe nano_ready_stage1 --out FILE.npz.xz

DSpark trains on regenerated answers (arXiv 2607.05147, section 4.1). Evaluation here is greedy, so most answers are
greedy and a share is sampled at a temperature. With a drafter greedy answers are decoded speculatively, in the loop
that decodes everywhere; they are what that loop says without one. Sampled answers are drawn token by token.

Prompts are a corpus of `train.data --prompts` or of conversations, which are cut before an answer. Batches of near
equal length are written beside --out as they end: the same command goes on where a killed one was, to the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ready_jax import checkpoint
from ready_jax.configs.drafter_training import RegenerateConfig
from ready_jax.configs.named import recipe as named_recipe
from ready_jax.export import write_json
from ready_jax.pair import Pair
from ready_jax.train.acceptance import decode_rows
from ready_jax.train.corpus import Corpus, read_corpus, sidecar, write_corpus
from ready_jax.train.greedy import generate_rows
from ready_jax.verify import STOP

#: What is known of a finished batch, by row: tokens, how many, ended by themselves, rounds of speculation.
ANSWERS = ("token_BN", "count_B", "stopped_B", "rounds_B")


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
    for document in map(int, rng.permutation(len(corpus))):
        begins = corpus.document_spans(document)[:, 0]
        begins = begins[(begins > 0) & (begins <= config.prompt_tokens)]
        source = corpus.source_ids[document]
        if len(begins) == 0 or counts[source] >= config.max_per_source:
            continue
        counts[source] += 1
        chosen.append(Prompt(document, int(rng.choice(begins))))
        if len(chosen) == config.num_prompts:
            break
    if not chosen:
        raise ValueError(f"no conversation has a prompt of at most prompt_tokens={config.prompt_tokens} tokens")
    return chosen


class Parts:
    """Finished batches in a folder, a file each, for a run that may be killed; ``identity`` says what they are of."""

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder, record = folder, folder / "run.json"
        identity = json.loads(json.dumps(identity))
        found = json.loads(record.read_text()) if record.is_file() else identity
        differ = [
            f"{name}: found {found.get(name)!r}, this run has {identity.get(name)!r}"
            for name in sorted(found.keys() | identity.keys())
            if found.get(name) != identity.get(name)
        ]
        if differ:
            raise ValueError(f"{folder} holds answers of another run ({'; '.join(differ)}): --no-resume drops them")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(record, identity)

    def read(self, number: int) -> dict[str, NDArray] | None:
        """A finished batch; None if it has yet to be decoded."""
        path = self.folder / f"{number:06d}.npz"
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in ANSWERS}

    def write(self, number: int, answers: dict[str, NDArray]) -> None:
        part = self.folder / "part.npz"
        np.savez(part, allow_pickle=False, **answers)
        part.replace(self.folder / f"{number:06d}.npz")


def batches(greedy_from: NDArray[np.bool_], size: int, *, apart: bool) -> list[NDArray[np.int64]]:
    """Which prompts are decoded together: in their order; ``apart``: greedy ones first, then those that are sampled."""
    groups = [greedy_from, ~greedy_from] if apart else [np.ones_like(greedy_from)]
    orders = [np.flatnonzero(group) for group in groups]
    return [order[first : first + size] for order in orders for first in range(0, len(order), size)]


def regenerate(
    target, corpus: Corpus, config: RegenerateConfig, *, drafter=None, parts: Parts | None = None, log=print
) -> Corpus:
    """The chosen prompts with the target's answers as a corpus: supervised are the answers, end token included.

    Answers shorter than ``min_answer`` tokens are dropped; those cut by the budget are kept without an end token.
    With a drafter greedy answers are decoded speculatively. ``parts`` holds batches that need not be decoded again.
    """
    if drafter is not None:
        Pair(target, drafter)  # raises ValueError where they do not fit
    highest, vocabulary = int(corpus.tokens.max()), target.config.vocab_size
    if highest >= vocabulary:
        raise ValueError(f"a prompt may hold token {highest}, the target knows {vocabulary}: another tokenizer made it")
    prompts = choose_prompts(corpus, config)
    # Short prompts first, batches of near equal length: each batch is padded to the next multiple of 128 only.
    prompts.sort(key=lambda prompt: prompt.length)
    ids = [corpus.document(prompt.document)[: prompt.length] for prompt in prompts]
    greedy_from = np.random.default_rng((config.seed, 1)).random(len(prompts)) >= config.sampled_share
    plan = batches(greedy_from, config.batch, apart=drafter is not None)
    answers: list[NDArray[np.integer]] = [np.zeros(0, np.int32)] * len(prompts)
    stopped = np.zeros(len(prompts), np.bool_)
    begun, decoded, speculated, rounds = time.perf_counter(), 0, 0, 0

    def progress(done: int) -> str:
        seconds = time.perf_counter() - begun
        speed = f"{decoded / seconds:,.0f} tokens/s" if decoded else "read, not decoded"
        length = f", {speculated / rounds:.3f} tokens per round" if rounds else ""
        return f"regenerate: {done} of {len(prompts)} prompts, {seconds:.1f} s, {speed}{length}"

    for number, (some, found, new) in enumerate(_decoded(target, drafter, ids, greedy_from, plan, config, parts)):
        for row, index in enumerate(some):
            answers[index] = found["token_BN"][row, : found["count_B"][row]]
        stopped[some] = found["stopped_B"]
        decoded += int(found["count_B"].sum()) * new
        rounds += int(found["rounds_B"].sum())
        speculated += int((found["count_B"] - 1)[found["rounds_B"] > 0].sum())
        if number % 10 == 0 or number == len(plan) - 1:
            log(progress(sum(map(len, plan[: number + 1]))))
    kept = [index for index, answer in enumerate(answers) if len(answer) >= config.min_answer]
    if not kept:
        raise ValueError(f"no answer has min_answer={config.min_answer} tokens: found {len(prompts)} shorter ones")
    asked, new = sum(len(ids[index]) for index in kept), sum(len(answers[index]) for index in kept)
    info = {
        name: corpus.info[name] for name in ("dataset", "tokenizer_sha256", "enable_thinking") if name in corpus.info
    }
    info |= {
        "prompts": len(prompts), "kept": len(kept), "empty": len(prompts) - len(kept),
        "truncated": int((~stopped[kept]).sum()), "answer_tokens": new, "supervised": new / (asked + new),
        "stopped": float(stopped.mean()), "acceptance_length": speculated / rounds if rounds else None,
        "config": asdict(config), "corpus": corpus.info.get("files_sha256", {}),
    }  # fmt: skip
    log(
        f"regenerate: {len(kept)} answers, {new} tokens ({info['supervised']:.1%} supervised), {info['stopped']:.1%} "
        f"ended by themselves, empty {info['empty']}, truncated {info['truncated']}, "
        f"{time.perf_counter() - begun:.1f} s"
    )
    dtype = corpus.tokens.dtype
    documents = [np.concatenate([ids[index], answers[index]]).astype(dtype) for index in kept]
    spans = [(len(ids[index]), len(document)) for index, document in zip(kept, documents, strict=True)]
    source = [prompts[index].document for index in kept]
    return Corpus(
        np.concatenate(documents),
        np.cumsum([0, *map(len, documents)], dtype=np.int64),
        np.array(spans, np.int32),
        np.arange(len(spans) + 1, dtype=np.int64),
        corpus.category_ids[source],
        corpus.source_ids[source],
        corpus.categories,
        corpus.sources,
        info,
    )


def _decoded(
    target, drafter, ids, greedy_from, plan, config: RegenerateConfig, parts: Parts | None
) -> Iterator[tuple[NDArray[np.int64], dict[str, NDArray], bool]]:
    """(prompts, their answers, whether they were decoded now) batch by batch; the next one is under way meanwhile."""
    waiting = None

    def finish(number: int, found) -> tuple[NDArray[np.int64], dict[str, NDArray], bool]:
        some = plan[number]
        answers = {name: np.asarray(x)[: len(some)] for name, x in zip(ANSWERS, jax.device_get(found), strict=True)}
        if parts is not None:
            parts.write(number, answers)
        return some, answers, True

    for number, some in enumerate(plan):
        read = None if parts is None else parts.read(number)
        found = None if read is not None else _batch(target, drafter, ids, greedy_from, some, config)
        if waiting is not None:
            yield finish(*waiting)
        waiting = None if found is None else (number, found)
        if read is not None:
            yield some, read, False
    if waiting is not None:
        yield finish(*waiting)


def _batch(target, drafter, ids, greedy_from, some: NDArray[np.int64], config: RegenerateConfig) -> tuple:
    """The arrays of ``ANSWERS``, still on the device, of some prompts."""
    size = config.batch
    width = -(-max(len(ids[index]) for index in some) // 128) * 128
    token_BT, num_B = np.zeros((size, width), np.int32), np.ones(size, np.int32)
    budget_B, temperature_B = np.zeros(size, np.int32), np.zeros(size, np.float32)
    for row, index in enumerate(some):
        token_BT[row, : len(ids[index])] = ids[index]
        num_B[row], budget_B[row] = len(ids[index]), config.new_tokens
        temperature_B[row] = 0.0 if greedy_from[index] else config.temperature
    stop_L = jnp.array(target.config.eos_token_ids or (-1,), jnp.int32)
    if drafter is None or not greedy_from[some].all():
        key = jax.random.fold_in(jax.random.key(config.seed), int(some[0]))
        rows = (token_BT, num_B, temperature_B, budget_B)
        return *generate_rows(target, key, *rows, stop_L, new_tokens=config.new_tokens), np.zeros(size, np.int32)
    reach = min(model.config.max_position_embeddings for model in (target, drafter))
    draft_B = np.full(size, drafter.config.block_size, np.int32)
    rows = (token_BT, num_B, budget_B, stop_L, draft_B, np.int32(reach))
    found = decode_rows(target, drafter, *rows, new_tokens=config.new_tokens)
    return found["token_BN"], found["num_emitted_B"], found["finish_B"] == STOP, found["num_rounds_B"]


def digest(corpus: Corpus) -> str:
    """A hash of tokens and supervision, for the result file."""
    found = hashlib.sha256(np.ascontiguousarray(corpus.tokens).tobytes())
    found.update(np.ascontiguousarray(corpus.spans).tobytes())
    return found.hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--recipe", help="take what is not given from this one: section `regenerate`, target, starting drafter, corpus")
    add("--target", help="folder or hub name")
    add("--target-revision")
    add("--draft-model", help="folder or hub name ('': none, one token at a time)")
    add("--draft-revision")
    add("--corpus", help="prompts, or conversations to cut (.npz.xz)")
    add("--out", type=Path, required=True, help="the answers: files.tokens of a training run")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on with batches beside --out")
    for field in fields(RegenerateConfig):
        add(f"--{field.name.replace('_', '-')}", type=type(field.default), help=f"default: {field.default}")
    args = parser.parse_args(arguments)
    config = RegenerateConfig()
    if args.recipe:
        recipe = named_recipe(args.recipe)
        files, config = recipe.files, recipe.regenerate
        if args.target is None:
            args.target, args.target_revision = files.target, files.target_revision or None
        if args.draft_model is None:
            args.draft_model, args.draft_revision = files.from_pretrained, files.revision or None
        args.corpus = args.corpus or files.conversations
    elif not (args.target and args.corpus):
        parser.error("--target and --corpus are required without --recipe")
    given = {field.name: getattr(args, field.name) for field in fields(config)}
    config = replace(config, **{name: value for name, value in given.items() if value is not None})
    folder = args.out.with_name(f"{args.out.name}.parts")
    if not args.out.name.endswith(".npz.xz") or (args.out.exists() and args.resume):
        raise ValueError(f"found --out {args.out}: FILE.npz.xz is needed, a new one (--no-resume replaces it)")
    if not args.resume:
        shutil.rmtree(folder, ignore_errors=True)
    corpus = read_corpus(args.corpus)
    models = ("target", "target_revision", "draft_model", "draft_revision", "dtype")
    identity = {name: getattr(args, name) for name in models} | asdict(config) | {"prompts": digest(corpus)}
    parts = Parts(folder, identity)
    target = checkpoint.load_target(args.target, revision=args.target_revision, dtype=args.dtype)
    drafter = None
    if args.draft_model:
        drafter = checkpoint.load_drafter(args.draft_model, revision=args.draft_revision, dtype=args.dtype)
    made = regenerate(target, corpus, config, drafter=drafter, parts=parts, log=lambda line: print(line, flush=True))
    made = replace(made, info=made.info | {name: getattr(args, name) for name in models})
    whole = folder / args.out.name  # written there, so that --out is whole or not at all
    write_corpus(whole, made)
    sidecar(whole).replace(sidecar(args.out))
    whole.replace(args.out)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
