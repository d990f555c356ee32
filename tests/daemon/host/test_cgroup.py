"""The memory of a control group, out of texts as kernels write them; no test needs such a group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest

from weightd.daemon.host.cgroup import Group, locate, memory
from weightd.protocol.codec import encode
from weightd.protocol.messages.status import MemoryLimit, StatusResponse

GIB = 2**30

UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:9 - cgroup2 cgroup2 rw,nsdelegate"
LEGACY = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:7 master:1 - cgroup cgroup rw,memory"
OTHERS = """\
23 1 254:0 / / rw,relatime - ext4 /dev/root rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
90 23 0:70 / /mnt/a\\040-\\040cgroup2 rw - fuse.x evil rw,memory"""
HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"

SERVICE = "/system.slice/weightd.service"
IN_LEGACY = f"9:name=systemd:{SERVICE}\n4:memory:{SERVICE}\n3:cpu,cpuacct:/\n0::{SERVICE}\n"


def mounts(*lines: str) -> str:
    return "\n".join([OTHERS, *lines, ""])


def place(membership: str, *lines: str) -> tuple[str, str, bool] | None:
    group = locate(membership, mounts(*lines))
    return None if group is None else (str(group.mount), str(group.below), group.unified)


# --- where it is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("membership", "lines", "expected"),
    [
        (f"0::{SERVICE}\n", [UNIFIED], ("/sys/fs/cgroup", SERVICE[1:], True)),
        (IN_LEGACY, [LEGACY], ("/sys/fs/cgroup/memory", SERVICE[1:], False)),
        (IN_LEGACY, [HYBRID, LEGACY], ("/sys/fs/cgroup/memory", SERVICE[1:], False)),
        # Hybrid, and the memory is in version 2.
        (f"3:cpu,cpuacct:/\n0::{SERVICE}\n", [HYBRID], ("/sys/fs/cgroup/unified", SERVICE[1:], True)),
        # A hierarchy of somebody's own, without a controller.
        ("4:name=memory:/b\n0::/a\n", [UNIFIED, LEGACY], ("/sys/fs/cgroup", "a", True)),
        # Controllers that are mounted together.
        ("4:cpu,memory:/a\n", [LEGACY.replace("rw,memory", "rw,cpu,memory")], ("/sys/fs/cgroup/memory", "a", False)),
        ("0::/\n", [UNIFIED], ("/sys/fs/cgroup", ".", True)),
        ("0::/a:b c\n", [UNIFIED], ("/sys/fs/cgroup", "a:b c", True)),
    ],
)
def test_the_group_that_has_the_memory(membership: str, lines: list[str], expected: tuple[str, str, bool]) -> None:
    assert place(membership, *lines) == expected


@pytest.mark.parametrize(
    ("path", "root", "below"),
    [
        # A container without a namespace of its own: the mount begins at its group.
        ("/docker/4f", "/docker/4f", "."),
        ("/docker/4f/inner", "/docker/4f", "inner"),
        ("/kube/pod 1/a", "/kube/pod\\0401", "a"),
        # A mount from outside of the namespace, and a process outside of it.
        ("/", "/..", None),
        ("/../b", "/..", "b"),
        ("/../b", "/", None),
        ("/docker/4f", "/docker/4", None),
        ("/docker", "/docker/4f", None),
    ],
)
def test_a_mount_need_not_begin_at_the_root(path: str, root: str, below: str | None) -> None:
    expected = None if below is None else ("/sys/fs/cgroup", below, True)
    assert place(f"0::{path}\n", UNIFIED.replace(" / ", f" {root} ", 1)) == expected


def test_of_several_mounts_the_one_that_shows_most() -> None:
    part = "50 23 0:26 /a /part rw - cgroup2 cgroup2 rw"
    for lines in ([UNIFIED, part], [part, UNIFIED]):
        assert place("0::/a/b\n", *lines) == ("/sys/fs/cgroup", "a/b", True)


def test_a_mount_point_is_unescaped() -> None:
    escaped = UNIFIED.replace("/sys/fs/cgroup", "/my\\040cgroups\\134\\012")
    assert place("0::/a\n", escaped) == ("/my cgroups\\\n", "a", True)


@pytest.mark.parametrize(
    "membership",
    ["", "\n", "0::\n", "0::a\n", "0:/a\n", "garbage", "3:cpu:/a\n", "0::/a\ngarbage\n", "1::/a\n", "0:name=x:/a\n"],
)
def test_a_membership_that_says_nothing(membership: str) -> None:
    assert place(membership, UNIFIED, LEGACY) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        UNIFIED.replace("cgroup2", "cgroup3"),
        UNIFIED.replace(" - ", " "),
        UNIFIED.replace(" rw,nsdelegate", ""),
        UNIFIED.replace("30 23", "30 x"),
        UNIFIED.replace("cgroup2 cgroup2", "cgroup cgroup"),
        f"{UNIFIED} more",
    ],
)
def test_a_line_that_is_no_such_mount(line: str) -> None:
    assert place("0::/a\n", line) is None


def test_what_is_above_belongs_to_it_up_to_the_mount() -> None:
    assert Group(Path("/m"), PurePosixPath("a/b"), unified=True).lineage == [Path("/m/a/b"), Path("/m/a"), Path("/m")]
    assert Group(Path("/m"), PurePosixPath(), unified=True).lineage == [Path("/m")]


# --- what it says ---------------------------------------------------------------------------------------------------

PRESSURE = "some avg10={} avg60=1.00 avg300=0.00 total=12345\nfull avg10=9.99 avg60=0.00 avg300=0.00 total=1\n"
LEAF = {
    "cgroup.controllers": "cpu memory pids\n",
    "memory.current": f"{GIB}\n",
    "memory.max": f"{4 * GIB}\n",
    "memory.high": f"{3 * GIB}\n",
    "memory.events": "low 0\nhigh 7\nmax 5\noom 3\noom_kill 2\noom_group_kill 0\n",
    "memory.pressure": PRESSURE.format("0.30"),
}
OLD_LEAF = {
    "memory.usage_in_bytes": f"{GIB}\n",
    "memory.limit_in_bytes": f"{4 * GIB}\n",
    "memory.stat": f"cache 1\nhierarchical_memory_limit {4 * GIB}\nhierarchical_memsw_limit 9223372036854771712\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
}
UNLIMITED = "9223372036854771712\n"


class Host:
    """A /proc/self and the files of the groups of one hierarchy, in a directory."""

    def __init__(self, directory: Path, *, unified: bool) -> None:
        self.proc = directory / "proc"
        self.mount = directory / "hierarchy"
        self.proc.mkdir()
        (self.proc / "cgroup").write_text("0::/a.slice/b\n" if unified else "4:memory:/a.slice/b\n0::/\n")
        line = UNIFIED if unified else LEGACY
        (self.proc / "mountinfo").write_text(mounts(line.replace(line.split(" ")[4], str(self.mount))))

    def group(self, path: str, files: Mapping[str, str]) -> None:
        directory = self.mount / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text)

    def memory(self) -> MemoryLimit | None:
        found = memory(self.proc)
        # Whatever it is, a status can carry it.
        encode(StatusResponse("7", "v", "running", 1, 1.0, 1, (), memory=found))
        return found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Version 2: a service in a slice. The root of all has no memory of its own, but a pressure."""
    host = Host(tmp_path, unified=True)
    host.group(".", {"cgroup.controllers": "cpu memory pids\n", "memory.pressure": PRESSURE.format("50.00")})
    host.group("a.slice", {**LEAF, "memory.current": f"{2 * GIB}\n", "memory.max": "max\n", "memory.high": "max\n"})
    host.group("a.slice/b", LEAF)
    return host


@pytest.fixture
def old(tmp_path: Path) -> Host:
    """Version 1."""
    host = Host(tmp_path, unified=False)
    host.group(".", {**OLD_LEAF, "memory.usage_in_bytes": f"{60 * GIB}\n", "memory.limit_in_bytes": UNLIMITED})
    host.group("a.slice", {**OLD_LEAF, "memory.limit_in_bytes": UNLIMITED})
    host.group("a.slice/b", OLD_LEAF)
    return host


def test_version_2(host: Host) -> None:
    assert host.memory() == MemoryLimit(GIB, 4 * GIB, 3 * GIB, 2, 0.3)


def test_version_1_has_neither_high_nor_pressure(old: Host) -> None:
    old.group("a.slice/b", {"memory.pressure": PRESSURE.format("1.00"), "memory.high": "1\n"})
    assert old.memory() == MemoryLimit(GIB, 4 * GIB, None, 2, None)


def test_names_need_not_be_text(host: Host) -> None:
    for name, before, after in (("cgroup", b"/b\n", b"/\xff\n"), ("mountinfo", b"/mnt/", b"/\xfe/")):
        path = host.proc / name
        path.write_bytes(path.read_bytes().replace(before, after))
    (host.mount / "a.slice/b").rename(host.mount / "a.slice/\udcff")
    assert host.memory() == MemoryLimit(GIB, 4 * GIB, 3 * GIB, 2, 0.3)


def test_the_smallest_limit_of_those_above_counts(host: Host) -> None:
    host.group("a.slice", {"memory.max": f"{2 * GIB}\n", "memory.high": f"{GIB}\n"})
    assert host.memory() == MemoryLimit(GIB, 2 * GIB, GIB, 2, 0.3)
    host.group("a.slice/b", {"memory.max": "max\n", "memory.high": "max\n"})
    assert host.memory() == MemoryLimit(GIB, 2 * GIB, GIB, 2, 0.3)
    host.group(".", {"memory.max": f"{GIB}\n"})
    assert host.memory() == MemoryLimit(GIB, GIB, GIB, 2, 0.3)


def test_the_smallest_limit_of_those_above_counts_in_version_1(old: Host) -> None:
    old.group("a.slice", {"memory.limit_in_bytes": f"{2 * GIB}\n"})
    assert old.memory() == MemoryLimit(GIB, 2 * GIB, None, 2, None)


def test_in_version_1_the_kernel_tells_of_limits_that_are_not_mounted(old: Host) -> None:
    old.group("a.slice/b", {"memory.stat": f"hierarchical_memory_limit {3 * GIB}\n"})
    assert old.memory() == MemoryLimit(GIB, 3 * GIB, None, 2, None)
    # And what it tells is no limit if it is the largest number there is.
    old.group(
        "a.slice/b", {"memory.stat": f"hierarchical_memory_limit {UNLIMITED}", "memory.limit_in_bytes": UNLIMITED}
    )
    assert old.memory() == MemoryLimit(GIB, None, None, 2, None)


def test_a_group_without_the_controller_takes_its_memory_from_the_next_one_above(host: Host) -> None:
    for name in LEAF:
        (host.mount / "a.slice/b" / name).unlink()
    host.group("a.slice/b", {"cgroup.controllers": "cpu\n", "memory.pressure": PRESSURE.format("7.00")})
    host.group("a.slice", {"memory.high": f"{5 * GIB}\n"})
    assert host.memory() == MemoryLimit(2 * GIB, None, 5 * GIB, 2, 0.3)


def test_in_the_root_of_the_host_nothing_is_the_service_s(host: Host) -> None:
    (host.proc / "cgroup").write_text("0::/\n")
    assert host.memory() is None


def test_a_namespace_s_root_is_a_group_like_any_other(host: Host) -> None:
    host.group(".", LEAF)
    (host.proc / "cgroup").write_text("0::/\n")
    assert host.memory() == MemoryLimit(GIB, 4 * GIB, 3 * GIB, 2, 0.3)


def test_a_group_that_is_not_there_is_not_taken_for_the_one_above(host: Host) -> None:
    (host.proc / "cgroup").write_text("0::/a.slice/gone\n")
    assert host.memory() is None


def test_a_group_that_is_not_there_in_version_1(old: Host) -> None:
    (old.proc / "cgroup").write_text("4:memory:/a.slice/gone\n")
    assert old.memory() is None


# --- what it does not say -------------------------------------------------------------------------------------------

BAD_NUMBERS = [
    "",
    "\n",
    "x\n",
    "-1\n",
    "+1\n",
    "1_0\n",
    " 1\n",
    "1 \n",
    "1\n\n",
    "1.5\n",
    "٣\n",
    "9" * 19 + "\n",
    "0x10\n",
]


@pytest.mark.parametrize("text", [*BAD_NUMBERS, "max\n", "9" * 5000])
def test_without_a_usage_nothing_is_known(host: Host, text: str) -> None:
    host.group("a.slice/b", {"memory.current": text})
    assert host.memory() is None


@pytest.mark.parametrize("text", [*BAD_NUMBERS, "Max\n", "max", "max max\n"])
@pytest.mark.parametrize("path", ["a.slice/b", "a.slice"])
def test_a_limit_that_is_no_number_might_be_any(host: Host, path: str, text: str) -> None:
    host.group(path, {"memory.max": text})
    assert host.memory() == MemoryLimit(GIB, None, 3 * GIB, 2, 0.3)


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill x\n", "oom_killed 2\n", "oom_kill 1\noom_kill 2\n"])
def test_kills_that_are_no_number_are_unknown(host: Host, text: str) -> None:
    host.group("a.slice/b", {"memory.events": text})
    assert host.memory() == MemoryLimit(GIB, 4 * GIB, 3 * GIB, None, 0.3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "some\n",
        "some avg10=0.30\n",
        PRESSURE.replace("\n", " more\n").format("0.30"),
        *map(PRESSURE.format, ["nan", "1e3", "100.01", "0.3", "-1.00", "1,00", "٣.00"]),
    ],
)
def test_a_pressure_that_is_no_share_is_unknown(host: Host, text: str) -> None:
    host.group("a.slice/b", {"memory.pressure": text})
    assert host.memory() == MemoryLimit(GIB, 4 * GIB, 3 * GIB, 2, None)


@pytest.mark.parametrize("name", ["memory.max", "memory.high", "memory.events", "memory.pressure"])
def test_a_file_that_is_missing_or_not_a_file_costs_only_what_it_says(host: Host, name: str) -> None:
    (host.mount / "a.slice/b" / name).unlink()
    field = {"max": "limit_bytes", "high": "high_bytes", "events": "oom_kills", "pressure": "pressure_percent"}
    assert getattr(host.memory(), field[name.partition(".")[2]]) is None
    (host.mount / "a.slice/b" / name).mkdir()
    assert getattr(host.memory(), field[name.partition(".")[2]]) is None


@pytest.mark.parametrize("name", ["cgroup", "mountinfo"])
def test_without_the_files_of_proc_nothing_is_known(host: Host, name: str) -> None:
    (host.proc / name).write_bytes(b"0::/\xff\0\n")
    assert host.memory() is None
    (host.proc / name).unlink()
    assert host.memory() is None


def test_a_real_process_has_some_answer() -> None:
    found = memory()
    assert found is None or found.usage_bytes >= 0
