"""Checks that a measured acceptance means what it says: an evaluation on the GPU was once silently wrong.

A feasibility study saw first proposals accepted at anchor offsets 0, 32, 64, ... and hardly elsewhere: an index
pattern no model produces. So: acceptance must be smooth in the anchor's offset; the training forward, put at the
anchors of real rounds, must predict what those rounds accepted; and a CPU must reproduce a dump of sequences.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ready_jax.programs import EXACT
from ready_jax.train.anchors import Anchors, block_labels
from ready_jax.train.features import block_hidden, features
from ready_jax.train.loss import argmax_tokens

PERIOD = 32


def round_anchors(emitted_BN, num_rounds_B):
    """Offset of each round's anchor among the emitted tokens [B, N], and which entries are rounds."""
    real_BN = np.arange(emitted_BN.shape[1])[None] < np.asarray(num_rounds_B)[:, None]
    emitted_BN = np.where(real_BN, emitted_BN, 0)
    return np.cumsum(emitted_BN, axis=1) - emitted_BN, real_BN


def smoothness(offset, accepted, *, period: int = PERIOD, tolerance: float = 0.06) -> dict:
    """First-proposal acceptance by anchor offset modulo ``period``, over flat arrays of rounds.

    The first ``period`` offsets are left out: the opening of an answer is easier for everybody. Passes if no residue
    is further from the mean than ``tolerance`` or five standard errors, whichever is more.
    """
    late = offset >= period
    residue, hit = offset[late] % period, accepted[late] >= 1
    count = np.bincount(residue, minlength=period)
    rate = np.bincount(residue, weights=hit, minlength=period) / np.maximum(count, 1)
    mean = float(hit.mean()) if len(hit) else 0.0
    error = np.sqrt(max(mean * (1 - mean), 1e-6) / np.maximum(count, 1))
    apart = np.where(count > 0, np.abs(rate - mean), 0.0)
    return {
        "passed": bool(len(hit) > 0 and np.all(apart <= np.maximum(tolerance, 5 * error))),
        "rounds": len(hit),
        "mean": mean,
        "worst": float(apart.max()),
        "rate_by_residue": [round(float(x), 4) for x in rate],
    }


@partial(jax.jit, static_argnames="precision", compiler_options=EXACT)
def forced_acceptance(
    target,
    drafter,
    token_BT: Int[Array, "B T"],
    num_B: Int[Array, "B"],
    position_BA: Int[Array, "B A"],
    keep_BA: Bool[Array, "B A"],
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
):
    """How many proposals the training forward would see accepted at each anchor [B, A]: teacher-forced argmax
    against the text itself, which equals sequential drafting as long as the prefix is right."""
    live_BT = jnp.arange(token_BT.shape[1])[None] < num_B[:, None]
    segment_BT = live_BT.astype(jnp.int32)
    anchors = Anchors(position_BA, keep_BA)
    found = features(target, drafter.config, token_BT, segment_BT, anchors, precision)
    labels = block_labels(anchors, token_BT, live_BT, segment_BT, drafter.config.block_size)
    hidden_BAPD = block_hidden(
        drafter, found.taps_BTED, token_BT, segment_BT, anchors, drafter.embedding(target.embed), found.states
    )
    best_BAP = argmax_tokens(drafter, hidden_BAPD, labels.previous_BAP, drafter.head(target.unembed))
    right_BAP = (best_BAP == labels.token_BAP) & labels.mask_BAP
    return jnp.sum(jnp.cumprod(right_BAP.astype(jnp.int32), axis=-1), axis=-1)


def against_training(
    target, drafter, batch: dict, *, anchors: int = 32, seed: int = 0, tolerance: float = 0.01
) -> dict:
    """Real rounds of one decoded batch against the training forward at their anchors.

    ``batch``: prompt_BT, num_B (prompt lengths), and of the decoding token_BN, num_emitted_B, num_rounds_B,
    accepted_BN, emitted_BN. The last round of a row is left out (it may be cut). Passes if the share of accepted
    first proposals differs by at most ``tolerance`` and 97 % of the rounds accept the same number of proposals.
    """
    offset_BN, real_BN = round_anchors(batch["emitted_BN"], batch["num_rounds_B"])
    rows, width = batch["prompt_BT"].shape
    real_BN &= np.arange(real_BN.shape[1])[None] < np.asarray(batch["num_rounds_B"])[:, None] - 1
    token_BT = np.zeros((rows, width + batch["token_BN"].shape[1]), np.int32)
    position_BA, wanted_BA = np.zeros((rows, anchors), np.int32), np.zeros((rows, anchors), np.int32)
    keep_BA = np.zeros((rows, anchors), bool)
    rng = np.random.default_rng(seed)
    for row in range(rows):
        prompt, emitted = int(batch["num_B"][row]), int(batch["num_emitted_B"][row])
        token_BT[row, :prompt] = batch["prompt_BT"][row, :prompt]
        token_BT[row, prompt : prompt + emitted] = batch["token_BN"][row, :emitted]
        rounds = np.flatnonzero(real_BN[row])
        rounds = np.sort(rng.permutation(rounds)[:anchors])
        position_BA[row, : len(rounds)] = prompt + offset_BN[row, rounds]
        wanted_BA[row, : len(rounds)] = batch["accepted_BN"][row, rounds]
        keep_BA[row, : len(rounds)] = True
    num_B = np.asarray(batch["num_B"]) + np.asarray(batch["num_emitted_B"])
    length = -(-int(num_B.max()) // 64) * 64
    token_BT = np.pad(token_BT, [(0, 0), (0, max(0, length - token_BT.shape[1]))])[:, :length]
    found_BA = np.asarray(forced_acceptance(target, drafter, token_BT, num_B.astype(np.int32), position_BA, keep_BA))
    found, wanted = found_BA[keep_BA], wanted_BA[keep_BA]
    if not len(wanted):
        return {"passed": False, "rounds": 0}
    slot1, training = float((wanted >= 1).mean()), float((found >= 1).mean())
    same = float((found == wanted).mean())
    return {
        "passed": abs(slot1 - training) <= tolerance and same >= 0.97,
        "rounds": len(wanted),
        "slot1_decoded": slot1,
        "slot1_training_forward": training,
        "same_count": same,
    }


def compare(found: dict, wanted: dict) -> dict:
    """Equality of two decodings of the same prompts: tokens, and accepted proposals per round."""
    rows = len(wanted["num_B"])
    tokens, accepted, first = [], [], []
    for row in range(rows):
        n, m = int(found["num_emitted_B"][row]), int(wanted["num_emitted_B"][row])
        a, b = found["token_BN"][row, :n], wanted["token_BN"][row, :m]
        tokens.append(np.array_equal(a, b))
        r, s = int(found["num_rounds_B"][row]), int(wanted["num_rounds_B"][row])
        accepted.append(np.array_equal(found["accepted_BN"][row, :r], wanted["accepted_BN"][row, :s]))
        if not tokens[-1]:
            shared = min(n, m)
            different = np.flatnonzero(a[:shared] != b[:shared])
            first.append([row, int(different[0]) if len(different) else shared])
    return {
        "sequences": rows,
        "same_tokens": int(sum(tokens)),
        "same_accepted_per_round": int(sum(accepted)),
        "first_difference": first,
        "passed": bool(all(tokens) and all(accepted)),
    }
