"""export_pages and attach_pages, on real memory of real processes."""

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
    """A process with 3 x 8 MiB of weights in a store."""
    child = loaded(spawn, path)
    child.do("done = pagesharing.export_pages(path)")
    return child


def worker(spawn: Spawn, path: Path) -> Child:
    """A process with the same weights, joined."""
    child = loaded(spawn, path)
    child.do("done = pagesharing.attach_pages(path)")
    return child


def loaded(spawn: Spawn, path: Path) -> Child:
    child = spawn()
    child.do(f"path = {str(path)!r}; model = [weights(seed, 8) for seed in (1, 2, 3)]; before = digest(*model)")
    child.do("clean = traces(); anonymous = rollup('Anonymous')")
    return child


def test_all_but_the_first_page_of_each_block_is_shared_and_memory_falls(spawn: Spawn, path: Path) -> None:
    first = holder(spawn, path)
    others = [worker(spawn, path) for _ in range(3)]
    for child in [first, *others]:
        assert child.ask("[done.shared_bytes, done.examined_bytes, done.zero_bytes]") == [24 * MIB, 24 * MIB, 0]
        assert 0 < child.ask("done.duration_s") < 60
        assert child.ask("digest(*model) == before")  # and so all of it has been read
        assert child.ask("anonymous - rollup('Anonymous')") > 20 * MIB
        # No file stays open, and the collector is as before.
        assert child.ask("[traces() - clean, gc.isenabled()]") == [0, True]
    of_the_store = "sum(int(each.split()[1]) << 10 for each in pss())"
    first.do("""
def pss():
    "What of the store is counted as this process's, shared by those who have it."
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


def test_nobody_depends_on_the_holder_or_on_the_name_of_the_store(spawn: Spawn, path: Path) -> None:
    first, second = holder(spawn, path), worker(spawn, path)
    second.do("pagesharing.evict(path)")
    path.unlink()
    first.kill()
    assert second.ask("digest(*model) == before")
    second.do("del model[1]")
    assert second.ask("digest(*model) == digest(weights(1, 8), weights(3, 8))")


def test_eviction_leaves_what_is_read_again(spawn: Spawn, path: Path) -> None:
    child = holder(spawn, path)
    child.do("pagesharing.evict(path)")
    if not child.ask("pagesharing.is_on_disk(path)"):
        pytest.skip("the temporary directory is in memory")
    assert child.ask("pagesharing.resident_bytes(path)") == 0
    child.do("model[0].sum(); pagesharing.evict(path)")
    assert 8 * MIB <= child.ask("pagesharing.resident_bytes(path)") < 10 * MIB
    assert child.ask("digest(*model) == before")


def test_equal_pages_in_other_places_are_found_and_others_left_alone(spawn: Spawn, path: Path) -> None:
    holder(spawn, path)
    other = spawn()
    other.do("model = [weights(3, 8), weights(9, 8), weights(2, 8)]; model[0][300000:300004] = 7")
    other.do(f"before = digest(*model); joined = pagesharing.attach_pages({str(path)!r})")
    assert other.ask("[16 * MIB - joined.shared_bytes, joined.examined_bytes]") == [other.ask("libc.PAGE"), 24 * MIB]
    assert other.ask("digest(*model) == before")


def test_zeros_cost_nothing(spawn: Spawn, path: Path) -> None:
    child = spawn()
    child.do("model = weights(1, 8); model[100000:900000] = 0; zeros = np.ones(1 << 20, dtype=np.int64); zeros[:] = 0")
    child.do("before = digest(model, zeros); anonymous = rollup('Anonymous')")
    child.do(f"held = pagesharing.export_pages({str(path)!r})")
    # Without the zeros it would be less than 3 MiB; modules that are compiled meanwhile take 2.
    assert child.ask("anonymous - rollup('Anonymous')") > 12 * MIB
    assert child.ask("held.zero_bytes") > 13 * MIB
    assert child.ask("[held.shared_bytes + held.zero_bytes, held.examined_bytes]") == [16 * MIB, 16 * MIB]
    assert child.ask("digest(model, zeros) == before")
    child.do("zeros[:] = 5; model[:] = 6")
    assert child.ask("bool((zeros == 5).all() and (model == 6).all())")


def test_where_nothing_is_left_to_share_nothing_is_done(spawn: Spawn, tmp_path: Path) -> None:
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


def test_a_store_in_memory_will_do(spawn: Spawn) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    path = Path("/dev/shm") / f"weightd-test-{id(spawn)}"
    try:
        holder(spawn, path)
        assert worker(spawn, path).ask("done.shared_bytes") == 24 * MIB
    finally:
        path.unlink()


def test_prepare_gives_blocks_their_own_mappings(spawn: Spawn, path: Path) -> None:
    child = spawn(threshold=32 << 20)
    child.do("hidden = weights(1, 8); pagesharing.prepare(); model = weights(2, 8)")
    assert child.ask(f"pagesharing.export_pages({str(path)!r}).shared_bytes") == 8 * MIB


def test_of_a_model_smaller_blocks_are_shared_too_but_not_those_of_before_or_after(spawn: Spawn, path: Path) -> None:
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
        # What each predict takes and frees does not cost a mapping each time.
        assert child.ask("blocks == libc.libc().mapped_blocks()")


def test_a_malloc_that_counts_in_32_bits(spawn: Spawn, path: Path) -> None:
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


def test_only_large_blocks_of_malloc_are_found_and_never_our_own(spawn: Spawn) -> None:
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


def test_any_use_of_malloc_is_understood(spawn: Spawn, tmp_path: Path) -> None:
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
        # What the others save is more than a holder costs, or is not.
        (8, 2, "forked", True),
        (7, 2, "forked", False),
        (1, 9, "forked", True),
        (8, 2, "spawned", False),
        (32, 2, "spawned", True),
        # One alone saves nothing of that, but the next one is there sooner.
        (63, 1, "forked", False),
        (64, 1, "forked", True),
        (0, 100, "forked", False),
        # Not asked, as on a card.
        (0, 0, "spawned", True),
    ],
)
def test_a_holder_is_worth_what_it_saves(mib: int, users: int, origin: str, worth: bool) -> None:
    assert is_holder_worthwhile(mib << 20, users, HOLDER_COST_BYTES[origin]) is worth
