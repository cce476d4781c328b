"""Bootstrap of pooled ratios: agreement with the plain formula, pairing, and what has no number."""

import numpy as np

from ready_jax.intervals import interval, ratio, ratio_draws


def test_draws_resample_prompts_and_not_rounds():
    top, bottom = np.array([10.0, 20.0, 90.0]), np.array([10.0, 10.0, 10.0])
    pick = np.random.default_rng(3).integers(0, 3, (50, 3))
    np.testing.assert_allclose(ratio_draws(top, bottom, resamples=50, seed=3), top[pick].sum(1) / bottom[pick].sum(1))
    assert ratio(top, bottom) == 4.0


def test_equal_prompts_have_no_spread_and_a_constant_shift_none_either():
    assert interval(ratio_draws([4, 4, 4], [2, 2, 2])) == [2.0, 2.0]
    noise = np.random.default_rng(0).uniform(1, 9, 40)
    difference = ratio_draws(noise + 1, np.ones(40)) - ratio_draws(noise, np.ones(40))
    np.testing.assert_allclose(interval(difference) or [], [1.0, 1.0])  # paired: alone both spread widely
    low, high = interval(ratio_draws(noise, np.ones(40))) or (0, 0)
    assert low < noise.mean() < high


def test_one_prompt_tells_nothing_of_the_spread():
    assert ratio([6], [2]) == 3.0
    assert interval(ratio_draws([6], [2])) is None


def test_nothing_to_divide_by():
    assert ratio([], []) is None
    assert ratio([3], [0]) is None
    assert interval(ratio_draws([], [])) is None
    assert interval(ratio_draws([0, 0], [0, 0])) is None
