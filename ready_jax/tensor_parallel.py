"""Decoding over a mesh: every shard runs the ordinary modules on its own heads, MLP columns and vocabulary.

The whole decode loop is one ``shard_map`` over the mesh's last axis. Inside it a module is built from the
configuration of one shard and holds one shard's slices, so no layer and no kernel knows of the mesh; they talk through
``collectives.py`` (Shoeybi et al. 2019, Megatron-LM). The residual stream is the same on all shards. Rows of a batch
are split over the axes before the last one, where they divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ready_jax import collectives, lora
from ready_jax.config import LINEAR, DrafterConfig, ReaderConfig, TargetConfig
from ready_jax.deltanet import COLUMN_MULTIPLE
from ready_jax.drafter import DraftContext, Drafter
from ready_jax.kernels import dispatch, scaled_weights
from ready_jax.layers import Coded, Scaled
from ready_jax.pytree import register
from ready_jax.reader import StateReader
from ready_jax.sharding import letters
from ready_jax.state import DecodeState
from ready_jax.target import Target

type Module = Target | Drafter | StateReader
type Config = TargetConfig | DrafterConfig | ReaderConfig
MODULES, MEMORY = (Target, Drafter, StateReader), (DecodeState, DraftContext)


@register
@dataclass(frozen=True)
class Sharded:
    """A target, drafter or reader over a mesh: what ``decode`` and ``Pair`` take in place of the module itself.

    ``shards`` is a module of one shard's configuration whose arrays hold the slices of all shards side by side: not to
    be called outside of ``on_shards``. ``config`` is the model's; key/value and key heads that are fewer than the
    shards count once per shard there. ``original`` is the configuration of the module that ``whole`` gives back.
    """

    shards: Any
    config: Any = field(metadata=dict(static=True))
    original: Any = field(metadata=dict(static=True))
    mesh: Mesh = field(metadata=dict(static=True))

    def __getattr__(self, name: str):
        raise AttributeError(
            f"{name!r}: this model is spread over a mesh; tensor_parallel.on_shards runs functions of it, whole() "
            "gives the module back, shards holds its arrays"
        )

    @property
    def dtype(self):
        return self.shards.dtype

    @property
    def reader(self):
        return getattr(self.shards, "reader", None)

    @property
    def specs(self):
        """The partition specs of ``shards``."""
        return module_specs(self.shards, self.original, self.mesh)

    def init_context(self, batch: int, capacity: int) -> DraftContext:
        """An empty draft context with the heads of all shards."""
        like: Any = self
        return Drafter.init_context(like, batch, capacity)

    def with_reader(self, reader) -> Sharded:
        """The same drafter with another reader (None: none); somebody's own reads all heads, on every shard."""
        original = self.original
        if isinstance(reader, StateReader):
            spread: Any = shard(reader, self.mesh)
            original, reader = replace(original, reader=reader.config), spread.shards
        return replace(self, shards=self.shards.with_reader(reader), original=original)

    def placed(self) -> Sharded:
        """The same with every array where its spec says."""
        put = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec)), self.shards, self.specs)
        return replace(self, shards=put)

    def whole(self) -> Any:
        """The module that was sharded, bit for bit, with its arrays in the host's memory."""
        shards = self.mesh.shape[self.mesh.axis_names[-1]]

        def gathered(path, leaf):
            host, cut = np.asarray(leaf), cut_of(_names(path), readable, shards)
            return host if cut is None else cut.joined(host)

        readable = _readable(self.original, self.shards)
        return _configured(jax.tree_util.tree_map_with_path(gathered, self.shards), self.original)


# What is cut, and how


@dataclass(frozen=True)
class Cut:
    """One dimension of a parameter divided into shards.

    ``parts``: (heads, width) of what stands side by side there; a shard takes its heads of every part, then zeros up
    to a multiple of ``multiple``. A part of fewer heads than shards gives one head to several.
    """

    dim: int
    parts: tuple[tuple[int, int], ...]
    shards: int
    multiple: int = 1

    @property
    def length(self) -> int:
        """Entries of the whole dimension."""
        return self._padded(sum(heads * width for heads, width in self.parts))

    @property
    def size(self) -> int:
        """Entries of one shard."""
        return self._padded(sum(max(heads // self.shards, 1) * width for heads, width in self.parts))

    def _padded(self, entries: int) -> int:
        return -(-entries // self.multiple) * self.multiple

    def slices(self, shard: int) -> Iterator[slice]:
        """What a shard takes of the whole dimension, in its order."""
        first = 0
        for heads, width in self.parts:
            start = first + shard * heads // self.shards * width
            yield slice(start, start + max(heads // self.shards, 1) * width)
            first += heads * width

    def _at(self, array, where: slice):
        return array[(slice(None),) * self.dim + (where,)]

    def slice(self, array: np.ndarray, shard: int) -> np.ndarray:
        """One shard's part of a whole parameter."""
        pieces = [self._at(array, where) for where in self.slices(shard)]
        rest = self.size - sum(piece.shape[self.dim] for piece in pieces)
        if rest:
            shape = list(array.shape)
            shape[self.dim] = rest
            pieces.append(np.zeros(shape, array.dtype))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=self.dim)

    def joined(self, array: np.ndarray) -> np.ndarray:
        """The whole parameter from all shards' parts side by side: the inverse of ``slice``."""
        shape = list(array.shape)
        shape[self.dim] = self.length
        whole = np.zeros(shape, array.dtype)
        for shard in range(self.shards):
            at = shard * self.size
            for where in self.slices(shard):
                entries = where.stop - where.start
                self._at(whole, where)[...] = self._at(array, slice(at, at + entries))
                at += entries
        return whole


def _names(path) -> tuple[str, ...]:
    keys = [str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", "")))) for key in path]
    return tuple(key for i, key in enumerate(keys) if key != "value" or i == 0)  # an NNX variable's array


def cut_of(names: Sequence[str], config: Config, shards: int) -> Cut | None:
    """How the parameter at a path of the module of ``config`` is cut; None: every shard has all of it."""
    *owner, name = names
    if name in ("weight", "scale"):  # of a matrix in fp8, outputs first
        cut = cut_of(owner, config, shards)
        if cut is None or (name == "scale" and cut.dim == 0):
            return None
        return replace(cut, dim=1 - cut.dim)
    return _cuts(owner, config, shards).get(name)


def _cuts(owner: list[str], c: Config, n: int) -> dict[str, Cut]:
    """What is cut among the parameters of the module at path ``owner``, fused columns in their order."""
    if isinstance(c, ReaderConfig):
        if c.projection_sharing != "pair":
            return {}
        pairs = ((len(c.heads), 1),) * len(c.state_layers)
        return {"u_ZXJ": Cut(0, pairs, n), "v_ZYJ": Cut(0, pairs, n)}
    if owner[:1] == ["reader"]:
        return _cuts(owner[1:], c.reader, n) if isinstance(c, DrafterConfig) and c.reader is not None else {}
    if owner[-1:] == ["mlp"]:
        width = (c.intermediate_size, 1)
        return {"w_in_DI": Cut(1, (width, width), n), "w_out_FD": Cut(0, (width,), n)}
    vocabulary = ((c.vocab_size, 1),)
    queries, keys = (c.num_attention_heads, c.head_dim), (c.num_key_value_heads, c.head_dim)
    if isinstance(c, DrafterConfig):
        return {
            "w_q_DO": Cut(1, (queries,), n),
            "w_kv_DI": Cut(1, (keys, keys), n),
            "w_out_OD": Cut(0, (queries,), n),
            "w_fuse_ID": Cut(1, ((c.hidden_size, 1),), n),
            "w_out_DV": Cut(1, vocabulary, n),
            "w2_RV": Cut(1, vocabulary, n),
        }
    if owner[-1:] != ["mixer"]:
        tied = {"embed_VD": Cut(0, vocabulary, n)} if c.tie_word_embeddings else {}
        return {"w_out_DV": Cut(1, vocabulary, n)} | tied
    if c.layer_types[int(owner[-2])] != LINEAR:
        with_gates = (c.num_attention_heads, 2 * c.head_dim)
        return {"w_in_DI": Cut(1, (with_gates, keys, keys), n), "w_out_OD": Cut(0, (queries,), n)}
    keys, each = (c.linear_num_key_heads, c.linear_key_head_dim), (c.linear_num_value_heads, 1)
    values = (c.linear_num_value_heads, c.linear_value_head_dim)
    return {
        "w_in_DI": Cut(1, (keys, keys, values, values, each, each), n, COLUMN_MULTIPLE),
        "conv_WC": Cut(1, (keys, keys, values), n),
        "a_log_M": Cut(0, (each,), n),
        "dt_bias_M": Cut(0, (each,), n),
        "w_out_OD": Cut(0, (values,), n),
    }


# Configurations

#: What is divided among shards, and what may instead be given to several of them.
DIVIDED = ("vocab_size", "intermediate_size", "num_attention_heads", "linear_num_value_heads", "memory_heads")
SHARED = ("num_key_value_heads", "linear_num_key_heads")


def faults(config: Config, shards: int) -> list[str]:
    """Why a model cannot be spread over so many shards; empty if it can."""
    found = []
    for name in (*DIVIDED, *SHARED, *(("hidden_size",) if isinstance(config, DrafterConfig) else ())):
        count = getattr(config, name, shards)
        if count % shards and (name not in SHARED or shards % count):
            divisor = ", or divide it" if name in SHARED else ""
            found.append(f"{name}={count} must be a multiple of the {shards} shards{divisor}")
    reader = config if isinstance(config, ReaderConfig) else getattr(config, "reader", None)
    if reader is not None:
        if reader is not config:
            found += [f"reader: {fault}" for fault in faults(reader, shards)]
        elif "layer" in (reader.state_rms_axes, reader.scale_feature):
            found.append("state_rms_axes or scale_feature 'layer' needs all heads of a layer on one shard")
        elif reader.memory_heads % shards == 0 and _local_heads(reader, shards) is None:
            found.append(f"state_heads={reader.state_heads} must name the same heads of every shard, in shard order")
    return found


def check(name: str, config: Config, mesh: Mesh) -> None:
    """ValueError with every count that does not divide."""
    axis = mesh.axis_names[-1]
    if found := faults(config, mesh.shape[axis]):
        raise ValueError(f"{name} over {mesh.shape[axis]} shards of axis {axis!r}: " + "; ".join(found))


def _local_heads(reader: ReaderConfig, shards: int) -> tuple[int, ...] | None:
    """The selected heads as a shard counts them; None if shards would differ."""
    each, count = reader.memory_heads // shards, len(reader.heads) // shards
    parts = {tuple(h - s * each for h in reader.heads[s * count : (s + 1) * count]) for s in range(shards)}
    local = parts.pop()
    fits = not parts and len(reader.heads) == shards * count > 0 and all(0 <= h < each for h in local)
    return local if fits else None


def local[C: Config](config: C, shards: int) -> C:
    """The configuration of one shard. Token ids stay those of the whole vocabulary, and so does its size."""
    changes = {
        name: max(getattr(config, name) // shards, 1)
        for name in (*DIVIDED, *SHARED)
        if name != "vocab_size" and hasattr(config, name)
    }
    if isinstance(config, ReaderConfig):
        changes["state_heads"] = None if config.state_heads is None else _local_heads(config, shards)
    if isinstance(config, DrafterConfig) and config.reader is not None:
        changes["reader"] = local(config.reader, shards)
    return replace(config, **changes)


def effective[C: Config](config: C, shards: int) -> C:
    """The configuration of all shards together: heads that several of them hold are counted as often."""
    changes = {name: max(getattr(config, name), shards) for name in SHARED if hasattr(config, name)}
    return replace(config, **changes)


def _configured[M: Module](module: M, config: Config) -> M:
    """The module as if built from another configuration, around the same arrays."""
    other: Any = jax.tree.map(lambda leaf: leaf, module)
    other.config = config
    for layer in getattr(other, "layers", ()):
        owner = layer.mixer if isinstance(config, TargetConfig) else layer
        owner.config = config
    if isinstance(config, DrafterConfig) and config.reader is not None and isinstance(other.reader, StateReader):
        other.reader.config = config.reader
    return other


# Onto a mesh, and running there


def shard(model, mesh: Mesh) -> Any:
    """A target, drafter or reader laid out for ``on_shards`` over the last axis of ``mesh``.

    Anything else is searched for them (a drafter that holds another); other arrays go to every device. LoRA updates
    are merged. Leaves may lie anywhere, on the host or on other devices: they are moved one by one. Raises ValueError
    with every count that does not divide.
    """
    mesh = Mesh(mesh.devices, mesh.axis_names)  # axes that the partitioner may use, whatever the caller's are for
    if not isinstance(model, MODULES):
        return jax.tree.map(
            lambda x: x if isinstance(x, Sharded) else shard(x, mesh) if isinstance(x, MODULES)
            else jax.device_put(x, NamedSharding(mesh, PartitionSpec())),
            model, is_leaf=lambda x: isinstance(x, (Sharded, *MODULES)),
        )  # fmt: skip
    shards, config = mesh.shape[mesh.axis_names[-1]], model.config
    check(type(model).__name__, config, mesh)
    plain = _cuttable(lora.merge(model) if isinstance(model, Drafter) else model)

    def put(path, leaf):
        cut = cut_of(_names(path), _readable(config, plain), shards)
        if cut is None:
            return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))
        host, shape = np.asarray(leaf), list(leaf.shape)
        shape[cut.dim] = shards * cut.size

        def part(index):
            return cut.slice(host, (index[cut.dim].start or 0) // cut.size)

        return jax.make_array_from_callback(tuple(shape), NamedSharding(mesh, _spec(cut, mesh)), part)

    spread = _configured(jax.tree_util.tree_map_with_path(put, plain), local(config, shards))
    return Sharded(spread, effective(config, shards), config, mesh)


def _cuttable(model):
    """With fp8 matrices outputs first: in the order of threads neither heads nor columns lie side by side."""

    def plainly(stored):
        if isinstance(stored, Coded):
            raise ValueError("found a matrix in 12 bits, which cannot be cut; shard the model before lossless.compress")
        ordered = isinstance(stored, Scaled) and stored.weight.ndim == 5
        return replace(stored, weight=scaled_weights.decode(stored.weight)) if ordered else stored

    return jax.tree.map(plainly, model, is_leaf=lambda x: isinstance(x, Scaled | Coded))


def _readable(config: Config, module: Module) -> Config:
    """Without a reader's configuration where the reader is somebody's own: every shard holds all of that."""
    own = isinstance(config, DrafterConfig) and not isinstance(getattr(module, "reader", None), StateReader)
    return replace(config, reader=None) if own else config


def _spec(cut: Cut | None, mesh: Mesh) -> PartitionSpec:
    return PartitionSpec() if cut is None else PartitionSpec(*[None] * cut.dim, mesh.axis_names[-1])


def module_specs(module, config: Config, mesh: Mesh, prefix: tuple[str, ...] = ()):
    """Partition specs of a module (or of a part of it, at ``prefix``) whose whole has this configuration."""
    config, shards = _readable(config, module) if not prefix else config, mesh.shape[mesh.axis_names[-1]]
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _spec(cut_of(prefix + _names(path), config, shards), mesh), module
    )


def _is_sharded(x) -> bool:
    return isinstance(x, Sharded)


def holds_shards(drafter) -> bool:
    """Whether a drafter, as it is inside of ``on_shards``, computes with slices; somebody's own does not."""
    return any(isinstance(x, Drafter) for x in jax.tree.leaves(drafter, is_leaf=lambda x: isinstance(x, Drafter)))


def specs(tree, mesh: Mesh, batch: int):
    """Partition specs of what a loop takes and returns.

    Modules by their cuts, memories by their heads, kept logits by the vocabulary; other arrays are the same on all
    shards. An array whose letters begin with B has a row per sequence.
    """
    model, before = mesh.axis_names[-1], mesh.axis_names[:-1]
    ways = math.prod(mesh.shape[name] for name in before)
    rows = before if ways > 1 and batch % ways == 0 else None
    parts = dict(recurrent=PartitionSpec(rows, model), logits_BNV=PartitionSpec(rows, None, model))
    parts |= dict.fromkeys(("conv", "key", "value"), PartitionSpec(rows, None, model))

    def other(path):
        name = next((n for n in reversed(_names(path)) if letters(n)), "")
        return PartitionSpec(rows) if letters(name).startswith("B") else PartitionSpec()

    def one(path, node):
        if isinstance(node, Sharded):
            return node.specs
        if isinstance(node, MEMORY):
            return jax.tree_util.tree_map_with_path(lambda p, _: parts.get(_names(p)[0]) or other(p), node)
        return parts["logits_BNV"] if _names(path)[-1:] == ("logits_BNV",) else other(path)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda x: isinstance(x, (Sharded, *MEMORY)))


def mesh_of(tree) -> Mesh | None:
    """The mesh of the sharded modules in a tree of arguments; None without any. ValueError for several meshes."""
    found = {x.mesh for x in jax.tree.leaves(tree, is_leaf=_is_sharded) if _is_sharded(x)}
    if len(found) > 1:
        raise ValueError(f"modules are spread over different meshes: {[dict(mesh.shape) for mesh in found]}")
    return found.pop() if found else None


def on_shards(function: Callable, arguments: dict[str, Any], out, *, batch: int):
    """``function(**arguments)`` on every shard, each with its modules and its part of the memories.

    ``out`` is a tree like the result (arrays or their shapes), named as ``specs`` asks. ``batch`` rows are split over
    the axes before the last one if they divide.
    """
    mesh = mesh_of(arguments)
    assert mesh is not None
    axis = mesh.axis_names[-1] if mesh.shape[mesh.axis_names[-1]] > 1 else None

    def run(arguments):
        with collectives.axis(axis), dispatch.partitioned(False):
            return function(**arguments)

    spread = jax.tree.map(lambda x: x.shards if _is_sharded(x) else x, arguments, is_leaf=_is_sharded)
    in_specs, out_specs = (specs(tree, mesh, batch) for tree in (arguments, out))
    return jax.shard_map(run, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)(spread)


def drawn(make: Callable, config: Config, mesh: Mesh, owner: tuple[str, ...] = ()) -> Callable:
    """``make(key, config)`` (a module, or the part of one at path ``owner``) drawn by every shard for itself.

    Nothing whole exists anywhere: what is cut comes from a key of the shard, the rest from the same key on all.
    """
    axis, shards = mesh.axis_names[-1], mesh.shape[mesh.axis_names[-1]]
    check("a random model", config, mesh)
    mine = local(config, shards)

    def draw(key):
        def pick(path, own, same):
            cut = cut_of(owner + _names(path), config, shards)
            # Configurations keep the vocabulary whole, so that is cut here.
            return same if cut is None else jax.lax.slice_in_dim(own, 0, cut.size, axis=cut.dim)

        own, same = make(jax.random.fold_in(key, 1 + jax.lax.axis_index(axis)), mine), make(key, config)
        pairs = zip(jax.tree.leaves_with_path(own), jax.tree.leaves(same), strict=True)
        return jax.tree.unflatten(jax.tree.structure(own), [pick(*item, leaf) for item, leaf in pairs])

    like = jax.eval_shape(lambda key: make(key, mine), jax.random.key(0))
    out_specs = module_specs(like, config, mesh, owner)
    return jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=PartitionSpec(), out_specs=out_specs, check_vma=False))


def place[T](tree: T, mesh: Mesh, *, batch: int) -> T:
    """Memories and other arrays where ``on_shards`` expects them."""
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs(tree, mesh, batch))
