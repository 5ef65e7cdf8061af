"""What happens while a command runs, as values. Printers are in this folder; the engine knows none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from unshard.checkpoint import Level


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """A phase with a known amount of work begins: "claims", "write", "verify", "compare". `total` is in bytes."""

    phase: str
    total: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """`size` more bytes of the phase are done. Sent at most some hundred times a second, from any thread."""

    phase: str
    size: int


@dataclass(frozen=True, slots=True)
class PhaseFinished:
    """The phase ended well; `seconds` of wall time."""

    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Message:
    """A line for people."""

    level: Level
    text: str


Event: TypeAlias = PhaseStarted | Advanced | PhaseFinished | Message
Sink: TypeAlias = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """The sink of those who do not listen."""
