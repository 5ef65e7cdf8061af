"""YAML files of strangers, read by PyYAML's safe loader where it is installed.

Values that YAML shares by anchors stay shared: whoever walks over them needs a budget.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unshard.errors import FormatError
from unshard.formats.huggingface.assets import read_small_file

INSTALL = "pip install 'unshard[yaml]'"
_LIMIT = 1 << 20
"""Bytes. What training records is a hundredth of that; the loader takes a second per 100 kB."""
_MAX_DIGITS = 100
"""Of an integer. YAML has numbers to the base of 60, which take the square of their length in time."""


def can_read_yaml() -> bool:
    """Whether PyYAML is installed."""
    try:
        import yaml  # noqa: F401
    except ImportError:
        return False
    return True


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping in a file. Raises FormatError where it is malformed, or no mapping.

    Merge keys (`<<`) are refused: no framework writes them, and a kilobyte of them can grow to gigabytes.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Leave merge keys in their place, where they are refused."""

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            if len(node.value) > _MAX_DIGITS:
                raise ValueError(f"an integer of {len(node.value):,} digits")
            return int(super().construct_yaml_int(node))

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    try:
        content = yaml.load(read_small_file(path, _LIMIT), Loader)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where is not None else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise FormatError(f"{path}: malformed YAML{line}: {problem}", hint="mend the file, or move it away") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: expected a YAML mapping, found a {type(content).__name__}", hint="move it away")
    return content
