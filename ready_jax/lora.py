"""Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685) of a drafter's projections.

``attach`` puts an ``Adapted`` module where a projection's parameter was; it reads like that parameter, so that no
layer knows of it. Fused columns (keys and values, gate and up) are adapted part by part, under the names that a
checkpoint gives the parts. ``merge`` adds the updates to the weights and gives a plain drafter back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ready_jax import names
from ready_jax.config import LoraConfig
from ready_jax.drafter import Drafter
from ready_jax.layers import LowRank, normal


class LoraParam(nnx.Param):
    """A factor of a low-rank update: the NNX filter ``LoraParam`` selects them."""


class Adapted(nnx.Module):
    """A projection [in, out] with low-rank updates of some of its parts; ``adapted[...]`` is what ``linear`` takes.

    ``modules`` are the parts' names in a checkpoint (``layers.0.self_attn.k_proj``), ``columns`` their columns.
    """

    def __init__(self, base: nnx.Param, config: LoraConfig, parts: dict[str, slice], *, rngs: nnx.Rngs, dtype):
        self.base = base
        self.config = config
        self.modules = tuple(parts)
        self.columns = tuple((part.start, part.stop) for part in parts.values())
        rows, rank = base.shape[0], config.rank
        self.down = nnx.List([LoraParam(normal(rngs.params(), (rows, rank), rows, dtype)) for _ in parts])
        self.up = nnx.List([LoraParam(jnp.zeros((rank, end - first), dtype)) for first, end in self.columns])

    def __getitem__(self, index) -> LowRank:
        down, up = (tuple(factor[...] for factor in factors) for factors in (self.down, self.up))
        return LowRank(self.base[...], down, up, self.columns, self.config.scale)

    def merged(self) -> jax.Array:
        """The weight with its updates, summed in fp32, in the weight's type."""
        weight = self.base[...]
        total = weight.astype(jnp.float32)
        for down, up, (first, end) in zip(self.down, self.up, self.columns, strict=True):
            factors = (factor[...].astype(jnp.float32) for factor in (down, up))
            update = self.config.scale * jnp.matmul(*factors, precision=jax.lax.Precision.HIGHEST)
            total = total.at[:, first:end].add(update)
        return total.astype(weight.dtype)


def projections(drafter: Drafter) -> Iterator[tuple[Any, str, dict[str, slice]]]:
    """(module, attribute, {checkpoint module name: columns}) of every projection that can be adapted."""
    for leaf in names.drafter_leaves(drafter.config):
        if leaf.form != "transposed" or leaf.path[0] not in ("layers", "w_fuse_ID"):
            continue
        module: Any = drafter
        for part in leaf.path[:-1]:
            module = module[part] if isinstance(part, int) else getattr(module, part)
        yield (
            module,
            str(leaf.path[-1]),
            {piece.name.removesuffix(".weight"): columns for piece, columns in names.column_ranges(leaf)},
        )


def adapted(drafter: Drafter) -> list[Adapted]:
    """The adapted projections in checkpoint order; empty for a plain drafter."""
    found = [getattr(module, attribute) for module, attribute, _ in projections(drafter)]
    return [module for module in found if isinstance(module, Adapted)]


def config_of(drafter: Drafter) -> LoraConfig | None:
    """The configuration that ``attach`` was called with; None for a plain drafter."""
    found = adapted(drafter)
    return found[0].config if found else None


def attach(drafter: Drafter, config: LoraConfig, *, rngs: nnx.Rngs, dtype: Any = "float32") -> Drafter:
    """The same drafter with updates that are exactly zero (``up`` is zero, ``down`` Gaussian of 1/sqrt(in)).

    Raises ValueError for a target that the drafter does not have, or a drafter that is adapted already.
    """
    if adapted(drafter):
        raise ValueError("this drafter has LoRA updates already: merge them first, or go on training those")
    parts = [name for _, _, parts in projections(drafter) for name in parts]
    known = {name.rsplit(".", 1)[-1] for name in parts}
    unknown = sorted(set(config.targets) - known)
    if unknown:
        raise ValueError(f"LoRA targets {unknown} are not in this drafter, which has {sorted(known)}")
    other = jax.tree.map(lambda leaf: leaf, drafter)
    for module, attribute, parts in projections(other):
        chosen = {name: columns for name, columns in parts.items() if name.rsplit(".", 1)[-1] in config.targets}
        if chosen:
            base = getattr(module, attribute)
            setattr(module, attribute, Adapted(base, config, chosen, rngs=rngs, dtype=dtype))
    return other


def merge(drafter: Drafter) -> Drafter:
    """The plain drafter whose weights include the updates; a drafter without updates comes back as it is."""
    other = jax.tree.map(lambda leaf: leaf, drafter)
    for module, attribute, _ in projections(other):
        found = getattr(module, attribute)
        if isinstance(found, Adapted):
            setattr(module, attribute, nnx.Param(found.merged()))
    return other
