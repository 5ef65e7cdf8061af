"""From parsed arguments to the options of the engine room."""

from __future__ import annotations

import argparse

from unshard.errors import UsageError
from unshard.options import DEFAULT_SHARD_SIZE, MergeOptions
from unshard.settings import Settings


def engine_settings(arguments: argparse.Namespace) -> Settings:
    """The engine's knobs."""
    given = {name: value for name in ("jobs", "memory") if (value := getattr(arguments, name, None)) is not None}
    return Settings(**given)


def merge_options(arguments: argparse.Namespace) -> MergeOptions:
    """All options of `merge`, `plan`, `verify`, `test`. Raises UsageError where two of them contradict each other."""
    if arguments.tie_word_embedding and arguments.untie_word_embedding:
        raise UsageError(
            "`--tie-word-embedding` and `--untie-word-embedding` exclude each other", hint="give one of them"
        )
    if arguments.tie_word_embedding:
        tie: bool | None = True
    else:
        tie = False if arguments.untie_word_embedding else None
    return MergeOptions(
        also=tuple(arguments.also),
        config=arguments.config,
        tokenizer=arguments.tokenizer,
        map=arguments.map,
        names=arguments.names,
        dtype=arguments.dtype,
        container=getattr(arguments, "container", "safetensors"),
        max_shard_size=getattr(arguments, "max_shard_size", None) or DEFAULT_SHARD_SIZE,
        overwrite=getattr(arguments, "overwrite", False),
        weights_only=arguments.weights_only,
        verify=getattr(arguments, "verify", "full"),
        check_replicas=getattr(arguments, "check_replicas", False),
        tie_embeddings=tie,
        value_model=arguments.is_value_model,
        attention_heads=arguments.num_attention_heads,
        key_value_heads=arguments.num_key_value_heads,
        fuse_lora=arguments.fuse_lora,
        adapter_only=arguments.adapter_only,
        lora_alpha=arguments.lora_alpha,
        shapes_from=arguments.shapes_from,
        repair_index=arguments.repair_index,
        model_key=arguments.model_key,
        weights=arguments.weights,
        fill_from=arguments.fill_from,
        parallel=arguments.parallel,
        backend=arguments.backend,
        settings=engine_settings(arguments),
    )
