"""The model's names for the layers of a PipelineModule, whose files name parameters within a layer.

`layer_03-model_states.pt` has `self_attn.q_proj.weight`, and 3 is the layer's place in the list that the training
script made: before the first block stand embeddings, and functions, which have no file. So blocks are numbered from the
first of them on, and what stands before and behind them is told by its own names and shapes.

| blocks hold                              | names become                                                           |
|------------------------------------------|------------------------------------------------------------------------|
| `self_attn.…` (modules of transformers)  | `model.embed_tokens`, `model.layers.N.…`, `model.norm`, `lm_head`      |
| `self_attention.query_key_value.weight`  | those of Megatron-LM from before megatron-core: Megatron-DeepSpeed     |
| anything else                            | `LL.name`, as the pipeline engine calls it                             |

Sources: DeepSpeed `runtime/pipe/module.py` (`ckpt_layer_path`, `_build`); Megatron-DeepSpeed
`megatron/model/gpt_model.py` (`GPTModelPipe`); HuangLK/transpeeder `src/transpeeder/models/llama_pipeline_model.py` for
modules of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from unshard.checkpoint import Dialect, Note, Shape
from unshard.errors import IncompleteError
from unshard.words import items_in_words

_EMBEDDINGS = ("weight", "embed_tokens.weight", "word_embeddings.weight", "embedding.weight")
_HEADS = ("weight", "lm_head.weight", "embed_tokens.weight", "linear.weight")
_NORM = re.compile(r"(?:\w*norm\.)?(weight|bias)")
_HF_BLOCK = re.compile(r"((?:\w+\.)*?)self_attn\..+")
_MEGATRON_BLOCK = re.compile(r"()self_attention\.query_key_value\.weight")


@dataclass(frozen=True, slots=True)
class Naming:
    """What the parameters of a pipeline are called. `names`: `LL.local name` → name; `notes`: what is not known."""

    names: Mapping[str, str]
    dialect: Dialect
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of model.

    mark:     a name that each block has, and no other layer; its group is what may stand before the block's names.
    block:    what a block's parameter becomes, of the block's number and the name in it.
    name_end: the name of a parameter of another layer, of its local name, its shape, and whether the layer stands
              behind the blocks; None where that is not known.
    """

    dialect: Dialect
    mark: re.Pattern[str]
    block: str
    name_end: Callable[[str, Shape, bool], str | None]


def name_layers(layers: Mapping[int, Mapping[str, Shape]]) -> Naming:
    """Names for all parameters, where `layers` has, by their numbers, those with a file: local name → shape.

    Raises IncompleteError where blocks are missing between others.
    """
    for kind in _KINDS:
        blocks = {number: found for number, names in layers.items() if (found := _prefix(kind.mark, names)) is not None}
        if blocks:
            return _name(layers, blocks, kind)
    names = {f"{number}.{name}": f"{number}.{name}" for number, local in layers.items() for name in local}
    return Naming(names, "huggingface", _notes(list(names)))


def _name(layers: Mapping[int, Mapping[str, Shape]], blocks: Mapping[int, str], kind: _Kind) -> Naming:
    """`blocks`: the number of each block → what stands before all of its names."""
    _check_run(sorted(blocks))
    first, last = min(blocks), max(blocks)
    names: dict[str, str] = {}
    unknown: list[str] = []
    for number, local in layers.items():
        for name, shape in local.items():
            stored = f"{number}.{name}"
            if number in blocks:
                names[stored] = kind.block.format(number - first, name.removeprefix(blocks[number]))
                continue
            found = kind.name_end(name, shape, number > last)
            names[stored] = found or stored
            unknown += [] if found else [stored]
    return Naming(names, kind.dialect, _notes(unknown))


def _prefix(mark: re.Pattern[str], names: Mapping[str, Shape]) -> str | None:
    """What stands before all names of a block, mostly nothing; None where this is no block."""
    match = next((found for name in names if (found := mark.fullmatch(name))), None)
    return match[1] if match and all(name.startswith(match[1]) for name in names) else None


def _check_run(blocks: Sequence[int]) -> None:
    missing = sorted(set(range(blocks[0], blocks[-1])) - set(blocks))
    if missing:
        raise IncompleteError(
            f"the files of layers {blocks[0]} to {blocks[-1]} hold the model's blocks, but there is no block in "
            + items_in_words([f"layer_{number:02d}-*" for number in missing]),
            hint="fetch the missing files: one per layer of the pipeline",
        )


def _huggingface_name(name: str, shape: Shape, behind: bool) -> str | None:
    if not behind:
        return "model.embed_tokens.weight" if name in _EMBEDDINGS and len(shape) == 2 else None
    if (norm := _NORM.fullmatch(name)) and len(shape) == 1:
        return f"model.norm.{norm[1]}"
    return "lm_head.weight" if name in _HEADS and len(shape) == 2 else None


def _megatron_name(name: str, shape: Shape, behind: bool) -> str | None:
    if not behind:
        return f"language_model.embedding.{name}" if re.fullmatch(r"(word|position)_embeddings\..+", name) else None
    if (norm := _NORM.fullmatch(name)) and len(shape) == 1:
        return f"language_model.encoder.final_layernorm.{norm[1]}"
    heads = {
        "lm_head.weight": "language_model.output_layer.weight",
        "word_embeddings.weight": "word_embeddings_for_head.weight",
    }
    return heads.get(name)


_KINDS = (
    _Kind("megatron", _MEGATRON_BLOCK, "language_model.encoder.layers.{}.{}", _megatron_name),
    _Kind("huggingface", _HF_BLOCK, "model.layers.{}.{}", _huggingface_name),
)


def _notes(unknown: Sequence[str]) -> tuple[Note, ...]:
    if not unknown:
        return ()
    return (
        Note(
            "of these layers of a pipeline module it is not known what the model calls them; they keep the names that "
            "the pipeline engine has for them",
            tuple(unknown),
            "warning",
        ),
    )
