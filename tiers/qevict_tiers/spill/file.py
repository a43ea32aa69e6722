"""A file and a lock: all that the local store does to a disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

__all__ = ["DirectoryInUse", "DirectoryLock", "SpillFile"]

_OWNER_ONLY = 0o600
_VIEWS = os.sysconf("SC_IOV_MAX")
"""At most what one call of the system takes."""
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryInUse(RuntimeError):
    """Another process has the directory."""


class DirectoryLock:
    """The right to a directory, until it is closed or the process ends.

    Raises ``DirectoryInUse``, and ``OSError`` where the directory can't be written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._fd = os.open(self._path, _FLAGS | os.O_CREAT, _OWNER_ONLY)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may just have removed it: then the next one to come has another file.
            locked = self.in_place()
        except BlockingIOError:
            locked = False
        if not locked:
            holder = os.pread(self._fd, 20, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise DirectoryInUse(
                f"--kv-tiering-ssd-dir {directory} is in use by process {holder or '(unknown)'}: "
                "stop it, or name another directory"
            )
        os.truncate(self._fd, 0)
        # It needs a block, which a full disk doesn't have; the lock holds without it.
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def in_place(self) -> bool:
        """Whether its file still has its name, so that others see it."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Give the directory back."""
        if self.in_place():
            self._path.unlink()
        os.close(self._fd)


class SpillFile:
    """One open file: whole reads and writes at offsets, by several threads at once."""

    def __init__(self, path: Path, *, create: bool) -> None:
        """Raises ``OSError``; ``PermissionError`` too for what isn't this user's regular file."""
        self.path = path
        self._fd = os.open(path, _FLAGS | (os.O_CREAT if create else 0), _OWNER_ONLY)
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError(f"{path} is not a file of this user")
            if stat.S_IMODE(status.st_mode) != _OWNER_ONLY:
                os.fchmod(self._fd, _OWNER_ONLY)
        except OSError:
            os.close(self._fd)
            raise

        self._close = weakref.finalize(self, os.close, self._fd)

    def close(self) -> None:
        """Let go of it. One that is only forgotten is closed when nobody reads it any more."""
        self._close()

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill the views from ``offset`` on; with zeros beyond the end of the file."""
        views = [view for view in views if view.nbytes]
        while views:
            count = os.preadv(self._fd, views[:_VIEWS], offset)
            if count == 0:
                for view in views:
                    view[:] = bytes(view.nbytes)
                return
            offset += count
            views = _rest(views, count)

    def write(self, views: Sequence[bytes | memoryview], offset: int) -> None:
        """Write the views from ``offset`` on. Raises ``OSError``, with part of it written."""
        rest = [memoryview(view) for view in views if len(view)]
        while rest:
            count = os.pwritev(self._fd, rest[:_VIEWS], offset)
            offset += count
            rest = _rest(rest, count)

    def truncate(self, size: int) -> None:
        """Make it so long."""
        os.ftruncate(self._fd, size)

    def status(self) -> os.stat_result:
        """Its size, blocks and links."""
        return os.fstat(self._fd)

    def allocated_bytes(self) -> int:
        """What it takes on the disk; nothing once it is closed."""
        return self.status().st_blocks * 512 if self._close.alive else 0

    def unlink(self) -> None:
        """Take its name away; it is gone once nobody reads it."""
        self.path.unlink(missing_ok=True)


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the views behind their first ``count`` bytes."""
    done = 0
    while done < len(views) and views[done].nbytes <= count:
        count -= views[done].nbytes
        done += 1
    return ([views[done][count:]] if count else views[done : done + 1]) + views[done + 1 :]
