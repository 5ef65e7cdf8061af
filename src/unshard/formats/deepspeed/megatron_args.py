"""What Megatron-DeepSpeed's arguments say, under the names and in the words of Megatron-LM's.

Source: Megatron-DeepSpeed `megatron/arguments.py`, which branched off Megatron-LM before these arguments were there.
"""

from __future__ import annotations

from typing import Any

from unshard.formats.megatron.facts import read_facts

_RENAMED = {"rope_theta": "rotary_base"}
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


def read_args(recorded: object) -> dict[str, Any]:
    """The facts in `args` of a file of model states, a Namespace; {} where there are none."""
    facts = read_facts(recorded)
    facts |= {new: facts[old] for old, new in _RENAMED.items() if old in facts and new not in facts}
    norm = facts.get("normalization")
    if isinstance(norm, str):
        facts["normalization"] = _NORMS.get(norm, norm)
    heads, groups = facts.get("num_attention_heads"), facts.get("num_key_value_heads")
    if "num_key_value_heads" in facts and "num_query_groups" not in facts:
        facts["num_query_groups"] = heads if groups is None else groups
        facts["group_query_attention"] = facts["num_query_groups"] != heads
    if isinstance(facts.get("num_experts"), list):
        most = max([count for count in facts["num_experts"] if type(count) is int], default=1)
        facts["num_experts"] = most if most > 1 else None
    if "position_embedding_type" not in facts and "use_rotary_position_embeddings" in facts:
        facts["position_embedding_type"] = "rope" if facts["use_rotary_position_embeddings"] else "learned_absolute"
    return facts
