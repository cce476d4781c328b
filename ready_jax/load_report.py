"""What a checkpoint folder offers against what a model needs: one report, as an object and as text."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ready_jax.names import Leaf, Piece, refused, skipped
from ready_jax.tensor_files import FLOATS, CheckpointError, Scan, StoredTensor


@dataclass(frozen=True)
class LoadReport:
    """Account of one checkpoint. Everything but ``loaded``, ``skipped`` and ``notes`` is a fault, one line each.

    ``refused``: signs of another kind of checkpoint, an error even if not strict. ``initialised``: leaves that keep
    random values under ``strict=False``. ``revision``: commit hash of a hub download, None for other folders.
    """

    kind: str
    source: str
    revision: str | None
    loaded: int
    skipped: dict[str, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()
    initialised: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        return self.refused + self.files + self.misshapen + self.missing + self.unknown

    def __str__(self) -> str:
        at = f" at {self.revision}" if self.revision else ""
        rules = ", ".join(f"{rule} {count}" for rule, count in self.skipped.items())
        lines = [
            f"{self.kind} from {self.source}{at}",
            f"{self.loaded} loaded, {sum(self.skipped.values())} skipped" + (f" ({rules})" if rules else ""),
        ]
        for title in ("refused", "files", "misshapen", "missing", "unknown", "initialised", "notes"):
            entries = getattr(self, title)
            if entries:
                lines.append(f"{title} ({len(entries)}):")
                lines += [f"  {entry}" for entry in entries]
        return "\n".join(lines)

    def raise_if_wrong(self, strict: bool = True) -> None:
        """CheckpointError with the whole report if there are faults; only refusals count if not ``strict``."""
        if self.refused or (strict and self.faults):
            raise CheckpointError(str(replace(self, initialised=())))


@dataclass(frozen=True)
class Plan:
    """Which stored tensor (by name without prefix) goes where; ``leaves`` are those of the model."""

    leaves: tuple[Leaf, ...]
    tensors: dict[str, StoredTensor]
    report: LoadReport


class _Matching:
    """Stored tensors sorted into used, skipped and faulty, in the order the fields are declared below."""

    def __init__(self, found: Scan, leaves: list[Leaf], canonical: Callable[[str], str], skip: dict[str, str]):
        self.needed: dict[str, tuple[Piece, Leaf]] = {
            piece.name: (piece, leaf) for leaf in leaves for piece in leaf.pieces
        }
        self.used: dict[str, StoredTensor] = {}
        self.skipped: Counter[str] = Counter()
        self.strays: dict[str, StoredTensor] = {}
        self.refused: list[str] = []
        self.files: list[str] = list(found.problems)
        self.misshapen: dict[str, str] = {}
        for tensor in found.tensors:
            self._sort(tensor, canonical(tensor.key), skip)

    def _sort(self, tensor: StoredTensor, name: str, skip: dict[str, str]) -> None:
        rule = skipped(tensor.key) or next((rule for prefix, rule in skip.items() if name.startswith(prefix)), None)
        reason = refused(tensor.key)
        known = self.used | self.strays
        if rule:
            self.skipped[rule] += 1
        elif reason:
            self.refused.append(f"{tensor.file}: {tensor.key}: {reason}")
        elif name in known:
            self.files.append(f"{tensor.file}: {tensor.key}: found also as {known[name].key}, needed once")
        elif name in self.needed:
            self.used[name] = tensor
        else:
            self.strays[name] = tensor

    def check_shapes(self) -> None:
        """Take out tensors of another shape or element type; MLX's conv layout is a sign of more differences."""
        for name, tensor in list(self.used.items()):
            piece, leaf = self.needed[name]
            if tensor.shape == piece.shape and tensor.dtype in FLOATS:
                continue
            found = f"{tensor.file}: {tensor.key}: found {tensor.dtype} {list(tensor.shape)}"
            self.misshapen[name] = f"{found}, needed {_types(tensor)} {list(piece.shape)}"
            del self.used[name]
            channels, one, width = piece.shape if leaf.form == "conv" else (0, 0, 0)
            if leaf.form == "conv" and tensor.shape == (channels, width, one) != piece.shape:
                self.refused.append(
                    f"{found}, needed {list(piece.shape)}: an MLX-style export, whose norms may have 1 added already"
                )

    def check_tied_head(self) -> None:
        """A stored head beside a tied embedding must be the same numbers; then it is not needed."""
        head, embedding = self.strays.get("lm_head.weight"), self.used.get("embed_tokens.weight")
        if head is None or embedding is None:
            return
        same = head.shape == embedding.shape and head.dtype == embedding.dtype
        if same and np.array_equal(head.read().view(np.uint8), embedding.read().view(np.uint8)):
            self.skipped["tied head"] += 1
            del self.strays["lm_head.weight"]
        else:
            self.files.append(
                f"{head.file}: {head.key}: found a head that differs from {embedding.key}, needed none: "
                "tie_word_embeddings is true"
            )

    def check_zero_centred(self) -> str | None:
        """A target's norms are stored as w of (1 + w): all of them near 1 or more means that 1 was added already."""
        ends = ("layernorm.weight", "q_norm.weight", "k_norm.weight")
        norms = [tensor for name, tensor in self.used.items() if name == "norm.weight" or name.endswith(ends)]
        with np.errstate(invalid="ignore", over="ignore"):
            lowest = min((float(norm.read().astype(np.float32).mean()) for norm in norms), default=0.0)
        if not 0.5 < lowest < np.inf:
            return None
        return (
            f"the mean of every norm weight is at least {lowest:.2f}, needed values around 0 (the norm multiplies by "
            "1 + w): an MLX-style export with 1 already added?"
        )

    def missing(self, lost: set[str]) -> list[str]:
        return [name for name in self.needed if name not in self.used | self.misshapen and name not in lost]

    def initialised(self) -> tuple[str, ...]:
        """Leaves that lack at least one of their tensors."""
        lines: dict[str, list[str]] = {}
        for name, (_, leaf) in self.needed.items():
            if name not in self.used:
                lines.setdefault(".".join(map(str, leaf.path)), []).append(name)
        return tuple(f"{path} (no {', '.join(lacking)})" for path, lacking in lines.items())


def _types(tensor: StoredTensor) -> str:
    return tensor.dtype if tensor.dtype in FLOATS else " or ".join(FLOATS)


def match(
    kind: str,
    folder: Path,
    revision: str | None,
    found: Scan,
    leaves: list[Leaf],
    canonical: Callable[[str], str],
    *,
    tied: bool = False,
    skip: dict[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Compare a folder's headers with the leaves a model needs; nothing but a few small tensors is read.

    ``tied``: the head is the embedding, so a stored copy of it is checked and left out. ``skip``: {prefix: rule} of
    further tensors to leave out.
    """
    work = _Matching(found, leaves, canonical, skip or {})
    work.check_shapes()
    if tied:
        work.check_tied_head()
    centred = work.check_zero_centred() if kind == "target" else None
    missing = work.missing({canonical(key) for key in found.lost})
    unknown = []
    for name, tensor in work.strays.items():
        close = difflib.get_close_matches(name, missing, n=1)
        hint = f"the closest missing name is {close[0]}" if close else "no missing name is close to it"
        unknown.append(
            f"{tensor.file}: {tensor.key}: found {tensor.dtype} {list(tensor.shape)}, needed no such tensor; {hint}"
        )
    report = LoadReport(
        kind,
        str(folder),
        revision,
        len(work.used),
        dict(sorted(work.skipped.items())),
        tuple(work.refused),
        (*work.files, *([f"{folder}: {centred}"] if centred else [])),
        tuple(unknown),
        tuple(f"{folder}: {name}: found in no file, needed {list(work.needed[name][0].shape)}" for name in missing),
        tuple(work.misshapen.values()),
        work.initialised(),
        notes,
    )
    return Plan(tuple(leaves), work.used, report)
