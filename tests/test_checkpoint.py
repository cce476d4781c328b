"""Checkpoints in and out: every layout gives the same bits, and what is saved opens again."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from ready_jax import checkpoint, names, schema
from ready_jax.checkpoint import CheckpointError, load_drafter, load_target, save_pretrained
from ready_jax.config import ReaderConfig
from ready_jax.drafter import Drafter
from ready_jax.target import Target

DRAFTERS = ["D1_vanilla", "D2_gated", "D3_rnn", "D4_vanilla_yarn"]
TARGETS = ["T1_tiny", "T2_tied_gva"]
NESTED, MLX, PLAIN = "model.language_model.", "language_model.model.", "model."


def bits(model):
    """Every parameter as bytes, by path."""
    return {path: np.asarray(leaf.get_value()).tobytes() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def copy(source, folder, edit=lambda tensors: tensors):
    """A one-file checkpoint again, with edited tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        shutil.copy(path, folder / path.name)
    save_file(edit(load_file(source / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_drafter(config):
    """Without the initialisers, which take seconds to compile."""
    rng = np.random.default_rng(0)
    abstract = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0), dtype="float32"))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32)), abstract)


def prefixed(prefix):
    def edit(tensors):
        tensors = {key if key == "lm_head.weight" else prefix + key[len(PLAIN) :]: x for key, x in tensors.items()}
        return tensors | {"model.visual.x": np.ones(3, np.float32), "mtp.layers.0.input_layernorm.weight": np.ones(64)}

    return edit


@pytest.fixture
def tiny(golden):
    return golden / "T1_tiny" / "checkpoint"


@pytest.mark.parametrize("folder", ["checkpoint_vl", "checkpoint_sharded"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_layout_gives_the_same_bits(golden, folder, dtype):
    expected = bits(load_target(golden / "T1_tiny" / "checkpoint", dtype=dtype))
    assert bits(load_target(golden / "T1_tiny" / folder, dtype=dtype)) == expected


def test_decay_parameters_stay_fp32(tiny):
    target = load_target(tiny)
    kinds = {path[-1]: leaf.get_value().dtype.name for path, leaf in nnx.to_flat_state(nnx.state(target))}
    assert {name for name, kind in kinds.items() if kind == "float32"} == {"a_log_M", "dt_bias_M"}
    assert target.dtype == jnp.bfloat16


@pytest.mark.parametrize("prefix", [NESTED, MLX, PLAIN])
def test_text_weights_under_any_prefix(tiny, tmp_path, prefix):
    """Field case D01."""
    folder = copy(tiny, tmp_path, prefixed(prefix))
    target, report = checkpoint.load_target_with_report(folder)
    assert bits(target) == bits(load_target(tiny))
    assert "56 loaded, 2 skipped (mtp 1, visual 1)" in str(report)


def test_a_key_outside_the_lists_is_an_error(tiny, tmp_path):
    folder = copy(tiny, tmp_path, lambda t: t | {"model.extra.weight": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"model\.extra\.weight: found F32 \[2\], needed no such tensor"):
        load_target(folder)


def test_nemo_names(tiny, tmp_path):
    def edit(tensors):
        return {
            key.replace(".A_log", "._fp32_params.A_log").replace(".dt_bias", "._fp32_params.dt_bias"): x
            for key, x in tensors.items()
        }

    assert bits(load_target(copy(tiny, tmp_path, edit))) == bits(load_target(tiny))


def test_logit_head_prefix(golden, tmp_path):
    source = golden / "D2_gated" / "checkpoint"

    def edit(tensors):
        heads = ("markov_head.", "confidence_head.")
        return {("logit_head." if key.startswith(heads) else "") + key: x for key, x in tensors.items()}

    assert bits(load_drafter(copy(source, tmp_path, edit))) == bits(load_drafter(source))


def test_a_renamed_tensor_names_the_closest(tiny, tmp_path):
    """Field case D07."""
    old, new = "model.layers.1.linear_attn.in_proj_z.weight", "model.layers.1.linear_attn.in_proj_zz.weight"
    folder = copy(tiny, tmp_path, lambda t: {new if key == old else key: x for key, x in t.items()})
    with pytest.raises(CheckpointError) as error:
        load_target(folder)
    message = str(error.value)
    assert "missing (1)" in message
    assert "unknown (1)" in message
    assert "the closest missing name is layers.1.linear_attn.in_proj_z.weight" in message
    target, report = checkpoint.load_target_with_report(folder, strict=False)
    assert report.initialised == ("layers.1.mixer.w_in_DI (no layers.1.linear_attn.in_proj_z.weight)",)
    assert "layers.1.mixer.w_in_DI" in str(report)
    whole = load_target(tiny)
    different = {path for path, value in bits(whole).items() if bits(target)[path] != value}
    assert different == {("layers", 1, "mixer", "w_in_DI")}
    z = slice(whole.config.conv_channels, whole.config.conv_channels + whole.config.value_width)
    same = np.asarray(target.layers[1].mixer.w_in_DI[...] == whole.layers[1].mixer.w_in_DI[...]).all(axis=0)
    assert same[: z.start].all()
    assert same[z.stop :].all()
    assert not same[z].any()


def test_bfloat16_bits_survive_every_path(golden, tmp_path):
    """Field case D05: NaN payloads, infinities and signed zeros included, plain, transposed and convolved."""
    source = golden / "T1_tiny" / "checkpoint_sharded"
    target = load_target(source)
    special = np.array([0x3F80, 0x3F81, 0xC060, 0x7F80, 0xFF80, 0x7FC1, 0xFFA5, 0x7F81, 0x8000, 0x0001], np.uint16)

    def stamped(x):
        raw = np.array(x).view(np.uint16)
        raw[...] = np.resize(special, raw.shape)
        return raw.view(ml_dtypes.bfloat16)

    tensors = {key: x for path in source.glob("*.safetensors") for key, x in load_file(path).items()}
    tensors = {key: x if key.endswith(("A_log", "dt_bias")) else stamped(x) for key, x in tensors.items()}
    tensors["model.norm.weight"] = np.zeros(64, ml_dtypes.bfloat16)
    shutil.copy(source / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_target(tmp_path)
    assert loaded.embed_VD[...].dtype == target.embed_VD[...].dtype == jnp.bfloat16
    save_pretrained(loaded, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(tensors)
    for key, x in tensors.items():
        if not key.endswith(("A_log", "dt_bias")):
            assert again[key].dtype == x.dtype
            np.testing.assert_array_equal(again[key].view(np.uint16), x.view(np.uint16), err_msg=key)


def test_loading_holds_one_tensor_at_a_time(tmp_path):
    """Field case D05: the largest tensor, in its final type, is all that is taken beside the parameter itself."""
    import tracemalloc

    leaf = names.Leaf(("w",), "transposed", (names.Piece("w", (1024, 2048)),))
    save_file({"w": np.ones((1024, 2048), ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    from ready_jax.tensor_files import scan

    tensors = {tensor.key: tensor for tensor in scan(tmp_path).tensors}
    like = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)
    tracemalloc.start()
    value = checkpoint.assemble(leaf, like, tensors, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2 * value.nbytes


@pytest.mark.parametrize("threaded_from", [0, 1 << 30])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_transposing_in_tiles(monkeypatch, threaded_from, stored):
    monkeypatch.setattr(checkpoint, "_THREADED_FROM", threaded_from)
    matrix = np.random.default_rng(0).standard_normal((300, 517), np.float32).astype(stored)
    fused = np.zeros((517, 700), ml_dtypes.bfloat16)
    checkpoint._paste_transposed(fused[:, 100:400], matrix)
    np.testing.assert_array_equal(fused[:, 100:400], matrix.T.astype(ml_dtypes.bfloat16))
    assert not fused[:, :100].any()
    assert not fused[:, 400:].any()


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 60_000])
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_survives_saving(golden, tmp_path, name, shard_bytes):
    """Field case D13."""
    target = load_target(golden / name / "checkpoint", dtype="float32")
    save_pretrained(target, tmp_path / "a", max_shard_bytes=shard_bytes)
    again = load_target(tmp_path / "a", dtype="float32")
    assert bits(again) == bits(target)
    assert again.config == target.config
    save_pretrained(again, tmp_path / "b", max_shard_bytes=shard_bytes)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert ("model.safetensors.index.json" in files(tmp_path / "a")) == (shard_bytes < 100_000)
    stored = {key: x for path in (tmp_path / "a").glob("*.safetensors") for key, x in load_file(path).items()}
    original = load_file(golden / name / "checkpoint" / "model.safetensors")
    assert set(stored) == set(original)
    for key, x in original.items():
        np.testing.assert_array_equal(stored[key], x, err_msg=key)


def test_saving_over_other_shards_leaves_one_checkpoint(tiny, tmp_path):
    target = load_target(tiny)
    save_pretrained(target, tmp_path, max_shard_bytes=30_000)
    save_pretrained(target, tmp_path)
    assert sorted(files(tmp_path)) == ["config.json", "model.safetensors"]
    assert bits(load_target(tmp_path)) == bits(target)


def test_end_of_sequence_ids_and_tokenizer_are_saved(tiny, tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            Path(folder, "tokenizer.json").write_text("{}")

    target = load_target(tiny)
    target.config = replace(target.config, eos_token_ids=(46, 44))
    save_pretrained(target, tmp_path, tokenizer=Tokenizer())
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [46, 44]
    assert (tmp_path / "tokenizer.json").exists()
    assert load_target(tmp_path).config.eos_token_ids == (46, 44)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_survives_saving(golden, tmp_path, name):
    source = golden / name / "checkpoint"
    drafter = load_drafter(source, dtype="float32")
    save_pretrained(drafter, tmp_path / "a")
    again = load_drafter(tmp_path / "a", dtype="float32")
    assert again.config == drafter.config
    assert bits(again) == bits(drafter)
    save_pretrained(again, tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    stored, original = load_file(tmp_path / "a" / "model.safetensors"), load_file(source / "model.safetensors")
    assert set(stored) == set(original)
    for key, x in original.items():
        np.testing.assert_array_equal(stored[key], x, err_msg=key)


def test_a_drafter_that_borrows_embedding_and_head(golden, tmp_path):
    source = golden / "E2E_hybrid" / "drafter"
    own = ("embed_tokens.weight", "lm_head.weight")
    folder = copy(source, tmp_path / "a", lambda t: {key: x for key, x in t.items() if key not in own})
    drafter, report = checkpoint.load_drafter_with_report(folder)
    assert not drafter.config.own_embeddings
    assert drafter.embed_VD is None
    assert "embedding and head: the target's" in str(report)
    save_pretrained(drafter, tmp_path / "b")
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["architectures"] == ["DSparkDraftModel"]
    assert raw["dflash_config"]["target_layer_ids"] == [0, 2]
    again = load_drafter(tmp_path / "b")
    assert again.config == drafter.config
    assert bits(again) == bits(drafter)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"inject_layers": (0, 1), "f_norm": True, "scale_feature": "layer", "state_rms_axes": "layer"},
        {"projection_sharing": "layer", "query_latent": "shared", "scale_feature": "none", "state_heads": (3,)},
        {"projection_sharing": "all", "query_latent": "layer", "scale_feature": "raw", "state_rms_axes": "head"},
    ],
)
def test_a_reader_travels_with_its_drafter_and_can_be_left_out(golden, tmp_path, changes):
    """Field cases D13 and B16: the reader under one prefix, the same ids again, and plain DSpark without it."""
    plain = load_drafter(golden / "E2E_hybrid" / "drafter", dtype="float32")
    reader = ReaderConfig(rank=4, state_layers=(0, 2), memory_heads=4, key_dim=16, value_dim=16, **changes)
    drafter = random_drafter(replace(plain.config, reader=reader))
    nnx.update(drafter, nnx.state(plain))
    save_pretrained(drafter, tmp_path / "a")
    stored = load_file(tmp_path / "a" / "model.safetensors")
    original = load_file(golden / "E2E_hybrid" / "drafter" / "model.safetensors")
    assert {key for key in stored if not key.startswith("ready_reader.")} == set(original)
    again = load_drafter(tmp_path / "a", dtype="float32")
    assert again.config.reader == reader
    assert bits(again) == bits(drafter)
    save_pretrained(again, tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    without, report = checkpoint.load_drafter_with_report(tmp_path / "a", dtype="float32", reader=False)
    assert without.reader is None
    assert bits(without) == bits(plain)
    assert "reader=False" in str(report)
    assert report.skipped == {"reader": len(stored) - len(original)}


@pytest.mark.parametrize("name", TARGETS)
def test_the_name_table_fits_the_modules(golden, name):
    config = load_target(golden / name / "checkpoint").config
    module = nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0)))
    shapes = {path: leaf.get_value().shape for path, leaf in nnx.to_flat_state(nnx.state(module))}
    leaves = names.target_leaves(config)
    assert {leaf.path for leaf in leaves} == set(shapes)
    for leaf in leaves:
        if leaf.form == "transposed":
            used = sum(piece.shape[0] for piece in leaf.pieces)
            assert shapes[leaf.path][0] == leaf.pieces[0].shape[1]
            assert used <= shapes[leaf.path][1] < used + 128
        else:
            assert np.prod(shapes[leaf.path]) == np.prod(leaf.pieces[0].shape)


def test_q_proj_rows_land_in_their_columns(tiny, tmp_path):
    """Per head [query | gate]: the second head's gate is rows 3h..4h, and nothing else moves."""

    def edit(tensors):
        tensors["model.layers.3.self_attn.q_proj.weight"][96:128] += 1
        return tensors

    changed = load_target(copy(tiny, tmp_path, edit), dtype="float32").layers[3].mixer.w_in_DI[...]
    moved = np.asarray(changed - load_target(tiny, dtype="float32").layers[3].mixer.w_in_DI[...])
    assert (np.flatnonzero(moved.any(axis=0)) == np.arange(96, 128)).all()


def test_a_mesh_places_the_same_numbers(tiny):
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    placed = load_target(tiny, mesh=mesh)
    assert bits(placed) == bits(load_target(tiny))
    assert len(placed.layers[0].mlp.w_in_DI[...].sharding.device_set) == 4


def test_a_tied_copy_of_the_head_is_checked(golden, tmp_path):
    source = golden / "T2_tied_gva" / "checkpoint"

    def tied(change):
        def edit(tensors):
            return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + np.float32(change)}

        return edit

    _, report = checkpoint.load_target_with_report(copy(source, tmp_path / "same", tied(0)))
    assert report.skipped == {"tied head": 1}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: found a head that differs .*tie_word_embeddings"):
        load_target(copy(source, tmp_path / "other", tied(1)))


def test_inspect_reads_headers_only(golden, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", lambda *args, **kwargs: pytest.fail("inspect must not touch a device"))
        report = checkpoint.inspect(golden / "T1_tiny" / "checkpoint_vl")
    assert (report.kind, report.loaded, report.skipped) == ("target", 56, {"mtp": 8, "visual": 21})
    assert checkpoint.inspect(golden / "D1_vanilla" / "checkpoint").kind == "drafter"
    broken = copy(
        golden / "T1_tiny" / "checkpoint", tmp_path, lambda t: {k: x for k, x in t.items() if "A_log" not in k}
    )
    assert len(checkpoint.inspect(broken).missing) == 3
    parameters = sum(leaf.size for leaf in jax.tree.leaves(load_target(golden / "T1_tiny" / "checkpoint")))
    padding = 3 * 64 * (256 - 128 - 64 - 4 - 4)  # zero columns of the fused projections
    assert checkpoint.parameter_bytes(golden / "T1_tiny" / "checkpoint_sharded") == 2 * (parameters - padding)


def test_a_folder_wins_over_a_hub_name(tiny, tmp_path, monkeypatch):
    copy(tiny, tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("no download is needed"))
    assert bits(load_target("owner/name")) == bits(load_target(tiny))


def test_a_hub_download_is_pinned_and_its_commit_recorded(tiny, tmp_path, monkeypatch):
    commit = "1d4bf0f2ff6012fd82039f2fa52739d0dd7c60c0"
    folder = copy(tiny, tmp_path / "snapshots" / commit)
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    _, report = checkpoint.load_target_with_report("Qwen/Tiny", revision="main")
    assert report.revision == commit
    assert commit in str(report)
    assert (asked["name"], asked["revision"]) == ("Qwen/Tiny", "main")
    assert set(asked["allow_patterns"]) == {"*.json", "*.safetensors", "*.jinja", "*.txt"}


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("/nowhere/at/all", ["/nowhere/at/all", "no such folder", "owner/name"]),
        ("owner/never-downloaded", ["owner/never-downloaded", "no such folder", "the hub could not deliver"]),
        (os.devnull, ["found a file, needed a folder"]),
    ],
)
def test_a_source_that_is_nothing(source, parts):
    with pytest.raises(CheckpointError) as error:
        load_target(source)
    for part in parts:
        assert part in str(error.value)


def test_only_two_types(tiny):
    with pytest.raises(ValueError, match="dtype=int8: needed bfloat16 or float32"):
        load_target(tiny, dtype="int8")


def test_the_saved_config_is_the_reference_librarys(tiny, tmp_path):
    """``transformers``' own config class reads it and means the same (no torch is needed for that)."""
    from transformers import AutoConfig

    target = load_target(tiny)
    save_pretrained(target, tmp_path)
    config = AutoConfig.from_pretrained(str(tmp_path))
    assert type(config).__name__ == "Qwen3_5TextConfig"
    assert schema.target_config(config.to_dict(), "again") == target.config
