"""What training recorded of a model's architecture, under the names of Megatron-LM's arguments.

Two vocabularies say the same things: Megatron-LM's arguments (`args` of a checkpoint, an argparse.Namespace), and
megatron-core's TransformerConfig with what NeMo's GPTConfig and Megatron-Bridge's providers add to it. Here all become
the first, as `core_transformer_config_from_args` relates them (Megatron-LM megatron/training/argument_utils.py).

| file                                    | written by                        | its facts are in            |
|-----------------------------------------|-----------------------------------|-----------------------------|
| `transformer_config.json`               | verl, beside or above `dist_ckpt` | the file itself             |
| `run_config.yaml`                       | Megatron-Bridge, in each `iter_*` | `model`, `peft`             |
| `context/model.yaml`, `context/io.json` | NeMo 2, beside `weights`          | `config`, `model_transform` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unshard.checkpoint import Note
from unshard.errors import FormatError, UnshardError
from unshard.formats.huggingface.assets import read_config
from unshard.formats.megatron.nemo_context import ObjectGraph
from unshard.formats.megatron.plain_values import plain_members
from unshard.formats.yaml_text import INSTALL, can_read_yaml, read_yaml

TRANSFORMER_CONFIG = "transformer_config.json"
RUN_CONFIG = "run_config.yaml"
NEMO_CONTEXT = "context"

_RENAMED = {
    "num_moe_experts": "num_experts",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "layernorm_epsilon": "norm_epsilon",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
"""TransformerConfig's names → those of Megatron-LM's arguments; the others are the same."""


def read_facts(recorded: object) -> dict[str, Any]:
    """The facts in a Namespace, a dict of arguments or a TransformerConfig, as a file holds them; {} in all else.

    Values are plain JSON (see `plain_values`); names that are in neither vocabulary stay as they are.
    """
    inner = recorded.get("transformer") if isinstance(recorded, Mapping) else None
    facts = plain_members(inner) | plain_members(recorded)
    named = {_RENAMED[name]: value for name, value in facts.items() if name in _RENAMED}
    facts = named | {name: value for name, value in facts.items() if name not in _RENAMED}
    _settle_groups(facts)
    _settle_activation(facts)
    shared = facts.pop("share_embeddings_and_output_weights", None)
    if isinstance(shared, bool):
        facts.setdefault("untie_embeddings_and_output_weights", not shared)
    return facts


def _settle_groups(facts: dict[str, Any]) -> None:
    """`num_query_groups` means nothing (the arguments' default is 1) unless `group_query_attention` is set."""
    heads, groups = facts.get("num_attention_heads"), facts.get("num_query_groups")
    grouped = facts.get("group_query_attention")
    if heads is None:
        return
    if grouped is False or (grouped is None and "num_query_groups" in facts and groups is None):
        facts["num_query_groups"] = heads
    if grouped is None and facts.get("num_query_groups") is not None:
        facts["group_query_attention"] = facts["num_query_groups"] != heads


def _settle_activation(facts: dict[str, Any]) -> None:
    """`swiglu` and `quick_geglu`, of which TransformerConfig makes `gated_linear_unit` and `activation_func`."""
    gated, function = facts.get("gated_linear_unit"), facts.get("activation_func")
    if isinstance(gated, bool) and isinstance(function, str):
        facts.setdefault("swiglu", gated and "silu" in function)
        facts.setdefault("quick_geglu", gated and "quick_gelu" in function)


def facts_beside(directory: Path, problems: list[UnshardError], notes: list[Note] | None = None) -> dict[str, Any]:
    """The facts in the files that verl, Megatron-Bridge and NeMo leave beside or above the weights in `directory`.

    What is wrong with such a file is added to `problems`: one that is malformed is never taken for an absent one. What
    cannot be read for want of PyYAML is said in `notes`.
    """
    facts: dict[str, Any] = {}
    for path, reader in _files_beside(directory.absolute()):
        if not path.is_file():
            continue
        if path.suffix == ".yaml" and not can_read_yaml():
            if notes is not None:
                notes.append(Note(f"{path} was not read, as PyYAML is not installed: {INSTALL}"))
            continue
        try:
            facts |= reader(path)
        except FormatError as error:
            problems.append(error)
    return facts


def _files_beside(directory: Path) -> list[tuple[Path, Callable[[Path], dict[str, Any]]]]:
    """The files with facts and their readers, the fullest last. Above a `dist_ckpt` may lie `model/` (verl)."""
    above = (directory.parent.parent, directory.parent, directory)
    found = [(place / TRANSFORMER_CONFIG, _read_transformer_config) for place in above]
    for place in (directory.parent, directory):
        context = place / NEMO_CONTEXT
        found += [(context / "io.json", _read_nemo_graph), (context / "model.yaml", _read_nemo_model)]
    return [*found, (directory / RUN_CONFIG, _read_run_config)]


def _read_transformer_config(path: Path) -> dict[str, Any]:
    return read_facts(read_config(path))


def _read_run_config(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    return read_facts(content.get("model")) | _lora_facts(content.get("peft"))


def _read_nemo_model(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    return read_facts(content.get("config")) | _lora_facts(content.get("model_transform"))


def _read_nemo_graph(path: Path) -> dict[str, Any]:
    graph = ObjectGraph(read_config(path))
    return read_facts(graph.members("model", "config")) | _lora_facts(graph.members("model", "model_transform"))


def _lora_facts(recorded: object) -> dict[str, Any]:
    """`lora_dim` and `lora_alpha`: what NeMo's and Megatron-Bridge's LoRA classes call `dim` and `alpha`."""
    members = plain_members(recorded)
    return {f"lora_{name}": members[name] for name in ("dim", "alpha") if members.get(name) is not None}
