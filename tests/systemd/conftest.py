"""Fixtures: one manager for all tests, and its service, stopped before and after each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from . import materials, units
from .manager import CannotBoot, Manager
from .service import Weightd


@pytest.fixture(scope="session")
def bare_manager() -> Iterator[Manager]:
    """A manager without weightd. With CI=true the tests fail if systemd cannot boot; otherwise they are skipped."""
    try:
        manager = Manager().__enter__()
    except CannotBoot as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"systemd cannot boot: {error}")
        pytest.skip(f"systemd cannot boot: {error}")
    try:
        yield manager
    finally:
        manager.__exit__(*sys.exc_info())


@pytest.fixture(scope="session")
def manager(bare_manager: Manager, tmp_path_factory: pytest.TempPathFactory) -> Manager:
    units.install(bare_manager)
    materials.install(bare_manager, tmp_path_factory.mktemp("materials"))
    return bare_manager


@pytest.fixture
def weightd(manager: Manager, request: pytest.FixtureRequest) -> Iterator[Weightd]:
    """The service: stopped, with its socket open, and configured with one model and two workers."""
    weightd = Weightd(manager)
    weightd.reset()
    failed = request.session.testsfailed
    yield weightd
    if request.session.testsfailed > failed:
        print(weightd.journal())
    weightd.reset()
