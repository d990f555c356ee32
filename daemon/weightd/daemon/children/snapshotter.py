"""The immutable copy of a model from which every process of a generation builds.

Runs as a process of its own (``python -m weightd.daemon.children.snapshotter PARENT MODEL DIRECTORY [FILE COPY]...``),
because copying and digesting gigabytes would stop the daemon's loop. It answers on stdout, a pipe, with an object in
JSON: the `sha256` of the model and its `nbytes`, or an `error` and status 1.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, BinaryIO

from weightd.shared.modelfile import Model, ModelFileError, digest, model_files, open_file
from weightd.shared.oom import go_before_the_daemon
from weightd.shared.parent import die_with, ignore_interrupts


def take(model: Path, directory: Path) -> Path:
    """Copy the model's files into `directory`, read-only, and return the copy of the model file.

    The copy shares the original's blocks where the file system can do that.

    Raises:
        ModelFileError: the model is not as `Model` wants it, or changes while it is copied.
        OSError: the copy cannot be written.
    """
    directory.mkdir(mode=0o700)
    try:
        with Model(model) as original:
            for file in original.files:
                _copy(original.open(file), directory / file.name)
            original.check_unchanged()
            return directory / original.files[0].name
    except BaseException:
        # Where the copy has filled the disk, the words about that have no room before it is gone.
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _copy(source: BinaryIO, target: Path) -> None:
    """Copy what was opened, and close it."""
    target.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    with source as reader, target.open("xb") as writer:
        if not _copied_by_kernel(reader.fileno(), writer.fileno()):
            reader.seek(0)
            writer.seek(0)
            writer.truncate()
            shutil.copyfileobj(reader, writer, 1024 * 1024)
        os.fchmod(writer.fileno(), 0o400)


def _copied_by_kernel(reader: int, writer: int) -> bool:
    """Copy the file without reading it; False if these file systems cannot, or say that it ends early."""
    remaining = os.fstat(reader).st_size
    try:
        while remaining > 0:
            copied = os.copy_file_range(reader, writer, remaining)
            if copied == 0:
                return False
            remaining -= copied
    except OSError:
        return False
    return True


def main() -> int:
    """Take the snapshot that the arguments name; answer with its digest and its size in bytes, or with an error."""
    model, directory, *more = map(Path, sys.argv[1:])
    answer: dict[str, Any]
    try:
        copy = take(model, directory)
        for source, target in zip(more[::2], more[1::2], strict=True):
            _copy(open_file(source), target)
        nbytes = sum(file.nbytes for file in model_files(copy, own=True))
        answer = {"sha256": digest(copy, own=True), "nbytes": nbytes}
    except ModelFileError as error:
        answer = {"error": str(error)}
    except OSError as error:
        what = error.filename if Path(error.filename or "") in more[::2] else model
        answer = {"error": f"cannot copy {what} to {directory}: {error.strerror}"}
    print(json.dumps(answer))
    return int("error" in answer)


if __name__ == "__main__":
    ignore_interrupts()
    die_with(int(sys.argv.pop(1)))
    go_before_the_daemon("worker")
    sys.exit(main())
