"""MiMo 7B: Qwen 2 with layers that predict several tokens.

Its classes come with the weights (`modeling_mimo.py` of XiaomiMiMo/MiMo-7B-Base); there MTP layers are parameters of
the model. Trainings that leave MTP out have none.
"""

from unshard.families import qwen2
from unshard.families.megatron.blocks import DENSE, dense_layer, norm
from unshard.families.rules import Rule
from unshard.families.steps import SwapHalves
from unshard.families.template import Block, Extra, Family, linear, parameter

_MTP = (
    *qwen2.LAYER,
    parameter("token_layernorm.weight", "hidden_size"),
    parameter("hidden_layernorm.weight", "hidden_size"),
    *linear("input_proj", "hidden_size", "2*hidden_size"),
    parameter("final_layernorm.weight", "hidden_size"),
)

_AT, _TO = "mtp.layers.{layer}", "model.mtp_layers.{layer}"

FAMILY = Family(
    model_type="mimo",
    prefix="MiMo",
    parameters=qwen2.FAMILY.parameters,
    heads=("ForCausalLM",),
    defaults={"num_nextn_predict_layers": 0},
    extras=(
        Extra(
            (Block(_TO, _MTP, count="num_nextn_predict_layers"),),
            absence="the checkpoint has no MTP layers, which config.json counts (num_nextn_predict_layers)",
        ),
    ),
    megatron=(
        *DENSE,
        *norm(f"{_AT}.enorm", f"{_TO}.token_layernorm"),
        *norm(f"{_AT}.hnorm", f"{_TO}.hidden_layernorm"),
        Rule(f"{_AT}.eh_proj.weight", (f"{_TO}.input_proj.weight",), (SwapHalves(axis=1),)),
        *dense_layer(f"{_AT}.transformer_layer", _TO),
        *norm(f"{_AT}.final_layernorm", f"{_TO}.final_layernorm"),
    ),
)
"""Megatron multiplies [embedding, hidden state], MiMo [hidden state, embedding]: hence the halves."""
