"""megatron-core's own GPTModel on a machine without CUDA and TransformerEngine, filled with given weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from golden.make.megatron.families import FAMILIES, transformer_config
from golden.make.megatron.stand_ins import add_post_norms
from golden.make.models import DTYPES
from megatron.cutting import cut_of, pad_vocabulary
from megatron.naming import EXPERT, LAYER, local_experts, te_name

if TYPE_CHECKING:
    from golden.make.megatron.table import MegatronCase

LOCAL_DIMS = {"linear_q_down_proj.weight": 0, "linear_kv_down_proj.weight": 0}
"""The local spec cuts what TransformerEngine's repeats on every rank."""

_PLAIN = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
}
"""No fused kernels, no random initial values."""


def start(case: MegatronCase) -> None:
    """Set up the process groups of a case."""
    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        case.vpp if case.vpp > 1 else None,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )


def build(case: MegatronCase, config: Any, full: Mapping[str, torch.Tensor]) -> list[GPTModel]:
    """The rank's model chunks, one for each virtual stage, filled from whole tensors."""
    megatron_config = _transformer_config(case, config)
    full = pad_vocabulary(full, case.padded(config.vocab_size))
    family = FAMILIES[case.model]
    chunks = []
    for stage in range(case.vpp):
        where = {"vp_stage": stage} if case.vpp > 1 else {}
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=not where, **where)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=not where, **where)
        if megatron_config.experimental_attention_variant:
            block = get_transformer_block_with_experimental_attention_variant_spec(megatron_config, **where)
        else:
            block = get_gpt_decoder_block_spec(megatron_config, case.te, normalization="RMSNorm", **where)
        if family.post_norms:
            add_post_norms(block)
        mtp = get_gpt_mtp_block_spec(megatron_config, block, case.te, **where) if case.mtp else None
        model = GPTModel(
            config=megatron_config,
            transformer_layer_spec=block,
            vocab_size=case.padded(config.vocab_size),
            max_sequence_length=64,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type="rope",
            **_rotary(config),
            mtp_block_spec=mtp,
            parallel_output=False,
            **where,
        )
        if family.scaled_embedding and first:
            model.embedding.register_forward_hook(lambda _module, _inputs, output: output * config.hidden_size**0.5)
        chunks.append(_to(model, DTYPES[case.dtype]))
        _fill(model, full, case)
    return chunks


def _transformer_config(case: MegatronCase, config: Any) -> TransformerConfig:
    fields = transformer_config(case.model, config) | _PLAIN
    dtype = DTYPES[case.dtype]
    fields |= {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp if case.vpp > 1 else None,
        "expert_model_parallel_size": case.ep,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": case.dtype == "bf16",
        "fp16": case.dtype == "fp16",
        "mtp_num_layers": case.mtp or None,
        "num_layers_in_first_pipeline_stage": case.first_layers,
        "num_layers_in_last_pipeline_stage": case.last_layers,
    }
    if "num_moe_experts" in fields:
        fields["expert_tensor_parallel_size"] = case.etp or case.tp
        fields["moe_grouped_gemm"] = case.grouped
        fields["moe_use_legacy_grouped_gemm"] = case.grouped
    return (MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig)(**fields)


def _rotary(config: Any) -> dict[str, Any]:
    parameters = config.rope_parameters
    parameters = parameters.get("full_attention", parameters)  # Gemma 3 has one for each kind of layer, here the same
    return {
        "rotary_base": parameters["rope_theta"],
        "rotary_percent": parameters.get("partial_rotary_factor", 1.0),
    }


def _to(model: GPTModel, dtype: torch.dtype) -> GPTModel:
    """Convert the parameters; routing biases stay in float32, as Megatron's Float16Module keeps them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def _fill(model: GPTModel, full: Mapping[str, torch.Tensor], case: MegatronCase) -> None:
    """Give every parameter, and the routing biases, their piece of the whole tensors."""
    pieces = _pieces(full, case)
    offset = model.decoder.layers[0].layer_number - 1
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}
    for name, held in tensors.items():
        layer = LAYER.fullmatch(name)
        piece = pieces[f"{layer[1]}{int(layer[2]) + offset}{layer[3]}" if layer else name]
        if piece.shape != held.shape:
            raise ValueError(f"{name}: megatron-core holds {tuple(held.shape)}, the script cut {tuple(piece.shape)}")
        held.copy_(piece)


def _pieces(full: Mapping[str, torch.Tensor], case: MegatronCase) -> dict[str, torch.Tensor]:
    """The rank's piece of every tensor of the model, with global layer and local expert numbers."""
    dense = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    expert = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    pieces = {}
    for name, tensor in full.items():
        cut = cut_of(name, full, {} if case.te else LOCAL_DIMS)
        pieces[name] = tensor if cut is None else cut.piece(tensor, *(expert if EXPERT.fullmatch(name) else dense))
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    pieces = local_experts(pieces, ep=case.ep, ep_rank=ep_rank, kind="grouped" if case.grouped else "sequential")
    if case.te:
        pieces = {te_name(name, full): piece for name, piece in pieces.items()}
    pieces.setdefault("output_layer.weight", pieces["embedding.word_embeddings.weight"])  # a tied copy on a last stage
    return pieces


@torch.no_grad()
def logits(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """What one chunk that is the whole model computes; layers for further tokens stay out of it."""
    length = tokens.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    mtp, model.mtp_process, model.config.mtp_num_layers = (model.mtp_process, model.config.mtp_num_layers), False, None
    try:
        result: torch.Tensor = model.eval()(tokens, torch.arange(length)[None], mask)
    finally:
        model.mtp_process, model.config.mtp_num_layers = mtp
    return result
