"""Devices of a run: a mesh from its recipe, modules and training state on it, programs traced for it.

Rows of a batch are spread over all devices, weights and moments are split along their first dimension over `shard`
(along another one, XLA would keep a transposed copy of each part to gather from). What rows go through is one program
per device (`on_own_rows`), with kernels as on one; around it XLA's partitioner inserts the communication.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from flax import nnx
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


def specs(tree, mesh: Mesh):
    """How arrays are laid out: matrices by their first dimension, where it divides; all others are everywhere."""

    def one(x):
        split = x.ndim > 1 and mesh.shape[AXES[1]] > 1 and x.shape[0] % mesh.shape[AXES[1]] == 0
        return PartitionSpec(AXES[1]) if split else PartitionSpec()

    return jax.tree.map(one, tree)


def placed(tree, mesh: Mesh | None):
    """Arrays laid out by ``specs``; without a mesh as they are."""
    if mesh is None:
        return tree
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs(tree, mesh))


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


def gather_options(target, mesh: Mesh | None) -> dict[str, int]:
    """XLA options for a program that takes the target through ``on_own_rows``: what a layer needs comes as one gather.

    By default XLA merges 30 MB at most, has one gather under way at a time, and hides each behind one product or none;
    with more than a layer's bytes it would merge neighbours, and hide none.
    """
    if mesh is None or mesh.shape[AXES[1]] == 1:
        return {}
    layers = ([x.nbytes for x in jax.tree.leaves(layer) if x.ndim > 1] for layer in target.layers)
    return {"xla_gpu_all_gather_combine_threshold_bytes": max(map(sum, layers))}


def on_own_rows(function: Callable, mesh: Mesh | None, masters, frozen, target, *rows):
    """``function(masters, frozen, target, layer_at, *rows)`` by every device for its own rows, the results added up.

    It returns sums, and gradients of ``masters``, which come back laid out like those. Split weights are whole while
    they are used: those of the target's layers come through ``layer_at`` (see ``Target.sequence``), one at a time,
    all others once, before the first row.
    """
    if mesh is None:
        return function(masters, frozen, target, None, *rows)
    modules = masters, frozen, target
    layout = tuple(specs(x, mesh) for x in modules)
    rows_spec, everywhere, split = PartitionSpec(AXES), PartitionSpec(), PartitionSpec(AXES[1])

    def whole(tree, layout):
        def gather(x, spec):
            return jax.lax.all_gather(x, AXES[1], tiled=True) if spec == split else x

        return jax.tree.map(gather, tree, layout)

    def added_up(x, spec):
        if spec != split:
            return jax.lax.psum(x, AXES)
        return jax.lax.psum_scatter(jax.lax.psum(x, AXES[0]), AXES[1], tiled=True)

    def own(masters, frozen, target, *rows):
        layers, layer_specs = target.layers, layout[2].layers

        def layer_at(i, x_BTD):
            # Behind a barrier: XLA merges gathers, and would those of many small layers into one at the beginning.
            part, x_BTD = jax.lax.optimization_barrier((layers[i], x_BTD))
            return whole(part, layer_specs[i]), x_BTD

        shell = whole(*(without_layers(x) for x in (target, layout[2])))
        with dispatch.partitioned(False):
            found = function(whole(masters, layout[0]), whole(frozen, layout[1]), shell, layer_at, *rows)
        return jax.lax.psum(found[0], AXES), jax.tree.map(added_up, found[1], layout[0])

    return jax.shard_map(
        own, mesh=mesh, in_specs=(*layout, *(rows_spec for _ in rows)), out_specs=(everywhere, layout[0]),
        check_vma=False,
    )(*modules, *rows)  # fmt: skip


def without_layers(target):
    """A view of the target's other parts; the caller's module stays untouched."""
    shell = nnx.merge(*nnx.split(target))
    shell.layers = nnx.List([])
    return shell


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
