"""Child process of `program`: forks a program for each request, which then runs the code that it receives."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from typing import Any, Dict, List, Optional, Tuple

import mindspore_lite as ms
import numpy as np

_PR_SET_PDEATHSIG = 1

Sections = Dict[str, Dict[str, str]]

ms_any: Any = ms  # the simulator; type checkers would use the vendor's stubs


def with_section(config: Optional[Sections], section: Dict[str, str]) -> Optional[Sections]:
    """Return the configuration with these keys added to ascend_context."""
    given: Sections = config or {}
    return {**given, "ascend_context": {**given.get("ascend_context", {}), **section}} if section else config


class Library:
    """Functions for the code of a test; `model` is the last model built."""

    def __init__(self) -> None:
        self.model: Any = None

    def context(
        self, target: str = "ascend", device: int = 0, provider: str = "", rank: int = 0, groups: Any = ""
    ) -> Any:
        context = ms_any.Context()
        context.target = [target]
        context.ascend.device_id = device
        context.ascend.provider = provider
        context.ascend.rank_id = rank
        context.group_info_file = str(groups)
        return context

    def build(
        self,
        path: Any,
        pids: str = "",
        handle: str = "",
        options: Any = None,
        config: Optional[Sections] = None,
        **placement: Any,
    ) -> str:
        """Build a new model; return the handle that it exports. `config` has sections, to which the keys are added."""
        keys = {"shareable_weight_pid_list": pids, "shareable_weight_mem_handle": handle}
        section = {key: value for key, value in keys.items() if value}
        self.model = ms_any.Model()
        where = self.context(**placement)
        sections = with_section(config, section)
        self.model.build_from_file(str(path), ms_any.ModelType.MINDIR, where, config_dict=sections, **(options or {}))
        exported: str = self.model.get_model_info("shareable_weight_mem_handle")
        return exported

    def rank(
        self,
        path: Any,
        table: Any,
        rank: int,
        device: int = -1,
        groups: Any = "",
        config: Optional[Sections] = None,
    ) -> str:
        """Build a slice as this rank, by default on the card with the same number."""
        sections = with_section(config, {"rank_table_file": str(table)})
        device = rank if device < 0 else device
        return self.build(path, config=sections, provider="ge", rank=rank, device=device, groups=groups)

    def predict(self, *arrays: Any) -> Any:
        """Resize, set the inputs, predict, and copy the first output."""
        self.model.resize(self.model.get_inputs(), [list(array.shape) for array in arrays])
        tensors = self.model.get_inputs()
        for tensor, array in zip(tensors, arrays):
            tensor.set_data_from_numpy(array)
        return self.model.predict(tensors)[0].get_data_to_numpy().copy()

    def pid(self) -> int:
        """Return the driver's pid of this process."""
        return int(ms_any.Model().get_model_info("current_pid"))

    def set_pids(self, handle: str, *pids: int) -> int:
        """Call aclrtMemSetPidToShareableHandle by ctypes."""
        function: Any = ctypes.CDLL("libascendcl.so").aclrtMemSetPidToShareableHandle
        array = (ctypes.c_int32 * len(pids))(*pids)
        code: int = function(ctypes.c_uint64(int(handle)), array, ctypes.c_size_t(len(pids)))
        return code


def run(code: str, names: Dict[str, Any]) -> Any:
    """Run lines of code; return the value of the last one, if it is an expression."""
    *lines, last = code.strip().splitlines()
    try:
        expression = compile(last, "<test>", "eval")
    except SyntaxError:
        exec(code, names)
        return None
    exec("\n".join(lines), names)
    return eval(expression, names)


def serve(stream: Any) -> None:
    """Run the received code until the end of the stream."""
    library = Library()
    names: Dict[str, Any] = {"ms": ms_any, "np": np, "ctypes": ctypes, "os": os, "lib": library}
    for name in ("build", "predict", "pid", "set_pids", "context", "rank"):
        names[name] = getattr(library, name)
    while True:
        try:
            code, values = pickle.load(stream)
        except EOFError:
            return
        names.update(values)
        answer: Tuple[Optional[Tuple[str, str]], Any]
        try:
            answer = None, run(code, names)
        except Exception as error:  # noqa: BLE001 - any error of the library is the answer
            answer = (type(error).__name__, str(error)), None
        pickle.dump(answer, stream, protocol=4)
        stream.flush()


def become(command: List[str], log: str, variables: Dict[str, str], arguments: str = "") -> None:
    """Turn this process into a program: a module with its arguments, or a server at an address."""
    os.environ.update(variables)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    os.dup2(2, 1)
    with tempfile.TemporaryFile() as stdin:
        stdin.write(arguments.encode())
        stdin.seek(0)
        os.dup2(stdin.fileno(), 0)
    module, *sys.argv[1:] = command
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        serve(connection.makefile("rwb"))


def fork(request: Tuple[Any, ...]) -> int:
    """Start a program, which the kernel kills when this process exits."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            become(*request)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the child must exit here in any case
            traceback.print_exc()
            os._exit(1)
    return pid


def status(pid: int) -> int:
    """Wait until a program exits; return its exit status, negative for a signal."""
    ended = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(ended) if os.WIFSIGNALED(ended) else os.WEXITSTATUS(ended)


def main() -> None:
    """Fork a program for each request, and report exit statuses."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "wb")
    with contextlib.suppress(EOFError):
        while True:
            request = pickle.load(sys.stdin.buffer)
            pickle.dump(status(request) if isinstance(request, int) else fork(request), answers, protocol=4)
            answers.flush()


if __name__ == "__main__":
    main()
