"""FSDP1's flat parameters (LOCAL_STATE_DICT), unflattened.

All parameters of one FSDP unit lie behind each other in `<unit>._flat_param`, in the order of `named_parameters`; tied
ones once. With `use_orig_params=True` each begins at a multiple of 16 bytes of the compute dtype and the whole is
padded to a multiple of the world size; the state dict then holds the parameters' fragments under their own names too,
as views of the flat parameter (torch `distributed/fsdp/_flat_param.py`, `_init_flat_param_and_metadata`). Shapes are
stored nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

from unshard.checkpoint import Shape
from unshard.errors import IncompleteError, ModelError, UnshardError
from unshard.formats.torch_file.records import Opaque, StoredTensor, WrapperSubclass
from unshard.tensors import Chunk, Tensor
from unshard.words import items_in_words
from unshard.wrappers import strip_components

FindOrder: TypeAlias = Callable[[Tensor, Sequence[str]], "list[str] | None"]

FLAT_PARAM = "_flat_param"
_ALIGNMENTS = (4, 8, 2, 16, 1)
"""Elements in 16 bytes of the compute dtype: fp32, 16-bit types, fp64, 8-bit types; 1: no alignment."""


def is_flat_parameter(name: str) -> bool:
    """Whether a key of a state dict is a flat parameter."""
    return name.rsplit(".", 1)[-1] == FLAT_PARAM


@dataclass(slots=True)
class Fragments:
    """What `use_orig_params=True` left beside the flat parameters: name → rank → (byte in that file, elements).

    They hold nothing that the flat parameters do not, but prove where each parameter lies in them.
    """

    places: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)

    def take(self, state_dict: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """The state dict of one rank without its fragments, which are kept here.

        A fragment is a plain tensor of one dimension that is empty or a view of a flat parameter's storage.
        """
        storages = {
            (tensor.storage.file, tensor.storage.offset)
            for name, value in state_dict.items()
            if is_flat_parameter(name)
            for tensor in _local_tensors(value)
        }
        rest: dict[str, Any] = {}
        flat = any(is_flat_parameter(name) for name in state_dict)
        for name, value in state_dict.items():
            if flat and isinstance(value, StoredTensor) and not is_flat_parameter(name) and len(value.shape) == 1:
                storage, size = value.storage, value.shape[0]
                if size == 0 or (storage.file, storage.offset) in storages:
                    place = storage.offset + value.offset * value.dtype.itemsize
                    self.places.setdefault(name, {})[rank] = (place, size)
                    continue
            rest[name] = value
        return rest

    def order(self, names: Sequence[str]) -> list[str] | None:
        """The parameters in the order in which they lie in their flat parameter; None without a fragment of each."""
        if not all(any(size for _, size in self.places.get(name, {}).values()) for name in names):
            return None
        return sorted(names, key=lambda name: min((rank, at) for rank, (at, size) in self.places[name].items() if size))

    def find_original(self, name: str, others: Sequence[str]) -> str | None:
        """That of `others` which is the same memory as a parameter, if it is a tied one."""
        here = self.places.get(name)
        if here is None or not any(size for _, size in here.values()):
            return None
        return next((other for other in others if self.places.get(other) == here), None)


def unflatten(
    flats: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    fragments: Fragments,
    taken: Mapping[str, Tensor],
    world_size: int,
    find_order: FindOrder | None = None,
) -> tuple[dict[str, Tensor], list[UnshardError]]:
    """The parameters of all flat parameters, in the order of `shapes`, and what does not fit.

    `shapes` are the model's in the order of `named_parameters`. Where they have no order, `find_order` finds it for a
    flat parameter and its members, or None; it is asked where no fragments tell. `taken` are tensors that lie in the
    state dict as they are (parameters that FSDP ignored, buffers).
    """
    units = {strip_components(name)[: -len(FLAT_PARAM)]: flat for name, flat in flats.items()}
    known = {strip_components(name) for name in taken}
    found = _assign([name for name in shapes if name not in known], list(units), fragments)
    problems: list[UnshardError] = []
    if found.homeless:
        problems.append(ModelError(f"no flat parameter holds {items_in_words(found.homeless)}", hint=_HINT))
    if unknown := _unknown_fragments(fragments, shapes):
        problems.append(
            ModelError(
                f"the checkpoint holds pieces of {items_in_words(unknown)}, which the known shapes do not have: they "
                "are of another model, or of another version of transformers",
                hint="leave --shapes-from out and give the config.json that the run itself wrote: --config DIR",
            )
        )
        return {}, problems
    strangers = [flat.name for unit, flat in units.items() if not found.members[unit]]
    if strangers:
        problems.append(
            IncompleteError(
                f"no parameter of the known shapes lies in {items_in_words(strangers)}: the model lay in a module of "
                "the trainer's own, or had adapters, whose shapes nobody knows",
                hint="save within FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)",
            )
        )
        return {}, problems
    tensors: dict[str, Tensor] = {}
    for unit, flat in units.items():
        members = found.members[unit]
        try:
            names = _in_order(flat, members, fragments, find_order)
            tensors |= _take_apart(flat, {name: shapes[name] for name in names}, fragments, world_size)
        except UnshardError as error:
            problems.append(error)
    tensors |= {name: tensors[original].rename(name) for name, original in found.tied.items() if original in tensors}
    return {name: tensors[name] for name in shapes if name in tensors}, problems


_HINT = "name a Hugging Face directory of the same model with --shapes-from DIR"


def shapes_unknown(flats: Sequence[str], *, has_config: bool) -> UnshardError:
    """The problem of a checkpoint with flat parameters whose shapes nobody knows; a config is of no known family."""
    return IncompleteError(
        f"{len(flats)} FSDP1 flat parameters ({items_in_words(flats, 4)}): the file does "
        "not say which parameters of which shapes lie in them",
        hint=_HINT if has_config else f"give the model's config.json with --config DIR, or {_HINT}",
    )


def _unknown_fragments(fragments: Fragments, shapes: Mapping[str, Shape]) -> list[str]:
    """Parameters of which there are fragments though the shapes lack them, tied ones aside."""
    names = list(shapes)
    unknown = [name for name in fragments.places if strip_components(name) not in shapes]
    return [name for name in unknown if fragments.find_original(name, names) is None]


@dataclass(frozen=True, slots=True)
class _Assignment:
    """Which parameters lie in which flat parameter.

    members:  module of the flat parameter, with its dot → names; homeless: names that lie in none.
    tied:     name → that of the parameter whose memory it shares.
    """

    members: dict[str, list[str]]
    homeless: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)


def _assign(names: Iterable[str], units: Sequence[str], fragments: Fragments) -> _Assignment:
    """Give every parameter to the innermost unit that it lies in."""
    found = _Assignment({unit: [] for unit in units})
    for name in names:
        unit = next((prefix for prefix in _prefixes(name) if prefix in found.members), None)
        if unit is None:
            found.homeless.append(name)
        elif original := fragments.find_original(name, found.members[unit]):
            found.tied[name] = original
        else:
            found.members[unit].append(name)
    return found


def _take_apart(flat: Tensor, shapes: Mapping[str, Shape], fragments: Fragments, world_size: int) -> dict[str, Tensor]:
    """The parameters in a flat parameter, in their order in it. Raises ModelError where these are not all of it."""
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    starts = _find_starts(flat, sizes, fragments, world_size)
    if starts is None:
        raise ModelError(
            f"{flat.name} has {flat.size} elements, but the {len(sizes)} parameters of the known shapes that belong "
            f"to it have {sum(sizes.values())}, and no padding of FSDP makes them fit",
            hint=_HINT,
        )
    pieces = {name: flat.slice(0, start, start + sizes[name]) for name, start in starts.items()}
    return {name: piece.reshape(shapes[name]).rename(name) for name, piece in pieces.items()}


def _in_order(flat: Tensor, names: Sequence[str], fragments: Fragments, find_order: FindOrder | None) -> Sequence[str]:
    """The members of a flat parameter in the order in which they lie in it. Raises UnshardError where nothing tells."""
    if find_order is None:
        return names
    order = fragments.order(names) or find_order(flat, names)
    if order is None:
        raise IncompleteError(
            f"{flat.name} holds {len(names)} parameters in the order of the model's definition. The reference's files "
            "tell their shapes but are sorted by name, and its values are not found in the flat parameter",
            hint="name the model that the training began with, --shapes-from DIR, or a directory with a "
            "pytorch_model.bin, which keeps the order",
        )
    return order


def _find_starts(
    flat: Tensor, sizes: Mapping[str, int], fragments: Fragments, world_size: int
) -> dict[str, int] | None:
    """Where in the flat parameter each parameter begins, or None where nothing fits what is stored.

    Without fragments there is no padding. With them the alignment is the one that puts every fragment where it is.
    """
    aligned = any(name in fragments.places for name in sizes)
    for alignment in _ALIGNMENTS if aligned else (1,):
        starts: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            starts[name] = -(-end // alignment) * alignment
            end = starts[name] + size
        spare = flat.size - end
        fits = spare == 0 or (aligned and 0 < spare < world_size)
        if fits and all(_is_where(flat, name, starts[name], sizes[name], fragments) for name in sizes):
            return starts
    return None


def _is_where(flat: Tensor, name: str, start: int, size: int, fragments: Fragments) -> bool:
    """Whether the fragments of a parameter lie where a start in the flat parameter puts them."""
    held = {chunk.rank: _overlap(chunk, start, start + size) for chunk in flat.chunks}
    for rank, (place, count) in fragments.places.get(name, {}).items():
        if held.get(rank) != ((place, count) if count else None):
            return False
    return True


def _overlap(chunk: Chunk, start: int, stop: int) -> tuple[int, int] | None:
    """(byte in the file, elements) of the part of a one-dimensional chunk in `start:stop`; None where there is none."""
    low, high = max(start, chunk.box.offsets[0]), min(stop, chunk.box.stops[0])
    if low >= high:
        return None
    return chunk.extent.offset + (low - chunk.box.offsets[0]) * chunk.extent.strides[0], high - low


def _local_tensors(value: Any) -> Iterator[StoredTensor]:
    """The stored tensors of a flat parameter: the shards of a ShardedTensor, or the tensor itself."""
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, WrapperSubclass) and isinstance(value.state, tuple) and value.state:
        for shard in value.state[0] if isinstance(value.state[0], list) else ():
            tensor = shard.get("tensor") if isinstance(shard, Opaque) else None
            if isinstance(tensor, StoredTensor):
                yield tensor


def _prefixes(name: str) -> Iterator[str]:
    """The modules that a parameter lies in, from the innermost to the root: "a.b.", "a.", ""."""
    parts = name.split(".")[:-1]
    for count in range(len(parts), -1, -1):
        yield "".join([part + "." for part in parts[:count]])
