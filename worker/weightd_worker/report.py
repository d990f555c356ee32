"""What this interpreter and its cards are: ``python -m weightd_worker.report``, started by `weightd doctor`.

Vendors' libraries crash and hang, and say on a dying machine nothing at all. So each step is announced before it is
taken, one JSON object in a line: ``{"begin": "devices"}``, then ``{"step": "devices", "count": 8}`` or ``{"step":
"devices", "error": "..."}``. The process that reads it knows where this one has stopped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, TextIO

from weightd_common import process_start
from weightd_common.process_start import die_with_parent
from weightd_protocol.version import VERSION

if TYPE_CHECKING:
    from weightd_worker.engines.mindspore_lite.acl import Acl

Values = Dict[str, Any]


def read_python(_: int) -> Values:
    """Tell the interpreter, and this process's pid as the kernel numbers it here."""
    return {"executable": sys.executable, "version": platform.python_version(), "pid": str(os.getpid())}


def read_weightd(_: int) -> Values:
    """Tell weightd's version, and that everything is there which a worker imports."""
    importlib.import_module("weightd_worker.sessions.model")
    return {"version": VERSION}


def read_library(_: int) -> Values:
    """Tell the version of MindSpore Lite."""
    import mindspore_lite  # noqa: PLC0415 - as above

    return {"version": str(mindspore_lite.__version__)}


def read_current_pid(_: int) -> Values:
    """Tell this process's number in the driver, "" where the library cannot."""
    import mindspore_lite  # noqa: PLC0415 - as above

    model: Any = mindspore_lite.Model()
    if not hasattr(model, "get_model_info"):
        return {"pid": ""}
    return {"pid": str(model.get_model_info("current_pid"))}


def load_libascendcl(_: int) -> Values:
    """Tell whether the runtime can be loaded and begins to work."""
    _acl().initialize()
    return {}


def read_soc(_: int) -> Values:
    """Tell the name of the chip; that of a virtual instance may say so."""
    return {"name": _acl().soc_name()}


def count_devices(_: int) -> Values:
    """Tell how many devices this process sees."""
    return {"count": _acl().device_count()}


def read_memory(device: int) -> Values:
    """Take a place on the device and tell its memory."""
    acl = _acl()
    acl.set_device(device)
    found = acl.memory()
    return {"free_bytes": found.free_bytes, "total_bytes": found.total_bytes}


STEPS: Dict[str, Callable[[int], Values]] = {
    "python": read_python,
    "weightd": read_weightd,
    "library": read_library,
    "current_pid": read_current_pid,
    "libascendcl": load_libascendcl,
    "soc": read_soc,
    "devices": count_devices,
    "memory": read_memory,
}


def _acl() -> Acl:
    # Not at the top: where numpy is missing, this process is to say so.
    from weightd_worker.engines.mindspore_lite.acl import Acl  # noqa: PLC0415

    return Acl()


def main() -> None:
    """Take every step, whatever becomes of the one before."""
    arguments = _parser().parse_args()
    die_with_parent(arguments.parent)
    with os.fdopen(os.dup(1), "w", encoding="ascii") as out:
        # A library may greet on stdout; that belongs to the log.
        os.dup2(2, 1)
        for name, step in STEPS.items():
            _write_line(out, {"begin": name})
            try:
                values = step(arguments.device)
            except Exception as error:  # noqa: BLE001 - an import runs foreign code: it can fail in any way
                values = {"error": str(error) or type(error).__name__}
            _write_line(out, {"step": name, **values})


def _write_line(out: TextIO, line: Values) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weightd_worker.report",
        description="Reports on an interpreter and its cards. It is started by `weightd doctor`, not by hand.",
    )
    parser.add_argument("--device", required=True, type=int, help="id of the Ascend device to look at")
    parser.add_argument("--parent", required=True, type=int, help="pid of the process that starts it")
    return parser


if __name__ == "__main__":
    process_start.reset_signals()
    main()
    # Native libraries have been seen to crash in their exit handlers.
    os._exit(0)
