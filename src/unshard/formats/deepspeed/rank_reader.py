"""One model-parallel rank of a DeepSpeed checkpoint: its masters, and what stands beside them, under stored names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unshard.checkpoint import Note
from unshard.dtypes import F32
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.deepspeed.account import Account
from unshard.formats.deepspeed.experts import check_files, check_masters, is_expert, merge_files
from unshard.formats.deepspeed.files import File, TagFiles
from unshard.formats.deepspeed.masters import join_partitions
from unshard.formats.deepspeed.modules import read_module
from unshard.formats.deepspeed.partitions import Partitions, read_partitions
from unshard.formats.deepspeed.states import ModelStates
from unshard.formats.deepspeed.stored import read_state
from unshard.formats.deepspeed.weights import ModuleWeights, same_parameters, second_names
from unshard.options import Weights
from unshard.tensors import Tensor
from unshard.words import items_in_lines


@dataclass(frozen=True, slots=True)
class RankReader:
    """Reads the model-parallel ranks of a tag, one at a time; what is found and what is wrong goes to `account`.

    wanted: the weights that are asked for, where there are two.
    """

    files: TagFiles
    wanted: Weights
    account: Account

    def read(self, rank: int, states: ModelStates) -> dict[str, Tensor]:
        """The tensors of a rank, in the order of its module. states: those of its first data-parallel rank."""
        account = self.account
        before = len(account.problems)
        partitions = self._partitions(rank, states)
        stage = partitions.stage if partitions else states.stage
        account.stage = max(account.stage, stage)
        masters = self._masters(states, partitions)
        ranks = len(partitions.partitions) if partitions else None
        weights = read_module(self.files, states, rank, stage, ranks, account)
        self._add_experts(rank, states, weights)
        shared = same_parameters(states)
        tensors = weights.in_order(self._choose(states, weights, masters, shared), shared)
        lost, left_out = weights.without_values(tensors, shared)
        account.notes += second_names(left_out)
        if lost and len(account.problems) == before:
            account.problems.append(_no_values(states, lost) if masters else _no_masters(states))
        return tensors

    def _partitions(self, rank: int, states: ModelStates) -> Partitions | None:
        """What the optimizer files of a rank hold; None without any, and where they are not wanted."""
        files = {place[0]: file for place, file in self.files.optimizer.items() if place[1] == rank}
        if self.wanted == "model" and states.stage < 3:
            self.account.taken = "model"
            return None
        if states.groups is None:
            self.account.nameless |= bool(files) or states.has_nameless_masters
            return None
        if not files:
            self.account.bare.append(rank)
            return None
        found = read_partitions(files, self.account.problems, states.recorded.get("dp_world_size"))
        if found:
            self.account.ranks = len(found.partitions)
            self.account.notes += found.notes
        return found

    def _masters(self, states: ModelStates, partitions: Partitions | None) -> dict[str, Tensor]:
        if partitions is None or states.groups is None:
            return {}
        try:
            masters = join_partitions(partitions.partitions, states.groups, states.config)
        except UnshardError as error:
            self.account.problems.append(error)
            return {}
        self._compare_steps(states, partitions)
        first = partitions.partitions[0]
        if not states.config and any(1 < count < first.ranks for count in first.counts):
            self.account.notes.append(_order_of_experts())
        return masters

    def _compare_steps(self, states: ModelStates, partitions: Partitions) -> None:
        step, skipped = partitions.partitions[0].step, states.recorded.get("skipped_steps")
        if step is None or states.step is None or type(skipped) is not int:
            return
        if step != states.step - skipped:
            text = f"the model states are of step {states.step:,}, and the optimizer counts {step:,.0f} steps"
            self.account.notes.append(
                Note(f"{text}: after a restart that may be so; else files of two saves are mixed", (), "warning")
            )

    def _add_experts(self, rank: int, states: ModelStates, weights: ModuleWeights) -> None:
        files = {place[:2]: file for place, file in self.files.experts.items() if place[2] == rank}
        recorded = states.recorded.get("num_experts")
        if not files and not recorded:
            return
        problems = self.account.problems
        try:
            problems += check_files(list(files), recorded, rank)
        except FormatError as error:
            problems.append(error)
        contents = [read_state(file, rank, problems) for _, file in sorted(files.items(), key=_expert_order)]
        experts, contradictions = merge_files(contents)
        problems += contradictions
        self.account.kinds.update([expert.dtype.name for expert in experts.values()])
        weights.stored |= experts
        weights.order += experts

    def _choose(
        self, states: ModelStates, weights: ModuleWeights, masters: Mapping[str, Tensor], shared: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Masters and what stands beside them, or the module's own weights."""
        account = self.account
        if not masters:
            return weights.stored
        if self.wanted == "model":
            account.taken = "model"
            return {name: weights.round(tensor) for name, tensor in masters.items()} | weights.stored
        account.taken = "master"
        account.mastered += len(masters)
        account.master_kinds.update([tensor.dtype.name for tensor in masters.values()])
        if self.files.experts:
            account.problems += check_masters(filter(is_expert, masters), weights.stored)
        having = {*masters, *[name for name, other in shared.items() if other in masters]}
        stored = {name: tensor for name, tensor in weights.stored.items() if name not in having}
        if F32 in [tensor.dtype for tensor in masters.values()]:
            stored = account.widened.widen(stored, (), states.buffers)
        return stored | dict(masters)


def _expert_order(item: tuple[tuple[int | None, int], File]) -> tuple[int, int]:
    return -1 if item[0][0] is None else item[0][0], item[0][1]


def _order_of_experts() -> Note:
    text = "the configuration was not saved: masters of experts were put together as without "
    return Note(f"{text}`use_data_before_expert_parallelism`; --weights model does not depend on it", (), "warning")


def _no_values(states: ModelStates, names: Sequence[str]) -> UnshardError:
    return IncompleteError(
        f"{states.file.name}: has placeholders of shape [0] for these, and neither masters nor pieces of them lie "
        f"anywhere:\n{items_in_lines(names)}",
        hint="the model states of data-parallel rank 0 tell which parameters have two names: are they here?",
    )


def _no_masters(states: ModelStates) -> UnshardError:
    wanted = states.file.path.name.replace("_model_states", "_optim_states").replace("zero_pp_rank_0_", "*_rank_*_")
    return IncompleteError(
        f"{states.file.name}: at stage 3 it has placeholders of shape [0] instead of parameters, and no optimizer "
        "states lie beside it, which hold the values",
        hint=f"fetch `{wanted}` too",
    )
