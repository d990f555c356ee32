"""Tests of safe opens, which check the rights of the user who named a path. Owners are simulated, so any user can
run them."""

from __future__ import annotations

import errno
import os
import pwd
import socket
import stat
import struct
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest

from weightd_common.modelfiles.files import ModelFileError, OpenModel, digest, open_file
from weightd_common.safe_open import (
    OPERATOR,
    AccessDenied,
    Grant,
    SafePathWalker,
    _has_right,
    open_regular,
    read_regular,
)

from .modelfiles.test_files import mindir, model

ALICE, BOB, STAFF = 70001, 70002, 70003

Own = Callable[..., Path]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Own:
    """Return a function that simulates owner and mode of a file; other files belong to root and are readable by
    everyone."""
    real = os.fstat
    owners: Dict[int, Tuple[int, int, int]] = {}

    def fstat(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        mode, uid, gid = owners.get(status.st_ino, (0o755, 0, 0))
        kind = stat.S_IFMT(status.st_mode)
        return os.stat_result((kind | mode, *status[1:4], uid, gid, *status[6:]))

    def set_owner(path: Path, uid: int, mode: int = 0o777, gid: int = 0) -> Path:
        owners[path.lstat().st_ino] = mode, uid, gid
        return path

    monkeypatch.setattr(os, "fstat", fstat)
    return set_owner


@pytest.fixture
def alice_is_staff(monkeypatch: pytest.MonkeyPatch) -> None:
    def user(uid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd(("alice", "x", uid, 1, "", "/", "/bin/sh"))

    def groups(name: str, gid: int) -> List[int]:
        return [gid, STAFF]

    monkeypatch.setattr(pwd, "getpwuid", user)
    monkeypatch.setattr(os, "getgrouplist", groups)


def read(path: Path, *, trusting: bool = False) -> bytes:
    with SafePathWalker(is_trusting=trusting) as walk, walk.open_file(walk.root(), str(path))[0] as file:
        return file.read()


def read_by(grant: Grant, path: Path) -> bytes:
    with SafePathWalker(grant=grant) as walk, walk.open_file(*walk.starting_directory(str(path)))[0] as file:
        return file.read()


def linked(directory: Path, target: str = "secret") -> Path:
    """Return a symlink to a file beside it."""
    (directory / target).write_bytes(b"secret")
    link = directory / "link"
    link.symlink_to(target)
    return link


@pytest.mark.parametrize(
    ("author", "secret", "allowed"),
    [
        (ALICE, (ALICE, 0o600, 0), True),
        (ALICE, (ALICE, 0o044, 0), False),  # As in the kernel, only the owner's bits count for the owner.
        (ALICE, (BOB, 0o640, 0), False),
        (ALICE, (BOB, 0o644, 0), True),
        (ALICE, (BOB, 0o640, STAFF), True),
        (ALICE, (BOB, 0o604, STAFF), False),
        # Root and this user may name every file that this process may read.
        (0, (BOB, 0o600, 0), True),
        (os.geteuid(), (BOB, 0o600, 0), True),
    ],
)
@pytest.mark.usefixtures("alice_is_staff")
def test_link_leads_only_where_its_owner_may_read(
    tmp_path: Path, own: Own, author: int, secret: Tuple[int, int, int], allowed: bool
) -> None:
    link = own(linked(tmp_path), author)
    own(tmp_path / "secret", *secret)
    if allowed:
        assert read(link) == b"secret"
    else:
        with pytest.raises(AccessDenied) as caught:
            read(link)
        owner, mode, gid = secret
        whose = f"uid {owner}, gid {gid}, mode {mode:04o}"
        text = f"uid {author}, which names the file by path, link or model, may not read secret ({whose})"
        assert str(caught.value) == text
    assert read(link, trusting=True) == b"secret"


@pytest.mark.parametrize("target", ["../closed/secret", "{}/closed/secret"])
def test_owner_of_link_must_search_directory(tmp_path: Path, own: Own, target: str) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    linked(closed)
    (tmp_path / "hers").mkdir()
    link = tmp_path / "hers" / "link"
    link.symlink_to(target.format(tmp_path))
    own(link, ALICE)
    assert read(link) == b"secret"
    own(closed, BOB, 0o700)
    with pytest.raises(AccessDenied, match=f"uid {ALICE}, .* may not enter closed "):
        read(link)
    assert read(closed / "secret") == b"secret"


def test_checks_every_link_on_the_path(tmp_path: Path, own: Own) -> None:
    (tmp_path / "v1").mkdir()
    own(linked(tmp_path / "v1"), BOB)
    own(tmp_path / "v1" / "secret", BOB, 0o600)
    (tmp_path / "current").symlink_to("v1")
    assert read(tmp_path / "current" / "link") == b"secret"
    own(tmp_path / "current", ALICE)
    for name in ("link", "secret"):
        with pytest.raises(AccessDenied, match=f"uid {ALICE}, "):
            read(tmp_path / "current" / name)


@pytest.mark.parametrize(
    ("put", "refusal"), [(os.symlink, "symbolic links"), (os.link, "it was replaced while it was opened")]
)
def test_detects_file_replaced_after_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[str, str], None], refusal: str
) -> None:
    """The file is replaced between the check and the open."""
    path = tmp_path / "model"
    path.write_bytes(b"harmless")
    (tmp_path / "secret").write_bytes(b"secret")
    real = os.open

    def exchanging(name: str, flags: int, **options: Any) -> int:
        if name == "model" and not flags & os.O_PATH:
            path.unlink()
            put(str(tmp_path / "secret"), str(path))
        return real(name, flags, **options)

    monkeypatch.setattr(os, "open", exchanging)
    with pytest.raises(OSError, match=refusal):
        read(path)


def test_leaves_no_descriptors(tmp_path: Path, own: Own) -> None:
    (tmp_path / "w.bin").write_bytes(b"x")
    path = model(tmp_path, "w.bin")
    before = len(list(Path("/proc/self/fd").iterdir()))
    digest(path)
    own(path, ALICE)
    own(tmp_path / "w.bin", BOB, 0)
    with pytest.raises(ModelFileError):
        digest(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- the user who named the path -------------------------------------------------------------------------------------


def acl(*entries: Tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each) for each in entries)


USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
NO_ID = 2**32 - 1


@pytest.mark.parametrize(
    ("secret", "gids", "allowed"),
    [
        ((ALICE, 0o600, 0), (), True),
        ((BOB, 0o600, 0), (), False),
        ((BOB, 0o640, STAFF), (), False),
        ((BOB, 0o640, STAFF), (1, STAFF), True),
        ((BOB, 0o604, STAFF), (STAFF,), False),
        ((BOB, 0o604, STAFF), (), True),
    ],
)
def test_path_leads_only_where_its_user_may_read(
    tmp_path: Path, own: Own, secret: Tuple[int, int, int], gids: Tuple[int, ...], allowed: bool
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"secret")
    own(path, *secret)
    if allowed:
        assert read_by(Grant(ALICE, gids), path) == b"secret"
    else:
        with pytest.raises(AccessDenied, match=f"uid {ALICE}, .* may not read secret .* model_dirs of its tenant"):
            read_by(Grant(ALICE, gids), path)
    assert read_by(OPERATOR, path) == b"secret"


def test_error_does_not_reveal_names_in_closed_directory(tmp_path: Path, own: Own) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "there").write_bytes(b"secret")
    own(closed, BOB, 0o710)
    texts = []
    for name in ("there", "missing"):
        with pytest.raises(AccessDenied) as caught:
            read_by(Grant(ALICE), closed / name)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("entries", "gids", "allowed"),
    [
        # The group bits are the mask of the list: without the list a member of the group could read the file.
        ([(GROUP_OBJ, 0, NO_ID), (USER, 4, BOB), (MASK, 4, NO_ID), (OTHER, 0, NO_ID)], (STAFF,), False),
        ([(GROUP_OBJ, 4, NO_ID), (MASK, 4, NO_ID), (OTHER, 0, NO_ID)], (STAFF,), True),
        ([(USER, 0, ALICE), (GROUP_OBJ, 4, NO_ID), (MASK, 4, NO_ID), (OTHER, 4, NO_ID)], (STAFF,), False),
        ([(USER, 4, ALICE), (GROUP_OBJ, 0, NO_ID), (MASK, 4, NO_ID), (OTHER, 0, NO_ID)], (), True),
        ([(USER, 4, ALICE), (GROUP_OBJ, 0, NO_ID), (MASK, 0, NO_ID), (OTHER, 4, NO_ID)], (), False),
        ([(GROUP_OBJ, 0, NO_ID), (GROUP, 4, 7), (MASK, 4, NO_ID), (OTHER, 0, NO_ID)], (7,), True),
        ([(GROUP_OBJ, 0, NO_ID), (GROUP, 0, 7), (MASK, 4, NO_ID), (OTHER, 4, NO_ID)], (7,), False),
        ([(GROUP_OBJ, 4, NO_ID), (OTHER, 0, NO_ID)], (), False),
    ],
)
def test_evaluates_acl_as_the_kernel(
    tmp_path: Path,
    own: Own,
    monkeypatch: pytest.MonkeyPatch,
    entries: List[Tuple[int, int, int]],
    gids: Tuple[int, ...],
    allowed: bool,
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"secret")
    own(path, 1, 0o644, STAFF)
    inode = path.stat().st_ino

    def getxattr(file: str, name: str) -> bytes:
        if Path(file).stat().st_ino != inode:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        assert name == "system.posix_acl_access"
        return acl((USER_OBJ, 6, NO_ID), *entries)

    monkeypatch.setattr(os, "getxattr", getxattr)
    if allowed:
        assert read_by(Grant(ALICE, gids), path) == b"secret"
    else:
        with pytest.raises(AccessDenied):
            read_by(Grant(ALICE, gids), path)


def test_finds_real_acl(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"secret")
    path.chmod(0o600)
    entries = (USER_OBJ, 6, NO_ID), (USER, 4, ALICE), (GROUP_OBJ, 0, NO_ID), (MASK, 4, NO_ID), (OTHER, 0, NO_ID)
    try:
        os.setxattr(str(path), "system.posix_acl_access", acl(*entries))
    except OSError as error:
        pytest.skip(f"{tmp_path}: no access control lists: {error.strerror}")
    descriptor = os.open(str(path), os.O_RDONLY)
    try:
        assert may_by_list(ALICE, descriptor)
        assert not may_by_list(BOB, descriptor)
    finally:
        os.close(descriptor)


def may_by_list(uid: int, descriptor: int) -> bool:
    """Return the access decision for a user other than root and this one."""
    return _has_right(uid, frozenset(), descriptor, os.fstat(descriptor), 4)


def test_grant_covers_only_its_directories(tmp_path: Path, own: Own) -> None:
    given = tmp_path / "given"
    (given / "deep").mkdir(parents=True)
    (given / "deep" / "m").write_bytes(b"given")
    own(given, BOB, 0o700)
    own(given / "deep" / "m", BOB, 0o600)
    (tmp_path / "secret").write_bytes(b"secret")
    own(tmp_path / "secret", BOB, 0o600)
    grant = Grant(ALICE, (), (str(given),))
    assert read_by(grant, given / "deep" / "m") == b"given"
    (given / "inside").symlink_to("deep/m")
    assert read_by(grant, given / "inside") == b"given"
    # By name the link lies in the directory, but even a link of the operator leads nowhere else.
    for target in ("../secret", str(tmp_path / "secret")):
        (given / "link").symlink_to(target)
        with pytest.raises(AccessDenied, match=f"a link leads out of {given}; .*model_dirs"):
            read_by(grant, given / "link")
        (given / "link").unlink()
    for path in (given / ".." / "secret", tmp_path / "secret", given.with_name("given2") / ".." / "secret"):
        with pytest.raises((AccessDenied, FileNotFoundError)):
            read_by(grant, path)


# --- models ----------------------------------------------------------------------------------------------------------


def onnx_in(directory: Path) -> Tuple[Path, Path]:
    return model(directory, "w.bin"), directory / "w.bin"


def mindir_in(directory: Path) -> Tuple[Path, Path]:
    return mindir(directory), directory / "net_variables" / "data_0"


KINDS = pytest.mark.parametrize("kind", [onnx_in, mindir_in])
Kind = Callable[[Path], Tuple[Path, Path]]


@KINDS
def test_rejects_link_out_of_model_directory(tmp_path: Path, kind: Kind) -> None:
    (tmp_path / "model").mkdir()
    path, external = kind(tmp_path / "model")
    for target in (tmp_path / "model" / "inside", tmp_path / "outside"):
        target.write_bytes(b"x")
        external.symlink_to(target)
        if target.name == "inside":
            assert digest(path)
            external.unlink()
    with pytest.raises(ModelFileError) as caught:
        digest(path)
    assert str(caught.value).startswith(f"{external}: a link out of the model's directory; expected ")


@KINDS
def test_model_names_only_files_that_its_owner_may_read(tmp_path: Path, own: Own, kind: Kind) -> None:
    path, external = kind(tmp_path)
    external.write_bytes(b"x")
    own(path, ALICE)
    own(external, BOB, 0o600)
    expected = f"^{external}: uid {ALICE}, which names the file .* may not read {external.name} "
    with pytest.raises(ModelFileError, match=expected):
        digest(path)
    # The daemon's snapshot is read nonetheless.
    with OpenModel(path, is_own_copy=True) as copy:
        assert len(copy.files) == 2
    own(external, ALICE, 0o600)
    assert digest(path)


@KINDS
def test_reads_common_layouts(tmp_path: Path, own: Own, kind: Kind) -> None:
    (tmp_path / "v1").mkdir()
    path, external = kind(tmp_path / "v1")
    external.write_bytes(b"x")
    before = digest(path)
    # A directory that a link switches.
    own(tmp_path / "v1", BOB)
    (tmp_path / "current").symlink_to("v1")
    own(tmp_path / "current", BOB)
    assert digest(tmp_path / "current" / path.name) == before
    # The cache of Hugging Face: each file is a link to a file named after its contents.
    (tmp_path / "blobs").mkdir()
    path.rename(tmp_path / "blobs" / "12")
    external.rename(tmp_path / "blobs" / "34")
    for link, blob in ((path, "12"), (external, "34")):
        link.symlink_to(os.path.relpath(str(tmp_path / "blobs" / blob), str(link.parent)))
        own(link, BOB)
        own(tmp_path / "blobs" / blob, BOB, 0o640)
    assert digest(path) == before


@KINDS
def test_user_must_read_every_file_of_model(tmp_path: Path, own: Own, kind: Kind) -> None:
    path, external = kind(tmp_path)
    external.write_bytes(b"x")
    own(external, BOB, 0o640, STAFF)
    # The operator owns the model file, which is readable by everyone.
    with pytest.raises(ModelFileError, match=f"^{external}: uid {ALICE}, .* may not read {external.name} "):
        OpenModel(path, grant=Grant(ALICE))
    for grant in (OPERATOR, Grant(ALICE, (STAFF,)), Grant(ALICE, (), (str(tmp_path),))):
        with OpenModel(path, grant=grant) as read:
            read.check_unchanged()
            assert len(read.files) == 2
            with read.open(read.files[1]) as file:
                assert file.read() == b"x"
    own(path, BOB, 0o600)
    with pytest.raises(ModelFileError, match=f"^{path}: uid {ALICE}, .* may not read {path.name} "):
        OpenModel(path, grant=Grant(ALICE))


def test_reads_weights_for_user_who_chose_them(tmp_path: Path, own: Own) -> None:
    link = own(linked(tmp_path), ALICE)
    with open_file(link) as file:
        assert file.read() == b"secret"
    own(tmp_path / "secret", BOB, 0o600)
    with pytest.raises(ModelFileError, match=f"^{link}: uid {ALICE}, which names the file "):
        open_file(link)
    link.unlink()
    link.write_bytes(b"weights")
    own(link, BOB, 0o600)
    with pytest.raises(ModelFileError, match=f"^{link}: uid {ALICE}, "):
        open_file(link, Grant(ALICE))
    with open_file(link) as file:
        assert file.read() == b"weights"


def test_reads_file_up_to_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    assert read_regular(str(path), 6) == b"12345"
    with pytest.raises(OSError, match="expected a file of at most 4 bytes"):
        read_regular(path, 4)
    link = tmp_path / "link"
    link.symlink_to(path)
    with open_regular(link) as file:
        assert file.read() == b"12345"


def test_reads_no_more_than_limit_of_huge_file(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="at most 1,000 bytes"):
        read_regular(path, 1000)


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "socket", "missing"])
def test_rejects_other_than_files_without_blocking(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    expected = "expected a regular file"
    if kind == "pipe":
        os.mkfifo(str(path))
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "directory":
        path.mkdir()
        expected = "Is a directory"
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
        expected = "No such device or address"
    else:
        expected = "No such file"
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match=expected):
        open_regular(path)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
