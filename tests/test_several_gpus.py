"""What several GPUs gain: gathering from outputs as the entry points leave them; once, slowly, with all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from ready_jax import kernel_times
from ready_jax.serve import links
from ready_jax.serve import several_gpus as several
from ready_jax.serve.records import lines_file

DEVICE = dict(device="gpu", device_kind="NVIDIA H200", device_count=2, versions=dict(jax="0.11.2"), commit="abc")


def nano(seconds: float, shift: float = 0.0) -> dict:
    lines = [
        dict(step=10 * i, loss=3.0 - i / 10 + shift, seconds_per_step=seconds * (2 if i == 1 else 1)) for i in (1, 2)
    ]
    return DEVICE | dict(config=dict(rows=dict(batch=64)), log=lines)


def training(rate: float, collectives: float = 0.0) -> dict:
    detail = dict(samples_per_s=rate, step_ms=1000.0, mfu=0.5, loss=13.0, peak_gib_by_device=[60.0, 55.0])
    detail |= dict(temporary_gib=20.0, argument_gib=50.0)
    detail |= dict(communication_us=dict(collectives=collectives, exposed=collectives / 2, span=1e6))
    return DEVICE | dict(rows_of_a_micro_batch=1, micro_batches=4, compile_seconds=40.0, detail=dict(stage2=detail))


def decoding(ms: float, same: int = 65) -> dict:
    kernels = [("gemm_fusion", 257.0, 5000.0), ("psum_fusion", 138.0, 900.0), ("ncclDevKernel_AllGather", 9.0, 100.0)]
    detail = dict(ready=dict(kernels=[dict(kernel=name, launches=n, us=us) for name, n, us in kernels]))
    found = dict(autoregressive_ms=ms - 2, ready_round_ms=ms, bit_identical_rounds=same, rounds_compared=65)
    return (
        DEVICE
        | found
        | dict(collectives_per_round={"all-reduce": 138}, peak_gib=60.0, compile_seconds=30.0, detail=detail)
    )


def report(seconds: float, tokens: tuple[int, ...] = (1, 2)) -> dict:
    one = dict(prompts=96, prefill_seconds=seconds / 4, decode_seconds=3 * seconds / 4, acceptance_length=2.5)
    kept = dict(token_ids=list(tokens), accepted=[1], emitted=[2], finish_reason="length", decode_seconds=seconds)
    line = dict(benchmark="gsm8k", index=0, batch=f"gsm8k/{seconds}", methods=dict(dspark=kept))
    run = DEVICE | dict(budget=dict(seconds=seconds))
    return dict(conditions=dict(dtype="bfloat16"), run=run, methods=dict(dspark=dict(gsm8k=one)), lines=[line])


LINKS = DEVICE | dict(correct=dict(all_reduce=True), all_reduce_gb_s=350.0, all_gather_gb_s=340.0, copy_gb_s=380.0,
                      short_all_reduce_us=12.0)  # fmt: skip
OUTPUTS = {
    "links/all": LINKS,
    "nano_training/one": nano(0.028),
    "nano_training/data": nano(0.014, 1e-4),
    "training_27b/one": training(3.0),
    "training_27b/data": training(5.8, 5e3),
    "training_27b/shard": training(5.2, 2e5),
    "decode_27b/one": decoding(15.5),
    "decode_27b/all": decoding(9.0),
    "decode_27b/all_one_graph": decoding(8.0),
    "evaluation/one": report(8.0),
    "evaluation/all": report(4.0),
}


def leave(file: Path, output: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = output.get("lines", [])
    file.write_text(json.dumps({key: value for key, value in output.items() if key != "lines"}))
    if lines:
        lines_file(file).write_text("".join(json.dumps(line) + "\n" for line in lines))


class Launch:
    """Instead of processes: leaves what they would, notes what was asked for."""

    def __init__(self, outputs: dict, failures: dict[str, str] | None = None):
        self.outputs, self.failures = outputs, failures or {}
        self.asked: list[tuple[str, int, float]] = []

    def __call__(self, run: several.Run, seconds: float) -> str | None:
        name = f"{run.folder.parent.name}/{run.folder.name}"
        self.asked.append((name, run.devices, seconds))
        if name in self.outputs:
            leave(run.output, self.outputs[name])
        return self.failures.get(name)


def make(folder: Path, launch: Launch, *more: str) -> tuple[dict, dict]:
    out = folder / "two.json"
    options = several.parse(["--out", str(out), "--work", str(folder / "work"), "--tokens", "a/b.npz.xz", *more])
    found = several.Several(options, launch=launch)()
    return found, json.loads(out.read_text())


def test_everything_is_gathered(tmp_path):
    launch = Launch(OUTPUTS)
    record, written = make(tmp_path, launch)
    assert json.loads(json.dumps(record)) == written
    assert record["errors"] == {}
    assert [(name, devices) for name, devices, _ in launch.asked] == [
        (name, 1 if name.endswith("/one") else 2) for name in OUTPUTS
    ]
    found = record["parts"]
    assert found["nano_training"]["speed_up"] == pytest.approx(2)
    assert found["nano_training"]["same_losses"]
    assert found["training_27b"]["shard_speed_up"] == pytest.approx(5.2 / 3)
    assert found["training_27b"]["shard"]["communication"]["share"] == pytest.approx(0.2)
    assert found["training_27b"]["shard"]["communication"]["exposed_share"] == pytest.approx(0.1)
    assert found["decode_27b"]["all_one_graph_round_ratio"] == pytest.approx(8 / 15.5)
    assert found["evaluation"]["speed_up"] == {"dspark": pytest.approx(2)}
    assert found["evaluation"]["same_metrics"], found["evaluation"]["differences"]
    assert record["conditions"]["evaluation"]["all"]["device_kind"] == "NVIDIA H200"
    assert record["commands"]["training_27b/shard"].startswith("python -m ready_jax.train.bench --preset qwen3_8_27b")
    assert "files.tokens=TOKENS files.out=WORK/nano_training/one/run" in record["commands"]["nano_training/one"]
    assert str(Path.cwd()) not in json.dumps(written["commands"])
    lines = several.table(record).splitlines()
    assert any("weights split, samples/s" in line and "1.733" in line and ">= 1.7" in line for line in lines)
    assert all(len(line) < 110 for line in lines)


def test_a_failure_is_kept_and_the_rest_goes_on(tmp_path):
    failures = {"training_27b/shard": "exit status 1: out of memory", "links/all": "took more than its 60 s"}
    launch = Launch({name: x for name, x in OUTPUTS.items() if name not in failures}, failures)
    record, written = make(tmp_path, launch)
    assert written["errors"] == failures
    assert written["parts"]["training_27b"]["data_speed_up"] == pytest.approx(5.8 / 3)
    assert "shard" not in written["parts"]["training_27b"]
    assert "FAILED training_27b/shard: exit status 1: out of memory" in several.table(record)
    # What has failed is run again, alone; what was found stays.
    again, _ = make(tmp_path, Launch(OUTPUTS), "--only", "links")
    assert set(again["errors"]) == {"training_27b/shard"}
    assert again["parts"]["links"]["all_reduce_gb_s"] == 350
    assert again["parts"]["decode_27b"] == record["parts"]["decode_27b"]
    with pytest.raises(ValueError, match="another preset"):
        make(tmp_path, Launch(OUTPUTS), "--preset", "lookalike")


def test_a_known_output_is_not_measured_again_and_time_is_bounded(tmp_path):
    leave(tmp_path / "one.json", OUTPUTS["training_27b/one"])
    launch = Launch(OUTPUTS)
    known = ["--known", f"training_27b/one={tmp_path / 'one.json'}"]
    record, _ = make(tmp_path, launch, "--only", "training_27b", "--limit", "training_27b=50", *known)
    assert [name for name, *_ in launch.asked] == ["training_27b/data", "training_27b/shard"]
    assert all(0 < seconds <= 50 for *_, seconds in launch.asked)
    assert record["parts"]["training_27b"]["data_speed_up"] == pytest.approx(5.8 / 3)
    assert list(record["commands"]) == [f"training_27b/{name}" for name in ("one", "data", "shard")]
    assert list(record["seconds"]) == ["training_27b/data", "training_27b/shard"]
    record, _ = make(tmp_path, Launch({}), "--only", "links", "--total", "0")
    assert record["errors"] == {"links/all": "not started: the time is up"}
    with pytest.raises(ValueError, match="no such run"):
        make(tmp_path, launch, "--known", "training_27b/three=x.json")


def test_an_output_that_nothing_can_be_read_from_is_a_failure(tmp_path):
    record, _ = make(tmp_path, Launch(OUTPUTS | {"nano_training/data": {}}), "--only", "nano_training")
    assert record["errors"] == {"nano_training/gather": "KeyError: 'log'"}
    assert record["seconds"].keys() == {"nano_training/one", "nano_training/data"}


def test_other_losses_and_texts_are_noticed(tmp_path):
    other = OUTPUTS | {"nano_training/data": nano(0.014, 0.1), "evaluation/all": report(4.0, (1, 3))}
    record, _ = make(tmp_path, Launch(other), "--only", "nano_training", "evaluation")
    assert not record["parts"]["nano_training"]["same_losses"]
    assert record["parts"]["evaluation"]["differences"] == ["text of gsm8k 0.dspark.token_ids"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--tokens FILE is needed"),
        (["--tokens", "x", "--limit", "link=3"], "link: no such part"),
        (["--tokens", "x", "--limit", "links=long"], "seconds are a number"),
        (["--only", "links", "--devices", "1"], "several are needed"),
    ],
)
def test_wrong_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        several.parse(["--out", "x.json", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("word", "wrong"), [("pass", None), ("raise SystemExit('no room')", "exit status 1: no room")])
def test_a_process_is_run_and_its_failure_read(tmp_path, monkeypatch, word, wrong):
    (tmp_path / "tried.py").write_text(f"import os\nassert os.environ['CUDA_VISIBLE_DEVICES'] == '4'\n{word}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    folder = tmp_path / "run"
    assert several.start(several.Run("x", "tried", (), 1, folder, folder / "x.json"), 30.0) == wrong


def test_a_process_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    (tmp_path / "tried.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = several.Run("x", "tried", (), 1, tmp_path / "run", tmp_path / "run" / "x.json")
    assert several.start(run, 0.1) == "took more than its 0 s"


def test_communication_is_what_collectives_take_and_what_nothing_hides():
    devices = [
        [("gemm", 0.0, 1000.0), ("ncclDevKernel_AllGather", 500.0, 1500.0), ("gemm", 2000.0, 3000.0)],
        [("gemm", 0.0, 1000.0), ("psum_fusion_12", 1000.0, 1500.0), ("gemm", 2000.0, 3000.0)],
    ]
    found = kernel_times.communication(devices, 1)
    assert found == dict(collectives=0.75, exposed=0.5, span=3.0)
    assert kernel_times.communication([], 1) is None
    assert kernel_times.kernel_times(devices, 2)[0] == dict(kernel="gemm", launches=1.0, us=1.0)


def test_collectives_are_checked(monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:3]), (links.AXIS,))
    assert links.check(mesh) == dict(all_reduce=True, all_gather=True, copy=True)
    monkeypatch.setattr(links, "around", lambda count: lambda x: x)
    assert links.check(mesh) == dict(all_reduce=True, all_gather=True, copy=False)
    with pytest.raises(ValueError, match="--devices 1: 2 to 4 are here"):
        links.measure(1, 1 << 20, 1)


@pytest.mark.slow
def test_the_whole_script_on_two_simulated_devices(tmp_path):
    """Tiny, in minutes; times mean nothing here."""
    import tiny_run

    from ready_jax.train.corpus import write_corpus

    tokens, out = tmp_path / "tokens.npz.xz", tmp_path / "two.json"
    write_corpus(tokens, tiny_run.corpus(count=60))
    command = [sys.executable, "-m", "ready_jax.serve.several_gpus", "--preset", "lookalike", "--out", str(out)]
    command += ["--tokens", str(tokens), "--work", str(tmp_path / "work")]
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = os.environ | dict(JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000, check=False)
    record = json.loads(out.read_text())
    assert (done.returncode, record["errors"]) == (0, {}), done.stdout
    found = record["parts"]
    assert all(found["links"]["correct"].values())
    assert found["nano_training"]["first_loss_difference"] < several.ROUNDING
    for name in ("data", "shard"):
        assert found["training_27b"][name]["samples_per_s"] > 0
    for name in ("one", "all"):
        assert found["decode_27b"][name]["bit_identical_rounds"] == found["decode_27b"][name]["rounds_compared"] > 0
    assert found["evaluation"]["same_metrics"], found["evaluation"]["differences"]
