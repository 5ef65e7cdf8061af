"""Replicas must be equal: claims that a run checks byte by byte before it writes anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unshard.plan.coverage import describe_box, describe_source, group_replicas, primary_chunks
from unshard.target import Claim
from unshard.tensors import Box, Chunk, Tensor


def replica_claims(tensors: Iterable[Tensor]) -> tuple[Claim, ...]:
    """One claim per replica: that it holds the same bytes as the chunk which the plan reads in its place.

    Replicas that are the same bytes of the same file need no claim. A claim's two tensors have the shape of the box and
    the type that is stored.
    """
    return tuple([claim for tensor in tensors for claim in _claims(tensor)])


def has_replicas(tensors: Iterable[Tensor]) -> bool:
    """Whether anything lies there twice, in different bytes."""
    return any(next(_claims(tensor), None) is not None for tensor in tensors)


def _claims(tensor: Tensor) -> Iterator[Claim]:
    groups = group_replicas(tensor)
    if len(groups) == len(tensor.chunks):
        return
    for primary, group in zip(primary_chunks(tensor), groups, strict=True):
        for replica in group:
            if replica.extent != primary.extent:
                yield Claim(
                    _alone(tensor.name, primary),
                    _alone(tensor.name, replica),
                    f"{tensor.name}: {describe_source(replica)} differs from {describe_source(primary)} in"
                    f" {describe_box(tensor, replica.box)}, of which both hold a replica",
                    "the ranks had drifted apart, or one file is damaged or of another step",
                )


def _alone(name: str, chunk: Chunk) -> Tensor:
    """A chunk as a tensor of its own."""
    box = Box.whole(chunk.box.sizes)
    return Tensor(name, chunk.extent.dtype, box.sizes, (Chunk(box, chunk.extent, chunk.rank),))
