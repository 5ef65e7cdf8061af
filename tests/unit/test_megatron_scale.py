"""Naming a model of 671 billion parameters: time that grows with its tensors, and no faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

from unshard.checkpoint import Checkpoint
from unshard.dtypes import BF16
from unshard.families import name_model, translate
from unshard.options import MergeOptions
from unshard.tensors import Box, Chunk, Extent, SourceFile, Tensor, contiguous_chunk, row_major_strides

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "transformers_version": "4.57.0",
    "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
ATTENTION = {
    "linear_q_down_proj.weight": (1536, 7168),
    "linear_q_up_proj.layer_norm_weight": (1536,),
    "linear_q_up_proj.weight": (128 * 192, 1536),
    "linear_kv_down_proj.weight": (576, 7168),
    "linear_kv_up_proj.layer_norm_weight": (512,),
    "linear_kv_up_proj.weight": (128 * 256, 512),
    "linear_proj.weight": (7168, 128 * 128),
}
EXPERTS = {
    "router.weight": (256, 7168),
    "router.expert_bias": (256,),
    "experts.linear_fc1.weight": (256, 4096, 7168),
    "experts.linear_fc2.weight": (256, 7168, 2048),
    "shared_experts.linear_fc1.weight": (4096, 7168),
    "shared_experts.linear_fc2.weight": (7168, 2048),
}
DENSE = {"linear_fc1.weight": (2 * 18432, 7168), "linear_fc2.weight": (7168, 18432)}
FURTHER = {"enorm": (7168,), "hnorm": (7168,), "eh_proj": (7168, 2 * 7168), "final_layernorm": (7168,)}


def stored(name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of one chunk, or of one for each expert."""
    if len(shape) < 3:
        return Tensor(name, BF16, shape, (contiguous_chunk(SourceFile("here", "rank"), 0, shape, BF16),))
    one = (1, *shape[1:])
    chunks = [
        Chunk(Box((e, 0, 0), one), Extent(SourceFile("here", f"rank{e}"), 0, row_major_strides(one, 2), BF16), e)
        for e in range(shape[0])
    ]
    return Tensor(name, BF16, shape, tuple(chunks))


def layer(at: str, *, sparse: bool) -> Iterator[Tensor]:
    for norm in ("input_layernorm.weight", "pre_mlp_layernorm.weight"):
        yield stored(f"{at}{norm}", (7168,))
    for part, shape in ATTENTION.items():
        yield stored(f"{at}self_attention.{part}", shape)
    for part, shape in (EXPERTS if sparse else DENSE).items():
        yield stored(f"{at}mlp.{part}", shape)


def model() -> Iterator[Tensor]:
    yield stored("embedding.word_embeddings.weight", (129536, 7168))
    for number in range(61):
        yield from layer(f"decoder.layers.{number}.", sparse=number >= 3)
    yield stored("decoder.final_layernorm.weight", (7168,))
    yield stored("output_layer.weight", (129536, 7168))
    for part, shape in FURTHER.items():
        yield stored(f"mtp.layers.0.{part}.weight", shape)
    yield from layer("mtp.layers.0.transformer_layer.", sparse=True)


def test_deepseek_v3_is_translated_and_named_in_seconds() -> None:
    checkpoint = Checkpoint("megatron", "test", {"here": Path("/nowhere")}, {t.name: t for t in model()})
    started = process_time()
    translation = translate(checkpoint, DEEPSEEK)
    named = name_model(translation.tensors, DEEPSEEK, MergeOptions())
    seconds = process_time() - started
    assert not translation.problems
    assert not named.problems
    assert not named.notes
    experts = 59 * 256 * 3  # 58 layers of the decoder, and the one behind it
    assert len(named.tensors) == 3 + 62 * 9 + 3 * 3 + 59 * (2 + 3) + experts + len(FURTHER)
    assert seconds < 20, "it takes 2 on an idle machine"
