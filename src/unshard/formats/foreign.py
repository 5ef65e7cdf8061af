"""Checkpoints of other kinds, told by their names, so that an error can say what lies there."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

_MAX_ENTRIES = 4096
_TORCH_FILES = "torch files of no layout that is known; one of them can be named by itself"

_BY_CONTENT: tuple[tuple[str, str], ...] = (
    (r"common\.pt", "the common.pt of a Megatron-Core distributed checkpoint without its tensors"),
    (r"ckpt_contents\.json", "states of a verl run without the model (second layout)"),
    (r"adapter_config\.json", "a PEFT adapter's config without its weights"),
    (r".*\.gguf", "GGUF files (llama.cpp)"),
    (r"flax_model.*\.msgpack", "a Flax model"),
    (r"tf_model.*\.h5", "a TensorFlow model"),
    (r".*\.(pt|pth|ckpt|bin)", _TORCH_FILES),
)
_BY_NAME: tuple[tuple[str, str], ...] = (
    (r".*\.distcp", "one file of a torch DCP directory"),
    (r".*\.gguf", "a GGUF file (llama.cpp)"),
    (r".*\.nemo", "a NeMo 1 archive: unpack it (`tar xf`), and name the directory model_weights in it"),
    (r".*\.(json|txt|md|log|py|yaml|yml)", "a text file"),
    (r".*\.(zip|tar|gz|tgz|zst|xz)", "an archive, which must be unpacked first"),
)


def name_foreign(path: Path) -> str | None:
    """What a directory or file is that no format reads, in a few words, or None."""
    if path.is_file():
        return next((what for pattern, what in _BY_NAME if re.fullmatch(pattern, path.name)), None)
    try:
        names = [entry.name for entry in islice(path.iterdir(), _MAX_ENTRIES)]
    except OSError:
        return None
    for pattern, what in _BY_CONTENT:
        expression = re.compile(pattern)
        if any(expression.fullmatch(name) for name in names):
            return what if what == _TORCH_FILES else f"{what}: not readable yet"
    return None
