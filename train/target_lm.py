"""Train nano's target on one device: `nano_target` from scratch, `nano_unloop` against greedy loops.

    python -m ready_jax.train.target_lm nano_target output.folder=out/nano
    python -m ready_jax.train.target_lm nano_unloop start=out/nano output.folder=out/nano_unloop
    python -m ready_jax.train.target_lm nano_unloop --export ready_jax/assets/nano/target --blend out/nano 0.5

Any field of the recipe changes by `section.field=value`. A run stores its weights before it measures anything.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ready_jax import provenance
from ready_jax.configs.named import recipe
from ready_jax.configs.nano import Optimizer, Steps, TargetRecipe, UnloopRecipe
from ready_jax.repetition import loop_share, repeated, repeated_share
from ready_jax.train import lm_step
from ready_jax.train.corpus import Corpus, pack, read_corpus
from ready_jax.train.greedy import continuations
from ready_jax.train.lm_step import Batch, Flat
from ready_jax.train.rows import Rows, first_prompts, mixture, pretraining_rows
from ready_jax.train.store import Store, load_parts, save_parts

PARTS = "params"


class Log:
    """One JSON object a line, to a file and to the terminal."""

    def __init__(self, folder: str):
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._path = Path(folder) / "log.jsonl"
        self._start = time.perf_counter()

    def __call__(self, **entry: Any) -> None:
        line = json.dumps({"t": round(time.perf_counter() - self._start, 1), **entry})
        print(line, flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def rounded(x: Any) -> float:
    return float(f"{float(x):.5g}")


def rate(step: int, steps: Steps, settings: Optimizer) -> float:
    """Linear warmup, constant through the first phase, linear to zero at the end of the second."""
    warm = min(1.0, (step + 1) / max(settings.warmup_steps, 1))
    left = (steps.pretrain + steps.sft - step) / max(steps.sft, 1)
    return settings.learning_rate * min(warm, 1.0, left)


def fitted(steps: Steps, step: int, elapsed: float, seconds_per_step: float) -> Steps:
    """Both phases shortened in proportion so that the run ends within `max_seconds`, if it would not."""
    total = steps.pretrain + steps.sft
    possible = step + int((steps.max_seconds - elapsed) / max(seconds_per_step, 1e-9))
    if possible >= total:
        return steps
    share = max(possible, step + 2) / total
    return replace(steps, pretrain=max(int(steps.pretrain * share), 1), sft=max(int(steps.sft * share), 1))


def begin(config: TargetRecipe | UnloopRecipe, name: str) -> Log:
    log = Log(config.output.folder)
    log(recipe=name, **provenance.conditions())
    log(config=asdict(config))
    return log


def example(size: int, length: int) -> Batch:
    """The shapes of a batch, to compile for while the data is read."""

    def array(dtype):
        return jax.ShapeDtypeStruct((size, length), dtype)

    return Batch(array(jnp.uint16), array(jnp.uint16), array(jnp.bool_), array(jnp.bool_))


def compile_ahead(pool: ThreadPoolExecutor, function, *shapes):
    return pool.submit(lambda: function.lower(*shapes).compile())


def save_weights(config: TargetRecipe | UnloopRecipe, flat: Flat) -> list[Path]:
    def dtype(key):
        return lm_step.stored_dtype(key, config.output.dtype)

    return save_parts(config.output.folder, PARTS, flat, dtype=dtype)


def load_weights(folder: str) -> Flat:
    return {key: jnp.asarray(value, jnp.float32) for key, value in load_parts(folder, PARTS).items()}


class HeldOut:
    """Held-out rows: conversations and texts apart."""

    def __init__(self, corpus: Corpus, length: int, size: int):
        is_text = np.isin(corpus.category_ids, [i for i, name in enumerate(corpus.categories) if name == "text"])
        self.chats = corpus.select(np.flatnonzero(~is_text))
        groups = {"chats": self.chats, "texts": corpus.select(np.flatnonzero(is_text))}
        self._rows = {name: Rows(pack(some, length, 0), 0) for name, some in groups.items() if len(some)}
        self._size = size
        info = corpus.info
        self._bytes_per_token = info["bytes"] / info.get("tokens_uncut", info["tokens"])

    def measure(self, losses, flat: Flat) -> dict[str, float]:
        """nats/token over answers (`answers`), over everything (`chats`, `texts`), and bits/byte over all."""
        found, sums, count = {}, 0.0, 0.0
        for name, rows in self._rows.items():
            total = np.zeros((2, 2))
            for step in range(-(-rows.num_rows // self._size)):
                batch = rows.batch(step, self._size)
                beyond = np.arange(self._size) + step * self._size >= rows.num_rows
                batch = batch._replace(segment_BT=jnp.where(beyond[:, None], 0, batch.segment_BT))
                total += np.array(losses(flat, batch), np.float64)
            if name == "chats":
                found["answers"] = rounded(total[0, 0] / total[0, 1])
            found[name] = rounded(total[1, 0] / total[1, 1])
            sums, count = sums + total[1, 0], count + total[1, 1]
        found["bits_per_byte"] = rounded(sums / count / np.log(2) / self._bytes_per_token)
        return found


def benchmark_prompts(path: str, longest: int) -> dict[str, list[np.ndarray]]:
    """Prompts by set, as far as they have at most `longest` tokens."""
    with np.load(path, allow_pickle=False) as file:
        offset, set_ids, names = file["offsets"], file["set_ids"], file["sets"]
        tokens = file["tokens"] if "tokens" in file.files else file["token_T"]
    prompts = [tokens[a:b] for a, b in itertools.pairwise(offset)]
    return {
        str(name): [prompts[i] for i in np.flatnonzero(set_ids == number) if len(prompts[i]) <= longest]
        for number, name in enumerate(names)
    }


def measure_loops(config: TargetRecipe | UnloopRecipe, flat: Flat, heldout: HeldOut) -> tuple[dict[str, Any], dict]:
    """Greedy continuations of held-out and benchmark prompts: loops, stops and lengths by set; and the tokens."""
    limit, new_tokens = config.output.loop_prompts, config.output.new_tokens
    width = min(256, config.model.max_position_embeddings - new_tokens)
    longest = min(3 * width, config.model.max_position_embeddings - new_tokens)
    sets = {"heldout": first_prompts(heldout.chats, longest)}
    if Path(config.data.prompts).is_file():
        sets |= benchmark_prompts(config.data.prompts, longest)
    sets = {name: prompts[:limit] for name, prompts in sets.items() if prompts}
    everything = [(name, prompt) for name, prompts in sets.items() for prompt in prompts]
    target = lm_step.decoding_target(config.model, flat)
    token_BN = np.zeros((len(everything), new_tokens), np.int32)
    length_B, stopped_B = np.zeros(len(everything), np.int32), np.zeros(len(everything), bool)
    size_B = np.array([len(prompt) for _, prompt in everything])
    for bucket, above, batch in ((width, 0, 1024), (longest, width, 256)):
        some = np.flatnonzero((size_B > above) & (size_B <= bucket))
        if len(some):
            prompts = [everything[i][1] for i in some]
            batch = min(batch, 1 << (len(some) - 1).bit_length())
            found = continuations(target, prompts, width=bucket, new_tokens=new_tokens, batch=batch)
            token_BN[some], length_B[some], stopped_B[some] = found
    set_B = np.array([name for name, _ in everything])
    report = {}
    for name in sets:
        own = set_B == name
        report[name] = {
            "prompts": int(own.sum()),
            "loops": rounded(loop_share(token_BN[own], length_B[own])),
            "repeated": rounded(repeated_share(token_BN[own], length_B[own]).mean()),
            "stopped": rounded(stopped_B[own].mean()),
            "tokens": rounded(length_B[own].mean()),
        }
    bench = [entry["loops"] for name, entry in report.items() if name != "heldout"]
    if bench:
        report["benchmarks_mean"] = {"loops": rounded(np.mean(bench)), "sets": len(bench)}
    samples = {"token_BN": token_BN.astype(np.uint16), "length_B": length_B, "set_B": set_B}
    return report, samples


def finish(config, log: Log, flat: Flat, heldout: HeldOut, losses, facts: dict[str, Any]) -> dict[str, Any]:
    """Weights first; then held-out loss and loops, each logged when known; then `result.json`."""
    paths = save_weights(config, flat)
    log(saved=[path.name for path in paths])
    result = {**facts, "heldout": heldout.measure(losses, flat)}
    log(heldout=result["heldout"])
    folder = Path(config.output.folder)
    if config.output.loop_prompts:
        result["loops"], samples = measure_loops(config, flat, heldout)
        np.savez_compressed(folder / "samples.npz", **samples)
        log(loops=result["loops"])
    (folder / "result.json").write_text(json.dumps(provenance.conditions() | result, indent=1) + "\n")
    return result


def train_target(config: TargetRecipe) -> dict[str, Any]:
    """Both phases; resumes from `output.state` where that folder holds a checkpoint."""
    log = begin(config, "nano_target")
    steps, size, length = config.steps, config.steps.batch_size, config.data.row_length
    flat = lm_step.new_params(config.model, steps.seed)
    step_function, init = lm_step.make_step(config.model, config.optimizer)
    state = (flat, jax.jit(init)(flat))
    num_params = lm_step.num_params(config.model, flat)
    log(parameters=num_params, bf16_megabytes=rounded(2 * num_params / 1e6))
    del flat
    losses = lm_step.make_losses(config.model)
    with ThreadPoolExecutor(2) as pool:
        shapes = jax.eval_shape(lambda x: x, state)
        compiled = compile_ahead(pool, step_function, shapes, example(size, length), np.float32(0))
        compiled_losses = compile_ahead(pool, losses, shapes[0], example(size, length))
        chats = read_corpus(config.data.conversations)
        rows = Rows(pretraining_rows(read_corpus(config.data.pretrain), chats, length, steps.seed), 0, learn_all=True)
        chosen = mixture(chats, config.mixture, config.model.eos_token_ids[0], steps.seed)
        answers = Rows(pack(chats.select(chosen), length, steps.seed + 2), 1)
        heldout = HeldOut(read_corpus(config.data.heldout), length, size)
        log(rows=rows.num_rows, tokens=rows.num_tokens, sft_rows=answers.num_rows, sft_tokens=answers.num_tokens)
        step_function, losses = compiled.result(), compiled_losses.result()
    log(compiled=True)

    store, first = (Store(config.output.state) if config.output.state else None), 0
    if store and (latest := store.latest()) is not None:
        flat, moments, run = store.restore(latest, state[0], state[1])
        state, first = (flat, moments), latest
        steps = replace(steps, pretrain=run["pretrain"], sft=run["sft"], fit_after=0)
        log(resumed=first, **run)

    def keep(step):
        if store:
            store.save(step, state[0], state[1], {"pretrain": steps.pretrain, "sft": steps.sft})

    start = marked = time.perf_counter()
    step = marked_step = first
    while step < steps.pretrain + steps.sft:
        batch = rows.batch(step, size) if step < steps.pretrain else answers.batch(step - steps.pretrain, size)
        state, metrics = step_function(state, batch, np.float32(rate(step, steps, config.optimizer)))
        step += 1
        if step % config.output.log_every == 0 or step == steps.fit_after:
            values = {key: rounded(value) for key, value in metrics.items()}
            now = time.perf_counter()
            seconds = (now - marked) / (step - marked_step)
            log(step=step, **values, tokens_per_second=round(size * length / seconds), seconds=rounded(now - start))
            if not np.isfinite(values["loss"]):
                raise FloatingPointError(f"the loss at step {step} is {values['loss']}: training cannot go on")
            if step == steps.fit_after:
                steps = fitted(steps, step, now - start, seconds)
                log(pretrain_steps=steps.pretrain, sft_steps=steps.sft)
            marked, marked_step = now, step
        if step % config.output.eval_every == 0 and step < steps.pretrain + steps.sft:
            log(step=step, heldout=heldout.measure(losses, state[0]))
        if step % config.output.save_every == 0:
            keep(step)
        if time.perf_counter() - start > 1.1 * steps.max_seconds:
            log(stopped_at=step, reason=f"max_seconds={steps.max_seconds} is over")
            break
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    if step % config.output.save_every:
        keep(step)
    facts = {"parameters": num_params, "steps": step, "tokens": step * size * length, "seconds": rounded(seconds)}
    result = finish(config, log, state[0], heldout, losses, facts)
    if store:
        store.close()
    return result


def loop_rows(
    prompts: Sequence[np.ndarray], token_BN: np.ndarray, length_B: np.ndarray, length: int, ngram: int, min_share: float
) -> tuple[Batch, float]:
    """Rows of `length` tokens with continuations behind their prompts; the share of tokens to avoid.

    In a continuation with more than `min_share` repeated 6-grams, what completes a repeated `ngram`-gram is avoided.
    """
    avoid_BN = repeated(token_BN, length_B, ngram) & (repeated_share(token_BN, length_B) > min_share)[:, None]
    slot = max(map(len, prompts)) + token_BN.shape[1]
    per_row = max(length // slot, 1)
    num_rows = -(-len(prompts) // per_row)
    token_BT = np.zeros((num_rows, length), np.uint16)
    segment_BT = np.zeros((num_rows, length), np.uint16)
    avoid_BT = np.zeros((num_rows, length), np.bool_)
    for i, prompt in enumerate(prompts):
        row, at = i // per_row, (i % per_row) * slot
        answer, end = at + len(prompt), at + len(prompt) + length_B[i]
        token_BT[row, at:answer] = prompt
        token_BT[row, answer:end] = token_BN[i, : length_B[i]]
        segment_BT[row, at:end] = i % per_row + 1
        avoid_BT[row, answer:end] = avoid_BN[i, : length_B[i]]
    return Batch(token_BT, segment_BT, np.zeros_like(avoid_BT), avoid_BT), float(avoid_BN.sum() / length_B.sum())


@jax.jit
def _both(first: Batch, second: Batch) -> Batch:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)


def train_unloop(config: UnloopRecipe) -> dict[str, Any]:
    """Rounds of decoding with the current weights and of training against what looped."""
    log = begin(config, "nano_unloop")
    settings, length = config.unloop, config.data.row_length
    size, half = settings.batch_size, settings.batch_size // 2
    flat = load_weights(config.start)
    step_function, init = lm_step.make_step(config.model, config.optimizer, settings.alpha)
    state = (flat, jax.jit(init)(flat))
    del flat
    losses = lm_step.make_losses(config.model)
    with ThreadPoolExecutor(2) as pool:
        shapes = jax.eval_shape(lambda x: x, state)
        compiled = compile_ahead(pool, step_function, shapes, example(size, length), np.float32(0))
        compiled_losses = compile_ahead(pool, losses, shapes[0], example(size, length))
        chats = read_corpus(config.data.conversations)
        chosen = mixture(chats, config.mixture, config.model.eos_token_ids[0], settings.seed)
        chosen = np.random.default_rng(settings.seed).permutation(chosen)
        needed = settings.rounds * settings.prompts
        prompts = first_prompts(chats.select(chosen[: 2 * needed]), settings.max_prompt)
        label_rows = settings.rounds * settings.steps * half
        answers = Rows(pack(chats.select(chosen), length, settings.seed), 1)
        heldout = HeldOut(read_corpus(config.data.heldout), length, size)
        log(prompts=len(prompts), sft_rows=answers.num_rows, sft_rows_used=label_rows)
        step_function, losses = compiled.result(), compiled_losses.result()
    log(compiled=True)
    before: dict[str, Any] = {"heldout": heldout.measure(losses, state[0])}
    if config.output.loop_prompts:
        before["loops"], _ = measure_loops(config, state[0], heldout)
    log(before=before)

    rounds, step, start = settings.rounds, 0, time.perf_counter()
    number, marked, metrics = 0, start, {}
    while number < rounds:
        some = [prompts[(number * settings.prompts + i) % len(prompts)] for i in range(settings.prompts)]
        target = lm_step.decoding_target(config.model, state[0])
        token_BN, length_B, stopped_B = continuations(
            target, some, width=settings.max_prompt, new_tokens=config.output.new_tokens,
            batch=min(1024, settings.prompts),
        )  # fmt: skip
        decoded = time.perf_counter()
        looped, avoided = loop_rows(some, token_BN, length_B, length, settings.ngram, settings.min_share)
        order = np.random.default_rng([settings.seed, number]).permutation(len(looped.token_BT))
        for i in range(settings.steps):
            index = np.take(order, np.arange(i * half, (i + 1) * half), mode="wrap")
            batch = _both(answers.batch(step, half), Batch(*(x[index] for x in looped)))
            warm = min(1.0, (step + 1) / max(config.optimizer.warmup_steps, 1))
            left = 1 - step / (rounds * settings.steps)
            state, metrics = step_function(state, batch, np.float32(config.optimizer.learning_rate * min(warm, left)))
            step += 1
        values = {key: rounded(value) for key, value in metrics.items()}
        now = time.perf_counter()
        log(
            round=number, step=step, **values, loops=rounded(loop_share(token_BN, length_B)), avoided=rounded(avoided),
            stopped=rounded(stopped_B.mean()), decode_seconds=rounded(decoded - marked), seconds=rounded(now - start),
        )  # fmt: skip
        number += 1
        if number == 2:  # the first round compiles
            possible = number + int((settings.max_seconds - (now - start)) / (now - marked))
            if possible < rounds:
                rounds = max(possible, number + 1)
                log(rounds=rounds, reason=f"max_seconds={settings.max_seconds}")
        marked = now
    facts = {"steps": step, "rounds": number, "seconds": rounded(time.perf_counter() - start), "before": before}
    return finish(config, log, state[0], heldout, losses, facts)


def blended(first: Flat, second: Flat, share: float) -> Flat:
    """Weights on the straight line from ``first`` (share 0) to ``second`` (share 1).

    Between a model and its fine-tuned self this keeps much of both (WiSE-FT, Wortsman et al. 2022, 2109.01903).
    """
    return {key: (1 - share) * first[key] + share * second[key] for key in first}


def export(config: TargetRecipe | UnloopRecipe, folder: str, blend: tuple[str, float] | None = None) -> None:
    """The weights in `output.folder` as a bf16 checkpoint in Hugging Face layout.

    `blend`: another run's folder and the share of `output.folder`'s weights in a blend with that run's.
    """
    from ready_jax.checkpoint import save_pretrained

    flat = load_weights(config.output.folder)
    if blend is not None:
        flat = blended(load_weights(blend[0]), flat, blend[1])
    save_pretrained(lm_step.decoding_target(config.model, flat), folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="nano_target or nano_unloop")
    parser.add_argument("changes", nargs="*", metavar="section.field=value")
    parser.add_argument("--export", metavar="FOLDER", help="write the finished weights there; nothing is trained")
    parser.add_argument(
        "--blend", nargs=2, metavar=("FOLDER", "SHARE"), help="with --export: blend with another run's weights"
    )
    args = parser.parse_args(arguments)
    config = recipe(args.recipe, args.changes)
    if args.export:
        export(config, args.export, (args.blend[0], float(args.blend[1])) if args.blend else None)
    elif isinstance(config, TargetRecipe):
        train_target(config)
    elif isinstance(config, UnloopRecipe):
        train_unloop(config)
    else:
        sys.exit(f"{args.recipe} does not train a target")


if __name__ == "__main__":
    main()
