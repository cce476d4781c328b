"""config.json in and out: one description for every layout, and no silent default."""

import copy
import json
from dataclasses import replace

import pytest

from ready_jax import schema
from ready_jax.config import FULL, LINEAR, ReaderConfig


def read(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def flat(golden):
    return read(golden / "T1_tiny" / "checkpoint")


@pytest.fixture
def nested(golden):
    return read(golden / "T1_tiny" / "checkpoint_vl")


@pytest.fixture
def deepspec(golden):
    return read(golden / "D4_vanilla_yarn" / "checkpoint")


READER = ReaderConfig(rank=4, state_layers=(0, 2), memory_heads=4, key_dim=16, value_dim=16, state_heads=(1, 3))
TARGET_KEYS = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "rms_norm_eps", "max_position_embeddings",
    "tie_word_embeddings", "hidden_act", "model_type",
]  # fmt: skip
DRAFTER_KEYS = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act", "block_size",
    "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov",
]  # fmt: skip


def test_flat_and_nested_files_describe_the_same_target(flat, nested):
    assert schema.target_config(flat, "flat") == schema.target_config(nested, "nested")


def test_both_rope_schemas(flat):
    old = copy.deepcopy(flat)
    del old["rope_parameters"]
    old |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_scaling": None}
    assert schema.target_config(old, "old") == schema.target_config(flat, "new")


def test_the_million_token_variant(flat):
    flat["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
    yarn = schema.target_config(flat, "x").rope.yarn
    assert yarn is not None
    assert (yarn.factor, yarn.beta_fast, yarn.beta_slow) == (4.0, 32.0, 1.0)
    assert yarn.attention_factor == pytest.approx(1.1386294361)
    flat["rope_parameters"]["attention_factor"] = 1.5
    assert schema.target_config(flat, "x").rope.yarn == replace(yarn, attention_factor=1.5)


def test_public_drafter_attention_factor(deepspec):
    deepspec["rope_parameters"] |= {"factor": 32.0, "original_max_position_embeddings": 8192}
    yarn = schema.drafter_config(deepspec, "x").rope.yarn
    assert yarn is not None
    assert yarn.attention_factor == pytest.approx(1.34657359)


def test_layers_from_the_interval(flat):
    del flat["layer_types"]
    flat |= {"full_attention_interval": 2, "num_hidden_layers": 5}
    assert schema.target_config(flat, "x").layer_types == (LINEAR, FULL, LINEAR, FULL, LINEAR)


@pytest.mark.parametrize("name", TARGET_KEYS)
def test_a_missing_target_key_is_named(flat, name):
    del flat[name]
    with pytest.raises(schema.ConfigError, match=rf"folder/config\.json.*{name}"):
        schema.target_config(flat, "folder/config.json")


def test_all_missing_keys_are_named_at_once(flat):
    for name in ("head_dim", "rms_norm_eps", "rope_parameters", "layer_types"):
        del flat[name]
    with pytest.raises(schema.ConfigError) as error:
        schema.target_config(flat, "c.json")
    for name in ("c.json", "head_dim", "rms_norm_eps", "rope_theta", "partial_rotary_factor", "layer_types"):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        ({"output_gate_type": "sigmoid"}, ["output_gate_type='sigmoid'", "'silu' or 'swish'"]),
        ({"attention_bias": True}, ["attention_bias=True", "False"]),
        ({"attn_output_gate": False}, ["attn_output_gate=False", "True"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"layer_types": [LINEAR] * 3}, ["layer_types has 3", "num_hidden_layers=4"]),
        ({"layer_types": [LINEAR] * 3 + ["mamba"]}, ["['mamba']", FULL, LINEAR]),
        ({"linear_num_value_heads": 3}, ["linear_num_value_heads=3", "linear_num_key_heads=2"]),
        ({"rope_theta": 5.0}, ["rope_theta=10000.0", "rope_theta=5.0"]),
        ({"hidden_size": "64"}, ["hidden_size='64'", "int"]),
        ({"num_attention_heads": 0}, ["num_attention_heads=0", "at least 1"]),
        ({"eos_token_id": "end"}, ["eos_token_id", "'end'", "whole numbers"]),
    ],
)
def test_a_wrong_setting_is_refused_with_found_and_needed(flat, edit, parts):
    with pytest.raises(schema.ConfigError) as error:
        schema.target_config(flat | edit, "c.json")
    for part in ["c.json", *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize("gate", ["silu", "swish"])
def test_the_gate_of_3_8_is_silu_by_another_name(flat, gate):
    assert schema.target_config(flat | {"output_gate_type": gate}, "x") == schema.target_config(flat, "x")


def test_mrope_sections_must_add_up(nested):
    nested["text_config"]["rope_parameters"]["mrope_section"] = [2, 2, 1]
    with pytest.raises(schema.ConfigError, match=r"mrope_section=\[2, 2, 1\] sums to 5, needed 4"):
        schema.target_config(nested, "x")


@pytest.mark.parametrize(
    ("name", "outer", "inner"),
    [("tie_word_embeddings", True, False), ("vocab_size", 200, 199), ("hidden_size", 32, 64)],
)
def test_levels_that_contradict_each_other(nested, name, outer, inner):
    nested[name] = outer
    with pytest.raises(schema.ConfigError) as error:
        schema.target_config(nested, "c.json")
    assert f"text_config.{name}={inner!r} contradicts {name}={outer!r}" in str(error.value)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"model_type": "qwen3_5_moe_text", "num_experts": 256}, "mixture of experts"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, "Qwen3-Next packs"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "without Gated DeltaNet"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "Qwen3_5ForCausalLM"),
        ({"architectures": ["Qwen3_5ForSequenceClassification"]}, "Qwen3_5ForSequenceClassification"),
    ],
)
def test_other_families_are_refused_by_name(flat, edit, reason):
    with pytest.raises(schema.UnsupportedError, match=reason):
        schema.target_config(flat | edit, "x")


def test_a_drafter_is_no_target(deepspec):
    with pytest.raises(schema.ConfigError, match="this is a drafter"):
        schema.target_config(deepspec, "x")


def test_end_of_sequence_ids_are_the_union_generation_first(flat):
    config = schema.target_config(flat | {"eos_token_id": 44}, "x", {"eos_token_id": [46, 44]})
    assert config.eos_token_ids == (46, 44)
    assert schema.target_config(flat | {"eos_token_id": 44}, "x", {}).eos_token_ids == (44,)


@pytest.mark.parametrize("ids", [(), (7,), (46, 44)])
def test_a_target_reads_back(flat, ids):
    config = replace(schema.target_config(flat, "x"), eos_token_ids=ids)
    assert schema.target_config(json.loads(json.dumps(schema.to_raw(config))), "y") == config


# Drafters (field case D11)


def specforge(raw):
    """As SpecForge and the public Qwen3.8-27B drafters write it."""
    raw = copy.deepcopy(raw) | {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.X"}}
    taps = {name: raw.pop(name) for name in ("target_layer_ids", "mask_token_id")}
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    raw["dflash_config"] = {"attention_mode": "gqa", "projector_type": "dspark", **taps}
    raw["dspark_config"] = {name: raw.pop(name) for name in names}
    return raw


def speculators(raw):
    """As speculators writes it: hidden states counted with the embedding, defaults of Qwen3Config left out."""
    raw = copy.deepcopy(raw)
    own = {name: raw.pop(name) for name in ("block_size", "mask_token_id", "markov_rank", "markov_head_type")}
    own |= {name: raw.pop(name) for name in ("enable_confidence_head", "confidence_head_with_markov")}
    taps = raw.pop("target_layer_ids")
    del raw["architectures"], raw["num_target_layers"], raw["hidden_act"], raw["rms_norm_eps"]
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "draft_vocab_size": raw["vocab_size"],
        "sample_from_anchor": True,
        "speculators_config": {"algorithm": "dspark", "proposal_methods": [{"speculative_tokens": 7}]},
        "transformer_layer_config": raw,
        **own,
    }


def test_three_layouts_are_one_drafter(deepspec):
    expected = schema.drafter_config(deepspec, "deepspec")
    assert (expected.block_size, expected.taps, expected.mask_token_id) == (7, (0, 2), 100)
    assert (expected.markov_rank, expected.markov_head_type, expected.own_embeddings) == (8, "vanilla", True)
    assert expected.confidence_head
    assert expected.confidence_head_with_markov
    borrowed = replace(expected, own_embeddings=False)
    assert schema.drafter_config(specforge(deepspec), "specforge") == borrowed
    assert schema.drafter_config(speculators(deepspec), "x") == replace(borrowed, num_target_layers=None)


@pytest.mark.parametrize("name", DRAFTER_KEYS)
def test_a_missing_drafter_key_is_named(deepspec, name):
    del deepspec[name]
    with pytest.raises(schema.ConfigError, match=rf"folder/config\.json.*{name}"):
        schema.drafter_config(deepspec, "folder/config.json")


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [("dflash_config", "mask_token_id", 99), ("dspark_config", "markov_rank", 4), ("dflash_config", "block_size", 8)],
)
def test_places_that_contradict_each_other(deepspec, place, name, value):
    with pytest.raises(schema.ConfigError, match=f"{name}={deepspec[name]} contradicts {place}.{name}={value}"):
        schema.drafter_config(deepspec | {place: {name: value}}, "x")


def test_taps_that_contradict_each_other(deepspec):
    with pytest.raises(schema.ConfigError, match=r"\[0, 2\] contradicts .*\[0, 2\], which means \[-1, 1\]"):
        schema.drafter_config(deepspec | {"aux_hidden_state_layer_ids": [0, 2]}, "x")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "slot-shifted"),
        ({"architectures": ["DFlash2DraftModel"]}, "slot-shifted"),
        ({"dflash_config": {"projector_type": "dflash"}}, "slot-shifted"),
        ({"sample_from_anchor": False}, "slot-shifted.*makes 6 proposals"),
        ({"speculators_model_type": "dflash"}, "slot-shifted"),
        ({"architectures": ["EagleModel"]}, "Qwen3DSparkModel.*DSparkDraftModel.*DSparkSpeculator"),
        ({"model_type": "deepseek_v4"}, "model_type='deepseek_v4'"),
    ],
)
def test_other_drafters_are_refused_with_the_reason(deepspec, edit, reason):
    with pytest.raises(schema.UnsupportedError, match=reason):
        schema.drafter_config(deepspec | edit, "x")


def test_speculators_block_counting(deepspec):
    raw = speculators(deepspec)
    raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 6
    with pytest.raises(schema.ConfigError, match="speculative_tokens=6 contradicts block_size=7"):
        schema.drafter_config(raw, "x")
    raw = speculators(deepspec)
    del raw["sample_from_anchor"]
    assert schema.drafter_config(raw, "x").block_size == 7  # 7 proposals from a block of 7 say the same
    del raw["speculators_config"]
    with pytest.raises(schema.ConfigError, match="sample_from_anchor is missing: older"):
        schema.drafter_config(raw, "x")


def test_markov_confidence_needs_a_markov_head(deepspec):
    with pytest.raises(schema.ConfigError, match="markov_rank=0 with confidence_head_with_markov"):
        schema.drafter_config(deepspec | {"markov_rank": 0}, "x")
    plain = schema.drafter_config(deepspec | {"markov_rank": 0, "confidence_head_with_markov": False}, "x")
    assert plain.markov_rank == 0


def test_mask_token_is_never_guessed(deepspec):
    """Field case B14: argument, else checkpoint, else an error; an embedding row; a warning where it is PAD or EOS."""
    assert schema.drafter_config(deepspec, "x").mask_token_id == 100
    assert schema.drafter_config(deepspec, "x", mask_token_id=96).mask_token_id == 96
    with pytest.raises(schema.ConfigError, match=r"mask_token_id=101.*vocab_size - 1 = 100"):
        schema.drafter_config(deepspec, "x", mask_token_id=101)
    with pytest.warns(UserWarning, match="mask_token_id=100 is also eos_token_id"):
        schema.drafter_config(deepspec | {"eos_token_id": [100, 3]}, "x")
    with pytest.warns(UserWarning, match="mask_token_id=100 is also pad_token_id"):
        schema.drafter_config(deepspec | {"pad_token_id": 100}, "x")
    del deepspec["mask_token_id"]
    with pytest.raises(schema.ConfigError, match="mask_token_id"):
        schema.drafter_config(deepspec, "x")
    assert schema.drafter_config(deepspec, "x", mask_token_id=5).mask_token_id == 5


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("reader", [None, READER, replace(READER, inject_layers=(0, 1), f_norm=True, state_heads=None)])
def test_a_drafter_reads_back(deepspec, own, window, reader):
    config = schema.drafter_config(deepspec, "x")
    config = replace(config, own_embeddings=own, sliding_window=window, reader=reader)
    assert schema.drafter_config(json.loads(json.dumps(schema.to_raw(config))), "y") == config


def test_a_partly_rotated_drafter_reads_back(deepspec):
    deepspec["rope_parameters"]["partial_rotary_factor"] = 0.5
    config = schema.drafter_config(deepspec, "x")
    assert config.rope.rotary_dim == 8
    assert schema.drafter_config(schema.to_raw(config), "y") == config


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        ({"rank": None}, ["ready_reader.rank", "None"]),
        ({"inject_side": "behind"}, ["ready_reader.inject_side='behind'", "before_attention"]),
        ({"rank": 17}, ["rank=17", "1..min(key_dim, value_dim)=16"]),
        ({"state_heads": [4]}, ["state_heads", "[4]"]),
        ({"colour": "red"}, ["ready_reader.colour is not known"]),
        ({"inject_layers": [2]}, ["inject_layers names [2]", "0..1"]),
    ],
)
def test_a_wrong_reader_is_refused(deepspec, edit, parts):
    raw = schema.to_raw(replace(schema.drafter_config(deepspec, "x"), reader=READER))
    raw["ready_reader"] |= edit
    with pytest.raises(schema.ConfigError) as error:
        schema.drafter_config(raw, "c.json")
    for part in ["c.json", *parts]:
        assert part in str(error.value)


def test_a_reader_setting_that_is_missing(deepspec):
    raw = schema.to_raw(replace(schema.drafter_config(deepspec, "x"), reader=READER))
    del raw["ready_reader"]["scale_feature"]
    with pytest.raises(schema.ConfigError, match=r"missing keys \['ready_reader.scale_feature'\]"):
        schema.drafter_config(raw, "x")


# Pairs


@pytest.fixture
def pair(golden, flat):
    return schema.target_config(flat, "x"), schema.drafter_config(read(golden / "E2E_hybrid" / "drafter"), "y")


def test_a_fitting_pair_passes_whatever_the_position_limits(pair):
    target, drafter = pair
    schema.check_pair(target, drafter)
    schema.check_pair(target, replace(drafter, max_position_embeddings=8, reader=READER))


def test_everything_that_does_not_fit_is_named(pair):
    target, drafter = pair
    reader = replace(READER, memory_heads=6, key_dim=32, value_dim=48)
    drafter = replace(drafter, hidden_size=32, vocab_size=300, num_target_layers=None, taps=(0, 3), reader=reader)
    with pytest.raises(schema.ConfigError) as error:
        schema.check_pair(target, drafter)
    for part in (
        "hidden_size: the drafter has 32, needed 64",
        "vocab_size: the drafter has 300, needed 199",
        "target_layer_ids names [3]",
        "memory_heads: found 6, needed 4",
        "key_dim: found 32, needed 16",
        "value_dim: found 48, needed 16",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(("layers", "named"), [((3,), "[3]"), ((2, 3), "[3]"), ((0, 9), "[9]")])
def test_state_layers_are_absolute_and_must_hold_a_state(pair, layers, named):
    """Field case B16."""
    target, drafter = pair
    with pytest.raises(schema.ConfigError) as error:
        schema.check_pair(target, replace(drafter, reader=replace(READER, state_layers=layers)))
    assert f"state_layers names {named}" in str(error.value)
    assert "[0, 1, 2]" in str(error.value)
