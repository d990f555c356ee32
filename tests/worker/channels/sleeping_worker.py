"""A worker process whose predicts of -1 never end. The argument is the daemon's address."""

from __future__ import annotations

import sys
import time

from testkit.channels import SIGNATURE
from testkit.fakeengine import FakeEngine
from weightd_worker.connection import ChannelConnection
from weightd_worker.engines.engine import Arrays
from weightd_worker.sessions.build import ModelInputs
from weightd_worker.sessions.model import WorkerSession


def predict(inputs: Arrays) -> Arrays:
    while inputs["x"][0] == -1:
        time.sleep(1)
    return {"y": inputs["x"] * 2}


if __name__ == "__main__":
    engine = FakeEngine(predict, SIGNATURE)
    WorkerSession(ChannelConnection(sys.argv[1]), engine, ModelInputs("/m/model", "/s/store")).run("ab" * 32)
