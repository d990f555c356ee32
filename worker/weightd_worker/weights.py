"""Weights that replace those of the model file: an .npz of arrays by their names in the model."""

from __future__ import annotations

import zipfile
from typing import Any, Dict

import numpy as np

from weightd_worker.engines.engine import Arrays
from weightd_worker.engines.errors import BuildError


def load(path: str) -> Arrays:
    """Return the arrays of the file.

    Raises:
        BuildError: it is no such file; the text names it.
    """
    try:
        # Objects would be unpickled, and a pickle can do anything.
        with np.load(path, allow_pickle=False) as file:
            arrays: Dict[str, Any] = {name: file[name] for name in file.files}
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror or error}") from None
    except (ValueError, EOFError, AttributeError, KeyError, TypeError, zipfile.BadZipFile) as error:
        # An .npy is an array, which has neither a with nor names.
        raise BuildError(f"{path}: expected an .npz of plain arrays: {_problem(path, str(error))}") from None
    if not arrays:
        raise BuildError(f"{path}: there is no array in it")
    return arrays


def _problem(path: str, message: str) -> str:
    """What is wrong with the file, where numpy would only advise to load pickles."""
    if not zipfile.is_zipfile(path):
        return "it is another kind of file, or damaged"
    return "it holds Python objects" if "allow_pickle" in message else message
