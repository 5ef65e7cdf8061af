"""What ZeRO leaves behind beside its own checkpoints: models, and placeholders of models that were not gathered.

Under ZeRO-3 every parameter of the live module is a placeholder of shape [0]. `save_pretrained` writes these, or an
empty file: an `adapter_model.safetensors` of 40 bytes (huggingface/peft issue 2892, huggingface/trl issue 4416). The
values lie in DeepSpeed's own checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from unshard.checkpoint import Note
from unshard.errors import IncompleteError, UnshardError, merge_command
from unshard.formats.deepspeed.files import find_tags
from unshard.model_files import ADAPTER_WEIGHTS
from unshard.tensors import Tensor
from unshard.words import items_in_words, one_line, shorten

_PLACEHOLDER = (0,)
_MOST_NEIGHBOURS = 256


def tell_placeholders(tensors: Mapping[str, Tensor], path: Path, *, is_adapter: bool) -> Iterator[UnshardError]:
    """A problem where the weights at `path` are placeholders: the tensors found, or an adapter that has none."""
    empty = [name for name, tensor in tensors.items() if tensor.shape == _PLACEHOLDER and _is_parameter(name)]
    if not empty and (tensors or not is_adapter):
        return
    if empty:
        shown = items_in_words([one_line(shorten(name, 200)) for name in empty], 5)
        what = f"{len(empty):,} of {len(tensors):,} tensors hold nothing, in shape [0]: {shown}"
    else:
        what = f"{ADAPTER_WEIGHTS} holds no tensor"
    message = f"{path}: {what}. ZeRO-3 leaves such placeholders where parameters are saved without being gathered"
    checkpoint = _find_checkpoint(path if path.is_dir() else path.parent)
    words = ("--adapter-only",) if is_adapter else ()
    command = merge_command(checkpoint or "global_stepN", *words)
    yield IncompleteError(message, hint=f"the values lie in DeepSpeed's own checkpoint: {command}")


def tell_masters(path: Path) -> Iterator[Note]:
    """A warning where a model lies beside DeepSpeed's own checkpoints, but no `latest` names one of these.

    With `stage3_gather_16bit_weights_on_model_save`, Trainer writes the low-precision weights there as a model.
    """
    tags = find_tags(path) if path.is_dir() else []
    if tags:
        last = max(tags, key=_step)
        yield Note(
            f"the model beside DeepSpeed's own checkpoint {last.name} was taken, since no `latest` names that: for its "
            f"fp32 masters, {merge_command(last)}",
            level="warning",
        )


def _is_parameter(name: str) -> bool:
    return name.endswith((".weight", ".bias")) or "lora_" in name


def _find_checkpoint(directory: Path) -> Path | None:
    """The last of DeepSpeed's checkpoints in a directory, in one below it, or beside it."""
    try:
        below = [place for place in islice(directory.iterdir(), _MOST_NEIGHBOURS) if place.is_dir()]
        for place in (directory, *sorted(below, key=_step, reverse=True), directory.absolute().parent):
            tags = find_tags(place)
            if tags:
                return max(tags, key=_step)
    except OSError:
        return None
    return None


def _step(place: Path) -> tuple[int, str]:
    """checkpoint-1000 after checkpoint-200."""
    numbers = re.findall(r"[0-9]{1,18}", place.name)
    return int(numbers[-1]) if numbers else -1, place.name
