"""Conversion from ONNX to MindIR with MindSpore Lite's Converter, and the path of its interpreter.

The Converter runs in a separate process, because it can crash, and a process that has converted may crash later.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Mapping

REPOSITORY = Path(__file__).resolve().parents[3]
HOW_TO_GET_IT = "no working .venv-mslite: `make test` makes it, of the CPython 3.7 that $WEIGHTD_PYTHON37 names"

CONVERT_LIMIT_S = 300  # 192 MiB of weights take 1 to 2 s on two cores
IMPORT_LIMIT_S = 60  # the first import reads 200 MB of libraries from disk

_CONVERT = """
import sys
import mindspore_lite
converter = mindspore_lite.Converter()
converter.optimize = "general"
converter.save_type = mindspore_lite.ModelType.MINDIR
for source, out in zip(sys.argv[1::2], sys.argv[2::2]):
    converter.convert(fmk_type=mindspore_lite.FmkType.ONNX, model_file=source, output_file=out)
"""


class ConvertError(RuntimeError):
    """Error: the Converter rejected the model or crashed. The message contains the native log."""


@functools.lru_cache(maxsize=None)
def interpreter() -> Path | None:
    """Return the repository's `.venv-mslite/bin/python`, or None if it cannot import MindSpore Lite."""
    python = REPOSITORY / ".venv-mslite" / "bin" / "python"
    if not python.exists():
        return None
    command = [str(python), "-I", "-c", "import mindspore_lite"]
    done = subprocess.run(command, capture_output=True, timeout=IMPORT_LIMIT_S, check=False)
    return python if done.returncode == 0 else None


def convert(onnx: Path, out: Path, python: Path) -> Path:
    """Convert the ONNX file to MindIR at `out` (suffix `.mindir`); `python` is an interpreter with MindSpore Lite.

    Only the owner can read the file (mode 0400). Models above 1 GB fail, as they become several files.
    """
    convert_all({onnx: out}, python)
    return out


def convert_all(outs: Mapping[Path, Path], python: Path) -> None:
    """Convert several ONNX files in one process; `outs` maps each to its output path."""
    # The Converter always appends the suffix.
    command = [str(python), "-I", "-c", _CONVERT]
    for onnx, out in outs.items():
        if out.suffix != ".mindir":
            raise ValueError(f"MindSpore Lite writes .mindir files only, not {out.name}")
        if out.exists():
            out.unlink()
        command += [str(onnx), str(out.with_suffix(""))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_LIMIT_S, check=False)
    missing = [onnx.name for onnx, out in outs.items() if not out.exists()]
    if done.returncode != 0 or missing:
        log = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        names = ", ".join(missing) or "what is there"
        raise ConvertError(f"{names} could not be converted (exit status {done.returncode}):\n{log}")
