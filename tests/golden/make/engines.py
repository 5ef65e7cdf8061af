"""Sharding a model as a trainer does, and taking the state dict that the trainer would save."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

if TYPE_CHECKING:
    from golden.make.table import Case

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_ROWS = ("o_proj", "down_proj")


def shard(model: nn.Module, case: Case) -> nn.Module:
    """Shard `model` over the ranks as `case` says; called on every rank."""
    if case.engine == "none":
        return model
    if case.checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda module: _is_block(module, model))
    sharded = _fsdp2(model, case) if case.engine == "fsdp2" else _fsdp1(model, case)
    return torch.compile(sharded) if case.compiled else sharded


def _blocks(model: nn.Module) -> set[str]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(base._no_split_modules or ())


def _is_block(module: nn.Module, model: nn.Module) -> bool:
    return type(module).__name__ in _blocks(model)


def _mesh(case: Case) -> DeviceMesh:
    names, sizes = zip(*case.mesh, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _fsdp2(model: nn.Module, case: Case) -> nn.Module:
    mesh = _mesh(case)
    data_names = tuple(name for name, _ in case.mesh if name != case.tensor_dim)
    if len(data_names) < len(case.mesh):
        parallelize_module(model, mesh[case.tensor_dim], _tensor_plan(model, case))
    data_mesh = mesh[data_names] if len(data_names) < len(case.mesh) else mesh
    options: dict[str, Any] = {"mesh": data_mesh}
    if case.shard_last_dim:
        options["shard_placement_fn"] = functools.partial(_last_divisible_dim, parts=data_mesh.shape[-1])
    for name, module in model.named_modules():
        own_unit = isinstance(module, nn.Embedding) or name.rpartition(".")[2] == "lm_head"
        if _is_block(module, model) or (own_unit and not case.tied):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def _last_divisible_dim(parameter: nn.Parameter, parts: int) -> Shard:
    """FSDP2 shards other dims than the first only where they divide evenly."""
    dims = [dim for dim in reversed(range(parameter.dim())) if parameter.shape[dim] % parts == 0]
    return Shard(dims[0] if dims else 0)


def _tensor_plan(model: nn.Module, case: Case) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    for name, _ in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in _COLUMNS:
            plan[name] = ColwiseParallel()
        elif leaf in _ROWS:
            plan[name] = RowwiseParallel()
        elif leaf == "embed_tokens":
            plan[name] = RowwiseParallel(input_layouts=Replicate())
        elif leaf.endswith("norm") and case.sequence_parallel:
            plan[name] = SequenceParallel()
    return plan


def _fsdp1(model: nn.Module, case: Case) -> nn.Module:
    hybrid = len(case.mesh) == 2
    options: dict[str, Any] = {}
    if case.engine == "fsdp1":
        options["device_mesh"] = _mesh(case)
    elif hybrid:
        options["process_group"] = _hybrid_groups(case)
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: _is_block(module, model))
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        use_orig_params=case.original_parameters,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
        **options,
    )


def _hybrid_groups(case: Case) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The (shard, replicate) process groups of a rank: without a device mesh FSDP1 saves ShardedTensors."""
    inner = case.mesh[-1][1]
    shards, _ = dist.new_subgroups(inner)
    replicas, _ = dist.new_subgroups_by_enumeration(
        [list(range(first, dist.get_world_size(), inner)) for first in range(inner)]
    )
    return shards, replicas


def take_state(model: nn.Module, case: Case) -> dict[str, Any]:
    """The state dict of this rank, in the flavour that `case.state` names."""
    if case.state == "named_parameters":
        return dict(model.named_parameters())
    if case.engine.startswith("fsdp1"):
        with _flavour(model, case):
            state = model.state_dict()
    elif case.state == "full":
        state = {name: _whole(value) for name, value in model.state_dict().items()}
    else:
        state = model.state_dict()
    return {name: value for name, value in state.items() if case.keep(name)}


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


_FLAVOURS: Mapping[str, Callable[[], tuple[StateDictType, Any]]] = {
    "sharded": lambda: (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)),
    "full": lambda: (StateDictType.FULL_STATE_DICT, FullStateDictConfig()),
    "full_rank0": lambda: (StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)),
    "local": lambda: (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()),
}


@contextlib.contextmanager
def _flavour(model: nn.Module, case: Case) -> Iterator[None]:
    kind, config = _FLAVOURS[case.state]()
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        yield
