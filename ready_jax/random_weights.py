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

from ready_jax.config import DrafterConfig, TargetConfig
from ready_jax.drafter import DraftContext, Drafter
from ready_jax.reader import StateReader
from ready_jax.state import DecodeState
from ready_jax.target import Target


def random_target(config: TargetConfig, seed: int = 0, *, dtype="bfloat16") -> Target:
    """As ``Target(config, ...)`` would be made, up to the values drawn; a 27B model takes seconds on a GPU."""
    shell, *keys = jax.random.split(jax.random.key(seed), config.num_layers + 1)
    model = _target(shell, replace(config, layer_types=()), dtype)
    layers = zip(config.layer_types, keys, strict=True)
    model.layers = nnx.List([_target_layer(key, replace(config, layer_types=(kind,)), dtype) for kind, key in layers])
    return _as(lambda: Target(config, rngs=nnx.Rngs(0), dtype=dtype), model)


def random_drafter(config: DrafterConfig, seed: int = 1, *, dtype="bfloat16") -> Drafter:
    """As ``Drafter(config, ...)`` would be made, reader included, up to the values drawn.

    The drafter's own part depends neither on the reader nor on whether there is one.
    """
    bare = replace(config, reader=None)
    shell, *keys = jax.random.split(jax.random.key(seed), config.num_layers + 1)
    model = _drafter(shell, replace(bare, num_layers=0), dtype)
    model.layers = nnx.List([_draft_layer(key, replace(bare, num_layers=1), dtype) for key in keys])
    if config.reader is not None:
        model.reader = nnx.data(random_reader(config, seed, dtype=dtype))
    return _as(lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype), model)


def random_reader(config: DrafterConfig, seed: int = 1, *, dtype="bfloat16") -> StateReader:
    """The state reader that a drafter of this configuration has."""
    if config.reader is None:
        raise ValueError("this drafter's configuration has no reader")
    return _reader(jax.random.key(seed), config.reader, config.hidden_size, len(config.inject_layers), dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _target(key, config, dtype):
    return Target(config, rngs=nnx.Rngs(key), dtype=dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _target_layer(key, config, dtype):
    return Target(config, rngs=nnx.Rngs(key), dtype=dtype).layers[0]  # what else it draws is never computed


@partial(jax.jit, static_argnums=(1, 2))
def _drafter(key, config, dtype):
    return Drafter(config, rngs=nnx.Rngs(key), dtype=dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _draft_layer(key, config, dtype):
    return Drafter(config, rngs=nnx.Rngs(key), dtype=dtype).layers[0]


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _reader(key, config, hidden, sites, dtype):
    return StateReader(config, hidden, sites, rngs=nnx.Rngs(key), dtype=dtype)


def _as[T](make: Callable[[], T], model: T) -> T:
    """The leaves of ``model`` in the structure of what ``make`` builds."""
    wanted = nnx.eval_shape(make)
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
