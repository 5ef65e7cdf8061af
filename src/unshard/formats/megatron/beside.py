"""What lies around Megatron's weights, in every layout that keeps them: config, tokenizer, facts, adapter.

| layout          | weights                | config and tokenizer                          | facts                   |
|-----------------|------------------------|-----------------------------------------------|-------------------------|
| Megatron-LM     | `RUN/iter_*`           | none, or where a person put them              | inside the weights      |
| Megatron-Bridge | `RUN/iter_*`           | `iter_*/hf`; the tokenizer in `iter_*/tokenizer` | `run_config.yaml`    |
| NeMo 2          | `CKPT/weights`         | the tokenizer below `CKPT/context`            | `context/`              |
| verl 1          | `ROLE/dist_ckpt`       | `ROLE/huggingface`                            | `transformer_config.json` |
| verl 2          | `ROLE/model/dist_ckpt` | `ROLE/model/huggingface`                      | `transformer_config.json` |
| verl, oldest    | `ROLE/model/mp_rank_*` | `ROLE/huggingface`, `ROLE/model/huggingface`  | none                    |

Sources: NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/training/checkpointing.py, NVIDIA-NeMo/NeMo
nemo/lightning/ckpt_utils.py, verl-project/verl verl/utils/megatron_utils.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unshard.checkpoint import Checkpoint, Note
from unshard.errors import UnshardError
from unshard.formats.megatron.facts import NEMO_CONTEXT, RUN_CONFIG, facts_beside
from unshard.formats.surroundings import Surroundings, add_tokenizer, look_around

_EXPORTS = ("hf", "hf_weights", "hf_adapter")
"""Subdirectories in which Megatron-Bridge and NeMo export for transformers: config and tokenizer lie there too."""
_VERL_MODEL = "model"
_MAX_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Beside:
    """The surroundings of Megatron's weights.

    facts: see `formats.megatron.facts`; those that the weights' own files record go before them.
    notes: what could not be read, and why.
    """

    surroundings: Surroundings
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    def around(self, checkpoint: Checkpoint) -> Checkpoint:
        """The catalog of the weights with what lies around them; what it has of its own stays, facts included."""
        found = self.surroundings
        return replace(
            checkpoint,
            roots={**checkpoint.roots, **(found.roots or {})},
            config=found.config,
            assets=found.assets,
            adapter=checkpoint.adapter or found.adapter,
            facts={**self.facts, **checkpoint.facts},
            notes=(*checkpoint.notes, *self.notes),
            problems=(*checkpoint.problems, *found.problems),
        )


def look_beside(directory: Path) -> Beside:
    """What lies in, beside and above the directory of the weights: an iteration, `dist_ckpt`, `weights`, `model`."""
    directory = directory.absolute()
    problems: list[UnshardError] = []
    notes: list[Note] = []
    facts = facts_beside(directory, problems, notes)
    found = add_tokenizer(look_around(_places(directory)), _tokenizer_places(directory))
    adapter = found.adapter or _lora(facts, directory)
    return Beside(replace(found, adapter=adapter, problems=(*found.problems, *problems)), facts, tuple(notes))


def _places(directory: Path) -> list[Path]:
    """Where a config may lie, the nearest first: never further up than the layout goes."""
    levels = [directory, directory.parent]
    if directory.parent.name == _VERL_MODEL:
        levels.append(directory.parent.parent)
    exports = [level / name for level in levels for name in _EXPORTS]
    adapters = [level / "huggingface" / "adapter" for level in levels]
    return [place for place in (directory, *exports, *adapters, *levels[1:]) if place.is_dir()]


def _tokenizer_places(directory: Path) -> list[Path]:
    """Where a tokenizer may lie that has no config beside it: NeMo keeps it in `context` or in a directory of that."""
    context = directory.parent / NEMO_CONTEXT
    try:
        below = sorted([Path(entry.path) for entry in os.scandir(context) if entry.is_dir()])[:_MAX_CONTEXT]
    except OSError:
        below = []
    return [directory / "tokenizer", *_places(directory), context, *below]


def _lora(facts: Mapping[str, Any], directory: Path) -> dict[str, Any] | None:
    """Rank and alpha of the adapters that the run's settings tell of, in the words of `lora_train_meta.json`.

    `source` names the place of the settings, for messages.
    """
    if "lora_dim" not in facts:
        return None
    source = RUN_CONFIG if (directory / RUN_CONFIG).is_file() else NEMO_CONTEXT
    return {"r": facts["lora_dim"], "lora_alpha": facts.get("lora_alpha"), "task_type": "CAUSAL_LM", "source": source}
