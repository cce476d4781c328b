"""``config.json`` of a DSpark drafter: one normaliser for the layouts of three trainers, and the way back.

DeepSpec writes flat keys; SpecForge and the public Qwen3.8-27B drafters nest them under ``dflash_config`` and
``dspark_config``; speculators nests the backbone under ``transformer_layer_config`` and has its own names. A setting
may stand in several places if they agree. In all of them a block of 7 makes 7 predictions: the anchor's slot predicts
too. Checkpoints whose slot k predicts position k (DFlash) are refused.
"""

from __future__ import annotations

import typing
import warnings
from dataclasses import fields
from typing import Any

from ready_jax.config import DrafterConfig, ReaderConfig
from ready_jax.config_fields import ConfigError, Fields, UnsupportedError, build, rope_config, rope_fields, rope_to_raw

#: Carries its own embedding and head (DeepSpec).
OWN_EMBEDDINGS = "Qwen3DSparkModel"
ARCHITECTURES = (OWN_EMBEDDINGS, "DSparkDraftModel", "DSparkSpeculator")
MARKOV_HEADS = ("vanilla", "gated", "rnn")
_SPECULATORS = "speculators_model_type"
_NESTED = ("dflash_config", "dspark_config", "transformer_layer_config")
#: speculators writes only what differs from ``transformers.Qwen3Config``: these are that class's own values.
_OMITTED = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}


def _refuse_other_drafters(values: Fields, raw: dict[str, Any]) -> None:
    architectures = [str(name) for name in raw.get("architectures") or ()]
    kind = raw.get(_SPECULATORS)
    named = f"{values.where}: architectures={architectures}" + (f", {_SPECULATORS}={kind!r}" if kind else "")
    known = f"known are {list(ARCHITECTURES)}"
    shifted = "its slot k predicts position k, not k + 1 as DSpark's does, and it has no Markov head"
    projector = values.find("projector_type")
    if any("DFlash" in name for name in architectures) or "dflash" in (kind, projector):
        raise UnsupportedError(
            f"{named}, projector_type={projector!r}: a DFlash drafter, slot-shifted: {shifted}; {known}"
        )
    wrong = [name for name in architectures if name not in ARCHITECTURES]
    if wrong or kind not in (None, "dspark") or projector not in (None, "dspark"):
        raise UnsupportedError(f"{named}, projector_type={projector!r}: not a DSpark drafter; {known}")
    if not architectures and kind is None:
        raise ConfigError(f"{values.where}: found no architectures, needed one of {list(ARCHITECTURES)}")
    model_type = (raw.get("transformer_layer_config") or raw).get("model_type")
    if model_type not in (None, "qwen3", "dspark"):
        raise UnsupportedError(f"{named}: found model_type={model_type!r}, needed 'qwen3'; {known}")


def _check_slots(values: Fields, raw: dict[str, Any], block_size: int) -> None:
    """A block of n must mean n predictions."""
    anchored = values.find("sample_from_anchor")
    proposals = (raw.get("speculators_config") or {}).get("proposal_methods") or []
    counts = [method["speculative_tokens"] for method in proposals if method.get("speculative_tokens") is not None]
    if anchored is False:
        raise UnsupportedError(
            f"{values.where}: sample_from_anchor=False, needed true: this checkpoint is slot-shifted, its slot k "
            f"predicts position k and a block of {block_size} makes {block_size - 1} proposals"
        )
    if _SPECULATORS in raw and anchored is None and block_size not in counts:
        values.wrong.append(
            "sample_from_anchor is missing: older speculators checkpoints are slot-shifted; if this one was trained to "
            'predict from the anchor slot, add "sample_from_anchor": true'
        )
    values.wrong += [
        f"speculative_tokens={count} contradicts block_size={block_size}: the anchor slot predicts too"
        for count in counts
        if count != block_size
    ]


def _taps(values: Fields, raw: dict[str, Any]) -> tuple[int, ...]:
    """Layers whose output is tapped. speculators counts hidden states, the embedding first: one more than the layer
    (vLLM's ``update_dflash`` and llama.cpp's converter subtract it likewise)."""
    taps, shifted = values.find("target_layer_ids"), raw.get("aux_hidden_state_layer_ids")
    for name, found in (("target_layer_ids", taps), ("aux_hidden_state_layer_ids", shifted)):
        if found is not None and not _has_type(found, tuple[int, ...]):
            values.wrong.append(f"{name}={found!r}: needed a list of layer numbers")
            return ()
    if shifted is not None:
        from_shifted = [i - 1 for i in shifted]
        if taps is not None and taps != from_shifted:
            values.wrong.append(
                f"target_layer_ids={taps} contradicts aux_hidden_state_layer_ids={shifted}, which means {from_shifted}"
            )
        taps = from_shifted
    if taps is None:
        values.missing.append("target_layer_ids")
    return tuple(taps or ())


def _mask_token(values: Fields, vocab_size: int, given: int | None) -> int:
    """The argument, else the checkpoint's; never guessed. Warns if it is also padding or end of sequence."""
    stored = values.find("mask_token_id")
    mask = stored if given is None else given
    if mask is None:
        values.missing.append("mask_token_id (or pass mask_token_id=...)")
        return 0
    if not isinstance(mask, int) or not 0 <= mask < vocab_size:
        values.wrong.append(f"mask_token_id={mask!r}: needed an embedding row, 0 to vocab_size - 1 = {vocab_size - 1}")
        return 0
    for role in ("pad_token_id", "eos_token_id"):
        others = [place.get(role) for place in values.places.values()]
        if any(mask == other or (isinstance(other, list) and mask in other) for other in others):
            warnings.warn(f"{values.where}: mask_token_id={mask} is also {role}", UserWarning, stacklevel=4)
    return mask


def _optional_int(values: Fields, name: str) -> int | None:
    value = values.find(name)
    if not _has_type(value, int | None):
        values.wrong.append(f"{name}={value!r}: needed a whole number or null")
        return None
    return value


def _sliding_window(values: Fields, num_layers: int) -> int | None:
    kinds = values.find("layer_types") or ["full_attention"] * num_layers
    if len(kinds) != num_layers or len(set(kinds)) != 1 or kinds[0] not in ("full_attention", "sliding_attention"):
        values.wrong.append(
            f"layer_types={kinds}: needed {num_layers} times 'full_attention', or as often 'sliding_attention'"
        )
    return None if values.find("use_sliding_window") is False else _optional_int(values, "sliding_window")


def drafter_config(raw: dict[str, Any], where: str, *, mask_token_id: int | None = None) -> DrafterConfig:
    """The drafter that ``config.json`` describes; ``where`` names the file in messages.

    ``own_embeddings`` follows the architecture's name here; the loader corrects it by the tensors that are there.
    Raises ConfigError with every fault, UnsupportedError for a kind that is not implemented.
    """
    places = {"": raw} | {name: raw[name] for name in _NESTED if isinstance(raw.get(name), dict)}
    if _SPECULATORS in raw and "transformer_layer_config" in places:
        places["transformer_layer_config"] = _OMITTED | places["transformer_layer_config"]
    values = Fields(where, places)
    _refuse_other_drafters(values, raw)
    need, positive = values.need, values.positive
    block_size, vocab_size, hidden_size = positive("block_size"), positive("vocab_size"), positive("hidden_size")
    head_dim, num_layers = positive("head_dim"), positive("num_hidden_layers")
    _check_slots(values, raw, block_size)
    activation = need(str, "hidden_act")
    if activation and activation != "silu":
        values.wrong.append(f"hidden_act={activation!r}: needed 'silu', no other activation is implemented")
    values.only([False], "attention_bias", "projections have no bias here")
    values.only([False], "tie_word_embeddings", "a drafter's head is its own or the target's")
    values.only(["gqa"], "attention_mode", "no other attention is implemented")
    values.only([vocab_size], "draft_vocab_size", "a reduced draft vocabulary is not implemented")
    values.only([hidden_size], "target_hidden_size", "target and drafter share their hidden width")
    rank = need(int, "markov_rank")
    head = need(str, "markov_head_type") if rank else values.find("markov_head_type") or "vanilla"
    if head and head not in MARKOV_HEADS:
        values.wrong.append(f"markov_head_type={head!r}: needed one of {list(MARKOV_HEADS)}")
    confidence = need(bool, "enable_confidence_head")
    rotary = (rope_fields(values).find("partial_rotary_factor") or 1.0) * head_dim
    config = dict(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=positive("intermediate_size"),
        num_layers=num_layers,
        num_attention_heads=positive("num_attention_heads"),
        num_key_value_heads=positive("num_key_value_heads"),
        head_dim=head_dim,
        rms_norm_eps=need(float, "rms_norm_eps"),
        rope=rope_config(values, int(rotary)),
        max_position_embeddings=positive("max_position_embeddings"),
        block_size=block_size,
        taps=_taps(values, raw),
        mask_token_id=_mask_token(values, vocab_size, mask_token_id),
        markov_rank=rank,
        markov_head_type=head,
        confidence_head=confidence,
        confidence_head_with_markov=need(bool, "confidence_head_with_markov")
        if confidence
        else bool(values.find("confidence_head_with_markov")),
        own_embeddings=OWN_EMBEDDINGS in (raw.get("architectures") or ()),
        sliding_window=_sliding_window(values, num_layers),
        num_target_layers=_optional_int(values, "num_target_layers"),
        reader=_reader(values, raw.get("ready_reader")),
    )
    return build(values, DrafterConfig, **config)


def _reader(values: Fields, raw: dict[str, Any] | None) -> ReaderConfig | None:
    """The state reader under ``ready_reader``: every field of ReaderConfig and no other."""
    if raw is None:
        return None
    known = {field.name for field in fields(ReaderConfig)}
    hints = typing.get_type_hints(ReaderConfig)
    values.missing += [f"ready_reader.{name}" for name in sorted(known - set(raw))]
    values.wrong += [f"ready_reader.{name} is not known" for name in sorted(set(raw) - known)]
    for name in known & set(raw):
        if not _has_type(raw[name], hints[name]):
            values.wrong.append(f"ready_reader.{name}={raw[name]!r}: needed {_describe(hints[name])}")
    if values.missing or values.wrong:
        return None
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()}
    try:
        return ReaderConfig(**settings)
    except ValueError as error:
        values.wrong.append(f"ready_reader: {error}")
        return None


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value fits a field of a config class; lists stand for tuples."""
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return value in choices
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list) and all(_has_type(item, choices[0]) for item in value)
    if choices:
        return any(_has_type(value, choice) for choice in choices)
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _describe(hint: Any) -> str:
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {list(choices)}"
    return str(hint) if choices else hint.__name__


def drafter_to_raw(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Flat keys, and for the layout that borrows the target's embedding the nested ones too.

    ``num_anchors`` is a training setting that DeepSpec's class insists on. A static window on the context is written
    as ``sliding_window``; other engines let it slide with each row of the block.
    """
    windowed = config.sliding_window is not None
    heads = {
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "enable_confidence_head": config.confidence_head,
        "markov_head_type": config.markov_head_type,
        "markov_rank": config.markov_rank,
    }
    taps = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.taps)}
    raw: dict[str, Any] = {
        "architectures": [OWN_EMBEDDINGS if config.own_embeddings else "DSparkDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["sliding_attention" if windowed else "full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "qwen3",
        "num_anchors": 512,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope_to_raw(config.rope, config.head_dim),
        "sample_from_anchor": True,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": windowed,
        "vocab_size": config.vocab_size,
        **heads,
        **taps,
    }
    if not config.own_embeddings:
        raw |= {"dflash_config": {"projector_type": "dspark", **taps}, "dspark_config": heads}
    if config.reader is not None:
        raw["ready_reader"] = {field.name: _plain(getattr(config.reader, field.name)) for field in fields(ReaderConfig)}
    return raw


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
