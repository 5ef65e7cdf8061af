"""What a checkpoint declares of how tensor-parallel ranks share its parameters: `universal_checkpoint_info`.

| key                                      | parameters whose name matches                                            |
|------------------------------------------|--------------------------------------------------------------------------|
| `affine_map`                             | lie as their map says (`affine.py`); the other keys are then not asked    |
| `tp_replicated_parameter_patterns`       | are whole on each rank                                                   |
| `parameter_to_average_patterns`          | are whole on each rank, and drift apart: a converter takes their mean     |
| `parameter_with_2_sub_params_cat_dim_0`  | axis 0; each shard is two halves, as gate and up                         |
| `parameter_with_sub_params`              | along an axis; each shard has a piece of each of several parts            |
| `parameter_with_row_parallelism_patterns`| axis 1                                                                   |
| `vocabulary_parameter_patterns`          | have padding behind `original_vocab_size` rows                           |

All others are cut along axis 0. AutoTP cuts unevenly where it must: the first ranks hold one more. Sources: DeepSpeed
`checkpoint/constants.py`, `checkpoint/ds_to_universal.py` (`merge_tp_slices`), `module_inject/layers.py`
(`collect_autotp_universal_checkpoint_info`); Megatron-DeepSpeed `megatron/model/gpt_model.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from unshard.errors import FormatError
from unshard.formats.deepspeed import affine
from unshard.formats.deepspeed.patterns import LONGEST_NAME, Patterns
from unshard.formats.megatron.sections import join_along, join_replicas
from unshard.tensors import Tensor, concat
from unshard.words import one_line, shorten

Widths: TypeAlias = tuple[tuple[int, ...], ...]
"""Per part of a parameter, how much of it each rank holds."""

_KINDS = {
    "tp_replicated_parameter_patterns": "replicated",
    "parameter_to_average_patterns": "averaged",
    "parameter_with_2_sub_params_cat_dim_0": "gated",
    "parameter_with_row_parallelism_patterns": "axis 1",
}
_MOST_PARTS = 1 << 10


@dataclass(frozen=True, slots=True)
class Parts:
    """A parameter of several parts along `axis`, of which each rank has a piece.

    sizes: of each whole part, or how many equal parts there are; widths: None where each part is cut evenly.
    """

    axis: int
    sizes: tuple[int, ...] | int
    widths: Widths | None

    def widths_of(self, shards: Sequence[Tensor]) -> Widths:
        """Raises ValueError where shards and parts do not fit."""
        ranks, name = len(shards), shards[0].name
        if any(self.axis >= shard.ndim for shard in shards):
            raise ValueError(f"{name}: a shard of shape {list(shards[0].shape)} has no axis {self.axis}")
        total = sum([shard.shape[self.axis] for shard in shards])
        sizes = self.sizes
        if isinstance(sizes, int):
            sizes = (total // max(sizes, 1),) * sizes
        widths = self.widths or tuple([(size // ranks,) * ranks for size in sizes])
        if [sum(held) for held in widths] != list(sizes) or any(len(held) != ranks for held in widths):
            raise ValueError(f"{name}: parts of {list(sizes)} do not lie on {ranks} ranks as is declared")
        if [sum(held) for held in zip(*widths, strict=True)] != [shard.shape[self.axis] for shard in shards]:
            raise ValueError(f"{name}: shards of {[list(shard.shape) for shard in shards]} are not as is declared")
        return widths


def join_parts(shards: Sequence[Tensor], axis: int, widths: Widths) -> Tensor:
    """The shards of all ranks with each part whole before the next begins. Raises ValueError where they do not fit."""
    split = [shard.split(axis, held) for shard, held in zip(shards, zip(*widths, strict=True), strict=True)]
    return concat([parts[number] for number in range(len(widths)) for parts in split], axis)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A `universal_checkpoint_info`, read: what is said of parameters, by patterns of their names.

    maps:        how they lie, as `affine_map` has it.
    kinds:       "replicated", "averaged", "gated" or "axis 1".
    parts:       of which parts they are.
    unsupported: why DeepSpeed itself declares no way to put them together.
    vocabulary:  they are padded behind `rows` (`original_vocab_size`, not checked; None where it is not recorded).
    buffers:     names of persistent buffers, of which no pattern speaks: each rank has all of them.
    """

    maps: Patterns[Any]
    kinds: Patterns[str]
    parts: Patterns[Parts]
    unsupported: Patterns[str]
    vocabulary: Patterns[bool]
    rows: object
    buffers: Collection[str]

    def join(self, name: str, shards: Sequence[Tensor]) -> tuple[str, Tensor]:
        """In words how a parameter is shared, and the whole of it. Raises ValueError where shards do not fit."""
        if len(name) > LONGEST_NAME:
            raise ValueError(
                f"{name[:LONGEST_NAME]}…: a name of over {LONGEST_NAME} characters is matched with no pattern"
            )
        words, joined = self._join(name, shards)
        if self.vocabulary.find(name):
            joined = self._cut_rows(joined, name)
        return words, joined

    def _cut_rows(self, tensor: Tensor, name: str) -> Tensor:
        if self.rows is None:
            return tensor
        if not isinstance(self.rows, int) or not 0 < self.rows <= (*tensor.shape, 0)[0]:
            raise ValueError(f"{name}: of shape {list(tensor.shape)}, but original_vocab_size is {self.rows!r}")
        return tensor.slice(0, 0, self.rows)

    def _join(self, name: str, shards: Sequence[Tensor]) -> tuple[str, Tensor]:
        recorded = self.maps.find(name)
        if recorded is not None:
            return "as its affine map says", affine.join_pieces(recorded, shards)
        kind = self.kinds.find(name)
        reason = self.unsupported.find(name) if kind is None else None
        if reason is not None:
            raise ValueError(f"{name}: DeepSpeed itself declares no way to put its shards together: {reason}")
        if kind == "averaged":
            raise ValueError(f"{name}: each rank trained a copy of its own, and the parameter is declared their mean")
        if kind == "replicated" or (kind is None and (name in self.buffers or not shards[0].ndim)):
            return "replicated", join_replicas(shards)
        if kind == "gated":
            halves = [(shard.shape[0] - shard.shape[0] // 2, shard.shape[0] // 2) for shard in shards if shard.ndim]
            return "axis 0 in 2 sections", join_parts(shards, 0, tuple(zip(*halves, strict=True)))
        parts = self.parts.find(name)
        if parts is not None:
            widths = parts.widths_of(shards)
            return f"axis {parts.axis} in {len(widths)} sections", join_parts(shards, parts.axis, widths)
        axis = 1 if kind == "axis 1" else 0
        return f"axis {axis}", join_along(shards, axis)


def read_declaration(recorded: object, buffers: Collection[str]) -> Declaration:
    """Raises FormatError where it cannot be followed."""
    if not isinstance(recorded, Mapping):
        raise FormatError(f"universal_checkpoint_info is a {type(recorded).__name__}, not a dict")
    return Declaration(
        maps=Patterns(_read_maps(recorded.get("affine_map") or {})),
        kinds=Patterns([(pattern, kind) for key, kind in _KINDS.items() for pattern in _list(recorded, key)]),
        parts=Patterns(_read_all_parts(recorded)),
        unsupported=Patterns(_read_unsupported(recorded.get("autotp_unsupported_parameter_patterns") or {})),
        vocabulary=Patterns([(pattern, True) for pattern in _list(recorded, "vocabulary_parameter_patterns")]),
        rows=recorded.get("original_vocab_size"),
        buffers=buffers,
    )


def _list(recorded: Mapping[str, Any], key: str) -> Sequence[Any]:
    entries = recorded.get(key) or ()
    if not isinstance(entries, (list, tuple)):
        raise FormatError(f"universal_checkpoint_info: `{key}` is no list")
    return entries


def _read_unsupported(reasons: object) -> Sequence[tuple[object, str]]:
    if not isinstance(reasons, Mapping):
        raise FormatError("universal_checkpoint_info: `autotp_unsupported_parameter_patterns` is no table of reasons")
    return [(pattern, one_line(shorten(str(reason), 200))) for pattern, reason in reasons.items()]


def _read_maps(maps: object) -> Sequence[tuple[object, Any]]:
    params = maps.get("params", {}) if isinstance(maps, Mapping) else None
    if not isinstance(maps, Mapping) or not isinstance(params, Mapping):
        raise FormatError("universal_checkpoint_info: `affine_map` is no table of maps")
    version = maps.get("version", affine.VERSION)
    if type(version) is not int or version > affine.VERSION:
        raise FormatError(
            f"universal_checkpoint_info has affine maps of version {version!r}; {affine.VERSION} is read",
            hint="this DeepSpeed is newer than what is known here: pip install --upgrade unshard",
        )
    return list(params.items())


def _read_all_parts(recorded: Mapping[str, Any]) -> Sequence[tuple[object, Parts]]:
    widths = recorded.get("sub_param_shard_widths") or {}
    found: list[tuple[object, Parts]] = []
    try:
        for entry in _list(recorded, "parameter_with_sub_params"):
            found += [(pattern, _read_parts(entry, widths.get(pattern))) for pattern in entry["patterns"]]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise FormatError("universal_checkpoint_info: `parameter_with_sub_params` is malformed") from None
    return found


def _read_parts(entry: Mapping[str, Any], widths: Any) -> Parts:
    """Raises ValueError, and what indexing raises, where the entry is malformed."""
    axis = entry["partition_dim"]
    sizes = entry["shape"][axis]
    sizes = sizes if type(sizes) is int else tuple(sizes)
    if type(axis) is not int or axis < 0 or (isinstance(sizes, tuple) and not _are_sizes(sizes)):
        raise ValueError("no axis or sizes")
    if isinstance(sizes, int) and not 0 < sizes <= _MOST_PARTS:
        raise ValueError("no number of parts")
    held = None if widths is None else tuple([tuple(part) for part in widths])
    if held is not None and not all(_are_sizes(part) for part in held):
        raise ValueError("no widths")
    return Parts(axis, sizes, held)


def _are_sizes(values: Sequence[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
