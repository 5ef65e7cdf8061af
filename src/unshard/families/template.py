"""The language in which a model family is written down: parameters, blocks and the conditions under which they exist.

Everything here is inert data that is expanded against a config; nothing of it runs code from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from unshard.checkpoint import Dialect, Shape
from unshard.errors import ModelError
from unshard.families.rules import Rule
from unshard.families.sizes import Default, Sizes

MOST_PARAMETERS = 1_000_000
"""More parameters than any model has: a config that asks for more is refused."""

Indices: TypeAlias = Mapping[str, int]
"""The value of each wildcard on the way to a parameter: {"layer": 3}."""


class Condition(Protocol):
    """When a parameter exists."""

    def holds(self, sizes: Sizes, indices: Indices) -> bool: ...


@dataclass(frozen=True, slots=True)
class Flag:
    """Where config.json says yes to `key` (or no, for `value=False`)."""

    key: str
    value: bool = True

    def holds(self, sizes: Sizes, _indices: Indices) -> bool:
        return sizes.flag(self.key) == self.value


@dataclass(frozen=True, slots=True)
class Has:
    """Where config.json gives `key` a value (or null, for `value=False`)."""

    key: str
    value: bool = True

    def holds(self, sizes: Sizes, _indices: Indices) -> bool:
        return sizes.has(self.key) == self.value


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """In layers with experts (or in those without, for `value=False`), as the Qwen families choose them.

    A layer has experts if there are any, if it is not among `mlp_only_layers`, and if its number, counted from one, is
    a multiple of `decoder_sparse_step` (transformers, `Qwen2MoeDecoderLayer` and `Qwen3MoeDecoderLayer`).
    """

    value: bool = True

    def holds(self, sizes: Sizes, indices: Indices) -> bool:
        layer = indices["layer"]
        step = max(1, sizes.size("decoder_sparse_step"))
        dense = sizes.stored("mlp_only_layers")
        sparse = (
            not (isinstance(dense, list) and layer in dense)
            and sizes.size("num_experts") > 0
            and (layer + 1) % step == 0
        )
        return sparse == self.value


@dataclass(frozen=True, slots=True)
class SparseTail:
    """In layers with experts (or in those without, for `value=False`), as DeepSeek chooses them.

    What `mlp_layer_types` tells of the layer, else every `moe_layer_freq`-th layer from `first_k_dense_replace` on
    (`modeling_deepseek.py` beside the weights; transformers, `Glm4MoeLiteDecoderLayer`).
    """

    value: bool = True

    def holds(self, sizes: Sizes, indices: Indices) -> bool:
        layer, types = indices["layer"], sizes.stored("mlp_layer_types")
        if isinstance(types, list) and layer < len(types):
            return bool(types[layer] == "sparse") == self.value
        sparse = layer >= sizes.size("first_k_dense_replace") and layer % max(1, sizes.size("moe_layer_freq")) == 0
        return sparse == self.value


@dataclass(frozen=True, slots=True)
class LayerType:
    """In layers that `layer_types` calls so ("full_attention", "linear_attention").

    Where it is silent, every `full_attention_interval`-th layer has full attention (transformers, `Qwen3NextConfig`).
    """

    name: str

    def holds(self, sizes: Sizes, indices: Indices) -> bool:
        layer, types = indices["layer"], sizes.stored("layer_types")
        if isinstance(types, list) and layer < len(types):
            return bool(types[layer] == self.name)
        full = (layer + 1) % max(1, sizes.size("full_attention_interval")) == 0
        return self.name == ("full_attention" if full else "linear_attention")


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Where the experts of a layer are one tensor at run time: under transformers 5 and later.

    A config that does not say which version wrote it counts as written by a new one.
    """

    value: bool = True

    def holds(self, sizes: Sizes, _indices: Indices) -> bool:
        version = sizes.transformers_version
        return (version is None or version >= (5, 0)) == self.value


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its name within its block, and its shape as expressions over config keys (see `Sizes`)."""

    name: str
    shape: tuple[str, ...]
    when: Condition | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Parameters below a common prefix (none: a group).

    count: how often the prefix's wildcard repeats it, from the number `first` on.
    """

    prefix: str
    contents: Contents
    count: str | None = None
    when: Condition | None = None
    first: str = "0"


Contents: TypeAlias = "tuple[Parameter | Block, ...]"


def parameter(name: str, *shape: str, when: Condition | None = None) -> Parameter:
    """`Parameter` with the shape written inline."""
    return Parameter(name, shape, when)


def linear(name: str, rows: str, columns: str, bias: Condition | bool = False) -> Contents:
    """The weight of a linear layer and its bias: never (False), always (True), or under a condition."""
    weight = Parameter(f"{name}.weight", (rows, columns))
    if bias is False:
        return (weight,)
    return weight, Parameter(f"{name}.bias", (rows,), None if bias is True else bias)


def layer_norm(name: str, width: str) -> Contents:
    """Weight and bias of a layer norm; a norm without bias is one `parameter`."""
    return Parameter(f"{name}.weight", (width,)), Parameter(f"{name}.bias", (width,))


HEADS: Mapping[str, Contents] = {
    "ForCausalLM": (parameter("lm_head.weight", "vocab_size", "hidden_size"),),
    "ForConditionalGeneration": (parameter("lm_head.weight", "vocab_size", "hidden_size"),),
    "ForTokenClassification": linear("score", "num_labels", "hidden_size", bias=Flag("token_classification_bias")),
    "ForSequenceClassification": linear("score", "num_labels", "hidden_size"),
}
"""What stands behind the base model, by the ending of the architecture's name (transformers, `modeling_layers.py`)."""

VALUE_HEAD = linear("v_head.summary", "1", "hidden_size", bias=True)
"""The value head that TRL puts beside a language model (trl, `modeling_value_head.py`)."""

COMMON_DEFAULTS: Mapping[str, Default] = {
    "num_key_value_heads": "num_attention_heads",
    "head_dim": "hidden_size//num_attention_heads",
    "num_labels": 2,
    "token_classification_bias": True,
}


@dataclass(frozen=True, slots=True)
class Extra:
    """What a file may hold beside the parameters of the model in transformers: all of it, or nothing.

    contents: under the names of the running model, as if it had them; `Family.rules` lead to those of the file.
    absence: what the report says where they are not there; None: nothing.
    """

    contents: Contents
    absence: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: the parameters of its base model, and how the file on the hub differs from the running model.

    model_type: as config.json spells it.
    prefix:     of the names of its classes: "Qwen2" as in Qwen2ForCausalLM.
    parameters: of the running model, without the head, in the order of torch's `named_parameters()`.
    heads:      endings of the class names that the family has.
    rules:      from the names of the running model to those of the file that `save_pretrained` writes.
    defaults:   what transformers takes for keys that config.json lacks, besides `COMMON_DEFAULTS`.
    extras:     what the file may hold besides: layers that predict several tokens (MTP), say.
    fp32:       how names of parameters end that stay what they are under `--dtype` (transformers,
                `_keep_in_fp32_modules_strict`).
    megatron:   from the names of Megatron, as `formats.megatron` gives them and with the aliases of
                `families.megatron` resolved, to those of the file. None: nobody has written them down.
    torchtitan: the same from the names of torchtitan's models, as they are stored.
    mtp_follows: MTP layers are layers `num_hidden_layers`, … of the decoder in the file.
    """

    model_type: str
    prefix: str
    parameters: Contents
    heads: tuple[str, ...] = ("ForCausalLM", "ForTokenClassification", "ForSequenceClassification")
    rules: tuple[Rule, ...] = ()
    defaults: Mapping[str, Default] = field(default_factory=dict)
    extras: tuple[Extra, ...] = ()
    fp32: tuple[str, ...] = ()
    megatron: tuple[Rule, ...] = ()
    torchtitan: tuple[Rule, ...] = ()
    mtp_follows: bool = False

    def table(self, dialect: Dialect) -> tuple[Rule, ...]:
        """The rules that lead from a dialect's names to those of the file."""
        return {"huggingface": (), "megatron": self.megatron, "torchtitan": self.torchtitan}[dialect]

    def all_defaults(self) -> Mapping[str, Default]:
        return {**COMMON_DEFAULTS, **self.defaults}


def expand(template: Contents, sizes: Sizes) -> dict[str, Shape]:
    """Parameter name → shape, in the template's order.

    Raises ModelError where config.json lacks a size, or asks for more parameters than any model has.
    """
    shapes: dict[str, Shape] = {}
    for name, item in _walk(template, sizes, "", {}):
        if len(shapes) >= MOST_PARAMETERS:
            raise ModelError(f"config.json asks for more than {MOST_PARAMETERS} parameters")
        shapes[name] = tuple([sizes.size(expression) for expression in item.shape])
    return shapes


def _walk(template: Contents, sizes: Sizes, prefix: str, indices: Indices) -> Iterator[tuple[str, Parameter]]:
    for item in template:
        if item.when is not None and not item.when.holds(sizes, indices):
            continue
        if isinstance(item, Parameter):
            yield prefix + item.name, item
        elif item.count is None:
            yield from _walk(item.contents, sizes, f"{prefix}{item.prefix}." if item.prefix else prefix, indices)
        else:
            wildcard = item.prefix[item.prefix.rindex("{") + 1 : item.prefix.rindex("}")]
            first = sizes.size(item.first)
            for index in range(first, first + sizes.size(item.count)):
                place = {**indices, wildcard: index}
                yield from _walk(item.contents, sizes, f"{prefix}{item.prefix.format(**place)}.", place)
