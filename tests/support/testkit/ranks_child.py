"""Process of a rank or scheduler of `ranks.Group`, run by the interpreter with MindSpore.

The process exits with its parent. A plain rank imports no weightd package.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import socket
import struct
import sys
import time
from typing import Any, Dict, List, NamedTuple

import numpy as np

Arrays = Dict[str, Any]
_LENGTH = struct.Struct(">I")
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
_HOST = "127.0.0.1"
_THREADS = 1  # the default of weightd


class RankArguments(NamedTuple):
    """Numbers of the command line; `fd` is the socket on which a rank receives orders."""

    rank: int
    size: int
    port: int
    connect_timeout: int
    exec_timeout: int
    fd: int


class PlainRank:
    """A rank that uses MindSpore alone."""

    def __init__(self, rank_arguments: RankArguments) -> None:
        join("MS_WORKER", rank_arguments)
        import mindspore

        self._library = mindspore
        mindspore.communication.init()

    def load(self, path: str) -> None:
        self._cell = self._library.nn.GraphCell(self._library.load(path))

    def predict(self, inputs: Arrays) -> Arrays:
        return direct(self._cell, inputs)

    direct = predict


class Engine:
    """A rank that loads its file with weightd's engine, and again with MindSpore alone."""

    def __init__(self, rank_arguments: RankArguments) -> None:
        from weightd_worker.engines.mindspore import MindSporeRank

        self._rank = MindSporeRank(make_rendezvous(rank_arguments))
        self._rank.join_group()

    def load(self, path: str) -> None:
        import mindspore

        self._rank.load(path)
        self._cell = mindspore.nn.GraphCell(mindspore.load(path))

    def predict(self, inputs: Arrays) -> Arrays:
        return self._rank.predict(inputs)

    def direct(self, inputs: Arrays) -> Arrays:
        return direct(self._cell, inputs)


def join(role: str, rank_arguments: RankArguments) -> None:
    os.environ.update(
        MS_ROLE=role,
        MS_NODE_ID=str(rank_arguments.rank),
        MS_WORKER_NUM=str(rank_arguments.size),
        MS_SCHED_HOST=_HOST,
        MS_SCHED_PORT=str(rank_arguments.port),
        MS_TOPO_TIMEOUT=str(rank_arguments.connect_timeout),
        MS_NODE_TIMEOUT=str(rank_arguments.exec_timeout),
        GLOG_v="3",
    )
    if role == "MS_SCHED":
        del os.environ["MS_NODE_ID"]
    import mindspore

    threads = {} if role == "MS_SCHED" else {"runtime_num_threads": _THREADS}
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU", **threads)


def make_rendezvous(rank_arguments: RankArguments) -> Any:
    from weightd_worker.engines.ranks import RankRendezvous

    return RankRendezvous(
        rank_arguments.rank,
        rank_arguments.size,
        "cpu",
        host=_HOST,
        port=rank_arguments.port,
        connect_timeout_s=rank_arguments.connect_timeout,
        exec_timeout_s=rank_arguments.exec_timeout,
    )


def schedule(how: str, rank_arguments: RankArguments) -> None:
    if how == "plain":
        join("MS_SCHED", rank_arguments)
        import mindspore

        mindspore.communication.init()
    else:
        from weightd_worker.engines.mindspore import MindSporeRank

        MindSporeRank.serve_broker(make_rendezvous(rank_arguments))


def direct(cell: Any, inputs: Arrays) -> Arrays:
    from mindspore import Tensor

    return {"output_0": cell(*map(Tensor, inputs.values())).asnumpy()}


def measured(rank: Any, inputs: Arrays) -> Arrays:
    times = int(inputs.pop("times"))
    seconds: List[float] = []
    for _ in range(times):
        begun = time.perf_counter()
        rank.direct(inputs)
        seconds.append(time.perf_counter() - begun)
    return {"seconds": np.array(seconds)}


def obey(rank: Any, order: str, arrays: Arrays) -> Arrays:
    if order == "load":
        rank.load(str(arrays["path"]))
        return {}
    if order == "parent":
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
        return {"signal": np.array(number.value)}
    if order == "measure":
        return measured(rank, arrays)
    answer: Arrays = {"predict": rank.predict, "direct": rank.direct}[order](arrays)
    return answer


def serve(rank: Any, fd: int) -> None:
    with socket.socket(fileno=fd) as sock, sock.makefile("rwb") as file:
        while True:
            head = file.read(_LENGTH.size)
            if not head:
                return
            with np.load(io.BytesIO(file.read(*_LENGTH.unpack(head)))) as given:
                arrays = dict(given)
            try:
                answer: Any = obey(rank, str(arrays.pop("_order")), arrays)
            except Exception as error:  # noqa: BLE001 - the test receives every error
                answer = {"_error": np.array(f"{type(error).__name__}: {error}")}
            data = io.BytesIO()
            np.savez(data, **answer)
            file.write(_LENGTH.pack(data.tell()) + data.getvalue())
            file.flush()


def main(role: str, how: str, rank_arguments: RankArguments) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if role == "scheduler":
        schedule(how, rank_arguments)
    else:
        serve((PlainRank if how == "plain" else Engine)(rank_arguments), rank_arguments.fd)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], RankArguments(*map(int, sys.argv[3:])))
