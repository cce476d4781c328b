"""`python -m ready_jax.serve.links`: whether the devices of this host reach each other, and how fast, by collectives.

Bandwidth is that of one direction of a device's link ("bus bandwidth" of NCCL's tests): an all-reduce of n bytes over
d devices moves 2 (d - 1) / d n through it, an all-gather of n bytes in all (d - 1) / d n, a copy n. The short
all-reduce has the size of those of a tensor-parallel decoding round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ready_jax import provenance
from ready_jax.serve.bench_kernels import slope

AXIS = "device"
#: Bytes of a sum over 8 rows of 5120 numbers in bf16.
SHORT = 8 * 5120 * 2


def check(mesh: Mesh) -> dict[str, bool]:
    """Whether a sum, a gather and a copy to the neighbour give what they must."""
    count = mesh.size
    put = NamedSharding(mesh, PartitionSpec(AXIS))
    own_N = jax.device_put(jnp.arange(count, dtype=jnp.int32), put)
    found = {
        "all_reduce": (lambda x: jax.lax.psum(x, AXIS), np.full(count, count * (count - 1) // 2)),
        "all_gather": (lambda x: jax.lax.all_gather(x, AXIS, tiled=True), np.tile(np.arange(count), count)),
        "copy": (around(count), np.roll(np.arange(count), 1)),
    }
    return {
        name: bool((np.asarray(on(mesh, function)(own_N)) == wanted).all())
        for name, (function, wanted) in found.items()
    }


def around(count: int) -> Callable:
    """Every device's array to the next one."""
    return lambda x: jax.lax.ppermute(x, AXIS, [(i, (i + 1) % count) for i in range(count)])


def on(mesh: Mesh, function: Callable) -> Callable:
    spread = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False))


def seconds(mesh: Mesh, step: Callable, num_bytes: int, turns: tuple[int, int], windows: int) -> float:
    """Of ``step`` on an array of so many bytes on each device, from loops of two lengths inside one program."""
    spread = PartitionSpec(AXIS)

    @partial(jax.shard_map, mesh=mesh, in_specs=(spread, PartitionSpec()), out_specs=spread, check_vma=False)
    def loop(x, turns):
        return jax.lax.fori_loop(0, turns, lambda _, x: step(x), x)

    x = jax.device_put(jnp.ones((mesh.size, num_bytes // 4), jnp.int32), NamedSharding(mesh, spread))
    program = jax.jit(loop)
    return slope(lambda count: program(x, jnp.int32(count)), turns, windows)[0]


def measure(devices: int, num_bytes: int, windows: int) -> dict[str, Any]:
    """Gigabytes per second of a device's link, and microseconds of a short sum."""
    found = jax.devices()
    if not 1 < devices <= len(found):
        raise ValueError(f"--devices {devices}: 2 to {len(found)} are here")
    mesh, d = Mesh(np.array(found[:devices]), (AXIS,)), devices

    def total(x):
        return jax.lax.psum(x, AXIS)

    def gather(x):
        return jax.lax.all_gather(x[:, : x.shape[1] // d], AXIS, axis=1, tiled=True)

    num_bytes -= num_bytes % (4 * d)
    large = partial(seconds, mesh, num_bytes=num_bytes, turns=(2, 12), windows=windows)
    return dict(
        correct=check(mesh),
        bytes=num_bytes,
        all_reduce_gb_s=2 * (d - 1) / d * num_bytes / large(total) / 1e9,
        all_gather_gb_s=(d - 1) / d * num_bytes / large(gather) / 1e9,
        copy_gb_s=num_bytes / large(around(d)) / 1e9,
        short_bytes=SHORT,
        short_all_reduce_us=1e6 * seconds(mesh, total, SHORT, (100, 1100), windows),
    )


def topology() -> str | None:
    """What `nvidia-smi topo -m` says; None where there is no such program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or done.stderr.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--devices", type=int, default=2, help="of this host")
    parser.add_argument("--mib", type=int, default=512, help="of the arrays that bandwidth is measured with")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    options = parser.parse_args(arguments)
    record = provenance.conditions() | dict(devices=options.devices)
    record |= dict(topology=topology(), nccl={k: v for k, v in os.environ.items() if k.startswith("NCCL_")})
    record |= measure(options.devices, options.mib << 20, options.windows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    speeds = ", ".join(f"{k} {v:.4g}" for k, v in record.items() if k.endswith(("_gb_s", "_us")))
    print(f"links of {options.devices} x {record['device_kind']}: {speeds}; correct: {record['correct']}", flush=True)
    return 0 if all(record["correct"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
