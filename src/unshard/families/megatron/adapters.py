"""Low-rank adapters of Megatron-Bridge under PEFT's names, taken apart as the matrices that they adapt.

`<linear>.adapter.linear_in.weight` is A [r, in], `<linear>.adapter.linear_out.weight` is B [out, r], with the rows of
the base matrix (NVIDIA-NeMo/Megatron-Bridge, `src/megatron/bridge/peft/utils.py`). Where the base is several matrices
in the file, each gets its rows of B, and all of them A.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unshard.errors import ModelError
from unshard.families.rules import Rewritten, Rule, find_rule
from unshard.families.sizes import Sizes
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
        parts = rule.split(pair.matrices["out"], sizes)
    except ValueError as misfit:
        result.problems.append(ModelError(f"{pair.names['out']} does not fit the matrix that it adapts: {misfit}"))
        return
    for key, rows in parts.items():
        module = rule.part_name(key, bindings).removesuffix(".weight")
        result.add(f"{module}.lora_A.default.weight", pair.matrices["in"], (pair.names["in"],))
        result.add(f"{module}.lora_B.default.weight", rows, (pair.names["out"],))
