"""What of a plan must be decoded before it can be read, and how much scratch space that takes."""

from __future__ import annotations

from pathlib import Path

from unshard.files import Scratch, encoded_files, room_for
from unshard.plan.moves import Plan, pieces_of
from unshard.settings import Settings


def scratch_beside(output: Path, plan: Plan, settings: Settings) -> Scratch:
    """The scratch space of a plan: first for its claims, then for its moves."""
    moves = (encoded_files(pieces_of(move)) for file in plan.files for move in file.moves)
    claims = (encoded_files([*claim.left.chunks, *claim.right.chunks]) for claim in plan.claims)
    room = max(room_for(moves, settings.jobs), room_for(claims, settings.jobs))
    return Scratch(existing_place(output), room)


def existing_place(output: Path) -> Path:
    """The directory itself, or the nearest above it that is there."""
    return next((place for place in (output, *output.parents) if place.exists()), output)
