"""The keeper as a service has it: started once, found again by the next daemon, replaced where it is lost."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection
from pathlib import Path

from weightd.daemon.children.launch import Launch
from weightd.daemon.children.launchers.keeper import link
from weightd.daemon.children.launchers.keeper.link import Keeper, KeeperLost
from weightd.daemon.children.launchers.launcher import Kept
from weightd.daemon.config.daemon import DaemonConfig
from weightd.daemon.continuity import handover
from weightd.daemon.continuity.claim import make_private
from weightd.daemon.continuity.handover import Handover, HandoverError
from weightd.daemon.continuity.service import KEEPER, Manager
from weightd.daemon.host.directories import ClaimError
from weightd.daemon.host.processes import Process
from weightd.daemon.host.shortage import explained

_log = logging.getLogger("weightd")

# What the kernel takes to end the children of a keeper that is killed.
_PATIENCE_S = 30.0


class Keeping:
    """A `Launcher` that has holders and workers started by a keeper, which outlives this process.

    Args:
        manager: holds on to the keeper.
        config: says what the keeper removes at its end.

    Attributes:
        inheritance: what the daemon before this one has left; None where every model has to be loaded.

    Raises:
        ClaimError: the private directory cannot be had.
    """

    def __init__(self, manager: Manager, config: DaemonConfig) -> None:
        self._manager = manager
        self._directory = config.private_dir
        self._others = [config.children_socket, config.channel_socket]
        self.inheritance: Handover | None = None
        descriptors = manager.inherited.get(KEEPER, [])
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        keeper = self._inherit(descriptors[0]) if descriptors else None
        if keeper is None:
            make_private(self._directory)
            keeper = self._start()
        self._keeper = keeper
        self._is_lost = False

    @property
    def pid(self) -> int:
        """The keeper's."""
        return self._keeper.pid

    @property
    def handover(self) -> Path:
        """Where the next daemon looks for what this one leaves."""
        return self._directory / "handover"

    @property
    def entries(self) -> Collection[str]:
        """What of the private directory is its own."""
        return {self.handover.name, link.LOG}

    def start(self, launch: Launch) -> Process:  # noqa: D102
        if self._is_lost:
            self._replace()
        try:
            return self._keeper.start(self._child(launch))
        except KeeperLost as error:
            # Its children have died with it, which their pidfds tell: only the next ones need another parent.
            _log.error("%s: starting another one", error)
            self._is_lost = True
            self._keeper.kill()
            self._replace()
        return self._keeper.start(self._child(launch))

    def adopt(self, name: str, pid: int, log: Path) -> Process:  # noqa: D102
        return self._keeper.adopt(name, pid, log)

    def kept(self) -> list[Kept]:  # noqa: D102
        return self._keeper.kept()

    def end_strays(self) -> None:  # noqa: D102
        self._keeper.end_strays()

    def end_strays_of(self, parent: int, known: Collection[int]) -> None:  # noqa: D102
        self._keeper.end_strays_of(parent)

    def watch(self, kept: Kept) -> Process:  # noqa: D102
        return self._keeper.watch(kept)

    def close(self) -> None:
        """Leave it alone: it ends everything now if the service manager does not hold on to it."""
        if not self._is_lost:
            self._keeper.close()

    def _child(self, launch: Launch) -> Launch:
        return launch.of(self.pid)

    def _inherit(self, descriptor: int) -> Keeper | None:
        try:
            keeper = Keeper(descriptor)
        except KeeperLost as error:
            _log.warning("every model is loaded anew: %s", error)
            # If it was only slow, that ends it.
            self._manager.drop(KEEPER)
            return None
        try:
            self.inheritance = handover.read(self.handover)
        except HandoverError as error:
            _log.warning("every model is loaded anew: %s", error)
            self._manager.drop(KEEPER)
            # At its end it removes what is its own, the socket too; in another directory than ours no lock tells when.
            _log.info("waiting for the processes of the daemon before this one to end")
            keeper.end(_PATIENCE_S)
            return None
        return keeper

    def _start(self) -> Keeper:
        try:
            keeper = link.start(self._directory, *self._others)
        except OSError as error:
            raise ClaimError(explained(f"cannot start the keeper of the processes: {error}")) from None
        self._manager.keep(KEEPER, keeper.descriptor)
        return keeper

    def _replace(self) -> None:
        if not link.wait_until_gone(self._directory, _PATIENCE_S):
            raise KeeperLost("the keeper is lost, and its children do not end")
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._keeper.pid, 0)
        self._keeper = self._start()
        self._is_lost = False
