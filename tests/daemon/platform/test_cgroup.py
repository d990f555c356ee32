"""Memory, CPU and task limits of a control group, read from files in the kernel's format."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from weightd_daemon.platform import cgroup
from weightd_daemon.platform.cgroup import TaskLimit, cores, free_bytes, locate, memory, tasks
from weightd_protocol.codec import encode
from weightd_protocol.messages.status import MemoryLimit, StatusResponse

GIB = 2**30

UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:9 - cgroup2 cgroup2 rw,nsdelegate"
PART = "50 23 0:26 /a /part rw - cgroup2 cgroup2 rw"
LEGACY = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:7 master:1 - cgroup cgroup rw,memory"
OTHERS = """\
23 1 254:0 / / rw,relatime - ext4 /dev/root rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
90 23 0:70 / /mnt/a\\040-\\040cgroup2 rw - fuse.x evil rw,memory"""
HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
TOGETHER = LEGACY.replace("rw,memory", "rw,cpu,memory")
ESCAPED = UNIFIED.replace("/sys/fs/cgroup", "/my\\040cgroups\\134\\012")

SERVICE = "/system.slice/weightd.service"
IN_LEGACY = f"9:name=systemd:{SERVICE}\n4:memory:{SERVICE}\n3:cpu,cpuacct:/\n0::{SERVICE}\n"


def mounts(*lines: str) -> str:
    return "\n".join([OTHERS, *lines, ""])


def rooted(root: str) -> str:
    return UNIFIED.replace(" / ", f" {root} ", 1)


# --- location -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("membership", "lines", "location"),
    [
        (f"0::{SERVICE}\n", [UNIFIED], ("/sys/fs/cgroup", SERVICE[1:], True)),
        (IN_LEGACY, [LEGACY], ("/sys/fs/cgroup/memory", SERVICE[1:], False)),
        (IN_LEGACY, [HYBRID, LEGACY], ("/sys/fs/cgroup/memory", SERVICE[1:], False)),
        # A hybrid hierarchy with memory in version 2.
        (f"3:cpu,cpuacct:/\n0::{SERVICE}\n", [HYBRID], ("/sys/fs/cgroup/unified", SERVICE[1:], True)),
        # A named hierarchy without controllers.
        ("4:name=memory:/b\n0::/a\n", [UNIFIED, LEGACY], ("/sys/fs/cgroup", "a", True)),
        # Controllers that share one mount.
        ("4:cpu,memory:/a\n", [TOGETHER], ("/sys/fs/cgroup/memory", "a", False)),
        ("0::/\n", [UNIFIED], ("/sys/fs/cgroup", ".", True)),
        ("0::/a:b c\n", [UNIFIED], ("/sys/fs/cgroup", "a:b c", True)),
        ("0::/a\n", [ESCAPED], ("/my cgroups\\\n", "a", True)),
        # With several mounts, the mount with the largest part of the hierarchy is used.
        ("0::/a/b\n", [UNIFIED, PART], ("/sys/fs/cgroup", "a/b", True)),
        ("0::/a/b\n", [PART, UNIFIED], ("/sys/fs/cgroup", "a/b", True)),
        # A container without a cgroup namespace: the mount begins at the container's group.
        ("0::/docker/4f\n", [rooted("/docker/4f")], ("/sys/fs/cgroup", ".", True)),
        ("0::/docker/4f/inner\n", [rooted("/docker/4f")], ("/sys/fs/cgroup", "inner", True)),
        ("0::/kube/pod 1/a\n", [rooted("/kube/pod\\0401")], ("/sys/fs/cgroup", "a", True)),
        ("0::/docker/4f\n", [rooted("/docker/4")], None),
        ("0::/docker\n", [rooted("/docker/4f")], None),
        # A mount, then a process, outside of the namespace.
        ("0::/\n", [rooted("/..")], None),
        ("0::/../b\n", [rooted("/..")], ("/sys/fs/cgroup", "b", True)),
        ("0::/../b\n", [UNIFIED], None),
        # Malformed memberships.
        *((text, [UNIFIED, LEGACY], None) for text in ("", "\n", "0::\n", "0::a\n", "0:/a\n", "garbage", "3:cpu:/a\n")),
        *((text, [UNIFIED, LEGACY], None) for text in ("0::/a\ngarbage\n", "1::/a\n", "0:name=x:/a\n")),
        # Malformed mount lines, and mounts of other types.
        ("0::/a\n", [""], None),
        ("0::/a\n", [UNIFIED.replace("cgroup2", "cgroup3")], None),
        ("0::/a\n", [UNIFIED.replace(" - ", " ")], None),
        ("0::/a\n", [UNIFIED.replace(" rw,nsdelegate", "")], None),
        ("0::/a\n", [UNIFIED.replace("30 23", "30 x")], None),
        ("0::/a\n", [UNIFIED.replace("cgroup2 cgroup2", "cgroup cgroup")], None),
        ("0::/a\n", [f"{UNIFIED} more"], None),
    ],
)
def test_locates_the_memory_group(membership: str, lines: list[str], location: tuple[str, str, bool] | None) -> None:
    group = locate(membership, mounts(*lines))
    assert (None if group is None else (str(group.mount), str(group.relative_path), group.is_v2)) == location


# --- limits ---------------------------------------------------------------------------------------------------------

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

# Version 2: a service in a slice. The root has no memory figures, but a pressure.
GROUPS: dict[str, dict[str, str]] = {
    ".": {"cgroup.controllers": "cpu memory pids\n", "memory.pressure": PRESSURE.format("50.00")},
    "a.slice": {**LEAF, "memory.current": f"{2 * GIB}\n", "memory.max": "max\n", "memory.high": "max\n"},
    "a.slice/b": LEAF,
}
OLD_GROUPS: dict[str, dict[str, str]] = {
    ".": {**OLD_LEAF, "memory.usage_in_bytes": f"{60 * GIB}\n", "memory.limit_in_bytes": UNLIMITED},
    "a.slice": {**OLD_LEAF, "memory.limit_in_bytes": UNLIMITED},
    "a.slice/b": OLD_LEAF,
}

EXPECTED = MemoryLimit(GIB, 4 * GIB, 3 * GIB, 2, 0.3)
# Version 1 has neither a high limit nor a pressure.
EXPECTED_V1 = MemoryLimit(GIB, 4 * GIB, None, 2, None)

BAD_NUMBERS = ["", "\n", "x\n", "-1\n", "+1\n", "1_0\n", " 1\n", "1 \n", "1\n\n", "1.5\n", "٣\n", "9" * 19, "0x10\n"]
NO_SHARES = ["nan", "1e3", "100.01", "0.3", "-1.00", "1,00", "٣.00"]


class Host:
    """A /proc/self and the files of one hierarchy's groups in a directory."""

    def __init__(self, directory: Path, *, unified: bool) -> None:
        self.proc = directory / "proc"
        self.mount = directory / "hierarchy"
        line = UNIFIED if unified else LEGACY
        self.change("../proc/cgroup", "0::/a.slice/b\n" if unified else "4:memory:/a.slice/b\n0::/\n")
        self.change("../proc/mountinfo", mounts(line.replace(line.split(" ")[4], str(self.mount))))
        for group, files in (GROUPS if unified else OLD_GROUPS).items():
            for name, text in files.items():
                self.change(f"{group}/{name}", text)

    def change(self, path: str, text: str | None) -> None:
        """Write a file, or delete it if `text` is None."""
        file = self.mount / path
        (self.mount / path).parent.mkdir(parents=True, exist_ok=True)
        file.unlink() if text is None else file.write_text(text)

    def memory(self) -> MemoryLimit | None:
        found = memory(self.proc)
        # Whatever it holds, a status response must be able to carry it.
        encode(StatusResponse("7", "v", "running", 1, 1.0, 1, (), memory=found))
        return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, EXPECTED),
        # The smallest limit of the group and its ancestors counts.
        (
            {"a.slice/memory.max": f"{2 * GIB}\n", "a.slice/memory.high": f"{GIB}\n"},
            replace(EXPECTED, limit_bytes=2 * GIB, high_bytes=GIB),
        ),
        (
            {"a.slice/b/memory.max": "max\n", "a.slice/b/memory.high": "max\n", "memory.max": f"{GIB}\n"},
            replace(EXPECTED, limit_bytes=GIB, high_bytes=None),
        ),
        # A group without the controller is accounted to the nearest ancestor with it.
        (
            {
                **dict.fromkeys([f"a.slice/b/{name}" for name in LEAF]),
                "a.slice/b/cgroup.controllers": "cpu\n",
                "a.slice/b/memory.pressure": PRESSURE.format("7.00"),
                "a.slice/memory.high": f"{5 * GIB}\n",
            },
            MemoryLimit(2 * GIB, None, 5 * GIB, 2, 0.3),
        ),
        # The host's root group is not the service's; a namespace's root is a group like any other.
        ({"../proc/cgroup": "0::/\n"}, None),
        ({"../proc/cgroup": "0::/\n", **LEAF}, EXPECTED),
        # The parent of a missing group is not used instead.
        ({"../proc/cgroup": "0::/a.slice/gone\n"}, None),
        ({"../proc/cgroup": "0::/\0\n"}, None),
        ({"../proc/cgroup": None}, None),
        ({"../proc/mountinfo": None}, None),
        # Without a usage, no figure is reported; a malformed limit makes the limit unknown.
        *(({"a.slice/b/memory.current": text}, None) for text in [*BAD_NUMBERS, "max\n", "9" * 5000]),
        *(({"a.slice/b/memory.max": text}, replace(EXPECTED, limit_bytes=None)) for text in ("x\n", "Max\n", "max")),
        ({"a.slice/memory.max": "max max\n"}, replace(EXPECTED, limit_bytes=None)),
        ({"a.slice/b/memory.max": None}, replace(EXPECTED, limit_bytes=None)),
        ({"a.slice/b/memory.high": None}, replace(EXPECTED, high_bytes=None)),
        ({"a.slice/b/memory.events": None}, replace(EXPECTED, oom_kills=None)),
        ({"a.slice/b/memory.events": "oom_kill\n"}, replace(EXPECTED, oom_kills=None)),
        ({"a.slice/b/memory.events": "oom_killed 2\n"}, replace(EXPECTED, oom_kills=None)),
        ({"a.slice/b/memory.events": "oom_kill 1\noom_kill 2\n"}, replace(EXPECTED, oom_kills=None)),
        ({"a.slice/b/memory.pressure": None}, replace(EXPECTED, pressure_percent=None)),
        *(
            ({"a.slice/b/memory.pressure": text}, replace(EXPECTED, pressure_percent=None))
            for text in ("", "some avg10=0.30\n", PRESSURE.replace("\n", " x\n").format("0.30"))
        ),
        *(
            ({"a.slice/b/memory.pressure": PRESSURE.format(share)}, replace(EXPECTED, pressure_percent=None))
            for share in NO_SHARES
        ),
    ],
)
def test_reads_memory_limits_v2(tmp_path: Path, changes: dict[str, str | None], expected: MemoryLimit | None) -> None:
    host = Host(tmp_path, unified=True)
    for path, text in changes.items():
        host.change(path, text)
    assert host.memory() == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"memory.pressure": PRESSURE.format("1.00"), "memory.high": "1\n"}, EXPECTED_V1),
        ({"../memory.limit_in_bytes": f"{2 * GIB}\n"}, replace(EXPECTED_V1, limit_bytes=2 * GIB)),
        # The kernel reports limits of ancestors that are not mounted.
        ({"memory.stat": f"hierarchical_memory_limit {3 * GIB}\n"}, replace(EXPECTED_V1, limit_bytes=3 * GIB)),
        # The largest possible number means no limit.
        (
            {"memory.stat": f"hierarchical_memory_limit {UNLIMITED}", "memory.limit_in_bytes": UNLIMITED},
            replace(EXPECTED_V1, limit_bytes=None),
        ),
        ({"../../../proc/cgroup": "4:memory:/a.slice/gone\n"}, None),
    ],
)
def test_reads_memory_limits_v1(tmp_path: Path, changes: dict[str, str], expected: MemoryLimit | None) -> None:
    host = Host(tmp_path, unified=False)
    for path, text in changes.items():
        host.change(f"a.slice/b/{path}", text)
    assert host.memory() == expected


STAT = "anon 1\ninactive_file {}\n"


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        # The least difference of limit and usage counts, over the group and its ancestors.
        ({}, 2 * GIB),
        ({"a.slice/b/memory.high": "max\n"}, 3 * GIB),
        ({"a.slice/memory.max": f"{3 * GIB}\n"}, GIB),
        ({"a.slice/memory.max": f"{GIB}\n"}, 0),
        # Memory that the kernel reclaims first counts as free.
        ({"a.slice/b/memory.stat": STAT.format(GIB // 2)}, 2 * GIB + GIB // 2),
        ({"a.slice/b/memory.stat": STAT.format(2 * GIB)}, 3 * GIB),
        ({"a.slice/b/memory.stat": STAT.format("x")}, 2 * GIB),
        ({"a.slice/b/memory.current": None}, 0),
        ({"a.slice/b/memory.max": "max\n", "a.slice/b/memory.high": "max\n"}, None),
        ({"../proc/cgroup": None}, None),
    ],
)
def test_free_memory_v2(tmp_path: Path, changes: dict[str, str | None], free: int | None) -> None:
    host = Host(tmp_path, unified=True)
    for path, text in changes.items():
        host.change(path, text)
    assert free_bytes(host.proc) == free


def test_free_memory_v1(tmp_path: Path) -> None:
    host = Host(tmp_path, unified=False)
    assert free_bytes(host.proc) == 3 * GIB
    host.change("a.slice/b/memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB // 4}\n")
    assert free_bytes(host.proc) == 3 * GIB + GIB // 4


@pytest.mark.parametrize(
    ("group", "above", "expected"),
    [
        ("max 100000\n", "max 100000\n", None),
        ("250000 100000\n", "max 100000\n", 2.5),
        ("250000 100000\n", "50000 100000\n", 0.5),
        ("garbage\n", None, None),
        ("1 0\n", None, None),
    ],
)
def test_cores_v2(tmp_path: Path, group: str, above: str | None, expected: float | None) -> None:
    host = Host(tmp_path, unified=True)
    host.change("a.slice/b/cpu.max", group)
    if above is not None:
        host.change("a.slice/cpu.max", above)
    assert cores(host.proc) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1\n", None), ("150000\n", 1.5)])
def test_cores_v1(tmp_path: Path, quota: str, expected: float | None) -> None:
    host = Host(tmp_path, unified=False)
    mount = OTHERS.split("\n")[2].replace("/sys/fs/cgroup/cpu,cpuacct", str(host.mount))
    host.change("../proc/cgroup", "3:cpu,cpuacct:/a.slice/b\n")
    host.change("../proc/mountinfo", f"{mount}\n")
    host.change("a.slice/b/cpu.cfs_period_us", "100000\n")
    host.change("a.slice/b/cpu.cfs_quota_us", quota)
    assert cores(host.proc) == expected


@pytest.mark.parametrize(
    ("files", "limit", "used", "group"),
    [
        ({"a.slice/b/pids.max": "64\n", "a.slice/b/pids.current": "60\n"}, 64, 60, "a.slice/b"),
        ({"a.slice/b/pids.max": "64\n", "a.slice/pids.max": "32\n"}, 32, None, "a.slice"),
        ({"a.slice/b/pids.max": "max\n", "a.slice/pids.max": "96\n"}, 96, None, "a.slice"),
        ({"a.slice/b/pids.max": "garbage\n"}, None, None, ""),
        ({"a.slice/b/pids.max": "max\n"}, None, None, ""),
        ({}, None, None, ""),
    ],
)
@pytest.mark.parametrize("unified", [True, False])
def test_task_limits(
    tmp_path: Path, unified: bool, files: dict[str, str], limit: int | None, used: int | None, group: str
) -> None:
    host = Host(tmp_path, unified=unified)
    if not unified:
        for name, before, after in (("cgroup", "4:memory:", "8:pids:"), ("mountinfo", "rw,memory", "rw,pids")):
            file = host.proc / name
            file.write_text(file.read_text().replace(before, after))
    for path, text in files.items():
        host.change(path, text)
    assert tasks(host.proc) == (None if limit is None else TaskLimit(host.mount / group, limit, used))


def test_accepts_names_that_are_not_utf8(tmp_path: Path) -> None:
    host = Host(tmp_path, unified=True)
    for name, before, after in (("cgroup", b"/b\n", b"/\xff\n"), ("mountinfo", b"/mnt/", b"/\xfe/")):
        path = host.proc / name
        path.write_bytes(path.read_bytes().replace(before, after))
    (host.mount / "a.slice/b").rename(host.mount / "a.slice/\udcff")
    assert host.memory() == EXPECTED


def test_unreadable_file_hides_only_its_own_figure(tmp_path: Path) -> None:
    host = Host(tmp_path, unified=True)
    host.change("a.slice/b/memory.high", None)
    (host.mount / "a.slice/b/memory.high").mkdir()
    assert host.memory() == replace(EXPECTED, high_bytes=None)


def test_reads_the_group_of_a_real_process() -> None:
    found = memory()
    assert found is None or found.usage_bytes >= 0


@pytest.mark.parametrize(("quota", "usable"), [(None, 3), (8.0, 3), (2.0, 2), (1.5, 2), (0.2, 1)])
def test_usable_cores_respect_affinity_and_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", mock.Mock(return_value={0, 2, 5}))
    monkeypatch.setattr(cgroup, "cores", lambda: quota)
    assert cgroup.usable_core_count() == usable
