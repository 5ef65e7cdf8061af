"""Which layers of the model a pipeline stage holds: its files number them from zero.

The model runs through the stages in the order of virtual stages, then of ranks: chunk v of rank p is stage v * P + p.
So a stage's first layer is the number of layers on all stages before it, which can be counted; what training recorded
must agree. Sources: megatron-core `transformer/transformer_layer.py` (`get_transformer_layer_offset`),
`transformer/transformer_block.py` (`get_num_layers_to_build`), `transformer/pipeline_parallel_layer_layout.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unshard.errors import IncompleteError, UnshardError
from unshard.formats.megatron.ranks.sizes import ONE_RUN
from unshard.words import items_in_words

LAYER = re.compile(r"((?:language_model\.)?decoder\.layers\.)(\d{1,6})(\..+)")
"""Names with a layer's number that counts from the stage's first layer; vision towers and MTP lie on one stage."""

_DECODER = ("t", "decoder")
_REPEATED = (re.compile(r"\(([^()]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_MAX_STAGES = 1 << 16
"""Of a model, and layers in a layout that is written out: more than any cluster has ranks."""
_MAX_DIGITS = 6
_LISTED = 64


def first_layers(
    found: Mapping[int, set[int]], stages: int, recorded: Sequence[int] | None, problems: list[UnshardError]
) -> dict[int, int]:
    """Stage → what must be added to its layers' numbers.

    found:    stage → the layers that its files number; stages of which no file is there are left out.
    recorded: the number of layers of each stage as training recorded it, or None.

    Numbers that are global already (verl's first layout) stay. What contradicts is added to `problems`.
    """
    if any(min(layers, default=0) > 0 for layers in found.values()):
        return _check_global(found, problems)
    counts = {stage: len(layers) for stage, layers in found.items()}
    gaps = [stage for stage, layers in found.items() if layers and max(layers) + 1 != len(layers)]
    if gaps:
        numbers = "; ".join([f"stage {stage} holds {sorted(found[stage])}" for stage in gaps[:4]])
        problems.append(IncompleteError(f"layers are missing between others: {numbers}"))
    if recorded is not None and any(counts[stage] != recorded[stage] for stage in counts):
        said = items_in_words([f"{count}" for count in recorded], _LISTED)
        there = items_in_words([f"{counts.get(stage, '?')}" for stage in range(stages)], _LISTED)
        problems.append(
            IncompleteError(
                f"args put [{said}] layers on the {stages} pipeline stages, but their files hold [{there}]",
                hint=ONE_RUN,
            )
        )
    offsets, first = {}, 0
    for stage in range(stages):
        offsets[stage] = first
        first += counts.get(stage, recorded[stage] if recorded is not None else 0)
    return offsets


def _check_global(found: Mapping[int, set[int]], problems: list[UnshardError]) -> dict[int, int]:
    """No offsets, for the numbers are global; adds a problem where they are not, after all."""
    numbers = [number for layers in found.values() for number in layers]
    if len(set(numbers)) != len(numbers):
        listed = "; ".join([f"stage {stage} holds {sorted(layers)}" for stage, layers in sorted(found.items())])
        problems.append(
            IncompleteError(
                f"layers are numbered neither from 0 on each pipeline stage nor over all of them: {listed}",
                hint=ONE_RUN,
            )
        )
    return dict.fromkeys(found, 0)


def recorded_counts(facts: Mapping[str, Any], ranks: int, chunks: int) -> tuple[int, ...] | None:
    """The number of layers of each stage, stage v * P + p, as the arguments say; None where they do not tell.

    ranks, chunks: P, the pipeline-parallel size, and V, the virtual stages per rank.
    """
    layers = _count(facts, "num_layers")
    if layers is None or ranks * chunks > _MAX_STAGES or facts.get("standalone_embedding_stage"):
        return None
    if ranks == 1:
        return (layers,) if chunks == 1 else None
    layout = facts.get("pipeline_model_parallel_layout")
    if layout:
        counts = parse_layout(layout)
        return counts if counts is not None and len(counts) == ranks * chunks else None
    first, last = (_count(facts, f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    if first is not None or last is not None:
        per_rank = _uneven(layers, ranks, first, last)
    else:
        per_rank = _even(layers, ranks * chunks, facts)
        chunks = 1
    if per_rank is None or any(count % chunks for count in per_rank):
        return None
    return tuple([count // chunks for _ in range(chunks) for count in per_rank])


def _even(layers: int, stages: int, facts: Mapping[str, Any]) -> list[int] | None:
    """Equal stages, where embedding and loss may each stand for a layer of the first and of the last."""
    embedding = bool(facts.get("account_for_embedding_in_pipeline_split"))
    loss = bool(facts.get("account_for_loss_in_pipeline_split"))
    each, rest = divmod(layers + embedding + loss, stages)
    if rest:
        return None
    counts = [each] * stages
    counts[0] -= embedding
    counts[-1] -= loss
    return counts if min(counts) >= 0 else None


def _uneven(layers: int, ranks: int, first: int | None, last: int | None) -> list[int] | None:
    """Given layers on the first and the last rank, equal numbers on all others."""
    between = ranks - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if between < 0 or left < 0 or (left if between == 0 else left % between):
        return None
    each = left // between if between else 0
    return [
        *([] if first is None else [first]),
        *[each] * between,
        *([] if last is None else [last]),
    ]


def parse_layout(layout: object) -> tuple[int, ...] | None:
    """Decoder layers of each stage in a `pipeline_model_parallel_layout`; None where it cannot be read.

    A text has one letter per layer (E embedding, t decoder, m MTP, L loss), `|` between stages, `x*3` and `(…)*3` for
    repetitions, and commas for the eye. A list has one list of layer names per stage.
    """
    if isinstance(layout, (list, tuple)):
        if not all(isinstance(stage, (list, tuple)) for stage in layout):
            return None
        return tuple([sum(_is_decoder(layer) for layer in stage) for stage in layout])
    if not isinstance(layout, str):
        return None
    text = layout.replace(",", "")
    for pattern in _REPEATED:
        repeated = [(match[1], match[2]) for match in pattern.finditer(text)]
        if any(len(count) > _MAX_DIGITS for _, count in repeated):
            return None
        if sum([len(part) * int(count) for part, count in repeated]) > _MAX_STAGES:
            return None
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    return tuple([stage.count("t") for stage in text.split("|")]) if not set(text) - set("EtmL|") else None


def _is_decoder(layer: object) -> bool:
    return isinstance(layer, str) and layer.strip().lower().rpartition(".")[2] in _DECODER


def _count(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return value if type(value) is int and value >= 0 else None


def layers_of(names: Iterable[str]) -> set[int]:
    """The layers' numbers that occur in the names of a stage."""
    return {int(match[2]) for name in names if (match := LAYER.fullmatch(name))}
