"""Frozen dataclasses as JAX pytrees."""

from __future__ import annotations

import dataclasses

import jax


def register[T](cls: type[T]) -> type[T]:
    """Register a frozen dataclass as a pytree; fields with ``metadata=dict(static=True)`` belong to the structure.

    Like ``jax.tree_util.register_dataclass``, but unflattening does not call ``__init__``: JAX fills pytrees with
    placeholders that are no arrays, which checked annotations would refuse.
    """
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    static = tuple(f.name for f in fields if f.metadata.get("static"))
    data = tuple(f.name for f in fields if f.name not in static)

    def flatten(node):
        children = tuple((jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in data)
        return children, tuple(getattr(node, name) for name in static)

    def unflatten(values, children):
        node = object.__new__(cls)
        for name, value in [*zip(static, values, strict=True), *zip(data, children, strict=True)]:
            object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls
