"""Low-rank adapters of Megatron-Bridge and NeMo under PEFT's names, taken apart as the matrices that they adapt.

`<linear>.adapter.linear_in.weight` is A [r, in], `<linear>.adapter.linear_out.weight` is B [out, r] with the rows of
the base matrix, `<linear>.adapter.weight_magnitude` is DoRA's [out]. Where the base is several matrices in the file,
each gets its rows of B, and all of them A. Canonical LoRA has an adapter for each of them: `adapter_q`, `adapter_k` and
`adapter_v` of `linear_qkv`, `adapter_gate` and `adapter_up` of `linear_fc1`. Experts have theirs stacked, or share one.
Sources: NVIDIA-NeMo/Megatron-Bridge `src/megatron/bridge/peft/utils.py`, `canonical_lora.py`, `dora_layers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unshard.checkpoint import Note, Shape
from unshard.errors import IncompleteError, ModelError, UnshardError
from unshard.families.megatron.contradictions import EXPERTS
from unshard.families.rules import Rewritten, Rule, find_rule
from unshard.families.sizes import Sizes
from unshard.families.steps import (
    Divide,
    FirstRows,
    Group,
    OnPart,
    Parts,
    Permute,
    Sections,
    Step,
    SwapHalves,
    Ungroup,
    Unstack,
)
from unshard.tensors import Tensor
from unshard.words import items_in_lines

_NAME = re.compile(
    r"(?P<base>.+?)\.adapter\.(?:adapter_(?P<part>q|k|v|gate|up)\.)?"
    r"(?:linear_(?P<side>in|out)\.weight|(?P<magnitude>weight_magnitude))"
)
_PARTS = {"q": (0, 3), "k": (1, 3), "v": (2, 3), "gate": (0, 2), "up": (1, 2)}
"""Of canonical LoRA: which part of the base it adapts, and how many there are."""
_PEFT_NAMES = {"in": "lora_A", "out": "lora_B", "magnitude": "lora_magnitude_vector"}
_AXES = {"in": 2, "out": 2, "magnitude": 1}
_MERGE_THERE = "add it into the weights with Megatron-Bridge (examples/peft/merge_lora.py), and merge the result"


@dataclass(slots=True)
class _Adapter:
    """One adapter of a base matrix: its tensors by their sides ("in", "out", "magnitude"), with their stored names.

    part: of canonical LoRA; None where the adapter is for the whole base.
    """

    base: str
    part: str | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"`{self.base}.adapter" + (f".adapter_{self.part}`" if self.part else "`")


class _InexpressibleError(Exception):
    """No adapter of the model in the Hugging Face file can do what this one does; says why."""


@dataclass(slots=True)
class Adapters:
    """The adapters' tensors by the names that a PEFT model gives them (`….lora_A.default.weight`).

    unknown: names that are no adapter's, or of a matrix that no rule knows.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    unknown: Sequence[str] = ()
    notes: Sequence[Note] = ()
    problems: Sequence[UnshardError] = ()


def translate_adapters(
    tensors: Mapping[str, Tensor], rules: Sequence[Rule], sizes: Sizes, shapes: Mapping[str, Shape]
) -> Adapters:
    """Adapters' tensors taken apart by the rules of what they adapt; everything that is wrong with them.

    shapes: of the matrices in the file, by name, as far as they are known: each adapter must fit the one it adapts.
    """
    if not tensors:
        return Adapters()
    unknown: list[str] = []
    adapters: dict[tuple[str, str | None], _Adapter] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or find_rule(f"{match['base']}.weight", rules) is None:
            unknown.append(name)
            continue
        adapter = adapters.setdefault((match["base"], match["part"]), _Adapter(match["base"], match["part"]))
        side = match["side"] or "magnitude"
        adapter.tensors[side], adapter.names[side] = tensor, name
    translator = _Translator(rules, sizes, shapes)
    for adapter in adapters.values():
        translator.add(adapter)
    result = translator.result
    found = {name: value for name, value in result.tensors.items() if isinstance(value, Tensor)}
    return Adapters(found, unknown, list(translator.notes()), [*translator.problems(), *result.problems])


@dataclass(slots=True)
class _Translator:
    """One adapter after the other; what is wrong is said of all of them at once.

    experts:    last components of the modules that each expert has.
    overlooked: modules of these names that are no expert's. PEFT looks for parameters of packed experts by them
                (huggingface/peft, `_convert_peft_config_moe` in `src/peft/utils/transformers_weight_conversion.py`).
    """

    rules: Sequence[Rule]
    sizes: Sizes
    shapes: Mapping[str, Shape]
    result: Rewritten = field(default_factory=Rewritten)
    halves: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    inexpressible: list[str] = field(default_factory=list)
    partial_norms: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    overlooked: list[str] = field(default_factory=list)
    experts: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        rules = [rule for rule in self.rules if _is_of_experts(rule)]
        self.experts = frozenset([_leaf(part.removesuffix(".weight")) for rule in rules for part in rule.parts])

    def add(self, adapter: _Adapter) -> None:
        found = find_rule(f"{adapter.base}.weight", self.rules)
        assert found is not None
        if not {"in", "out"} <= adapter.tensors.keys():
            self.halves.append(f"{adapter} has only {', '.join(adapter.names.values())}")
            return
        if "magnitude" in adapter.tensors and _is_cut_by_columns(adapter.tensors["in"]):
            self.partial_norms.append(str(adapter))
            return
        try:
            for module, parts in self._take_apart(adapter, *found):
                self._check_fit(module, parts)
                if _leaf(module) in self.experts and not _is_of_experts(found[0]):
                    self.overlooked.append(module)
                for side, part in parts.items():
                    self.result.add(f"{module}.{_PEFT_NAMES[side]}.default.weight", part, (adapter.names[side],))
        except _InexpressibleError as reason:
            self.inexpressible.append(f"{adapter}: {reason}")
        except ModelError as misfit:
            self.misfits.append(f"{adapter}: {misfit.message}")
        except ValueError as misfit:
            self.misfits.append(f"{adapter}: {misfit}")

    def _take_apart(
        self, adapter: _Adapter, rule: Rule, bindings: Mapping[str, str]
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(module in the file, side → tensor) of each part.

        Raises ValueError or ModelError for shapes that do not fit the rule, _InexpressibleError where the rule leads to
        something that no adapter can adapt.
        """
        _check_expressible(adapter, rule)
        whole = self._with_experts(adapter, rule)
        experts = [step for step in rule.steps if isinstance(step, Unstack)]
        inner = _run(experts, whole.pop("in"), len(rule.parts), self.sizes)
        steps = [_Pick(_PARTS[adapter.part][0]) if adapter.part and step.fan == "part" else step for step in rule.steps]
        rows = {side: _run(steps, tensor, len(rule.parts), self.sizes) for side, tensor in whole.items()}
        expert_places = [place for place, fan in enumerate(rule.fans) if fan != "part"]
        for key in rows["out"]:
            module = rule.part_name(key, bindings).removesuffix(".weight")
            own = inner[tuple([key[place] for place in expert_places])]
            yield module, {"in": own, **{side: parts[key] for side, parts in rows.items()}}

    def _with_experts(self, adapter: _Adapter, rule: Rule) -> dict[str, Tensor]:
        """Side → tensor, each with an axis of experts where the rule takes one apart; what they share is repeated."""
        stacked = _is_of_experts(rule)
        shapes = {side: tensor.shape for side, tensor in adapter.tensors.items()}
        counts = {shape[0] for side, shape in shapes.items() if stacked and len(shape) == _AXES[side] + 1}
        if len(counts) > 1 or any(len(shape) - _AXES[side] not in (0, stacked) for side, shape in shapes.items()):
            raise ValueError(f"linear_in has shape {list(shapes['in'])}, linear_out {list(shapes['out'])}")
        if not stacked:
            return dict(adapter.tensors)
        known = next((count for key in EXPERTS if (count := self.sizes.known(key))), None)
        count = counts.pop() if counts else known
        if count is None:
            raise ValueError("all experts share it, and config.json does not say how many there are")
        if known not in (None, count):
            raise ValueError(f"is for {count} experts, where config.json says {known}")
        repeated = {}
        for side, tensor in adapter.tensors.items():
            if tensor.ndim == _AXES[side]:
                self.shared.append(adapter.names[side])
                tensor = tensor.reshape((1, *tensor.shape)).broadcast(0, count)
            repeated[side] = tensor
        if misfit := rule.misfit(repeated["out"], self.sizes):
            raise ValueError(misfit)
        return repeated

    def _check_fit(self, module: str, parts: Mapping[str, Tensor]) -> None:
        """Raises ValueError where the matrix in the file has other sizes."""
        shape = self.shapes.get(f"{module}.weight")
        found = (parts["out"].shape[0], parts["in"].shape[1])
        if shape is not None and shape != found:
            raise ValueError(f"is for {list(found)}, but {module}.weight is {list(shape)}")
        if "magnitude" in parts and parts["magnitude"].shape != found[:1]:
            raise ValueError(f"has magnitudes {list(parts['magnitude'].shape)} for {found[0]} rows of {module}")

    def notes(self) -> Iterator[Note]:
        if self.shared:
            yield Note("experts share these tensors of adapters: each expert got a copy", tuple(self.shared))
        if self.overlooked:
            text = (
                "PEFT 0.21 under transformers 5 does not load the adapters of dense layers and shared experts, which "
                "it takes for those of experts; --fuse-lora adds them all"
            )
            yield Note(text, tuple(self.overlooked), level="warning")

    def problems(self) -> Iterator[UnshardError]:
        if self.halves:
            yield IncompleteError(
                f"an adapter needs its linear_in and its linear_out:\n{items_in_lines(self.halves)}",
                hint="bring all files of the checkpoint together",
            )
        if self.misfits:
            yield ModelError(
                f"adapters do not fit the matrices that they adapt:\n{items_in_lines(self.misfits)}",
                hint="does this config.json belong to these weights? see --config",
            )
        if self.inexpressible:
            lines = items_in_lines(self.inexpressible)
            yield ModelError(f"no adapter of the Hugging Face model can do what these do:\n{lines}", hint=_MERGE_THERE)
        if self.partial_norms:
            yield ModelError(
                "DoRA was trained with tensor parallelism on matrices that are cut by columns, of which each rank "
                "normalised its own: that is no DoRA of the whole matrix\n" + items_in_lines(self.partial_norms),
                hint="train it without tensor parallelism; Megatron-Bridge alone computes as it did",
            )


@dataclass(frozen=True, slots=True)
class _Pick:
    """In place of a step that makes parts: what is there is the part of this number already."""

    part: int

    def forward(self, pieces: Parts, _parts: int, _sizes: Sizes) -> Parts:
        return {(*key, self.part): piece for key, piece in pieces.items()}


def _run(steps: Sequence[Step | _Pick], tensor: Tensor, parts: int, sizes: Sizes) -> dict[tuple[int, ...], Tensor]:
    pieces: Parts = {(): tensor}
    for step in steps:
        pieces = step.forward(pieces, parts, sizes)
    return {key: piece for key, piece in pieces.items() if isinstance(piece, Tensor)}


def _is_of_experts(rule: Rule) -> bool:
    return any(isinstance(step, Unstack) for step in rule.steps)


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def _is_cut_by_columns(inner: Tensor) -> bool:
    """Whether several tensor-parallel ranks each hold some of A's columns, as they do where the base is cut so."""
    return len({chunk.box.offsets[-1] for chunk in inner.chunks}) > 1


def _check_expressible(adapter: _Adapter, rule: Rule) -> None:
    """Raises _InexpressibleError where the file's matrices are not made of whole rows of the base."""
    if not all(part.endswith(".weight") for part in rule.parts):
        raise _InexpressibleError("the file has all experts in one tensor")
    if not all(_moves_rows(step) for step in rule.steps):
        raise _InexpressibleError("the file has the matrix with its columns rearranged")
    if adapter.part is not None and _PARTS[adapter.part][1] != len(rule.parts):
        raise _InexpressibleError("the file has one matrix for what it adapts and for what it does not")


def _moves_rows(step: Step) -> bool:
    """Whether a step on a matrix only picks and moves whole rows."""
    if isinstance(step, OnPart):
        return _moves_rows(step.step)
    if isinstance(step, (Divide, Permute, SwapHalves)):
        return step.axis == 0
    return isinstance(step, (Unstack, Sections, Group, Ungroup, FirstRows))
