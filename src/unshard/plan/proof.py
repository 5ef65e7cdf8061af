"""The proof that a plan is sound, for plans that were just compiled and for those that were loaded from elsewhere.

What passes writes every byte of every output file exactly once, inside the output directory, and reads only below the
plan's roots.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from unshard.plan.coverage import prove_coverage
from unshard.plan.moves import Compute, Literal, Move, Plan, PlannedFile, Tile
from unshard.target import Seal
from unshard.tensors import SourceFile, Tensor

_SEAL_SIZE = 4


def file_faults(file: PlannedFile) -> list[str]:
    """Why the moves of one file do not write each of its bytes exactly once, in order; nothing if they do."""
    faults: list[str] = []
    position = 0
    for move in file.moves:
        size = move.size
        if size <= 0:
            faults.append(f"{file.path}: the move to byte {move.destination} is empty")
        if move.destination > position:
            faults.append(f"{file.path}: nothing writes bytes {position} to {move.destination}")
        elif move.destination < position:
            faults.append(f"{file.path}: bytes {move.destination} to {position} are written twice or out of order")
        position = max(position, move.destination + size)
    if position < file.size:
        faults.append(f"{file.path}: nothing writes bytes {position} to {file.size}")
    elif position > file.size:
        faults.append(f"{file.path}: bytes {file.size} to {position} lie past the end")
    return faults + [f"{file.path}: {fault}" for fault in _seal_faults(file)]


def plan_faults(plan: Plan) -> list[str]:
    """Why a plan from elsewhere cannot be trusted; nothing if it can be run."""
    faults = []
    paths = set()
    for file in plan.files:
        if not is_inside(file.path):
            faults.append(f"{file.path!r} is no path below the output directory")
        if file.path in paths:
            faults.append(f"{file.path} is written twice")
        paths.add(file.path)
        faults += file_faults(file)
        for move in file.moves:
            faults += [f"{file.path}, byte {move.destination}: {fault}" for fault in _move_faults(move, plan)]
    for claim in plan.claims:
        if claim.left.shape != claim.right.shape:
            faults.append(f"a claim compares {claim.left.shape} with {claim.right.shape}: {claim.message}")
        for tensor in (claim.left, claim.right):
            if tuple([prod(group) for group in tensor.factors]) != tensor.shape:
                faults.append(f"{tensor.name}: {tensor.factors} are no factors of {tensor.shape}")
            else:
                faults += _piece_faults(tensor, plan)
    return faults


def is_inside(path: str) -> bool:
    """Whether a path with forward slashes stays below the directory that it is joined to."""
    return not any(part in ("", ".", "..") for part in path.split("/")) and "\\" not in path and "\0" not in path


def _seal_faults(file: PlannedFile) -> Iterator[str]:
    for seal in file.seals:
        if not 0 <= seal.start <= seal.stop <= seal.at <= file.size - _SEAL_SIZE:
            yield f"the checksum at byte {seal.at} does not follow the bytes {seal.start} to {seal.stop}"
        elif not any(isinstance(move, Literal) and _holds(move, seal) for move in file.moves):
            yield f"the checksum at byte {seal.at} would overwrite tensor data"


def _holds(move: Move, seal: Seal) -> bool:
    return move.destination <= seal.at and seal.at + _SEAL_SIZE <= move.destination + move.size


def _move_faults(move: Move, plan: Plan) -> Iterator[str]:
    if isinstance(move, Literal):
        return
    if isinstance(move, Tile):
        yield from _gather_faults(Tensor(move.name, move.dtype, move.shape, move.pieces), plan)
    elif isinstance(move, Compute):
        yield from _compute_faults(move, plan)
    else:
        if move.offset < 0:
            yield f"the copy begins at byte {move.offset}"
        if move.file.encoded is not None:
            yield f"{move.file} must be decoded, which a copy does not do"
        yield from _source_faults(move.file, plan)


def _compute_faults(move: Compute, plan: Plan) -> Iterator[str]:
    for number, operand in enumerate(move.operands):
        if prod(operand.grid) != prod(operand.shape):
            yield f"{move.name}: operand {number} of shape {operand.shape} has a grid of {operand.grid}"
        axis = operand.banded
        if axis is not None and not (
            move.shape and 0 <= axis < len(operand.shape) and operand.shape[axis] == move.shape[0]
        ):
            yield f"{move.name}: operand {number} cannot be cut in bands along axis {axis}"
        yield from _gather_faults(Tensor(move.name, operand.dtype, operand.grid, operand.pieces), plan)


def _gather_faults(tensor: Tensor, plan: Plan) -> Iterator[str]:
    """Why pieces do not tile their grid, each exactly once."""
    if len({chunk.box for chunk in tensor.chunks}) < len(tensor.chunks):
        yield f"{tensor.name}: a piece stands twice"
    yield from _piece_faults(tensor, plan)


def _piece_faults(tensor: Tensor, plan: Plan) -> Iterator[str]:
    """Why the pieces of a tensor cannot be read, or are not the whole of it."""
    well_formed = True
    for chunk in tensor.chunks:
        extent = chunk.extent
        if not len(extent.strides) == len(chunk.box.sizes) == len(tensor.grid):
            yield f"{tensor.name}: a piece of {len(chunk.box.sizes)} axes has {len(extent.strides)} strides"
            well_formed = False
        if extent.offset < 0 or min(extent.strides, default=0) < 0:
            yield f"{tensor.name}: a piece of {extent.file} has a negative offset or stride"
        if extent.dtype != tensor.dtype and not (extent.dtype.is_float and tensor.dtype.is_float):
            yield f"{tensor.name}: {extent.dtype} cannot be cast to {tensor.dtype}"
        yield from _source_faults(extent.file, plan)
    if well_formed:
        yield from [problem.message for problem in prove_coverage(tensor)]


def _source_faults(file: SourceFile, plan: Plan) -> Iterator[str]:
    if file.root not in plan.roots:
        yield f"{file.path} lies under {file.root!r}, which is no root of the plan"
    if not is_inside(file.path):
        yield f"{file.path!r} is no path below the root {file.root!r}"
