from __future__ import annotations

import platform
from pathlib import Path

from weightd_daemon.doctor.facts.ranks import NetworkFacts, read_network


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_host_with_nothing(tmp_path: Path) -> None:
    assert read_network({}, tmp_path) == NetworkFacts(conf_error="No such file or directory")


def test_a_host_for_ranks(tmp_path: Path) -> None:
    write(tmp_path / "etc/hccn.conf", "address_0=192.168.1.8\nnetmask_0=255.255.255.0\naddress_1=192.168.1.9\n")
    write(tmp_path / "opt/cann/lib64/libhccl.so")
    seen = read_network({"ASCEND_HOME_PATH": "/opt/cann", "LD_LIBRARY_PATH": "relative:/opt/other:"}, tmp_path)
    machine = f"{platform.machine()}-linux/lib64"
    searched = ("/opt/other", "/opt/cann/lib64", f"/opt/cann/{machine}", "/opt/cann/compiler/lib64")
    addresses = {0: "192.168.1.8", 1: "192.168.1.9"}
    assert seen == NetworkFacts("/opt/cann/lib64/libhccl.so", searched, addresses)


def test_the_loader_looks_first_where_it_is_told(tmp_path: Path) -> None:
    for directory in ("opt/cann/lib64", "opt/own"):
        write(tmp_path / directory / "libhccl.so")
    seen = read_network({"ASCEND_HOME_PATH": "/opt/cann/", "LD_LIBRARY_PATH": "/opt/own/"}, tmp_path)
    assert seen.hccl_path == "/opt/own/libhccl.so"


def test_a_directory_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "etc/hccn.conf").mkdir(parents=True)
    (tmp_path / "lib/libhccl.so").mkdir(parents=True)
    seen = read_network({"LD_LIBRARY_PATH": "/lib"}, tmp_path)
    assert (seen.hccl_path, seen.conf_error) == ("", "Is a directory")
