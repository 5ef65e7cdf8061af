"""The layers that an adapter adapts, put together from the tensors of its file and found again in the base model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, TypeAlias

from unshard.adapters.names import PREFIX
from unshard.adapters.patterns import is_end, last_component
from unshard.errors import IncompleteError, ModelError, UnshardError
from unshard.tensors import Tensor
from unshard.words import items_in_lines

_MAX_WAYS = 1000
_WRAPPER = ".base_layer"
_LEAVES = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
}
"""How the names of a layer's tensors end in an adapter's file → the field of `Layer`."""

Layout: TypeAlias = Literal["out-in", "in-out"]


@dataclass(frozen=True, slots=True)
class Layer:
    """Low-rank matrices and the parameter they adapt.

    module:    the module's path in the base model ("model.layers.0.self_attn.q_proj").
    depth:     where several parameters of one module are adapted, PEFT nests wrappers: 0 is the outermost.
    a, b:      [r, in] and [out, r]; convolutions have more axes. Packs of E experts: a is [E·r, in], row-major in
               (E, r), b is [out, r·E] row-major in (r, E) (huggingface/peft, `ParamWrapper.get_delta_weight`).
    bias:      [out], of lora_B. magnitude: [out], DoRA's.
    parameter: the adapted parameter's name in the module; None where nothing tells.
    bare:      PEFT targets the parameter itself (`target_parameters`), not the module: packs of experts, routers.
    weight:    the adapted tensor of the base model; None where there is no base.
    experts:   how many experts the weight packs, 1 for all others.
    layout:    whether the weight lies as [out, in] or as [in, out].
    """

    module: str
    depth: int
    a: Tensor
    b: Tensor
    embedding: bool = False
    bias: Tensor | None = None
    magnitude: Tensor | None = None
    parameter: str | None = "weight"
    bare: bool = False
    weight: Tensor | None = None
    experts: int = 1
    layout: Layout = "out-in"

    @property
    def rank(self) -> int:
        """The rank of one expert's matrices."""
        return self.a.shape[0] // self.experts

    @property
    def path(self) -> str:
        """What PEFT matches its patterns against."""
        return self.weight_name if self.bare else self.module

    @property
    def weight_name(self) -> str:
        return f"{self.module}.{self.parameter}"


@dataclass(frozen=True, slots=True)
class Layers:
    """All layers of an adapter, what else its file holds (file name → tensor), and what is wrong."""

    layers: tuple[Layer, ...]
    others: Mapping[str, Tensor]
    problems: tuple[UnshardError, ...] = ()


@dataclass(slots=True)
class _Draft:
    names: list[str] = field(default_factory=list)
    embedding: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)


def find_layers(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor], config: Mapping[str, Any]) -> Layers:
    """The layers in the tensors of an adapter's file.

    base:   the base model's tensors under their own names; may be empty.
    config: `adapter_config.json` as far as it is known: `target_parameters` tells bare parameters from modules.
    """
    drafts: dict[str, _Draft] = defaultdict(_Draft)
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        leaf = next((leaf for leaf in _LEAVES if name.endswith(leaf)), None)
        if leaf is None:
            others[name] = tensor
            continue
        draft = drafts[name[: -len(leaf)]]
        draft.names.append(name)
        draft.embedding |= "lora_embedding" in leaf
        draft.tensors[_LEAVES[leaf]] = tensor
    layers, problems = _complete(drafts)
    targets = _strings(config.get("target_parameters"))
    found: list[Layer] = []
    for module, group in _by_module(layers).items():
        located, problem = _locate(module, group, base, targets)
        found += located
        problems += [problem] if problem else []
    return Layers(tuple(_with_layouts(found, config)), others, tuple(problems))


def _complete(drafts: Mapping[str, _Draft]) -> tuple[list[Layer], list[UnshardError]]:
    layers: list[Layer] = []
    halves, empty, odd = [], [], []
    for path, draft in drafts.items():
        module, depth = path.removeprefix(PREFIX), 0
        while module.endswith(_WRAPPER):
            module, depth = module.removesuffix(_WRAPPER), depth + 1
        a, b = draft.tensors.get("a"), draft.tensors.get("b")
        if a is None or b is None:
            halves.append(f"`{path}` has only {', '.join(name[len(path) + 1 :] for name in draft.names)}")
        elif a.size == 0 or b.size == 0:
            empty.append(f"`{path}`: {list(a.shape)} and {list(b.shape)}")
        elif a.ndim < 2 or b.ndim != a.ndim or b.shape[1] != a.shape[0]:
            odd.append(f"`{path}`: lora_A {list(a.shape)}, lora_B {list(b.shape)}")
        else:
            layers.append(
                Layer(module, depth, a, b, draft.embedding, draft.tensors.get("bias"), draft.tensors.get("magnitude"))
            )
    problems: list[UnshardError] = []
    if empty:
        problems.append(
            IncompleteError(
                "the adapter is empty: its tensors hold no elements, as ZeRO-3 leaves them behind when parameters"
                f" are not gathered before saving:\n{items_in_lines(empty)}",
                hint="merge the training checkpoint itself (its shards hold the values), not the adapter saved from it",
            )
        )
    if halves:
        problems.append(IncompleteError(f"a LoRA layer needs lora_A and lora_B:\n{items_in_lines(halves)}"))
    if odd:
        problems.append(
            ModelError(f"the ranks of lora_A [r, in] and lora_B [out, r] must agree:\n{items_in_lines(odd)}")
        )
    return layers, problems


def _by_module(layers: Sequence[Layer]) -> dict[str, list[Layer]]:
    """Module → its layers, the innermost wrapper first: PEFT wraps parameters in the order of their definition."""
    groups: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        groups[layer.module].append(layer)
    return {module: sorted(group, key=lambda layer: -layer.depth) for module, group in groups.items()}


def _locate(
    module: str, group: list[Layer], base: Mapping[str, Tensor], targets: Sequence[str]
) -> tuple[list[Layer], UnshardError | None]:
    """The layers of a module with the parameters they adapt."""
    plain = f"{module}.weight"
    if len(group) == 1 and group[0].depth == 0 and (plain in base or not _is_pack(module, base, targets)):
        bare = any(is_end(target, plain) for target in targets)
        return [replace(group[0], weight=base.get(plain), bare=bare)], None
    if not base:
        return _locate_blindly(module, group, targets)
    parameters = {
        name: tensor
        for name, tensor in base.items()
        if name.startswith(module + ".") and "." not in name[len(module) + 1 :] and tensor.ndim in (2, 3)
    }
    named = {name: tensor for name, tensor in parameters.items() if any(is_end(target, name) for target in targets)}
    ways = _ways(group, named or parameters)
    if len(ways) == 1:
        return [_adapting(layer, name, base[name]) for layer, name in zip(group, ways[0], strict=True)], None
    found = ", ".join(f"{last_component(name)} {list(tensor.shape)}" for name, tensor in parameters.items()) or "none"
    shapes = ", ".join(f"lora_A {list(layer.a.shape)}, lora_B {list(layer.b.shape)}" for layer in group)
    return [], ModelError(
        f"`{module}`: cannot tell which parameter the adapter adapts ({shapes}); the module's parameters: {found}",
        hint="put the run's adapter_config.json, whose target_parameters names them, beside the checkpoint",
    )


def _is_pack(module: str, base: Mapping[str, Tensor], targets: Sequence[str]) -> bool:
    """Whether the module's bare parameters are adapted, as far as can be told."""
    if any(is_end(target.rpartition(".")[0], module) for target in targets if "." in target):
        return True
    return any(name.startswith(module + ".") for name in base) if base else last_component(module) == "experts"


def _locate_blindly(module: str, group: list[Layer], targets: Sequence[str]) -> tuple[list[Layer], UnshardError | None]:
    if targets:
        return [replace(layer, parameter=None, bare=True) for layer in group], None
    return [], ModelError(
        f"`{module}`: the adapter adapts bare parameters, and without the base model's tensors nothing tells which",
        hint="put the run's adapter_config.json, whose target_parameters names them, beside the checkpoint",
    )


def _ways(group: Sequence[Layer], parameters: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """All assignments of parameters to layers, in order, that fit by shape; none where there are too many to try."""
    if math.comb(len(parameters), len(group)) > _MAX_WAYS:
        return []
    return [
        names
        for names in combinations(parameters, len(group))
        if all(_fits(layer, parameters[name].shape) for layer, name in zip(group, names, strict=True))
    ]


def _fits(layer: Layer, shape: tuple[int, ...]) -> bool:
    experts = shape[0] if len(shape) == 3 else 1
    features = (layer.b.shape[0], layer.a.shape[1])
    return experts > 0 and layer.a.shape[0] % experts == 0 and shape[-2:] in (features, features[::-1])


def _adapting(layer: Layer, name: str, weight: Tensor) -> Layer:
    experts = weight.shape[0] if weight.ndim == 3 else 1
    return replace(layer, parameter=last_component(name), bare=True, weight=weight, experts=experts)


def _with_layouts(layers: Sequence[Layer], config: Mapping[str, Any]) -> list[Layer]:
    """The layers with the layouts of their weights. A square weight does not tell: it lies like its fellows.

    Without fellows, modules go by `fan_in_fan_out`, and bare parameters lie as [E, out, in], PEFT's default.
    """
    shown: dict[bool, set[Layout]] = {True: set(), False: set()}
    for layer in layers:
        layout = _layout(layer)
        if layout and not layer.embedding:
            shown[layer.bare].add(layout)
    fallback: dict[bool, Layout] = {
        False: "in-out" if config.get("fan_in_fan_out") is True else "out-in",
        True: "out-in",
    }
    for bare, layouts in shown.items():
        if len(layouts) == 1:
            (fallback[bare],) = layouts
    return [
        replace(layer, layout="in-out" if layer.embedding else _layout(layer) or fallback[layer.bare])
        for layer in layers
    ]


def _layout(layer: Layer) -> Layout | None:
    """What the shapes tell; None where they tell nothing."""
    if layer.weight is None:
        return None
    shape = layer.weight.shape[-2:] if layer.bare else layer.weight.shape
    stored, flipped = (layer.b.shape[0], *layer.a.shape[1:]), (*layer.a.shape[1:], layer.b.shape[0])
    if stored == flipped:
        return None
    return "out-in" if shape == stored else "in-out" if shape == flipped else None


def _strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, (list, tuple)) else []
