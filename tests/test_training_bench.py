"""The bench of training steps on a preset of a few thousand parameters."""

import json
from dataclasses import replace

import numpy as np
import pytest
from compiling import quick
from flax import nnx

from ready_jax.config import FULL, LINEAR
from ready_jax.configs.named import recipe
from ready_jax.configs.qwen3_8_27b import LOOKALIKE
from ready_jax.drafter import Drafter
from ready_jax.target import Target
from ready_jax.train import bench
from ready_jax.train.loop import dry_run

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=32)
TARGET = replace(LOOKALIKE.target, **SIZES, layer_types=(LINEAR, FULL))
DRAFTER = replace(LOOKALIKE.drafters["v2"], **SIZES, num_layers=1, taps=(-1, 0), mask_token_id=63, num_target_layers=2)
TINY = replace(LOOKALIKE, name="tiny", target=TARGET, drafters={"v2": DRAFTER}, reader_layers=(0, 0))
SMALL = ["--preset", "tiny", "--length", "48", "--anchors", "6", "--accumulate", "2", "--steps", "1"]
SMALL += ["--decode-batch", "2", "--prompt-tokens", "8", "--answer-tokens", "8", "--turns", "1", "3"]
SMALL += ["--xla-option", "xla_backend_optimization_level=0"]


def run(monkeypatch, folder, *more: str) -> dict:
    monkeypatch.setitem(bench.PRESETS, "tiny", TINY)
    file = folder / "bench.json"
    status = bench.main([*SMALL, "--json", str(file), *more])
    record = json.loads(file.read_text())
    assert (status, record["errors"]) == (0, {})
    assert set(bench.KEYS) <= set(record)
    return record


def numbers(record) -> list[float]:
    """Every number in a record, however deep."""
    if isinstance(record, dict | list):
        inner = record.values() if isinstance(record, dict) else record
        return [number for value in inner for number in numbers(value)]
    return [record] if isinstance(record, int | float) else []


def test_a_stage_over_a_mesh_of_two_devices(monkeypatch, tmp_path, capsys):
    for name, module in (("random_target", Target), ("random_drafter", Drafter)):  # one small program each
        monkeypatch.setattr(bench, name, quick(lambda c, m=module: m(c, rngs=nnx.Rngs(0)), static_argnums=0))
    record = run(monkeypatch, tmp_path, "--data", "2", "--only", "stage1", "regeneration")
    assert record["mesh"] == {"data": 2, "shard": 1}
    assert (record["stage2_samples_per_s"], record["hours_both_stages"]) == (None, None), "not asked for"
    detail = record["detail"]["stage1"]
    assert detail["anchors"] == 6 * 2 * 2, "every device has its rows in every micro-batch"
    assert record["stage1_samples_per_s"] == pytest.approx(4 / detail["step_ms"] * 1e3)
    assert record["feature_file_bytes"] == 0
    assert {"device_kind", "versions", "commit", "xla_options"} <= set(record)
    assert np.isfinite(numbers(record)).all()
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["device", "build", "stage1"], "regeneration is of one device"


@pytest.mark.slow
def test_every_step_runs(monkeypatch, tmp_path):
    record = run(monkeypatch, tmp_path)
    missing = {key for key in bench.KEYS if record[key] is None}
    assert missing == {"peak_gib", "mfu"}, "the CPU tells neither its memory nor its peak"
    assert np.isfinite(numbers(record)).all()
    split = record["split_ms"]
    assert split["whole"] == pytest.approx(sum(split[key] for key in ("target", "draft", "loss", "optimizer")))
    rates = [record[f"stage{k}_samples_per_s"] for k in (1, 2)]
    assert record["hours_both_stages"] == pytest.approx((20_000 / rates[0] + 50_000 / rates[1]) / 3600)
    found = record["detail"]["regeneration"]
    script = bench.even_walks(bench.PUBLISHED_ACCEPTANCE, 3, 2, 7)
    assert found["acceptance_length"] == pytest.approx(np.mean(script) + 1), "the script was followed to the letter"
    assert record["assumptions"]["acceptance_length"] == bench.PUBLISHED_ACCEPTANCE


def test_walks_have_the_mean_that_was_asked_for():
    walks = np.array(bench.even_walks(4.1739, 100, 10, 7))
    assert walks.shape == (10, 100)
    assert walks.mean() + 1 == pytest.approx(4.1739, abs=1e-3)
    assert set(np.unique(walks)) == {3, 4}
    with pytest.raises(ValueError, match=r"must lie in 1\.\.8"):
        bench.even_walks(9.0, 1, 1, 7)


@pytest.mark.parametrize("name", ["ready_stage2", "base"])
def test_a_dry_run_says_what_27b_takes_without_a_checkpoint(name):
    recipe_of = recipe(f"qwen3_8_27b_{name}")
    assert recipe_of.rows.batch % recipe_of.optimizer.accumulate == 0
    lines = dry_run(recipe_of, "NVIDIA H200")
    assert lines[0].startswith("target 26,903,862,784 parameters")
    memory = next(line for line in lines if line.startswith("memory"))
    assert 50 < float(memory.split("about ")[1].split()[0]) < 134, "an H200 holds it"
    assert lines[-1].startswith("time about")
