"""DeepSpeed's checkpoints by hand, without torch: a ZeRO job's parameters, and the files that its ranks would save.

Written from DeepSpeed's optimizers, knowing nothing of the package under test. Whatever is padding is NaN, so that no
element of it can go unseen where it does not belong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import torch_bytes as opcodes
from fsdp_bytes import Array, RankFile, record, world
from megatron_bytes import value

BF16 = np.dtype(ml_dtypes.bfloat16)
Weights = dict[str, Array]
Files = dict[str, "Saved"]
"""Name → content, which tests change before it is written."""


@dataclass
class Saved:
    """One file: entries of nested dicts and lists; arrays become tensors, bytes are opcodes.

    folder: what torch.save calls the archive's folder, by the name of the file that it writes.
    """

    content: dict[str, Any]
    folder: str = "archive"

    def write(self, path: Path) -> None:
        file = RankFile(world(1), 0)
        for name, entry in self.content.items():
            file.add_opcodes(name, _encode(file, entry))
        file.write(path, self.folder)


@dataclass(frozen=True)
class Hole:
    """A tensor of this shape, of zeros that take no room on the disk."""

    shape: tuple[int, ...]


def _encode(file: RankFile, entry: Any) -> bytes:
    if isinstance(entry, Hole):
        return file.tensor(entry.shape)
    if isinstance(entry, np.ndarray):
        return file.tensor(entry)
    if isinstance(entry, Mapping):
        return b"}(" + b"".join([value(key) + _encode(file, inner) for key, inner in entry.items()]) + b"u"
    if isinstance(entry, (list, tuple)):
        return b"](" + b"".join([_encode(file, inner) for inner in entry]) + b"e"
    return value(entry)


@dataclass(frozen=True)
class Job:
    """A training job at the moment of its save.

    stage:      of ZeRO, 1 to 3; None: BF16_Optimizer, which says none and keeps its padding.
    groups:     masters of trained parameters by the optimizer's group (stage 3: sub-group), in flat order.
    frozen:     parameters without training, in the low precision; buffers: likewise, of any type.
    shared:     further name → name of a parameter that has two.
    trim:       whether stages 1 and 2 cut the padding off, as releases of these years do.
    alignment:  elements to a multiple of which each parameter begins (`parameter_alignment`).
    plain:      whether optimizer files say what the first releases said: one partition count, a bare tensor.
    """

    stage: int | None
    ranks: int
    groups: Sequence[Weights]
    frozen: Weights = field(default_factory=dict)
    buffers: Weights = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    low: np.dtype[Any] = BF16
    trim: bool = True
    alignment: int = 1
    plain: bool = False
    step: int = 7

    def masters(self) -> Weights:
        """What a merge must give: masters, frozen parameters widened, buffers as they are, shared ones twice."""
        trained = {name: array for group in self.groups for name, array in group.items()}
        whole = trained | {name: array.astype(np.float32) for name, array in self.frozen.items()} | self.buffers
        return whole | {name: whole[other] for name, other in self.shared.items()}

    def module(self) -> Weights:
        """The low-precision weights."""
        trained = {name: array.astype(self.low) for group in self.groups for name, array in group.items()}
        whole = trained | self.frozen | self.buffers
        return whole | {name: whole[other] for name, other in self.shared.items()}

    def files(self) -> Files:
        """The files of the tag's directory."""
        found: Files = {}
        for rank in range(self.ranks):
            prefix = "bf16_" if self.low == BF16 else ""
            found[f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = Saved(self._optimizer_states(rank))
            if self.stage == 3:
                found[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = Saved(self._model_states(rank))
        if self.stage != 3:
            found["mp_rank_00_model_states.pt"] = Saved(self._model_states(0))
        return found

    def write(self, directory: Path, files: Files | None = None) -> Path:
        """Write the files, changed ones if they are given, as a tag's directory."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, saved in (self.files() if files is None else files).items():
            saved.write(directory / name)
        return directory

    def _model_states(self, rank: int) -> dict[str, Any]:
        module = self.module()
        if self.stage == 3:
            module = {
                name: array if name in self.buffers else np.zeros(0, array.dtype) for name, array in module.items()
            }
        has_frozen = self.stage in (2, 3)
        frozen = {name: self._part(array, rank) if self.stage == 3 else array for name, array in self.frozen.items()}
        return {
            "module": module,
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": [{name: size(array.shape) for name, array in group.items()} for group in self.groups],
            "frozen_param_shapes": {n: size(a.shape) for n, a in self.frozen.items()} if has_frozen else None,
            "frozen_param_fragments": frozen if has_frozen else None,
            "shared_params": self.shared if rank == 0 else {},
            "global_steps": self.step,
            "skipped_steps": 0,
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "ds_config": {"zero_optimization": {"stage": 1 if self.stage is None else self.stage}},
            "ds_version": "0.19.8",
        }

    def _optimizer_states(self, rank: int) -> dict[str, Any]:
        state = self._stage_3(rank) if self.stage == 3 else self._below_stage_3(rank)
        return {"optimizer_state_dict": state, "ds_version": "0.19.8"}

    def _base_state(self, flats: Sequence[Array]) -> dict[str, Any]:
        moments = {"step": np.array(self.step, np.float32)}
        return {
            "state": {at: moments | {"exp_avg": np.full_like(flat, 9)} for at, flat in enumerate(flats)},
            "param_groups": [{"lr": 0.1}],
        }

    def _stage_3(self, rank: int) -> dict[str, Any]:
        flats = [_joined([self._part(array, rank) for array in group.values()]) for group in self.groups]
        return {
            "zero_stage": _stage(3),
            "partition_count": self.ranks,
            "loss_scaler": opcodes.call(opcodes.named("deepspeed.runtime.fp16.loss_scaler", "LossScaler")),
            "optimizer_state_dict": self._base_state(flats),
            "fp32_flat_groups": flats[0] if self.plain else flats,
        }

    def _part(self, array: Array, rank: int) -> Array:
        """A rank's part of a parameter at stage 3, padded."""
        each = -(-array.size // self.ranks)
        padded = np.full(each * self.ranks, np.nan, array.dtype)
        padded[: array.size] = array.reshape(-1)
        return padded[rank * each : (rank + 1) * each]

    def _below_stage_3(self, rank: int) -> dict[str, Any]:
        gaps = [self._gaps(group) for group in self.groups]
        pieces = [self._pieces(group, between)[rank] for group, between in zip(self.groups, gaps, strict=True)]
        flats = [flat for flat, _, _ in pieces]
        state: dict[str, Any] = {
            "partition_count": self.ranks if self.plain else [self.ranks] * len(self.groups),
            "base_optimizer_state": self._base_state(flats),
            "single_partition_of_fp32_groups": flats[0] if self.plain else flats,
            "group_paddings": [padding for _, padding, _ in pieces],
        }
        if self.stage is not None:
            state["zero_stage"] = _stage(self.stage)
        if not self.plain:
            state["param_slice_mappings"] = [slices for _, _, slices in pieces]
        if self.alignment > 1:
            state["param_alignment_paddings"] = gaps
        return state

    def _gaps(self, group: Weights) -> list[int]:
        """Elements behind each parameter; none behind the last."""
        sizes = [array.size for array in group.values()]
        return [*[-size % self.alignment for size in sizes[:-1]], 0][: len(sizes)]

    def _pieces(self, group: Weights, gaps: Sequence[int]) -> list[tuple[Array, int, dict[str, bytes]]]:
        """Per rank, the partition, how many elements of padding were cut off it, and where parameters lie in it."""
        parts: list[Array] = []
        spans: dict[str, tuple[int, int]] = {}
        place = 0
        for (name, array), gap in zip(group.items(), gaps, strict=True):
            parts += [array.reshape(-1), np.full(gap, np.nan, array.dtype)]
            spans[name] = (place, place + array.size)
            place += array.size + gap
        flat = _joined(parts)
        padded = _joined([flat, np.full(-flat.size % (2 * self.ranks), np.nan, flat.dtype)])
        each = padded.size // self.ranks
        found = []
        for rank in range(self.ranks):
            low, high = rank * each, (rank + 1) * each
            padding = min(max(high - flat.size, 0), each)
            kept = each - padding if self.trim and self.stage is not None else each
            slices = {
                name: address(max(start, low) - low, min(stop, high) - max(start, low))
                for name, (start, stop) in spans.items()
                if max(start, low) < min(stop, high)
            }
            found.append((padded[low : low + kept], padding, slices))
        return found


def size(shape: Sequence[int]) -> bytes:
    """A torch.Size."""
    return opcodes.call(opcodes.named("torch", "Size"), opcodes.counts(shape))


def address(start: int, numel: int) -> bytes:
    """Where a fragment lies."""
    cls = opcodes.named("deepspeed.utils.tensor_fragment", "fragment_address")
    return record(cls, {"numel": opcodes.integer(numel), "start": opcodes.integer(start)})


def _stage(stage: int) -> bytes:
    return opcodes.call(opcodes.named("deepspeed.runtime.zero.config", "ZeroStageEnum"), opcodes.integer(stage))


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def weights(shapes: Mapping[str, Sequence[int]], start: int = 1, dtype: Any = np.float32) -> Weights:
    """Parameters in which every element is another; fractions of 2^-10 that low precision does not hold."""
    found: Weights = {}
    for name, shape in shapes.items():
        count = prod(shape)
        found[name] = (np.arange(start, start + count) + np.float32(2**-10)).reshape(shape).astype(dtype)
        start += count
    return found
