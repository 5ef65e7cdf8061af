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
from dataclasses import dataclass, field
from typing import Any

from unshard.errors import FormatError
from unshard.formats.deepspeed import affine
from unshard.formats.deepspeed.patterns import LONGEST_NAME, Patterns
from unshard.formats.megatron.sections import join_along, join_replicas
from unshard.tensors import Tensor, concat

Widths = tuple[tuple[int, ...], ...]
"""Per part of a parameter, how much of it each rank holds."""


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
    """A `universal_checkpoint_info`, read; raises FormatError where it cannot be followed.

    buffers: names of persistent buffers, of which no pattern speaks: each rank has all of them.
    """

    recorded: Mapping[str, Any]
    buffers: Collection[str]
    maps: Patterns[Any] = field(init=False)
    kinds: Patterns[str] = field(init=False)
    parts: Patterns[Parts] = field(init=False)
    unsupported: Patterns[bool] = field(init=False)
    vocabulary: Patterns[bool] = field(init=False)

    def __post_init__(self) -> None:
        kinds = {
            "tp_replicated_parameter_patterns": "replicated",
            "parameter_to_average_patterns": "averaged",
            "parameter_with_2_sub_params_cat_dim_0": "gated",
            "parameter_with_row_parallelism_patterns": "axis 1",
        }
        said = [(pattern, kind) for key, kind in kinds.items() for pattern in self._list(key)]
        unsupported = self.recorded.get("autotp_unsupported_parameter_patterns") or ()
        for name, value in (
            ("maps", Patterns(self._maps())),
            ("kinds", Patterns(said)),
            ("parts", Patterns(self._parts())),
            ("unsupported", Patterns([(pattern, True) for pattern in unsupported])),
            ("vocabulary", Patterns([(pattern, True) for pattern in self._list("vocabulary_parameter_patterns")])),
        ):
            object.__setattr__(self, name, value)

    def join(self, name: str, shards: Sequence[Tensor]) -> tuple[str, Tensor]:
        """In words how a parameter is shared, and the whole of it. Raises ValueError where shards do not fit."""
        if len(name) > LONGEST_NAME:
            raise ValueError(
                f"{name[:LONGEST_NAME]}…: a name of over {LONGEST_NAME} characters is matched with no pattern"
            )
        words, joined = self._join(name, shards)
        if self.vocabulary.find(name):
            rows = self.recorded.get("original_vocab_size")
            if rows is not None and (type(rows) is not int or not 0 < rows <= (*joined.shape, 0)[0]):
                raise ValueError(f"{name}: of shape {list(joined.shape)}, but original_vocab_size is {rows!r}")
            joined = joined if rows is None else joined.slice(0, 0, rows)
        return words, joined

    def _join(self, name: str, shards: Sequence[Tensor]) -> tuple[str, Tensor]:
        recorded = self.maps.find(name)
        if recorded is not None:
            return "as its affine map says", affine.join_pieces(recorded, shards)
        kind = self.kinds.find(name)
        if kind is None and self.unsupported.find(name):
            raise ValueError(f"{name}: DeepSpeed itself declares no way to put its shards together")
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

    def _list(self, key: str) -> Sequence[Any]:
        patterns = self.recorded.get(key) or ()
        if not isinstance(patterns, (list, tuple)):
            raise FormatError(f"universal_checkpoint_info: `{key}` is no list")
        return patterns

    def _maps(self) -> Sequence[tuple[object, Any]]:
        maps = self.recorded.get("affine_map") or {}
        if not isinstance(maps, Mapping) or not isinstance(maps.get("params", {}), Mapping):
            raise FormatError("universal_checkpoint_info: `affine_map` is no table of maps")
        version = maps.get("version", affine.VERSION)
        if type(version) is not int or version > affine.VERSION:
            raise FormatError(
                f"universal_checkpoint_info has affine maps of version {version!r}; {affine.VERSION} is read",
                hint="this DeepSpeed is newer than what is known here: is there a newer release of unshard?",
            )
        return list(maps.get("params", {}).items())

    def _parts(self) -> Sequence[tuple[object, Parts]]:
        widths = self.recorded.get("sub_param_shard_widths") or {}
        found: list[tuple[object, Parts]] = []
        try:
            for entry in self._list("parameter_with_sub_params"):
                found += [(pattern, _read_parts(entry, widths.get(pattern))) for pattern in entry["patterns"]]
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise FormatError("universal_checkpoint_info: `parameter_with_sub_params` is malformed") from None
        return found


def read_declaration(recorded: object, buffers: Collection[str]) -> Declaration:
    """Raises FormatError where it cannot be followed."""
    if not isinstance(recorded, Mapping):
        raise FormatError(f"universal_checkpoint_info is a {type(recorded).__name__}, not a dict")
    return Declaration(recorded, buffers)


def _read_parts(entry: Mapping[str, Any], widths: object) -> Parts:
    """Raises ValueError, and what indexing raises, where the entry is malformed."""
    axis = entry["partition_dim"]
    sizes = entry["shape"][axis]
    sizes = sizes if type(sizes) is int else tuple(sizes)
    if type(axis) is not int or axis < 0 or (isinstance(sizes, tuple) and not _are_sizes(sizes)):
        raise ValueError("no axis or sizes")
    if isinstance(sizes, int) and not 0 < sizes <= _MOST_PARTS:
        raise ValueError("no number of parts")
    held = None if widths is None else tuple([tuple(part) for part in widths])  # type: ignore[attr-defined]
    if held is not None and not all(_are_sizes(part) for part in held):
        raise ValueError("no widths")
    return Parts(axis, sizes, held)


_MOST_PARTS = 1 << 10


def _are_sizes(values: Sequence[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
