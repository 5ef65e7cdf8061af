"""From flat partitions to the masters of parameters. No byte is touched: a parameter is a few ranges of flat tensors.

Stages 1 and 2: of each group, the partitions of all ranks one behind the other are the parameters one behind the other
in the order of `param_shapes`, then padding (to a multiple of twice the ranks; newer releases cut it off when they
save), and, with `parameter_alignment`, gaps. Stage 3: each parameter is cut in as many equal parts as there are ranks,
the last ones padded, and each rank has its parts one behind the other. Sources: DeepSpeed
`runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`, `utils/zero_to_fp32.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

from unshard.checkpoint import Shape
from unshard.errors import FormatError, IncompleteError
from unshard.formats.deepspeed.experts import expert_partitions, global_names, is_expert
from unshard.formats.deepspeed.partitions import Partition
from unshard.formats.torch_file import StoredTensor
from unshard.tensors import Box, Chunk, Extent, Tensor
from unshard.words import names_in_words

Group = Mapping[str, Shape]

_OTHER_RUN = "the model states and the optimizer states must be of one save: fetch them again"


class Stream:
    """Flat tensors one behind the other, each of a rank."""

    def __init__(self, parts: Sequence[tuple[int, StoredTensor]]) -> None:
        self.parts = parts
        self.ends = list(accumulate([flat.shape[0] for _, flat in parts]))

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def chunks(self, start: int, stop: int, first: int = 0) -> Iterator[Chunk]:
        """Elements `start` to `stop` as the elements `first`, … of a tensor of one axis."""
        place = bisect_right(self.ends, start)
        while start < stop:
            (rank, flat), end = self.parts[place], self.ends[place]
            count = min(stop, end) - start
            if count:
                size, storage = flat.dtype.itemsize, flat.storage
                offset = storage.offset + (flat.offset + start - (end - flat.shape[0])) * size
                yield Chunk(Box((first,), (count,)), Extent(storage.file, offset, (size,), flat.dtype), rank)
            start, first, place = start + count, first + count, place + 1


def join_partitions(
    partitions: Sequence[Partition], groups: Sequence[Group], ds_config: Mapping[str, object]
) -> dict[str, Tensor]:
    """The masters of all parameters, in the order of the groups.

    partitions: of all data-parallel ranks, in their order. groups: `param_shapes`.

    Raises FormatError and IncompleteError where the sizes do not fit.
    """
    if partitions[0].stage == 3:
        return dict(_join_stage_3(partitions, groups))
    masters: dict[str, Tensor] = {}
    flats = len(partitions[0].flats)
    if len(groups) != flats:
        raise IncompleteError(
            f"the model states have {len(groups)} groups of parameters, the optimizer states {flats}", hint=_OTHER_RUN
        )
    in_order = not _may_be_round_robin(ds_config)
    for number, group in enumerate(groups):
        count = _count(partitions[0], number)
        for expert_rank, ranks in enumerate(expert_partitions(len(partitions), count, ds_config)):
            holders = [partitions[rank] for rank in ranks]
            named = _name_experts(group, expert_rank) if count < len(partitions) else group
            masters |= _join_group(holders, number, named, in_order=in_order)
    return masters


def _count(partition: Partition, group: int) -> int:
    return partition.counts[group] if group < len(partition.counts) else partition.ranks


def _name_experts(group: Group, expert_rank: int) -> Group:
    others = [name for name in group if not is_expert(name)]
    if others:
        raise FormatError(
            f"parameters that are no experts are partitioned over fewer ranks than others: {names_in_words(others)}",
            hint=_OTHER_RUN,
        )
    names = global_names(group, expert_rank)
    return {names[name]: shape for name, shape in group.items()}


def _may_be_round_robin(ds_config: Mapping[str, object]) -> bool:
    """Whether parameters may be dealt out in turn, with records of fragments that lie in another order.

    What is saved of the configuration is what `deepspeed.initialize` was given: of the path of a file, no word.
    """
    zero = ds_config.get("zero_optimization")
    return not ds_config or (isinstance(zero, Mapping) and bool(zero.get("round_robin_gradients")))


def _join_group(
    partitions: Sequence[Partition], number: int, group: Group, *, in_order: bool
) -> Iterator[tuple[str, Tensor]]:
    """(name, master) of a group of stages 1 and 2."""
    flats = [(one.rank, one.flats[number]) for one in partitions]
    stream = Stream(flats)
    gaps = partitions[0].gaps[number] if number < len(partitions[0].gaps) else ()
    if len(gaps) not in (0, len(group)):
        raise FormatError(f"group {number} has {len(group)} parameters, and gaps behind {len(gaps)} of them")
    starts, place = [], 0
    for position, shape in enumerate(group.values()):
        starts.append(place)
        place += prod(shape) + (gaps[position] if gaps else 0)
    _check_sizes(stream, place, len(partitions), number)
    if in_order:
        _check_slices(partitions, number, dict(zip(group, starts, strict=True)), group, stream)
    dtype = flats[0][1].dtype
    for (name, shape), start in zip(group.items(), starts, strict=True):
        size = prod(shape)
        chunks = tuple(stream.chunks(start, start + size))
        yield name, Tensor(name, dtype, (size,), chunks).reshape(shape)


def _check_sizes(stream: Stream, needed: int, ranks: int, number: int) -> None:
    """The partitions hold the parameters, and padding where it was kept; all but the last ones are equally long."""
    align = 2 * ranks
    if needed > stream.size or -(-stream.size // align) != -(-needed // align):
        raise IncompleteError(
            f"group {number}: its parameters have {needed:,} elements, its {ranks} partitions {stream.size:,}",
            hint=_OTHER_RUN,
        )
    sizes = [flat.shape[0] for _, flat in stream.parts]
    cut = next((place for place, size in enumerate(sizes) if size != sizes[0]), len(sizes))
    if any(size > sizes[0] for size in sizes[cut:]) or any(sizes[cut + 1 :]):
        raise IncompleteError(
            f"group {number}: its partitions have {', '.join([f'{size:,}' for size in sizes[:16]])} elements, but only "
            "the last ones may be shorter than the others",
            hint=_OTHER_RUN,
        )


def _check_slices(
    partitions: Sequence[Partition], number: int, starts: Mapping[str, int], group: Group, stream: Stream
) -> None:
    """What each rank records of its fragments agrees with the order of `param_shapes`."""
    wrong: list[str] = []
    step = partitions[0].flats[number].shape[0]
    for place, one in enumerate(partitions):
        begin, end = place * step, stream.ends[place]
        for name, (start, count) in (one.slices[number] if number < len(one.slices) else {}).items():
            if name not in starts:
                continue
            low = max(starts[name], begin)
            high = min(starts[name] + prod(group[name]), end)
            if (start, count) != (low - begin, high - low):
                wrong.append(name)
    if wrong:
        raise FormatError(
            f"group {number}: the order of `param_shapes` is not that of the fragments in `param_slice_mappings`: "
            f"{names_in_words(wrong)}",
            hint=_OTHER_RUN,
        )


def _join_stage_3(partitions: Sequence[Partition], groups: Sequence[Group]) -> Iterator[tuple[str, Tensor]]:
    """(name, master) of stage 3. Sub-groups are cut between parameters: a rank's flat tensors are one stream."""
    streams = [Stream([(one.rank, flat) for flat in one.flats]) for one in partitions]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    needed = sum([_part(shape, len(partitions)) for shape in shapes.values()])
    wrong = [one for one, stream in zip(partitions, streams, strict=True) if stream.size != needed]
    if wrong:
        size = streams[partitions.index(wrong[0])].size
        raise IncompleteError(
            f"{wrong[0].file.name}: its masters have {size:,} elements, but a part of each parameter, over "
            f"{len(partitions)} ranks, makes {needed:,}",
            hint=_OTHER_RUN,
        )
    kinds = set(partitions[0].kinds)
    if len(kinds) > 1:
        raise FormatError(f"{partitions[0].file.name}: has masters of several types: {', '.join(sorted(kinds))}")
    dtype = partitions[0].flats[0].dtype if partitions[0].flats else None
    place = 0
    for name, shape in shapes.items():
        size, part = prod(shape), _part(shape, len(partitions))
        chunks: list[Chunk] = []
        for position, stream in enumerate(streams):
            first = position * part
            count = min(part, size - first)
            if count > 0:
                chunks += stream.chunks(place, place + count, first)
        if dtype is not None:
            yield name, Tensor(name, dtype, (size,), tuple(chunks)).reshape(shape)
        place += part


def join_pieces(name: str, shape: Shape, pieces: Sequence[tuple[int, StoredTensor]]) -> Tensor:
    """A frozen parameter of stage 3 from every rank's piece. Raises IncompleteError where their sizes do not fit."""
    size, part = prod(shape), _part(shape, len(pieces))
    dtype = pieces[0][1].dtype
    if any(piece.shape != (part,) or piece.dtype is not dtype for _, piece in pieces):
        found = ", ".join([f"{piece.dtype.name} {list(piece.shape)}" for _, piece in pieces[:16]])
        raise IncompleteError(
            f"`{name}` {list(shape)}: its pieces on {len(pieces)} ranks have {part:,} elements of one type each; found "
            f"{found}",
            hint=_OTHER_RUN,
        )
    chunks = tuple(Stream(pieces).chunks(0, size))
    return Tensor(name, dtype, (size,), chunks).reshape(shape)


def _part(shape: Shape, ranks: int) -> int:
    """Elements of each rank's part of a parameter."""
    return -(-prod(shape) // ranks)
