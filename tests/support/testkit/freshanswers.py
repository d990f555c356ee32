"""Reference answers of MindSpore Lite, each computed in a new process.

``python freshanswers.py MODEL DIRECTORY NUMBER`` reads 0.in.npz to (NUMBER - 1).in.npz in DIRECTORY and writes
N.out.npz for each; the file is missing if the process crashed. The processes are forked before the library builds a
model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np

Arrays = Mapping[str, Any]


def answers(model: Path, inputs: Sequence[Arrays], directory: Path, python: str) -> List[Optional[Arrays]]:
    """Return the answer to each of the inputs, or None if the process crashed.

    `python` is an interpreter with MindSpore Lite.
    """
    for number, arrays in enumerate(inputs):
        np.savez(str(directory / f"{number}.in.npz"), **arrays)
    command = [python, __file__, str(model), str(directory), str(len(inputs))]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    outs = [directory / f"{number}.out.npz" for number in range(len(inputs))]
    return [dict(np.load(str(out))) if out.exists() else None for out in outs]


def answer(model: str, arrays: Arrays) -> Dict[str, Any]:
    """Return the answer of a newly built model."""
    import mindspore_lite

    context = mindspore_lite.Context()
    context.target = ["cpu"]
    context.cpu.thread_num = 1
    built = mindspore_lite.Model()
    built.build_from_file(model, mindspore_lite.ModelType.MINDIR, context)
    inputs = built.get_inputs()
    built.resize(inputs, [list(arrays[each.name].shape) for each in inputs])
    inputs = built.get_inputs()
    for each in inputs:
        each.set_data_from_numpy(np.ascontiguousarray(arrays[each.name]))
    return {each.name: np.array(each.get_data_to_numpy()) for each in built.predict(inputs)}


def main(model: str, directory: str, number: int) -> None:
    """Write the answers to the files of the directory."""
    import mindspore_lite  # noqa: F401 - imported once, before the processes are forked

    for each in range(number):
        child = os.fork()
        if child == 0:
            arrays = dict(np.load(str(Path(directory) / f"{each}.in.npz")))
            np.savez(str(Path(directory) / f"{each}.out.npz"), **answer(model, arrays))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
