"""Who does what next: the jobs of several output files, handed out to threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from threading import Condition
from typing import TypeAlias

from unshard.plan.moves import PlannedFile
from unshard.run.jobs import Job, Worker, list_jobs
from unshard.run.writing import Output
from unshard.settings import Settings
from unshard.target import Seal


@dataclass(frozen=True, slots=True)
class SealFile:
    """A checksum over bytes of the file that all other jobs have written."""

    seal: Seal
    size = 0

    def run(self, _worker: Worker, output: Output) -> None:
        output.seal(self.seal)


@dataclass(frozen=True, slots=True)
class FinishFile:
    """The last job of a file: it is brought to the disk and closed."""

    size = 0

    def run(self, _worker: Worker, output: Output) -> None:
        output.finish()


Task: TypeAlias = Job | SealFile | FinishFile


@dataclass(slots=True, eq=False)
class Lane:
    """One output file: its tasks in order, and who is at work on it."""

    output: Output
    tasks: Iterator[Task]
    upcoming: Task | None = None
    active: int = 0

    def advance(self) -> None:
        self.upcoming = next(self.tasks, None)

    def is_ready(self) -> bool:
        """Whether the next task may begin: seals one by one when all else is written, the end when all is done."""
        return self.active == 0 or not isinstance(self.upcoming, SealFile | FinishFile)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A task that a thread has taken."""

    lane: Lane
    task: Task


class Schedule:
    """Hands out tasks: first of a file that nobody writes, which scales best, then of any other."""

    def __init__(
        self, files: tuple[PlannedFile, ...], settings: Settings, open_output: Callable[[PlannedFile], Output]
    ) -> None:
        self._changed = Condition()
        self._stopped = False
        self._waiting = deque(files)
        self._lanes: list[Lane] = []
        self._settings, self._open_output = settings, open_output

    def take(self) -> Assignment | None:
        """The next task, once there is one; None when all is done, or after `stop`."""
        with self._changed:
            while True:
                lane = self._choose()
                if lane is not None:
                    return self._assign(lane)
                if self._stopped or not self._lanes:
                    return None
                self._changed.wait()

    def give_back(self, done: Assignment) -> None:
        """Say that a task is done."""
        with self._changed:
            lane = done.lane
            lane.active -= 1
            if lane.upcoming is None and lane.active == 0:
                self._lanes.remove(lane)
            self._changed.notify_all()

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the files of an interrupted run. Only once no thread is at work any more."""
        for lane in self._lanes:
            lane.output.close()

    def _choose(self) -> Lane | None:
        if self._stopped:
            return None
        ready = [lane for lane in self._lanes if lane.upcoming is not None and lane.is_ready()]
        for lane in ready:
            if lane.active == 0:
                return lane
        if self._waiting:
            return self._start(self._waiting.popleft())
        return ready[0] if ready else None

    def _start(self, file: PlannedFile) -> Lane:
        tasks = chain(list_jobs(file, self._settings), map(SealFile, file.seals), [FinishFile()])
        lane = Lane(self._open_output(file), tasks)
        lane.advance()
        self._lanes.append(lane)
        return lane

    def _assign(self, lane: Lane) -> Assignment:
        task = lane.upcoming
        assert task is not None
        lane.active += 1
        lane.advance()
        return Assignment(lane, task)
