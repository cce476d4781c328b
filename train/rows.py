"""Which documents a language model sees, in which order: mixtures, packed rows on the device, batches."""

from __future__ import annotations

from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ready_jax.configs.nano import Mixture
from ready_jax.train.corpus import Corpus, Packed, pack
from ready_jax.train.lm_step import Batch


class Rows:
    """Packed rows on the device; `batch(step, size)` walks through shuffled epochs, the same for the same seed."""

    def __init__(self, packed: Packed, seed: int, *, learn_all: bool = False):
        self.num_rows = len(packed.token_BT)
        self.num_tokens = int((packed.segment_BT > 0).sum())
        self._seed = seed
        self._epoch, self._order = -1, np.zeros(0, np.int32)
        learn_BT = packed.segment_BT > 0 if learn_all else packed.mask_BT
        self._arrays = tuple(jax.device_put(x) for x in (packed.token_BT, packed.segment_BT, learn_BT))

    def _at(self, place: int) -> int:
        epoch, inside = divmod(place, self.num_rows)
        if epoch != self._epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(self.num_rows)
            self._epoch, self._order = epoch, order.astype(np.int32)
        return int(self._order[inside])

    def batch(self, step: int, size: int) -> Batch:
        index = np.array([self._at(step * size + i) for i in range(size)], np.int32)
        return _take(self._arrays, index)


@jax.jit
def _take(arrays, index_B) -> Batch:
    token_BT, segment_BT, learn_BT = (x[index_B] for x in arrays)
    return Batch(token_BT, segment_BT, learn_BT, jnp.zeros_like(learn_BT))


def joined(first: Packed, second: Packed) -> Packed:
    return Packed(
        np.concatenate([first.token_BT, second.token_BT]),
        np.concatenate([first.mask_BT, second.mask_BT]),
        np.concatenate([first.segment_BT, second.segment_BT]),
    )


def pretraining_rows(texts: Corpus, chats: Corpus, length: int, seed: int) -> Packed:
    """Texts cut where rows end, conversations whole."""
    return joined(pack(texts, length, seed, split=True), pack(chats, length, seed + 1))


def complete(corpus: Corpus, end_of_turn: int) -> NDArray[np.bool_]:
    """Conversations that were not cut: their last label is the end of turn."""
    last = corpus.offsets[:-1] + corpus.spans[corpus.span_offsets[1:] - 1, 1] - 1
    return corpus.tokens[last] == end_of_turn


def mixture(corpus: Corpus, settings: Mixture, end_of_turn: int, seed: int) -> NDArray[np.int64]:
    """Indices, with repeats, of about as many supervised tokens as `corpus` holds, by the shares of `settings`.

    Categories that the corpus lacks give their share to the others in proportion.
    """
    rng = np.random.default_rng(seed)
    answer = (corpus.spans[:, 1] - corpus.spans[:, 0]).astype(np.int64)
    labels = np.add.reduceat(answer, corpus.span_offsets[:-1])
    longest = np.maximum.reduceat(answer, corpus.span_offsets[:-1])
    weight = np.where(longest <= settings.long_answer, 1.0, settings.long_weight)
    rare = [number for number, name in enumerate(corpus.sources) if name in settings.rare]
    weight = np.where(np.isin(corpus.source_ids, rare), settings.rare_weight * weight, weight)
    weight = np.where(complete(corpus, end_of_turn), weight, 0.0)
    share = {name: value for name, value in asdict(settings).items() if name in corpus.categories}
    share = {name: value for name, value in share.items() if (weight[corpus.of_category(name)] > 0).any()}
    if not share:
        raise ValueError(f"none of the categories {corpus.categories} has a share in {settings}")
    chosen = []
    for name, value in share.items():
        some = corpus.of_category(name)
        quota = value / sum(share.values()) * labels.sum()
        per_pass = max(float((labels[some] * weight[some]).sum()), 1.0)
        # Each document comes floor(x) times, and once more with the probability of the rest.
        expected = weight[some] * quota / per_pass
        times = np.floor(expected + rng.random(len(some))).astype(np.int64)
        chosen.append(np.repeat(some, times))
    return np.concatenate(chosen)


def first_prompts(corpus: Corpus, longest: int) -> list[NDArray[np.integer]]:
    """Every conversation up to its first answer, as far as it has at most `longest` tokens."""
    size = corpus.spans[corpus.span_offsets[:-1], 0]
    return [corpus.document(int(i))[: size[i]] for i in np.flatnonzero((size > 0) & (size <= longest))]
