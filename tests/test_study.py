"""The study of the training on records made by hand: joining, refusals, pairing, pooling, facts of runs, tables."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_metrics import method, record, text
from test_report import evaluated

from ready_jax.configs.nano_ready import BATCH, STAGE1, STAGE2, nano_ready_stage2
from ready_jax.serve import ablate, records, study

NAMES = [cell.name for cell in ablate.cells()]


def accepts(name: str, prompt: int) -> int:
    """Proposals accepted in every round: most by the reader, least by the base, fewer with seed 1 in odd prompts."""
    level = 3 if name.startswith("ready") else 1 if name.startswith("dspark") else 2
    return level + (prompt % 3 == 0) - (name.endswith("_s1") and prompt % 2 == 1)


def made(names: list[str], benchmark: str, index: int) -> dict[str, Any]:
    tokens = text(41, index) if index else [1, 2, 3, 4, 5, 6] * 6 + [7, 8, 9, 10, 11]  # the first prompt loops
    ways = {name: method([accepts(name, index)] * (8 + index % 2)) for name in names}
    return record(index, tokens, benchmark=benchmark, **ways)


def wrote(file: Path, names: list[str], *, change=None, run: dict[str, Any] | None = None, **other: Any) -> Path:
    """An evaluation of some methods: the report and its lines."""
    found = evaluated(**other)
    found["conditions"]["methods"] = {name: {"model.safetensors": name[:3]} for name in ("autoregressive", *names)}
    found["run"] |= run or {}
    stamp = records.digest(found["conditions"])
    rows = [made(names, benchmark, index) for benchmark in found["conditions"]["benchmarks"] for index in range(12)]
    for row in rows:
        row["conditions"] = stamp
        if change is not None:
            change(row)
    records.append(records.lines_file(file), rows)
    records.write_json(file, found)
    return file


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("study")
    files = [
        wrote(folder / f"ablation_{i}.json", names) for i, names in enumerate((NAMES[:4], NAMES[4:20], NAMES[20:]))
    ]
    return study.put_together(files, ablate.cells(), [folder])


def row_of(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row


def test_every_cell_has_every_benchmark(found):
    assert len(found["acceptance"]) == (4 + 40) * 2
    row = row_of(found["acceptance"], method="ready", window=16, seed=0, benchmark="gsm8k")
    emitted = [(accepts("ready", i) + 1) * (8 + i % 2) for i in range(12)]
    rounds = [8 + i % 2 for i in range(12)]
    assert row["rounds"] == sum(rounds)
    assert row["acceptance_length"] == pytest.approx(sum(emitted) / sum(rounds))
    assert row["ci95"][0] <= row["acceptance_length"] <= row["ci95"][1]
    assert row["survival"][:3] == [1.0, 1.0, 1.0]
    assert row["survival"][4:] == [0.0, 0.0, 0.0]
    assert row["non_loop"]["prompts"] == row["prompts"] - 1 == 11
    assert found["missing"] == []
    assert {row["window"] for row in found["acceptance"]} == {16, 64, 128, "unlimited"}


def test_gains_are_those_of_the_means_and_paired(found):
    assert len(found["paired_vs_stateless"]) == 4 * 4 * 2
    assert {row["seed"] for row in found["paired_vs_stateless"]} == {0, 1}
    for window in (16, "unlimited"):
        gain = row_of(found["paired_vs_stateless"], method="ready", window=window, seed=1)
        a, b = (
            row_of(found["means"], method=name, window=window, seed=1)["acceptance_length"]
            for name in ("ready", "stateless")
        )
        assert gain["gain_percent"] == pytest.approx(100 * (a / b - 1))
        assert 0 < gain["ci95"][0] < gain["gain_percent"] < gain["ci95"][1]
        equal = row_of(found["paired_vs_stateless"], method="reads_zero", window=window, seed=1)
        assert (equal["gain_percent"], equal["ci95"]) == (0.0, [0.0, 0.0]), "the same rounds: paired, not spread"
    assert {row["control"] for row in found["reader_vs_control"]} == {"reads_zero", "reads_shuffled", "reads_identity"}
    control = row_of(found["reader_vs_control"], control="reads_identity", window=64, seed=0)
    stateless = row_of(found["paired_vs_stateless"], method="ready", window=64, seed=0)
    assert control["gain_percent"] == stateless["gain_percent"] > 0
    assert row_of(found["paired_vs_base"], method="stateless", window=16, seed=0)["gain_percent"] > 0
    seeds = row_of(found["seed_1_vs_seed_0"], method="ready", window=128, seed=1)
    assert seeds["gain_percent"] < 0


def test_pooling_counts_the_rounds_of_both_seeds(found):
    one, two, pooled = (row_of(found["means"], method="ready", window=16, seed=seed) for seed in (0, 1, study.POOLED))
    assert pooled["rounds"] == one["rounds"] + two["rounds"]
    assert pooled["acceptance_length"] == pytest.approx((one["acceptance_length"] + two["acceptance_length"]) / 2)
    assert pooled["ci95"][0] < pooled["acceptance_length"] < pooled["ci95"][1]
    assert pooled["non_loop"] < pooled["acceptance_length"], "the looping prompt accepts most"
    assert pooled["survival"][0] == pytest.approx(1.0)
    assert len(found["paired_vs_stateless_pooled"]) == 4 * 4
    assert not [row for row in found["means"] if row["method"] == "dspark" and row["seed"] is not None]


def test_what_does_not_belong_together_is_refused(tmp_path):
    first = wrote(tmp_path / "a.json", ["dspark"])

    def other(name: str, **changes: Any) -> list[Path]:
        return [first, wrote(tmp_path / f"{name}.json", ["ready"], **changes)]

    with pytest.raises(ValueError, match=r"target_sha256\.model\.safetensors: .*111.* and .*999"):
        records.together(other("target", target_sha256={"model.safetensors": "9" * 64}))
    sets = {name: one | dict(prompts_sha256="1") for name, one in evaluated()["conditions"]["benchmarks"].items()}
    with pytest.raises(ValueError, match=r"benchmarks\.gsm8k\.prompts_sha256"):
        records.together(other("prompts", benchmarks=sets))
    with pytest.raises(ValueError, match="batch_size: 1 and 64"):
        records.together(other("batch", batch_size=64))
    with pytest.raises(ValueError, match="device_kind"):
        records.together(other("device", run=dict(device_kind="NVIDIA B200")))
    with pytest.raises(ValueError, match=r"prompt \('gsm8k', 3\) differs in id"):
        records.together(other("id", change=lambda row: row.update(id="x") if row["index"] == 3 else None))
    again = wrote(tmp_path / "again.json", ["dspark"])
    content = json.loads(again.read_text())
    content["conditions"]["methods"]["dspark"] = {"model.safetensors": "other"}
    rows = [json.loads(line) | dict(conditions=records.digest(content["conditions"])) for line in
            records.lines_file(again).read_text().splitlines()]  # fmt: skip
    records.lines_file(again).unlink()
    records.append(records.lines_file(again), rows)
    records.write_json(again, content)
    with pytest.raises(ValueError, match="weights of dspark"):
        records.together([first, again])
    records.write_json(again, content | dict(complete=False))
    with pytest.raises(ValueError, match="not finished"):
        records.together([first, again])


def test_texts_that_differ_are_refused_or_left_out(tmp_path):
    def change(row):
        if (row["benchmark"], row["index"]) == ("mbpp", 2):
            row["methods"]["autoregressive"]["token_ids"][5] = 0

    files = [wrote(tmp_path / "a.json", ["stateless"]), wrote(tmp_path / "b.json", ["ready"], change=change)]
    with pytest.raises(ValueError, match=r"1 of 24 autoregressive texts differ .*mbpp 2 \(.*b.json\)"):
        records.together(files)
    whole, rows = records.together(files, leave_out=True)
    assert whole["left_out"] == [["mbpp", 2]]
    assert len(rows) == 23
    assert set(rows[0]["methods"]) == {"autoregressive", "stateless", "ready"}
    part = study.put_together(files, ablate.cells(), leave_out=True)
    assert (len(part["missing"]), part["conditions"]["left_out"]) == (42, [["mbpp", 2]])
    assert part["paired_vs_stateless_pooled"] == [], "one seed is nothing to pool"


def test_facts_of_training_runs(tmp_path):
    recipe = nano_ready_stage2()
    recipe = replace(
        recipe, adapt=replace(recipe.adapt, window=16), rows=replace(recipe.rows, seed=1),
        files=replace(recipe.files, out="elsewhere"),
    )  # fmt: skip
    log = dict(
        config=asdict(recipe), log=[{"step": 900, "loss": 3.0}, {"step": 1000, "loss": 2.0, "ce_loss": 1.5}],
        rows=9000, skipped=0, nonfinite=1, device_kind="x", commit="c", tokens_sha256="t",
    )  # fmt: skip
    (tmp_path / "ready_w16_s1").mkdir()
    (tmp_path / "ready_w16_s1" / "log.json").write_text(json.dumps(log))
    cell = study.Cell("ready_w16_s1", "ready", 16, 1)
    (row,), missing = study.training([cell], [tmp_path / "nowhere", tmp_path])
    assert missing == ["ready_w16_s1_stage1"]
    assert row["recipe"] == "nano_ready_stage2"
    assert row["changes"] == {"adapt.window": 16, "rows.seed": 1}
    seen = BATCH * STAGE2
    assert (row["first_row"], row["rows_seen"], row["tokens_seen"]) == (BATCH * STAGE1, seen, seen * 640)
    assert (row["loss"], row["ce_loss"], row["nonfinite"]) == (2.0, 1.5, 1)
    with pytest.raises(ValueError, match=r"are \(16, 1, 'own'\), \(16, 0, 'own'\) are needed for ready_w16_s1"):
        study.training([replace(cell, seed=0)], [tmp_path])


def test_the_file_and_its_tables(found, tmp_path, capsys):
    file = tmp_path / "results" / "study.json"
    study.write(found, file)
    again = json.loads(file.read_text())
    assert list(again) == list(found)
    assert np.isclose(again["means"][5]["acceptance_length"], found["means"][5]["acceptance_length"])
    assert sum(line.startswith('  {"method"') for line in file.read_text().splitlines()) > 200
    assert ablate.main(["tables", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "| method | window 16 | window 64 | window 128 | window unlimited |" in shown
    assert "| window | method | seed 0 | seed 1 | pooled | pooled, without loops |" in shown
    assert "| 16 | reads_zero | +0.00 % [+0.00, +0.00] |" in shown
    assert shown.count("log of ") == 4 * 2 * (1 + 4 * 2)
    assert ablate.main(["tables", str(file), "--out", str(tmp_path / "a.html")]) == 0


def test_the_questions_are_answered_from_the_same_files(tmp_path, capsys):
    names = ["dspark", "stateless", "ready", "ready_w16", "stateless_w16", "reads_zero"]
    files = [wrote(tmp_path / "a.json", names[:2]), wrote(tmp_path / "b.json", names[2:])]
    assert ablate.main(["tables", *map(str, files)]) == 0
    shown = capsys.readouterr().out
    assert "Does the reader gain by what it reads?" in shown
    assert "| ready_w16 |" in shown
    assert ablate.main(["training", *map(str, files), "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["conditions"]["files"] == 2
