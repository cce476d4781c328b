"""Draft-only weights in fp8: half the bytes of a draft pass, and the text stays the target's own.

A matrix is stored as e4m3 (largest value 448) with one fp32 scale per output, in the order in which the product's
threads read it where its size has one, else outputs first; activations stay as they are, products accumulate in fp32.
Only acceptance can move: verification is never quantised.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from ready_jax.drafter import Drafter
from ready_jax.kernels import fragments, scaled_weights
from ready_jax.layers import Coded, Scaled
from ready_jax.lora import merge
from ready_jax.lossless import decode
from ready_jax.tensor_parallel import Sharded

FP8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FP8).max)


def fp8(w_IO: jax.Array | Coded, *, ordered: bool = False) -> Scaled:
    """Each output's column scaled so that its largest entry becomes 448; a column of zeros stays one.

    ``ordered``: as `kernels/scaled_product.py` reads it fastest, where the size allows it; else plain, [O, I].
    """
    stored = _fp8(decode(w_IO) if isinstance(w_IO, Coded) else w_IO)
    if not ordered or fragments.misfit(*w_IO.shape) is not None:
        return stored
    return replace(stored, weight=scaled_weights.encode(stored.weight))


@jax.jit
def _fp8(w_IO):
    w_IO = w_IO.astype(jnp.float32)
    top = jnp.max(jnp.abs(w_IO), axis=0)
    scale = jnp.where(top > 0, top / LARGEST, 1.0)
    return Scaled((w_IO / scale[None]).astype(FP8).T, scale)


def draft_fp8[D: (Drafter, Sharded)](drafter: D, head: jax.Array | Coded | None = None, *, ordered: bool = True) -> D:
    """The same drafter (LoRA merged), its large matrices in fp8; norms, embeddings, reader and confidence head stay.

    ``head`` [D, V], or else a head of the drafter's own, becomes an fp8 head that ``propose`` prefers to the target's
    (``target.w_out_DV[...]``, or ``target.embed_VD[...].T`` where the two are tied). For decoding: a quantised drafter
    is neither trained nor saved. Over a mesh the head is the target's ``shards.w_out_DV[...]``, and matrices, which are
    cut there, are stored plainly (``ordered``: see ``fp8``).
    """
    if isinstance(drafter, Sharded):
        return replace(drafter, shards=draft_fp8(drafter.shards, head, ordered=False)).placed()
    other = merge(drafter)
    large: list[tuple[nnx.Module, str, bool]] = [(other, "w_fuse_ID", ordered)]
    for layer in other.layers:
        large += [(layer, name, ordered) for name in ("w_q_DO", "w_kv_DI", "w_out_OD")]
        large += [(layer.mlp, name, ordered) for name in ("w_in_DI", "w_out_FD")]
    if other.markov is not None:
        large.append((other.markov, "w2_RV", False))  # its kernel reads it plainly
    for module, name, in_order in large:
        setattr(module, name, nnx.Param(fp8(getattr(module, name)[...], ordered=in_order)))
    if head is None and other.w_out_DV is not None:
        head = other.w_out_DV[...]
    if head is not None:
        other.w_out_DV = nnx.data(nnx.Param(fp8(head, ordered=ordered)))
    return other
