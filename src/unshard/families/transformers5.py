"""How the names of a model that runs under transformers 5 differ from those of its file on the hub, by model type.

Facts: transformers 5, `conversion_mapping.py`. `save_pretrained` undoes these changes; `state_dict()`, and so every
checkpoint of a running model, has them. A rule's `whole` is the running model, its `parts` are the file. Checkpoints of
transformers 4 have the file's names already: no rule matches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unshard.families.rules import Rule, rename
from unshard.families.steps import Divide, Transpose, Unstack


def experts(
    at: str, to: str, parts: tuple[str, str, str], count: str = "?", width: str = "?", hidden: str = "?"
) -> tuple[Rule, Rule]:
    """Packed experts below `at` are the gate, up and down matrix of each expert below `to`.

    `gate_up_proj` is [count, 2*width, hidden] with the gates first, `down_proj` is [count, hidden, width]. The sizes
    are expressions over config keys; "?" is not checked.
    """
    gate, up, down = [f"{to}.experts.{{expert}}.{part}.weight" for part in parts]
    unpack = Unstack("expert")
    return (
        Rule(f"{at}.experts.gate_up_proj", (gate, up), (unpack, Divide()), (count, f"2*{width}", hidden)),
        Rule(f"{at}.experts.down_proj", (down,), (unpack,), (count, hidden, width)),
    )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_W = ("w1", "w3", "w2")

MIXTRAL = (
    *experts("{stem}.mlp", "{stem}.block_sparse_moe", _W, "num_local_experts", "intermediate_size", "hidden_size"),
    rename("{stem}.mlp.gate.weight", "{stem}.block_sparse_moe.gate.weight"),
)

QWEN_MOE = experts("{stem}.mlp", "{stem}.mlp", _PROJECTIONS, "num_experts", "moe_intermediate_size", "hidden_size")

QWEN2_VL = (
    rename("model.visual.{rest}", "visual.{rest}"),
    rename("model.language_model.{rest}", "model.{rest}"),
)

PER_EXPERT = experts("{stem}.mlp", "{stem}.mlp", _PROJECTIONS)

_GRANITE_MOE = (
    rename("{stem}.block_sparse_moe.experts.gate_up_proj", "{stem}.block_sparse_moe.input_linear.weight"),
    rename("{stem}.block_sparse_moe.experts.down_proj", "{stem}.block_sparse_moe.output_linear.weight"),
    rename("{stem}.block_sparse_moe.router.weight", "{stem}.block_sparse_moe.router.layer.weight"),
)

_LLAVA = (
    rename("lm_head.{rest}", "language_model.lm_head.{rest}"),
    rename("model.language_model.{rest}", "language_model.model.{rest}"),
    rename("model.vision_tower.{rest}", "vision_tower.{rest}"),
    rename("model.multi_modal_projector.{rest}", "multi_modal_projector.{rest}"),
    rename("model.image_newline", "image_newline"),
)

_NESTED_VISION = (
    rename("model.vision_tower.{rest}", "vision_tower.vision_model.{rest}"),
    rename("model.vision_tower.vision_model.{rest}", "vision_tower.vision_model.{rest}"),
)
"""The level that files of CLIP and SigLIP towers have, and that late versions of transformers 5 run without."""

NESTED_LLAVA = (
    *_NESTED_VISION,
    *[rule for rule in _LLAVA if rule.whole != "model.vision_tower.{rest}"],
)
"""Language model and projector below the names of LLaVA, and a tower of CLIP or SigLIP."""

_NESTED_VISION_TYPES = ("clip_vision_model", "siglip_vision_model")

TRANSPOSED_EXPERTS = (
    Rule(
        "{stem}.mlp.experts.gate_up_proj",
        ("{stem}.mlp.experts.gate_up_proj",),
        (Transpose(),),
        shape=("num_experts", "2*moe_intermediate_size", "hidden_size"),
        parts_shape=("num_experts", "hidden_size", "2*moe_intermediate_size"),
    ),
    Rule(
        "{stem}.mlp.experts.down_proj",
        ("{stem}.mlp.experts.down_proj",),
        (Transpose(),),
        shape=("num_experts", "hidden_size", "moe_intermediate_size"),
        parts_shape=("num_experts", "moe_intermediate_size", "hidden_size"),
    ),
)
"""Files of Qwen3-VL-MoE hold their experts transposed, as transformers 4 ran them."""

RENAMES: Mapping[str, tuple[Rule, ...]] = {
    "minimax": MIXTRAL,
    "minimax_m2": (
        *MIXTRAL,
        rename("{stem}.mlp.e_score_correction_bias", "{stem}.block_sparse_moe.e_score_correction_bias"),
    ),
    "phimoe": (
        *experts("{stem}.mlp", "{stem}.block_sparse_moe", _W),
        rename("{stem}.mlp.router.{rest}", "{stem}.block_sparse_moe.gate.{rest}"),
    ),
    **dict.fromkeys(
        (
            "afmoe", "cohere2_moe", "deepseek_v32", "dots1", "flex_olmo", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe",
            "longcat_flash", "mellum", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "solar_open",
        ),
        PER_EXPERT,
    ),
    "ernie4_5_moe": (
        *PER_EXPERT,
        rename("{stem}.mlp.gate.moe_statics.{rest}", "{stem}.mlp.moe_statics.{rest}"),
    ),
    "exaone_moe": (
        *PER_EXPERT,
        rename("{stem}.mlp.gate.e_score_correction_bias", "{stem}.mlp.e_score_correction_bias"),
    ),
    "hy_v3": (
        *PER_EXPERT,
        rename("{stem}.mlp.gate.weight", "{stem}.mlp.router.gate.weight"),
        rename("{stem}.mlp.e_score_correction_bias", "{stem}.mlp.expert_bias"),
        rename("{stem}.mlp.shared_experts.{rest}", "{stem}.mlp.shared_mlp.{rest}"),
    ),
    "mimo_v2_flash": (
        *PER_EXPERT,
        rename("{stem}.self_attn.sinks", "{stem}.self_attn.attention_sink_bias"),
    ),
    "jamba": experts("{stem}.feed_forward", "{stem}.feed_forward", _PROJECTIONS),
    "lfm2_moe": experts("{stem}.feed_forward", "{stem}.feed_forward", _W),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _GRANITE_MOE),
    **dict.fromkeys(
        (
            "aya_vision", "got_ocr2", "internvl", "llava", "llava_next", "llava_next_video",
            "llava_onevision", "mistral3", "paligemma", "vipllava",
        ),
        _LLAVA,
    ),
}  # fmt: skip
"""For model types that no family describes; a family has its own."""


def rules_for(config: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules for a model type that no family describes; none where nothing is known to differ."""
    rules = RENAMES.get(str(config.get("model_type")), ())
    vision = config.get("vision_config")
    if rules is _LLAVA and isinstance(vision, Mapping) and vision.get("model_type") in _NESTED_VISION_TYPES:
        return NESTED_LLAVA
    return rules
