"""Weights in 12 bits instead of 16, exactly: a quarter less to read for every token, and to hold.

Decoding a few rows is bound by reading weights; a bf16 matrix is stored as `kernels/coded_weights.py` describes and
decoded in the registers that multiply it. Every product is that of the original bf16 weights, only the order of its
fp32 sum is the kernel's own: speculation stays exact, as autoregressive decoding runs the same program. Prefill decodes
a matrix before it multiplies many rows, 3.5 bytes of traffic a weight and pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
from flax import nnx

from ready_jax.drafter import Drafter
from ready_jax.kernels import coded_product, coded_weights
from ready_jax.layers import Coded, LowRank, Scaled
from ready_jax.target import Target
from ready_jax.tensor_parallel import Sharded

#: Groups of matrices that can be stored so.
MATRICES = ("mixer_in", "mixer_out", "mlp_in", "mlp_out", "fuse", "head")


def large_matrices(model: Any) -> Iterator[tuple[str, str, nnx.Module, str]]:
    """(group, path, module, attribute) of every large matrix but the embeddings and the Markov head's."""
    for i, layer in enumerate(model.layers):
        inner, prefix = (layer.mixer, f"layers.{i}.mixer.") if isinstance(model, Target) else (layer, f"layers.{i}.")
        for name in ("w_in_DI", "w_q_DO", "w_kv_DI", "w_out_OD"):
            if hasattr(inner, name):
                yield "mixer_out" if name == "w_out_OD" else "mixer_in", prefix + name, inner, name
        yield "mlp_in", f"layers.{i}.mlp.w_in_DI", layer.mlp, "w_in_DI"
        yield "mlp_out", f"layers.{i}.mlp.w_out_FD", layer.mlp, "w_out_FD"
    if isinstance(model, Drafter):
        yield "fuse", "w_fuse_ID", model, "w_fuse_ID"
    if model.w_out_DV is not None:
        yield "head", "w_out_DV", model, "w_out_DV"


def encode(w_KN: jax.Array) -> Coded:
    """A matrix [in, out], bf16. ValueError where its sizes or its type do not allow it."""
    return Coded(*coded_weights.encode(w_KN))


@jax.jit
def decode(w: Coded) -> jax.Array:
    """The matrix [in, out], bit for bit."""
    return coded_product.decode(w.words, w.table, w.rare).T


def compress[M: (Target, Drafter)](model: M, matrices: Iterable[str] = MATRICES, *, consume: bool = False) -> M:
    """The same target or drafter with matrices in 12 bits a weight: those of the groups that ``matrices`` names.

    ``consume`` takes them out of the model given, so that no more than one is held twice; else it stays as it was.
    For decoding: the result is neither trained nor saved. fp8 matrices stay what they are. Raises ValueError for an
    unknown name, a model over a mesh, LoRA updates that are not merged, and a matrix that cannot be stored so, or not
    in fewer bits (it says which and why).
    """
    matrices = tuple(matrices)
    unknown = sorted(set(matrices) - set(MATRICES))
    if unknown:
        raise ValueError(f"found matrices {unknown}; known are {list(MATRICES)}")
    if isinstance(model, Sharded):
        raise ValueError("found a model over a mesh; needs one on a single device: shards of coded weights are not cut")
    other: Any = model if consume else jax.tree.map(lambda leaf: leaf, model)
    for group, path, module, name in large_matrices(other):
        weight = getattr(module, name)[...]
        if group not in matrices or isinstance(weight, Scaled | Coded):
            continue
        if isinstance(weight, LowRank):
            raise ValueError(f"{path} has a LoRA update; merge it first (ready_jax.lora.merge)")
        terms, columns = weight.shape
        reason = coded_weights.why_not(terms, columns, weight.dtype.name)
        if reason is not None:
            raise ValueError(f"{path} cannot be stored in 12 bits a weight: {reason}")
        found = encode(weight)
        listed, bits = found.rare.shape[1], 12 + 32 * found.rare.shape[1] / terms
        if listed > coded_weights.RARE and bits > 16:
            raise ValueError(
                f"{path} would take {bits:.1f} bits a weight, not fewer than 16: in one column about "
                f"{listed} of {terms} weights have scales that its neighbours do not share: leave out {group!r}"
            )
        stored = nnx.Param(found)
        setattr(module, name, nnx.data(stored) if group == "head" else stored)
    return other


def bits_per_weight(model: Any) -> float:
    """Bits of the coded matrices of a model, or of several, over the number of their weights; lists are counted in."""
    found = [x for x in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, Coded)) if isinstance(x, Coded)]
    if not found:
        raise ValueError("found no coded matrix in this model; ready_jax.lossless.compress makes them")
    return 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(found)) / sum(x.shape[0] * x.shape[1] for x in found)
