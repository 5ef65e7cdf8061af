"""The files of model states that a reading needs: the first of each model-parallel rank, and all where pieces lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from unshard.errors import IncompleteError, UnshardError
from unshard.formats.deepspeed.absent import FETCH, missing_in_words
from unshard.formats.deepspeed.files import File, TagFiles
from unshard.formats.deepspeed.partitions import MAX_RANKS
from unshard.formats.deepspeed.states import FrozenPieces, ModelStates, read_frozen_pieces, read_model_states
from unshard.formats.deepspeed.stored import attempt
from unshard.words import items_in_lines


def read_first_states(files: TagFiles, problems: list[UnshardError]) -> dict[int, ModelStates]:
    """By model-parallel rank, the model states of its first data-parallel rank; what is wrong goes to `problems`."""
    firsts: dict[int, File] = {}
    for (_, rank), file in sorted(files.model.items(), key=lambda item: _order(item[0][0])):
        firsts.setdefault(rank, file)
    read = {rank: attempt(partial(read_model_states, file), problems) for rank, file in sorted(firsts.items())}
    states = {rank: one for rank, one in read.items() if one is not None}
    problems += _check_steps(states.values())
    return states


def read_pieces(
    files: TagFiles, first: ModelStates, rank: int, ranks: int | None, problems: list[UnshardError]
) -> list[FrozenPieces]:
    """What all data-parallel ranks of one model-parallel rank have of frozen parameters at stage 3; none if any lacks.

    first: the model states of the first of them. ranks: how many there are, None where only `first` can tell.
    """
    recorded = first.recorded.get("dp_world_size")
    count = ranks or (recorded if type(recorded) is int else 1)
    found: list[FrozenPieces] = []
    missing: list[str] = []
    faults: list[UnshardError] = []
    for data_rank in range(min(count, MAX_RANKS)):
        file = files.model.get((data_rank, rank))
        if file is None:
            missing.append(f"zero_pp_rank_{data_rank}_mp_rank_{rank:02d}_model_states.pt")
            continue
        pieces = first.pieces if file == first.file else attempt(partial(read_frozen_pieces, file), faults)
        found += [] if pieces is None else [pieces]
    if missing:
        told = missing_in_words(missing, f"{count:,} files of model states")
        text = f"each data-parallel rank has a piece of each frozen parameter; {told}"
        faults.append(IncompleteError(text, hint=FETCH))
    faults += _check_steps(found)
    problems += faults
    return [] if faults else found


def _order(data_rank: int | None) -> int:
    return -1 if data_rank is None else data_rank


def _check_steps(states: Iterable[ModelStates | FrozenPieces]) -> Iterator[UnshardError]:
    """A problem where files are of different steps."""
    steps: dict[int | None, str] = {}
    for one in states:
        steps.setdefault(one.step, str(one.file.name))
    if len(steps) > 1:
        told = items_in_lines([f"{file}: step {step}" for step, file in steps.items()])
        yield IncompleteError(f"files of model states are of different saves:\n{told}", hint="fetch those of one save")
