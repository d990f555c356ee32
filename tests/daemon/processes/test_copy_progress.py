from __future__ import annotations

from pathlib import Path

from weightd_daemon.processes.snapshotter import CopyProgressFile, read_copy_progress


def test_who_looks_sees_how_much_was_copied_of_how_much(tmp_path: Path) -> None:
    path = tmp_path / "copied"
    written = CopyProgressFile(path, model_count=3)
    assert read_copy_progress(path) is None
    written.start_model(100)
    written.add_bytes(60)
    # Of those that are not open yet the size is that of the others.
    assert read_copy_progress(path) == (60, 300)
    written.add_bytes(40)
    written.start_model(200)
    written.add_bytes(10)
    assert read_copy_progress(path) == (110, 450)
    written.close()
    written.add_bytes(1)
    assert read_copy_progress(path) == (110, 450)


def test_what_is_no_meter_tells_nothing(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("short", b"x" * 15), ("more than all", b"\xff" * 8 + b"\0" * 8)):
        (tmp_path / name).write_bytes(content)
        assert read_copy_progress(tmp_path / name) is None
    (tmp_path / "link").symlink_to(tmp_path / "short")
    assert read_copy_progress(tmp_path / "link") is None
    assert read_copy_progress(tmp_path / "none") is None


def test_a_copy_goes_on_where_nobody_can_be_told(tmp_path: Path) -> None:
    written = CopyProgressFile(tmp_path / "none" / "copied")
    written.start_model(1)
    written.add_bytes(1)
    written.close()
