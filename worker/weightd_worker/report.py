"""Report on this interpreter and its cards: `weightd doctor` starts ``python -m weightd_worker.report``.

Vendors' libraries may crash or hang, and a crashed process reports nothing. So this process announces each step before
it runs the step. The output has one JSON object per line: first ``{"begin": "devices"}``, then ``{"step": "devices",
"count": 8}`` or ``{"step": "devices", "error": "..."}``. If the process crashes or hangs, the reader of the output can
see in which step.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import sysconfig
from typing import TYPE_CHECKING, Any, Callable, Dict, TextIO

from weightd_common import process_start
from weightd_common.process_start import die_with_parent
from weightd_protocol.version import VERSION

if TYPE_CHECKING:
    from weightd_worker.engines.mindspore_lite.acl import Acl

Values = Dict[str, Any]


def read_python(_: int) -> Values:
    """Return path, version and build of the interpreter, and the pid of this process in its pid namespace."""
    return {
        "executable": sys.executable,
        "version": platform.python_version(),
        "optimized": is_optimized(str(sysconfig.get_config_var("CONFIG_ARGS") or ""), sys.base_prefix),
        "pid": str(os.getpid()),
    }


def is_optimized(config_args: str, prefix: str) -> bool:
    """Return whether an interpreter was built with profile-guided optimization, as far as its build shows.

    Args:
        config_args: the arguments of CPython's `configure`. Debian optimizes its build without the usual argument.
        prefix: the directory in which the interpreter is installed; "/usr" for the interpreter of a distribution.
    """
    return prefix == "/usr" or "--enable-optimizations" in config_args


def read_weightd(_: int) -> Values:
    """Import all modules that a worker imports, and return weightd's version."""
    importlib.import_module("weightd_worker.sessions.model")
    return {"version": VERSION}


def read_library(_: int) -> Values:
    """Return the version of MindSpore Lite."""
    import mindspore_lite  # noqa: PLC0415 - as above

    return {"version": str(mindspore_lite.__version__)}


def read_current_pid(_: int) -> Values:
    """Return the pid by which the driver identifies this process; "" if the library is too old to report it."""
    import mindspore_lite  # noqa: PLC0415 - as above

    model: Any = mindspore_lite.Model()
    if not hasattr(model, "get_model_info"):
        return {"pid": ""}
    return {"pid": str(model.get_model_info("current_pid"))}


def load_libascendcl(_: int) -> Values:
    """Load and initialize libascendcl. Return no values."""
    _acl().initialize()
    return {}


def read_soc(_: int) -> Values:
    """Return the name of the card's chip. The name may show that the card is a virtual instance."""
    return {"name": _acl().soc_name()}


def count_devices(_: int) -> Values:
    """Return the number of cards that this process sees."""
    return {"count": _acl().device_count()}


def read_memory(device: int) -> Values:
    """Open the card, which takes some of its memory, and return the card's free and total memory in bytes."""
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
    # Import this module only here, because it needs numpy. If numpy is missing, all earlier steps still give their
    # results.
    from weightd_worker.engines.mindspore_lite.acl import Acl  # noqa: PLC0415

    return Acl()


def main() -> None:
    """Run all steps, even after a step has failed."""
    arguments = _parser().parse_args()
    die_with_parent(arguments.parent)
    with os.fdopen(os.dup(1), "w", encoding="ascii") as out:
        # Libraries may print to stdout. Redirect their text to stderr, so that the output contains only JSON.
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
        description="Reports on an interpreter and its cards. `weightd doctor` starts it; do not start it by hand.",
    )
    parser.add_argument("--device", required=True, type=int, help="id of the Ascend device to examine")
    parser.add_argument("--parent", required=True, type=int, help="pid of the process that starts it")
    return parser


if __name__ == "__main__":
    process_start.reset_signals()
    main()
    # Exit without running the exit handlers of native libraries, because some of these handlers crash.
    os._exit(0)
