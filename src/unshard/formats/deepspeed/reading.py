"""From the files of a tag to a catalog: each model-parallel rank by itself, then all of them together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unshard.checkpoint import Checkpoint, Note
from unshard.errors import IncompleteError, UnshardError, command_line, raise_all
from unshard.formats.contract import Source
from unshard.formats.deepspeed.account import Account
from unshard.formats.deepspeed.files import LATEST, TagFiles, find_files, find_tag
from unshard.formats.deepspeed.gathering import read_first_states
from unshard.formats.deepspeed.model_parallel import join_model, missing_ranks
from unshard.formats.deepspeed.rank_reader import RankReader
from unshard.formats.surroundings import look_around
from unshard.words import items_in_lines, items_in_words

_PARENTS = 2
"""How far above a tag a config may lie: Trainer's `checkpoint-N`, accelerate's `pytorch_model` in a directory."""


def read_tag(source: Source) -> Checkpoint:
    """The catalog of a tag. Raises what is wrong where no model states can be read."""
    directory, by_latest = find_tag(source)
    files = find_files(source.roots, directory.name)
    account = Account()
    if by_latest:
        account.notes.append(Note(f"`{LATEST}` names {directory.name}"))
    account.problems += _two_runs(files)
    states = read_first_states(files, account.problems)
    if not states:
        raise_all(account.problems or [_no_states(files, directory)])
    account.problems += [] if account.problems else missing_ranks(states)
    reader = RankReader(files, source.weights, account)
    held = {rank: reader.read(rank, one) for rank, one in states.items()}
    account.close(len(states), has_optimizer=bool(files.optimizer))
    whole = join_model(source, files, states, held, account.widened.widen, account.problems)
    around = look_around([directory, *source.also], _PARENTS)
    return Checkpoint(
        format="deepspeed",
        title=account.title(states[min(states)].step, has_layers=bool(files.layers)),
        roots={**source.roots, **(around.roots or {})},
        tensors=whole.tensors,
        config=around.config,
        assets=around.assets,
        world_size=account.ranks,
        mesh=((("dp", account.ranks),) if account.ranks else ()) + whole.mesh,
        placements=whole.cuts,
        adapter=around.adapter,
        dialect=whole.dialect,
        facts=whole.facts,
        weights=account.taken,
        excluded=account.excluded,
        notes=(*whole.notes, *account.lines()),
        problems=(*account.problems, *around.problems),
    )


def _two_runs(files: TagFiles) -> Iterator[UnshardError]:
    """A problem where a directory was used again by a run of another precision or stage."""
    pairs = files.find_rivals()
    if pairs:
        told = [f"{one.name} and {other.name}" for one, other in pairs]
        yield IncompleteError(
            f"files of two runs lie here; of each pair, one file is of another stage or precision:\n"
            f"{items_in_lines(told)}",
            hint="move the files of the other run out of the directory",
        )


def _no_states(files: TagFiles, directory: Path) -> UnshardError:
    names = [file.path.name for file in (*files.optimizer.values(), *files.layers.values())]
    return IncompleteError(
        f"{directory}: names and shapes of parameters lie in files of model states, of which none is here; there are "
        f"{items_in_words(names, 3)}",
        hint=f"fetch `*mp_rank_*_model_states.pt` too: {command_line('ls', directory)}",
    )
