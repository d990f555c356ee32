"""Tests of the files and digest of a model, also with broken, truncated and hostile models."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple, Union

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_common.modelfiles.files import (
    ModelFileError,
    OpenModel,
    check_locations,
    copy_identity,
    digest,
    model_files,
    snapshot_digest,
)

# --- protobuf encoder --------------------------------------------------------------------------------------------

Value = Union[int, bytes, str]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def proto(*fields: Tuple[int, Value]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            raw = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(raw)) + raw
    return out


def tensor(location: Value, *, where: int = 1) -> bytes:
    """Return an ONNX TensorProto whose data is in the file `location`."""
    entries = [(13, proto((1, "offset"), (2, "0"))), (13, proto((1, "location"), (2, location)))]
    return proto((1, 4), (2, 1), (8, "w"), *entries, (14, where))


def onnx_bytes(*tensors: bytes) -> bytes:
    return proto((1, 8), (2, "test"), (7, proto((2, "graph"), *((5, each) for each in tensors))))


def model(directory: Path, *locations: Value) -> Path:
    path = directory / "model.onnx"
    path.write_bytes(onnx_bytes(*map(tensor, locations)))
    return path


def names(path: Path) -> List[str]:
    return [each.name for each in model_files(path)]


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        model_files(path)
    with pytest.raises(ModelFileError):
        digest(path)
    return str(caught.value)


def sha256sum(*files: str, cwd: Path) -> bytes:
    return subprocess.run(["sha256sum", "--", *files], cwd=cwd, stdout=subprocess.PIPE, check=True).stdout


# --- one file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.mindir", "model.onnx", "model"])
def test_digest_of_one_file_equals_sha256sum(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(onnx_bytes() + proto((99, os.urandom(3 * 1024 * 1024 + 1))))
    (tmp_path / "link").symlink_to(path)
    assert [(each.name, each.path, each.nbytes) for each in model_files(path)] == [(name, path, path.stat().st_size)]
    assert digest(path) == digest(tmp_path / "link") == sha256sum(name, cwd=tmp_path).split()[0].decode()


# Objects other than regular files, and the functions that create them.
NO_FILE: Dict[str, Tuple[str, Callable[[Path], object]]] = {
    "nothing": ("No such file or directory", lambda path: None),
    "a link to nothing": ("No such file or directory", lambda path: path.symlink_to("gone")),
    "a link to itself": ("Too many levels of symbolic links", lambda path: path.symlink_to(path.name)),
    "an empty file": ("the file is empty", Path.touch),
    "a directory": ("expected a file, got a directory", Path.mkdir),
    "a pipe, which is refused at once": ("expected a file, got a special file", os.mkfifo),
    "a device": ("expected a file, got a special file", lambda path: path.symlink_to("/dev/zero")),
}
IMPOSSIBLE = {"below/a/file": "Not a directory", "nul\0": "the path contains a NUL", "x" * 300: "File name too long"}


@pytest.mark.parametrize("kind", NO_FILE)
@pytest.mark.parametrize("name", ["model.mindir", "model.onnx", "model_graph.mindir", "w.bin"])
def test_rejects_other_than_regular_files(tmp_path: Path, kind: str, name: str) -> None:
    """This also holds for external files that a model names."""
    problem, make = NO_FILE[kind]
    make(tmp_path / name)
    path = model(tmp_path, name) if name == "w.bin" else tmp_path / name
    assert refusal(path) == f"{tmp_path / name}: {problem}"


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_rejects_impossible_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "below").write_bytes(b"x")
    for path in (tmp_path / name / "model.onnx", model(tmp_path, name)):
        assert refusal(path).endswith(f": {IMPOSSIBLE[name]}")


def test_rejects_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(tmp_path)
    real = os.open

    def denied(name: str, flags: int, **options: Any) -> int:
        if flags & (os.O_PATH | os.O_DIRECTORY):
            return real(name, flags, **options)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert refusal(path) == f"{path}: Permission denied"


# --- ONNX with external data -------------------------------------------------------------------------------------


def test_external_files_are_sorted_by_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.bin", "a.bin", "sub/c.bin"):
        (tmp_path / name).write_bytes(name.encode())
    path = model(tmp_path, "sub/c.bin", "b.bin", "./a.bin", "b.bin", "sub//c.bin")
    assert names(path) == ["model.onnx", "a.bin", "b.bin", "sub/c.bin"]
    assert [each.path for each in model_files(path)] == [tmp_path / name for name in names(path)]


def test_digest_of_files_hashes_their_sha256sum(tmp_path: Path) -> None:
    odd = ["new\nline", "carriage\rreturn", "back\\slash", "sp ace", "é", "-dash"]
    for name in odd:
        (tmp_path / name).write_bytes(name.encode())
    path = model(tmp_path, *odd)
    lines = b"".join(sha256sum(each, cwd=tmp_path) for each in ["model.onnx", *sorted(odd)])
    assert digest(path) == hashlib.sha256(lines).hexdigest()


def test_accepts_name_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.bin")).write_bytes(b"x")
    path = model(tmp_path, b"\xff.bin")
    assert names(path) == ["model.onnx", "\udcff.bin"]
    assert len(digest(path)) == 64


def test_digest_covers_contents_and_names(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("a.bin", "b.bin"):
        (here / name).write_bytes(b"x")
    digests = {digest(model(here, *locations)) for locations in [("b.bin",), ("a.bin", "b.bin"), ()]}
    before = digest(model(here, "a.bin"))
    shutil.copytree(here, tmp_path / "there")
    assert digest(tmp_path / "there" / "model.onnx") == before
    (here / "a.bin").write_bytes(b"y")
    assert len({*digests, before, digest(here / "model.onnx")}) == 5


def overwrite_unnoticed(file: Path) -> None:
    """Change the file and restore its size and times, as an attacker would."""
    status = file.stat()
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace_file(file: Path) -> None:
    twin = file.with_name("twin")
    shutil.copy2(file, twin)
    twin.rename(file)


def cut_short(file: Path) -> None:
    os.truncate(file, 1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (overwrite_unnoticed, "b.bin"),
        (replace_file, "b.bin"),
        (replace_file, "model.onnx"),
        (cut_short, "b.bin"),
    ],
)
def test_rereads_snapshot_only_after_changes(tmp_path: Path, change: Callable[[Path], None], name: str) -> None:
    path = model(tmp_path, "b.bin")
    (tmp_path / "b.bin").write_bytes(b"weights")
    pinned = f"{copy_identity(path)}:known"
    assert [snapshot_digest(path, each) for each in (pinned, "", "no", f"{'5' * 64}:x")] == [
        "known",
        *[digest(path)] * 3,
    ]
    # Changes within one tick of the kernel's clock have the same times.
    clock = tmp_path / "clock"
    clock.touch()
    while clock.stat().st_ctime_ns <= path.stat().st_ctime_ns:
        clock.touch()
    change(tmp_path / name)
    assert snapshot_digest(path, pinned) == digest(path)


def test_unused_external_file_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_bytes(tensor("gone.bin", where=0)))
    assert names(path) == ["model.onnx"]


def test_model_that_names_itself_is_one_file(tmp_path: Path) -> None:
    assert names(model(tmp_path, "model.onnx", "./model.onnx")) == ["model.onnx"]


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "//etc/passwd", "..", "../w.bin", "sub/../../w.bin", "sub/../w.bin", "", ".", "./"]
)
def test_rejects_location_outside(tmp_path: Path, location: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "w.bin").write_bytes(b"x")
    path = model(tmp_path, "w.bin", location)
    expected = f"{path}: names the external file {location!r}; expected a path inside the model's directory"
    assert refusal(path) == expected


ENTRY = proto((1, "location"), (2, "../w.bin"))


@pytest.mark.parametrize(
    "content",
    [
        onnx_bytes(proto((13, ENTRY), (14, 2**32 + 1))),
        onnx_bytes(proto((14, 1), (13, ENTRY), (14, 0))),
        # One attribute in two parts, which the engine merges.
        proto((7, proto((1, proto((5, proto((5, proto((14, 1))), (5, proto((13, ENTRY)))))))))),
    ],
    ids=["wide", "unused", "merged"],
)
def test_finds_outside_location_in_unusual_fields(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert "names the external file '../w.bin'" in refusal(path)


def test_enumerations_count_modulo_their_width(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_bytes(tensor("w.bin", where=2**32 + 1)))
    (tmp_path / "w.bin").write_bytes(b"x")
    assert names(path) == ["model.onnx", "w.bin"]


def test_names_first_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "w05.bin").write_bytes(b"x")
    problems = refusal(model(tmp_path, *(f"w{number:02}.bin" for number in range(14)))).splitlines()
    gone = [number for number in range(11) if number != 5]
    assert problems[:-1] == [f"{tmp_path}/w{number:02}.bin: No such file or directory" for number in gone]
    assert problems[-1] == f"{tmp_path}/model.onnx: 3 more files cannot be read"


def every_place(external: bytes) -> List[bytes]:
    """Return models with a tensor in each place that onnx.proto allows."""
    sparse = proto((1, external), (3, 4))
    attributes = [proto((5, external)), proto((10, external)), proto((22, sparse)), proto((23, sparse))]
    subgraph = proto((1, proto((4, "Constant"), (5, attributes[0]))))
    attributes += [proto((6, subgraph)), proto((11, subgraph)), proto((6, proto((5, external))))]
    nodes = [proto((4, "Op"), (5, attribute)) for attribute in attributes]
    graphs = [proto((5, external)), proto((15, sparse)), *(proto((1, node)) for node in nodes)]
    models = [proto((7, graph)) for graph in graphs]
    models += [proto((20, proto((number, graph)))) for number in (1, 2) for graph in graphs]
    models += [proto((25, proto((7, node)))) for node in nodes]
    models += [proto((25, proto((11, attribute)))) for attribute in attributes]
    return models


@pytest.mark.parametrize("raw", every_place(tensor("w.bin")))
def test_finds_external_data_in_every_place(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "w.bin").write_bytes(b"x")
    (tmp_path / "model.onnx").write_bytes(proto((1, 8)) + raw)
    assert names(tmp_path / "model.onnx") == ["model.onnx", "w.bin"]


def nested(depth: int) -> bytes:
    """Return nested graphs, each in an attribute of a node, with a tensor in the innermost."""
    graph = proto((5, tensor("w.bin")))
    for _ in range(depth):
        graph = proto((1, proto((5, proto((6, graph))))))
    return proto((7, graph))


def test_limits_nesting_like_protobuf(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"x")
    path = tmp_path / "model.onnx"
    path.write_bytes(nested(32))
    assert names(path) == ["model.onnx", "w.bin"]
    for depth in (40, 1000, 5000):
        path.write_bytes(nested(depth))
        assert refusal(path) == NO_ONNX.format(path)


# --- other files and truncated models ----------------------------------------------------------------------------

NO_ONNX = "{}: expected an ONNX model; the file has another format or is truncated"


NOT_ONNX = {
    "zeros": bytes(1 << 20),
    "a varint without end": b"\x80" * 64,
    "a page": b"<html>",
    "an archive": b"PK\x03\x04",
    "a length beyond the file": b"\x3a\xff\xff\xff\xff\x0f",
    "a length beyond 64 bits": b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    "a group without end": b"\x0b",
    "a tag without a value": b"\x08",
    "half a fixed64": b"\x09\x00",
    "an entry beyond its tensor": proto((7, proto((5, b"\x6a\x10abc")))),
    "a varint beyond its tensor": proto((7, proto((5, b"\x08" + b"\x80" * 11)))),
    "a location longer than any path": proto((7, proto((5, tensor("x" * 5000))))),
}


@pytest.mark.parametrize("raw", NOT_ONNX.values(), ids=NOT_ONNX)
def test_rejects_other_files(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(raw)
    assert refusal(path) == NO_ONNX.format(path)


def test_truncated_model_never_loses_a_file_silently(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"x")
    path = model(tmp_path, "w.bin")
    whole = path.read_bytes()
    start_of_graph = whole.index(b"graph") - 4
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        if size in (2, start_of_graph):
            # This shorter message is complete in itself; the engine reports the missing parts.
            assert names(path) == ["model.onnx"]
        else:
            assert refusal(path) == NO_ONNX.format(path)


NESTED = nested(3) + onnx_bytes(tensor("w.bin"), tensor("w.bin"))
# Position, number of removed bytes, and inserted bytes.
CHANGE = st.tuples(st.integers(0, len(NESTED)), st.integers(0, 5), st.binary(max_size=5))


def changed(changes: List[Tuple[int, int, bytes]]) -> bytes:
    raw = NESTED
    for at, gone, come in changes:
        raw = raw[:at] + come + raw[at + gone :]
    return raw


@given(st.lists(CHANGE, min_size=1, max_size=3).map(changed) | st.binary(min_size=1, max_size=300))
def test_accepts_or_rejects_any_file(tmp_path_factory: Any, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.onnx"
    path.with_name("w.bin").write_bytes(b"x")
    path.write_bytes(raw)
    try:
        files = model_files(path)
    except ModelFileError:
        return
    assert all(file.path.is_file() for file in files)
    assert len(digest(path)) == 64


# --- files that change during the read ---------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", [True, False])
def test_detects_replaced_file(tmp_path: Path, replaced: bool) -> None:
    (tmp_path / "w.bin").write_bytes(b"x")
    path = model(tmp_path, "w.bin")
    content = path.read_bytes()
    with OpenModel(path) as opened:
        (tmp_path / "w.bin").unlink()
        path.unlink()
        if replaced:
            (tmp_path / "w.bin").write_bytes(b"y")
            path.write_bytes(content)
        with opened.open(opened.files[0]) as file:
            assert file.read() == content
        expected = r"model\.onnx: changed while it was copied" if replaced else r"w\.bin: No such file or directory$"
        with pytest.raises(ModelFileError, match=expected):
            opened.open(opened.files[1])
        with pytest.raises(ModelFileError, match="changed while it was copied"):
            opened.check_unchanged()


def test_file_truncated_during_the_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk relies on the initial length of the file; with a mapping it would crash."""
    path = model(tmp_path, *(f"w{i}.bin" for i in range(1000)))
    size = path.stat().st_size
    real = os.fstat

    def cut(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size == size:
            os.truncate(path, 100)
        return status

    monkeypatch.setattr(os, "fstat", cut)
    assert refusal(path) == NO_ONNX.format(path)


# --- MindIR with its variables -----------------------------------------------------------------------------------


def mindir(directory: Path, *variables: str) -> Path:
    path = directory / "net_graph.mindir"
    path.write_bytes(b"graph")
    (directory / "net_variables").mkdir()
    for name in variables:
        (directory / "net_variables" / name).write_bytes(name.encode())
    return path


def mindir_places(location: str) -> List[bytes]:
    """Return MindIR models with a tensor in each place that mind_ir.proto allows."""
    tensor = proto((1, 4), (2, 1), (7, "w"), (12, proto((1, location), (2, 64), (3, 8))))
    attribute = proto((1, "a"), (6, tensor))
    attributes = [attribute, proto((12, tensor)), proto((7, proto((3, tensor)))), proto((13, proto((3, tensor))))]
    attributes += [
        proto((17, attribute)),
        proto((19, proto((3, attribute)))),
        proto((6, proto((17, proto((2, attribute)))))),
    ]
    graphs = [proto((3, tensor)), proto((5, proto((2, tensor)))), proto((6, proto((5, attribute))))]
    graphs += [proto((1, proto((number, each)))) for each in attributes for number in (5, 8, 9)]
    graphs += [proto((8, attribute)), proto((10, proto((2, attribute))))]
    graphs += [proto((10, proto((number, tensor)))) for number in (3, 4, 5)]
    models = [proto((number, graph)) for graph in graphs for number in (7, 8)]
    return [*models, proto((12, proto((3, attribute))))]


@pytest.mark.parametrize("name", ["net.mindir", "net_graph.mindir"])
def test_rejects_outside_location_in_mindir(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    (tmp_path / "net_variables").mkdir()
    outside = mindir_places("../other/w")
    for content, location in (*((each, "../other/w") for each in outside), (mindir_places("/w")[0], "/w")):
        path.write_bytes(content)
        assert refusal(path) == (
            f"{path}: names the external file {location!r}; expected a path inside the model's directory"
        )
        with pytest.raises(ModelFileError, match="names the external file"):
            check_locations(path)
    for content in (*mindir_places("net_variables/data_0"), b"no protobuf"):
        path.write_bytes(content)
        assert names(path) == [name]
        check_locations(path)


def test_finds_location_behind_a_protobuf_group(tmp_path: Path) -> None:
    path = tmp_path / "net.mindir"
    group = varint(100 << 3 | 3) + proto((7, b"x")) + varint(101 << 3 | 3) + varint(101 << 3 | 4) + varint(100 << 3 | 4)
    [content, *_] = mindir_places("a/../../w")
    path.write_bytes(group + content)
    assert "names the external file 'a/../../w'" in refusal(path)
    # No engine reads groups that do not end, or that end with another number.
    for wrong in (group[:-2], group + varint(100 << 3 | 4)):
        (tmp_path / "model.onnx").write_bytes(wrong)
        assert "expected an ONNX model" in refusal(tmp_path / "model.onnx")


def test_rejects_deeply_nested_mindir(tmp_path: Path) -> None:
    path = tmp_path / "net.mindir"
    attribute = b""
    for _ in range(101):
        attribute = proto((17, attribute))
    path.write_bytes(proto((7, proto((8, attribute)))))
    assert "expected at most 100 levels" in refusal(path)


def test_mindir_includes_its_variables(tmp_path: Path) -> None:
    path = mindir(tmp_path, "data_1", "data_0", "data_10")
    (tmp_path / "net_variables" / "sub").mkdir()
    expected = ["net_graph.mindir", "net_variables/data_0", "net_variables/data_1", "net_variables/data_10"]
    assert names(path) == expected
    assert digest(path) == hashlib.sha256(sha256sum(*expected, cwd=tmp_path)).hexdigest()


def test_small_mindir_is_one_file(tmp_path: Path) -> None:
    mindir(tmp_path, "data_0").rename(tmp_path / "net.mindir")
    assert names(tmp_path / "net.mindir") == ["net.mindir"]


def test_rejects_mindir_without_variables(tmp_path: Path) -> None:
    path = mindir(tmp_path, "data_0")
    variables = tmp_path / "net_variables"
    (variables / "data_0").write_bytes(b"")
    assert refusal(path) == f"{variables}/data_0: the file is empty"
    shutil.rmtree(variables)
    expected = f"{path}: expected its weights in {variables}/, which is not a directory"
    assert refusal(path) == expected
    variables.write_bytes(b"x")
    assert refusal(path) == expected


def test_rejects_unreadable_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mindir(tmp_path, "data_0")

    def denied(_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", denied)
    assert refusal(path) == f"{tmp_path}/net_variables: Permission denied"


# --- models of the onnx package ----------------------------------------------------------------------------------


class TestOnnx:
    """Tests with models that the onnx package writes; it decides which files belong to a model."""

    @pytest.fixture
    def onnx(self) -> Any:
        return pytest.importorskip("onnx", reason="there is no onnx for this Python")

    @pytest.mark.parametrize(
        ("options", "files"),
        [
            ({}, []),
            ({"save_as_external_data": True, "location": "w.bin"}, ["w.bin"]),
            ({"save_as_external_data": True, "all_tensors_to_one_file": False}, ["w0", "w1", "w2"]),
        ],
    )
    def test_external_files(self, onnx: Any, tmp_path: Path, options: Any, files: List[str]) -> None:
        """The tensors are in the graph and in a branch of it."""
        values = [onnx.numpy_helper.from_array(np.full((64, 64), i, "<f4"), f"w{i}") for i in range(3)]
        make = onnx.helper
        branch = make.make_graph(
            [make.make_node("Constant", [], ["c"], value=values[0])], "branch", [], [], values[1:2]
        )
        node = make.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
        whole = make.make_model(make.make_graph([node], "graph", [], [], values[2:]))
        path = tmp_path / "model.onnx"
        onnx.save_model(whole, str(path), size_threshold=0, convert_attribute=True, **options)
        assert {*names(path)} == {"model.onnx", *files}
        if not files:
            assert digest(path) == sha256sum("model.onnx", cwd=tmp_path).split()[0].decode()

    def test_models_of_onnx_test_suite(self, onnx: Any) -> None:
        paths = [*Path(onnx.__file__).parent.rglob("*.onnx")]
        assert paths
        for path in paths:
            assert names(path) == [path.name]
