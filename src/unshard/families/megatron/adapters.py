"""Low-rank adapters of Megatron-Bridge under PEFT's names, taken apart as the matrices that they adapt.

`<linear>.adapter.linear_in.weight` is A [r, in], `<linear>.adapter.linear_out.weight` is B [out, r], with the rows of
the base matrix (NVIDIA-NeMo/Megatron-Bridge, `src/megatron/bridge/peft/utils.py`). Where the base is several matrices
in the file, each gets its rows of B, and all of them A. Those of experts are stacked like the experts themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unshard.errors import ModelError
from unshard.families.rules import Rewritten, Rule, find_rule
from unshard.families.sizes import Sizes
from unshard.families.steps import Parts, Unstack
from unshard.tensors import Value

_NAME = re.compile(r"(?P<base>.+)\.adapter\.linear_(?P<side>in|out)\.weight")


@dataclass(slots=True)
class _Pair:
    """The two matrices of one adapter, with their stored names."""

    names: dict[str, str] = field(default_factory=dict)
    matrices: dict[str, Value] = field(default_factory=dict)


def translate_adapters(tensors: Mapping[str, Value], rules: Sequence[Rule], sizes: Sizes) -> Rewritten:
    """Adapters' tensors under the names that a PEFT model has: `….lora_A.default.weight` and `….lora_B.default.weight`.

    What is no adapter, or adapts a matrix that no rule knows, is in `Rewritten.unknown`.
    """
    result = Rewritten()
    pairs: dict[str, _Pair] = {}
    for name, value in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or find_rule(f"{match['base']}.weight", rules) is None:
            result.unknown.append(name)
            continue
        pair = pairs.setdefault(match["base"], _Pair())
        pair.names[match["side"]] = name
        pair.matrices[match["side"]] = value
    for base, pair in pairs.items():
        _add_pair(base, pair, rules, sizes, result)
    return result


def _add_pair(base: str, pair: _Pair, rules: Sequence[Rule], sizes: Sizes, result: Rewritten) -> None:
    found = find_rule(f"{base}.weight", rules)
    assert found is not None
    rule, bindings = found
    if len(pair.matrices) != 2:
        (there,) = pair.names.values()
        result.problems.append(ModelError(f"{there} is half an adapter: linear_in and linear_out belong together"))
        return
    try:
        for module, inner, rows in _take_apart(pair, rule, bindings, sizes):
            result.add(f"{module}.lora_A.default.weight", inner, (pair.names["in"],))
            result.add(f"{module}.lora_B.default.weight", rows, (pair.names["out"],))
    except (ValueError, ModelError) as misfit:
        result.problems.append(ModelError(f"the adapter of {base} does not fit the matrix that it adapts: {misfit}"))


def _take_apart(
    pair: _Pair, rule: Rule, bindings: Mapping[str, str], sizes: Sizes
) -> Iterator[tuple[str, Value, Value]]:
    """(module in the file, A, B) of each part. Raises ValueError or ModelError where they do not fit the rule."""
    stacked = [place for place, fan in enumerate(rule.fans) if fan != "part"]
    inner, rows = pair.matrices["in"], pair.matrices["out"]
    if {inner.ndim, rows.ndim} != {2 + len(stacked)} or inner.shape[: len(stacked)] != rows.shape[: len(stacked)]:
        raise ValueError(f"linear_in has shape {list(inner.shape)}, linear_out {list(rows.shape)}")
    inners = _unstack(rule, inner, sizes)
    for key, part in rule.split(rows, sizes).items():
        module = rule.part_name(key, bindings).removesuffix(".weight")
        yield module, inners[tuple([key[place] for place in stacked])], part


def _unstack(rule: Rule, matrix: Value, sizes: Sizes) -> Parts:
    """A of each expert, for a rule that takes stacked experts apart; A itself under the key () for all others."""
    return replace(rule, steps=tuple([step for step in rule.steps if isinstance(step, Unstack)])).split(matrix, sizes)
