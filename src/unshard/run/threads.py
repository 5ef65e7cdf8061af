"""Threads that stop together, and memory that they share."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Condition, Thread, current_thread, main_thread
from typing import Any

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PATIENCE = 0.1
"""Seconds after which a waiting thread looks whether it has missed something."""


def run_threads(count: int, work: Callable[[], None], stop: Callable[[], None]) -> None:
    """Call `work` in `count` threads and wait for all of them.

    The first error of any of them is raised here, after `stop` was called and all returned; KeyboardInterrupt, too.
    `stop` must make every `work` return soon.
    """
    errors: list[BaseException] = []
    crew: list[_Hand] = []
    ended: SimpleQueue[None] = SimpleQueue()

    def guarded(hand: _Hand) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            stop()
        finally:
            hand.is_done = True
            ended.put(None)

    try:
        with hold_interrupts():
            for number in range(count):
                hand = _Hand()
                Thread(target=guarded, args=(hand,), name=f"unshard-{number}").start()
                crew.append(hand)
        _wait(crew, ended)
    except BaseException:
        with hold_interrupts():
            stop()
            _wait(crew, ended)
        raise
    if errors:
        raise errors[0]


@dataclass(slots=True)
class _Hand:
    """Whether a thread has returned."""

    is_done: bool = False


def _wait(crew: Sequence[_Hand], ended: SimpleQueue[None]) -> None:
    """Wait until all are done, also after an earlier wait was interrupted.

    `Thread.join` cannot do that: in CPython 3.11, once interrupted, it takes a thread that still runs for one that has
    ended. The queue only wakes us; what counts are the flags.
    """
    while not all(hand.is_done for hand in crew):
        with suppress(Empty):
            ended.get(timeout=_PATIENCE)


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the `with`: for steps that must not be left half-done, and are short.

    So do the signals of which somebody made an exception. They are not blocked, for that holds for one thread, and the
    kernel gives them to any other; Python runs their handlers in the main thread.
    """
    if current_thread() is not main_thread():
        yield
        return
    held: list[signal.Signals] = []
    handlers: dict[signal.Signals, Any] = {}
    try:
        for number in _INTERRUPTS:
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda caught, _: held.append(signal.Signals(caught)))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for caught in held[:1]:
            handlers[caught](caught, None)


class Budget:
    """Bytes of memory that tasks reserve. One that finds nothing else reserved is always admitted."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used = 0
        self._changed = Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Wait until `size` bytes fit, hold them inside the `with`."""
        with self._changed:
            while self._used and self._used + size > self._total:
                self._changed.wait()
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()
