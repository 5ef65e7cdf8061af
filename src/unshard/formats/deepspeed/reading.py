"""From the files of a tag to a catalog: each model-parallel rank by itself, then all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unshard.checkpoint import Checkpoint, Note, Shape
from unshard.errors import FormatError, IncompleteError, UnshardError, command_line, raise_all
from unshard.formats.contract import Source
from unshard.formats.deepspeed.experts import check_files, check_masters, is_expert, merge_files
from unshard.formats.deepspeed.files import LATEST, File, TagFiles, find_files, tag_of
from unshard.formats.deepspeed.gathering import read_first_states, read_pieces
from unshard.formats.deepspeed.masters import join_partitions
from unshard.formats.deepspeed.model_parallel import join_model, missing_ranks
from unshard.formats.deepspeed.partitions import Partitions, read_partitions
from unshard.formats.deepspeed.states import ModelStates
from unshard.formats.deepspeed.stored import read_state
from unshard.formats.deepspeed.weights import Weights, Widened, read_weights, same_parameters
from unshard.formats.surroundings import look_around
from unshard.options import Weights as Choice
from unshard.tensors import Tensor
from unshard.words import count_in_words, items_in_lines, items_in_words

_LISTED = 20
_PARENTS = 2
"""How far above a tag a config may lie: Trainer's `checkpoint-N`, accelerate's `pytorch_model` in a directory."""


def read_tag(source: Source) -> Checkpoint:
    """The catalog of a tag. Raises what is wrong where no model states can be read."""
    directory = tag_of(source)
    files = find_files(source.roots, directory.name)
    problems: list[UnshardError] = []
    states = read_first_states(files, problems)
    if not states:
        raise_all(problems or [_no_states(files, str(directory))])
    problems += [] if problems else missing_ranks(states)
    reader = _Reader(source, files, states, problems)
    held = {rank: reader.read_rank(rank) for rank in states}
    reader.close()
    whole = join_model(source, files, states, held, reader.widen_layers, problems)
    around = look_around([directory, *source.also], _PARENTS)
    by_latest = directory.parent == source.path
    return Checkpoint(
        format="deepspeed",
        title=reader.title(),
        roots={**source.roots, **(around.roots or {})},
        tensors=whole.tensors,
        config=around.config,
        assets=around.assets,
        world_size=reader.ranks,
        mesh=((("dp", reader.ranks),) if reader.ranks else ()) + whole.mesh,
        placements=whole.cuts,
        adapter=around.adapter,
        dialect=whole.dialect,
        facts=whole.facts,
        weights=reader.taken,
        excluded=reader.excluded,
        notes=(*([Note(f"`{LATEST}` names {directory.name}")] if by_latest else []), *whole.notes, *reader.all_notes()),
        problems=(*problems, *around.problems),
    )


@dataclass(slots=True)
class _Reader:
    """Reads a tag rank by rank.

    states:   by model-parallel rank, the model states of its first data-parallel rank; in the order of ranks.
    ranks:    data-parallel ranks over which masters are partitioned; None where there are no partitions.
    taken:    which weights were read; None where the checkpoint keeps them once.
    bare:     model-parallel ranks without a file of optimizer states, though their masters are partitioned.
    nameless: whether optimizer states lie there of which nothing tells the parameters' places.
    """

    source: Source
    files: TagFiles
    states: Mapping[int, ModelStates]
    problems: list[UnshardError]
    notes: list[Note] = field(default_factory=list)
    widened: Widened = field(default_factory=Widened)
    excluded: dict[str, Shape] = field(default_factory=dict)
    mastered: int = 0
    stage: int = 0
    ranks: int | None = None
    taken: Choice | None = None
    bare: list[int] = field(default_factory=list)
    nameless: bool = False
    kinds: Counter[str] = field(default_factory=Counter)

    def read_rank(self, rank: int) -> Mapping[str, Tensor]:
        """The tensors of one model-parallel rank, in the order of its module."""
        before = len(self.problems)
        states, partitions = self.states[rank], self._partitions(rank)
        stage = partitions.stage if partitions else _configured_stage(states)
        self.stage = max(self.stage, stage)
        in_pieces = stage == 3 and states.frozen
        ranks = len(partitions.partitions) if partitions else None
        pieces = read_pieces(self.files, states, rank, ranks, self.problems) if in_pieces else [states.pieces]
        weights = read_weights(states, pieces, rank, stage, self.problems)
        self.excluded |= weights.excluded
        self._add_experts(rank, weights)
        masters = self._masters(states, partitions)
        shared = same_parameters(states)
        self.kinds.update([tensor.dtype.name for name, tensor in weights.stored.items() if name not in states.buffers])
        self.kinds.update([tensor.dtype.name for tensor in weights.rounded.values()])
        if stage == 3 and not partitions and weights.rounded:
            self.problems += [] if self.problems else [_no_partitions(states)]
            return {}
        tensors = _ordered(self._choose(states, weights, masters, shared), weights.order, shared)
        lost = [name for name in weights.rounded if name not in tensors]
        if lost and len(self.problems) == before:
            self.problems.append(_no_values(states, lost))
        return tensors

    def _choose(
        self, states: ModelStates, weights: Weights, masters: Mapping[str, Tensor], shared: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Masters and what stands beside them, or the module's own weights."""
        if not masters:
            return weights.stored
        if self.source.weights == "model":
            self.taken = "model"
            return {name: _round(tensor, weights) for name, tensor in masters.items()} | weights.stored
        self.taken = "master"
        self.mastered += len(masters)
        if self.files.experts:
            self.problems += check_masters(filter(is_expert, masters), weights.stored)
        having = {*masters, *[name for name, other in shared.items() if other in masters]}
        stored = {name: tensor for name, tensor in weights.stored.items() if name not in having}
        return self.widened.widen(stored, (), states.buffers) | dict(masters)

    def _partitions(self, rank: int) -> Partitions | None:
        """What the optimizer files of a rank hold; None without any, and where they are not wanted."""
        states = self.states[rank]
        files = {place[0]: file for place, file in self.files.optimizer.items() if place[1] == rank}
        if self.source.weights == "model" and _configured_stage(states) < 3:
            self.taken = "model" if files or states.groups is not None else None
            return None
        if states.groups is None:
            self.nameless |= bool(files)
            return None
        if not files:
            self.bare.append(rank)
            return None
        found = read_partitions(files, self.problems)
        if found:
            self.ranks = len(found.partitions)
            self.notes += found.notes
        return found

    def _masters(self, states: ModelStates, partitions: Partitions | None) -> dict[str, Tensor]:
        if partitions is None or states.groups is None:
            return {}
        try:
            masters = join_partitions(partitions.partitions, states.groups, states.config)
        except UnshardError as error:
            self.problems.append(error)
            return {}
        self._compare_steps(states, partitions)
        return masters

    def _compare_steps(self, states: ModelStates, partitions: Partitions) -> None:
        step, skipped = partitions.partitions[0].step, states.recorded.get("skipped_steps")
        if step is None or states.step is None or type(skipped) is not int:
            return
        if step != states.step - skipped:
            text = f"the model states are of step {states.step:,}, and the optimizer counts {step:,.0f} steps"
            self.notes.append(
                Note(f"{text}: after a restart that may be so; else files of two saves are mixed", (), "warning")
            )

    def _add_experts(self, rank: int, weights: Weights) -> None:
        files = {place[:2]: file for place, file in self.files.experts.items() if place[2] == rank}
        recorded = self.states[rank].recorded.get("num_experts")
        if not files and not recorded:
            return
        try:
            self.problems += check_files(list(files), recorded, rank)
        except FormatError as error:
            self.problems.append(error)
        contents = [read_state(file, rank, self.problems) for _, file in sorted(files.items(), key=_expert_order)]
        experts, problems = merge_files(contents)
        self.problems += problems
        weights.stored |= experts
        weights.order += experts

    def widen_layers(self, tensors: Mapping[str, Tensor], mastered: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of a pipeline's layers as they stand beside masters."""
        return self.widened.widen(tensors, mastered)

    # -- what is said --------------------------------------------------------------------------------------------------

    def title(self) -> str:
        """For people: "DeepSpeed ZeRO-3, 4 ranks, step 500"."""
        step = self.states[min(self.states)].step
        words = [f"DeepSpeed ZeRO-{self.stage}"]
        words += [count_in_words(self.ranks, "rank")] if self.ranks else []
        words += ["layers of a pipeline"] if self.files.layers else []
        words += [f"step {step:,}"] if step is not None else []
        return ", ".join(words)

    def close(self) -> None:
        """Say what only all ranks together tell of missing optimizer states."""
        if self.bare and self.files.optimizer:
            names = [f"*zero_pp_rank_*_mp_rank_{rank:02d}_optim_states.pt" for rank in self.bare]
            self.problems.append(
                IncompleteError(
                    f"optimizer states of {len(self.bare)} of {len(self.states)} model-parallel ranks are missing: no "
                    f"{items_in_words(names)}",
                    hint="fetch these files, or name the place where they are with --also DIR (node-local disks)",
                )
            )
        elif self.bare:
            self.taken = "model"

    def all_notes(self) -> list[Note]:
        low = " and ".join([kind.lower() for kind in sorted(self.kinds) if kind in ("BF16", "F16")])
        notes = list(dict.fromkeys(self.notes))
        if self.nameless:
            text = "optimizer states lie here, but no `param_shapes` that would tell which parameters they are of"
            notes.append(Note(f"{text}: the module's {low or 'own'} weights were taken", level="warning"))
        elif self.taken == "master":
            other = f"; --weights model takes the {low} weights" if low else ""
            text = f"fp32 masters of {count_in_words(self.mastered, 'parameter')} from the optimizer's partitions"
            notes.append(Note(text + other))
        elif self.bare:
            text = f"no optimizer states lie here: the module's {low or 'own'} weights were taken"
            notes.append(Note(text, level="warning" if low else "note"))
        elif self.taken == "model":
            how = ", rounded from the masters as DeepSpeed does" if self.stage == 3 else ""
            notes.append(Note(f"the module's {low or 'own'} weights{how}, not the optimizer's fp32 masters"))
        return [*self.widened.note(), *notes]


def _expert_order(item: tuple[tuple[int | None, int], File]) -> tuple[int, int]:
    return -1 if item[0][0] is None else item[0][0], item[0][1]


def _ordered(tensors: Mapping[str, Tensor], order: Iterable[str], shared: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors in that order, then the others; further names of shared parameters get the tensor of the other."""
    whole = dict(tensors)
    for name, other in shared.items():
        if name not in whole and other in whole:
            whole[name] = whole[other].rename(name)
    names = dict.fromkeys([*order, *whole])
    return {name: whole[name] for name in names if name in whole}


def _round(tensor: Tensor, weights: Weights) -> Tensor:
    placeholder = weights.rounded.get(tensor.name)
    return tensor if placeholder is None else tensor.cast(placeholder.dtype)


def _configured_stage(states: ModelStates) -> int:
    zero = states.config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if type(stage) is int:
        return stage
    return 3 if "zero_pp_rank" in states.file.path.name else 0


def _no_states(files: TagFiles, directory: str) -> UnshardError:
    names = [file.path.name for file in (*files.optimizer.values(), *files.layers.values())]
    return IncompleteError(
        f"{directory}: names and shapes of parameters lie in files of model states, of which none is here; there are "
        f"{items_in_words(names, 3)}",
        hint=f"fetch `*mp_rank_*_model_states.pt` too: {command_line('ls', directory)}",
    )


def _no_values(states: ModelStates, names: Sequence[str]) -> UnshardError:
    return IncompleteError(
        f"{states.file.name}: has placeholders of shape [0] for these, and neither masters nor pieces of them lie "
        f"anywhere:\n{items_in_lines(names, _LISTED)}",
        hint="the files of data-parallel rank 0 tell which parameters have two names; are they all here?",
    )


def _no_partitions(states: ModelStates) -> UnshardError:
    rank = states.file.path.name
    return IncompleteError(
        f"{states.file.name}: at stage 3 it has placeholders of shape [0] instead of parameters, and no optimizer "
        "states lie beside it, which hold the values",
        hint=f"fetch `*{rank.replace('model_states', 'optim_states').removeprefix('zero_')}` of every rank",
    )
