"""Field cases E: memory, compile time at depth and across processes, devices asked for, arrays from several meshes."""

import json
import os
import subprocess
import sys
import time

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType

import ready_jax
from ready_jax import checkpoint, sharding
from ready_jax.config import FULL, LINEAR
from ready_jax.pair import Pair
from ready_jax.state import init_state

pytestmark = pytest.mark.usefixtures("quick_programs")
TWO = (LINEAR, FULL)
PROMPT = tiny.prompt(11)


def parts():
    target = tiny.target(layer_types=TWO)
    return target, tiny.drafter(config=target.config, taps=(-1, 0), num_target_layers=2)


# E03


def test_the_memory_report_has_target_drafter_and_caches():
    target, drafter = parts()
    report = Pair(target, drafter).memory()
    for name, part in (("target", target), ("drafter", drafter)):
        assert report[name] == sum(leaf.nbytes for leaf in jax.tree.leaves(part)) > 0
    for drafting in (drafter, None):
        held = [init_state(target.config, 3, 64, dtype=target.dtype)]
        held += [drafting.init_context(3, 64)] if drafting else []
        assert Pair(target, drafting).cache_bytes(3, 64) == sum(leaf.nbytes for leaf in jax.tree.leaves(held))


# E05


def deep(layers: int):
    return tiny.target(layer_types=(LINEAR, LINEAR, LINEAR, FULL) * (layers // 4), hidden_size=32)


@pytest.mark.slow
def test_compile_time_grows_at_most_linearly_with_depth():
    """Processor time, so that a busy machine does not matter."""
    cost = {}
    for layers in (8, 64):
        model, (begin, decode) = deep(layers), tiny.programs()
        token_BT, num_B = tiny.padded([PROMPT])
        shared = dict(target=model, drafter=None, limits=tiny.limits(4))
        run = begin(token_BT=token_BT, num_B=num_B, capacity=64, keep_logits=False, **shared)
        before = time.process_time()
        decode(run=run, max_rounds=jnp.int32(0), **shared)
        cost[layers] = time.process_time() - before
        assert decode.compile_seconds > 0
    assert cost[64] < 8 * cost[8], cost


def test_taps_and_states_of_every_depth():
    model = deep(32)
    taps = (-1, 0, 15, 30)

    def prefill(model, token_BT, num_B):
        return model.prefill(token_BT, init_state(model.config, 1, 64, dtype=model.dtype), num_B, taps=taps)

    out, state = jax.eval_shape(prefill, model, *tiny.padded([PROMPT]))
    assert out.taps_BTED.shape == (1, 32, 4, 32)
    assert [i for i, s in enumerate(state.recurrent) if s is not None] == list(model.config.linear_layers)
    assert state.recurrent[30].shape == (1, 6, 16, 16)


# E05 and E11: another process

PROGRAM = """
import json, sys
import ready_jax
folder, cache = sys.argv[1:]
pair = ready_jax.load(folder, dtype="float32", compile_cache=cache or None)
result = pair.generate([1, 2, 3], max_new_tokens=8, stop_token_ids=())
seconds = sum(program.compile_seconds for program in (pair._begin, pair._decode))  # XLA's part: what a cache saves
print(json.dumps([result.token_ids, seconds, result.timing.num_compiles]))
"""


def test_a_second_process_finds_the_compiled_programs_and_without_the_flag_nothing_is_written(tmp_path, golden):
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    hidden = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | dict(HOME=str(home))

    def run(cache, **changes):
        command = [sys.executable, "-c", PROGRAM, str(golden / "T1_tiny" / "checkpoint"), str(cache)]
        done = subprocess.run(command, cwd=home, env=environment | changes, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    def ours(cache):
        names = [file.name for file in cache.iterdir()]
        return {n for n in names if n.startswith(("jit__start-", "jit__continue-")) and n.endswith("-cache")}

    flags = f"{environment['XLA_FLAGS']} --xla_backend_optimization_level=0"  # of this one nothing is timed
    without, first = run("", XLA_FLAGS=flags), run(cache)
    assert list(home.rglob("*")) == []
    written = ours(cache)
    assert len(written) == 2
    second = run(cache)
    assert ours(cache) == written
    assert without[0] == first[0] == second[0]
    assert first[2] == second[2] == 2
    assert second[1] < 0.2 * first[1], (first, second)


# E07


def test_a_large_model_is_refused_on_a_cpu_before_anything_is_held(tmp_path, monkeypatch):
    """The folder of a 27B model in outline: a header that names 54 GB, in a file that takes no room."""
    stored = 54 * 10**9
    header = {"model.language_model.embed_tokens.weight": dict(dtype="U8", shape=[stored], data_offsets=[0, stored])}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + stored)
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="qwen3_5_text")))
    reached = []
    monkeypatch.setattr(checkpoint, "load_target", lambda *a, **k: reached.append(a))
    with pytest.raises(RuntimeError, match=r"54\.0 GB of weights would run on the CPU.*cuda13.*device='cpu'"):
        ready_jax.load(tmp_path)
    assert not reached


def test_a_large_hub_model_is_refused_before_it_is_downloaded(monkeypatch):
    class File:
        def __init__(self, rfilename, size):
            self.rfilename, self.size = rfilename, size

    class Info:
        siblings = [File(f"model-{i}-of-14.safetensors", 4 * 10**9) for i in range(14)] + [File("x.bin", 10**12)]

    monkeypatch.setattr(huggingface_hub, "model_info", lambda *a, **k: Info())
    monkeypatch.setattr(checkpoint, "_download", lambda *a: pytest.fail("it was downloaded"))
    with pytest.raises(RuntimeError, match=r"56\.0 GB of weights would run on the CPU"):
        ready_jax.load("someone/large-27b")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_not_replaced(golden):
    with pytest.raises(RuntimeError, match=r"'gpu' was asked for(.|\n)*pip install 'ready-jax\[cuda13\]'"):
        ready_jax.load(golden / "T1_tiny" / "checkpoint", device="gpu")


# E09


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        pytest.param((1, 4), AxisType.Explicit, id="1x4-explicit"),
        pytest.param((2, 2), AxisType.Auto, id="2x2-auto"),
        pytest.param((1, 4), AxisType.Auto, marks=pytest.mark.slow, id="1x4-auto"),
        pytest.param((2, 2), AxisType.Explicit, marks=pytest.mark.slow, id="2x2-explicit"),
    ],
)
def test_a_mesh_changes_no_token(shape, axes):
    """Prompts in every container, inside and outside a caller's ``set_mesh``; one set of programs for all."""
    target = tiny.target(layer_types=TWO, vocab_size=100, linear_num_value_heads=8)
    drafter = tiny.drafter(config=target.config, taps=(-1, 0), num_target_layers=2)
    wanted = Pair(target, drafter).generate(PROMPT, max_new_tokens=16, stop_token_ids=()).token_ids
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(axes,) * 2)
    pair = Pair(sharding.place(target, mesh), sharding.place(drafter, mesh), mesh=mesh)
    prompts = (PROMPT, np.array(PROMPT), jax.device_put(jnp.array(PROMPT), jax.devices()[0]))
    for prompt in prompts:
        assert pair.generate(prompt, max_new_tokens=16, stop_token_ids=()).token_ids == wanted
    with jax.set_mesh(mesh):
        for prompt in prompts:
            assert pair.generate(prompt, max_new_tokens=16, stop_token_ids=()).token_ids == wanted
    seen = []
    pair.generate(PROMPT, max_new_tokens=16, stop_token_ids=(), progress=lambda done, total: seen.append(done))
    assert len(seen) > 2
    assert pair._cost()[1] == 2


def test_a_single_device_needs_no_mesh_and_minds_none():
    pair = Pair(*parts())
    wanted = pair.generate(PROMPT, max_new_tokens=16, stop_token_ids=()).token_ids
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"))):
        assert pair.generate(PROMPT, max_new_tokens=16, stop_token_ids=()).token_ids == wanted


def test_target_and_drafter_on_different_meshes_are_told_apart():
    target, drafter = parts()
    one, two = (jax.make_mesh(shape, ("data", "model")) for shape in ((1, 4), (2, 2)))
    placed = sharding.place(target, one)
    with pytest.raises(ValueError, match=r"target lives on a mesh of .*'model': 4.*drafter on a mesh of .*'model': 2"):
        Pair(placed, sharding.place(drafter, two))
    with pytest.raises(ValueError, match=r"the drafter on one device, without a mesh"):
        Pair(placed).with_drafter(drafter)
