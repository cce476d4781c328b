"""Bootstrap intervals of ratios pooled over prompts: what is resampled is prompts, never rounds or tokens.

Two measurements of the same prompts that are drawn with one seed use the same resamples, so the interval of their
difference (draw by draw) is a paired one.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 1000


def ratio_draws(
    numerator_B: ArrayLike, denominator_B: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> NDArray[np.float64]:
    """``sum(numerator) / sum(denominator)`` over resampled prompts; nan for a resample whose denominator is 0.

    One prompt tells nothing of how prompts differ: all nan for fewer than two.
    """
    top_B, bottom_B = np.asarray(numerator_B, np.float64), np.asarray(denominator_B, np.float64)
    if len(top_B) < 2:
        return np.full(resamples, np.nan)
    pick = np.random.default_rng(seed).integers(0, len(top_B), (resamples, len(top_B)))
    bottom = bottom_B[pick].sum(axis=1)
    return np.divide(top_B[pick].sum(axis=1), bottom, out=np.full(resamples, np.nan), where=bottom > 0)


def ratio(numerator_B: ArrayLike, denominator_B: ArrayLike) -> float | None:
    """The ratio of the sums; None if there is nothing to divide by."""
    bottom = float(np.sum(np.asarray(denominator_B, np.float64)))
    return float(np.sum(np.asarray(numerator_B, np.float64))) / bottom if bottom > 0 else None


def interval(draws: NDArray[np.float64], level: float = 95.0) -> list[float] | None:
    """The central percentiles of finite draws; None without any."""
    finite = draws[np.isfinite(draws)]
    if not len(finite):
        return None
    tail = (100 - level) / 2
    return [float(x) for x in np.percentile(finite, [tail, 100 - tail])]
