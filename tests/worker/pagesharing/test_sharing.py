"""hold and join, on real memory of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.worker.pagesharing.conftest import Child, Spawn

MIB = 1 << 20
PAGE = "libc.PAGE"


def holder(spawn: Spawn, path: Path, **settings: str) -> Child:
    """A process with 3 x 8 MiB of weights in a store."""
    child = spawn(**settings)
    child.do("model = [weights(seed, 8) for seed in (1, 2, 3)]; before = digest(*model)")
    child.do(f"held = pagesharing.hold({str(path)!r})")
    return child


def worker(spawn: Spawn, path: Path, **settings: str) -> Child:
    """A process with the same weights, joined."""
    child = spawn(**settings)
    child.do("model = [weights(seed, 8) for seed in (1, 2, 3)]; before = digest(*model)")
    child.do(f"joined = pagesharing.join({str(path)!r})")
    return child


def test_all_but_the_first_page_of_each_block_is_shared(spawn: Spawn, tmp_path: Path) -> None:
    first, second = holder(spawn, tmp_path / "store"), worker(spawn, tmp_path / "store")
    for child, result in ((first, "held"), (second, "joined")):
        assert child.ask(f"{result}.shared_bytes") == 3 * 8 * MIB
        assert child.ask(f"{result}.examined_bytes") == 3 * 8 * MIB
        assert child.ask(f"{result}.zero_bytes") == 0
        assert 0 < child.ask(f"{result}.seconds") < 60
        assert child.ask("digest(*model) == before")


def test_memory_falls(spawn: Spawn, tmp_path: Path) -> None:
    first = spawn()
    first.do("model = [weights(seed, 8) for seed in (1, 2, 3)]; before = digest(*model)")
    alone = first.ask("rollup('Anonymous')")
    first.do(f"pagesharing.hold({str(tmp_path / 'store')!r})")
    others = [worker(spawn, tmp_path / "store") for _ in range(3)]
    for child in [first, *others]:
        assert child.ask("digest(*model) == before")  # and so all of it has been read
        assert child.ask("rollup('Anonymous')") < alone - 20 * MIB
    shared = first.ask("rollup('Pss')")
    others[0].kill()
    others[1].kill()
    # 24 MiB over two processes instead of four
    assert 4 * MIB < first.ask("rollup('Pss')") - shared < 12 * MIB


def test_writes_stay_private(spawn: Spawn, tmp_path: Path) -> None:
    path = tmp_path / "store"
    first = holder(spawn, path)
    second, third = worker(spawn, path), worker(spawn, path)
    content = path.read_bytes()
    second.do("model[0][:] += 1; model[1][70000] = 5; after = digest(*model)")
    first.do("model[2][:] -= 1; after = digest(*model)")
    assert path.read_bytes() == content
    assert third.ask("digest(*model) == before")
    assert second.ask("digest(*model) == after != before")
    assert first.ask("digest(*model) == after != before")
    assert worker(spawn, path).ask("joined.shared_bytes") == 3 * 8 * MIB


def test_nobody_depends_on_the_holder_or_on_the_name_of_the_store(spawn: Spawn, tmp_path: Path) -> None:
    path = tmp_path / "store"
    first, second = holder(spawn, path), worker(spawn, path)
    second.do(f"pagesharing.evict({str(path)!r})")
    path.unlink()
    first.kill()
    assert second.ask("digest(*model) == before")
    second.do("del model[1]")
    assert second.ask("digest(*model) == digest(weights(1, 8), weights(3, 8))")


def test_eviction_leaves_what_is_read_again(spawn: Spawn, tmp_path: Path) -> None:
    path = tmp_path / "store"
    child = holder(spawn, path)
    child.do(f"path = {str(path)!r}; pagesharing.evict(path)")
    if not child.ask("pagesharing.on_disk(path)"):
        pytest.skip("the temporary directory is in memory")
    assert child.ask("pagesharing.resident_bytes(path)") == 0
    child.do("model[0].sum()")
    child.do("pagesharing.evict(path)")
    assert 8 * MIB <= child.ask("pagesharing.resident_bytes(path)") < 10 * MIB
    assert child.ask("digest(*model) == before")


def test_other_content_is_left_alone(spawn: Spawn, tmp_path: Path) -> None:
    holder(spawn, tmp_path / "store")
    other = spawn()
    other.do("model = [weights(4, 8)]; before = digest(*model)")
    other.do(f"joined = pagesharing.join({str(tmp_path / 'store')!r})")
    assert other.ask("joined.shared_bytes") == 0
    assert other.ask("joined.examined_bytes") == 8 * MIB
    assert other.ask("digest(*model) == before")


def test_equal_pages_in_other_places_are_found(spawn: Spawn, tmp_path: Path) -> None:
    holder(spawn, tmp_path / "store")
    other = spawn()
    other.do("model = [weights(3, 8), weights(9, 8), weights(2, 8)]")
    other.do("model[0][300000:300004] = 7; before = digest(*model)")
    other.do(f"joined = pagesharing.join({str(tmp_path / 'store')!r})")
    assert other.ask(f"2 * 8 * {MIB} - joined.shared_bytes") == other.ask(PAGE)
    assert other.ask("digest(*model) == before")


def test_zeros_cost_nothing(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn()
    child.do("model = weights(1, 8); model[100000:900000] = 0; zeros = np.ones(1 << 20, dtype=np.int64); zeros[:] = 0")
    child.do("before = digest(model, zeros); anonymous = rollup('Anonymous')")
    child.do(f"held = pagesharing.hold({str(tmp_path / 'store')!r})")
    assert child.ask("anonymous - rollup('Anonymous')") > 14 * MIB
    assert child.ask("held.zero_bytes") > 13 * MIB
    assert child.ask("held.shared_bytes + held.zero_bytes == held.examined_bytes")
    assert child.ask("held.examined_bytes") == 16 * MIB
    assert child.ask("digest(model, zeros) == before")
    child.do("zeros[:] = 5; model[:] = 6")
    assert child.ask("bool((zeros == 5).all() and (model == 6).all())")


def test_nothing_to_share(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn()
    child.do(f"path = {str(tmp_path / 'store')!r}; held = pagesharing.hold(path); joined = pagesharing.join(path)")
    assert child.ask("[held.shared_bytes, held.examined_bytes, joined.shared_bytes]") == [0, 0, 0]
    child.do("model = weights(1, 8); joined = pagesharing.join(path)")
    assert child.ask("[joined.shared_bytes, joined.examined_bytes]") == [0, 8 * MIB]


def test_doing_it_again_does_nothing(spawn: Spawn, tmp_path: Path) -> None:
    holder(spawn, tmp_path / "store")
    child = worker(spawn, tmp_path / "store")
    child.do(f"again = pagesharing.join({str(tmp_path / 'store')!r})")
    child.do(f"held = pagesharing.hold({str(tmp_path / 'other')!r})")
    assert child.ask("[again.shared_bytes, again.examined_bytes, held.shared_bytes]") == [0, 0, 0]
    assert child.ask("digest(*model) == before")


def test_a_store_in_memory_will_do(spawn: Spawn) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    path = Path("/dev/shm") / f"weightd-test-{id(spawn)}"
    try:
        holder(spawn, path)
        assert worker(spawn, path).ask("joined.shared_bytes") == 3 * 8 * MIB
    finally:
        path.unlink()


def test_prepare_gives_blocks_their_own_mappings(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn(MALLOC_MMAP_THRESHOLD_="33554432")
    child.do("hidden = weights(1, 8)")
    child.do("pagesharing.prepare(); model = weights(2, 8)")
    child.do(f"held = pagesharing.hold({str(tmp_path / 'store')!r})")
    assert child.ask("held.shared_bytes") == 8 * MIB


def test_of_a_model_smaller_blocks_are_shared_too_but_not_those_of_before_or_after(
    spawn: Spawn, tmp_path: Path
) -> None:
    for verb in ("hold", "join"):
        child = spawn(MALLOC_MMAP_THRESHOLD_="131072")
        child.do(f"""
piece = lambda seed: np.random.RandomState(seed).bytes(256 << 10)
earlier, before = piece(0), pagesharing.begin()
model = [piece(seed) for seed in (1, 2, 3)]
known = hashlib.sha256(b"".join(model)).digest()
done = pagesharing.{verb}({str(tmp_path / "store")!r}, before)
blocks = libc.libc().mapped_blocks()
later = piece(4)
""")
        assert child.ask("done.shared_bytes") == 3 * (256 << 10)
        assert child.ask("hashlib.sha256(b''.join(model)).digest() == known")
        # What each predict takes and frees does not cost a mapping each time.
        assert child.ask("blocks == libc.libc().mapped_blocks()")


def test_a_malloc_that_counts_in_32_bits(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn()
    child.do("""
import ctypes
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
    assert child.ask(f"pagesharing.hold({str(tmp_path / 'store')!r}).shared_bytes") == 8 * MIB


def test_no_file_stays_open_and_the_collector_is_as_before(spawn: Spawn, tmp_path: Path) -> None:
    first = holder(spawn, tmp_path / "store")
    second = spawn()
    second.do("model = weights(1, 8); before = traces(); gc.disable()")
    second.do(f"pagesharing.join({str(tmp_path / 'store')!r})")
    assert second.ask("traces() == before")
    assert second.ask("gc.isenabled()") is False
    assert first.ask("gc.isenabled()") is True
    assert first.ask("traces()") == second.ask("traces()")


def test_only_large_blocks_of_malloc_are_found_and_never_our_own(spawn: Spawn) -> None:
    child = spawn(MALLOC_MMAP_THRESHOLD_="131072")
    child.do("""
import mmap
model = [weights(seed, 8) for seed in (1, 2)]
small = bytearray((1 << 20) - 8192)
arena = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
arena[:] = b"x" * len(arena)
found = [chunks.find(libc.libc()) for _ in range(3)]
""")
    assert child.ask("found[0] == found[1] == found[2]")
    expected = child.ask(
        "sorted([a.ctypes.data - 16 + libc.PAGE, a.ctypes.data - 16 + libc.PAGE + a.nbytes] for a in model)"
    )
    assert child.ask("found[0]") == expected


def test_an_aligned_block_that_was_moved_is_refused(spawn: Spawn, tmp_path: Path) -> None:
    """The header that malloc then leaves behind is out of date."""
    child = spawn()
    child.do("""
import ctypes
c = ctypes.CDLL(None)
c.memalign.restype = c.realloc.restype = ctypes.c_void_p
block = c.memalign(ctypes.c_size_t(1 << 16), ctypes.c_size_t(3 << 20))
block = c.realloc(ctypes.c_void_p(block), ctypes.c_size_t(9 << 20))
""")
    assert "malloc counts 1 of" in child.ask(f"reason(pagesharing.hold, {str(tmp_path / 'store')!r})")


def test_any_use_of_malloc_is_understood(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn()
    child.do("""
import ctypes, random
c = ctypes.CDLL(None)
for name, kinds in dict(malloc="z", realloc="pz", free="p", memalign="zz", calloc="zz").items():
    getattr(c, name).restype = ctypes.c_void_p
    getattr(c, name).argtypes = [dict(z=ctypes.c_size_t, p=ctypes.c_void_p)[kind] for kind in kinds]
dice = random.Random(1)
blocks, aligned = {}, set()
def size():
    return dice.choice([100, 5000, 1 << 17, 1 << 20, 3 << 20]) + dice.randrange(1 << 20)
def put(block, length):
    data = bytes(bytearray(dice.randrange(256) for _ in range(64))) * (length // 64)
    ctypes.memmove(block, data, len(data))
    blocks[block] = data
def step():
    verb = dice.choice("malloc calloc memalign memalign realloc realloc free".split()) if blocks else "malloc"
    if verb in ("realloc", "free"):
        block = dice.choice(sorted(blocks))
        if verb == "realloc" and block in aligned:
            return  # see the test before
        data = blocks.pop(block)
        aligned.discard(block)
        if verb == "free":
            return c.free(block)
        length = size()
        block = c.realloc(block, length)
        kept = min(len(data), length // 64 * 64)
        assert ctypes.string_at(block, kept) == data[:kept]
    else:
        length = size()
        block = {"malloc": lambda: c.malloc(length), "calloc": lambda: c.calloc(1, length),
                 "memalign": lambda: c.memalign(dice.choice([64, 4096, 65536, 2 << 20]), length)}[verb]()
        if verb == "memalign":
            aligned.add(block)
    put(block, length)
def right():
    return all(ctypes.string_at(block, len(data)) == data for block, data in blocks.items())
""")
    for turn in range(4):
        child.do("for _ in range(60): step()")
        child.do(f"pagesharing.hold({str(tmp_path / str(turn))!r})")
        assert child.ask("right()")
        child.do("for _ in range(30): step()")
        child.do(f"joined = pagesharing.join({str(tmp_path / str(turn))!r})")
        assert child.ask("right()")
    child.do("for block in blocks: c.free(block)\nblocks.clear()")
    assert child.ask("libc.libc().mapped_blocks().number") <= 1
