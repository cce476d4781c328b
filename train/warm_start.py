"""The drafter that a run starts from: pretrained or from scratch, then window, reader and LoRA as the recipe says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from ready_jax import checkpoint, lora, schema
from ready_jax.config import DrafterConfig, TargetConfig
from ready_jax.configs.drafter_training import Recipe
from ready_jax.drafter import Drafter
from ready_jax.tensor_files import CONFIG, read_json


def rebuilt(drafter: Drafter, config: DrafterConfig, seed: int) -> Drafter:
    """The same parameters under another configuration; those that are new are drawn from ``seed``.

    Raises ValueError where a parameter that both have differs in shape.
    """

    def make():
        return Drafter(config, rngs=nnx.Rngs(seed), dtype=drafter.dtype.name)

    graph, state = nnx.split(nnx.eval_shape(make))
    old = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(drafter))}
    flat = nnx.to_flat_state(state)
    wrong = [path for path, leaf in flat if path in old and old[path].shape != leaf.get_value().shape]
    if wrong:
        raise ValueError(f"parameters {wrong} have another shape in the new configuration")
    new = [path for path, _ in flat if path not in old]

    @jax.jit
    def draw():  # under jit, so that nothing else is drawn
        values = dict(nnx.to_flat_state(nnx.state(make())))
        return [values[path].get_value() for path in new]

    values = old | dict(zip(new, draw() if new else [], strict=True))
    return nnx.merge(graph, nnx.from_flat_state([(path, leaf.replace(values[path])) for path, leaf in flat]))


def starting_config(recipe: Recipe, start: DrafterConfig) -> DrafterConfig:
    """The configuration that trains: that of ``start`` with the recipe's window and, where it has none, reader."""
    adapt = recipe.adapt
    config = start if adapt.window is None else replace(start, sliding_window=adapt.window)
    if adapt.reader is None:
        return config
    if config.reader is not None and config.reader != adapt.reader:
        raise ValueError(
            f"{recipe.files.from_pretrained} has a reader of its own, which differs from adapt.reader: "
            f"{config.reader} and {adapt.reader}"
        )
    return replace(config, reader=adapt.reader)


def pretrained_config(recipe: Recipe) -> DrafterConfig:
    """The starting drafter's configuration, read from its ``config.json`` alone."""
    if not recipe.files.from_pretrained:
        return from_scratch(recipe)
    folder = checkpoint.resolve(recipe.files.from_pretrained, recipe.files.revision or None)[0]
    return schema.drafter_config(read_json(folder / CONFIG), str(folder / CONFIG))


def from_scratch(recipe: Recipe) -> DrafterConfig:
    if recipe.drafter is None:
        raise ValueError("a base drafter is required: files.from_pretrained names none and the recipe has no drafter")
    return recipe.drafter


def starting_drafter(recipe: Recipe, target: TargetConfig, *, dtype: Any = "float32") -> Drafter:
    """Drafter of a run before its first step, on one device. With zero updates (LoRA and a new reader both start
    exactly at zero) it is the pretrained one.

    Raises ValueError (also ConfigError) where base, recipe and target do not fit.
    """
    files, adapt, seed = recipe.files, recipe.adapt, recipe.rows.seed
    if files.from_pretrained:
        drafter = checkpoint.load_drafter(files.from_pretrained, revision=files.revision or None, dtype=dtype)
    else:
        if "lora" in adapt.trains:
            raise ValueError("LoRA needs a pretrained base drafter: set files.from_pretrained")
        config = from_scratch(recipe)
        drafter = jax.jit(lambda: Drafter(config, rngs=nnx.Rngs(seed), dtype=dtype))()
    updates = nnx.state(drafter, lora.LoraParam)
    settings = lora.config_of(drafter)
    config = starting_config(recipe, drafter.config)
    schema.check_pair(target, config)
    if config != drafter.config:
        drafter = rebuilt(_plain(drafter), config, seed)
        if settings is not None:
            drafter = lora.attach(drafter, settings, rngs=nnx.Rngs(seed), dtype=dtype)
            nnx.update(drafter, updates)
    if adapt.lora is not None:
        if settings is None:
            drafter = lora.attach(drafter, adapt.lora, rngs=nnx.Rngs(seed), dtype=dtype)
        elif settings != adapt.lora:
            raise ValueError(f"{files.from_pretrained} has {settings}, the recipe asks for {adapt.lora}")
    lacking = [part for part, there in (("reader", drafter.reader), ("lora", lora.adapted(drafter))) if not there]
    missing = [part for part in adapt.trains if part in lacking]
    if missing:
        raise ValueError(f"adapt.trains={adapt.trains}, but the drafter has no {' and no '.join(missing)}")
    return drafter


def _plain(drafter: Drafter) -> Drafter:
    """Without LoRA updates: the weights alone."""
    other = jax.tree.map(lambda leaf: leaf, drafter)
    for module, attribute, _ in lora.projections(other):
        found = getattr(module, attribute)
        if isinstance(found, lora.Adapted):
            setattr(module, attribute, found.base)
    return other
