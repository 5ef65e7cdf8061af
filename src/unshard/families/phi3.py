"""Phi 3, 3.5 and 4: as Llama, with one matrix for queries, keys and values, and one for gates and ups."""

from unshard.families.blocks import NORMS, decoder
from unshard.families.megatron.blocks import GROUPED, HUB_LAYER, LAYER, attention, embeddings, norm
from unshard.families.megatron.blocks import linear as from_linear
from unshard.families.steps import Ungroup
from unshard.families.template import Block, Family, linear

MLP = Block(
    "mlp",
    (
        *linear("gate_up_proj", "2*intermediate_size", "hidden_size"),
        *linear("down_proj", "hidden_size", "intermediate_size"),
    ),
)
MEGATRON_MLP = (
    *from_linear(f"{LAYER}.mlp.linear_fc1", f"{HUB_LAYER}.mlp.gate_up_proj"),
    *from_linear(f"{LAYER}.mlp.linear_fc2", f"{HUB_LAYER}.mlp.down_proj"),
)

_QUERIES = "num_attention_heads*head_dim"
_QUERIES_KEYS_VALUES = f"{_QUERIES}+2*num_key_value_heads*head_dim"

FAMILY = Family(
    model_type="phi3",
    prefix="Phi3",
    parameters=decoder(
        *linear("self_attn.o_proj", "hidden_size", _QUERIES),
        *linear("self_attn.qkv_proj", _QUERIES_KEYS_VALUES, "hidden_size"),
        MLP,
        *NORMS,
    ),
    megatron=(
        *embeddings(),
        *attention(grouped=(Ungroup(GROUPED.rows, GROUPED.groups),), names=("qkv_proj",)),
        *norm(f"{LAYER}.pre_mlp_layernorm", f"{HUB_LAYER}.post_attention_layernorm"),
        *MEGATRON_MLP,
    ),
)
