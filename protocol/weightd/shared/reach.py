"""Opens what a path leads to, if everybody who has chosen that may read it.

A daemon reads with its own rights what others have named: a link points where its owner likes, and a model names files
beside it. So each of them is taken for an author of the path, and the file and every directory behind the link must be
open to each author, too; else a link to somebody's secret would have the daemon tell it. The daemon's own user and root
may name whatever the daemon may open.

There is no time between check and use: the way is walked by descriptors, one name after another, and what is checked is
the descriptor that is read. A link is never followed by the kernel.

What authors may is told by owner, group and mode, as the kernel does without access control lists.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from typing import BinaryIO, FrozenSet, Generator, Iterator, List, NamedTuple, Sequence, Tuple

# As the kernel; and no path is deeper.
_MAX_LINKS = 40
_MAX_DEPTH = 256

_READ, _SEARCH = 4, 1


class NotTheirs(Exception):
    """An author may not read what the path leads to; the text says who and what."""


class Place(NamedTuple):
    """A directory, with those above it, as open descriptors from / on, and who has chosen to come here."""

    way: Tuple[int, ...]
    authors: FrozenSet[int] = frozenset()

    def named_by(self, *uids: int) -> Place:
        """Return the same place with further authors."""
        return self._replace(authors=self.authors | {*uids})

    @contextlib.contextmanager
    def listing(self) -> Generator[Iterator[os.DirEntry[str]], None, None]:
        """Yield what is in it.

        Raises:
            OSError: it cannot be listed.
        """
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.way[-1])
        try:
            with os.scandir(descriptor) as entries:
                yield entries
        finally:
            os.close(descriptor)

    def below(self, directories: Sequence[Place]) -> bool:
        """Whether this is one of the directories, or lies in one of them, however deep."""
        tops = {_identity(each.way[-1]) for each in directories}
        return any(_identity(descriptor) in tops for descriptor in self.way)


class Reach:
    """Walks paths. To be closed: it keeps the directories open.

    Args:
        trusting: the files are the daemon's own, nobody else has named them: authors are not asked for.
    """

    def __init__(self, *, trusting: bool = False) -> None:
        self._trusting = trusting
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Reach:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def root(self) -> Place:
        """Return /."""
        return Place((self._keep(os.open("/", os.O_PATH | os.O_CLOEXEC)),))

    def directory(self, start: Place, path: str) -> Place:
        """Return the directory at `path`, seen from `start`.

        Raises:
            OSError, NotTheirs, ValueError: as `open`.
        """
        place, name, _ = self._walk(start, path)
        if name:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return place

    def open(self, start: Place, path: str) -> Tuple[BinaryIO, Place]:
        """Open the regular file at `path`, seen from `start`; return it and the directory in which it really is.

        Raises:
            OSError: there is none, or it is something else, or it cannot be read.
            NotTheirs: an author may not read it.
            ValueError: the path holds a NUL.
        """
        place, name, found = self._walk(start, path)
        if not name:
            raise IsADirectoryError(errno.EISDIR, "expected a file, got a directory")
        # Before it is opened: opening a pipe waits for its other end, and opening a device may do anything.
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "expected a file, got a special file")
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        file = os.fdopen(os.open(name, flags, dir_fd=place.way[-1]), "rb")
        try:
            now = os.fstat(file.fileno())
            if not os.path.samestat(now, status):
                raise OSError(errno.ESTALE, "it was replaced while it was opened")
            self._check(place.authors, now, _READ, name)
        except BaseException:
            file.close()
            raise
        return file, place

    def _walk(self, start: Place, path: str) -> Tuple[Place, str, int]:
        """Return the place to which the path leads; if that is no directory: where it lies, its name, and itself."""
        way, authors = list(start.way), start.authors
        names = _names(path)
        links = 0
        while names:
            name = names.pop()
            if name == "..":
                # By the way that was come: a directory that is moved meanwhile leads nowhere else.
                del way[max(1, len(way) - 1) :]
                continue
            found = self._keep(_step(way[-1], name))
            status = os.fstat(found)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                authors |= {status.st_uid}
                target = os.readlink("", dir_fd=found)
                if target.startswith("/"):
                    del way[1:]
                names += _names(target)
            elif stat.S_ISDIR(status.st_mode):
                self._check(authors, status, _SEARCH, name)
                if len(way) >= _MAX_DEPTH:
                    raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
                way.append(found)
            elif names:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            else:
                return Place(tuple(way), authors), name, found
        return Place(tuple(way), authors), "", -1

    def _keep(self, descriptor: int) -> int:
        self._open.callback(os.close, descriptor)
        return descriptor

    def _check(self, authors: FrozenSet[int], status: os.stat_result, right: int, name: str) -> None:
        for uid in () if self._trusting else sorted(authors):
            if not _may(uid, status, right):
                what = "read" if right == _READ else "enter"
                whose = f"uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"
                raise NotTheirs(f"uid {uid}, who names it by a link or in a model, may not {what} {name} ({whose})")


def _step(directory: int, name: str) -> int:
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        # What is mounted on demand is mounted for those who ask for a directory.
        return os.open(name, flags | os.O_DIRECTORY, dir_fd=directory)
    except NotADirectoryError:
        return os.open(name, flags, dir_fd=directory)


def _names(path: str) -> List[str]:
    """Return the names that the path consists of, the first one last."""
    return [each for each in reversed(path.split("/")) if each not in ("", ".")]


def _identity(descriptor: int) -> Tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _may(uid: int, status: os.stat_result, right: int) -> bool:
    if uid in (0, os.geteuid()):
        return True
    if uid == status.st_uid:
        return bool(status.st_mode & right << 6)
    return bool(status.st_mode & right << (3 if status.st_gid in _groups(uid) else 0))


def _groups(uid: int) -> FrozenSet[int]:
    try:
        user = pwd.getpwuid(uid)
        return frozenset(os.getgrouplist(user.pw_name, user.pw_gid))
    except (KeyError, OSError):
        return frozenset()
