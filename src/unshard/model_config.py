"""What a model's config.json says, where more rooms than one ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def class_name(config: Mapping[str, Any]) -> str | None:
    """The first of `architectures`, if config.json has any."""
    names = config.get("architectures")
    if not (isinstance(names, list) and names):
        return None
    return str(names[0])


def transformers_version(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """(major, minor) of the transformers version that wrote config.json, if it says."""
    text = config.get("transformers_version")
    parts = text.split(".") if isinstance(text, str) else []
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])


def sizes_for_ranks(config: Mapping[str, Any] | None) -> dict[str, int]:
    """What ranks that record no arguments leave open and a config.json tells, under Megatron-LM's argument names.

    That is the number and size of heads, and the width of an expert, which models without dense layers call
    intermediate_size.
    """
    text = (config or {}).get("text_config")
    told = {**(config or {}), **(text if isinstance(text, Mapping) else {})}
    sizes = {name: size for name, size in told.items() if type(size) is int and size > 0}
    heads, hidden, width = [sizes.get(name) for name in ("num_attention_heads", "hidden_size", "moe_intermediate_size")]
    known = {
        "num_attention_heads": heads,
        "kv_channels": sizes.get("head_dim") or (hidden // heads if hidden and heads else None),
        "moe_ffn_hidden_size": width or sizes.get("intermediate_size"),
    }
    return {name: size for name, size in known.items() if size is not None}


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the language model's head is the embedding.

    `tie_word_embeddings` says so, at the top or in `text_config`; where neither has it, the model type's default does.
    Where they differ, transformers 5 goes by the top, as far as the config says that it wrote it.
    """
    version, top = transformers_version(config), config.get("tie_word_embeddings")
    if version is not None and version >= (5, 0) and top is not None:
        return bool(top)
    text = config.get("text_config")
    nested = text if isinstance(text, Mapping) else {}
    said = [value for section in (config, nested) if (value := section.get("tie_word_embeddings")) is not None]
    if said:
        return any(said)
    return str(nested.get("model_type") or config.get("model_type")) in TIED_BY_DEFAULT


TIED_BY_DEFAULT = frozenset(
    (
        "bloom", "cohere", "cohere2", "cohere2_moe", "ctrl", "ernie4_5", "ernie4_5_moe", "falcon", "falcon_mamba",
        "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gpt2",
        "gpt_bigcode", "gpt_neo", "jetmoe", "lfm2", "lfm2_moe", "mamba", "mpt", "opt", "paligemma", "recurrent_gemma",
        "smollm3", "starcoder2", "vaultgemma", "zamba", "zamba2",
    )
)  # fmt: skip
"""Model types that tie where config.json is silent (transformers, `configuration_*.py`)."""
