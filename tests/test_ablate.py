"""The ablation grid: every command is a recipe that exists, nothing is trained twice, one table per question."""

import itertools
import json
import shlex
from dataclasses import replace

import jax
import numpy as np
import pytest
from test_report import evaluated, numbers

from ready_jax.checkpoint import load_drafter
from ready_jax.config import DrafterConfig
from ready_jax.configs.named import recipe
from ready_jax.configs.nano import NANO_DRAFTER, NANO_TARGET
from ready_jax.configs.nano_ready import BATCH, STAGE1, STAGE2
from ready_jax.serve import ablate, evaluate


def chosen(*words: str) -> list[ablate.Variant]:
    return ablate.variants([q for q in (*ablate.QUESTIONS, ablate.TRAINING) if not words or q.name in words])


def runs(tmp_path, *words: str) -> list[list[list[str]]]:
    """Per line of the plan its training runs, as words."""
    lines = ablate.training(chosen(*words), tmp_path, tokens="t.npz.xz", steps=(10, 20), changes=["rows.batch=32"])
    return [[shlex.split(run) for run in line.split(" && ")] for line in lines if "train.loop" in line]


def test_every_command_is_a_valid_recipe(tmp_path):
    outs = set()
    for line in runs(tmp_path):
        for place, words in enumerate(line):
            assert words[:3] == ["python", "-m", "ready_jax.train.loop"]
            found = recipe(words[3], words[4:])
            reader = found.adapt.reader
            assert found.files.tokens == "t.npz.xz"
            assert found.rows.first == (320 if words[3].endswith("stage2") else 0)
            assert (reader is None) == (words[3] == "nano_stateless")
            assert found.optimizer.steps == (30 if reader is None else (10, 20)[place])
            if reader is not None:
                assert set(reader.state_layers) <= set(NANO_TARGET.linear_layers)
                DrafterConfig(**(vars(NANO_DRAFTER) | dict(reader=reader)))
            if place:
                assert found.files.from_pretrained == line[0][-2].removeprefix("files.out=") + "/adapter"
            assert found.files.out not in outs
            outs.add(found.files.out)
    (last,) = ablate.evaluations(chosen(), tmp_path).values()
    options = evaluate.parse(shlex.split(last)[3:])
    names = [name for name, _ in options.draft]
    assert names == ["dspark", "dspark_w16", "dspark_w64", "dspark_w128", *(v.name for v in chosen())]
    assert {folder.removesuffix("/merged") for name, folder in options.draft if not name.startswith("dspark")} <= outs


def test_stages_and_windows_and_seeds_agree():
    """Window, seed and what is read are the same in both stages, as the rows of a seed are for all methods."""
    for variant in ablate.TRAINING.variants:
        made = [recipe(name, changes) for name, changes in ablate.recipes(variant, ablate.Path("x"))]
        assert {run.adapt.window for run in made} == {variant.window}
        assert {run.rows.seed for run in made} == {variant.seed}
        assert {run.adapt.reader for run in made} == {made[-1].adapt.reader}
        assert (made[-1].adapt.reader is None) == (variant.method == "stateless")
        assert sum(run.optimizer.steps for run in made) == STAGE1 + STAGE2
        assert made[-1].rows.first == (0 if len(made) == 1 else made[0].optimizer.steps * made[0].rows.batch)
        assert {run.rows.batch for run in made} == {BATCH}


def test_the_grid_holds_the_papers_questions():
    names = {variant.name for variant in ablate.variants()}
    assert {"stateless", "ready", "reads_zero", "reads_shuffled", "rank_16", "layers_6", "inject_0_1"} <= names
    assert {"inject_before_attention", "layers_0_2_6", "ready_w16", "stateless_w16"} <= names
    assert len(names) == len(ablate.variants())
    study = [variant.name for variant in ablate.TRAINING.variants]
    assert len(set(study)) == 4 * 5 * 2
    assert {"ready", "ready_s1", "ready_w16_s1", "reads_identity_w128", "stateless_w64"} <= set(study)
    assert all(name.isidentifier() for name in names | set(study))


def test_what_is_trained_is_not_trained_again(tmp_path):
    before = runs(tmp_path, "rank")
    for name in ("ready", "rank_4_stage1"):
        (tmp_path / name / "merged").mkdir(parents=True)
        (tmp_path / name / "merged" / "config.json").write_text("{}")
    after = runs(tmp_path, "rank")
    assert [line[0][-2] for line in before if line not in after] == [f"files.out={tmp_path}/{name}_stage1" for name in (
        "ready", "rank_4",
    )]  # fmt: skip
    assert [run[3] for line in after if line not in before for run in line] == ["nano_ready_stage2"]


def test_lines_need_no_quotes_and_stand_for_themselves(tmp_path):
    """`xargs` takes quotes away, and runs lines in any order."""
    lines = ablate.training(chosen(), ablate.Path("runs"), tokens="t.npz.xz")
    lines += ablate.evaluations(chosen(), ablate.Path("runs"), words=["--batch-size", "64"], processes=3).values()
    assert not any(set(line) & set("\"'()[]$ \t") - {" "} for line in lines)


def test_an_evaluation_in_parts_covers_every_drafter_once_under_equal_conditions(tmp_path):
    some = chosen("training")
    found = ablate.evaluations(some, tmp_path, words=["--batch-size", "64"], processes=6)
    assert [file.name for file in found] == [f"ablation_{i}.json" for i in range(7)]
    options = [evaluate.parse(shlex.split(line)[3:]) for line in found.values()]
    drafts = [[name for name, _ in one.draft] for one in options]
    assert drafts[0] == ["dspark", "dspark_w16", "dspark_w64", "dspark_w128"]
    assert sorted(itertools.chain(*drafts[1:])) == sorted(variant.name for variant in some)
    assert {len(part) for part in drafts[1:]} == {6, 8}
    assert any({"ready_w16", "ready_w16_s1"} <= set(part) for part in drafts), "one program, one process"
    assert len({one.batch_size for one in options}) == 1


def test_what_the_command_line_selects(tmp_path, capsys):
    words = ["plan", "--out", str(tmp_path), "--question", "training", "--windows", "16", "unlimited", "--seeds", "1"]
    assert ablate.main([*words, "--print", "train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 5 + 1
    assert lines[-1] == f"python -m ready_jax.serve.ablate window 16 --out {tmp_path}/dspark_w16"
    assert ablate.main([*words, "--print", "evaluate", "--trained"]) == 0
    assert capsys.readouterr().out.count("--draft ") == 1, "nothing is trained: the base alone"


def test_the_base_with_a_window_has_the_same_weights(tmp_path):
    assert ablate.main(["window", "16", "--out", str(tmp_path / "w")]) == 0
    base, other = (load_drafter(folder) for folder in (ablate.NANO / "dspark", tmp_path / "w"))
    assert other.config == replace(base.config, sliding_window=16)
    for a, b in zip(jax.tree.leaves(base), jax.tree.leaves(other), strict=True):
        assert (np.asarray(a) == np.asarray(b)).all()


def test_tables_answer_the_questions_that_were_evaluated(tmp_path, capsys):
    found = evaluated()
    with pytest.raises(ValueError, match="needed are some of stateless, ready"):
        ablate.page(found)
    for part in ("methods", "overall"):
        found[part]["stateless"] = found[part].pop("dspark")
    found["paired"]["ready_over_stateless"] = found["paired"].pop("ready_over_dspark")
    made = ablate.page(found)
    assert [table.title for table in made.tables] == [
        q.title for q in ablate.QUESTIONS if q.name in ("states", "window")
    ] + ["Conditions"]
    (stateless, ready), change = made.tables[0].rows, numbers()["paired"]["ready_over_dspark"]
    assert stateless[2] == "reference"
    assert ready[2].startswith(f"{100 * change['acceptance_length_change']['change']:+.2f} % [")
    file = tmp_path / "a.json"
    file.write_text(json.dumps(found))
    assert ablate.main(["tables", str(file)]) == 0
    assert "# Ablations at nano's size" in capsys.readouterr().out


def test_a_change_that_was_stored_the_other_way_round_is_turned():
    pair = dict(acceptance_length_change=dict(change=0.25, ci95=[0.0, 1.0]))
    found = dict(paired={"a_over_b": pair})
    assert ablate.change_over(found, "a", "b", "acceptance_length_change") == "+25.00 % [+0.00, +100.00]"
    assert ablate.change_over(found, "b", "a", "acceptance_length_change") == "-20.00 % [-50.00, +0.00]"
    assert ablate.change_over(found, "b", "c", "acceptance_length_change") == "-"
