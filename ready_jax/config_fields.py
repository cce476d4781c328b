"""Reading settings out of a ``config.json``: every fault of a file is collected and reported together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from ready_jax.config import RopeConfig, YarnConfig
from ready_jax.tensor_files import CheckpointError


class ConfigError(CheckpointError):
    """A configuration that is incomplete, contradicts itself or describes something else."""


class UnsupportedError(ConfigError, NotImplementedError):
    """A sound configuration of a kind that is not implemented here."""


class Fields:
    """Settings found in one or more places of a config file; collects faults until ``raise_if_wrong``."""

    def __init__(self, where: str, places: dict[str, dict[str, Any]]):
        self.where = where
        self.places = places
        self.missing: list[str] = []
        self.wrong: list[str] = []

    def find(self, *names: str) -> Any:
        """The value under any of the names in any place; None if null or absent. Contradictions are faults."""
        found = [
            (f"{place}.{name}" if place else name, values[name])
            for place, values in self.places.items()
            for name in names
            if values.get(name) is not None
        ]
        for label, value in found[1:]:
            if value != found[0][1]:
                self.wrong.append(f"{found[0][0]}={found[0][1]!r} contradicts {label}={value!r}")
        return found[0][1] if found else None

    def need(self, kind: type, *names: str) -> Any:
        """As ``find``, but absence and a wrong type are faults (a harmless stand-in is returned)."""
        value = self.find(*names)
        if value is None:
            self.missing.append(names[0])
        elif kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.wrong.append(f"{names[0]}={value!r}: needed {kind.__name__}")
        else:
            return value
        return {int: 1, float: 1.0, bool: False, str: "", list: [], dict: {}}[kind]

    def positive(self, *names: str) -> int:
        value = self.need(int, *names)
        if value < 1:
            self.wrong.append(f"{names[0]}={value}: needed at least 1")
        return max(value, 1)

    def only(self, allowed: Iterable[Any], name: str, reason: str) -> None:
        """An optional setting that has one meaning here."""
        allowed = tuple(allowed)
        value = self.find(name)
        if value is not None and value not in allowed:
            self.wrong.append(f"{name}={value!r}: needed {' or '.join(map(repr, allowed))}, {reason}")

    def raise_if_wrong(self) -> None:
        faults = [f"missing keys {sorted(set(self.missing))}"] if self.missing else []
        faults += dict.fromkeys(self.wrong)
        if faults:
            raise ConfigError(f"{self.where}: " + "; ".join(faults))


def build[T](fields: Fields, make: Callable[..., T], **values: Any) -> T:
    """``make(**values)`` after all faults were reported; its own complaints name the file too."""
    fields.raise_if_wrong()
    try:
        return make(**values)
    except ValueError as error:
        raise ConfigError(f"{fields.where}: {error}") from None


def rope_fields(fields: Fields) -> Fields:
    """The rotary settings of both schemas: ``rope_parameters`` or flat ``rope_theta`` and ``rope_scaling``."""
    places = {}
    for place, values in fields.places.items():
        dot = f"{place}." if place else ""
        for name in ("rope_parameters", "rope_scaling"):
            inner = values.get(name)
            if inner is not None and not isinstance(inner, dict):
                fields.wrong.append(f"{dot}{name}={inner!r}: needed an object or null")
            elif inner:
                places[dot + name] = inner
        flat = {k: values[k] for k in ("rope_theta", "partial_rotary_factor") if values.get(k) is not None}
        places[place] = flat
    rope = Fields(fields.where, places)
    rope.missing, rope.wrong = fields.missing, fields.wrong
    return rope


def rope_config(fields: Fields, rotary_dim: int) -> RopeConfig | None:
    """Theta and YaRN; None where faults were recorded."""
    rope = rope_fields(fields)
    theta = rope.need(float, "rope_theta")
    kind = rope.find("rope_type", "type") or "default"
    if kind not in ("default", "yarn", "mrope"):
        rope.wrong.append(f"rope_type={kind!r}: needed 'default' or 'yarn', no other scaling is implemented")
    section = rope.find("mrope_section")
    if section is not None and sum(section) != rotary_dim // 2:
        rope.wrong.append(
            f"mrope_section={section} sums to {sum(section)}, needed {rotary_dim // 2}, half of the rotary dims"
        )
    yarn = _yarn(rope) if kind == "yarn" else None
    if rotary_dim % 2:
        rope.wrong.append(f"{rotary_dim} rotary dims: needed an even number, entries are rotated in pairs")
    return None if rope.missing or rope.wrong else RopeConfig(theta, rotary_dim, yarn)


def _yarn(rope: Fields) -> YarnConfig:
    """YaRN (Peng et al. 2023). The factor on cos and sin: given, else from mscale, else 0.1 ln(factor) + 1."""
    factor = rope.need(float, "factor")
    original = rope.positive("original_max_position_embeddings")
    rope.only([True], "truncate", "correction bounds are truncated to whole dimensions")

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    attention_factor = rope.find("attention_factor")
    mscale, mscale_all = rope.find("mscale"), rope.find("mscale_all_dim")
    if attention_factor is None:
        attention_factor = scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)
    return YarnConfig(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=float(rope.find("beta_fast") or 32.0),
        beta_slow=float(rope.find("beta_slow") or 1.0),
        attention_factor=float(attention_factor),
    )


def rope_to_raw(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """``rope_parameters`` as the reference library writes them."""
    raw: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "yarn" if rope.yarn else "default"}
    if rope.rotary_dim != head_dim:
        raw["partial_rotary_factor"] = rope.rotary_dim / head_dim
    if rope.yarn:
        raw |= {
            "factor": rope.yarn.factor,
            "original_max_position_embeddings": rope.yarn.original_max_position_embeddings,
            "beta_fast": rope.yarn.beta_fast,
            "beta_slow": rope.yarn.beta_slow,
            "attention_factor": rope.yarn.attention_factor,
        }
    return raw
