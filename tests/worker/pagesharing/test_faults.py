"""What goes wrong costs memory, never an answer: on real memory of real processes, with faults put in."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightd.worker.pagesharing import Unavailable, libc, maps, remap

if TYPE_CHECKING:
    from tests.worker.pagesharing.conftest import Child, Spawn

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def loaded(spawn: Spawn, path: Path) -> Child:
    child = spawn()
    child.do(f"path = {str(path)!r}; model = weights(1, 40); before = digest(model); clean = traces()")
    return child


def unharmed(child: Child) -> bool:
    return bool(child.ask("digest(model) == before and traces() == clean and gc.isenabled()"))


def test_a_page_that_changes_after_it_was_hashed_is_not_mapped(spawn: Spawn, path: Path) -> None:
    loaded(spawn, path).do("pagesharing.hold(path)")
    child = loaded(spawn, path)
    child.do("""
match = runs.match
def change(*arguments):
    model[1000000] += 1
    return match(*arguments)
runs.match = change
joined = pagesharing.join(path)
model[1000000] -= 1
""")
    assert child.ask(f"40 * {MIB} - joined.shared_bytes == libc.PAGE")
    assert unharmed(child)


def test_a_page_that_changes_after_it_was_written_is_not_mapped(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("""
write = store.NewStore.write_page
def change(self, page, address, length):
    write(self, page, address, length)
    if not page:
        model[[1000, 500000, 1000000]] += 1
store.NewStore.write_page = change
held = pagesharing.hold(path)
after = digest(model)
model[[1000, 500000, 1000000]] -= 1
""")
    assert child.ask(f"40 * {MIB} - held.shared_bytes == 3 * libc.PAGE")
    assert unharmed(child)
    assert loaded(spawn, path).ask("pagesharing.join(path).shared_bytes") == 40 * MIB


def test_equal_hashes_are_not_believed(spawn: Spawn, path: Path) -> None:
    loaded(spawn, path).do("pagesharing.hold(path)")
    child = spawn()
    child.do(f"path = {str(path)!r}; model = weights(2, 40); before = digest(model); clean = traces()")
    child.do("""
def same(address, hashes):
    hashes[:] = store.OpenStore(path, libc.libc()).hashes()[:len(hashes)] if len(hashes) else 0
sharing.hash_pages = same
joined = pagesharing.join(path)
clean = traces()
""")
    assert child.ask("joined.shared_bytes") == 0
    assert unharmed(child)


def test_zeros_that_change_are_not_dropped(spawn: Spawn, path: Path) -> None:
    child = spawn()
    child.do(f"path = {str(path)!r}; model = np.ones(5 << 20, dtype=np.int64); model[:] = 0; clean = traces()")
    child.do("""
long_runs_of = runs.long_runs_of
def change(*arguments):
    model[3000000] = 7
    return long_runs_of(*arguments)
runs.long_runs_of = change
before = digest(model)
held = pagesharing.hold(path)
assert model[3000000] == 7
model[3000000] = 0
""")
    assert child.ask("held.zero_bytes") == 24 * MIB  # 16 of the 40 MiB are dropped, or not, as one
    assert unharmed(child)


def test_a_full_disk_in_the_middle(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("""
write = store.NewStore.write_page
def full(self, page, address, length):
    if page:
        raise OSError(28, "No space left on device")
    write(self, page, address, length)
store.NewStore.write_page = full
""")
    assert child.ask("reason(pagesharing.hold, path)") == "sharing pages failed: [Errno 28] No space left on device"
    assert unharmed(child)
    assert not list(path.parent.iterdir())


def test_a_limit_on_the_size_of_files(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do(f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20 * {MIB},) * 2)")
    assert "File too large" in child.ask("reason(pagesharing.hold, path)")
    assert unharmed(child)
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("verb", ["hold", "join"])
@pytest.mark.parametrize("unmapped", [False, True])
def test_a_mapping_that_fails_in_the_middle(spawn: Spawn, path: Path, verb: str, unmapped: bool) -> None:
    if verb == "join":
        loaded(spawn, path).do("pagesharing.hold(path)")
    child = loaded(spawn, path)
    child.do(f"""
map_over, calls = libc.Libc.map_over, []
def fail(self, address, length, fd, offset):
    calls.append(address)
    if len(calls) < 3:
        return map_over(self, address, length, fd, offset)
    if {unmapped}:
        self.unmap(address, length)
    raise OSError(12, "Cannot allocate memory")
libc.Libc.map_over = fail
""")
    assert "Cannot allocate memory" in child.ask(f"reason(pagesharing.{verb}, path)")
    assert child.ask("len(calls)") == 3
    assert unharmed(child)
    assert path.exists() == (verb == "join")
    child.do("model[:] = 4")
    assert child.ask("bool((model == 4).all())")


def test_memory_that_cannot_be_restored_ends_the_process(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("""
def lose(self, address, length, fd, offset):
    self.unmap(address, length)
    raise OSError(12, "Cannot allocate memory")
def fail(self, address, length):
    raise OSError(12, "Cannot allocate memory")
libc.Libc.map_over, libc.Libc.map_new = lose, fail
""")
    with pytest.raises(EOFError):
        child.do("pagesharing.hold(path)")
    assert child.process.wait() == -signal.SIGABRT


def test_few_mappings_are_spent_on_the_longest_runs(spawn: Spawn, path: Path) -> None:
    loaded(spawn, path).do("pagesharing.hold(path)")
    child = loaded(spawn, path)
    child.do("""
model[:1000000:3000] += 1     # many short runs, then a long one
before = digest(model)
sharing.affordable_exchanges = remap.affordable_exchanges = lambda: 3
mappings = maps.count_mappings()
joined = pagesharing.join(path)
""")
    assert 30 * MIB < child.ask("joined.shared_bytes") < 33 * MIB
    assert child.ask("maps.count_mappings() - mappings") <= 2 * 3
    assert unharmed(child)


@pytest.mark.parametrize("verb", ["hold", "join"])
def test_the_kernel_grants_no_more_mappings(spawn: Spawn, path: Path, verb: str) -> None:
    if verb == "join":
        loaded(spawn, path).do("pagesharing.hold(path)")
    if maps.mapping_limit() > 200000:
        pytest.skip("it would take too long to use up all mappings")
    child = loaded(spawn, path)
    child.do("""
import ctypes, mmap
filler = mmap.mmap(-1, maps.mapping_limit() * libc.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(filler))
protect = ctypes.CDLL(None).mprotect
protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
protect(start, len(filler), 0)
for page in range(1, (maps.mapping_limit() - maps.count_mappings() - 20) & ~1, 2):
    assert protect(start + page * libc.PAGE, libc.PAGE, mmap.PROT_READ) == 0
more = [weights(seed, 2) for seed in range(2, 8)]
model[200000:2000000:2000] += 1
before = digest(model)
sharing.affordable_exchanges = remap.affordable_exchanges = lambda: 1000
""")
    if verb == "hold":  # cut into pieces there is much to do
        child.do("""
def pieces(run):
    return [runs.Run(run.address + page * libc.PAGE, run.first + page, 1) for page in range(0, run.pages, 2)]
runs.longest = lambda every, count: [piece for run in every for piece in pieces(run)]
""")
    child.do("clean = traces()")
    assert "Cannot allocate memory" in child.ask(f"reason(pagesharing.{verb}, path)")
    child.do("assert protect(start, len(filler), mmap.PROT_READ | mmap.PROT_WRITE) == 0")
    assert unharmed(child)


def test_runs_that_fall_apart_take_no_more_mappings(spawn: Spawn, path: Path) -> None:
    loaded(spawn, path).do("pagesharing.hold(path)")
    child = loaded(spawn, path)
    child.do("""
match = runs.match
def change(*arguments):
    model[::5000] += 1
    return match(*arguments)
runs.match = change
sharing.affordable_exchanges = remap.affordable_exchanges = lambda: 7
mappings = maps.count_mappings()
joined = pagesharing.join(path)
model[::5000] -= 1
""")
    assert 0 < child.ask("maps.count_mappings() - mappings") <= 2 * 7
    assert unharmed(child)


def test_another_malloc(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("""
other = np.zeros(33 << 20, dtype=np.uint8)
libc.Libc.malloc, libc.Libc.free = (lambda self, length: other.ctypes.data), (lambda self, block: None)
""")
    assert "another malloc, or tuned" in child.ask("reason(pagesharing.hold, path)")
    assert unharmed(child)


def test_few_mappings_for_the_holder(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("""
more = [weights(seed, 2) for seed in range(2, 6)]
sharing.affordable_exchanges = lambda: 3
held = pagesharing.hold(path)
""")
    assert child.ask("held.shared_bytes") == 44 * MIB
    assert unharmed(child)
    assert loaded(spawn, path).ask("pagesharing.join(path).shared_bytes") == 40 * MIB


def test_no_mapping_left(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("maps.mapping_limit = lambda: 10")
    assert child.ask("pagesharing.hold(path).shared_bytes") == 0
    assert child.ask("pagesharing.join(path).shared_bytes") == 0
    assert unharmed(child)


def test_half_of_the_mappings_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "mapping_limit", lambda: 65530)
    monkeypatch.setattr(maps, "count_mappings", lambda: 1530)
    assert remap.affordable_exchanges() == 16000
    monkeypatch.setattr(maps, "mapping_limit", lambda: 1 << 20)
    assert remap.affordable_exchanges() == maps.MAX_REGIONS // 4


def test_what_looks_like_a_block_and_is_none_stops_everything(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("""
import mmap
trap = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
trap[:16] = (0).to_bytes(8, "little") + (4 << 20 | 2).to_bytes(8, "little")
""")
    assert child.ask("reason(pagesharing.hold, path)").startswith("found 2 malloc mappings of ")
    assert unharmed(child)
    assert not path.exists()


def test_a_block_that_cannot_be_seen_stops_everything(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("""
import ctypes
hidden = weights(2, 2)
ctypes.CDLL(None).mprotect(ctypes.c_void_p(hidden.ctypes.data - 16), ctypes.c_size_t(libc.PAGE), 1)
""")
    assert child.ask("reason(pagesharing.hold, path)").startswith("found 1 malloc mappings of ")
    assert unharmed(child)


def test_a_store_that_is_refused(spawn: Spawn, path: Path) -> None:
    loaded(spawn, path).do("pagesharing.hold(path)")
    child = loaded(spawn, path)
    path.chmod(0o644)
    assert "others may use the store" in child.ask("reason(pagesharing.join, path)")
    path.chmod(0o600)
    child.do("os.truncate(path, os.path.getsize(path) - 1)")
    assert "truncated" in child.ask("reason(pagesharing.join, path)")
    child.do("os.truncate(path, 0)")
    assert "truncated" in child.ask("reason(pagesharing.join, path)")
    path.unlink()
    assert "No such file" in child.ask("reason(pagesharing.join, path)")
    assert unharmed(child)


def test_a_file_that_is_in_the_way_is_kept(spawn: Spawn, path: Path) -> None:
    path.write_text("mine")
    assert "File exists" in loaded(spawn, path).ask("reason(pagesharing.hold, path)")
    assert path.read_text() == "mine"


def test_tracemalloc_is_in_the_way(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("import tracemalloc; tracemalloc.start()")
    assert "tracemalloc" in child.ask("reason(pagesharing.hold, path)")
    child.do("tracemalloc.stop()")
    assert unharmed(child)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("os.confstr = lambda name: None", "another C library"),
        ("os.confstr = lambda name: 1 / 0 if name == 0 else 'musl 1.2'", "another C library"),
        ("sys.platform = 'darwin'", "needs Linux, this is darwin"),
        ("libc.platform.machine = lambda: 'riscv64'", "x86_64 and aarch64, this is riscv64"),
        ("sys.byteorder = 'big'", "little-endian"),
    ],
)
def test_platforms_without_page_sharing(spawn: Spawn, path: Path, change: str, reason: str) -> None:
    child = loaded(spawn, path)
    child.do(change)
    assert reason in child.ask("reason(pagesharing.hold, path)")
    assert reason in child.ask("reason(pagesharing.join, path)")
    child.do("pagesharing.prepare()")
    assert not path.exists()
    assert unharmed(child)


def test_a_c_library_without_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", unknown)
    with pytest.raises(Unavailable, match="another C library"):
        libc.libc()
