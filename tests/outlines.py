"""Models as outlines: names, shapes and dtypes without places, and what naming makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unshard.checkpoint import Checkpoint
from unshard.dtypes import BF16
from unshard.errors import ModelError
from unshard.families import expected_shapes, name_model
from unshard.model import Model
from unshard.options import MergeOptions
from unshard.tensors import Tensor, Value

SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "vocab_size": 20,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **SIZES}
TIED = {**QWEN2, "tie_word_embeddings": True}
MOE: dict[str, Any] = {
    **QWEN2,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 4,
    "num_experts": 3,
    "moe_intermediate_size": 5,
}
VISION: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "text_config": {key: value for key, value in QWEN2.items() if key not in ("model_type", "architectures")},
    "vision_config": {"depth": 1, "embed_dim": 4, "hidden_size": 8, "mlp_ratio": 2, "patch_size": 2},
}
TIED_VISION = {**VISION, "text_config": {**VISION["text_config"], "tie_word_embeddings": True}}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def outlines(shapes: Mapping[str, tuple[int, ...]] | None) -> dict[str, Value]:
    """Tensors of these names and shapes without places, in this order."""
    assert shapes is not None
    return {name: Tensor(name, BF16, shape, ()) for name, shape in shapes.items()}


def outline(name: str, *shape: int) -> dict[str, Value]:
    return outlines({name: shape})


def running(config: dict[str, Any]) -> dict[str, Value]:
    """What a checkpoint of the running model holds."""
    return outlines(expected_shapes(config))


def prefixed(tensors: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    return {prefix + name: value.rename(prefix + name) for name, value in tensors.items()}


def name(tensors: Mapping[str, Value], config: dict[str, Any] | None, reference: Checkpoint | None = None,
         **options: Any) -> Model:  # fmt: skip
    return name_model(tensors, config, MergeOptions(**options), reference)


def texts(model: Model) -> str:
    return "\n".join([note.text for note in model.notes])


def the_problem(model: Model) -> ModelError:
    assert len(model.problems) == 1, [problem.message for problem in model.problems]
    problem = model.problems[0]
    assert isinstance(problem, ModelError)
    return problem
