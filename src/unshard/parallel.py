"""The sizes of Megatron's parallelism under the short names that people type, and under those that training records."""

from __future__ import annotations

from collections.abc import Mapping

from unshard.errors import UsageError

ARGUMENTS: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Short name → Megatron-LM's argument. `vpp` counts the virtual stages of each pipeline rank."""

EXAMPLE = "tp=2,pp=2"
_MOST = 1 << 16


def read_sizes(text: str) -> dict[str, int]:
    """`tp=2,pp=2` → {"tp": 2, "pp": 2}. Raises UsageError for all words that mean nothing, at once."""
    sizes: dict[str, int] = {}
    wrong: list[str] = []
    for word in [word.strip() for word in text.split(",")]:
        kind, _, size = [part.strip() for part in word.partition("=")]
        if kind in ARGUMENTS and kind not in sizes and size.isdecimal() and len(size) < 6 and 0 < int(size) <= _MOST:
            sizes[kind] = int(size)
        else:
            wrong.append(f"`{word}`")
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)} in `{text}`: sizes are written like {EXAMPLE}, each of {', '.join(ARGUMENTS)} at most "
            "once"
        )
    return sizes


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise UsageError for sizes that no `read_sizes` can have given."""
    for kind, size in sizes.items():
        if kind not in ARGUMENTS or type(size) is not int or not 0 < size <= _MOST:
            raise UsageError(f"parallel has {kind!r}: {size!r}; known are {', '.join(ARGUMENTS)}, with whole numbers")
