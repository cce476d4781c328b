"""The benchmark on the look-alike preset, and its parts: presets, random weights, launch counter, comparison."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from ready_jax import hlo
from ready_jax.config import FULL, LINEAR
from ready_jax.configs.qwen3_8_27b import LOOKALIKE, PRESETS, QWEN3_8_27B
from ready_jax.decode import Decoding
from ready_jax.drafter import Drafter
from ready_jax.random_weights import random_memory, random_target
from ready_jax.recorded import Recorded
from ready_jax.serve import bench
from ready_jax.serve.exact import Comparison
from ready_jax.state import init_state
from ready_jax.target import Target

SMALL = ["--preset", "lookalike", "--context", "24", "--turns", "1", "3", "--windows", "1", "--ceiling-mib", "1"]
SMALL += ["--rounds", "65", "--kernel-context", "64", "--kernel-turns", "1", "2"]
SMALL += ["--fp8-draft", "--reader-slope", "--ablations"]


def run(folder, *more: str) -> dict:
    file = folder / "bench.json"
    status = bench.main([*SMALL, "--json", str(file), *more])
    record = json.loads(file.read_text())
    assert (status, record["errors"]) == (0, {})
    return record


def test_the_record_has_its_keys_and_every_pair_of_acceptance_counts_is_compared(tmp_path, capsys):
    record = run(tmp_path, "--only", "autoregressive", "exact", "--profile", "--turns", "1", "41", "--windows", "3")
    assert record["detail"]["autoregressive"]["kernels"] == [], "the profiler sees no GPU here"
    assert set(bench.KEYS) <= set(record)
    assert record["rounds_compared"] == record["bit_identical_rounds"] == 65
    assert record["acceptance_pairs_covered"] == 64
    assert record["exactness"]["mismatches"] == record["autoregressive_program"]["mismatches"] == 0
    assert record["exactness"]["logits_compared"] > 0
    assert set(record["acceptance"]["rounds"]) == set("01234567")
    assert record["autoregressive_ms"] > 0
    assert record["compile_seconds"] > 0
    assert record["ready_round_ms"] is None, "this step was not asked for"
    assert (record["preset"], record["drafter"], record["context"], record["batch"]) == ("lookalike", "v2", 24, 1)
    assert {"device_kind", "versions", "commit", "xla_options"} <= set(record)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["device", "build", "autoregressive", "exact"]


@pytest.mark.slow
def test_every_step_runs(tmp_path):
    record = run(tmp_path)
    missing = {key for key in bench.KEYS if record[key] is None}
    others = {"fla_prefill_16k_ms", "decode_attention_16k_us", "gated_delta_prefill_16k_ms", "prefill_2048_ms"}
    assert missing - {"peak_gib"} == others | {"peak_gib_16k"}, "other lengths have other names; the CPU has no peak"
    assert record["filled_by"] == "prefill in chunks of 24"
    detail = record["detail"]
    assert detail["ready"]["bytes"]["total"] > detail["ready fp8 draft"]["bytes"]["total"]
    assert detail["ready"]["bytes"]["total"] > detail["dspark"]["bytes"]["total"]
    changes = bench.ablations(LOOKALIKE, 2)
    assert list(record["propose_ms"]) == ["no reader", *changes]
    assert list(record["ablation_round_ms"]) == changes
    assert set(detail) == {
        "autoregressive",
        "dspark",
        "ready",
        "ready fp8 draft",
        "1 readers",
        "5 readers",
        "9 readers",
    }


@pytest.mark.parametrize("batch", [1, 3])
def test_walks_hold_every_pair_in_every_row(batch: int):
    for walk in bench.walks(7, 65, batch):
        assert len(walk) == 65
        assert len(set(pairwise(walk))) == 64


def test_a_failing_step_is_recorded_and_the_others_run(tmp_path, monkeypatch):
    def broken(self):
        raise RuntimeError("out of memory\nand more")

    for name in ("build", "exact"):
        monkeypatch.setattr(bench.Bench, name, lambda self: None)
    monkeypatch.setattr(bench.Bench, "verify", broken)
    file = tmp_path / "bench.json"
    assert bench.main([*SMALL, "--json", str(file), "--only", "verify", "exact"]) == 1
    record = json.loads(file.read_text())
    assert record["errors"] == {"verify": "RuntimeError: out of memory"}
    assert set(record["seconds"]) == {"build", "verify", "exact"}


@pytest.mark.parametrize("words", [["rank"], ["depth=3"], ["side=left"]])
def test_a_wrong_reader_is_refused(words: list[str]):
    with pytest.raises(ValueError, match="--reader"):
        bench.reader_config(LOOKALIKE, "v2", words)


def test_readers_by_words():
    config = bench.reader_config(QWEN3_8_27B, "v2", ["rank=128", "layers=2,62", "inject=0,2,4", "side=before"])
    assert config is not None
    assert (config.rank, config.state_layers, config.inject_layers) == (128, (2, 62), (0, 2, 4))
    assert config.inject_side == "before_attention"
    assert bench.reader_config(QWEN3_8_27B, "v2", []) == QWEN3_8_27B.reader()
    assert bench.reader_config(QWEN3_8_27B, "v2", ["none"]) is None


# The comparison


def decoding(**changes) -> Decoding:
    """Two rounds of one row by hand: 3 and 2 tokens after the first, 5 tokens in memory."""
    config = LOOKALIKE.target
    state = replace(random_memory(init_state(config, 1, 16), 5), length_B=jnp.array([5]))
    logits = jax.random.normal(jax.random.key(0), (1, 8, config.vocab_size))
    counts = jnp.array([[3, 2, 0, 0, 0, 0, 0, 0]])
    fields: dict[str, Any] = dict(
        state=state, context=None, anchor_B=jnp.array([5]), token_BN=jnp.arange(8)[None], num_emitted_B=jnp.array([6]),
        num_rounds_B=jnp.array([2]), finish_B=jnp.array([2]), proposed_BN=counts, accepted_BN=counts,
        emitted_BN=counts, logits_BNV=logits,
    )  # fmt: skip
    return Decoding(**(fields | changes))


def compared(found: Decoding, wanted: Decoding) -> tuple[int, dict[str, int]]:
    comparison = Comparison()
    comparison.add(found, wanted)
    return bench.identical_rounds(found, wanted, comparison), comparison.mismatches


def test_planted_differences_are_found():
    """One bit of a logit in the second round, of a state, of a visible value; nothing for an invisible one."""
    wanted = decoding()
    assert compared(decoding(), wanted) == (2, dict(tokens=0, logits=0, lengths=0, memory=0))
    logits = wanted.logits_BNV
    assert logits is not None
    planted = logits.at[0, 4, 7].set(jnp.nextafter(logits[0, 4, 7], jnp.inf))
    assert compared(decoding(logits_BNV=planted), wanted) == (1, dict(tokens=0, logits=1, lengths=0, memory=0))
    state = wanted.state
    minus_zero = [None if s is None else s.at[0, 1, 2, 3].set(-0.0) for s in state.recurrent]
    zero = [None if s is None else s.at[0, 1, 2, 3].set(0.0) for s in state.recurrent]
    pair = (decoding(state=replace(state, recurrent=tuple(s))) for s in (minus_zero, zero))
    assert compared(*pair) == (0, dict(tokens=0, logits=0, lengths=0, memory=3))
    for slot, differs in ((4, 1), (5, 0)):
        value = [None if v is None else v.at[0, slot, 0, 0].set(9) for v in state.value]
        found = compared(decoding(state=replace(state, value=tuple(value))), wanted)
        assert found[1]["memory"] == differs


# What a program launches

TEXT = """
HloModule jit_f, is_scheduled=true

%fused (p.0: f32[8,512]) -> f32[8,512] {
  %p.0 = f32[8,512]{1,0} parameter(0)
  ROOT %exp.0 = f32[8,512]{1,0} exponential(%p.0)
}

%step (arg.1: (s32[], f32[8,512])) -> (s32[], f32[8,512]) {
  %arg.1 = (s32[], f32[8,512]{1,0}) parameter(0)
  %a = f32[8,512]{1,0} get-tuple-element(%arg.1), index=1
  %f = f32[8,512]{1,0} fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="while (x) = y"}
  ROOT %t = (s32[], /*index=1*/f32[8,512]{1,0}) tuple(%arg.1, %f)
}

%few (arg.2: (s32[], f32[8,512])) -> pred[] {
  %arg.2 = (s32[], f32[8,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg.2), index=0
  ROOT %lt = pred[] fusion(%i), kind=kLoop, calls=%fused
}

%taken (arg.3: f32[8,512]) -> f32[8,512] {
  %arg.3 = f32[8,512]{1,0} parameter(0)
  %w = (s32[], f32[8,512]{1,0}) while(%arg.3), condition=%few, body=%step, backend_config={"known_trip_count":{"n":"8"}}
  ROOT %out = f32[8,512]{1,0} get-tuple-element(%w), index=1
}

%other (arg.4: f32[8,512]) -> f32[8,512] {
  %arg.4 = f32[8,512]{1,0} parameter(0)
  ROOT %copy.1 = f32[8,512]{1,0} copy(%arg.4)
}

%round (arg.5: (f32[8,512], pred[])) -> (f32[8,512], pred[]) {
  %arg.5 = (f32[8,512]{1,0}, pred[]) parameter(0)
  %x = f32[8,512]{1,0} get-tuple-element(%arg.5), index=0
  %y = (f32[8,512]{1,0}, s8[4096]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  %z = f32[8,512]{1,0} custom-call(%y), custom_call_target="__gpu$xla.gpu.triton"
  %s = ((f32[8,512]{1,0}), f32[8,512]{1,0}) fusion-start(%z), kind=kLoop, calls=%fused
  %d = f32[8,512]{1,0} fusion-done(%s)
  %b = f32[4096]{0} bitcast(%d)
  %c = f32[8,512]{1,0} conditional(%b, %d, %d), branch_computations={%other, %taken}
  ROOT %t.2 = (f32[8,512]{1,0}, pred[]) tuple(%c, %b)
}

%more (arg.6: (f32[8,512], pred[])) -> pred[] {
  %arg.6 = (f32[8,512]{1,0}, pred[]) parameter(0)
  ROOT %p = pred[] get-tuple-element(%arg.6), index=1
}

ENTRY %main (x.0: f32[8,512]) -> f32[8,512] {
  %x.0 = f32[8,512]{1,0} parameter(0)
  %copy.0 = f32[8,512]{1,0} copy(%x.0)
  %while.0 = (f32[8,512]{1,0}, pred[]) while(%copy.0), condition=%more, body=%round
  ROOT %r = f32[8,512]{1,0} get-tuple-element(%while.0), index=0
}
"""


def test_launches_are_counted():
    inside = {"custom-call __cublas$lt$matmul": 1, "custom-call __gpu$xla.gpu.triton": 1, "fusion": 1 + 8 * 2}
    assert hlo.loop_launches(TEXT) == inside
    assert hlo.launches(TEXT) == inside | {"copy": 1}
    assert hlo.launches(TEXT, "other") == {"copy": 1}
    assert not hlo.loop_launches("")


def test_a_fusion_around_a_collective_counts_as_one():
    text = """%sum (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %all-reduce.1 = f32[8]{0} all-reduce(%p.1), replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %psum_fusion = f32[8]{0} fusion(%a), kind=kCustom, calls=%sum
}
"""
    assert hlo.launches(text) == {"all-reduce": 1}


def test_a_compiled_program_is_read():
    def f(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: jnp.sin(x @ x) + 1, x)

    text = jax.jit(f).lower(jnp.ones((8, 8))).compile().as_text() or ""
    assert hlo.loop_launches(text).total() >= 2


# Presets and random weights


def abstract(config, module: Any = Target) -> Any:
    return nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0)))


def count(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_presets_have_the_published_parameter_counts():
    padding = 48 * 32 * 5120  # fused columns 16480 -> 16512
    assert count(abstract(QWEN3_8_27B.target)) - padding == 26_895_998_464
    assert count(abstract(QWEN3_8_27B.drafter("v1"), Drafter)) == 1_359_284_737
    assert count(abstract(QWEN3_8_27B.drafter("v2"), Drafter)) == 1_857_358_337
    readers = {
        rank: abstract(QWEN3_8_27B.drafter("v2", QWEN3_8_27B.reader(rank=rank)), Drafter).reader for rank in (8, 64)
    }
    assert count(readers[8]) == 5_661_440
    assert round(count(readers[64]) / 1e6, 1) == 35.9


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_every_ablation_fits_its_drafter(preset):
    for revision in preset.drafters:
        for reader in preset.ablation(revision).values():
            assert preset.drafter(revision, reader).inject_layers
            assert set(reader.state_layers) <= set(preset.target.linear_layers)
    with pytest.raises(ValueError, match="v3"):
        preset.drafter("v3")


def test_traffic_of_a_round():
    """The bytes of the roofline: 51.3 GB of weights, 0.3 of states, 1.07 of keys and values at 16k, 0.89 of Markov."""
    target = abstract(QWEN3_8_27B.target)
    drafter = abstract(QWEN3_8_27B.drafter("v1", QWEN3_8_27B.reader()), Drafter)
    found = {name: round(n / 1e9, 2) for name, n in bench.traffic(target, drafter, 16384).items()}
    assert found == dict(
        target_weights=51.26, states=0.31, keys_values=1.07, draft_weights=2.46, draft_head=2.54, markov=0.89,
        draft_context=0.34, reader=0.02, total=58.9,
    )  # fmt: skip
    assert bench.traffic(target, None, 16384)["total"] == pytest.approx(52.64e9, rel=1e-3)


def test_random_weights_have_the_constructors_structure_and_scales():
    config = tiny.target_config(layer_types=(LINEAR, FULL, LINEAR))
    model = random_target(config, seed=3)
    assert jax.tree.structure(model) == jax.tree.structure(abstract(config))
    assert not np.asarray(model.layers[1].norm_in_D[...]).any()
    first, _, third = (np.asarray(layer.mlp.w_in_DI[...], np.float32) for layer in model.layers)
    assert first.std() == pytest.approx(config.hidden_size**-0.5, rel=0.05)
    assert not np.array_equal(first, third)
    again = random_target(config, seed=3)
    assert all(map(np.array_equal, *(map(np.asarray, jax.tree.leaves(m)) for m in (model, again))))


def test_a_step_that_fails_is_kept_and_the_record_is_on_the_disk(tmp_path, capsys):
    def fails():
        raise ValueError("found 3")

    steps, file = Recorded(), tmp_path / "new" / "record.json"
    steps.record, steps.file = dict(errors={}, seconds={}, old=1), file
    steps.attempt("bad", fails)
    steps.attempt("good", lambda: steps.record.update(new=2.5))
    record = json.loads(file.read_text())
    assert record["errors"] == {"bad": "ValueError: found 3"}
    assert (record["new"], set(record["seconds"])) == (2.5, {"bad", "good"})
    bad, good = capsys.readouterr().out.splitlines()
    assert bad.startswith("bad: FAILED ValueError: found 3 in ")
    assert good.startswith("good: done in ")
    assert good.endswith("; new 2.5"), "what did not change is not shown"
