"""Models of full size with random weights, made on the device: for timing, without a checkpoint.

Every part comes from the module's own initialisers under jit, so fp32 draws never leave a fusion and one program
serves all layers of a kind; the largest temporary is one layer. Deterministic in the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ready_jax import tensor_parallel
from ready_jax.config import FULL, LINEAR, DrafterConfig, TargetConfig
from ready_jax.drafter import DraftContext, Drafter
from ready_jax.reader import StateReader
from ready_jax.state import DecodeState
from ready_jax.target import Target

#: Kinds of the target's layers, and where the parts of a model of one layer lie.
KINDS, LAYER = (LINEAR, FULL), ("layers", "0")


def random_target(config: TargetConfig, seed: int = 0, *, dtype="bfloat16", mesh: Mesh | None = None) -> Any:
    """As ``Target(config, ...)`` would be made, up to the values drawn; a 27B model takes seconds on a GPU.

    With ``mesh`` every shard draws its own part: a ``tensor_parallel.Sharded``, and never a whole model.
    """
    shell, *keys = jax.random.split(jax.random.key(seed), config.num_layers + 1)
    model = _part(_target, replace(config, layer_types=()), dtype, mesh)(shell)
    parts = {kind: _part(_target_layer, replace(config, layer_types=(kind,)), dtype, mesh, LAYER) for kind in KINDS}
    layers = zip(config.layer_types, keys, strict=True)
    model.layers = nnx.List([parts[kind](key) for kind, key in layers])
    return _as(lambda c: Target(c, rngs=nnx.Rngs(0), dtype=dtype), model, config, mesh)


def random_drafter(config: DrafterConfig, seed: int = 1, *, dtype="bfloat16", mesh: Mesh | None = None) -> Any:
    """As ``Drafter(config, ...)`` would be made, reader included, up to the values drawn.

    The drafter's own part depends neither on the reader nor on whether there is one. ``mesh``: see ``random_target``.
    """
    bare = replace(config, reader=None)
    shell, *keys = jax.random.split(jax.random.key(seed), config.num_layers + 1)
    model = _part(_drafter, replace(bare, num_layers=0), dtype, mesh)(shell)
    layer = _part(_draft_layer, replace(bare, num_layers=1), dtype, mesh, LAYER)
    model.layers = nnx.List([layer(key) for key in keys])
    if config.reader is not None:
        model.reader = nnx.data(random_reader(config, seed, dtype=dtype, mesh=mesh))
    return _as(lambda c: Drafter(c, rngs=nnx.Rngs(0), dtype=dtype), model, config, mesh)


def random_reader(config: DrafterConfig, seed: int = 1, *, dtype="bfloat16", mesh: Mesh | None = None) -> StateReader:
    """The state reader that a drafter of this configuration has; with ``mesh`` the one inside of its shards."""
    if config.reader is None:
        raise ValueError("this drafter's configuration has no reader")
    make = partial(_reader, hidden=config.hidden_size, sites=len(config.inject_layers))
    return _part(make, config.reader, dtype, mesh)(jax.random.key(seed))


def _part(make: Callable, config, dtype, mesh: Mesh | None, owner: tuple[str, ...] = ()) -> Callable:
    """From a key to a part of a model; with ``mesh`` drawn shard by shard."""
    if mesh is None:
        return lambda key: make(key, config, dtype=dtype)
    return tensor_parallel.drawn(lambda key, config: make(key, config, dtype=dtype), config, mesh, owner)


@partial(jax.jit, static_argnums=(1,), static_argnames=("dtype",))
def _target(key, config, dtype):
    return Target(config, rngs=nnx.Rngs(key), dtype=dtype)


@partial(jax.jit, static_argnums=(1,), static_argnames=("dtype",))
def _target_layer(key, config, dtype):
    return Target(config, rngs=nnx.Rngs(key), dtype=dtype).layers[0]  # what else it draws is never computed


@partial(jax.jit, static_argnums=(1,), static_argnames=("dtype",))
def _drafter(key, config, dtype):
    return Drafter(config, rngs=nnx.Rngs(key), dtype=dtype)


@partial(jax.jit, static_argnums=(1,), static_argnames=("dtype",))
def _draft_layer(key, config, dtype):
    return Drafter(config, rngs=nnx.Rngs(key), dtype=dtype).layers[0]


@partial(jax.jit, static_argnums=(1,), static_argnames=("hidden", "sites", "dtype"))
def _reader(key, config, hidden, sites, dtype):
    return StateReader(config, hidden, sites, rngs=nnx.Rngs(key), dtype=dtype)


def _as(make: Callable, model, config, mesh: Mesh | None):
    """The leaves of ``model`` in the structure of what ``make`` builds; with ``mesh`` in that of a shard."""
    if mesh is not None:
        shards = mesh.shape[mesh.axis_names[-1]]
        structure = jax.tree.structure(nnx.eval_shape(lambda: make(tensor_parallel.local(config, shards))))
        spread = jax.tree.unflatten(structure, jax.tree.leaves(model))
        return tensor_parallel.Sharded(spread, tensor_parallel.effective(config, shards), config, mesh)
    wanted = nnx.eval_shape(lambda: make(config))
    leaves = jax.tree.leaves(model)
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    if shapes != [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(wanted)]:
        raise NotImplementedError("the constructor builds another model from its parts than from the whole")
    return jax.tree.unflatten(jax.tree.structure(wanted), leaves)


def random_memory[T: (DecodeState, DraftContext)](memory: T, tokens: int, seed: int = 2) -> T:
    """The memory as if it held ``tokens`` tokens of every sequence, with Gaussian contents of scale 0.1."""
    leaves, structure = jax.tree.flatten(memory)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn: list[Any] = [_noise(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    filled = jax.tree.unflatten(structure, drawn)
    return replace(filled, length_B=jnp.full_like(memory.length_B, tokens))


@partial(jax.jit, static_argnums=(1, 2))
def _noise(key, shape, dtype):
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    return (0.1 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
