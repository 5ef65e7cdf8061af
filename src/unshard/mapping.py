"""The file of `--map`: rules of one's own, for tensors that no family knows.

    family = "qwen3"            # whose rules are asked after these; by default, those of config.json's model type

    [[rule]]
    from = "decoder.layers.{layer}.self_attention.linear_gate.weight"
    to = "model.layers.{layer}.self_attn.gate_proj.weight"
    steps = [{ do = "permute", shape = ["2", "?"], order = [1, 0] }]

    [axes]                      # how the shards of such tensors lie on tensor-parallel ranks
    "decoder.layers.{layer}.self_attention.linear_gate.weight" = 0

A step is named after its class in `families.steps`, and takes the fields of that class.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from unshard.checkpoint import Dialect
from unshard.errors import FormatError, UnshardError, UsageError, command_line, raise_all
from unshard.families import FAMILIES
from unshard.families.rules import Rule, pattern_of
from unshard.families.steps import STEPS, Step
from unshard.formats.huggingface.assets import read_small_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPLICATED = "replicated"
_MEND = "the guide has an example of every kind of rule: docs/guides/map.md"


@dataclass(frozen=True, slots=True)
class UserMap:
    """What a file of `--map` says.

    rules: the user's own, and behind them those of the family that the file names.
    axes:  regular expression for the whole of a name → the axis of its shards, None for replicas.
    """

    rules: tuple[Rule, ...] = ()
    axes: Mapping[str, int | None] = field(default_factory=dict)


def read_map(path: Path, dialect: Dialect = "megatron") -> UserMap:
    """The rules in a TOML file. Raises UsageError where there is no such file, and all that is wrong in it, at once.

    dialect: whose names the family's rules start from.
    """
    if not path.is_file():
        raise UsageError(f"`--map {path}`: no such file", hint=command_line("ls", path.parent))
    try:
        content = tomllib.loads(read_small_file(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: malformed TOML: {error}", hint=_MEND) from None
    reader = _Reader(path, dialect)
    found = reader.read(content)
    raise_all(reader.problems)
    return found


class _FaultError(Exception):
    """What is wrong with one entry."""


@dataclass(slots=True)
class _Reader:
    """One reading of a file; what is wrong with it is gathered on the way."""

    path: Path
    dialect: Dialect
    problems: list[UnshardError] = field(default_factory=list)

    def read(self, content: Mapping[str, Any]) -> UserMap:
        self._attempt("the file", _refuse_others, content, {"family", "rule", "axes"})
        tables = content.get("rule", [])
        rules = [
            rule
            for number, table in enumerate(tables if isinstance(tables, list) else [tables], 1)
            if (rule := self._attempt(f"rule {number}", _read_rule, table)) is not None
        ]
        axes = self._attempt("[axes]", _read_axes, content.get("axes", {})) or {}
        family = self._attempt("`family`", _read_family, content.get("family"), self.dialect) or ()
        return UserMap((*rules, *family), axes)

    def _attempt(self, where: str, read: Callable[..., Any], *arguments: object) -> Any:
        try:
            return read(*arguments)
        except _FaultError as fault:
            self.problems.append(FormatError(f"{self.path}: {where}: {fault}", hint=_MEND))
            return None


def _refuse_others(table: Mapping[str, Any], known: set[str]) -> None:
    """A misspelt key must not go unheard."""
    others = sorted(table.keys() - known)
    if others:
        raise _FaultError(f"{', '.join(others)} means nothing; known are {', '.join(sorted(known))}")


def _read_rule(table: object) -> Rule:
    if not isinstance(table, Mapping):
        raise _FaultError("should be a table under [[rule]]")
    _refuse_others(table, {"from", "to", "steps"})
    whole, parts, steps = table.get("from"), table.get("to"), table.get("steps", [])
    parts = [parts] if isinstance(parts, str) else parts
    if not isinstance(whole, str) or not _is_list_of(parts, str) or not parts or not _is_list_of(steps, dict):
        raise _FaultError("`from` is a name, `to` a name or several, `steps` a list of tables")
    rule = Rule(whole, tuple(parts), tuple([_read_step(step) for step in steps]), own=True)
    _check_wildcards(rule)
    return rule


def _check_wildcards(rule: Rule) -> None:
    """All wildcards of the parts must be bound by the whole or by a step, and each part must be reached."""
    if len(rule.parts) > 1 and "part" not in rule.fans:
        raise _FaultError("several names in `to` need a step that makes parts: divide or sections")
    try:
        bound = dict.fromkeys(pattern_of(rule.whole).groupindex, "0")
        for part in rule.parts:
            pattern_of(part)
            part.format(**bound, **{fan: "0" for fan in rule.fans if fan != "part"})
    except (KeyError, IndexError, ValueError, TypeError, re.error) as error:
        raise _FaultError(f"the wildcards of `from` and `to` do not match: {error}") from None


def _read_step(table: Mapping[str, Any]) -> Step:
    kind = STEPS.get(str(table.get("do")))
    if kind is None:
        raise _FaultError(f"a step says what to do: one of {', '.join(STEPS)}")
    known = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    _refuse_others(table, {"do", *known})
    missing = [name for name, entry in known.items() if entry.default is MISSING and name not in table]
    if missing:
        raise _FaultError(f"step {table['do']} needs {', '.join(missing)}")
    return kind(
        **{name: _read_field(name, str(known[name].type), value) for name, value in table.items() if name != "do"}
    )


def _read_field(name: str, kind: str, value: object) -> object:
    """A field of a step, by its annotation."""
    if kind == "Step" and isinstance(value, Mapping):
        return _read_step(value)
    if kind == "str" and isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    if kind in ("int", "bool") and type(value).__name__ == kind:
        return value
    if kind == "tuple[str, ...]" and isinstance(value, list):
        return tuple([str(item) for item in value])
    if kind == "tuple[int, ...]" and isinstance(value, list) and _is_list_of(value, int):
        return tuple(value)
    raise _FaultError(f"`{name}` should be {kind}, but is {value!r}")


def _read_axes(table: object) -> dict[str, int | None]:
    if not isinstance(table, Mapping):
        raise _FaultError("should be a table: name = axis")
    axes: dict[str, int | None] = {}
    for name, axis in table.items():
        if axis not in (0, 1, REPLICATED) or isinstance(axis, bool):
            raise _FaultError(f"the axis of {name} is 0, 1 or {REPLICATED!r}, not {axis!r}")
        axes[pattern_of(name).pattern] = None if axis == REPLICATED else axis
    return axes


def _read_family(name: object, dialect: Dialect) -> tuple[Rule, ...]:
    if name is None:
        return ()
    tables = {family.model_type: family.table(dialect) for family in FAMILIES.values()}
    known = sorted([model_type for model_type, table in tables.items() if table])
    if name not in known:
        raise _FaultError(f"{name!r} is none of {', '.join(known)}")
    return tables[str(name)]


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
