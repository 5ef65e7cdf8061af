"""Tiny models of every family, with seeded random weights, and the tokenizer that goes with them.

Sizes are uneven on purpose (a vocabulary of 67, an intermediate size of 37): even ones hide how a tensor is split.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from golden.make.modeling_tinycustom import TinyCustomConfig, TinyCustomModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_DENSE = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 37,
    "num_hidden_layers": 1,
    "vocab_size": 67,
}
_SMALL = _DENSE | {"hidden_size": 8, "intermediate_size": 13, "vocab_size": 29}
_EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 1}
_SECTIONS = {"mrope_section": [1, 1, 0]}
_ROPE = (
    {"rope_scaling": {"type": "mrope"} | _SECTIONS}
    if transformers.__version__.startswith("4.")
    else {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | _SECTIONS}
)
_VISION = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
_VISION_TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _DENSE),
    "mistral": ("MistralConfig", _DENSE),
    "qwen2": ("Qwen2Config", _DENSE),
    # Head counts that two tensor-parallel ranks can share; 7, 9, 17 and 19 rows are those on which FSDP2 over tensor
    # parallelism and a left-to-right reading of the placements part ways.
    "qwen2_7rows": ("Qwen2Config", _DENSE | {"intermediate_size": 7, "vocab_size": 19}),
    "qwen2_7rows_18": ("Qwen2Config", _DENSE | {"intermediate_size": 7, "vocab_size": 18}),
    "qwen2_9rows": ("Qwen2Config", _DENSE | {"intermediate_size": 9, "vocab_size": 17}),
    "qwen3": ("Qwen3Config", _DENSE | {"head_dim": 6, "num_hidden_layers": 2}),
    # For checkpoints that hold much besides the weights: optimizers, and a header for each piece.
    "small_llama": ("LlamaConfig", _SMALL),
    # Even sizes, which Megatron's tensor-parallel ranks need.
    "even_llama": ("LlamaConfig", _SMALL | {"num_hidden_layers": 2, "intermediate_size": 14}),
    "small_qwen2": ("Qwen2Config", _SMALL),
    "small_qwen3": ("Qwen3Config", _SMALL | {"head_dim": 6, "num_hidden_layers": 2}),
    "qwen3_demo": (
        "Qwen3Config",
        {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
        | {"intermediate_size": 130, "num_hidden_layers": 2, "vocab_size": 259},
    ),
    "mixtral": ("MixtralConfig", _DENSE | _EXPERTS | {"num_local_experts": 3, "intermediate_size": 11}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        _DENSE
        | _EXPERTS
        | {
            "num_experts": 3,
            "moe_intermediate_size": 10,
            "shared_expert_intermediate_size": 13,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _DENSE
        | _EXPERTS
        | {"num_experts": 5, "moe_intermediate_size": 7, "head_dim": 6, "mlp_only_layers": [0], "num_hidden_layers": 2},
    ),
    "qwen2_vl": (
        "Qwen2VLConfig",
        {
            "text_config": _DENSE | _ROPE,
            "vision_config": _VISION | {"embed_dim": 8, "hidden_size": 16, "mlp_ratio": 2},
        }
        | _VISION_TOKENS,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": _DENSE | _ROPE,
            "vision_config": _VISION
            | {"hidden_size": 8, "out_hidden_size": 16, "intermediate_size": 13}
            | {"fullatt_block_indexes": [0], "window_size": 16},
        }
        | _VISION_TOKENS,
    ),
    # A family that only its own class knows how to name, with a persistent buffer of one element in each layer.
    "gemma4_text": (
        "Gemma4TextConfig",
        _DENSE
        | {
            "head_dim": 8,
            "global_head_dim": 8,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        | {"vocab_size_per_layer_input": 67, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0},
    ),
}


def make_model(name: str, *, dtype: str, tied: bool, task: str, seed: int) -> PreTrainedModel:
    """A model whose every parameter is random, so that no mix-up of two tensors goes unseen.

    `name` is a key of CONFIGS or "custom"; `dtype` a key of DTYPES or "mixed" (norms in fp32, fp16 biases, the rest in
    bf16); `task` is "causal" or "token" (one label, as critics and reward models have).
    """
    torch.manual_seed(seed)
    if name == "custom":
        model: PreTrainedModel = TinyCustomModel(TinyCustomConfig())
    else:
        model = _from_config(name, tied=tied, task=task).to(DTYPES.get(dtype, torch.bfloat16))
    model.eval()
    if dtype == "mixed":
        _mix_dtypes(model)
    randomize(model, seed)
    model.tie_weights()
    model.config.architectures = [type(model).__name__]
    model.config.dtype = DTYPES.get(dtype, torch.bfloat16)
    return model


def _from_config(name: str, *, tied: bool, task: str) -> PreTrainedModel:
    class_name, sizes = CONFIGS[name]
    shared = {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if "text_config" in sizes:
        sizes = sizes | {"text_config": sizes["text_config"] | shared | {"tie_word_embeddings": tied}}
        config = getattr(transformers, class_name)(**sizes, tie_word_embeddings=tied)
        return transformers.AutoModelForImageTextToText.from_config(config)
    config = getattr(transformers, class_name)(**sizes, **shared, tie_word_embeddings=tied)
    if task == "token":
        config.num_labels = 1
        return transformers.AutoModelForTokenClassification.from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def _mix_dtypes(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
        elif name.endswith("bias"):
            parameter.data = parameter.data.half()


@torch.no_grad()
def randomize(model: nn.Module, seed: int, only: str = "") -> None:
    """Fill the parameters whose name contains `only` with small random values; norm weights lie around 1."""
    generator = torch.Generator().manual_seed(seed + 1234)
    for name, parameter in model.named_parameters():
        if only in name:
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            if "norm" in name and parameter.dim() == 1 and name.endswith("weight"):
                values += 1.0
            parameter.copy_(values.to(parameter.dtype))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of `vocabulary` words, with a chat template. Nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(vocabulary - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def save_side_files(model: PreTrainedModel, directory: Path) -> None:
    """Config, generation config with two end tokens, tokenizer and custom code: all that lies beside the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    _name_architecture(model, directory / "config.json")
    text = model.config.get_text_config()
    make_tokenizer(text.vocab_size).save_pretrained(directory)
    if model.can_generate():
        transformers.GenerationConfig(bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0).save_pretrained(directory)
    if isinstance(model, TinyCustomModel):
        code = Path(__file__).with_name("modeling_tinycustom.py")
        (directory / code.name).write_bytes(code.read_bytes())


def _name_architecture(model: PreTrainedModel, path: Path) -> None:
    """Transformers 4 keeps the `architectures` set on a vision-language config in its text config alone.

    FSDP2 gives the classes that it shards a prefix.
    """
    config = json.loads(path.read_text())
    if not config.get("architectures"):
        architecture = type(model).__name__.removeprefix("FSDP")
        path.write_text(json.dumps(config | {"architectures": [architecture]}, indent=2) + "\n")


class ValueHeadModel(nn.Module):
    """A language model with a value head beside it, named as TRL's AutoModelForCausalLMWithValueHead names its parts.

    `flat`: the state dict leaves out `pretrained_model.`, as TRL's own method does.
    """

    def __init__(self, pretrained_model: PreTrainedModel, *, flat: bool, seed: int) -> None:
        super().__init__()
        self.flat = flat
        self.pretrained_model = pretrained_model
        self.config = pretrained_model.config
        self.v_head = nn.Module()
        self.v_head.summary = nn.Linear(self.config.hidden_size, 1)
        self._no_split_modules = pretrained_model._no_split_modules
        randomize(self.v_head, seed + 7)

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """The parts' tensors, under one root if `flat`."""
        whole = super().state_dict(*arguments, **options)
        return {name.removeprefix("pretrained_model."): value for name, value in whole.items()} if self.flat else whole
