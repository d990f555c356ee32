"""Fault injection for page sharing in real processes: a fault may cost memory, but never changes an answer."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Callable

import pytest

from weightd_worker import pagesharing
from weightd_worker.pagesharing import PageSharingUnavailable, chunks, libc, remap

if TYPE_CHECKING:
    from tests.worker.pagesharing.conftest import Child, Spawn

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def loaded(spawn: Spawn, path: Path, seed: int = 1) -> Child:
    """Return a process with 40 MiB of weights: two and a half of the blocks in which pages are exchanged."""
    child = spawn()
    child.do(f"path = {str(path)!r}; model = weights({seed}, 40); before = digest(model); clean = traces()")
    return child


def unharmed(child: Child) -> bool:
    return bool(child.ask("digest(model) == before and traces() == clean and gc.isenabled()"))


# --- faults that prevent sharing --------------------------------------------------------------------------------

FULL_DISK = """
write = store.NewStore.write_pages
def full(self, page, address, length):
    if page:
        raise OSError(28, "No space left on device")
    write(self, page, address, length)
store.NewStore.write_pages = full
"""
THIRD_MAPPING_FAILS = """
map_over, calls = libc.Libc.map_over, []
def fail(self, address, length, fd, offset):
    calls.append(address)
    if len(calls) < 3:
        return map_over(self, address, length, fd, offset)
    self.unmap(address, length)
    raise OSError(12, "Cannot allocate memory")
libc.Libc.map_over = fail
"""
OTHER_MALLOC = """
other = np.zeros(33 << 20, dtype=np.uint8)
libc.Libc.malloc, libc.Libc.free = (lambda self, length: other.ctypes.data), (lambda self, block: None)
"""
LOOKS_LIKE_A_BLOCK = """
trap = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
trap[:16] = (0).to_bytes(8, "little") + (4 << 20 | 2).to_bytes(8, "little")
"""
HIDDEN_BLOCK = """
hidden = weights(2, 2)
ctypes.CDLL(None).mprotect(ctypes.c_void_p(hidden.ctypes.data - 16), ctypes.c_size_t(libc.PAGE), 1)
"""
# The header that malloc leaves behind is outdated.
MOVED_ALIGNED_BLOCK = """
c = ctypes.CDLL(None)
c.memalign.restype = c.realloc.restype = ctypes.c_void_p
block = c.memalign(ctypes.c_size_t(1 << 16), ctypes.c_size_t(3 << 20))
block = c.realloc(ctypes.c_void_p(block), ctypes.c_size_t(9 << 20))
"""


@pytest.mark.parametrize(
    ("verb", "fault", "reason"),
    [
        ("export_pages", FULL_DISK, "sharing pages failed: [Errno 28] No space left on device"),
        (
            "export_pages",
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20 * MIB,) * 2)",
            "File too large",
        ),
        ("export_pages", THIRD_MAPPING_FAILS, "Cannot allocate memory"),
        ("attach_pages", THIRD_MAPPING_FAILS, "Cannot allocate memory"),
        ("export_pages", OTHER_MALLOC, "it was replaced or tuned"),
        ("export_pages", LOOKS_LIKE_A_BLOCK, "found 2 malloc mappings of "),
        ("export_pages", HIDDEN_BLOCK, "found 1 malloc mappings of "),
        ("export_pages", MOVED_ALIGNED_BLOCK, "malloc counts 2 of"),
        ("export_pages", "import tracemalloc; tracemalloc.start()", "tracemalloc"),
        ("attach_pages", "os.truncate(path, os.path.getsize(path) - 1)", "truncated"),
    ],
)
def test_failed_sharing_keeps_memory_intact(verb: str, fault: str, reason: str, spawn: Spawn, path: Path) -> None:
    if verb == "attach_pages":
        loaded(spawn, path).do("pagesharing.export_pages(path)")
        path.chmod(0o600)
    child = loaded(spawn, path)
    child.do(fault)
    assert reason in child.ask(f"reason(pagesharing.{verb}, path)")
    assert unharmed(child)
    assert path.exists() == (verb == "attach_pages")
    child.do("model[:] = 4")
    assert child.ask("bool((model == 4).all())")


def test_keeps_existing_file(spawn: Spawn, path: Path) -> None:
    path.write_text("mine")
    assert "File exists" in spawn().ask(f"reason(pagesharing.export_pages, {str(path)!r})")
    assert path.read_text() == "mine"


def returning(answer: object) -> Callable[..., object]:
    def call(*_: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return call


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        (os, "confstr", returning(None), "another C library"),
        (os, "confstr", returning("musl 1.2"), "another C library"),
        (os, "confstr", returning(ValueError("unrecognized configuration name")), "another C library"),
        (platform, "machine", returning("riscv64"), "x86_64 or aarch64, this is riscv64"),
        (sys, "byteorder", "big", "little-endian"),
        (sys, "platform", "darwin", "needs Linux, this is darwin"),
    ],
)
def test_platforms_without_page_sharing(
    owner: object, name: str, value: object, reason: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    monkeypatch.delattr(libc, "_load")
    for verb in (pagesharing.export_pages, pagesharing.attach_pages):
        with pytest.raises(PageSharingUnavailable, match=reason):
            verb(str(path))
    pagesharing.prepare()
    assert pagesharing.start_build() is None
    assert not path.exists()


class FailingLibc(libc.Libc):
    """A C library that loses the memory over which it maps a file, and cannot map new memory."""

    def __init__(self) -> None:
        pass

    def is_equal(self, one: int, other: int, length: int) -> bool:
        return True

    def map_over(self, address: int, length: int, fd: int, offset: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    def is_mapped(self, address: int, length: int) -> bool:
        return False

    def map_new(self, address: int, length: int) -> None:
        raise OSError(12, "Cannot allocate memory")


def test_lost_memory_ends_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def abort() -> None:
        raise SystemExit("aborted")

    monkeypatch.setattr(os, "abort", abort)
    with pytest.raises(SystemExit, match="aborted"):
        remap.Remapper(FailingLibc(), -1, 0).share(1 << 40, 0, libc.PAGE)


# --- pages that are left out ------------------------------------------------------------------------------------


def test_skips_page_changed_after_hashing(spawn: Spawn, path: Path) -> None:
    loaded(spawn, path).do("pagesharing.export_pages(path)")
    child = loaded(spawn, path)
    child.do("""
find_matches = runs.find_matches
def change(*arguments):
    model[1000000] += 1
    return find_matches(*arguments)
runs.find_matches = change
joined = pagesharing.attach_pages(path)
model[1000000] -= 1
""")
    assert child.ask("40 * MIB - joined.shared_bytes == libc.PAGE")
    assert unharmed(child)


def test_skips_page_changed_after_writing(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("""
write = store.NewStore.write_pages
def change(self, page, address, length):
    write(self, page, address, length)
    if not page:
        model[[1000, 500000, 1000000]] += 1
store.NewStore.write_pages = change
held = pagesharing.export_pages(path)
model[[1000, 500000, 1000000]] -= 1
""")
    assert child.ask("40 * MIB - held.shared_bytes == 3 * libc.PAGE")
    assert unharmed(child)
    assert loaded(spawn, path).ask("pagesharing.attach_pages(path).shared_bytes") == 40 * MIB


def test_compares_pages_with_equal_hashes(spawn: Spawn, path: Path) -> None:
    loaded(spawn, path).do("pagesharing.export_pages(path)")
    child = loaded(spawn, path, seed=2)
    child.do("""
def same(address, hashes):
    hashes[:] = store.OpenStore(path, libc.libc()).read_hashes()[:len(hashes)] if len(hashes) else 0
sharing.hash_pages = same
joined = pagesharing.attach_pages(path)
clean = traces()
""")
    assert child.ask("joined.shared_bytes") == 0
    assert unharmed(child)


def test_keeps_zeros_that_change(spawn: Spawn, path: Path) -> None:
    child = spawn()
    child.do(f"path = {str(path)!r}; model = np.ones(5 << 20, dtype=np.int64); model[:] = 0; clean = traces()")
    child.do("""
keep_long_runs = runs.keep_long_runs
def change(*arguments):
    model[3000000] = 7
    return keep_long_runs(*arguments)
runs.keep_long_runs = change
before = digest(model)
held = pagesharing.export_pages(path)
assert model[3000000] == 7
model[3000000] = 0
""")
    # 16 of the 40 MiB are one unit, which is dropped as a whole or not at all.
    assert child.ask("held.zero_bytes") == 24 * MIB
    assert unharmed(child)


# --- limit of mappings ------------------------------------------------------------------------------------------

# Many short runs and one long one; or one run that is split while it is mapped.
SHORT_RUNS = "model[:1000000:3000] += 1; before = digest(model)"
PIECES = """
find_matches = runs.find_matches
def change(*arguments):
    global before
    model[::5000] += 1
    before = digest(model)
    return find_matches(*arguments)
runs.find_matches = change
"""


@pytest.mark.parametrize(
    ("change", "exchanges", "least", "most"), [(SHORT_RUNS, 3, 30 * MIB, 33 * MIB), (PIECES, 7, 1, MIB)]
)
def test_longest_runs_get_the_available_mappings(
    change: str, exchanges: int, least: int, most: int, spawn: Spawn, path: Path
) -> None:
    loaded(spawn, path).do("pagesharing.export_pages(path)")
    child = loaded(spawn, path)
    child.do(change)
    child.do(f"sharing.affordable_exchanges = remap.affordable_exchanges = lambda: {exchanges}")
    child.do("mappings = chunks.count_mappings(); joined = pagesharing.attach_pages(path)")
    assert least <= child.ask("joined.shared_bytes") <= most
    assert 0 < child.ask("chunks.count_mappings() - mappings") <= 2 * exchanges
    assert unharmed(child)


def test_holder_with_few_mappings_shares_longest_runs(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("more = [weights(seed, 2) for seed in range(2, 6)]; sharing.affordable_exchanges = lambda: 3")
    assert child.ask("pagesharing.export_pages(path).shared_bytes") == 44 * MIB
    assert unharmed(child)
    assert loaded(spawn, path).ask("pagesharing.attach_pages(path).shared_bytes") == 40 * MIB


def test_shares_nothing_without_mappings(spawn: Spawn, path: Path) -> None:
    child = loaded(spawn, path)
    child.do("chunks.mapping_limit = lambda: 10")
    assert child.ask(
        "[getattr(pagesharing, verb)(path).shared_bytes for verb in ('export_pages', 'attach_pages')]"
    ) == [0, 0]
    assert unharmed(child)


def test_leaves_half_of_the_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "mapping_limit", lambda: 65530)
    monkeypatch.setattr(chunks, "count_mappings", lambda: 1530)
    assert remap.affordable_exchanges() == 16000
    monkeypatch.setattr(chunks, "mapping_limit", lambda: 1 << 20)
    assert remap.affordable_exchanges() == chunks.MAX_REGIONS // 4
