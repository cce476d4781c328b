"""Anchors: where blocks may start, which are drawn, and what they are asked to predict."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ready_jax.train.anchors import Anchors, block_labels, sample_anchors, step_key, usable
from ready_jax.train.features import visible_context

#                      p  p  a  a  a  a  p  p  a  a  a  pad
SEGMENT = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0]])
MASK = np.array([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0]], bool)
TOKEN = np.arange(12)[None] + 50


def arrays():
    return jnp.asarray(TOKEN), jnp.asarray(MASK), jnp.asarray(SEGMENT)


def test_a_block_starts_where_a_token_and_the_next_are_supervised():
    _, mask, segment = arrays()
    assert np.flatnonzero(usable(mask, segment)[0]).tolist() == [2, 3, 4, 8, 9]
    # Two supervised documents side by side: the last token of one must not predict the first of the next.
    both = usable(jnp.ones((1, 6), bool), jnp.array([[1, 1, 1, 2, 2, 0]]))
    assert np.flatnonzero(both[0]).tolist() == [0, 1, 3]


@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_sampling_is_sorted_without_replacement_and_fills_with_spares(count):
    _, mask, segment = arrays()
    anchors = sample_anchors(step_key(0, 7), mask, segment, count)
    kept = np.asarray(anchors.position_BA)[np.asarray(anchors.keep_BA)]
    assert len(kept) == min(count, 5)
    assert sorted(set(kept.tolist())) == kept.tolist()
    assert set(kept.tolist()) <= {2, 3, 4, 8, 9}
    assert np.all(np.asarray(anchors.position_BA)[~np.asarray(anchors.keep_BA)] == 0)


def test_sampling_is_uniform_and_derives_from_seed_and_step():
    _, mask, segment = arrays()
    draw = jax.jit(lambda step: sample_anchors(step_key(1, step), mask, segment, 2).position_BA[0])
    found = np.asarray(jax.vmap(draw)(jnp.arange(4000)))
    share = np.bincount(found.ravel(), minlength=12)[[2, 3, 4, 8, 9]] / 4000
    assert np.all(np.abs(share - 0.4) < 0.04)
    assert np.array_equal(draw(3), draw(3))
    assert not np.array_equal(found[:50], np.asarray(jax.vmap(draw)(jnp.arange(50, 100))))


def test_a_row_without_usable_positions_has_only_spares():
    _, mask, segment = arrays()
    anchors = sample_anchors(step_key(0, 0), jnp.zeros_like(mask), segment, 3)
    assert not np.any(anchors.keep_BA)
    assert not np.any(block_labels(anchors, *arrays(), 7).mask_BAP)


def test_labels_end_at_gaps_segments_and_the_end_of_the_row():
    anchors = Anchors(jnp.array([[2, 4, 9, 0]]), jnp.array([[True, True, True, False]]))
    labels = block_labels(anchors, *arrays(), 3)
    assert np.asarray(labels.mask_BAP)[0].tolist() == [
        [True, True, True],
        [True, False, False],
        [True, False, False],
        [False, False, False],
    ]
    assert np.asarray(labels.token_BAP)[0, 0].tolist() == [53, 54, 55]
    assert np.asarray(labels.previous_BAP)[0, 0].tolist() == [52, 53, 54]
    assert np.asarray(labels.teacher_BAP)[0, 0].tolist() == [2, 3, 4]


def test_a_segment_boundary_inside_supervision_ends_the_block():
    token, mask, segment = jnp.arange(8)[None], jnp.ones((1, 8), bool), jnp.array([[1, 1, 1, 1, 2, 2, 2, 2]])
    labels = block_labels(Anchors(jnp.array([[1]]), jnp.array([[True]])), token, mask, segment, 5)
    assert np.asarray(labels.mask_BAP)[0, 0].tolist() == [True, True, False, False, False]


def test_a_block_sees_its_segment_before_its_anchor():
    visible = np.asarray(visible_context(jnp.array([[4, 9]]), jnp.asarray(SEGMENT)))
    assert visible.shape == (1, 2, 12)
    assert np.flatnonzero(visible[0, 0]).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(visible[0, 1]).tolist() == [6, 7, 8]


def test_the_window_counts_tokens_before_the_anchor():
    visible = np.asarray(visible_context(jnp.array([[4, 9]]), jnp.asarray(SEGMENT), sliding_window=2))
    assert np.flatnonzero(visible[0, 0]).tolist() == [2, 3]
    assert np.flatnonzero(visible[0, 1]).tolist() == [7, 8]


def test_too_many_anchors_is_an_error_with_both_numbers():
    _, mask, segment = arrays()
    with pytest.raises(ValueError, match=r"num_anchors=13 must lie in 1\.\.12"):
        sample_anchors(step_key(0, 0), mask, segment, 13)
