"""Runs that end early: stopped, killed, poisoned, or gone on with elsewhere; metrics files; what is shown."""

import importlib.util
import json
import math
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run as small
from flax import nnx

from ready_jax.train import loop, run_state, show
from ready_jax.train.run_state import RunState
from ready_jax.train.step import TrainState

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Stop(Exception):
    """What stands for a user's Ctrl-C."""


def quiet(line: str) -> None:
    pass


class Place:
    """A folder with rows, a cache of programs, and a run that nothing interrupted."""

    def __init__(self, folder: Path, cache: Path):
        self.folder, self.cache = folder, cache
        self.shards = small.shards(folder)
        self.whole = self.run("whole")

    def recipe(self, name: str, *, resume: str = "auto", data: str | None = None, **sections):
        sections["files"] = dict(resume_from=resume) | sections.get("files", {})
        return small.recipe(self.folder / name, data or self.shards, **sections)

    def run(self, name: str, *, target=None, say=quiet, **sections) -> loop.RunResult:
        return loop.run(self.recipe(name, **sections), target=target or small.target(), log=say)

    def stopped(self, name: str, line: str, **sections) -> None:
        """A run that ends when it says something that begins with ``line``."""

        def log(text: str) -> None:
            if text.startswith(line):
                raise Stop

        with pytest.raises(Stop):
            self.run(name, say=log, **sections)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    cache = small.cache(tmp_path_factory)
    with small.quickly(cache):
        yield Place(tmp_path_factory.mktemp("runs"), cache)


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def equal(a, b) -> bool:
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(leaves(a), leaves(b), strict=True))


# Going on


def test_a_resumed_run_is_the_run_that_was_not_stopped(place):
    """Bit for bit, and with log lines that began before the save."""
    often = dict(log=dict(every=4, save_every=3))
    place.stopped("stopped", "step 4/", **often)
    assert RunState.exists(place.folder / "stopped/state")
    lines: list[str] = []
    run = place.run("stopped", say=lines.append, **often)
    assert any("after step 3" in line for line in lines)
    assert equal(run.drafter, place.whole.drafter)
    losses = [line["loss"] for line in place.whole.history]
    assert small.curve(run.out) == {4: np.mean(losses[:4]), 6: np.mean(losses[4:])}
    assert [line["step"] for line in run.history] == [4, 6]
    assert json.loads((run.out / "log.json").read_text())["log"] == run.history


def test_a_finished_run_goes_on_in_another_folder(place):
    """Nothing is left to do: the same export, and the whole curve."""
    run = place.run("elsewhere", resume=str(place.whole.out))
    assert equal(run.drafter, place.whole.drafter)
    assert small.curve(run.out) == small.curve(place.whole.out)
    assert [line["loss"] for line in run.history] == [line["loss"] for line in place.whole.history]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(optimizer=dict(learning_rate=0.5)), r"optimizer.learning_rate: the run has 0.01, this .* 0.5"),
        (dict(rows=dict(seed=1, anchors=5)), r"rows.anchors: the run has 4, .* 5; rows.seed: the run has 0, .* 1"),
        (dict(loss=dict(ce=0.5)), "loss.ce: the run has 0.1, this configuration 0.5"),
        (dict(drafter=replace(small.DRAFTER, markov_rank=5)), "drafter.markov_rank: the run has 4, .* 5"),
        (dict(adapt=replace(small.STATELESS, trains=("drafter", "lora"))), "adapt.lora.rank: the run has None, .* 2"),
        (dict(resume=""), "holds a run already"),
        (dict(resume="another"), "holds a run already"),
    ],
)
def test_another_configuration_is_refused_with_both_values(place, changes, match):
    with pytest.raises(ValueError, match=match):
        place.run("whole", **changes)


def test_other_rows_under_the_same_name_are_refused(place):
    rows = small.packed()
    rows.token_BT[0, 0] += 1
    small.shards(place.folder, rows)
    with pytest.raises(ValueError, match=r"rows_sha256: the run has '\w+', this configuration '\w+'"):
        place.run("whole")
    small.shards(place.folder)
    assert equal(place.run("whole").drafter, place.whole.drafter)


def test_where_it_runs_and_what_it_shows_may_differ():
    one = small.recipe(Path("a"), "x")
    other = small.recipe(
        Path("b"), "x", evaluate="held", mesh=dict(data=2), log=dict(every=7), files=dict(resume_from="auto")
    )
    run_state.check_same(run_state.flat_config(one), run_state.flat_config(other), "a")


# Kills


def wait_for(out: Path, step: int, process) -> None:
    """Until the run has logged this step (or ended)."""
    path = out / "metrics.jsonl"
    while process.poll() is None and not (path.exists() and f'"step": {step},' in path.read_text()):
        time.sleep(0.02)


def kill(process) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def reached(out: Path) -> int:
    """The last step that was logged, whose line may be cut off."""
    lines = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []
    steps = [int(found) for line in lines if (found := line.removeprefix('{"step": ').split(",")[0]).isdigit()]
    return max(steps, default=0)


def saved_steps(out: Path) -> list[int]:
    return sorted(int(path.name) for path in (out / "state/latest").glob("*") if path.name.isdigit())


def test_a_killed_run_goes_on(place):
    out = place.folder / "killed"
    process = small.process(out, place.shards, place.cache, files=dict(resume_from="auto"))
    wait_for(out, 5, process)
    kill(process)
    assert saved_steps(out)[-1] >= 2
    lines: list[str] = []
    run = place.run("killed", say=lines.append)
    assert any("resuming" in line for line in lines)
    assert small.curve(out) == small.curve(place.whole.out)
    assert equal(run.drafter, place.whole.drafter)


@pytest.mark.slow
def test_twenty_kills_at_random_moments(place):
    """Each time no more than the steps since the last save are lost, and the end is that of an uninterrupted run."""
    rng = random.Random(0)
    settings: dict[str, Any] = dict(optimizer=dict(steps=60), log=dict(every=1, save_every=2))
    whole = place.run("long", **settings)
    out, kills, done = place.folder / "hunted", 0, 0
    while kills < 20:
        assert done < 60, "the run ended before it was killed often enough"
        process = small.process(out, place.shards, place.cache, files=dict(resume_from="auto"), **settings)
        wait_for(out, done + rng.randint(1, 3), process)
        time.sleep(rng.uniform(0, 0.3))
        kill(process)
        kills += 1
        before, done = done, (saved_steps(out) or [0])[-1]
        assert done >= before, "a save was lost"
        # Saving happens in the background: the one that was begun last may be unfinished, not the one before.
        assert reached(out) - done <= 2 * 2
    run = place.run("hunted", **settings)
    assert small.curve(out) == small.curve(whole.out)
    assert equal(run.drafter, whole.drafter)


# Loss or gradient that is not finite

BAD_TOKEN, BAD_ROW = 93, 5


def poisoned(place, value: float, rows):
    """(target for which a token has no finite embedding, shards that hold it in these rows)."""
    graph, state = nnx.split(small.target())
    target = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    target.embed_VD[...] = target.embed_VD[...].at[BAD_TOKEN].set(value)
    packed = small.packed()
    packed.token_BT[packed.token_BT == BAD_TOKEN] = 0
    packed.token_BT[rows, 10] = BAD_TOKEN
    return target, small.shards(place.folder / f"poisoned_{value}", packed)


def test_a_batch_that_is_not_finite_changes_nothing_and_is_counted(place, monkeypatch):
    target, data = poisoned(place, math.nan, [BAD_ROW])
    states: list[TrainState] = []
    make = loop.steps.make_step

    def recorded(*args, **options):
        step = make(*args, **options)

        def both(state, *inputs):
            states.append(jax.tree.map(np.array, state))
            return step(state, *inputs)

        return both

    monkeypatch.setattr(loop.steps, "make_step", recorded)
    lines: list[str] = []
    run = place.run("nan", target=target, data=data, say=lines.append)
    assert (run.steps, run.skipped, run.nonfinite) == (6, 0, 2)  # a row comes once in an epoch of three steps
    said = [line for line in lines if "not finite" in line]
    assert len(said) == 2
    assert all(f"rows [{BAD_ROW}] of the data" in line and "(1 in a row)" in line for line in said)
    bad = [int(line.split()[1].rstrip(":")) for line in said]
    for number in range(1, 6):
        before, after = states[number - 1], states[number]
        assert equal((before.masters, before.optimizer), (after.masters, after.optimizer)) == (number in bad)
        assert int(after.streak) == (number in bad)
    assert all(np.isfinite(x).all() for x in leaves(run.drafter))
    lines = (run.out / "metrics.jsonl").read_text().splitlines()
    raw = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # no NaN, which is no JSON
    assert [line["step"] for line in raw if line["loss"] is None] == bad
    assert raw[-1]["nonfinite"] == 2


def test_too_many_bad_batches_in_a_row_end_the_run(place):
    target, data = poisoned(place, math.inf, [1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 17, 20, 22])
    lines: list[str] = []
    with pytest.raises(loop.NonFiniteError, match=r"2 steps in a row up to step 2 .* the last on rows \[") as error:
        place.run("inf", target=target, data=data, say=lines.append, optimizer=dict(max_nonfinite=2))
    index = loop.Stream(small.packed(), small.ROWS, 0).index(1).tolist()
    named = json.loads(str(error.value).split("rows ")[1].split(";")[0])
    assert named
    assert set(named) == set(index) & {1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 17, 20, 22}


# What is on disk


def state_of(value: int, size: int = 8) -> TrainState:
    counters = [jnp.full((), x, jnp.int32) for x in (value, 0, 0, 0)]
    weight = jnp.full((size, 4), value, jnp.float32)
    return TrainState(*counters, masters={"w_DI": weight}, optimizer=(jnp.full((), value), {"w_DI": 2 * weight}))


def test_what_is_saved_is_what_was_there_although_steps_go_on(tmp_path):
    """Saving is in the background, and the next step takes the buffers that are being written."""
    one_more = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)
    state, store = state_of(0, 500_000), RunState(tmp_path, keep=3)
    for number in range(1, 7):
        state = one_more(state)
        if number % 2 == 0:
            store.save(state, {"number": number})
    state = one_more(state)
    store.close()
    assert saved_numbers(tmp_path / "latest") == [2, 4, 6]
    store = RunState(tmp_path)
    found, record = store.restore(state)
    store.close()
    assert record["number"] == 6
    assert int(found.step) == 6
    assert np.unique(found.masters["w_DI"]).tolist() == [6]


def saved_numbers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_latest_and_best(tmp_path):
    store = RunState(tmp_path, keep=2)
    for number, score in ((1, None), (2, 1.5), (3, 1.2), (4, 1.7), (5, None)):
        store.save(state_of(number), {}, score)
    store.close()
    assert saved_numbers(tmp_path / "latest") == [4, 5]
    assert saved_numbers(tmp_path / "best") == [4]
    again = RunState(tmp_path)
    assert int(again.restore(state_of(0), "best")[0].step) == 4
    assert int(again.restore(state_of(0))[0].step) == 5
    assert again.best_score == 1.7
    again.save(state_of(6), {}, 1.6)
    again.close()
    assert saved_numbers(tmp_path / "best") == [4]


def test_a_save_that_was_cut_off_is_not_there(tmp_path):
    """Killed between `best` and `latest`, the run finds both again: the same step is saved once more."""
    store = RunState(tmp_path)
    store.save(state_of(2), {}, 1.0)
    store._best.save(4, run_state.named(state_of(4).masters), run_state._rest(state_of(4)), {})
    store.close()
    (tmp_path / "latest/4.orbax-checkpoint-tmp-7").mkdir()
    assert RunState.exists(tmp_path)
    again = RunState(tmp_path)
    assert int(again.restore(state_of(0))[0].step) == 2
    again.save(state_of(4), {}, 2.0)
    again.close()
    assert saved_numbers(tmp_path / "latest") == [2, 4]
    assert not RunState.exists(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="no finished save"):
        RunState(tmp_path / "elsewhere").record()


# What is shown


def shown(out: Path, start: int = 0, **log) -> tuple[show.Show, list[str]]:
    lines: list[str] = []
    out.mkdir(parents=True, exist_ok=True)
    recipe = small.recipe(out, log=dict(progress=False) | log)
    return show.Show(recipe, out, start, out / show.METRICS, log=lines.append), lines


def test_metrics_are_cut_where_a_run_goes_on(tmp_path):
    found, _ = shown(tmp_path)
    for number in (2, 4, 6):
        found(number, {"loss": 1 / number, "heldout": {"acceptance_length": None}})
    found.close()
    path = tmp_path / show.METRICS
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    again, _ = shown(tmp_path, 4)
    assert [record["step"] for record in again.before] == [2, 4]
    again(6, {"loss": 0.5})
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(2, 1 / 2), (4, 1 / 4), (6, 0.5)]
    fresh, _ = shown(tmp_path)
    fresh.close()
    assert path.read_text() == ""


def test_tensorboard_says_that_it_is_off(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    found, lines = shown(tmp_path, tensorboard=True)
    found(1, {"loss": 1.0})
    found.close()
    assert [line for line in lines if "TensorBoard is off" in line]
    assert not list(tmp_path.glob("tensorboard*"))
    found, lines = shown(tmp_path, tensorboard=False)
    found.close()
    assert not lines


def test_tensorboard_writes(tmp_path):
    pytest.importorskip("tensorboard")
    found, lines = shown(tmp_path, tensorboard=True)
    found(1, {"loss": 1.0, "heldout": {"survival": [0.5, 0.25], "acceptance_length": 2.0}})
    found.close()
    assert not lines
    (events,) = (tmp_path / "tensorboard").iterdir()
    for name in (b"loss", b"heldout/survival@1", b"heldout/acceptance_length"):
        assert name in events.read_bytes()


def test_numbers_of_a_nested_record():
    found = show.scalars({"loss": 1, "heldout": {"survival": [0.5, None, 0.25]}, "name": "x", "flag": True})
    assert found == {"loss": 1.0, "heldout/survival@1": 0.5, "heldout/survival@3": 0.25}
