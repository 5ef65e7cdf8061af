"""What a reading of a DeepSpeed checkpoint found, and how it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from unshard.checkpoint import Note, Shape
from unshard.errors import IncompleteError, UnshardError
from unshard.formats.deepspeed.absent import FETCH, missing_in_words
from unshard.formats.deepspeed.weights import Widened
from unshard.options import Weights
from unshard.words import count_in_words

_IN_WORDS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_LOW = ("BF16", "F16")


@dataclass(slots=True)
class Account:
    """What was found so far, over all model-parallel ranks.

    problems:  errors that forbid a merge; notes: lines of the report.
    widened:   parameters that stand beside masters and have none.
    excluded:  parameters that were left out at saving.
    taken:     which weights were read; None where the checkpoint keeps them once.
    mastered:  how many parameters have masters.
    kinds:     types of the module's own weights; master_kinds: of the masters.
    stage:     of ZeRO.
    ranks:     data-parallel ranks over which masters are partitioned; None where there are no partitions.
    bare:      model-parallel ranks without a file of optimizer states, though their masters are partitioned.
    nameless:  whether masters lie there of which nothing tells the parameters.
    """

    problems: list[UnshardError] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    widened: Widened = field(default_factory=Widened)
    excluded: dict[str, Shape] = field(default_factory=dict)
    taken: Weights | None = None
    mastered: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    master_kinds: Counter[str] = field(default_factory=Counter)
    stage: int = 0
    ranks: int | None = None
    bare: list[int] = field(default_factory=list)
    nameless: bool = False

    def close(self, model_ranks: int, *, has_optimizer: bool) -> None:
        """Say what only all `model_ranks` together tell of missing optimizer states."""
        if self.bare and has_optimizer:
            names = [f"*zero_pp_rank_*_mp_rank_{rank:02d}_optim_states.pt" for rank in self.bare]
            text = f"optimizer states of {missing_in_words(names, f'{model_ranks:,} model-parallel ranks')}"
            self.problems.append(IncompleteError(text, hint=FETCH))
        elif self.bare:
            self.taken = "model"

    def title(self, step: int | None, *, has_layers: bool) -> str:
        """For people: "DeepSpeed ZeRO-3, 4 ranks, step 500"."""
        words = [f"DeepSpeed ZeRO-{self.stage}"]
        words += [count_in_words(self.ranks, "rank")] if self.ranks else []
        words += ["layers of a pipeline"] if has_layers else []
        words += [f"step {step:,}"] if step is not None else []
        return ", ".join(words)

    def lines(self) -> Iterator[Note]:
        """The notes, that on the weights that were taken first."""
        yield from self._line_on_weights()
        yield from self.widened.note()
        yield from dict.fromkeys(self.notes)

    def _line_on_weights(self) -> Iterator[Note]:
        low = " and ".join([_IN_WORDS[kind] for kind in _LOW if self.kinds[kind]])
        if self.nameless:
            text = "the optimizer's masters lie here, but no `param_shapes` that would tell whose they are"
            yield Note(f"{text}: the module's {low or 'own'} weights were taken", level="warning")
        elif self.taken == "master":
            other = f"; --weights model takes the {low} weights" if low else ""
            kinds = " and ".join([_IN_WORDS.get(kind, kind.lower()) for kind in self.master_kinds])
            text = f"{kinds} masters of {count_in_words(self.mastered, 'parameter')} from the optimizer's partitions"
            yield Note(text + other)
        elif self.bare:
            text = f"no optimizer states lie here: the module's {low or 'own'} weights were taken"
            yield Note(text, level="warning" if low else "note")
        elif self.taken == "model":
            how = ", rounded from the masters as DeepSpeed does" if self.stage == 3 else ""
            yield Note(f"the module's {low or 'own'} weights{how}, not the optimizer's fp32 masters")
