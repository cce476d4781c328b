"""The hybrid pair against the reference loop's recorded rounds, and greedy continuations of the targets."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from ready_jax.checkpoint import load_drafter, load_target
from ready_jax.verify import FINISH_REASONS


@pytest.fixture(scope="module")
def pair(golden):
    target = load_target(golden / "T1_tiny" / "checkpoint", dtype="float32")
    return target, load_drafter(golden / "E2E_hybrid" / "drafter", dtype="float32")


def cases():
    from pathlib import Path

    file = Path(__file__).parent / "golden" / "E2E_hybrid" / "cases.json"
    return [
        pytest.param(case, id=f"{i}-{case['kind']}") for i, case in enumerate(json.loads(file.read_text())["cases"])
    ]


@pytest.mark.parametrize("case", cases())
def test_rounds_equal_the_reference_loop(pair, case):
    """Tokens, and accepted and proposed counts of every round.

    The reference runs one superfluous last round when exactly enough tokens exist, counts a cut last round in full,
    and does not count the bonus of a round whose accepted proposals hold the stop token.
    """
    target, drafter = pair
    prompt, budget = case["prompt"], case["max_new_tokens"]
    limit = tiny.limits(budget, stop=case["stop_token_ids"] or (), threshold=case["confidence_threshold"])
    run = tiny.generate(target, drafter, [prompt], limit, width=64)
    assert tiny.tokens(run) == case["output_ids"][len(prompt) :]
    stopped = FINISH_REASONS[int(run.finish_B[0])] == "stop"
    emitted, wanted = tiny.per_round(run, "emitted"), case["acceptance_lengths"]
    assert sum(emitted) + 1 == case["num_output_tokens"] == len(tiny.tokens(run))
    rounds = len(emitted)
    if stopped:
        assert emitted == wanted
    else:  # the last round may be cut by the budget here, and one more may follow there
        assert emitted[:-1] == wanted[: rounds - 1]
        assert rounds in (len(wanted), len(wanted) - 1)
        assert not emitted or emitted[-1] <= wanted[rounds - 1]
    accepted = tiny.per_round(run, "accepted")
    whole = rounds if stopped else max(rounds - 1, 0)
    assert accepted[:whole] == case["accepted_draft_lengths"][:whole]
    assert (
        tiny.per_round(run, "proposed")[:whole][: -1 if stopped else None]
        == (case["proposal_lengths"][:whole][: -1 if stopped else None])
    )


@pytest.mark.parametrize("name", ["T1_tiny", "T2_tied_gva"])
def test_forty_greedy_tokens_equal_the_reference(golden, name):
    target = load_target(golden / name / "checkpoint", dtype="float32")
    stored = np.load(golden / name / "golden.npz")
    prompts = [stored[f"greedy{i}.prompt"].tolist() for i in range(3)]
    run = tiny.generate(target, None, prompts, tiny.limits(40, batch=3))
    for i in range(3):
        assert tiny.tokens(run, i) == stored[f"greedy{i}.tokens"].tolist()
    assert jnp.all(run.num_rounds_B == 39)
