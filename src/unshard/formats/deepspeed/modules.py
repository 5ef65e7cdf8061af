"""The module of one model-parallel rank as its files of model states have it, and what of it goes into the account."""

from __future__ import annotations

from unshard.checkpoint import Note
from unshard.formats.deepspeed.account import Account
from unshard.formats.deepspeed.files import TagFiles
from unshard.formats.deepspeed.gathering import read_pieces
from unshard.formats.deepspeed.states import ModelStates
from unshard.formats.deepspeed.weights import ModuleWeights, read_weights

_FROZEN_LEFT_OUT = Note(
    "saved with `exclude_frozen_parameters`: parameters without training, if there were any, are not here"
)
"""Releases of 2026 record neither names nor shapes of them, stages below 2 not even that."""


def read_module(
    files: TagFiles, states: ModelStates, rank: int, stage: int, ranks: int | None, account: Account
) -> ModuleWeights:
    """The weights of model-parallel rank `rank`; what is found and what is wrong goes to `account`.

    states: those of its first data-parallel rank. stage: of ZeRO, as masters tell where there are any. ranks: how many
    data-parallel ranks hold masters, None where no masters tell.
    """
    in_pieces = stage == 3 and states.frozen
    pieces = read_pieces(files, states, rank, ranks, account.problems) if in_pieces else [states.pieces]
    weights = read_weights(states, pieces, rank, stage, account.problems)
    account.excluded |= weights.excluded
    if stage >= 2 and states.recorded.get("frozen_param_shapes", {}) is None:
        account.notes.append(_FROZEN_LEFT_OUT)
    account.kinds.update([one.dtype.name for name, one in weights.stored.items() if name not in states.buffers])
    account.kinds.update([placeholder.dtype.name for placeholder in weights.rounded.values()])
    return weights
