"""Fuzz a target with atheris, guided by weightd's coverage, or run inputs once: `run.py TARGET [FILE ...]`."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

import targets

_HERE = Path(__file__).resolve().parent
_SCRATCH = _HERE.parents[1] / "build" / "fuzz"

# msgpack's decoder is compiled unless MSGPACK_PUREPYTHON=1 selects the one in Python.
_GUIDED_BY = ("weightd_common", "weightd_daemon", "weightd_protocol", "weightd_worker", "tomllib", "msgpack")
# atheris 3.0 leaks about a kilobyte for each comparison of arrays in instrumented code.
_NOT_GUIDED_BY = ("weightd_worker.pagesharing.runs",)

# An input takes about a millisecond. An input that takes ten seconds, or more memory than interpreter, numpy and
# coverage need, is a finding, on a busy machine as well.
_TIMEOUT_S = 10
_MEMORY_MIB = 768


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=targets.NAMES)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="inputs to run once, without a fuzzer")
    parser.add_argument("--seconds", type=int, default=60, help="how long to fuzz [60]")
    given = parser.parse_args(arguments)
    if given.files:
        target = targets.load(given.target)
        for file in given.files:
            print(f"{given.target}: {file}", flush=True)
            target.one_input(file.read_bytes())
    elif importlib.util.find_spec("atheris") is None:
        parser.error("fuzzing needs atheris, of CPython 3.11 or later: make fuzz, or pip install --group fuzz")
    else:
        fuzz(given.target, given.seconds)


def fuzz(name: str, seconds: int) -> NoReturn:
    """Fuzz for this time. New inputs go to build/fuzz; a finding goes to the corpus and ends the process with an
    error."""
    import atheris

    with atheris.instrument_imports(include=_GUIDED_BY, exclude=_NOT_GUIDED_BY):
        target = targets.load(name)
    corpus = _HERE / "corpus" / name
    scratch = _SCRATCH / name
    scratch.mkdir(parents=True, exist_ok=True)
    words = _SCRATCH / f"{name}.words"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words), "ascii")

    def one_input(data: bytes) -> None:
        try:
            target.one_input(data)
        except BaseException:
            file = corpus / f"crash-{hashlib.sha1(data).hexdigest()}"  # libFuzzer uses this name
            print(f"\n{name}: a finding. To run it again:\n  {_command(name, file)}", file=sys.stderr, flush=True)
            raise

    options = {
        "artifact_prefix": f"{corpus}/",
        "dict": words,
        "len_control": 0,  # The seeds determine the useful lengths.
        "max_len": target.max_bytes,
        "max_total_time": seconds,
        "print_final_stats": 1,
        "rss_limit_mb": _MEMORY_MIB,
        "timeout": _TIMEOUT_S,
    }
    flags = [f"-{option}={value}" for option, value in options.items()]
    print(f"{name}: {seconds} s; a finding would be kept as {corpus}/crash-*", flush=True)
    atheris.Setup([sys.argv[0], *flags, str(scratch), str(corpus)], one_input)
    atheris.Fuzz()
    raise SystemExit


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def _command(name: str, file: Path) -> str:
    return " ".join(os.path.relpath(each) for each in (sys.executable, __file__)) + f" {name} {os.path.relpath(file)}"


if __name__ == "__main__":
    main()
