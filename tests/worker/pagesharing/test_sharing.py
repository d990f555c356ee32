"""Tests of export_pages and attach_pages on the memory of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.worker.pagesharing.conftest import Child, Spawn
from weightd_worker.process_memory import HOLDER_COST_BYTES, is_holder_worthwhile

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def holder(spawn: Spawn, path: Path) -> Child:
    """Return a process that has exported 3 x 8 MiB of weights to a store."""
    child = loaded(spawn, path)
    child.do("done = pagesharing.export_pages(path)")
    return child


def worker(spawn: Spawn, path: Path) -> Child:
    """Return a process with the same weights that has attached to the store."""
    child = loaded(spawn, path)
    child.do("done = pagesharing.attach_pages(path)")
    return child


def loaded(spawn: Spawn, path: Path) -> Child:
    child = spawn()
    child.do(f"path = {str(path)!r}; model = [weights(seed, 8) for seed in (1, 2, 3)]; before = digest(*model)")
    child.do("clean = traces(); anonymous = rollup('Anonymous')")
    return child


def test_shares_all_but_first_page_of_each_block(spawn: Spawn, path: Path) -> None:
    first = holder(spawn, path)
    others = [worker(spawn, path) for _ in range(3)]
    for child in [first, *others]:
        assert child.ask("[done.shared_bytes, done.examined_bytes, done.zero_bytes]") == [24 * MIB, 24 * MIB, 0]
        assert 0 < child.ask("done.duration_s") < 60
        assert child.ask("digest(*model) == before")  # The digest reads all pages.
        assert child.ask("anonymous - rollup('Anonymous')") > 20 * MIB
        # No file stays open, and the garbage collector is enabled again.
        assert child.ask("[traces() - clean, gc.isenabled()]") == [0, True]
    of_the_store = "sum(int(each.split()[1]) << 10 for each in pss())"
    first.do("""
def pss():
    "Return this process's proportional share of the store's mapped pages."
    ours = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            ours = path in line if "-" in line.split()[0] else ours
            if ours and line.startswith("Pss:"):
                yield line
""")
    assert 5 * MIB < first.ask(of_the_store) < 7 * MIB
    others[0].kill()
    others[1].kill()
    assert 11 * MIB < first.ask(of_the_store) < 13 * MIB


def test_writes_stay_private(spawn: Spawn, path: Path) -> None:
    first, second, third = holder(spawn, path), worker(spawn, path), worker(spawn, path)
    content = path.read_bytes()
    second.do("model[0][:] += 1; model[1][70000] = 5; after = digest(*model)")
    first.do("model[2][:] -= 1; after = digest(*model)")
    assert path.read_bytes() == content
    assert third.ask("digest(*model) == before")
    for child in (first, second):
        assert child.ask("digest(*model) == after != before")


def test_worker_survives_holder_and_unlinked_store(spawn: Spawn, path: Path) -> None:
    first, second = holder(spawn, path), worker(spawn, path)
    second.do("pagesharing.evict(path)")
    path.unlink()
    first.kill()
    assert second.ask("digest(*model) == before")
    second.do("del model[1]")
    assert second.ask("digest(*model) == digest(weights(1, 8), weights(3, 8))")


def test_evicted_pages_are_read_again(spawn: Spawn, path: Path) -> None:
    child = holder(spawn, path)
    child.do("pagesharing.evict(path)")
    if not child.ask("pagesharing.is_on_disk(path)"):
        pytest.skip("the temporary directory is in memory")
    assert child.ask("pagesharing.resident_bytes(path)") == 0
    child.do("model[0].sum(); pagesharing.evict(path)")
    assert 8 * MIB <= child.ask("pagesharing.resident_bytes(path)") < 10 * MIB
    assert child.ask("digest(*model) == before")


def test_matches_equal_pages_at_other_addresses(spawn: Spawn, path: Path) -> None:
    holder(spawn, path)
    other = spawn()
    other.do("model = [weights(3, 8), weights(9, 8), weights(2, 8)]; model[0][300000:300004] = 7")
    other.do(f"before = digest(*model); joined = pagesharing.attach_pages({str(path)!r})")
    assert other.ask("[16 * MIB - joined.shared_bytes, joined.examined_bytes]") == [other.ask("libc.PAGE"), 24 * MIB]
    assert other.ask("digest(*model) == before")


def test_zero_pages_use_no_memory(spawn: Spawn, path: Path) -> None:
    child = spawn()
    child.do("model = weights(1, 8); model[100000:900000] = 0; zeros = np.ones(1 << 20, dtype=np.int64); zeros[:] = 0")
    child.do("before = digest(model, zeros); anonymous = rollup('Anonymous')")
    child.do(f"held = pagesharing.export_pages({str(path)!r})")
    # Without dropped zeros the difference would be below 3 MiB; compiled modules may use 2 MiB of it.
    assert child.ask("anonymous - rollup('Anonymous')") > 12 * MIB
    assert child.ask("held.zero_bytes") > 13 * MIB
    assert child.ask("[held.shared_bytes + held.zero_bytes, held.examined_bytes]") == [16 * MIB, 16 * MIB]
    assert child.ask("digest(model, zeros) == before")
    child.do("zeros[:] = 5; model[:] = 6")
    assert child.ask("bool((zeros == 5).all() and (model == 6).all())")


def test_shares_nothing_twice(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn()
    child.do(f"empty, other = {str(tmp_path / 'empty')!r}, {str(tmp_path / 'other')!r}; gc.disable()")
    child.do("done = [pagesharing.export_pages(empty), pagesharing.attach_pages(empty)]")
    child.do("model = weights(1, 8); before = digest(model)")
    child.do(
        "done += [pagesharing.attach_pages(empty), pagesharing.export_pages(other), pagesharing.attach_pages(other)]"
    )
    child.do(f"done += [pagesharing.export_pages({str(tmp_path / 'again')!r})]")
    assert child.ask("[each.shared_bytes for each in done]") == [0, 0, 0, 8 * MIB, 0, 0]
    assert child.ask("[each.examined_bytes for each in done]") == [0, 0, 8 * MIB, 8 * MIB, 0, 0]
    assert child.ask("digest(model) == before and not gc.isenabled()")


def test_store_may_lie_in_memory(spawn: Spawn) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    path = Path("/dev/shm") / f"weightd-test-{id(spawn)}"
    try:
        holder(spawn, path)
        assert worker(spawn, path).ask("done.shared_bytes") == 24 * MIB
    finally:
        path.unlink()


def test_prepare_maps_blocks_separately(spawn: Spawn, path: Path) -> None:
    child = spawn(threshold=32 << 20)
    child.do("hidden = weights(1, 8); pagesharing.prepare(); model = weights(2, 8)")
    assert child.ask(f"pagesharing.export_pages({str(path)!r}).shared_bytes") == 8 * MIB


def test_shares_small_blocks_only_of_the_build(spawn: Spawn, path: Path) -> None:
    for verb in ("export_pages", "attach_pages"):
        child = spawn(threshold=128 << 10)
        child.do(f"""
piece = lambda seed: np.random.RandomState(seed).bytes(256 << 10)
earlier, before = piece(0), pagesharing.start_build()
model = [piece(seed) for seed in (1, 2, 3)]
known = digest(*model)
done = pagesharing.{verb}({str(path)!r}, before)
blocks = libc.libc().mapped_blocks()
later = piece(4)
""")
        assert child.ask("done.shared_bytes") == 3 * (256 << 10)
        assert child.ask("digest(*model) == known")
        # The blocks that each predict allocates and frees do not cost a mapping each time.
        assert child.ask("blocks == libc.libc().mapped_blocks()")


def test_fork_inherits_the_list_of_mappings(spawn: Spawn, path: Path) -> None:
    child = spawn()
    child.do(f"""
piece = lambda seed: np.random.RandomState(seed).bytes(256 << 10)
pagesharing.prepare(), pagesharing.prepare_fork()
def build():
    earlier = piece(0)
    chunks.mapping_starts = None  # a call would fail
    before = pagesharing.start_build()
    model = [piece(seed) for seed in (1, 2, 3)]
    known = digest(*model)
    done = pagesharing.export_pages({str(path)!r}, before)
    return done.shared_bytes, digest(*model) == known
""")
    assert child.ask("build()") == [3 * (256 << 10), True]


def test_malloc_with_32_bit_counters(spawn: Spawn, path: Path) -> None:
    child = spawn()
    child.do("""
class Old:
    library = ctypes.CDLL(None, use_errno=True)
    def __getattr__(self, name):
        if name == "mallinfo2":
            raise AttributeError(name)
        return getattr(self.library, name)
libc._load = lambda: libc.Libc(Old())
model = weights(1, 8)
huge = np.empty(5 << 30, dtype=np.uint8)     # no more than addresses
""")
    assert child.ask("libc.libc().mapped_blocks().modulus") == 2**32
    assert child.ask(f"pagesharing.export_pages({str(path)!r}).shared_bytes") == 8 * MIB


def test_finds_only_large_malloc_blocks(spawn: Spawn) -> None:
    child = spawn(threshold=128 << 10)
    child.do("""
model = [weights(seed, 8) for seed in (1, 2)]
small = bytearray((1 << 20) - 8192)
arena = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
arena[:] = b"x" * len(arena)
found = [chunks.find_extents(libc.libc()) for _ in range(3)]
expected = sorted((a.ctypes.data - 16 + libc.PAGE, a.ctypes.data - 16 + libc.PAGE + a.nbytes) for a in model)
""")
    assert child.ask("found == [expected] * 3")


def test_handles_any_use_of_malloc(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn()
    child.do("""
import random
c = ctypes.CDLL(None)
for name, kinds in dict(malloc="z", realloc="pz", free="p", memalign="zz", calloc="zz").items():
    getattr(c, name).restype = ctypes.c_void_p
    getattr(c, name).argtypes = [dict(z=ctypes.c_size_t, p=ctypes.c_void_p)[kind] for kind in kinds]
dice = random.Random(1)
blocks, aligned = {}, set()
def size():
    return dice.choice([100, 5000, 1 << 17, 1 << 20, 3 << 20]) + dice.randrange(1 << 20)
def put(block, length):
    blocks[block] = bytes(dice.randrange(256) for _ in range(64)) * (length // 64)
    ctypes.memmove(block, blocks[block], len(blocks[block]))
def step():
    verb = dice.choice("malloc calloc memalign memalign realloc realloc free".split()) if blocks else "malloc"
    length = size()
    if verb in ("realloc", "free"):
        block = dice.choice(sorted(blocks))
        if verb == "realloc" and block in aligned:
            return  # its header would be out of date
        data = blocks.pop(block)
        aligned.discard(block)
        if verb == "free":
            return c.free(block)
        block = c.realloc(block, length)
        kept = min(len(data), length // 64 * 64)
        assert ctypes.string_at(block, kept) == data[:kept]
    else:
        block = {"malloc": lambda: c.malloc(length), "calloc": lambda: c.calloc(1, length),
                 "memalign": lambda: c.memalign(dice.choice([64, 4096, 65536, 2 << 20]), length)}[verb]()
        if verb == "memalign":
            aligned.add(block)
    put(block, length)
def right():
    return all(ctypes.string_at(block, len(data)) == data for block, data in blocks.items())
""")
    for turn in range(3):
        child.do("for _ in range(40): step()")
        child.do(f"pagesharing.export_pages({str(tmp_path / str(turn))!r})")
        assert child.ask("right()")
        child.do("for _ in range(20): step()")
        child.do(f"joined = pagesharing.attach_pages({str(tmp_path / str(turn))!r})")
        assert child.ask("right()")
    child.do("for block in blocks: c.free(block)\nblocks.clear()")
    assert child.ask("libc.libc().mapped_blocks().block_count") <= 1


@pytest.mark.parametrize(
    ("mib", "users", "origin", "worth"),
    [
        # The savings of the other workers exceed, or do not exceed, the cost of a holder.
        (8, 2, "forked", True),
        (7, 2, "forked", False),
        (1, 9, "forked", True),
        (8, 2, "spawned", False),
        (32, 2, "spawned", True),
        # One worker saves none of this memory, but the next worker starts sooner.
        (63, 1, "forked", False),
        (64, 1, "forked", True),
        (0, 100, "forked", False),
        # No memory figures are given, as on a card.
        (0, 0, "spawned", True),
    ],
)
def test_holder_is_worthwhile_if_it_saves_memory(mib: int, users: int, origin: str, worth: bool) -> None:
    assert is_holder_worthwhile(mib << 20, users, HOLDER_COST_BYTES[origin]) is worth
