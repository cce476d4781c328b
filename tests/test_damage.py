"""Damaged checkpoints: each is refused before any device memory is taken, by file, key, what was found and needed."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ready_jax import checkpoint
from ready_jax.checkpoint import CheckpointError, load_drafter, load_target

SHARD_2 = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
Z = "model.layers.0.linear_attn.in_proj_z.weight"
CONV = "model.layers.0.linear_attn.conv1d.weight"


def rewrite(path: Path, **changes):
    """A JSON file with keys changed, or removed where the value is ``...``."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def edit(path: Path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def shard_of(folder: Path, key: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][key]


def swap(key, make):
    """Replace one tensor of a sharded folder, in its own file."""

    def damage(folder):
        edit(shard_of(folder, key), lambda tensors: tensors.update({key: make(tensors[key])}))

    return damage


def missing_shard(folder):
    (folder / SHARD_2).unlink()


def short_shard(folder):
    data = (folder / SHARD_2).read_bytes()
    (folder / SHARD_2).write_bytes(data[:-100])


def long_shard(folder):
    with (folder / SHARD_2).open("ab") as file:
        file.write(b"12345")


def empty_shard(folder):
    (folder / SHARD_2).write_bytes(b"")


def lfs_pointer(folder):
    (folder / SHARD_2).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 99\n")


def html_instead(folder):
    (folder / SHARD_2).write_text("<html>404 Not Found</html>" * 20)


def header_of(change):
    """Rewrite the header of shard 2 without moving the data."""

    def damage(folder):
        data = (folder / SHARD_2).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        raw = json.dumps(header).encode()
        (folder / SHARD_2).write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])

    return damage


def first(header):
    return next(entry for key, entry in header.items() if key != "__metadata__")


def overlapping(header):
    entries = [entry for key, entry in header.items() if key != "__metadata__"]
    entries[1]["data_offsets"] = list(entries[0]["data_offsets"])
    entries[1]["shape"] = list(entries[0]["shape"])


def malformed(header):
    del first(header)["data_offsets"]


def larger_shape(header):
    first(header)["shape"] = [7, *first(header)["shape"]]


def broken_index(folder):
    (folder / INDEX).write_text('{"weight_map": {')


def empty_index(folder):
    (folder / INDEX).write_text("{}")


def index_leaves_the_folder(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../../etc/passwd"
    (folder / INDEX).write_text(json.dumps(index))


def index_wrong_about_a_file(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][Z] = next(name for name in index["weight_map"].values() if name != index["weight_map"][Z])
    (folder / INDEX).write_text(json.dumps(index))


def twice(folder):
    other = next(path for path in sorted(folder.glob("*.safetensors")) if path != shard_of(folder, Z))
    tensor = load_file(shard_of(folder, Z))[Z]
    edit(other, lambda tensors: tensors.update({Z: tensor}))


def twice_by_prefix(folder):
    edit(folder / SHARD_2, lambda t: t.update({"model.language_model.norm.weight": np.zeros(64, np.float32)}))


def two_sets(folder):
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, folder / "model.safetensors")


def no_weights(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def renamed(folder):
    path = shard_of(folder, Z)
    edit(path, lambda tensors: tensors.update({Z.replace("in_proj_z", "in_proj_zed"): tensors.pop(Z)}))


def removed(folder):
    edit(shard_of(folder, Z), lambda tensors: tensors.pop(Z))


def scale_beside(folder):
    edit(folder / SHARD_2, lambda t: t.update({Z + "_scale_inv": np.ones(1, np.float32)}))


def qwen3_next_names(folder):
    edit(folder / SHARD_2, lambda t: t.update({"model.layers.0.linear_attn.in_proj_qkvz.weight": np.ones((1, 64))}))


def experts(folder):
    edit(folder / SHARD_2, lambda t: t.update({"model.layers.0.mlp.experts.0.up_proj.weight": np.ones((1, 64))}))


def adapter(folder):
    edit(folder / SHARD_2, lambda t: t.update({"model.layers.0.mlp.up_proj.lora_A.weight": np.ones((1, 64))}))


def norms_with_one_added(folder):
    for path in folder.glob("*.safetensors"):
        names = [
            key for key in load_file(path) if key.endswith(("layernorm.weight", "_norm.weight", "model.norm.weight"))
        ]
        edit(path, lambda t, names=names: t.update({key: np.ones_like(t[key]) for key in names}))


def no_config(folder):
    (folder / "config.json").unlink()


def config_cut_off(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])


def config_twice(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.rstrip().removesuffix("}") + ', "hidden_size": 128}')


def config_list(folder):
    (folder / "config.json").write_text("[]")


def config_with(**changes):
    return lambda folder: rewrite(folder / "config.json", **changes)


def bad_generation_config(folder):
    (folder / "generation_config.json").write_text("{eos}")


DAMAGE = {
    "missing shard": (missing_shard, [SHARD_2, "not there", "incomplete download"]),
    "short shard": (short_shard, [SHARD_2, "bytes, needed", "cut off", "download"]),
    "long shard": (long_shard, [SHARD_2, "5 bytes belong to no tensor"]),
    "empty shard": (empty_shard, [SHARD_2, "found 0 bytes, needed at least 8", "download"]),
    "git lfs pointer": (lfs_pointer, [SHARD_2, "Git LFS pointer", "needed the file"]),
    "html instead": (html_instead, [SHARD_2, "found 520 bytes, needed at least"]),
    "overlapping tensors": (header_of(overlapping), [SHARD_2, "overlap or hole", "needed"]),
    "malformed header": (header_of(malformed), [SHARD_2, "malformed", "data_offsets"]),
    "shape larger than data": (header_of(larger_shape), [SHARD_2, "bytes, needed", "[7, "]),
    "broken index": (broken_index, [INDEX, "not readable as JSON"]),
    "empty index": (empty_index, [INDEX, "no weight_map", "needed"]),
    "index leaves the folder": (index_leaves_the_folder, [INDEX, "../../etc/passwd", "plain file name"]),
    "index wrong about a file": (index_wrong_about_a_file, [INDEX, Z, "found it in"]),
    "tensor twice": (twice, [Z, "and again in", "needed once"]),
    "tensor twice by prefix": (
        twice_by_prefix,
        ["model.language_model.norm.weight", "model.norm.weight", "needed once"],
    ),
    "two sets of weights": (two_sets, ["model.safetensors", INDEX, "which is meant"]),
    "no weights": (no_weights, ["pytorch_model.bin", "needed model.safetensors"]),
    "renamed tensor": (
        renamed,
        ["in_proj_zed", "needed no such tensor", "closest missing name is layers.0", "[64, 64]"],
    ),
    "removed tensor": (removed, [Z.removeprefix("model."), "found in no file", "needed [64, 64]"]),
    "wrong shape": (
        swap(Z, lambda x: np.ascontiguousarray(x[:-1])),
        [Z, "found BF16 [63, 64]", "needed BF16 [64, 64]"],
    ),
    "transposed shape": (
        swap("lm_head.weight", lambda x: np.ascontiguousarray(x.T)),
        ["[64, 199]", "needed BF16 [199, 64]"],
    ),
    "one dimension more": (
        swap("model.norm.weight", lambda x: x[None]),
        ["model.norm.weight", "[1, 64]", "needed BF16 [64]"],
    ),
    "int8 tensor": (swap(Z, lambda x: x.astype(np.int8)), [Z, "found I8 [64, 64]", "needed F32 or BF16 or F16"]),
    "fp8 tensor": (
        swap(Z, lambda x: x.astype(ml_dtypes.float8_e4m3fn)),
        [Z, "found F8_E4M3", "needed F32 or BF16 or F16"],
    ),
    "quantised with scales": (scale_beside, [SHARD_2, Z + "_scale_inv", "quantised"]),
    "qwen3-next names": (qwen3_next_names, [SHARD_2, "in_proj_qkvz", "per key head"]),
    "mixture of experts": (experts, [SHARD_2, "experts.0.up_proj", "mixture-of-experts"]),
    "adapter": (adapter, [SHARD_2, "lora_A", "merge it"]),
    "mlx convolution": (
        swap(CONV, lambda x: np.ascontiguousarray(np.moveaxis(x, 1, 2))),
        [CONV, "[128, 4, 1]", "[128, 1, 4]", "MLX"],
    ),
    "mlx norms": (norms_with_one_added, ["norm weight is at least 1.00", "needed values around 0", "MLX"]),
    "no config": (no_config, ["config.json: not there", "the folder holds"]),
    "config cut off": (config_cut_off, ["config.json", "not readable as JSON"]),
    "config says two things": (config_twice, ["config.json", "'hidden_size' stands twice, as 64 and as 128"]),
    "config is a list": (config_list, ["config.json", "found a JSON list, needed an object"]),
    "absent config keys": (
        config_with(head_dim=..., rms_norm_eps=...),
        ["config.json", "['head_dim', 'rms_norm_eps']"],
    ),
    "unknown architecture": (
        config_with(architectures=["MambaForCausalLM"]),
        ["config.json", "MambaForCausalLM", "Qwen3_5ForCausalLM"],
    ),
    "moe config": (
        config_with(model_type="qwen3_5_moe_text", num_experts=64),
        ["config.json", "num_experts=64", "mixture"],
    ),
    "config for other shapes": (
        config_with(intermediate_size=128),
        ["mlp.down_proj.weight", "[64, 96]", "needed BF16 [64, 128]"],
    ),
    "config with one layer more": (
        config_with(num_hidden_layers=5, layer_types=["linear_attention"] * 3 + ["full_attention", "linear_attention"]),
        ["layers.4.linear_attn.A_log", "found in no file", "needed [4]"],
    ),
    "tied, but with a head": (config_with(tie_word_embeddings=True), ["lm_head.weight", "found a head that differs"]),
    "two ropes": (config_with(rope_theta=1e7), ["config.json", "rope_theta=10000.0 contradicts rope_theta=10000000.0"]),
    "bad generation config": (bad_generation_config, ["generation_config.json", "not readable as JSON"]),
}


@pytest.fixture
def damaged(golden, tmp_path):
    def make(damage, source="T1_tiny/checkpoint_sharded"):
        shutil.copytree(golden / source, tmp_path / "folder")
        damage(tmp_path / "folder")
        return tmp_path / "folder"

    return make


@pytest.fixture
def no_device(monkeypatch):
    def touched(*args, **kwargs):
        raise AssertionError("a device was used for a checkpoint that is no good")

    monkeypatch.setattr(jax, "device_put", touched)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name, damaged, no_device):
    damage, parts = DAMAGE[name]
    folder = damaged(damage)
    with pytest.raises(CheckpointError) as error:
        load_target(folder)
    message = str(error.value)
    for part in [str(folder), *parts]:
        assert part in message, message


def test_at_least_twenty_kinds():
    assert len(DAMAGE) >= 20


def test_the_undamaged_folder_loads(damaged):
    assert load_target(damaged(lambda folder: None)).config.num_layers == 4


def test_all_faults_come_in_one_message(damaged, no_device):
    def several(folder):
        missing_shard(folder)
        removed(folder)
        swap("model.norm.weight", lambda x: x[:5])(folder) if shard_of(folder, "model.norm.weight").exists() else None
        edit(next(folder.glob("*.safetensors")), lambda t: t.update({"model.what.weight": np.ones(1, np.float32)}))

    folder = damaged(several)
    with pytest.raises(CheckpointError) as error:
        load_target(folder)
    for part in (SHARD_2, "in_proj_z.weight: found in no file", "model.what.weight"):
        assert part in str(error.value)


def test_tensors_of_a_lost_file_are_not_listed_one_by_one(damaged):
    report = checkpoint.inspect(damaged(missing_shard))
    assert len(report.files) == 1
    assert report.missing == ()
    assert len(report.initialised) > 3


def test_an_extra_file_that_the_index_does_not_list_is_ignored(damaged):
    """Field case D03."""

    def extra(folder):
        save_file({"junk": np.ones(1, np.int8)}, folder / "optimizer.safetensors")

    assert load_target(damaged(extra)).config.num_layers == 4


@pytest.mark.parametrize("damage", [qwen3_next_names, scale_beside])
def test_other_kinds_are_refused_even_if_not_strict(damaged, damage):
    with pytest.raises(CheckpointError, match="refused"):
        load_target(damaged(damage), strict=False)


def drafter_tensor(change):
    return lambda folder: edit(folder / "model.safetensors", change)


DRAFTER_DAMAGE = {
    "no mask token": (config_with(mask_token_id=...), ["config.json", "mask_token_id"]),
    "mask beyond the vocabulary": (config_with(mask_token_id=101), ["config.json", "mask_token_id=101", "100"]),
    "shifted slots": (config_with(sample_from_anchor=False), ["config.json", "slot-shifted"]),
    "other taps": (config_with(target_layer_ids=[0, 1, 2]), ["fc.weight", "found F32 [32, 64]", "needed F32 [32, 96]"]),
    "taps out of order": (config_with(target_layer_ids=[2, 0]), ["config.json", "[2, 0]", "increasing"]),
    "last layer tapped": (config_with(target_layer_ids=[0, 3]), ["config.json", "[0, 3]", "last layer 3"]),
    "other head": (
        config_with(markov_head_type="gated"),
        ["markov_head.gate_proj.weight", "found in no file", "[8, 40]"],
    ),
    "unknown head": (config_with(markov_head_type="lstm"), ["config.json", "'lstm'", "vanilla"]),
    "embedding without head": (
        drafter_tensor(lambda t: t.pop("lm_head.weight")),
        ["lm_head.weight", "found in no file", "[101, 32]"],
    ),
    "reader weights without reader": (
        drafter_tensor(lambda t: t.update({"ready_reader.sites.0.gain": np.ones((2, 2), np.float32)})),
        ["ready_reader.sites.0.gain", "needed no such tensor"],
    ),
    "a target": (
        config_with(architectures=["Qwen3_5ForCausalLM"]),
        ["config.json", "not a DSpark drafter", "DSparkDraftModel"],
    ),
}


@pytest.mark.parametrize("name", DRAFTER_DAMAGE)
def test_drafter_damage_is_named(name, damaged, no_device):
    damage, parts = DRAFTER_DAMAGE[name]
    folder = damaged(damage, "D1_vanilla/checkpoint")
    with pytest.raises(CheckpointError) as error:
        load_drafter(folder)
    for part in [str(folder), *parts]:
        assert part in str(error.value)
