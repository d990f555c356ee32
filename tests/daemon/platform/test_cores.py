from __future__ import annotations

import os
from unittest import mock

import pytest

from weightd_daemon.platform import cgroup, cores


@pytest.mark.parametrize(("quota", "usable"), [(None, 3), (8.0, 3), (2.0, 2), (1.5, 2), (0.2, 1)])
def test_cores_are_those_that_a_process_may_use_at_once(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", mock.Mock(return_value={0, 2, 5}))
    monkeypatch.setattr(cgroup, "cores", lambda: quota)
    assert cores.usable_core_count() == usable
