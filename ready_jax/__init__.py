"""ready-jax: exact speculative decoding for Gated DeltaNet hybrids, with a drafter that reads recurrent state.

The public names load on first use; ``ready_jax.train``, ``ready_jax.serve``, ``ready_jax.kernels`` and
``ready_jax.configs`` are subpackages.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ready_jax.checkpoint import load_drafter, load_target, save_pretrained
    from ready_jax.decode import Autoregressive, Decoding, Limits, begin, decode
    from ready_jax.generation import Generation
    from ready_jax.pair import Pair, load
    from ready_jax.reader import StateReader
    from ready_jax.state import DecodeState, PendingWrites, commit, init_state
    from ready_jax.verify import accept_greedy

_HOME = {
    "load": "pair",
    "Pair": "pair",
    "Generation": "generation",
    "load_target": "checkpoint",
    "load_drafter": "checkpoint",
    "save_pretrained": "checkpoint",
    "init_state": "state",
    "commit": "state",
    "DecodeState": "state",
    "PendingWrites": "state",
    "accept_greedy": "verify",
    "begin": "decode",
    "decode": "decode",
    "Limits": "decode",
    "Decoding": "decode",
    "Autoregressive": "decode",
    "StateReader": "reader",
}
_MODULES = ("train", "serve", "kernels", "configs")

__version__ = "0.1.0"
__all__ = [
    "Autoregressive",
    "DecodeState",
    "Decoding",
    "Generation",
    "Limits",
    "Pair",
    "PendingWrites",
    "StateReader",
    "accept_greedy",
    "begin",
    "commit",
    "decode",
    "init_state",
    "load",
    "load_drafter",
    "load_target",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"ready_jax.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"ready_jax.{name}")
    raise AttributeError(f"module 'ready_jax' has no attribute {name!r}; it has {', '.join([*__all__, *_MODULES])}")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]


class _Package(ModuleType):
    """Importing the file ``decode`` would put the module where the public function of that name belongs."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.decode if name == "decode" and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Package
