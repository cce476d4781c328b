"""Train a base drafter: `python -m ready_jax.train.drafter_base nano_base [section.field=value ...]`.

One process: the target answers training prompts, the answers are packed, and the drafter learns from features that
the frozen target computes online. Writes a Hugging Face folder, the log and the regenerated tokens' hash.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ready_jax import checkpoint, provenance
from ready_jax.baselines import Bigram
from ready_jax.configs.named import recipe as named_recipe
from ready_jax.drafter import Drafter
from ready_jax.train import step as steps
from ready_jax.train.corpus import Corpus, Packed, pack, read_corpus, write_corpus
from ready_jax.train.regenerate import digest, regenerate


def check_pair(target, drafter_config) -> None:
    """Raises ValueError where a drafter cannot draft for this target."""
    c, t = drafter_config, target.config
    if (c.hidden_size, c.vocab_size) != (t.hidden_size, t.vocab_size):
        raise ValueError(
            f"drafter has hidden size {c.hidden_size} and {c.vocab_size} tokens, the target {t.hidden_size} and "
            f"{t.vocab_size}: a drafter that borrows embedding and head needs the target's"
        )
    if c.taps[-1] >= t.num_layers - 1:
        raise ValueError(f"taps {list(c.taps)} must stay below the target's last layer {t.num_layers - 1}")


def batches(packed: Packed, batch: int, seed: int):
    """Row indices without end: each epoch is a permutation from (seed, epoch), its last partial batch dropped."""
    rows = len(packed.token_BT)
    if rows < batch:
        raise ValueError(
            f"{rows} packed rows do not fill a batch of {batch}: more prompts or a smaller batch is needed"
        )
    epoch = 0
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(rows)
        for first in range(0, rows - batch + 1, batch):
            yield order[first : first + batch]
        epoch += 1


def fit(target, drafter: Drafter, packed: Packed, config, *, log=print) -> tuple[Drafter, list[dict]]:
    """The trained drafter (bf16) and its log: means over ``files.log_every`` steps."""
    check_pair(target, drafter.config)
    optimizer = steps.make_optimizer(config.optimizer)
    state, frozen = steps.start(drafter, optimizer)
    untrained = steps.export_drafter(state, frozen)
    step = steps.make_step(
        drafter.config, optimizer, config.loss, num_anchors=config.rows.anchors, seed=config.rows.seed
    )
    rows = tuple(jnp.asarray(x) for x in (packed.token_BT, packed.mask_BT, packed.segment_BT))
    take = jax.jit(lambda rows, index: tuple(x[index].astype(bool if x.dtype == bool else jnp.int32) for x in rows))
    indices = batches(packed, config.rows.batch, config.rows.seed)
    history: list[dict] = []
    recent: deque = deque(maxlen=config.files.log_every)
    begun = time.perf_counter()
    for number in range(1, config.optimizer.steps + 1):
        state, found = step(state, frozen, target, *take(rows, jnp.asarray(next(indices))))
        recent.append(found)
        if number == 1:
            jax.block_until_ready(state)
            log(f"first step after {time.perf_counter() - begun:.1f} s, loss {float(found['loss']):.4f}")
            begun = time.perf_counter()
        if number % config.files.log_every == 0 or number == config.optimizer.steps:
            read = jax.device_get(list(recent))
            line = {name: float(np.mean([entry[name] for entry in read])) for name in read[0]}
            seconds = time.perf_counter() - begun
            history.append({"step": number, "seconds": round(seconds, 1)} | line)
            log(
                f"step {number}: loss {line['loss']:.4f} ce {line['ce_loss']:.3f} l1 {line['l1_loss']:.4f} "
                f"tau {line['tau_probabilistic']:.3f} top1 {line['top1@1']:.3f} norm {line['grad_norm']:.3f} "
                f"{1000 * seconds / max(number - 1, 1):.1f} ms/step"
            )
            if not np.isfinite(line["loss"]):
                raise FloatingPointError(f"the loss is {line['loss']} near step {number}: nothing was saved")
            recent.clear()
    skipped = int(state.skipped)
    if skipped:
        log(f"{skipped} batches had no usable anchor and changed nothing")
    trained = steps.export_drafter(state, frozen)
    history.append({"skipped": skipped, "norms_unchanged": steps.norms_unchanged(untrained, trained)})
    return trained, history


def tokens_for(target, config, *, log=print) -> Corpus:
    """Regenerated answers, read from ``files.tokens`` or made now (and stored if ``files.save_tokens``)."""
    if config.files.tokens:
        return read_corpus(config.files.tokens)
    answers = regenerate(target, read_corpus(config.files.conversations), config.regenerate, log=log)
    if config.files.save_tokens:
        write_corpus(Path(config.files.out) / "regenerated.npz.xz", answers)
    return answers


def run(config, *, log=print) -> Drafter:
    out = Path(config.files.out)
    out.mkdir(parents=True, exist_ok=True)
    target = checkpoint.load_target(config.files.target)
    answers = tokens_for(target, config, log=log)
    packed = pack(answers, config.rows.length, config.rows.seed)
    share = packed.mask_BT.mean()
    log(f"{len(answers)} answers in {len(packed.token_BT)} rows of {config.rows.length}, {share:.1%} supervised")
    table = Bigram.count([answers.document(i) for i in range(len(answers))], target.config.vocab_size)
    np.save(out / "bigram.npy", np.asarray(table.next_V))
    drafter = Drafter(config.drafter, rngs=nnx.Rngs(config.rows.seed), dtype="float32")
    trained, history = fit(target, drafter, packed, config, log=log)
    checkpoint.save_pretrained(trained, out / "dspark")
    record = provenance.conditions() | {"config": asdict(config), "tokens_sha256": digest(answers)}
    record |= {"answers": answers.info, "log": history}
    (out / "log.json").write_text(json.dumps(record, indent=1) + "\n")
    log(f"saved {out / 'dspark'}")
    return trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("changes", nargs="*", metavar="section.field=value")
    args = parser.parse_args()
    run(named_recipe(args.recipe, args.changes), log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
