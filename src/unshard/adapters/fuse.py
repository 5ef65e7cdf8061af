"""An adapter fused into the base weights: every adapted tensor becomes the result of a registered function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unshard.adapters.config import scaling_of
from unshard.adapters.functions import DORA, LORA, LORA_BIAS
from unshard.adapters.layers import Layer, find_layers
from unshard.adapters.names import TOKENS, base_name
from unshard.adapters.patterns import is_end, last_component
from unshard.adapters.split import Split
from unshard.checkpoint import Note
from unshard.errors import IncompleteError, ModelError, UnshardError, UsageError
from unshard.model import Adapter
from unshard.tensors import Computed, Tensor, Value, concat
from unshard.words import items_in_lines

UNFUSABLE = {
    "alora_invocation_tokens": "aLoRA (acts on some tokens only)",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "velora_config": "VeLoRA",
    "kasa_config": "KaSA",
    "arrow_config": "Arrow (routes tokens to adapters)",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "layer replication",
}
"""Keys of adapter_config.json that turn on variants which base + scaling · B A does not describe."""


class Fused(NamedTuple):
    """The base model with the adapter in it, what the report must say, and what is wrong."""

    tensors: Mapping[str, Value]
    notes: tuple[Note, ...] = ()
    problems: tuple[UnshardError, ...] = ()


def fuse_all(split: Split) -> Fused:
    """The base model of a checkpoint with its only adapter fused. Leaves the split's own problems to the caller."""
    if split.problems:
        return Fused(split.base)
    if not split.adapters:
        problem = UsageError("the checkpoint holds no LoRA adapter to fuse", hint="leave `--fuse-lora` out")
        return Fused(split.base, problems=(problem,))
    if len(split.adapters) > 1:
        found = ", ".join(repr(adapter.name) for adapter in split.adapters)
        return Fused(
            split.base,
            problems=(
                UsageError(
                    f"the checkpoint holds {len(split.adapters)} adapters ({found}), and nothing says which to fuse",
                    hint="merge without `--fuse-lora` and fuse the one you want with PEFT's merge_and_unload",
                ),
            ),
        )
    return fuse(split.base, split.adapters[0], tied=split.tied)


def fuse(base: Mapping[str, Tensor], adapter: Adapter, *, tied: bool = False) -> Fused:
    """The base model with the adapter fused into it.

    Adapted weights are computed; modules that were trained whole and trained rows of embeddings replace what they stand
    for, bit for bit. tied: the model ties its output to its input embedding, so that trained rows go into both.
    """
    variants = [title for key, title in UNFUSABLE.items() if adapter.config.get(key)]
    if variants:
        problem = ModelError(
            f"this variant of LoRA cannot be fused: {', '.join(variants)}",
            hint="merge without `--fuse-lora`: the adapter is written beside the base model",
        )
        return Fused(base, problems=(problem,))
    if not base:
        problem_ = IncompleteError(
            "the checkpoint holds the adapter only: there are no base weights to fuse it into",
            hint="give the base model with `--fill-from DIR`, or leave `--fuse-lora` out: the adapter is written alone",
        )
        return Fused(base, problems=(problem_,))
    return _Fusion(base, adapter.config, tied).run(adapter)


@dataclass(slots=True)
class _Fusion:
    base: Mapping[str, Tensor]
    config: Mapping[str, Any]
    tied: bool
    tensors: dict[str, Value] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    problems: list[UnshardError] = field(default_factory=list)

    def run(self, adapter: Adapter) -> Fused:
        self.tensors = dict(self.base)
        found = find_layers(adapter.tensors, self.base, self.config)
        for name, tensor in found.others.items():
            if name.endswith(TOKENS):
                self._replace_rows(base_name(name.removesuffix(TOKENS)), tensor)
            else:
                self._replace(base_name(name), tensor)
        for layer in found.layers:
            self._fuse_layer(layer)
        self._report(found.problems)
        return Fused(self.tensors, self._notes(), tuple(self.problems))

    def _fuse_layer(self, layer: Layer) -> None:
        weight = layer.weight
        if weight is None:
            self.missing.append(layer.weight_name)
            return
        if not weight.dtype.is_float or weight.dtype.itemsize < 2:
            self.misshapen.append(f"`{layer.weight_name}` is {weight.dtype}: quantised weights cannot be fused into")
            return
        out, *into = (layer.b.shape[0], *layer.a.shape[1:])
        expected = (out, *into) if layer.layout == "out-in" else (*into, out)
        shape = weight.shape[-2:] if layer.bare else weight.shape
        if shape != expected or any(size != 1 for size in layer.b.shape[2:]):
            self.misshapen.append(f"`{layer.weight_name}` {list(weight.shape)}: the adapter is for {list(expected)}")
            return
        scaling = scaling_of(layer, self.config)
        if layer.magnitude is None:
            self.tensors[weight.name] = add_low_rank(layer, weight, scaling)
        elif layer.magnitude.size != out:
            self.misshapen.append(f"`{layer.module}`: {layer.magnitude.size} magnitudes for {out} outputs")
        else:
            self.tensors[weight.name] = add_and_normalize(layer, weight, layer.magnitude, scaling)
        if layer.bias is not None:
            self._fuse_bias(layer, layer.bias, scaling)

    def _fuse_bias(self, layer: Layer, added: Tensor, scaling: float) -> None:
        name = f"{layer.module}.bias"
        bias = self.base.get(name)
        if bias is None:
            self.missing.append(name)
        elif bias.shape != added.shape:
            self.misshapen.append(f"`{name}` {list(bias.shape)}: the adapter's bias is {list(added.shape)}")
        else:
            self.tensors[name] = Computed(
                name, bias.dtype, bias.shape, LORA_BIAS, {"scaling": scaling}, (bias, added), (0, 0)
            )

    def _replace(self, name: str, tensor: Tensor) -> None:
        """A module that was trained whole takes the place of the original, in its own dtype."""
        original = self.base.get(name)
        if original is None:
            self.missing.append(name)
        elif original.shape != tensor.shape:
            self.misshapen.append(f"`{name}` {list(original.shape)}: the adapter holds {list(tensor.shape)}")
        else:
            self.tensors[name] = tensor.rename(name)

    def _replace_rows(self, module: str, rows: Tensor) -> None:
        indices = _token_indices(self.config, module)
        heads = [name for name in self.base if last_component(name.removesuffix(".weight")) == "lm_head"]
        names = [f"{module}.weight", *(heads if self.tied else [])]
        for name in dict.fromkeys(names):
            original = self.base.get(name)
            if original is None:
                self.missing.append(name)
            elif rows.shape != (len(indices), *original.shape[1:]) or any(i >= original.shape[0] for i in indices):
                self.misshapen.append(
                    f"`{name}` {list(original.shape)}: {list(rows.shape)} trained rows, {len(indices)} row numbers"
                )
            else:
                self.tensors[name] = replace_rows(original, rows, indices)

    def _report(self, problems: tuple[UnshardError, ...]) -> None:
        self.problems += problems
        if self.missing:
            self.problems.append(
                IncompleteError(
                    f"the adapter adapts {len(self.missing)} tensors that the base model does not have:\n"
                    + items_in_lines([f"`{name}`" for name in sorted(self.missing)]),
                    hint="leave `--fuse-lora` out to write the adapter beside the base model",
                )
            )
        if self.misshapen:
            lines = items_in_lines(self.misshapen)
            self.problems.append(ModelError(f"the adapter does not fit the base model:\n{lines}"))

    def _notes(self) -> tuple[Note, ...]:
        computed = tuple([name for name, value in self.tensors.items() if isinstance(value, Computed)])
        double = any(isinstance(value, Computed) and value.dtype.itemsize == 8 for value in self.tensors.values())
        return (
            Note(
                f"The adapter is fused into the base weights: the values of {len(computed)} tensors were computed in"
                f" {'fp64' if double else 'fp32'} and rounded once, to the dtype in which they are written.",
                computed,
            ),
        )


def add_low_rank(layer: Layer, weight: Tensor, scaling: float) -> Computed:
    """The weight + scaling · B A, in the weight's layout."""
    left, right = _factors(layer, weight)
    if left.ndim == 3:
        return Computed(
            weight.name, weight.dtype, weight.shape, LORA, {"scaling": scaling}, (weight, left, right), (0, 0, 0),
            deeper=((1, 1, None), (2, None, 2)),
        )  # fmt: skip
    deeper = ((1, None, 1),) if weight.ndim == 2 else ()
    return Computed(
        weight.name, weight.dtype, weight.shape, LORA, {"scaling": scaling}, (weight, left, right), (0, 0, None), deeper
    )


def add_and_normalize(layer: Layer, weight: Tensor, magnitude: Tensor, scaling: float) -> Computed:
    """DoRA. The norms run over the input features: where the weight lies as [in, out] it is needed whole."""
    left, right = _factors(layer, weight)
    magnitude = magnitude.reshape((magnitude.size,))
    by_rows = layer.layout == "out-in"
    return Computed(
        weight.name,
        weight.dtype,
        weight.shape,
        DORA,
        {"scaling": scaling, "outputs": 0 if by_rows else 1},
        (weight, left, right, magnitude),
        (0, 0, None, 0) if by_rows else (None, None, None, None),
    )


def replace_rows(original: Tensor, rows: Tensor, indices: list[int]) -> Tensor:
    """The tensor with some rows replaced; the last one counts where an index comes twice."""
    if rows.dtype != original.dtype:
        rows = rows.cast(original.dtype)
    pieces, stop = [], 0
    for index, place in sorted({index: place for place, index in enumerate(indices)}.items()):
        pieces += [original.slice(0, stop, index), rows.slice(0, place, place + 1)]
        stop = index + 1
    pieces.append(original.slice(0, stop, original.shape[0]))
    return concat([piece for piece in pieces if piece.size], 0, name=original.name)


def _factors(layer: Layer, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right of the product that has the weight's layout; [E, …] for packs of experts."""
    rank, out = layer.rank, layer.b.shape[0]
    if layer.bare and weight.ndim == 3:
        a = layer.a.reshape((layer.experts, rank, layer.a.shape[1]))
        b = layer.b.reshape((out, rank, layer.experts)).transpose((2, 0, 1))
    else:
        a, b = layer.a.reshape((rank, layer.a.size // rank)), layer.b.reshape((out, rank))
    return (b, a) if layer.layout == "out-in" else (a.transpose(), b.transpose())


def _token_indices(config: Mapping[str, Any], module: str) -> list[int]:
    """The rows of a module's trained tokens: a list for the input embedding, or a mapping by modules' names."""
    stated = config.get("trainable_token_indices")
    if isinstance(stated, Mapping):
        stated = next((rows for end, rows in stated.items() if is_end(end, module)), None)
    return [row for row in stated if isinstance(row, int) and row >= 0] if isinstance(stated, list) else []
