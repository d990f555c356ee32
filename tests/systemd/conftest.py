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
    """A manager without weightd. Where CI=true, it must be possible."""
    try:
        manager = Manager().__enter__()
    except CannotBoot as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"systemd cannot be tried: {error}")
        pytest.skip(f"systemd cannot be tried: {error}")
    try:
        yield manager
    finally:
        manager.__exit__(*sys.exc_info())


@pytest.fixture(scope="session")
def manager(bare_manager: Manager, tmp_path_factory: pytest.TempPathFactory) -> Manager:
    units.install(bare_manager)
    materials.lay_out(bare_manager, tmp_path_factory.mktemp("materials"))
    return bare_manager


@pytest.fixture
def weightd(manager: Manager, request: pytest.FixtureRequest) -> Iterator[Weightd]:
    """The service, stopped, its socket open, its configuration that of one model with two workers."""
    weightd = Weightd(manager)
    weightd.reset()
    failed = request.session.testsfailed
    yield weightd
    if request.session.testsfailed > failed:
        print(weightd.journal())
    weightd.reset()
