"""The names of the files that make a directory a model: what a merge writes, and what `--overwrite` replaces.

Which files those are is a list of names, not "everything else": training directories hold optimizers, logs and trainer
states that nobody wants in a model, and an output directory may hold things of one's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

ADAPTER_DIRECTORY = "lora_adapter"
"""Where the adapter lies that is written beside a base model; verl's name for it."""
TEMPLATE_DIRECTORY = "additional_chat_templates"

TOKENIZER_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "merges*.txt",
    "*.tiktoken",
    "tekken.json",
    "tiktoken.model",
    "spiece.model",
    "sentencepiece*.model",
    "*.bpe.model",
    "*.spm",
    "bpe.codes",
    "normalizer.json",
    "chat_template*.json",
    "*.jinja",
)
CONFIG_PATTERNS = (CONFIG, GENERATION_CONFIG, "*processor_config.json", "configuration.json")
LICENSE_PATTERNS = ("LICENSE*", "NOTICE*")
WEIGHTS_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "adapter_model*.bin",
)
LOADABLE_PATTERNS = (
    *WEIGHTS_PATTERNS,
    *CONFIG_PATTERNS,
    *TOKENIZER_PATTERNS,
    ADAPTER_CONFIG,
    "hf_quant_config.json",
    "quant*_config.json",
    "tokenizer*",
    "vocab.*",
    "chat_template*",
    "*.model",
)
"""Files that a loader may take for a part of a model, whoever wrote them."""


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a file, wherever it lies, has a name of one of these patterns."""
    name = path.rpartition("/")[2]
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_weights_file(path: str) -> bool:
    """Whether a file of an output holds the tensors of a model or of an adapter."""
    return path.endswith((".safetensors", ".bin"))


def is_adapter_file(path: str) -> bool:
    """Whether a weights file holds a PEFT adapter."""
    return path.rpartition("/")[2].startswith("adapter_model.")
