"""The evaluation on a tiny pair: one report whatever is killed, spread over devices or split over processes."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import tiny

from ready_jax import programs
from ready_jax.bench_data import bench_prompts
from ready_jax.config import LINEAR
from ready_jax.export import save_pretrained
from ready_jax.generation import Generation, Timing
from ready_jax.pair import NANO, Pair
from ready_jax.serve import evaluate, metrics, records, selection

#: Less optimised code is compiled faster; both sides of every comparison here are compiled alike.
QUICK = programs.OPTIONS | {"xla_backend_optimization_level": 0}
SETS, SAMPLES = ("gsm8k", "mbpp"), 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A one-layer pair with nano's tokenizer."""
    place = tmp_path_factory.mktemp("pair")
    target = tiny.target(layer_types=(LINEAR,), vocab_size=8192)
    save_pretrained(target, place / "target")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(NANO / "target" / name, place / "target" / name)
    drafter = tiny.drafter(config=target.config, taps=(-1,), num_target_layers=1, num_layers=1)
    save_pretrained(drafter, place / "dspark")
    return place


def options(folder: Path, file: Path, *more: str):
    words = ["--model", f"{folder}/target", "--draft", f"dspark={folder}/dspark", "--dataset", ",".join(SETS)]
    words += ["--max-samples", str(SAMPLES), "--max-new-tokens", "8", "--prompt-tokens", "128", "--batch-size", "2"]
    words += ["--dtype", "float32", "--no-enable-thinking", "--no-progress", "--json", str(file)]
    return evaluate.parse([*words, *more])


@pytest.fixture(scope="module")
def loaded(folder, tmp_path_factory):
    """Models and programs that the runs of this file share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "OPTIONS", QUICK)
        return evaluate.load_methods(options(folder, tmp_path_factory.mktemp("x") / "x.json"))


@pytest.fixture
def run(folder, loaded, monkeypatch):
    def go(file: Path, *more: str, fresh: bool = False):
        with monkeypatch.context() as patch:
            patch.setattr(programs, "OPTIONS", QUICK)
            if not fresh:
                patch.setattr(evaluate, "load_methods", lambda options: loaded)
            lines: list[str] = []
            return evaluate.evaluate(options(folder, file, *more), log=lines.append), lines

    return go


@pytest.fixture(scope="module")
def report(folder, loaded, tmp_path_factory):
    """The uninterrupted run, and its file."""
    file = tmp_path_factory.mktemp("run") / "run.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "load_methods", lambda options: loaded)
        return evaluate.evaluate(options(folder, file), log=lambda line: None), file


def numbers(report: dict) -> dict:
    """What must not depend on clock, devices or processes."""
    return metrics.without_times({key: report[key] for key in ("conditions", "methods", "overall", "paired")})


def test_the_report_holds_what_was_measured_and_under_what(report):
    found, file = report
    assert json.loads(file.read_text()) == found
    assert found["complete"]
    assert list(found["methods"]) == ["autoregressive", "dspark"]
    for by_set in found["methods"].values():
        for name in SETS:
            one = by_set[name]
            assert one["exact_match"] == 1.0
            assert one["prompts"] == SAMPLES
            assert {"acceptance_length", "ci95", "survival", "decode_tokens_per_second", "rounds"} <= set(one)
            assert one["decode_tokens_per_second"] > 0
    assert found["methods"]["autoregressive"]["mbpp"]["acceptance_length"] == 1.0
    assert found["methods"]["dspark"]["mbpp"]["accuracy"] is None, "code is not run unless that is allowed"
    assert found["methods"]["dspark"]["gsm8k"]["accuracy"]["graded"] == SAMPLES
    conditions = found["conditions"]
    assert conditions["enable_thinking"] is False
    assert conditions["benchmarks"]["mbpp"]["ids"] == [row["id"] for row in bench_prompts("mbpp", limit=SAMPLES)]
    assert "<think>\n\n</think>" in conditions["benchmarks"]["mbpp"]["first_prompt"]
    assert set(conditions["target_sha256"]) == {"model.safetensors"}
    assert found["run"]["budget"]["seconds"]["compile"] > 0
    assert found["run"]["device"] == "cpu"
    lines = records.lines_file(file).read_text().splitlines()
    assert len(lines) == len(SETS) * SAMPLES


def test_after_a_kill_finished_prompts_are_not_run_again(report, run, tmp_path, monkeypatch):
    found, file = report
    lines = records.lines_file(file).read_text().splitlines(keepends=True)
    again = tmp_path / "run.json"
    records.write_json(again, {"conditions": found["conditions"], "run": found["run"] | {"budget": {"seconds": {}}}})
    records.lines_file(again).write_text("".join(lines[:3]) + lines[3][:100])  # the second batch is torn
    decoded = []
    whole = evaluate.run_batch
    monkeypatch.setattr(evaluate, "run_batch", lambda batch, *rest: decoded.append(batch.name) or whole(batch, *rest))
    resumed, _ = run(again)
    assert decoded == ["gsm8k/1", "gsm8k/2", "mbpp/0", "mbpp/1", "mbpp/2"]
    assert numbers(resumed) == numbers(found)
    decoded.clear()
    assert numbers(run(again)[0]) == numbers(found)
    assert decoded == []


def test_other_conditions_do_not_go_on(report, run, folder):
    _, file = report
    with pytest.raises(ValueError, match=r"other conditions:\n  max_new_tokens: there 8, here 9\n.*--restart") as error:
        run(file, "--max-new-tokens", "9")
    assert "enable_thinking" not in str(error.value)
    with pytest.raises(ValueError, match=r"enable_thinking: there false, here true(?s:.*)first_prompt"):
        run(file, "--enable-thinking")


def test_processes_share_the_work_and_the_last_one_writes_the_numbers(report, run, tmp_path):
    found, _ = report
    file = tmp_path / "run.json"
    first, lines = run(file, "--num-processes", "2", "--process-id", "0")
    assert not first["complete"]
    assert "other processes'" in lines[-1]
    second, _ = run(file, "--num-processes", "2", "--process-id", "1")
    assert numbers(second) == numbers(found)


def test_devices_share_the_rows(report, run, tmp_path):
    """Field case F09: four devices, the same file except times."""
    found, _ = report
    spread, _ = run(tmp_path / "run.json", "--devices", "4", fresh=True)
    assert spread["run"]["devices"] == 4
    assert numbers(spread) == numbers(found)
    assert set(records.differences(spread, found)) == {"devices"}


def test_the_order_of_the_file_does_not_matter(tmp_path):
    """Field case F09: a shuffled input file gives the same subset."""
    rows = [json.dumps(row | {"deepspec_rank": None}) for row in bench_prompts("mbpp")]
    (tmp_path / "mbpp_sanitized.jsonl").write_text("\n".join(rows[1::2] + rows[::2]))
    names = [row["id"] for row in bench_prompts("mbpp", tmp_path)]
    assert names == sorted(names, key=lambda name: int(name.split("-")[1]))


def test_left_over_rows_are_dropped_and_batches_keep_the_order():
    prompts = [selection.Prompt("gsm8k", i, f"gsm8k-{i}", [1] * (i + 1)) for i in range(5)]
    found = list(selection.batches(prompts, 2))
    assert [[p.index for p in batch.prompts] for batch in found] == [[0, 1], [2, 3], [4]]
    assert {batch.width for batch in found} == {32}
    assert [batch.width for batch in selection.batches(prompts, 3, 64)] == [64, 64]

    class Echo(Pair):
        def __init__(self):
            pass

        def generate(self, ids, **options):  # pyright: ignore[reportIncompatibleMethodOverride]
            assert len(ids) == 4
            timing = Timing(0.1, 0.2, 0.0, 0, 4, 8)
            rounds: dict[str, Any] = dict(proposed_per_round=[7], accepted_per_round=[0], emitted_per_round=[1])
            return [
                Generation("", [len(p), int(options["method"] is None)], "length", "x", 1, timing=timing, **rounds)
                for p in ids
            ]

    ways = {"autoregressive": (Echo(), "autoregressive"), "wrong": (Echo(), None)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "margin", lambda pair, ids, rows: float(len(ids)))
        one = evaluate.run_batch(found[2], ways, 4, 2)
    assert [record["id"] for record in one] == ["gsm8k-4"]
    assert one[0]["methods"]["wrong"]["token_ids"] == [5, 1]
    assert one[0]["methods"]["wrong"]["margin"] == 6, "after the prompt and the one token that is equal"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft", "ready"], "NAME=FOLDER is needed"),
        (["--draft", "bigram=x"], "none of autoregressive"),
        (["--dataset", "gsm8k,gsm8k"], "once"),
        (["--dataset", "gsm9k"], "gsm9k"),
        (["--process-id", "1"], "must lie in 0..0"),
        (["--stale", "mine"], "names of --draft are needed"),
        (["--stale", "prompt_lookup", "--prompt-lookup"], "names of --draft are needed"),
        (["--draft", "x=y", "--stale", "x", "--devices", "2"], "on one device only"),
    ],
)
def test_wrong_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        evaluate.parse(["--json", "x.json", *words])
    assert message in capsys.readouterr().err


def test_defaults_are_nanos_without_thinking_and_the_published_protocol_otherwise():
    nano = evaluate.parse(["--json", "x.json"])
    assert (nano.enable_thinking, nano.draft[0][0], nano.batch_size) == (False, "dspark", 1)
    assert nano.dataset == ["gsm8k", "math500", "mbpp", "humaneval", "mt_bench"]
    other = evaluate.parse(["--json", "x.json", "--model", "m", "--data-dir", "d"])
    assert (other.enable_thinking, other.draft, len(other.dataset)) == (True, [], 7)


def test_blocks_of_unequal_width_are_refused(loaded):
    pair, *_ = loaded
    drafters = {
        str(block): tiny.drafter(config=pair.target.config, taps=(-1,), num_target_layers=1, block_size=block)
        for block in (7, 3)
    }
    with pytest.raises(ValueError, match="one width of a verify pass"):
        evaluate.methods(pair, drafters)


def test_a_bigram_table_is_counted_from_text(loaded, tmp_path):
    pair, *_ = loaded
    file = tmp_path / "text.jsonl"
    file.write_text(
        '{"messages": [{"role": "user", "content": "z"}, {"role": "assistant", "content": "one two three"}]}\n'
    )
    table = selection.bigram_of(file, pair, selection.BaselineConfig())
    ids = pair.chat.encode_text("one two three")
    assert int(table.next_V[ids[-2]]) == ids[-1]
    assert int(jnp.count_nonzero(table.next_V)) == len(set(ids[:-1]))
    file.write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="no text to count successors in"):
        selection.bigram_of(file, pair, selection.BaselineConfig())
