"""Placement by letter: one table from dimension letter to mesh axis, no rule per weight.

A parameter's name ends in its dimension letters (``w_in_DI``), so where it lives on a mesh follows from the table.
The last mesh axis splits what is wide (heads, MLP and fused columns, vocabulary); whatever does not divide evenly is
replicated. XLA's partitioner (GSPMD) inserts the communication.
"""

from __future__ import annotations

import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

#: Letters whose dimension is split over the mesh's last axis.
SPLIT = frozenset("IFOVCMZ")


def letters(name: str) -> str:
    """The dimension letters at the end of a name, or ''."""
    found = re.search(r"_([A-Z]+)$", name)
    return found.group(1) if found else ""


def spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How a parameter of this name and shape is laid out: at most one dimension is split, the first that divides."""
    axis = mesh.axis_names[-1]
    parts: list[str | None] = [None] * len(shape)
    suffix = letters(name)
    for i, letter in enumerate(suffix if len(suffix) == len(shape) else ""):
        if letter in SPLIT and shape[i] % mesh.shape[axis] == 0:
            parts[i] = axis
            break
    return PartitionSpec(*parts)


def place(model, mesh: Mesh):
    """The module with every parameter placed on ``mesh`` by its letters, its axes taken as automatic ones.

    ``jax.make_mesh`` makes explicit axes unless told otherwise: then every product would have to name its sharding.
    """
    mesh = Mesh(mesh.devices, mesh.axis_names)

    def put(path, leaf):
        names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
        name = next((n for n in reversed(names) if letters(n)), "")
        return jax.device_put(leaf, NamedSharding(mesh, spec(name, leaf.shape, mesh)))

    return jax.tree_util.tree_map_with_path(put, model)


def mesh_of(model) -> Mesh | None:
    """The mesh that a module's parameters live on; None for plain single-device parameters."""
    for leaf in jax.tree.leaves(model):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def isolated():
    """A context that a caller's ``jax.set_mesh`` does not reach: the parameters themselves say where they live."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def check_same_mesh(target, drafter) -> None:
    """ValueError if both modules are placed, on different meshes: no program could take them together."""
    first, second = mesh_of(target), mesh_of(drafter)
    if first != second:
        raise ValueError(
            f"the target lives on {describe(first)}, the drafter on {describe(second)}: load or place both on one mesh"
        )


def describe(mesh: Mesh | None) -> str:
    return "one device, without a mesh" if mesh is None else f"a mesh of {dict(mesh.shape)} devices"
