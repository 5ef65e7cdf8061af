"""From a target to a plan: which bytes go where, proven before anything moves.

The moves of one file stand in the order of their destinations and cover it exactly once. How a tensor becomes moves is
told in `layout`.
"""

from __future__ import annotations

from collections.abc import Iterator

from unshard.errors import UnshardError, raise_all
from unshard.plan.coverage import primary_chunks, prove_coverage
from unshard.plan.layout import lay_out_tensor
from unshard.plan.moves import Compute, Copy, Literal, Move, Operand, Plan, PlannedFile
from unshard.plan.proof import file_faults
from unshard.plan.replicas import replica_claims
from unshard.target import Target, TargetFile
from unshard.tensors import Computed, Tensor, Value


def compile_plan(target: Target, *, check_replicas: bool = False) -> Plan:
    """The plan that writes a target; `check_replicas` adds a claim for each replica of what it reads.

    Raises IncompleteError with all holes, overlaps and conflicts of all tensors at once; ValueError if the target's own
    layout has holes or overlaps, which is a mistake of the code that laid it out.
    """
    problems: dict[str, UnshardError] = {}
    for tensor in (*target.sources, *_tensors_claimed(target)):
        for problem in prove_coverage(tensor):
            problems.setdefault(problem.message, problem)
    raise_all(list(problems.values()))
    claims = target.claims
    if check_replicas:
        claims += replica_claims(target.sources)
    return Plan(target.roots, tuple([_compile_file(file) for file in target.files]), claims)


def _tensors_claimed(target: Target) -> Iterator[Tensor]:
    for claim in target.claims:
        yield claim.left
        yield claim.right


def _compile_file(file: TargetFile) -> PlannedFile:
    sources: list[tuple[int, Value | bytes]] = [*file.literals, *file.tensors]
    moves: list[Move] = []
    for destination, source in sorted(sources, key=lambda item: item[0]):
        if isinstance(source, bytes):
            moves += [Literal(destination, source)] if source else []
        elif isinstance(source, Computed):
            moves += [_compute(source, destination)] if source.size else []
        else:
            _append(moves, lay_out_tensor(source, destination))
    planned = PlannedFile(file.path, file.size, tuple(moves), file.seals, file.last)
    faults = file_faults(planned)
    if faults:
        raise ValueError(f"the layout does not hold: {'; '.join(faults)}")
    return planned


def _compute(value: Computed, destination: int) -> Compute:
    operands = [
        Operand(tensor.dtype, tensor.shape, tensor.grid, primary_chunks(tensor), banded)
        for tensor, banded in zip(value.inputs, value.banded, strict=True)
    ]
    return Compute(destination, value.dtype, value.shape, value.function, value.parameters, tuple(operands), value.name)


def _append(moves: list[Move], more: list[Move]) -> None:
    """Add moves; a copy that goes on where the last one ended, in the output and in the source, becomes part of it."""
    if moves and more:
        last, first = moves[-1], more[0]
        if (
            isinstance(last, Copy)
            and isinstance(first, Copy)
            and last.file == first.file
            and last.offset + last.size == first.offset
            and last.destination + last.size == first.destination
        ):
            moves[-1] = Copy(last.destination, last.size + first.size, last.file, last.offset)
            more = more[1:]
    moves += more
