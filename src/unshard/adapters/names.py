"""The names that PEFT gives to tensors: in a live model, and in an adapter's file.

A live name carries the adapter's name and the wrappers around the base layer; a file name carries neither
(huggingface/peft, `src/peft/utils/save_and_load.py`, `get_peft_model_state_dict`):

    base_model.model.X.base_layer.weight                              base layer X
    base_model.model.X.lora_A.default.weight                          X.lora_A.weight
    base_model.model.X.lora_embedding_A.default                       X.lora_embedding_A
    base_model.model.X.lora_magnitude_vector.default.weight           X.lora_magnitude_vector
    base_model.model.X.modules_to_save.default.weight                 X.weight
    base_model.model.X.original_module.weight                         base layer X
    base_model.model.X.token_adapter.trainable_tokens_delta.default   X.token_adapter.trainable_tokens_delta

Models that got their adapter injected (transformers' `add_adapter`) lack the prefix; files always have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

PREFIX = "base_model.model."
_AROUND = re.compile(r"(?:\w+\.){0,4}?base_model\.model\.")
"""What may lie around a PEFT model: DistributedDataParallel, trl's model with a value head, a trainer's own module."""
TOKENS = ".token_adapter.trainable_tokens_delta"
_WRAPPERS = frozenset({"base_layer", "original_module", "token_adapter"})

T = TypeVar("T")

Kind: TypeAlias = Literal["lora", "saved", "tokens", "copy"]


@dataclass(frozen=True, slots=True)
class Part:
    """What a name says of an adapter's tensor.

    kind:    "lora"; "saved": a whole trained module; "tokens": trained rows of an embedding; "copy": something that the
             adapter keeps only for its own comfort (the rows before training) and that no file holds.
    adapter: the adapter's name; None where the name is that of an adapter's file.
    module:  the module's path, as it is stored.
    file:    the name in `adapter_model.safetensors`.
    """

    kind: Kind
    adapter: str | None
    module: str
    file: str


_PATTERNS: tuple[tuple[Kind, re.Pattern[str], str], ...] = (
    (
        "lora",
        re.compile(r"(?P<module>.+)\.(?P<role>lora_[AB])(?:\.(?P<adapter>[^.]+))?\.(?P<leaf>weight|bias)"),
        r"\g<module>.\g<role>.\g<leaf>",
    ),
    (
        "lora",
        re.compile(r"(?P<module>.+)\.(?P<role>lora_embedding_[AB])(?:\.(?P<adapter>[^.]+))?"),
        r"\g<module>.\g<role>",
    ),
    (
        "lora",
        re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.(?!weight$)(?P<adapter>[^.]+))?(?:\.weight)?"),
        r"\g<module>.lora_magnitude_vector",
    ),
    (
        "saved",
        re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)"),
        r"\g<module>.\g<rest>",
    ),
    (
        "tokens",
        re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(?:\.(?P<adapter>[^.]+))?"),
        r"\g<module>" + TOKENS,
    ),
    ("copy", re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_original\.(?P<adapter>[^.]+)"), ""),
)

FOREIGN = {
    "prompt_encoder": "prompt tuning, prefix tuning or P-tuning",
    "adaption_": "adaption prompts",
    "lora_E": "AdaLoRA",
    "ranknum": "AdaLoRA",
    "lora_diag": "KaSA",
    "lora_arrow": "Arrow",
    "lora_monteclora_sampler": "MonteCLoRA",
    "lora_velora": "VeLoRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "ia3_": "IA3",
    "boft_": "BOFT",
    "oft_": "OFT",
    "vera_": "VeRA",
    "vblora_": "VB-LoRA",
    "randlora_": "RandLoRA",
    "gralora_": "GraLoRA",
    "poly_": "Poly",
    "fourierft_": "FourierFT",
    "waveft_": "WaveFT",
    "hra_": "HRA",
    "ln_tuning_": "LayerNorm tuning",
    "shira_": "SHiRA",
    "c3a_": "C3A",
    "miss_": "MiSS",
    "road_": "RoAd",
    "delora_": "DeLoRA",
    "lora_": "an unknown variant of LoRA",
}
"""How a component of a name begins → the PEFT method that writes it, where it is not LoRA."""


def read_part(name: str) -> Part | None:
    """What the name says of an adapter's tensor; None for all other tensors."""
    for kind, pattern, file in _PATTERNS:
        match = pattern.fullmatch(name)
        if match:
            return Part(kind, match["adapter"], match["module"], file_name(match.expand(file)) if file else "")
    return None


def base_name(name: str) -> str:
    """The name of a base model's tensor without PEFT's wrappers."""
    return ".".join([part for part in strip_prefix(name).split(".") if part not in _WRAPPERS])


def strip_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Entries of a PEFT model under the base model's own names."""
    return {base_name(name): entry for name, entry in tensors.items()}


def strip_prefix(name: str) -> str:
    """A stored name without PEFT's prefix and what lies around it."""
    match = _AROUND.match(name)
    return name[match.end() :] if match else name


def file_name(name: str) -> str:
    """The name of a tensor that an adapter's file holds as it is: with the prefix."""
    return PREFIX + strip_prefix(name)


def foreign_methods(names: Iterable[str]) -> dict[str, str]:
    """Name → the PEFT method that wrote it, for the names of a PEFT model that are no LoRA."""
    names = list(names)
    if not any(_AROUND.match(name) or name.startswith(("base_model.", "prompt_encoder.")) for name in names):
        return {}
    found: dict[str, str] = {}
    for name in names:
        method = None if read_part(name) else _foreign_method(name)
        if method:
            found[name] = method
    return found


def _foreign_method(name: str) -> str | None:
    for component in name.split("."):
        for beginning, method in FOREIGN.items():
            if component.startswith(beginning):
                return method
    return None
