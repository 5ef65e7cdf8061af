"""What Megatron-LM's `save_checkpoint` leaves behind, for models of megatron-core: both of its formats."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend

from golden.make.megatron.table import MegatronCase

ITERATION = 10


def save(directory: Path, case: MegatronCase, chunks: list[GPTModel], vocabulary: int) -> None:
    """Save this rank's part of a run directory."""
    place = directory / f"iter_{ITERATION:07d}"
    place.mkdir(parents=True, exist_ok=True)
    {"legacy": _save_legacy, "torch_dist": _save_distributed}[case.format](place, case, chunks, vocabulary)
    if dist.get_rank() == 0:
        (directory / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def _save_legacy(place: Path, case: MegatronCase, chunks: list[GPTModel], vocabulary: int) -> None:
    """One file per rank of the model, by the first of its data-parallel copies."""
    copies = parallel_state.get_expert_data_parallel_rank() if case.ep > 1 else parallel_state.get_data_parallel_rank()
    if copies:
        return
    state = _top_level(case, chunks[0], vocabulary)
    state |= {name: model.state_dict_for_save_checkpoint() for name, model in _named(chunks).items()}
    if case.optimizer:
        state["optimizer"] = {"optimizer": _stepped(chunks[0]).state_dict(), "grad_scaler": None}
    state["opt_param_scheduler"] = {"max_lr": 1e-4, "num_steps": 10}
    state["rng_state"] = [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.get_rng_state()[:16]}]
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if case.pp > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if case.ep > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    (place / name).mkdir()
    torch.save(state, place / name / "model_optim_rng.pt")


def _stepped(model: GPTModel) -> torch.optim.Optimizer:
    """An optimizer with a state: one step of no size."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def _save_distributed(place: Path, case: MegatronCase, chunks: list[GPTModel], vocabulary: int) -> None:
    """`torch_dist`, with the writing shared by the data-parallel copies."""
    copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata: dict[str, Any] = {"singleton_local_shards": case.singleton, "chained_optim_avoid_prefix": True}
    if not case.homogeneous:
        metadata["non_homogeneous_layers"] = True
    state = _top_level(case, chunks[0], vocabulary)
    for name, model in _named(chunks).items():
        if len(chunks) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(model.vp_stage)
        state[name] = model.sharded_state_dict(metadata=metadata | {"dp_cp_group": copies})
    if case.optimizer:
        state["optimizer"] = _sharded_optimizer(chunks[0], state["model"])
    dist.barrier()
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), copies)
    dist_checkpointing.save(
        state, place, sharded_strategy=strategy, validate_access_integrity=True, content_metadata=metadata
    )


def _sharded_optimizer(model: GPTModel, sharded: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state under keys like those of the parameters."""
    optimizer = _stepped(model)
    state: dict[str, Any] = optimizer.state_dict()
    parameters = get_param_id_to_sharded_param_map(sharded, optimizer.param_groups[0]["params"])
    optim_state_to_sharding_state(state, parameters, exclude_keys=("step",))
    return state


def _named(chunks: list[GPTModel]) -> dict[str, GPTModel]:
    """`model`, or `model0`, `model1`, … for the chunks of virtual stages."""
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{n}": chunk for n, chunk in enumerate(chunks)}


def _top_level(case: MegatronCase, model: GPTModel, vocabulary: int) -> dict[str, Any]:
    return {"args": _arguments(case, model, vocabulary), "checkpoint_version": 3.0, "iteration": ITERATION}


_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "normalization", "params_dtype", "bf16", "fp16"),
    *("moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
    *("multi_latent_attention", "mtp_num_layers", "pipeline_model_parallel_layout"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
"""Arguments of Megatron-LM that megatron-core's TransformerConfig has under the same names."""

_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def _arguments(case: MegatronCase, model: GPTModel, vocabulary: int) -> argparse.Namespace:
    """Megatron-LM's arguments, with the enums and dtypes that such a pickle carries."""
    config = model.config
    arguments = {name: getattr(config, name) for name in _SAME}
    arguments |= {name: getattr(config, name) for name in _LATENT if config.multi_latent_attention}
    return argparse.Namespace(
        **arguments,
        group_query_attention=config.num_query_groups != config.num_attention_heads,
        num_experts=config.num_moe_experts,
        decoder_first_pipeline_num_layers=config.num_layers_in_first_pipeline_stage,
        decoder_last_pipeline_num_layers=config.num_layers_in_last_pipeline_stage,
        norm_epsilon=config.layernorm_epsilon,
        apply_layernorm_1p=config.layernorm_zero_centered_gamma,
        swiglu=True,
        vocab_size=vocabulary,
        padded_vocab_size=case.padded(vocabulary),
        make_vocab_size_divisible_by=case.pad or 1,
        untie_embeddings_and_output_weights=not case.tied,
        position_embedding_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        max_position_embeddings=64,
        seq_length=64,
        transformer_impl="transformer_engine" if case.te else "local",
        ckpt_format="torch" if case.format == "legacy" else "torch_dist",
        attention_backend=AttnBackend.auto,
        model_type=ModelType.encoder_or_decoder,
        world_size=dist.get_world_size(),
        iteration=ITERATION,
    )
