"""The training loop end to end on a tiny fp32 pair: stages, exports, warm starts, refusals, estimates."""

import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_run as small
from compiling import quick
from flax import nnx

from ready_jax import adapter, checkpoint, lora
from ready_jax.config import LoraConfig
from ready_jax.configs import named
from ready_jax.configs.drafter_training import Recipe
from ready_jax.state import init_state
from ready_jax.train import loop, warm_start
from ready_jax.train.anchors import Anchors
from ready_jax.train.batches import rows_for
from ready_jax.train.corpus import Packed
from ready_jax.train.features import features

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def quiet(line: str) -> None:
    pass


class Place:
    """A folder with data; runs by name, each trained once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shards, self.heldout = small.shards(folder), small.heldout(folder)
        self._runs: dict[str, loop.RunResult] = {}

    def recipe(self, name: str, **sections):
        """``start``: the run and folder of the drafter to start from (None: from scratch)."""
        start = sections.pop("start", None)
        if start is not None:
            sections |= dict(drafter=None)
            sections["files"] = dict(from_pretrained=str(self.folder / start)) | sections.get("files", {})
        return small.recipe(self.folder / name, self.shards, **sections)

    def run(self, name: str, *, target=None, say=quiet, **sections) -> loop.RunResult:
        return loop.run(self.recipe(name, **sections), target=target or small.target(), log=say)

    def once(self, name: str, **sections) -> loop.RunResult:
        if name not in self._runs:
            self._runs[name] = self.run(name, **sections)
        return self._runs[name]

    @property
    def base(self) -> loop.RunResult:
        return self.once("base", evaluate=self.heldout)

    @property
    def stage1(self) -> loop.RunResult:
        assert self.base.steps
        return self.once("stage1", start="base/dspark", adapt=small.STAGE1)

    @property
    def stage2(self) -> loop.RunResult:
        assert self.stage1.steps
        at = dict(first=small.STEPS * small.ROWS)
        return self.once("stage2", start="stage1/adapter", adapt=small.STAGE2, rows=at)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with small.quickly(small.cache(tmp_path_factory)):
        yield Place(tmp_path_factory.mktemp("loop"))


def leaves(module) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(module))}


def same(a, b) -> bool:
    a, b = leaves(a), leaves(b)
    return a.keys() == b.keys() and all(np.array_equal(a[path], b[path]) for path in a)


def changed(before, after) -> set[str]:
    """First words of the parameters that both have and that differ."""
    a, b = leaves(before), leaves(after)
    return {str(path[0]) for path in a.keys() & b.keys() if not np.array_equal(a[path], b[path])}


def loaded(folder: Path):
    return checkpoint.load_drafter(folder, dtype="float32")


# Runs


def test_a_base_drafter_is_trained_from_scratch(place):
    run, out = place.base, place.folder / "base"
    assert (run.steps, run.skipped, run.nonfinite, run.out) == (small.STEPS, 0, 0, out)
    assert [line["step"] for line in run.history] == list(range(1, small.STEPS + 1))
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    assert [line["step"] for line in run.evaluations] == [3, 6]
    assert run.best_score == max(line["acceptance_length"] for line in run.evaluations) >= 1
    assert list(small.curve(out).values()) == [line["loss"] for line in run.history]
    assert [line["step"] for line in small.metrics(out) if "heldout" in line] == [3, 6]
    assert {"grad_norm", "supervised", "anchors", "tokens_per_second", "eta_seconds"} <= run.history[-1].keys()
    assert same(loaded(out / "dspark"), run.drafter)
    assert not any(name in str(path) for path in leaves(run.drafter) for name in ("embed_VD", "w_out_DV"))


def test_stage_1_trains_the_reader_alone(place):
    base, run = place.base.drafter, place.stage1
    assert not changed(base, run.drafter)
    fresh = warm_start.starting_drafter(place.recipe("x", start="base/dspark", adapt=small.STAGE1), small.TARGET)
    assert changed(fresh, run.drafter) == {"reader"}
    assert same(loaded(place.folder / "stage1/adapter"), run.drafter)
    assert same(loaded(place.folder / "stage1/merged"), run.drafter)


def test_stage_2_goes_on_from_stage_1_with_lora(place):
    first, run = place.stage1, place.stage2
    assert changed(lora.merge(first.drafter), lora.merge(run.drafter)) >= {"reader", "layers", "w_fuse_ID"}
    assert not changed(place.base.drafter, run.drafter)  # the weights under the updates
    assert any(np.abs(np.asarray(up[...])).max() > 0 for module in lora.adapted(run.drafter) for up in module.up)
    assert same(loaded(place.folder / "stage2/adapter"), run.drafter)
    assert same(loaded(place.folder / "stage2/merged"), lora.merge(run.drafter))


@pytest.mark.slow
def test_the_control_without_states_trains_lora_alone(place):
    base = place.base.drafter
    run = place.once("stateless", start="base/dspark", adapt=small.STATELESS)
    assert run.drafter.reader is None
    assert not changed(base, run.drafter)
    assert changed(base, lora.merge(run.drafter)) == {"layers", "w_fuse_ID"}
    assert same(loaded(place.folder / "stateless/adapter"), run.drafter)
    np.testing.assert_allclose(run.history[0]["loss"], place.stage1.history[0]["loss"], rtol=1e-5)  # both start as base


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["zero", "shuffled", "identity"])
def test_controls_of_the_same_size_train_through_both_stages(place, reads):
    reader = replace(small.READER, reads=reads)
    one = replace(small.STAGE1, reader=reader)
    first = place.run(f"{reads}1", start="base/dspark", adapt=one, optimizer=dict(steps=2))
    own = place.stage1
    np.testing.assert_allclose(first.history[0]["loss"], own.history[0]["loss"], rtol=1e-5)  # W_out starts at zero
    assert first.history[1]["grad_norm"] != own.history[1]["grad_norm"]
    two = replace(small.STAGE2, reader=reader)
    second = place.run(f"{reads}2", start=f"{reads}1/adapter", adapt=two, optimizer=dict(steps=2))
    found = loaded(place.folder / f"{reads}2/adapter")
    assert found.config.reader == reader
    assert same(found, second.drafter)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(optimizer=dict(accumulate=2)), dict(rows=dict(group=2))])
def test_less_memory_makes_the_same_steps(place, changes):
    """Micro-batches, and anchors in groups that are recomputed backward."""
    run = place.run("less_" + "".join(changes), **changes)
    wanted = [line["loss"] for line in place.base.history]
    np.testing.assert_allclose([line["loss"] for line in run.history], wanted, rtol=0, atol=1e-5)


# Where a run starts


@pytest.mark.parametrize("start", ["base/dspark", "stage1/adapter", "stage1/merged", "stage2/adapter", "stage2/merged"])
def test_every_loadable_drafter_can_be_started_from(place, start):
    """With new parts at zero the starting drafter is the pretrained one; what is saved of it loads again."""
    assert place.stage2.steps
    found = warm_start.starting_drafter(place.recipe("x", start=start, adapt=small.STAGE2), small.TARGET)
    old = loaded(place.folder / start)
    assert not changed(old, lora.merge(found) if start.endswith("merged") else found)
    assert found.config.reader == small.READER
    assert lora.config_of(found) == small.LORA
    base, folder, _ = adapter.origin(place.folder / start, None, checkpoint.resolve)
    adapter.save_adapter(found, place.folder / "again", base=base, base_folder=folder)
    assert same(loaded(place.folder / "again"), found)


def test_a_window_changes_no_parameter(place):
    assert place.stage2.steps
    adapt = replace(small.STAGE2, window=16)
    found = warm_start.starting_drafter(place.recipe("x", start="stage2/adapter", adapt=adapt), small.TARGET)
    assert found.config.sliding_window == 16
    assert same(found, loaded(place.folder / "stage2/adapter"))


SMALLER = replace(small.READER, rank=1)


@pytest.mark.parametrize(
    ("start", "changes", "match"),
    [
        (None, dict(adapt=small.STATELESS), "LoRA needs a pretrained base"),
        (None, dict(drafter=None), "a base drafter is required"),
        ("base/dspark", dict(adapt=replace(small.STATELESS, lora=None)), "has no lora"),
        ("base/dspark", dict(adapt=replace(small.STAGE1, reader=None)), "has no reader"),
        ("base/dspark", dict(adapt=replace(small.STAGE1, trains=("readers",))), "needed some of"),
        ("stage1/adapter", dict(adapt=replace(small.STAGE1, reader=SMALLER)), "differs from adapt.reader"),
        ("stage2/adapter", dict(adapt=replace(small.STAGE2, lora=LoraConfig(1, 1.0))), "the recipe asks for"),
        ("nowhere", {}, "no such folder"),
        (None, dict(rows=dict(batch=5, first=7)), "rows.first=7 must be a multiple"),
        (None, dict(rows=dict(batch=25)), "24 packed rows do not fill a batch of 25"),
        (None, dict(mesh=dict(data=3)), "rows.batch=8 must be a multiple of 3"),
        (None, dict(mesh=dict(data=8)), "needs 8 devices, found 4"),
        (None, dict(files=dict(shards="no/*.xz")), "names no file"),
        (None, dict(files=dict(resume_from="no")), "there is no saved state"),
    ],
)
def test_what_cannot_be_trained_is_refused(place, start, changes, match):
    assert place.stage2.steps
    with pytest.raises(ValueError, match=match):
        place.run("refused", **({"start": start} if start else {}) | changes)
    assert not (place.folder / "refused/state/latest").exists() or not any(
        (place.folder / "refused/state/latest").iterdir()
    )


# Data


def test_rows_without_supervision_are_an_error():
    rows = small.packed()
    mask = np.zeros_like(rows.mask_BT)
    mask[:, ::2] = True  # single tokens: no block can start
    for empty in (np.zeros_like(mask), mask):
        with pytest.raises(ValueError, match="nothing would be learned"):
            check_rows(rows._replace(mask_BT=empty))


def test_rows_of_another_tokenizer_are_an_error():
    rows = small.packed()
    rows.token_BT[3, 5] = small.TARGET.vocab_size
    with pytest.raises(ValueError, match="token 100, the target knows 100"):
        check_rows(rows)


def check_rows(rows: Packed):
    with tempfile.TemporaryDirectory() as folder:
        recipe = small.recipe(Path(folder) / "out", small.shards(Path(folder), rows))
        return rows_for(SimpleNamespace(config=small.TARGET), recipe, log=quiet)


def test_the_state_at_an_anchor_is_that_of_a_fresh_prefill_of_its_prefix(place):
    """Of its own segment, and without the anchor's token, which a round reads only later."""
    target, rows = small.target(), small.packed(2)
    edges = np.argmax(rows.segment_BT == 2, axis=1)
    position_BA = np.stack([edges - 3, edges, edges + 1, edges + 11], axis=1)
    anchors = Anchors(jnp.asarray(position_BA), jnp.ones(position_BA.shape, bool))
    config = replace(small.DRAFTER, reader=small.READER)
    token_BT, segment_BT = (jnp.asarray(x, jnp.int32) for x in (rows.token_BT, rows.segment_BT))
    found = jax.jit(features, static_argnums=1)(target, config, token_BT, segment_BT, anchors)

    begin_BA = np.where(position_BA < edges[:, None], 0, edges[:, None])
    prefixes = [
        rows.token_BT[b, begin:at].tolist()
        for b in range(2)
        for begin, at in zip(begin_BA[b], position_BA[b], strict=True)
    ]
    token_NT, num_N = tiny.padded(prefixes, 32)
    state = init_state(target.config, len(prefixes), 64, dtype="float32")
    fresh = quick(target.prefill)(token_NT, state, num_N)[1]
    for layer in small.READER.state_layers:
        found_N = np.asarray(found.states[layer]).reshape((len(prefixes),) + found.states[layer].shape[2:])
        np.testing.assert_allclose(found_N, fresh.recurrent[layer], atol=1e-5, rtol=0)
        assert float(np.abs(found_N[3]).max()) > 1e-2


# Estimates


def drafters() -> list:
    """Recipes with what they start from at hand: one of nano and one without weights quickly, the others too."""
    names = [name for name, make in named.recipes().items() if type(make()) is Recipe and name != "nano_ready_stage2"]
    fast = ("nano_ready_stage1", "qwen3_8_27b_ready_stage2")
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in sorted(names)]


@pytest.mark.parametrize("name", drafters())
def test_a_dry_run_allocates_nothing(name, capsys, monkeypatch):
    """Of every recipe in `configs/`: parameters, memory, disk and time, where there are weights and where not."""
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr(sys, "argv", ["loop", name, "--dry-run", "--device-kind", "NVIDIA H200"])
    monkeypatch.setattr(loop, "run", pytest.fail)
    before = {id(x) for x in jax.live_arrays()}
    loop.main()
    assert {id(x) for x in jax.live_arrays()} <= before
    said = capsys.readouterr().out
    for word in (r"target [\d,]+ parameters, drafter [\d,]+", "memory per device about", "time about", "disk", "TFLOP"):
        assert re.search(word, said), word
