"""Opening of files named by users, with the check that every user who has named a part of the path may read the file.

The daemon reads files with its own rights, but other users may have decided which file a path leads to: the owner of a
symbolic link chooses the link's target, and the owner of a model file chooses the model's external files. Each such
user is an author of the path. Every author must be allowed to read the file, and to search every directory after the
link. Otherwise a link to a secret file would make the daemon disclose the file. The daemon's user and root may name
every file that the daemon can open.

There is no gap between check and use: this module opens the path one name at a time by directory descriptors, never
lets the kernel follow a link, and reads the descriptor that it has checked.

An author's rights are computed from owner, group, mode and POSIX access control list, as the kernel does.

A `Grant` says which user has named the path itself. If a client asks the daemon to read a path, the client's user is
an author from the first name of the path on, so the client learns nothing about a directory that its user may not
search.

If only the operator can name a path, `open_regular` is sufficient. It rejects pipes and devices, because opening one
could block forever.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
import struct
from pathlib import Path, PurePosixPath
from typing import BinaryIO, FrozenSet, Generator, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""Maximum size of a configuration file in bytes. Even a file with thousands of tables is much smaller."""

# Maximum number of symbolic links in a path, as in the kernel, and maximum depth of directories.
_MAX_LINKS = 40
_MAX_DEPTH = 256

_READ, _SEARCH = 4, 1

# Extended attribute with a file's access control list, and its format from <linux/posix_acl_xattr.h>: a version, then
# entries of tag, permissions and id.
_ACL = "system.posix_acl_access"
_ACL_HEADER, _ACL_ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20


class AccessDenied(Exception):
    """An author of a path may not read the file or search a directory. The text names the author's uid and the file."""


class Grant(NamedTuple):
    """The user that has named a path, and the files that this user may name.

    Attributes:
        uid: the user that named the path and must be allowed to read the file. None: the operator, who may name every
            file that the daemon can read.
        gids: the groups of this user, as reported by the kernel.
        directories: absolute paths of directories in which this user may name every file.
    """

    uid: Optional[int] = None
    gids: Tuple[int, ...] = ()
    directories: Tuple[str, ...] = ()

    def directory_of(self, path: str) -> str:
        """Return the one of `directories` that contains the path, compared as text; "" if none contains it."""
        parts = PurePosixPath(path).parts
        if ".." in parts:
            return ""
        tops = ((each, PurePosixPath(each).parts) for each in self.directories)
        return next((each for each, top in tops if len(parts) > len(top) and parts[: len(top)] == top), "")


OPERATOR = Grant()
"""The grant for paths from the operator: from root, from the daemon's user, or from the configuration file."""


class DirHandle(NamedTuple):
    """A directory that was reached by walking a path.

    Attributes:
        descriptors: open descriptors of /, of each directory on the path, and of this directory.
        authors: the uids of the authors of the path.
    """

    descriptors: Tuple[int, ...]
    authors: FrozenSet[int] = frozenset()

    def with_authors(self, *uids: int) -> DirHandle:
        """Return this directory with the users `uids` as additional authors of the path."""
        return self._replace(authors=self.authors | {*uids})

    @contextlib.contextmanager
    def scan(self) -> Generator[Iterator[os.DirEntry[str]], None, None]:
        """Yield an iterator over the entries of the directory.

        Raises:
            OSError: the directory cannot be listed.
        """
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.descriptors[-1])
        try:
            with os.scandir(descriptor) as entries:
                yield entries
        finally:
            os.close(descriptor)

    def is_within(self, directories: Sequence[DirHandle]) -> bool:
        """Return whether this directory is one of `directories` or below one of them."""
        tops = {_identity(each.descriptors[-1]) for each in directories}
        return any(_identity(descriptor) in tops for descriptor in self.descriptors)


class SafePathWalker:
    """Context manager that resolves paths and checks the rights of their authors.

    It keeps the walked directories open until the end of the `with` block.

    Args:
        is_trusting: whether to skip the check of authors, for files that the daemon itself has written.
        grant: the user that has named the path passed to `starting_directory`.
    """

    def __init__(self, *, is_trusting: bool = False, grant: Grant = OPERATOR) -> None:
        self._is_trusting = is_trusting
        self._grant = grant
        # If the path is in one of the grant's directories: this directory, in which all opened files must be, and its
        # path.
        self._confinement: Optional[Tuple[DirHandle, str]] = None
        self._open_descriptors = contextlib.ExitStack()

    def __enter__(self) -> SafePathWalker:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_descriptors.close()

    def root(self) -> DirHandle:
        """Return the root directory."""
        return DirHandle((self._close_at_exit(os.open("/", os.O_PATH | os.O_CLOEXEC)),))

    def starting_directory(self, path: str) -> Tuple[DirHandle, str]:
        """Return the directory from which to resolve an absolute path, and the part of the path after that directory.

        If the path is in one of the grant's directories, the result begins there. The grant's user then need not be
        allowed to read the file, but every file that this object opens from now on must be in that directory.

        Raises:
            OSError, AccessDenied, ValueError: as `open_file`.
        """
        grant_directory = self._grant.directory_of(path)
        if grant_directory:
            directory = self.open_directory(self.root(), grant_directory)
            self._confinement = directory, grant_directory
            return directory, str(PurePosixPath(path).relative_to(grant_directory))
        uid = self._grant.uid
        return (self.root() if uid is None else self.root().with_authors(uid)), path

    def open_directory(self, start: DirHandle, path: str) -> DirHandle:
        """Return the directory at `path`, which is resolved relative to `start`.

        Raises:
            OSError, AccessDenied, ValueError: as `open_file`.
        """
        directory, name, _ = self._walk(start, path)
        if name:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return directory

    def open_file(self, start: DirHandle, path: str) -> Tuple[BinaryIO, DirHandle]:
        """Open the regular file at `path`, which is resolved relative to `start`.

        Return the file, and the directory that contains it after all links are followed.

        Raises:
            OSError: the file does not exist, is not a regular file, or cannot be read.
            AccessDenied: an author may not read the file.
            ValueError: the path contains a NUL.
        """
        directory, name, descriptor = self._walk(start, path)
        if not name:
            raise IsADirectoryError(errno.EISDIR, "expected a file, got a directory")
        if self._confinement is not None and not directory.is_within([self._confinement[0]]):
            raise AccessDenied(
                f"a link leads out of {self._confinement[1]}; expected a file in this directory (model_dirs)"
            )
        # Check the type of the file before opening it for reading: opening a pipe can block, and opening a device can
        # have side effects.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "expected a file, got a special file")
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        file = os.fdopen(os.open(name, flags, dir_fd=directory.descriptors[-1]), "rb")
        try:
            now = os.fstat(file.fileno())
            if not os.path.samestat(now, status):
                raise OSError(errno.ESTALE, "it was replaced while it was opened")
            self._check_access(directory.authors, file.fileno(), now, _READ, name)
        except BaseException:
            file.close()
            raise
        return file, directory

    def _walk(self, start: DirHandle, path: str) -> Tuple[DirHandle, str, int]:
        """Resolve `path` relative to `start`, follow links, and check the authors' rights to search directories.

        Returns:
            If the path leads to a directory: the directory, "" and -1. Otherwise the directory that contains the file,
            the name of the file in it, and a descriptor of the file that cannot be read (O_PATH).
        """
        descriptors, authors = list(start.descriptors), start.authors
        names = _split_reversed(path)
        links = 0
        while names:
            name = names.pop()
            if name == "..":
                # Go back to the previous directory of the walked path. The kernel's ".." could lead elsewhere, if a
                # user has moved the current directory since the walk reached it.
                del descriptors[max(1, len(descriptors) - 1) :]
                continue
            found = self._close_at_exit(_open_entry(descriptors[-1], name))
            status = os.fstat(found)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                authors |= {status.st_uid}
                target = os.readlink("", dir_fd=found)
                if target.startswith("/"):
                    del descriptors[1:]
                names += _split_reversed(target)
            elif stat.S_ISDIR(status.st_mode):
                self._check_access(authors, found, status, _SEARCH, name)
                if len(descriptors) >= _MAX_DEPTH:
                    raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
                descriptors.append(found)
            elif names:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            else:
                return DirHandle(tuple(descriptors), authors), name, found
        return DirHandle(tuple(descriptors), authors), "", -1

    def _close_at_exit(self, descriptor: int) -> int:
        self._open_descriptors.callback(os.close, descriptor)
        return descriptor

    def _check_access(
        self, authors: FrozenSet[int], descriptor: int, status: os.stat_result, right: int, name: str
    ) -> None:
        for uid in () if self._is_trusting else sorted(authors):
            groups = frozenset(self._grant.gids) if uid == self._grant.uid else None
            if not _has_right(uid, groups, descriptor, status, right):
                what = "read" if right == _READ else "enter"
                whose = f"uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"
                text = f"uid {uid}, which names the file by path, link or model, may not {what} {name} ({whose})"
                more = "; expected a file that this user may read, or one below model_dirs of its tenant"
                raise AccessDenied(text + more * (uid == self._grant.uid))


def open_regular(path: Union[str, Path]) -> BinaryIO:
    """Open a regular file for reading. The call never blocks, even if the path leads to a pipe.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
        ValueError: the path contains a NUL.
    """
    descriptor = os.open(str(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "expected a regular file, got a pipe, a socket or a device", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Union[str, Path], max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger than `max_bytes`.
        ValueError: the path contains a NUL.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"expected a file of at most {max_bytes:,} bytes", str(path))
    return content


def _open_entry(directory: int, name: str) -> int:
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        # The kernel triggers an automount only if a directory is requested, so try O_DIRECTORY first.
        return os.open(name, flags | os.O_DIRECTORY, dir_fd=directory)
    except NotADirectoryError:
        return os.open(name, flags, dir_fd=directory)


def _split_reversed(path: str) -> List[str]:
    """Return the names in a path in reverse order, so that `pop` returns the next name."""
    return [each for each in reversed(path.split("/")) if each not in ("", ".")]


def _identity(descriptor: int) -> Tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _has_right(uid: int, groups: Optional[FrozenSet[int]], descriptor: int, status: os.stat_result, right: int) -> bool:
    """Return whether a user has the right `right` to the file at `descriptor`.

    Args:
        uid: the user.
        groups: the user's groups; None to look them up in the host's user database.
        descriptor: a descriptor of the file, from which the access control list is read.
        status: the status of the file.
        right: `_READ` or `_SEARCH`.
    """
    if uid in (0, os.geteuid()):
        return True
    if uid == status.st_uid:
        return bool(status.st_mode & right << 6)
    if groups is None:
        groups = _groups_of_user(uid)
    entries = _read_acl(descriptor)
    if entries:
        return _has_right_by_acl(entries, uid, groups, status.st_gid, right)
    return bool(status.st_mode & right << (3 if status.st_gid in groups else 0))


def _has_right_by_acl(
    entries: Sequence[Tuple[int, int, int]], uid: int, groups: FrozenSet[int], owning: int, right: int
) -> bool:
    """Return whether a user other than the file's owner has a right by the access control list, see acl(5)."""
    mask = next((bits for tag, bits, _ in entries if tag == _MASK), 7)
    for tag, bits, number in entries:
        if tag == _USER and number == uid:
            return bool(bits & mask & right)
    matching = [
        bits
        for tag, bits, number in entries
        if (tag == _GROUP_OBJ and owning in groups) or (tag == _GROUP and number in groups)
    ]
    if matching:
        return any(bits & mask & right for bits in matching)
    return any(bits & right for tag, bits, _ in entries if tag == _OTHER)


def _read_acl(descriptor: int) -> List[Tuple[int, int, int]]:
    """Return the entries of a file's access control list; an empty list if the file has none."""
    try:
        content = os.getxattr(f"/proc/self/fd/{descriptor}", _ACL)
    except OSError:
        return []
    body = content[_ACL_HEADER.size :]
    whole = len(body) // _ACL_ENTRY.size * _ACL_ENTRY.size
    return [(tag, bits, number) for tag, bits, number in _ACL_ENTRY.iter_unpack(body[:whole])]


def _groups_of_user(uid: int) -> FrozenSet[int]:
    try:
        user = pwd.getpwuid(uid)
        return frozenset(os.getgrouplist(user.pw_name, user.pw_gid))
    except (KeyError, OSError):
        return frozenset()
