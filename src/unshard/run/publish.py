"""Publishing: the output directory goes from what it was to whole in steps of which none looks whole and is not.

Order matters, and each step is on the disk before the next:

1. The marker `.unshard-in-progress` appears, which lists what is going to be written. While it is there, the directory
   is known to be unfinished, and the next run cleans up. It is locked, so that no two runs write to one directory.
2. All files are written under temporary names at the top of the directory.
3. With `--overwrite` the old model goes: first what makes it loadable (index, weights), then the rest. Not before the
   new bytes are complete.
4. The new files get their names; those that make the output whole (`last`) come last.
5. The marker disappears.

An error or Ctrl-C on the way removes all that the run has made. After `kill -9` leftovers stay, marker included.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from unshard.errors import OutputError
from unshard.model_files import is_weights_file
from unshard.plan.moves import PlannedFile
from unshard.run.occupants import MARKER, WITHDRAWN, Marker, survey, temporary_name
from unshard.run.threads import hold_interrupts
from unshard.run.writing import write_error

_SIDE_FILE = 2
"""The place in the loading order of what is neither index nor weights."""


class Staging:
    """An output directory during a run. Made by `stage`. `foreign`: files that lie there and are left alone."""

    def __init__(self, output: Path, files: Sequence[PlannedFile], *, overwrite: bool) -> None:
        self.output = output
        self._files = files
        self._overwrite = overwrite
        token = os.urandom(4).hex()
        self._temporaries = {file.path: temporary_name(token, number) for number, file in enumerate(files)}
        self.foreign: tuple[str, ...] = ()
        self._replaced: tuple[str, ...] = ()
        self._made: list[Path] = []
        self._lock: int | None = None
        self._marked = False
        self._garbage: tuple[str, ...] = ()

    def temporary(self, file: PlannedFile) -> Path:
        """Where a planned file is written until it is published."""
        return self.output / self._temporaries[file.path]

    def begin(self) -> None:
        """Make the directory ours: lock and marker first, then away with the leftovers of a killed run."""
        planned = tuple([file.path for file in self._files])
        self._make_directory(self.output)
        with hold_interrupts():
            self._lock = _lock_marker(self.output)
        occupants = survey(self.output, planned)
        if not (self._overwrite or occupants.is_empty):
            raise OutputError(f"{self.output}: is not empty any more", hint="choose another directory")
        _remove(self.output, occupants.garbage)
        self._replaced, self.foreign = occupants.model, occupants.foreign
        self._mark(() if self._replaced else planned)
        _sync_directory(self.output)

    def publish(self) -> None:
        """Give every file its name. All of them must be complete and on the disk."""
        if self._replaced:
            self._remove_replaced()
        for files in ([file for file in self._files if not file.last], [file for file in self._files if file.last]):
            for file in files:
                self._make_directory((self.output / file.path).parent)
                self.temporary(file).replace(self.output / file.path)
            for directory in {(self.output / file.path).parent for file in files} | {self.output}:
                _sync_directory(directory)
        (self.output / MARKER).unlink()
        _sync_directory(self.output)

    def abandon(self) -> None:
        """Remove all that this run has made. What cannot be removed stays beside the marker, which tells of it."""
        if self._lock is not None:
            with suppress(OSError):
                _remove(self.output, self._temporaries.values())
                if (self.output / MARKER).exists():
                    _remove(self.output, self._garbage)
                if self._marked or os.fstat(self._lock).st_size == 0:
                    (self.output / MARKER).unlink(missing_ok=True)
        for directory in reversed(self._made):
            with suppress(OSError):
                directory.rmdir()

    def release(self) -> None:
        """Let other runs write here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_replaced(self) -> None:
        """Remove the old model: first what makes it loadable. From here on the directory is not whole."""
        self._mark((*[file.path for file in self._files], *self._replaced))
        _remove(self.output, sorted(self._replaced, key=_loading_order))
        for name in self._replaced:
            directory = (self.output / name).parent
            if directory != self.output:
                with suppress(OSError):
                    directory.rmdir()
        _sync_directory(self.output)

    def _mark(self, garbage: tuple[str, ...]) -> None:
        """Say on the disk that these files, where they exist, are not a whole model."""
        assert self._lock is not None
        self._marked = True
        data = Marker(garbage).encode()
        os.pwrite(self._lock, data, 0)
        os.ftruncate(self._lock, len(data))
        os.fsync(self._lock)
        self._garbage = garbage

    def _make_directory(self, directory: Path) -> None:
        """Make a directory and its parents, and remember which were not there."""
        missing = [place for place in (directory, *directory.parents) if not place.exists()]
        for place in reversed(missing):
            self._made.append(place)
            place.mkdir(exist_ok=True)


@contextmanager
def stage(output: Path, files: Sequence[PlannedFile], *, overwrite: bool) -> Iterator[Staging]:
    """An output directory that is ready to be written to; on any error it is left as it was found.

    Raises OutputError where another run is at work there, and for every failure of the filesystem.
    """
    staging = Staging(output, files, overwrite=overwrite)
    try:
        staging.begin()
        yield staging
    except OSError as error:
        with hold_interrupts():
            staging.abandon()
        raise write_error(error.filename or str(output), error) from error
    except BaseException:
        with hold_interrupts():
            staging.abandon()
        raise
    finally:
        staging.release()


def withdraw(output: Path, files: Iterable[PlannedFile]) -> list[Path]:
    """Take back a published model: its index and weights get other names, which are returned."""
    renamed = []
    for file in sorted(files, key=lambda file: _loading_order(file.path)):
        place = output / file.path
        if _loading_order(file.path) < _SIDE_FILE and place.exists():
            renamed.append(place.rename(place.with_name(place.name + WITHDRAWN)))
    _sync_directory(output)
    return renamed


def _lock_marker(output: Path) -> int:
    """A descriptor of the marker, locked as long as it is open, where the filesystem can lock."""
    path = output / MARKER
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            message = f"{output}: another unshard is writing to it at this moment"
            raise OutputError(message, hint="wait until it has ended, or choose another directory") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                os.close(descriptor)
                raise
        if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
        os.close(descriptor)  # the run that held it ended between our opening and our locking


def _remove(output: Path, names: Iterable[str]) -> None:
    for name in names:
        (output / name).unlink(missing_ok=True)


def _loading_order(name: str) -> int:
    """The index goes first, then weights: what is left cannot be loaded, and is no mix with the new."""
    if name.endswith(".index.json"):
        return 0
    return 1 if is_weights_file(name) else _SIDE_FILE


def _sync_directory(directory: Path) -> None:
    """Bring names to the disk, where the filesystem can say so for a directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
