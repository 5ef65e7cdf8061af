"""Which module describes which model type. A merge needs one of them, and imports no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module

from unshard.families.template import Family

_MODULES: Mapping[str, tuple[str, ...]] = {
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v3",),
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "gemma3": ("gemma3",),
    "gemma3_text": ("gemma3_text",),
    "glm4": ("glm4",),
    "glm4_moe": ("glm4_moe",),
    "glm4_moe_lite": ("glm4_moe_lite",),
    "gpt_oss": ("gpt_oss",),
    "kimi_k2": ("kimi_k2",),
    "llama": ("llama",),
    "mimo": ("mimo",),
    "ministral": ("ministral",),
    "ministral3": ("ministral3",),
    "mistral": ("mistral",),
    "mixtral": ("mixtral",),
    "olmoe": ("olmoe",),
    "phi3": ("phi3",),
    "qwen2": ("qwen2",),
    "qwen2_5_vl": ("qwen2_5_vl",),
    "qwen2_moe": ("qwen2_moe",),
    "qwen2_vl": ("qwen2_vl",),
    "qwen3": ("qwen3",),
    "qwen3_5": ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
    "qwen3_moe": ("qwen3_moe",),
    "qwen3_next": ("qwen3_next",),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl_moe"),
    "starcoder2": ("starcoder2",),
}
"""Module → the model types (as config.json spells them) that its `FAMILY`, or its `FAMILIES`, describe."""


class Families(Mapping[str, Family]):
    """Model type → family."""

    def __init__(self) -> None:
        self._modules = {model_type: module for module, types in _MODULES.items() for model_type in types}

    def __getitem__(self, model_type: str) -> Family:
        return _families_in(self._modules[model_type])[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, model_type: object) -> bool:
        return model_type in self._modules


@cache
def _families_in(module: str) -> Mapping[str, Family]:
    contents = import_module(f"unshard.families.{module}")
    families: tuple[Family, ...] = getattr(contents, "FAMILIES", None) or (contents.FAMILY,)
    return {family.model_type: family for family in families}
