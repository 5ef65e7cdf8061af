"""DeepSeek V3 and Moonlight: V2 with a bias that balances the experts, and layers that predict further tokens."""

from collections.abc import Mapping

from unshard.families import deepseek_v2
from unshard.families.blocks import decoder
from unshard.families.megatron import blocks as megatron
from unshard.families.sizes import Default
from unshard.families.template import Block, Contents, Extra, Family, SparseTail, linear, parameter
from unshard.families.torchtitan import blocks as torchtitan
from unshard.families.transformers5 import PER_EXPERT

FP32 = (".mlp.gate.e_score_correction_bias", ".mlp.gate.weight")

_SCORE_BIAS = Block("mlp.gate", (parameter("e_score_correction_bias", "n_routed_experts"),), when=SparseTail())


def _further(*contents: Block) -> Contents:
    """Contents of the layers that predict further tokens: they follow those of the decoder."""
    return (Block("model.layers.{layer}", contents, count="num_nextn_predict_layers", first="num_hidden_layers"),)


def extras(layer: Contents) -> tuple[Extra, ...]:
    """What files hold beside the model in transformers, where `layer` is a layer of the decoder.

    The bias is a buffer there. The layers of further tokens may repeat the embedding and the head.
    """
    further = (
        parameter("enorm.weight", "hidden_size"),
        parameter("hnorm.weight", "hidden_size"),
        *linear("eh_proj", "hidden_size", "2*hidden_size"),
        parameter("shared_head.norm.weight", "hidden_size"),
        *layer,
    )
    repeated = (
        parameter("embed_tokens.weight", "vocab_size", "hidden_size"),
        *linear("shared_head.head", "vocab_size", "hidden_size"),
    )
    return (
        Extra(
            (Block("model.layers.{layer}", (_SCORE_BIAS,), count="num_hidden_layers"),),
            "the checkpoint has no bias that balances the experts (e_score_correction_bias): models take it for 0",
        ),
        Extra(
            _further(Block("", further)),
            "the checkpoint has none of the layers that predict further tokens, of which config.json has "
            "num_nextn_predict_layers: the model generates as well without them, but cannot speculate with them",
        ),
        Extra(_further(_SCORE_BIAS)),
        Extra(_further(Block("", repeated))),
    )


DEFAULTS: Mapping[str, Default] = {
    **deepseek_v2.DEFAULTS,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 0,
}

FAMILY = Family(
    model_type="deepseek_v3",
    prefix="DeepseekV3",
    parameters=decoder(*deepseek_v2.LAYER),
    rules=PER_EXPERT,
    defaults=DEFAULTS,
    extras=extras(deepseek_v2.LAYER),
    fp32=FP32,
    megatron=(*megatron.LATENT_MOE, *megatron.MTP),
    torchtitan=torchtitan.DEEPSEEK,
    mtp_follows=True,
)
