"""Which files a model consists of, and their digest; with models that are broken, cut short or meant to harm."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any, List, Sequence, Tuple, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.examples import examples
from weightd.shared.modelfile import Model, ModelFileError, digest, model_files

# --- protobuf by hand --------------------------------------------------------------------------------------------

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
    """An ONNX TensorProto whose data is in the file `location`."""
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


@pytest.mark.parametrize("name", ["model.mindir", "model.onnx", "model", "model.bin"])
def test_the_digest_of_one_file_is_what_sha256sum_prints(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(onnx_bytes() + proto((99, os.urandom(3 * 1024 * 1024 + 1))))
    assert [(each.name, each.path, each.nbytes) for each in model_files(path)] == [(name, path, path.stat().st_size)]
    assert digest(path) == sha256sum(name, cwd=tmp_path).split()[0].decode()


def test_a_link_to_a_file_is_a_file(tmp_path: Path) -> None:
    path = model(tmp_path)
    (tmp_path / "link.onnx").symlink_to(path)
    assert digest(tmp_path / "link.onnx") == digest(path)


@pytest.mark.parametrize("name", ["model.mindir", "model.onnx", "model_graph.mindir"])
class TestNoModel:
    def test_nothing(self, tmp_path: Path, name: str) -> None:
        assert refusal(tmp_path / name) == f"{tmp_path / name}: No such file or directory"

    def test_a_link_to_nothing(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).symlink_to(tmp_path / "gone")
        assert refusal(tmp_path / name) == f"{tmp_path / name}: No such file or directory"

    def test_a_link_to_itself(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).symlink_to(tmp_path / name)
        assert refusal(tmp_path / name) == f"{tmp_path / name}: Too many levels of symbolic links"

    def test_below_a_file(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "file").write_bytes(b"x")
        assert refusal(tmp_path / "file" / name) == f"{tmp_path / 'file' / name}: Not a directory"

    def test_an_empty_file(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).touch()
        assert refusal(tmp_path / name) == f"{tmp_path / name}: the file is empty"

    def test_a_directory(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir()
        assert refusal(tmp_path / name) == f"{tmp_path / name}: expected a file, got a directory"

    def test_a_pipe_is_refused_at_once(self, tmp_path: Path, name: str) -> None:
        os.mkfifo(tmp_path / name)
        assert refusal(tmp_path / name) == f"{tmp_path / name}: expected a file, got a special file"

    def test_a_device(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).symlink_to("/dev/zero")
        assert refusal(tmp_path / name) == f"{tmp_path / name}: expected a file, got a special file"

    def test_an_impossible_path(self, tmp_path: Path, name: str) -> None:
        assert "the path holds a NUL" in refusal(tmp_path / f"a\0{name}")
        assert "File name too long" in refusal(tmp_path / ("x" * 300) / name)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
    def test_no_permission(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"x")
        (tmp_path / name).chmod(0)
        assert refusal(tmp_path / name) == f"{tmp_path / name}: Permission denied"


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for root too."""
    path = model(tmp_path)

    real = os.open

    def denied(name: str, flags: int, **options: Any) -> int:
        if flags & (os.O_PATH | os.O_DIRECTORY):
            return real(name, flags, **options)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert refusal(path) == f"{path}: Permission denied"


# --- ONNX with external data -------------------------------------------------------------------------------------


def test_external_files_follow_the_model_by_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.bin", "a.bin", "sub/c.bin"):
        (tmp_path / name).write_bytes(name.encode())
    path = model(tmp_path, "sub/c.bin", "b.bin", "./a.bin", "b.bin", "sub//c.bin")
    assert names(path) == ["model.onnx", "a.bin", "b.bin", "sub/c.bin"]
    assert [each.path for each in model_files(path)] == [tmp_path / name for name in names(path)]


def test_the_digest_of_several_files_is_that_of_their_sha256sum(tmp_path: Path) -> None:
    odd = ["new\nline", "carriage\rreturn", "back\\slash", "sp ace", "é", "-dash"]
    for name in odd:
        (tmp_path / name).write_bytes(name.encode())
    path = model(tmp_path, *odd)
    lines = b"".join(sha256sum(each, cwd=tmp_path) for each in ["model.onnx", *sorted(odd)])
    assert digest(path) == hashlib.sha256(lines).hexdigest()


def test_a_name_that_is_no_text_is_a_name(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.bin")).write_bytes(b"x")
    path = model(tmp_path, b"\xff.bin")
    assert names(path) == ["model.onnx", "\udcff.bin"]
    assert len(digest(path)) == 64


def test_the_digest_covers_contents_and_names(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    (tmp_path / "b.bin").write_bytes(b"x")
    digests = {digest(model(tmp_path, *locations)) for locations in [("a.bin",), ("b.bin",), ("a.bin", "b.bin"), ()]}
    path = model(tmp_path, "a.bin")
    (tmp_path / "a.bin").write_bytes(b"y")
    assert len({*digests, digest(path)}) == 5


def test_the_digest_does_not_depend_on_where_the_model_is(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "w.bin").write_bytes(b"x")
    before = digest(model(here, "w.bin"))
    shutil.copytree(here, there)
    assert digest(there / "model.onnx") == before


def test_external_data_that_is_not_used_need_not_be_there(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_bytes(tensor("gone.bin", where=0)))
    assert names(path) == ["model.onnx"]


def test_a_model_that_names_itself_is_one_file(tmp_path: Path) -> None:
    assert names(model(tmp_path, "model.onnx", "./model.onnx")) == ["model.onnx"]


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "//etc/passwd", "..", "../w.bin", "sub/../../w.bin", "sub/../w.bin", "", ".", "./"]
)
def test_a_location_outside_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "w.bin").write_bytes(b"x")
    path = model(tmp_path, "w.bin", location)
    expected = f"{path}: names the external file {location!r}; expected a path inside the model's directory"
    assert refusal(path) == expected


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("gone.bin", "No such file or directory"),
        ("empty.bin", "the file is empty"),
        ("sub", "expected a file, got a directory"),
        ("pipe", "expected a file, got a special file"),
        ("loop", "Too many levels of symbolic links"),
        ("w.bin/x", "Not a directory"),
        ("nul\0.bin", "the path holds a NUL"),
        ("x" * 300, "File name too long"),
    ],
)
def test_an_external_file_that_cannot_be_read_is_named(tmp_path: Path, location: str, problem: str) -> None:
    (tmp_path / "w.bin").write_bytes(b"x")
    (tmp_path / "empty.bin").touch()
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert refusal(model(tmp_path, "w.bin", location)) == f"{tmp_path / location}: {problem}"


def test_all_external_files_that_cannot_be_read_are_named_as_far_as_one_reads_on(tmp_path: Path) -> None:
    (tmp_path / "w05.bin").write_bytes(b"x")
    problems = refusal(model(tmp_path, *(f"w{number:02}.bin" for number in range(14)))).splitlines()
    gone = [number for number in range(11) if number != 5]
    assert problems[:-1] == [f"{tmp_path}/w{number:02}.bin: No such file or directory" for number in gone]
    assert problems[-1] == f"{tmp_path}/model.onnx: 3 more files cannot be read"


def every_place(external: bytes) -> List[bytes]:
    """Models in which a tensor lies where onnx.proto allows one."""
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
def test_external_data_is_found_wherever_a_tensor_may_be(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "w.bin").write_bytes(b"x")
    (tmp_path / "model.onnx").write_bytes(proto((1, 8)) + raw)
    assert names(tmp_path / "model.onnx") == ["model.onnx", "w.bin"]


def nested(depth: int) -> bytes:
    """A graph in an attribute of a node of a graph ..., with a tensor in the innermost."""
    graph = proto((5, tensor("w.bin")))
    for _ in range(depth):
        graph = proto((1, proto((5, proto((6, graph))))))
    return proto((7, graph))


def test_subgraphs_nest_as_deep_as_protobuf_reads_them(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"x")
    path = tmp_path / "model.onnx"
    path.write_bytes(nested(32))
    assert names(path) == ["model.onnx", "w.bin"]
    for depth in (40, 1000, 5000):
        path.write_bytes(nested(depth))
        assert refusal(path) == NO_ONNX.format(path)


# --- not ONNX, or only a part ------------------------------------------------------------------------------------

NO_ONNX = "{}: expected an ONNX model; this is something else, or only a part of one"


@pytest.mark.parametrize(
    "raw",
    [
        bytes(1 << 20),
        b"\xff" * 64,
        b"\x80" * 64,
        b"<html>",
        b"PK\x03\x04",
        b"\x3a\xff\xff\xff\xff\x0f",
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x0b\x0c",
        b"\x08",
        b"\x09\x00",
        proto((7, proto((5, b"\x6a\x10abc")))),
        proto((7, proto((5, b"\x08" + b"\x80" * 11)))),
        proto((7, proto((5, tensor("x" * 5000))))),
    ],
)
def test_something_else_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(raw)
    assert refusal(path) == NO_ONNX.format(path)


def test_no_matter_where_it_is_cut_a_model_never_loses_a_file_in_silence(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"x")
    path = model(tmp_path, "w.bin")
    whole = path.read_bytes()
    start_of_graph = whole.index(b"graph") - 4
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        if size in (2, start_of_graph):
            assert names(path) == ["model.onnx"]  # a shorter message, whole by itself: the engine says what is missing
        else:
            assert refusal(path) == NO_ONNX.format(path)


@settings(max_examples=examples(300))
@given(st.data())
def test_changed_bytes(tmp_path_factory: Any, data: Any) -> None:
    directory = tmp_path_factory.getbasetemp() / "changed"
    directory.mkdir(exist_ok=True)
    (directory / "w.bin").write_bytes(b"x")
    raw = bytearray(nested(3) + onnx_bytes(tensor("w.bin"), tensor("w.bin")))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["set", "insert", "delete"]))
        if how == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif how == "insert":
            raw[at:at] = data.draw(st.binary(max_size=5))
        elif len(raw) > 10:
            del raw[at : at + 5]
    answers_or_refuses(directory / "model.onnx", bytes(raw))


@given(st.binary(min_size=1, max_size=300))
def test_random_bytes(tmp_path_factory: Any, raw: bytes) -> None:
    answers_or_refuses(tmp_path_factory.getbasetemp() / "random.onnx", raw)


def answers_or_refuses(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    try:
        files = model_files(path)
    except ModelFileError:
        return
    assert all(file.path.is_file() for file in files)
    assert len(digest(path)) == 64


# --- files that change while they are read -----------------------------------------------------------------------


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_is_not_another_one_when_it_is_read(tmp_path: Path, replaced: bool) -> None:
    (tmp_path / "w.bin").write_bytes(b"x")
    path = model(tmp_path, "w.bin")
    content = path.read_bytes()
    with Model(path) as opened:
        (tmp_path / "w.bin").unlink()
        path.unlink()
        if replaced:
            (tmp_path / "w.bin").write_bytes(b"y")
            path.write_bytes(b"another")
        with opened.open(opened.files[0]) as file:
            assert file.read() == content
        expected = r"model\.onnx: changed while it was copied" if replaced else r"w\.bin: No such file or directory$"
        with pytest.raises(ModelFileError, match=expected):
            opened.open(opened.files[1])
        with pytest.raises(ModelFileError, match="changed while it was copied"):
            opened.check_unchanged()


def test_a_file_that_is_cut_while_it_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk believes the length that the file had; a mapping of it would end the process."""
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


def test_the_variables_of_a_mindir_belong_to_it(tmp_path: Path) -> None:
    path = mindir(tmp_path, "data_1", "data_0", "data_10")
    (tmp_path / "net_variables" / "sub").mkdir()
    expected = ["net_graph.mindir", "net_variables/data_0", "net_variables/data_1", "net_variables/data_10"]
    assert names(path) == expected
    assert digest(path) == hashlib.sha256(sha256sum(*expected, cwd=tmp_path)).hexdigest()


def test_a_small_mindir_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "net.mindir"
    path.write_bytes(b"graph")
    (tmp_path / "net_variables").mkdir()
    (tmp_path / "net_variables" / "data_0").write_bytes(b"x")
    assert names(path) == ["net.mindir"]


def test_a_graph_without_its_variables_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net_graph.mindir"
    path.write_bytes(b"graph")
    expected = f"{path}: expected its weights in {tmp_path}/net_variables/, which is not a directory"
    assert refusal(path) == expected
    (tmp_path / "net_variables").write_bytes(b"x")
    assert refusal(path) == expected


def test_an_empty_variable_is_refused(tmp_path: Path) -> None:
    path = mindir(tmp_path, "data_0")
    (tmp_path / "net_variables" / "data_0").write_bytes(b"")
    assert refusal(path) == f"{tmp_path}/net_variables/data_0: the file is empty"


def test_variables_that_cannot_be_listed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mindir(tmp_path, "data_0")

    def denied(_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", denied)
    assert refusal(path) == f"{tmp_path}/net_variables: Permission denied"


# --- the real thing ----------------------------------------------------------------------------------------------


class TestOnnx:
    """Models as the onnx package writes them: it is the judge of which files belong to a model."""

    @pytest.fixture
    def onnx(self) -> Any:
        return pytest.importorskip("onnx", reason="there is no onnx for this Python")

    def weights(self, onnx: Any, *seeds: int) -> List[Any]:
        numpy = pytest.importorskip("numpy")
        values = [numpy.random.RandomState(seed).rand(64, 64).astype("<f4") for seed in seeds]
        return [onnx.numpy_helper.from_array(value, f"w{seed}") for value, seed in zip(values, seeds)]

    def save(self, onnx: Any, path: Path, tensors: Sequence[Any], **options: Any) -> None:
        graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "graph", [], [], tensors)
        onnx.save_model(onnx.helper.make_model(graph), str(path), size_threshold=0, convert_attribute=True, **options)

    def test_one_external_file(self, onnx: Any, tmp_path: Path) -> None:
        path = tmp_path / "model.onnx"
        self.save(onnx, path, self.weights(onnx, 1, 2), save_as_external_data=True, location="w.bin")
        assert names(path) == ["model.onnx", "w.bin"]
        assert digest(path) == hashlib.sha256(sha256sum("model.onnx", "w.bin", cwd=tmp_path)).hexdigest()

    def test_a_file_for_each_tensor(self, onnx: Any, tmp_path: Path) -> None:
        path = tmp_path / "model.onnx"
        options = {"save_as_external_data": True, "all_tensors_to_one_file": False}
        self.save(onnx, path, self.weights(onnx, 1, 2), **options)
        assert names(path) == ["model.onnx", "w1", "w2"]

    def test_no_external_file(self, onnx: Any, tmp_path: Path) -> None:
        path = tmp_path / "model.onnx"
        self.save(onnx, path, self.weights(onnx, 1, 2))
        assert names(path) == ["model.onnx"]
        assert digest(path) == sha256sum("model.onnx", cwd=tmp_path).split()[0].decode()

    def test_a_tensor_in_a_branch(self, onnx: Any, tmp_path: Path) -> None:
        make = onnx.helper
        constant = make.make_node("Constant", [], ["c"], value=self.weights(onnx, 1)[0])
        branch = make.make_graph([constant], "branch", [], [], self.weights(onnx, 2))
        node = make.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
        path = tmp_path / "model.onnx"
        onnx.save_model(
            make.make_model(make.make_graph([node], "graph", [], [])),
            str(path),
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            location="w.bin",
            size_threshold=0,
            convert_attribute=True,
        )
        assert names(path) == ["model.onnx", "w.bin"]

    def test_the_models_that_onnx_is_tested_with(self, onnx: Any) -> None:
        external = pytest.importorskip("onnx.external_data_helper")
        paths = [*Path(onnx.__file__).parent.rglob("*.onnx")]
        assert paths
        for path in paths:
            proto = onnx.load(str(path), load_external_data=False)
            assert not any(map(external.uses_external_data, proto.graph.initializer))
            assert names(path) == [path.name]
