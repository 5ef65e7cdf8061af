"""What training recorded of a model's architecture, under the names of Megatron-LM's arguments.

Three vocabularies say the same things: Megatron-LM's arguments (`args` of a checkpoint, an argparse.Namespace),
megatron-core's TransformerConfig (verl's `transformer_config.json`, NeMo, Megatron-Bridge), and what the latter two add
(`share_embeddings_and_output_weights`). Here all become the first, as `core_transformer_config_from_args` relates them
(Megatron-LM megatron/training/argument_utils.py, formerly arguments.py). Values are plain JSON: what is no such value (functions, classes, enums
whose members only the framework knows) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unshard.dtypes import DType
from unshard.errors import FormatError, UnshardError
from unshard.formats.huggingface.assets import read_config
from unshard.formats.torch_file import Global, Opaque

TRANSFORMER_CONFIG = "transformer_config.json"

_RENAMED = {
    "num_moe_experts": "num_experts",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "layernorm_epsilon": "norm_epsilon",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
"""TransformerConfig's names → those of Megatron-LM's arguments; the others are the same."""
_MAX_DEPTH = 8
_MAX_TEXT = 4096


def read_facts(recorded: object) -> dict[str, Any]:
    """The facts in a Namespace, a dict of arguments or a TransformerConfig, as a file holds them; {} in all else."""
    members = recorded.state if isinstance(recorded, Opaque) else recorded
    if not isinstance(members, Mapping):
        return {}
    plain = {name: _plain(value) for name, value in members.items() if isinstance(name, str) and name[:1] != "_"}
    return _in_arguments({name: value for name, value in plain.items() if value is not _ABSENT})


def facts_beside(directory: Path, problems: list[UnshardError]) -> dict[str, Any]:
    """The facts in files beside or above the weights; what is wrong with them is added to `problems`."""
    for place in (directory, directory.parent, directory.parent.parent):
        if (place / TRANSFORMER_CONFIG).is_file():
            try:
                return read_facts(read_config(place / TRANSFORMER_CONFIG))
            except FormatError as error:
                problems.append(error)
                return {}
    return {}


class _Absent:
    """The kind of `_ABSENT`."""


_ABSENT = _Absent()
"""What stands for a value that is no plain JSON."""


def _plain(value: object, depth: int = 0) -> Any:
    """The value as plain JSON; the name of a dtype, a function or a class; `_ABSENT` for all else."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value.removeprefix("torch.") if len(value) <= _MAX_TEXT else _ABSENT
    if isinstance(value, DType):
        return value.torch_name
    if isinstance(value, Global):
        return value.path.removeprefix("torch.")
    if isinstance(value, Opaque) and len(value.args) == 1 and isinstance(value.args[0], str):
        return value.args[0]
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
        items = [_plain(item, depth + 1) for item in value]
        return items if _ABSENT not in items else _ABSENT
    return _ABSENT


def _in_arguments(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts under the names of arguments; where a fact is there under both names, that of the argument holds."""
    named = {_RENAMED[name]: value for name, value in facts.items() if name in _RENAMED}
    facts = named | {name: value for name, value in facts.items() if name not in _RENAMED}
    if "share_embeddings_and_output_weights" in facts:
        facts.setdefault("untie_embeddings_and_output_weights", not facts["share_embeddings_and_output_weights"])
    if "gated_linear_unit" in facts and isinstance(facts.get("activation_func"), str):
        facts.setdefault("swiglu", bool(facts["gated_linear_unit"]) and "silu" in facts["activation_func"])
    if facts.get("group_query_attention") is False and facts.get("num_attention_heads") is not None:
        facts["num_query_groups"] = facts["num_attention_heads"]
    return facts
