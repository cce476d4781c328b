"""The ablation grid: every command is a recipe that exists, nothing is trained twice, one table per question."""

import json
import shlex

import pytest
from test_report import evaluated, numbers

from ready_jax.config import DrafterConfig
from ready_jax.configs.named import recipe
from ready_jax.configs.nano import NANO_DRAFTER, NANO_TARGET
from ready_jax.serve import ablate, evaluate


def lines(tmp_path, *words: str) -> list[list[str]]:
    questions = [q for q in ablate.QUESTIONS if not words or q.name in words]
    return [shlex.split(line) for line in ablate.plan(questions, tmp_path, tokens="t.npz.xz", steps=(10, 20))]


def test_every_command_is_a_valid_recipe(tmp_path):
    *training, last = lines(tmp_path)
    outs = set()
    for words in training:
        assert words[:3] == ["python", "-m", "ready_jax.train.loop"]
        found = recipe(words[3], words[4:])
        reader = found.adapt.reader
        assert found.files.tokens == "t.npz.xz"
        assert found.rows.first == (640 if words[3].endswith("stage2") else 0)
        assert (reader is None) == (words[3] == "nano_stateless")
        if reader is not None:
            assert set(reader.state_layers) <= set(NANO_TARGET.linear_layers)
            DrafterConfig(**(vars(NANO_DRAFTER) | dict(reader=reader)))
        if found.files.from_pretrained.startswith(str(tmp_path)):
            assert found.files.from_pretrained.removesuffix("/adapter") in outs, "its first stage comes before it"
        assert found.files.out not in outs
        outs.add(found.files.out)
    options = evaluate.parse(last[3:])
    assert [name for name, _ in options.draft] == ["dspark", *(v.name for v in ablate.variants())]
    assert {folder.removesuffix("/merged") for _, folder in options.draft[1:]} <= outs


def test_reader_and_control_see_the_same_rows():
    (control,), (first, second) = (
        [recipe(name, changes) for name, changes in ablate.recipes(variant, ablate.Path("x"))]
        for variant in (ablate.Variant("s", reader=False), ablate.Variant("r"))
    )
    assert control.optimizer.steps == first.optimizer.steps + second.optimizer.steps
    assert second.rows.first == first.optimizer.steps * first.rows.batch
    assert control.rows.first == 0
    assert ablate.recipes(ablate.Variant("r"), ablate.Path("x"), steps=(5, 9))[1][1][1] == f"rows.first={5 * 64}"


def test_the_grid_holds_the_papers_questions():
    names = {variant.name for variant in ablate.variants()}
    assert {"stateless", "ready", "reads_zero", "reads_shuffled", "rank_16", "layers_6", "inject_0_1"} <= names
    assert {"inject_before_attention", "window_16_ready", "window_16_stateless"} <= names
    assert len(names) == len(ablate.variants())
    assert all(name.isidentifier() for name in names)


def test_what_is_trained_is_not_trained_again(tmp_path):
    before = lines(tmp_path, "rank")
    for name in ("ready", "rank_4_stage1"):
        (tmp_path / name / "merged").mkdir(parents=True)
        (tmp_path / name / "merged" / "config.json").write_text("{}")
    after = lines(tmp_path, "rank")
    gone = [words for words in before if words not in after]
    assert [words[3] for words in gone] == ["nano_ready_stage1", "nano_ready_stage2", "nano_ready_stage1"]
    assert after[-1] == before[-1]


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
