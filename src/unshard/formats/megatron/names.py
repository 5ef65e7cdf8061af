"""Names of entries in Megatron's state dicts: what wrappers put before them, and which of them hold no weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from unshard.words import count_in_words

_WRAPPERS = re.compile(r"(?:model\d*\.)?(?:module\.)*")
"""`model.` of a checkpoint's tree (`model0.` of virtual stages), `module.` of DDP, Float16Module and NeMo."""

_KINDS: tuple[tuple[str, str, str], ...] = (
    (r"(.*\.)?_extra_state\d*(/.*)?", "*._extra_state", "state of TransformerEngine's FP8 scaling, no weights"),
    (r"(.*\.)?(local|global)_tokens_per_expert", "*.local_tokens_per_expert", "counters of the router, no weights"),
    (r"(.*\.)?(rotary_pos_emb|rotary_emb|rope)\..*inv_freq", "*.inv_freq", "computed by the model, not trained"),
    (r"(chained_\d+\.)?optimizer(\..*)?", "optimizer", "state of the optimizer"),
    (r"(opt_param_scheduler|lr_scheduler)([./].*)?", "opt_param_scheduler", "state of the learning rate's schedule"),
    (r"(rng_state|random_rng_state|np_rng_state|torch_rng_state|cuda_rng_state|rng_tracker_states)([./].*)?",
     "rng_state", "states of random generators"),
    (r"rerun_state_machine(_state)?([./].*)?", "rerun_state_machine", "state of the rerun machine"),
)  # fmt: skip
_COMPILED = tuple([(re.compile(pattern), kind, reason) for pattern, kind, reason in _KINDS])


def strip_wrappers(name: str) -> str:
    """The name as megatron-core has it: `model.module.decoder.…` → `decoder.…`, `x.to_wrap.weight` → `x.weight`.

    `to_wrap` is where Megatron-Bridge's adapters keep the layer that they wrap.
    """
    match = _WRAPPERS.match(name)
    return name[match.end() if match else 0 :].replace(".to_wrap.", ".")


def kind_without_weights(name: str) -> tuple[str, str] | None:
    """(kind, reason) of an entry that belongs to no model's weights, None for all others."""
    return next(((kind, reason) for pattern, kind, reason in _COMPILED if pattern.fullmatch(name)), None)


@dataclass(slots=True)
class Skipped:
    """Counts what is left out by kind, so that thousands of entries are a few lines of the report."""

    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def take(self, name: str) -> bool:
        """Whether the entry is of a kind without weights; it is counted then."""
        kind = kind_without_weights(name)
        if kind is not None:
            self._counts[kind] += 1
        return kind is not None

    def add(self, name: str, reason: str) -> None:
        """Count an entry for a reason that its name does not tell."""
        self._counts[name, reason] += 1

    def lines(self) -> Mapping[str, str]:
        """Kind → reason and count, for `Checkpoint.skipped`."""
        return {
            kind: reason if count == 1 else f"{reason} ({count_in_words(count, 'entry', 'entries')})"
            for (kind, reason), count in self._counts.items()
        }
