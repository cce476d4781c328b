"""Training data, from a hub dataset or JSON lines to a corpus or packed rows; and the corpus files that train nano.

    python -m ready_jax.train.data --dataset NAME_OR_FILE --tokenizer TARGET --out FILE.npz.xz [--length 2048]
    python -m ready_jax.train.data --dataset NAME_OR_FILE --tokenizer TARGET --out FILE.npz.xz --prompts
    python -m ready_jax.train.data --data-dir DIR --out out/data

The first writes conversations with their answers as labels (`files.tokens`, with --length packed `files.shards`), the
second what `train.regenerate` has answered by the target: prompts that end as an evaluation's do, which conversations
cut before an answer need not (a thought is begun in Qwen's, thinking on). The third writes nano's.

Nano's take 9 CPU minutes (10 to 21 by the clock on two shared cores). Expected: 177,195 conversations in 37.0 M tokens
(3.60 bytes a token, 46.9 % supervised), 39.1 M tokens of plain text (3.55 bytes a token), 49 MB in four files.

The steps are files of their own: `samples` reads rows, `encode` tokenises them with supervised spans,
`corpus` stores and packs them. A trainer imports all of it from here.
"""

import argparse
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from ready_jax.bench_data import BENCHMARKS, SHIPPED, bench_prompts
from ready_jax.train.corpus import (
    Corpus,
    Packed,
    pack,
    read_corpus,
    read_shard,
    write_corpus,
    write_shard,
    write_stream,
)
from ready_jax.train.encode import ChatFormat, Document, Stats, cut, encode, encode_prompts, render
from ready_jax.train.samples import Sample, draw, local_files, read_samples, unit_hash

NANO = SHIPPED.parent / "target"

__all__ = [
    "ChatFormat",
    "Corpus",
    "Document",
    "Packed",
    "Prompts",
    "Sample",
    "Stats",
    "answer_lengths",
    "collect",
    "cut",
    "encode",
    "encode_prompts",
    "pack",
    "provenance",
    "read_corpus",
    "read_prompts",
    "read_samples",
    "read_shard",
    "render",
    "unit_hash",
    "write_corpus",
    "write_shard",
]


@dataclass(frozen=True)
class Prompts:
    """Benchmark prompts as ids, set by set, by rank within a set; rank -1: the set has no ranks."""

    tokens: NDArray[np.uint16]
    offsets: NDArray[np.int32]
    set_ids: NDArray[np.uint8]
    ranks: NDArray[np.int16]
    ids: NDArray[np.str_]
    sets: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.set_ids)

    def prompt(self, index: int) -> NDArray[np.uint16]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def of_set(self, name: str) -> NDArray[np.int64]:
        return np.flatnonzero(self.set_ids == self.sets.index(name))


def read_prompts(path: str | Path) -> Prompts:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return Prompts(**{**arrays, "sets": tuple(map(str, arrays["sets"]))})


def collect(documents: Iterable[Document], info: dict[str, Any] | None = None) -> Corpus:
    """Documents in flat arrays; categories and sources are numbered in the order of their names."""
    documents = list(documents)
    if not documents:
        raise ValueError("no document with a supervised token was found: nothing to collect")
    categories = tuple(sorted({document.category for document in documents}))
    sources = tuple(sorted({document.source for document in documents}))
    category_id = {name: number for number, name in enumerate(categories)}
    source_id = {name: number for number, name in enumerate(sources)}
    if max(len(categories), len(sources)) > 256:
        raise ValueError(f"found {len(categories)} categories and {len(sources)} sources: a corpus numbers 256 of each")
    return Corpus(
        np.concatenate([document.token_T for document in documents]),
        np.cumsum([0, *(len(document.token_T) for document in documents)], dtype=np.int64),
        np.concatenate([document.spans for document in documents]),
        np.cumsum([0, *(len(document.spans) for document in documents)], dtype=np.int64),
        np.array([category_id[document.category] for document in documents], np.uint8),
        np.array([source_id[document.source] for document in documents], np.uint8),
        categories,
        sources,
        info or {},
    )


def provenance(tokenizer: Any, files: Iterable[Path], seed: int, stats: Stats) -> dict[str, Any]:
    """What a corpus was made from: counts, seed, hashes of tokenizer with template and of every file."""
    vocabulary = tokenizer.backend_tokenizer.to_str() + (tokenizer.chat_template or "")
    return {
        **asdict(stats),
        "seed": seed,
        "tokenizer_sha256": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "files_sha256": {
            f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files
        },
    }


def answer_lengths(corpus: Corpus) -> dict[str, dict[str, float]]:
    """Answer tokens by source and in all: counts, first answers of at most 200 tokens, quantiles."""
    size = corpus.spans[:, 1] - corpus.spans[:, 0]
    source_of = np.repeat(corpus.source_ids, np.diff(corpus.span_offsets))
    first = corpus.span_offsets[:-1]
    table: dict[str, dict[str, float]] = {}
    for name in [*corpus.sources, "all"]:
        chosen = np.full(len(size), True) if name == "all" else source_of == corpus.sources.index(name)
        first_sizes = size[first][chosen[first]]
        table[name] = {
            "conversations": len(first_sizes),
            "answers": int(chosen.sum()),
            "first_within_200": int((first_sizes <= 200).sum()),
            "mean": round(float(size[chosen].mean()), 1),
            **{f"p{q}": float(np.percentile(size[chosen], q)) for q in (10, 50, 90, 99)},
        }
    return table


def make_dataset(options: argparse.Namespace, tokenizer: Any, log: Callable[[str], Any] = print) -> list[Path]:
    """The dataset of the command line as a corpus or, with a length, as packed shards. Returns the files written.

    Raises:
        ValueError: nothing is kept, so nothing would be supervised.
    """
    where, seed, out = options.dataset, options.seed, Path(options.out)
    if not out.name.endswith(".npz.xz") or (options.prompts and options.length):
        raise ValueError(f"found --out {out}: FILE.npz.xz is needed, and --prompts are a corpus: without --length")
    files, stats = local_files(where), Stats()
    drawn = None if options.max_samples is None else seed
    samples: Iterable[Sample] = read_samples(where, options.split, revision=options.revision, seed=drawn)
    if options.max_samples is not None:
        limit = options.max_samples
        samples = draw(samples, limit, seed) if files else itertools.islice(samples, limit)
    limit = options.max_tokens or options.length
    made = encode_prompts if options.prompts else encode
    documents = list(made(samples, tokenizer, limit, thinking=options.enable_thinking, seed=seed, stats=stats))
    log(f"{where}: {stats}")
    if not documents:
        what = "prompt" if options.prompts else "supervised token"
        raise ValueError(f"{where} has no {what} of at most {limit} tokens: {stats}")
    info = provenance(tokenizer, files, seed, stats) | {
        "dataset": str(where), "split": options.split, "revision": options.revision, "max_tokens": limit,
        "prompts": options.prompts, "enable_thinking": options.enable_thinking,
        "supervised": stats.labels / stats.tokens,
    }  # fmt: skip
    corpus = collect(documents, info)
    if not options.length:
        write_corpus(out, corpus)
        return [out]
    packed = pack(corpus, options.length, seed)
    paths = []
    for first in range(0, len(packed.token_BT), options.shard_rows):
        paths.append(out.with_name(f"{out.name.removesuffix('.npz.xz')}-{len(paths):05d}.npz.xz"))
        rows = slice(first, first + options.shard_rows)
        write_shard(paths[-1], Packed(packed.token_BT[rows], packed.mask_BT[rows], packed.segment_BT[rows]), info)
    return paths


def make_sft(data_dir: Path, out: Path, tokenizer: Any, seed: int, max_tokens: int) -> int:
    """Every blend conversation, half of them in each thinking rendering. Returns the bytes written."""
    stats = Stats()
    where = data_dir / "blend"
    corpus = collect(encode(read_samples(where), tokenizer, max_tokens, seed=seed, stats=stats))
    print(f"sft: {stats}")
    info = provenance(tokenizer, local_files(where), seed, stats)
    info = {**info, "max_tokens": max_tokens, "answer_tokens": answer_lengths(corpus)}
    return write_corpus(out / "sft.npz.xz", replace(corpus, info=info))


def make_heldout(data_dir: Path, out: Path, tokenizer: Any, seed: int, max_tokens: int) -> int:
    """The held-out conversations, cut like the training ones, and the first 100 held-out texts, whole."""
    stats = Stats()
    files = [data_dir / folder / "heldout.jsonl.gz" for folder in ("blend", "blend_pretrain")]
    chats = encode(read_samples(files[0]), tokenizer, max_tokens, seed=seed, stats=stats)
    texts = encode(itertools.islice(read_samples(files[1]), 100), tokenizer, stats=stats)
    corpus = collect(itertools.chain(chats, texts))
    print(f"heldout: {stats}")
    info = {**provenance(tokenizer, files, seed, stats), "max_tokens": max_tokens}
    return write_corpus(out / "heldout.npz.xz", replace(corpus, info=info))


def make_pretrain(data_dir: Path, out: Path, tokenizer: Any, seed: int, code_share: float) -> int:
    """The texts, shuffled, as one stream; of python_source, the share that the hash of (seed, id) picks."""
    stats = Stats()
    where = data_dir / "blend_pretrain"
    samples = read_samples(where)
    chosen = (s for s in samples if s.source != "python_source" or unit_hash(seed, s.id) < code_share)
    corpus = collect(encode(chosen, tokenizer, stats=stats))
    print(f"pretrain: {stats}")
    tokens = corpus.select(np.random.default_rng(seed).permutation(len(corpus))).tokens
    info = provenance(tokenizer, local_files(where), seed, stats)
    return write_stream(
        out / "pretrain.npy.xz",
        tokens,
        {**info, "separator": tokenizer.pad_token_id, "code_share": code_share},
    )


def make_prompts(data_dir: Path, out: Path, tokenizer: Any) -> int:
    """Every ranked prompt, and all of a set without ranks, with the generation prompt, thinking off."""
    tokens: list[NDArray[np.uint16]] = []
    rows: list[tuple[int, int, str]] = []
    for number, name in enumerate(BENCHMARKS):
        every = bench_prompts(name, data_dir)
        for row in [row for row in every if row["deepspec_rank"] is not None] or every:
            user = {"role": "user", "content": row["prompt"]}
            text = render(tokenizer, [user], False, add_generation_prompt=True)
            ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            tokens.append(np.array(ids, np.uint16))
            rows.append((number, -1 if row["deepspec_rank"] is None else row["deepspec_rank"], row["id"]))
    set_ids, ranks, ids = zip(*rows, strict=True)
    np.savez_compressed(
        out / "prompts.npz",
        tokens=np.concatenate(tokens),
        offsets=np.cumsum([0, *map(len, tokens)], dtype=np.int32),
        set_ids=np.array(set_ids, np.uint8),
        ranks=np.array(ranks, np.int16),
        ids=np.array(ids),
        sets=np.array(list(BENCHMARKS)),
    )
    short = sum(len(prompt) <= 256 for prompt in tokens)
    print(f"prompts: {len(tokens)}, {sum(map(len, tokens))} tokens, {short} prompts of at most 256 tokens")
    return (out / "prompts.npz").stat().st_size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--dataset", help="hub name, or JSON lines: a file, a folder or a glob")
    where.add_argument("--data-dir", type=Path, help="nano's data: has blend/, blend_pretrain/ and bench/")
    add("--out", type=Path, required=True, help="FILE.npz.xz; a folder with --data-dir")
    add("--tokenizer", default=str(NANO), help="the target: folder or hub name (default: nano)")
    add("--tokenizer-revision")
    add("--max-tokens", type=int, help="limit of a conversation (default: --length; 768 with --data-dir)")
    add("--code-share", type=float, default=1.0, help="with --data-dir: share of the Python files to keep")
    add("--seed", type=int, default=0)
    add("--prompts", action="store_true", help="what to have answered, without the dataset's answers")
    add("--max-samples", type=int, help="draw so many by --seed (default: all, in order)")
    add("--enable-thinking", action=argparse.BooleanOptionalAction, help="default: on, but off for nano")
    add("--length", type=int, help="write packed rows of so many tokens, not a corpus")
    add("--shard-rows", type=int, default=16_384, help="rows of a file of packed rows")
    add("--split", default="train", help="of a hub dataset")
    add("--revision", help="of a hub dataset")
    args = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, revision=args.tokenizer_revision)
    start = time.perf_counter()
    if args.dataset:
        if args.enable_thinking is None:
            args.enable_thinking = Path(args.tokenizer).resolve() != NANO.resolve()
        sizes = {str(path): path.stat().st_size for path in make_dataset(args, tokenizer)}
    else:
        max_tokens = args.max_tokens or 768
        args.out.mkdir(parents=True, exist_ok=True)
        sizes = {
            "prompts": make_prompts(args.data_dir, args.out, tokenizer),
            "heldout": make_heldout(args.data_dir, args.out, tokenizer, args.seed, max_tokens),
            "sft": make_sft(args.data_dir, args.out, tokenizer, args.seed, max_tokens),
            "pretrain": make_pretrain(args.data_dir, args.out, tokenizer, args.seed, args.code_share),
        }
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"bytes": sizes, "total": sum(sizes.values()), "seconds": seconds}))


if __name__ == "__main__":
    main()
