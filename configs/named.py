"""Recipes by name, and `section.field=value` changes to them.

A recipe is a function without arguments in a file of this folder; it returns frozen dataclasses, and its docstring
states the command, the cost and the expected result.
"""

import ast
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast


def recipes() -> dict[str, Callable[[], Any]]:
    """Every recipe: the public functions without arguments of the files here that list them in `RECIPES`."""
    found: dict[str, Callable[[], Any]] = {}
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"ready_jax.configs.{file.name}")
        found |= {recipe.__name__: recipe for recipe in getattr(module, "RECIPES", ())}
    return found


def recipe(name: str, changes: Sequence[str] = ()) -> Any:
    """The recipe of this name with `section.field=value` changes.

    Raises:
        ValueError: an unknown name or field, or a value of another type; the message lists what is known.
    """
    known = recipes()
    if name not in known:
        raise ValueError(f"recipe {name!r} is not known: one of {', '.join(sorted(known))} is needed")
    config = known[name]()
    for change in changes:
        where, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"found {change!r}: section.field=value is needed")
        config = _replaced(config, where.split("."), text, change)
    return config


def _replaced(config: Any, path: list[str], text: str, change: str) -> Any:
    names = [field.name for field in fields(cast(Any, config))] if is_dataclass(config) else []
    if path[0] not in names:
        raise ValueError(f"{change}: no field {path[0]!r} in {type(config).__name__}, which has {', '.join(names)}")
    old = getattr(config, path[0])
    if len(path) > 1:
        return replace(cast(Any, config), **{path[0]: _replaced(old, path[1:], text, change)})
    return replace(cast(Any, config), **{path[0]: _value(text, old, change)})


def _value(text: str, old: Any, change: str) -> Any:
    if isinstance(old, str):
        return text
    try:
        new = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        new = text
    if isinstance(old, float) and type(new) is int:
        new = float(new)
    if old is not None and type(new) is not type(old) and new is not None:
        raise ValueError(f"{change}: the value is a {type(new).__name__}, a {type(old).__name__} is needed ({old!r})")
    return new
