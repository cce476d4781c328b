"""Devices of a run: a mesh from its recipe, modules and training state on it, programs traced for it.

Placement follows a parameter's letters (`ready_jax.sharding`); rows of a batch are spread over all devices. All
communication is XLA's own, inserted by its partitioner.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ready_jax import sharding
from ready_jax.configs.drafter_training import MeshConfig
from ready_jax.kernels import dispatch

AXES = ("data", "shard")


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh | None:
    """None for one device. ``devices`` None: all of all processes, of which exactly as many must be asked for if
    there are several processes. Raises ValueError with both numbers where there are too few."""
    devices = jax.devices() if devices is None else devices
    needed = config.data * config.shard
    if needed > len(devices) or (jax.process_count() > 1 and needed != len(devices)):
        raise ValueError(
            f"mesh.data={config.data} times mesh.shard={config.shard} needs {needed} devices, found {len(devices)} "
            f"in {jax.process_count()} process(es)"
        )
    if needed == 1:
        return None
    return Mesh(np.array(devices[:needed]).reshape(config.data, config.shard), AXES)


def placed(tree, mesh: Mesh | None):
    """Arrays laid out by their letters; without a mesh on the default device."""
    return tree if mesh is None else sharding.place(tree, mesh)


def placement(tree, mesh: Mesh | None):
    """The shardings of a tree's arrays, which a program that replaces them keeps; None without a mesh."""
    return None if mesh is None else jax.tree.map(lambda x: x.sharding, tree)


@contextmanager
def traced_for(mesh: Mesh | None):
    """Programs called inside are traced for operands that are spread over the mesh."""
    if mesh is None:
        yield
    else:
        with dispatch.partitioned(True), sharding.isolated():
            yield


def join_processes(coordinator: str, count: int, index: int) -> None:
    """Start JAX's distributed runtime: this is process ``index`` of ``count``, ``coordinator`` is ``host:port``.

    Call it before anything touches a device. On CPUs collectives go through gloo.
    """
    if (jax.config.jax_platforms or "").startswith("cpu"):  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, count, index)


def gathered(tree, mesh: Mesh | None):
    """The arrays whole on one device of this process, wherever they were split; every process must call it."""
    if mesh is None:
        return tree
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), whole)
