"""The whole round at full size, compiled for GPUs that are not here: copies, graphs and launches, not times.

Needs `jax[cuda13]` (its compiler, no GPU and no driver): `python -m pytest -m slow tests/test_compile_gpu.py`. XLA's
device descriptions lie in `xla_targets/`. Nothing is autotuned without a device, so which matrix kernels were chosen
says nothing here.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
CAPACITY = 3072
#: A kernel that spills registers is an error of compilation.
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
#: What a round over several devices needs to stay one graph; not XLA's default.
ONE_GRAPH = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES"}


def in_12_bits(terms: int, columns: int, rare: int = 16):
    """A description of a matrix, with as many rare weights in a column as a Gaussian one has."""
    import jax
    import jax.numpy as jnp

    from ready_jax.layers import Coded

    sizes = (columns // 16, terms // 64, 3, 32, 4), (columns // 16, 4), (columns // 16, rare, 16)
    described: Any = [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]
    return Coded(*described)


def compiled_round(device: str, preset_name: str, folder: str, devices: int, bits: int) -> dict:
    """What XLA makes of `decode` with the drafter v2 and the final reader, weights in 16 or in 12 bits; leaves its dump
    in `folder`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.experimental import topologies

    from ready_jax import hlo, lossless, tensor_parallel
    from ready_jax.configs.qwen3_8_27b import PRESETS
    from ready_jax.decode import Decoding, Limits, decode
    from ready_jax.drafter import Drafter
    from ready_jax.kernels import coded_weights, dispatch
    from ready_jax.programs import Program
    from ready_jax.random_weights import random_drafter, random_target
    from ready_jax.state import init_state
    from ready_jax.target import Target

    description = (HERE / "xla_targets" / f"{device}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology=f"1x1x{devices}")
    there = topology.devices[0]
    over = jax.sharding.Mesh(np.array(topology.devices), ("model",))
    preset = PRESETS[preset_name]

    def arguments():
        drafts = preset.drafter("v2", preset.reader())
        if devices == 1:
            target, drafter = Target(preset.target, rngs=nnx.Rngs(0)), Drafter(drafts, rngs=nnx.Rngs(0))
        else:
            target, drafter = random_target(preset.target, mesh=over), random_drafter(drafts, mesh=over)
        one_B, counters = jnp.ones((1,), jnp.int32), jnp.zeros((1, 256), jnp.int32)
        run = Decoding(
            state=init_state(target.config, 1, CAPACITY), context=drafter.init_context(1, CAPACITY), anchor_B=one_B,
            token_BN=counters, num_emitted_B=one_B, num_rounds_B=one_B, finish_B=one_B, proposed_BN=counters,
            accepted_BN=counters, emitted_BN=counters, logits_BNV=None,
        )  # fmt: skip
        limits = Limits(one_B, jnp.zeros((8,), jnp.int32), one_B, jnp.float32(0), jnp.int32(0))
        return dict(target=target, drafter=drafter, run=run, limits=limits, max_rounds=jnp.int32(0))

    abstract = jax.eval_shape(arguments)
    if bits == 12:
        for model in (abstract["target"], abstract["drafter"]):
            for group, _, module, name in lossless.large_matrices(model):
                weight = getattr(module, name)
                terms, columns = weight.shape
                if preset_name == "lookalike" and coded_weights.why_not(terms, columns, "bfloat16"):
                    continue  # too narrow to shrink
                stored = nnx.Param(
                    in_12_bits(terms, columns, 96 if group == "fuse" else 16)
                )  # 96: some wait for a loop
                setattr(module, name, nnx.data(stored) if group == "head" else stored)
    one = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), abstract)
    specs = one if devices == 1 else tensor_parallel.specs(abstract, over, 1)
    flat = zip(jax.tree.leaves(abstract), jax.tree.leaves(specs), strict=True)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(over, spec)) for x, spec in flat]
    abstract = jax.tree.unflatten(jax.tree.structure(abstract), placed)
    # Pallas asks the mesh for the device that it lowers to.
    kind = jax.sharding.AbstractDevice(device_kind=there.device_kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    # Our kernels are the same in 12 bits, but of XLA's own products, not tuned without a device, one spills there.
    checked = NO_SPILLS if bits == 16 else {}
    program = Program(decode, options=checked | {"xla_dump_to": folder} | (ONE_GRAPH if devices > 1 else {}))
    with dispatch.platform("gpu"), jax.sharding.use_abstract_mesh(mesh):
        compiled = program.compiled(**abstract)
    launches = hlo.loop_launches(compiled.as_text() or "")
    (thunks,) = Path(folder).glob("*jit_decode*thunk_sequence_after_thunk_passes.txt")
    return dict(
        device=there.device_kind,
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
        round_thunks=round_thunks(thunks.read_text()),
        launches=launches.total(),
        collectives=sum(count for kind, count in launches.items() if kind in hlo.COLLECTIVES),
        launches_by_kind=dict(launches.most_common()),
        trace_seconds=round(program.trace_seconds, 1),
        compile_seconds=round(program.compile_seconds, 1),
    )


def compiled_prefill(device: str, preset_name: str) -> dict:
    """2048 tokens through layers of each kind, one matrix in 12 bits, with the states of training inside, compiled
    without spills (which the decoder of 12 bits is not asked about: XLA does not compile it)."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.experimental import topologies

    from ready_jax.config import FULL, LINEAR
    from ready_jax.configs.qwen3_8_27b import PRESETS
    from ready_jax.kernels import dispatch
    from ready_jax.programs import Program
    from ready_jax.state import init_state
    from ready_jax.target import Target

    description = (HERE / "xla_targets" / f"{device}.txtpb").read_text()
    there = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1").devices[0]
    config = replace(PRESETS[preset_name].target, layer_types=(LINEAR, LINEAR, FULL))

    def prefill(target, state, token_BT, num_B, states_at_BA):
        out, state = target.prefill(token_BT, state, num_B, states_at_BA=states_at_BA, state_layers=(0,))
        return out.hidden_BTD[:, -1], out.states, state

    def arguments():
        target, one_B = Target(config, rngs=nnx.Rngs(0)), jnp.ones((1,), jnp.int32)
        token_BT, states_at_BA = jnp.zeros((1, 2048), jnp.int32), jnp.zeros((1, 16), jnp.int32)
        memory = init_state(config, 1, CAPACITY)
        return dict(target=target, state=memory, token_BT=token_BT, num_B=one_B, states_at_BA=states_at_BA)

    placed, abstract = jax.sharding.SingleDeviceSharding(there), jax.eval_shape(arguments)
    mlp = abstract["target"].layers[0].mlp
    mlp.w_out_FD = nnx.Param(in_12_bits(*mlp.w_out_FD.shape))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), abstract)
    kind = jax.sharding.AbstractDevice(device_kind=there.device_kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    with dispatch.platform("gpu"), jax.sharding.use_abstract_mesh(mesh):
        text = Program(prefill, options=NO_SPILLS).compiled(**abstract).as_text() or ""
    names = sorted(set(re.findall(r'"?name"?[ :=\\]+"?(gated_delta_prefill_\w+|causal_conv|prefill_attention)', text)))
    return dict(device=there.device_kind, kernels=names, by_triton=text.count('custom_call_target="triton_kernel_call'))


def round_thunks(text: str) -> list[str]:
    """Kinds of the thunks that the body of the outermost loop consists of; what a graph holds is not listed."""
    _, _, loop = text.partition("kWhile")
    body = loop.partition("\n  body:\n")[2]
    return re.findall(r"^    \d+: (k\w+)", re.split(r"^\d+: ", body, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE)


def test_the_thunks_of_a_round_are_read():
    text = """000: kCommandBuffer [source | next=002 (1)]
    001: kCopy [source | sink] kCopy
002: kWhile         [prev=000 (1) | next=009 (1)]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion
  body:
    000: kCommandBuffer [source       | next=112 (1)]
        026: kCopy         [source       | next=027 (1) ] kCopy
    007: kCustomKernel [source | sink] loop_add_fusion
009: kCopy [source | sink] kCopy
    010: kGemm [source | sink] kGemm
"""
    assert round_thunks(text) == ["kCommandBuffer", "kCustomKernel"]


def elsewhere(*arguments) -> dict:
    """The record of this file run with these arguments, in a process of its own: the plugin must not look for a driver,
    and 64 layers leave a lot behind."""
    environment = os.environ | dict(
        JAX_PLATFORMS="cpu",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        PYTHONPATH=f"{HERE.parent}:{os.getenv('PYTHONPATH', '')}",
    )
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


needs_compiler = pytest.mark.skipif(
    find_spec("jax_cuda13_plugin") is None, reason="needs the compiler of jax[cuda13]; no GPU"
)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("preset", ["lookalike", "qwen3_8_27b"])
@pytest.mark.parametrize(
    ("device", "devices", "bits"), [("h200", 1, 16), ("b200", 1, 16), ("h200", 2, 16), ("h200", 1, 12), ("b200", 1, 12)]
)
def test_the_whole_round_is_one_graph_and_copies_no_weights(device: str, devices: int, bits: int, preset: str, capsys):
    """In 16 bits no kernel that XLA compiles spills registers, either."""
    found = elsewhere(device, preset, devices, bits)
    with capsys.disabled():
        sys.stdout.write(f"\n{json.dumps(found)}\n")
    assert found["temporary_bytes"] < 1e9, "a temporary of this size is a copy of weights or of all states"
    assert found["round_thunks"] == ["kCommandBuffer"], "a round is one graph, and the host adds nothing to it"
    assert found["launches"] - found["collectives"] < (1000 if devices == 1 else 1050), found["launches_by_kind"]
    assert found["collectives"] < (150 if devices > 1 else 1)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("device", ["h200", "b200"])
def test_prefill_compiles_to_its_kernels_without_spills(device: str):
    found = elsewhere(device, "qwen3_8_27b")
    names = ["causal_conv", "gated_delta_prefill_solve", "gated_delta_prefill_walk", "prefill_attention"]
    assert found["kernels"] == names
    assert found["by_triton"] == 1, "the one matrix in 12 bits is decoded once"


if __name__ == "__main__":
    _, asked_device, asked_preset, *numbers = sys.argv
    if not numbers:
        sys.stdout.write(json.dumps(compiled_prefill(asked_device, asked_preset)) + "\n")
        sys.exit()
    with tempfile.TemporaryDirectory() as dump:
        sys.stdout.write(json.dumps(compiled_round(asked_device, asked_preset, dump, *map(int, numbers))) + "\n")
