"""Continuations for training: greedy rows equal decoding one token at a time; sampling follows its key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from ready_jax.config import FULL, LINEAR
from ready_jax.train.greedy import continuations, generate_rows

PROMPTS = [tiny.prompt(n, seed=6) for n in (5, 1, 12)]
NEW = 12


@pytest.fixture(scope="module")
def texts():
    plain = tiny.Plain(model())
    return [plain.greedy(ids, NEW) for ids in PROMPTS]


def model(**changes):
    return tiny.target(layer_types=(LINEAR, FULL), **changes)


def test_rows_stop_on_their_own_and_a_temperature_is_per_row(texts):
    stop = texts[0][4]
    ends = [text.index(stop) + 1 if stop in text else NEW for text in texts]
    token_BT, num_B = tiny.padded(PROMPTS, 16)
    budget_B, stop_L = jnp.array([NEW, 3, NEW]), jnp.array([stop, -1])

    def rows(seed):
        temperature_B = jnp.array([0.0, 0.0, 2.0])
        found = generate_rows(
            model(), jax.random.key(seed), token_BT, num_B, temperature_B, budget_B, stop_L, new_tokens=NEW
        )
        return [np.asarray(x) for x in found]

    token_BN, count_B, stopped_B = rows(0)
    assert count_B[:2].tolist() == [ends[0], min(ends[1], 3)]
    for b in (0, 1):
        assert token_BN[b, : count_B[b]].tolist() == texts[b][: count_B[b]]
        assert not token_BN[b, count_B[b] :].any()
    assert stopped_B[0]
    assert token_BN[2].tolist() != texts[2]
    for a, b in zip(rows(0), (token_BN, count_B, stopped_B), strict=True):
        np.testing.assert_array_equal(a, b)
    assert rows(1)[0][2].tolist() != token_BN[2].tolist()


def test_continuations_in_batches(texts):
    """Two batches, the second half empty; the stop ids are the target's own."""
    stop = texts[0][4]
    target = model(eos_token_ids=(stop,))
    token_BN, length_B, stopped_B = continuations(
        target, [np.array(p) for p in PROMPTS], width=16, new_tokens=NEW, batch=2
    )
    for b, text in enumerate(texts):
        length = text.index(stop) + 1 if stop in text else NEW
        assert (length_B[b], stopped_B[b]) == (length, stop in text)
        assert token_BN[b].tolist() == text[:length] + [0] * (NEW - length)
    with pytest.raises(ValueError, match="a prompt has 12 tokens, at most width=8 are decoded"):
        continuations(target, [np.array(PROMPTS[2])], width=8, new_tokens=NEW)
