"""The repetition metric against its own words: an n-gram that stood earlier in the same continuation."""

import numpy as np
import pytest

from ready_jax.repetition import loop_share, repeated, repeated_share


def slow(tokens, n):
    seen, marks = set(), [False] * len(tokens)
    for end in range(n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end])
        marks[end - 1] = gram in seen
        seen.add(gram)
    return marks


@pytest.mark.parametrize("n", [1, 4, 6])
def test_repeated_equals_a_set_of_seen_grams(n):
    rng = np.random.default_rng(0)
    token_BT = rng.integers(0, 3, (5, 40))
    length_B = np.array([40, 17, 6, 3, 0])
    found = repeated(token_BT, length_B, n)
    for row, length in enumerate(length_B):
        assert found[row, :length].tolist() == slow(token_BT[row, :length].tolist(), n)
        assert not found[row, length:].any()


def test_rows_do_not_see_each_other():
    token_BT = np.tile(np.arange(20), (3, 1))
    assert not repeated(token_BT, np.full(3, 20), 4).any()


def test_share_of_a_loop_and_of_a_short_row():
    token_BT = np.tile(np.arange(4), (2, 10))
    # 35 6-grams, 4 of them new; a row of 5 tokens has no 6-gram.
    np.testing.assert_allclose(repeated_share(token_BT, np.array([40, 5])), [31 / 35, 0.0])
    assert loop_share(token_BT, np.array([40, 5])) == 0.5


def test_fewer_columns_than_n():
    assert repeated_share(np.ones((2, 3), int), np.array([3, 2])).tolist() == [0.0, 0.0]
