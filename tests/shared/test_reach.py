"""Whose word leads to a file, and whether he may read it. Who owns what is pretended, so that any user can test."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest

from weightd.shared.modelfile import Model, ModelFileError, digest, open_file
from weightd.shared.reach import NotTheirs, Reach

from .test_modelfile import mindir, model

ALICE, BOB, STAFF = 70001, 70002, 70003

Own = Callable[..., Path]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Own:
    """Pretend that a file belongs to somebody and has that mode; what is not named is root's and for everybody."""
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
    with Reach(trusting=trusting) as walk, walk.open(walk.root(), str(path))[0] as file:
        return file.read()


def linked(directory: Path, target: str = "secret") -> Path:
    """A link to a file beside it."""
    (directory / target).write_bytes(b"secret")
    link = directory / "link"
    link.symlink_to(target)
    return link


@pytest.mark.parametrize(
    ("author", "secret", "allowed"),
    [
        (ALICE, (ALICE, 0o600, 0), True),
        (ALICE, (ALICE, 0o044, 0), False),  # as the kernel: the owner's bits alone count for the owner
        (ALICE, (BOB, 0o640, 0), False),
        (ALICE, (BOB, 0o644, 0), True),
        (ALICE, (BOB, 0o640, STAFF), True),
        (ALICE, (BOB, 0o604, STAFF), False),
        # Root and this user may name what this process may read.
        (0, (BOB, 0o600, 0), True),
        (os.geteuid(), (BOB, 0o600, 0), True),
    ],
)
@pytest.mark.usefixtures("alice_is_staff")
def test_a_link_leads_where_its_owner_may_read(
    tmp_path: Path, own: Own, author: int, secret: Tuple[int, int, int], allowed: bool
) -> None:
    link = own(linked(tmp_path), author)
    own(tmp_path / "secret", *secret)
    if allowed:
        assert read(link) == b"secret"
    else:
        with pytest.raises(NotTheirs) as caught:
            read(link)
        owner, mode, gid = secret
        whose = f"uid {owner}, gid {gid}, mode {mode:04o}"
        text = f"uid {author}, who names it by a link or in a model, may not read secret ({whose})"
        assert str(caught.value) == text
    assert read(link, trusting=True) == b"secret"


@pytest.mark.parametrize("target", ["../closed/secret", "{}/closed/secret"])
def test_a_directory_behind_a_link_is_open_to_who_made_the_link(tmp_path: Path, own: Own, target: str) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    linked(closed)
    (tmp_path / "hers").mkdir()
    link = tmp_path / "hers" / "link"
    link.symlink_to(target.format(tmp_path))
    own(link, ALICE)
    assert read(link) == b"secret"
    own(closed, BOB, 0o700)
    with pytest.raises(NotTheirs, match=f"uid {ALICE}, .* may not enter closed "):
        read(link)
    assert read(closed / "secret") == b"secret"


def test_every_link_on_the_way_counts(tmp_path: Path, own: Own) -> None:
    (tmp_path / "v1").mkdir()
    own(linked(tmp_path / "v1"), BOB)
    own(tmp_path / "v1" / "secret", BOB, 0o600)
    (tmp_path / "current").symlink_to("v1")
    assert read(tmp_path / "current" / "link") == b"secret"
    own(tmp_path / "current", ALICE)
    for name in ("link", "secret"):
        with pytest.raises(NotTheirs, match=f"uid {ALICE}, "):
            read(tmp_path / "current" / name)


@pytest.mark.parametrize(
    ("put", "refusal"), [(os.symlink, "symbolic links"), (os.link, "it was replaced while it was opened")]
)
def test_what_is_read_is_what_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[str, str], None], refusal: str
) -> None:
    """Somebody exchanges the file between the look at it and its opening."""
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


def test_no_descriptor_is_left(tmp_path: Path, own: Own) -> None:
    (tmp_path / "w.bin").write_bytes(b"x")
    path = model(tmp_path, "w.bin")
    before = len(list(Path("/proc/self/fd").iterdir()))
    digest(path)
    own(path, ALICE)
    own(tmp_path / "w.bin", BOB, 0)
    with pytest.raises(ModelFileError):
        digest(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- models ----------------------------------------------------------------------------------------------------------


def onnx_in(directory: Path) -> Tuple[Path, Path]:
    return model(directory, "w.bin"), directory / "w.bin"


def mindir_in(directory: Path) -> Tuple[Path, Path]:
    return mindir(directory), directory / "net_variables" / "data_0"


KINDS = pytest.mark.parametrize("kind", [onnx_in, mindir_in])
Kind = Callable[[Path], Tuple[Path, Path]]


@KINDS
def test_a_link_out_of_the_models_directory_is_refused(tmp_path: Path, kind: Kind) -> None:
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
def test_a_model_names_what_its_owner_may_read(tmp_path: Path, own: Own, kind: Kind) -> None:
    path, external = kind(tmp_path)
    external.write_bytes(b"x")
    own(path, ALICE)
    own(external, BOB, 0o600)
    expected = f"^{external}: uid {ALICE}, who names it .* may not read {external.name} "
    with pytest.raises(ModelFileError, match=expected):
        digest(path)
    # The daemon's own copy is read all the same.
    with Model(path, own=True) as copy:
        assert len(copy.files) == 2
    own(external, ALICE, 0o600)
    assert digest(path)


@KINDS
def test_layouts_that_are_in_use_are_read(tmp_path: Path, own: Own, kind: Kind) -> None:
    (tmp_path / "v1").mkdir()
    path, external = kind(tmp_path / "v1")
    external.write_bytes(b"x")
    before = digest(path)
    # A directory that is exchanged by a link.
    own(tmp_path / "v1", BOB)
    (tmp_path / "current").symlink_to("v1")
    own(tmp_path / "current", BOB)
    assert digest(tmp_path / "current" / path.name) == before
    # The cache of Hugging Face: every file is a link to one that is named after its content.
    (tmp_path / "blobs").mkdir()
    path.rename(tmp_path / "blobs" / "12")
    external.rename(tmp_path / "blobs" / "34")
    for link, blob in ((path, "12"), (external, "34")):
        link.symlink_to(os.path.relpath(str(tmp_path / "blobs" / blob), str(link.parent)))
        own(link, BOB)
        own(tmp_path / "blobs" / blob, BOB, 0o640)
    assert digest(path) == before


def test_weights_are_read_for_who_has_chosen_them(tmp_path: Path, own: Own) -> None:
    link = own(linked(tmp_path), ALICE)
    with open_file(link) as file:
        assert file.read() == b"secret"
    own(tmp_path / "secret", BOB, 0o600)
    with pytest.raises(ModelFileError, match=f"^{link}: uid {ALICE}, who names it "):
        open_file(link)
