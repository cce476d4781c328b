"""Measured acceptance of drafters over prompt sets, decoded greedily in the shared loop.

    python -m ready_jax.train.acceptance --target FOLDER --draft-model FOLDER --bigram FILE --out FILE.json
    python -m ready_jax.train.acceptance --target FOLDER --draft-model FOLDER --compare DUMP.npz

The first form decodes every set with the drafter, with prompt lookup, with a bigram table and autoregressively,
checks that all texts are equal, runs the gates of `gates.py` and dumps 16 fp32 sequences; the second repeats those on
this machine (a CPU) and says whether they are the same. Acceptance length is tokens committed per round, the target's
own token included, pooled over the rounds of a set; intervals are bootstraps over prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ready_jax import checkpoint, intervals, provenance
from ready_jax.baselines import Bigram, PromptLookup
from ready_jax.bench_data import SEVEN
from ready_jax.decode import Limits, begin, decode
from ready_jax.programs import EXACT
from ready_jax.repetition import LOOP_SHARE, repeated_share
from ready_jax.state import init_state
from ready_jax.train import gates
from ready_jax.train.corpus import read_corpus

COUNTERS = ("token_BN", "num_emitted_B", "num_rounds_B", "finish_B", "accepted_BN", "emitted_BN")


@dataclass(frozen=True)
class Shape:
    """One executable per method: rows of a batch, prompt bucket and new tokens."""

    batch: int = 256
    prompt_tokens: int = 768
    new_tokens: int = 256


@partial(jax.jit, static_argnames=("new_tokens",), compiler_options=EXACT)
def decode_rows(target, drafter, token_BT, num_B, budget_B, stop_L, draft_B, draft_limit, *, new_tokens: int):
    """Prefill and decode one batch; what comes back is small (no memory of the target)."""
    state = init_state(target.config, token_BT.shape[0], token_BT.shape[1] + new_tokens, dtype=target.dtype)
    limits = Limits(budget_B=budget_B, stop_L=stop_L, draft_B=draft_B, threshold=jnp.zeros(()), draft_limit=draft_limit)
    run = begin(target, drafter, state, token_BT, num_B, limits)
    run = decode(target, drafter, run, limits, new_tokens + 1)
    found = {name: getattr(run, name) for name in COUNTERS}
    return {name: x[:, :new_tokens] if x.ndim == 2 else x for name, x in found.items()}


def decode_prompts(target, drafter, prompts: list[NDArray], shape: Shape, proposals: int = 7) -> dict[str, NDArray]:
    """Every prompt decoded greedily: arrays over prompts (``prompt_BT`` and ``num_B`` beside the loop's counters).

    ``proposals`` that may count per round; 0 is autoregressive decoding by the drafter's own executable.
    """
    stop_L = jnp.array(target.config.eos_token_ids or (-1,), jnp.int32)
    reach = target.config.max_position_embeddings
    reach = reach if drafter is None else min(reach, drafter.config.max_position_embeddings)
    parts = []
    for first in range(0, len(prompts), shape.batch):
        some = prompts[first : first + shape.batch]
        token_BT = np.zeros((shape.batch, shape.prompt_tokens), np.int32)
        num_B, budget_B = np.ones(shape.batch, np.int32), np.ones(shape.batch, np.int32)
        for row, prompt in enumerate(some):
            token_BT[row, : len(prompt)] = prompt
            num_B[row], budget_B[row] = len(prompt), shape.new_tokens
        draft_B = np.full(shape.batch, proposals, np.int32)
        rows = (token_BT, num_B, budget_B, stop_L, draft_B, np.int32(reach))
        found = decode_rows(target, drafter, *rows, new_tokens=shape.new_tokens)
        found = jax.device_get(found) | {"prompt_BT": token_BT, "num_B": num_B}
        parts.append({name: np.asarray(x)[: len(some)] for name, x in found.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def pooled(emitted_B, rounds_B, *, resamples: int = 1000, seed: int = 0) -> dict:
    """Tokens per round over all rounds, with a 95 % bootstrap interval over prompts."""
    rounds_B = np.asarray(rounds_B, np.int64)
    return {
        "acceptance_length": intervals.ratio(emitted_B, rounds_B),
        "ci95": intervals.interval(intervals.ratio_draws(emitted_B, rounds_B, resamples=resamples, seed=seed)),
        "prompts": len(rounds_B),
        "rounds": int(rounds_B.sum()),
    }


def summary(run: dict[str, NDArray], block_size: int = 7) -> dict:
    """Acceptance of one set: overall, on continuations that loop and on those that do not; survival; loop share."""
    real_BN = np.arange(run["emitted_BN"].shape[1])[None] < run["num_rounds_B"][:, None]
    emitted_B = np.where(real_BN, run["emitted_BN"], 0).sum(axis=1)
    accepted = run["accepted_BN"][real_BN]
    loops_B = repeated_share(run["token_BN"], run["num_emitted_B"]) > LOOP_SHARE
    return pooled(emitted_B, run["num_rounds_B"]) | {
        "survival": [float(np.mean(accepted >= k)) if len(accepted) else None for k in range(1, block_size + 1)],
        "loop_share": float(loops_B.mean()),
        "stopped": float(np.mean(run["finish_B"] == 1)),
        "tokens": int(run["num_emitted_B"].sum()),
        "non_loop": pooled(emitted_B[~loops_B], run["num_rounds_B"][~loops_B]),
        "loop": pooled(emitted_B[loops_B], run["num_rounds_B"][loops_B]),
    }


def same_text(run: dict, plain: dict) -> dict:
    """Token equality with the autoregressive run; the prompts that differ, with the first place."""
    report = gates.compare(run | {"accepted_BN": plain["accepted_BN"], "num_rounds_B": plain["num_rounds_B"]}, plain)
    return {
        "prompts": report["sequences"],
        "equal": report["same_tokens"],
        "tokens": int(plain["num_emitted_B"].sum()),
        "first_difference": report["first_difference"][:20],
    }


def over_sets(by_set: dict[str, dict], names=SEVEN) -> dict:
    """Unweighted means over the seven benchmark sets (those that are there)."""
    found = [by_set[name] for name in names if name in by_set]

    def mean(values):
        values = [x for x in values if x is not None]
        return float(np.mean(values)) if values else None

    return {
        "sets": [name for name in names if name in by_set],
        "acceptance_length": mean([x["acceptance_length"] for x in found]),
        "non_loop": mean([x["non_loop"]["acceptance_length"] for x in found]),
        "loop": mean([x["loop"]["acceptance_length"] for x in found]),
        "loop_share": mean([x["loop_share"] for x in found]),
        "survival": [mean([x["survival"][k] for x in found]) for k in range(7)] if found else [],
    }


def prompt_sets(path: Path | None, heldout: Path | None, shape: Shape, limit: int) -> tuple[dict[str, list], dict]:
    """Prompts by set (lowest rank first, those that fit the bucket), and how many there were."""
    arrays: dict = {"sets": ()}
    if path is not None:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        needed = {"tokens", "offsets", "set_ids", "ranks", "sets"}
        if not needed <= set(arrays):
            raise ValueError(f"{path} holds {sorted(arrays)}: needed {sorted(needed)}, as train/data.py writes them")
    sets: dict[str, list] = {}
    counts = {}
    for number, name in enumerate(map(str, arrays["sets"])):
        index = np.flatnonzero(arrays["set_ids"] == number)
        index = index[np.argsort(arrays["ranks"][index], kind="stable")]
        every = [arrays["tokens"][arrays["offsets"][i] : arrays["offsets"][i + 1]].astype(np.int32) for i in index]
        fitting = [prompt for prompt in every if len(prompt) <= shape.prompt_tokens]
        sets[name] = fitting[:limit]
        counts[name] = {"in_file": len(every), "fitting": len(fitting), "used": len(sets[name])}
    if heldout is not None:
        corpus = read_corpus(heldout)
        begins = [(i, int(corpus.document_spans(i)[0, 0])) for i in range(len(corpus))]
        fitting = [corpus.document(i)[:n].astype(np.int32) for i, n in begins if 0 < n <= shape.prompt_tokens]
        sets["heldout"] = fitting[:limit]
        counts["heldout"] = {"in_file": len(corpus), "fitting": len(fitting), "used": len(sets["heldout"])}
    return {name: prompts for name, prompts in sets.items() if prompts}, counts


def measure(target, drafters: dict, sets: dict[str, list], shape: Shape, *, log=print) -> tuple[dict, dict, dict]:
    """(results by method and set, equality with autoregressive by method, the raw runs by method)."""
    prompts = [prompt for some in sets.values() for prompt in some]
    edges = np.cumsum([0, *(len(some) for some in sets.values())])
    runs, results, equal = {}, {}, {}
    for method, drafter in {"autoregressive": None, **drafters}.items():
        begun = time.perf_counter()
        run = runs[method] = decode_prompts(target, drafter, prompts, shape)
        seconds = time.perf_counter() - begun
        by_set = {
            name: summary({key: x[edges[i] : edges[i + 1]] for key, x in run.items()}) for i, name in enumerate(sets)
        }
        results[method] = {"mean_of_sets": over_sets(by_set), "seconds_with_compile": round(seconds, 1), "sets": by_set}
        mean = results[method]["mean_of_sets"]
        numbers = (mean["acceptance_length"], mean["non_loop"], mean["loop_share"])
        line = f"{method}: acceptance {numbers[0]}, without loops {numbers[1]}, loops {numbers[2]}, {seconds:.1f} s"
        if method != "autoregressive":
            equal[method] = same_text(run, runs["autoregressive"])
            if equal[method]["equal"] < equal[method]["prompts"]:  # is it the drafting, or another program's rounding?
                own = decode_prompts(target, drafter, prompts, shape, proposals=0)
                equal[method]["own_executable_without_proposals"] = same_text(run, own)
            line += f", equal text {equal[method]['equal']}/{equal[method]['prompts']}"
        log(line)
    return results, equal, runs


def fp32_dump(target_folder, drafter_folder, prompts: list, shape: Shape) -> dict:
    """The given prompts decoded in fp32 (IEEE products): what another machine must reproduce."""
    target = checkpoint.load_target(target_folder, dtype="float32")
    drafter = checkpoint.load_drafter(drafter_folder, dtype="float32")
    return decode_prompts(target, drafter, prompts, shape)


def gate_report(target, drafter, run: dict, *, rows: int = 256) -> dict:
    """Smoothness over every round, and the training forward at the rounds of ``rows`` prompts spread over the sets."""
    offset_BN, real_BN = gates.round_anchors(run["emitted_BN"], run["num_rounds_B"])
    some = np.linspace(0, len(run["num_B"]) - 1, min(rows, len(run["num_B"]))).astype(int)
    return {
        "smooth_in_offset": gates.smoothness(offset_BN[real_BN], run["accepted_BN"][real_BN]),
        "training_forward": gates.against_training(target, drafter, {name: x[some] for name, x in run.items()}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--bigram", help="table of successors (.npy) that `train.loop nano_base` writes")
    parser.add_argument("--prompts", default="out/data/prompts.npz")
    parser.add_argument("--heldout", help="corpus of held-out conversations, another set")
    parser.add_argument("--out", default="results/nano_acceptance.json")
    parser.add_argument("--dump", help="where to write the sequences for --compare")
    parser.add_argument("--compare", help="a dump to repeat on this machine")
    parser.add_argument("--max-samples", type=int, default=256, help="prompts per set")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    if args.compare:
        with np.load(args.compare) as file:
            wanted = {name: file[name] for name in file.files}
        prompts = [row[:n] for row, n in zip(wanted["prompt_BT"], wanted["num_B"], strict=True)]
        shape = Shape(len(prompts), wanted["prompt_BT"].shape[1], wanted["token_BN"].shape[1])
        report = gates.compare(fp32_dump(args.target, args.draft_model, prompts, shape), wanted)
        print(json.dumps(report | provenance.conditions(), indent=1))
        raise SystemExit(not report["passed"])

    shape = Shape(args.batch, new_tokens=args.max_new_tokens)
    sets, counts = prompt_sets(Path(args.prompts), args.heldout and Path(args.heldout), shape, args.max_samples)
    target, drafter = checkpoint.load_target(args.target), checkpoint.load_drafter(args.draft_model)
    drafters = {"dspark": drafter, "prompt_lookup": PromptLookup()}
    if args.bigram:
        drafters["bigram"] = Bigram(jnp.asarray(np.load(args.bigram), jnp.int32))
    results, equal, runs = measure(target, drafters, sets, shape, log=lambda line: print(line, flush=True))
    report = {
        "conditions": provenance.conditions()
        | {"max_samples": args.max_samples, "shape": vars(shape), "dtype": "bfloat16"},
        "data": {
            "sha256": {
                name: provenance.sha256(path)
                for name in ("prompts", "heldout", "bigram")
                if (path := getattr(args, name)) is not None
            },
            "sets": counts,
        },
        "weights": {
            name: {path.name: provenance.sha256(path) for path in sorted(Path(folder).glob("*.safetensors"))}
            for name, folder in (("target", args.target), ("drafter", args.draft_model))
        },
        "results": results,
        "equal_to_autoregressive": equal,
        "gates": gate_report(target, drafter, runs["dspark"]),
    }
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")  # before the dump: it must not cost the measurement
    print(json.dumps(report["gates"] | {"equal": equal}, indent=1), flush=True)
    if args.dump:
        every = [prompt for some in sets.values() for prompt in some[:4] if len(prompt) <= 256][:16]
        dump = fp32_dump(args.target, args.draft_model, every, Shape(len(every), 256, args.max_new_tokens))
        np.savez_compressed(args.dump, **dump)


if __name__ == "__main__":
    main()
