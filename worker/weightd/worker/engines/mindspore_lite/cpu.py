"""MindSpore Lite on the CPU.

It rearranges some weights only in the first predict: they are shared because one comes before (`Engine`). That predict
also decides which shapes the built Model may compute (`shapes`); for any other shape this engine builds a new Model.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from typing import Any, Dict, Generator, Optional, Sequence

import numpy as np

from weightd.worker.engines.cpu import CpuEngine
from weightd.worker.engines.engine import Arrays, Settings
from weightd.worker.engines.errors import BuildError, NotRun, Spoilt
from weightd.worker.engines.mindspore_lite.model import MindSporeLite
from weightd.worker.engines.mindspore_lite.shapes import Form, Shape, covers, grown

_log = logging.getLogger("weightd.worker")

# Much less than what a predict may take by default.
_LOCK_PATIENCE_S = 5.0


class MindSporeLiteCpu(MindSporeLite, CpuEngine):
    """Runs a MindIR model on the CPU, where weightd shares pages."""

    grows = True

    def __init__(self, settings: Settings) -> None:
        MindSporeLite.__init__(self, settings)
        CpuEngine.__init__(self, settings)
        self._path = ""
        self._handle = ""
        # The shapes of the first predict of the built Model, and of the last one.
        self._first: Optional[Form] = None
        self._last: Optional[Form] = None

    @property
    def max_shape(self) -> Optional[Dict[str, Shape]]:
        """The option `max_shape`, None where it is not set."""
        bound = self._options.max_shape
        return None if bound is None else dict(bound)

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build a new Model."""
        self._path, self._handle = model, handle
        self.grew = False
        self._begin(handle)
        self._build_model()

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model, on a new Model where the built one may not compute these shapes."""
        form = self._form_of(inputs)
        if form == (self._first if self.by_shape else self._last):
            return self._compute(inputs)
        return self._compute_changed(form, inputs)

    def _compute_changed(self, form: Form, inputs: Arrays) -> Arrays:
        """Compute a shape that is not that of the predict before.

        Raises:
            NotRun: the option `max_shape` does not cover it.
            Spoilt: the predict failed, or the model could not be built again.
        """
        self._check_bound(form)
        if self._first is None:
            self._first = form
        elif form != self._first and (self.by_shape or not covers(self._first, form)):
            return self._compute_anew(form, inputs)
        outputs = self._compute(inputs)
        self._last = form
        return outputs

    def _compute_anew(self, form: Form, inputs: Arrays) -> Arrays:
        """Compute on a new Model, whose first shape is this one; leave one that covers the shapes before, too."""
        with _one_at_a_time(self._path):
            target = form
            if self._first is not None and not self.by_shape:
                target = grown(self._first, form, [each.shape or () for each in self._signature.inputs])
                self.grew = True
            self._build_again()
            outputs = self._compute(inputs)
            if target != form:
                target = self._enlarge(form, target, inputs, outputs)
        self._first, self._last = target, form
        self._after_rebuild()
        return outputs

    def _after_rebuild(self) -> None:
        if self._pages is not None:
            self._pages.attach_again()

    def _enlarge(self, form: Form, target: Form, inputs: Arrays, outputs: Arrays) -> Form:
        """Build a Model that computes `target` first; return the first shape of the one that is there then.

        It has to give the same answer to this request, else the engine builds a new Model for each shape from now on.
        """
        self._build_again()
        try:
            self._compute({name: np.resize(inputs[name], shape) for name, shape in zip(self._names, target)})
        except Spoilt:
            self._build_again()
            target = form
        again = self._compute(inputs)
        if any(again[name].tobytes() != outputs[name].tobytes() for name in outputs):
            _log.warning(
                "answers depend on the shapes computed before: the model is built again at each change of shape"
            )
            self.by_shape = True
        return target

    def _compute(self, inputs: Arrays) -> Arrays:
        return MindSporeLite.predict(self, inputs)

    def _form_of(self, inputs: Arrays) -> Form:
        # Of the signature: other threads may come while a new Model is being built.
        return tuple([inputs[each.name].shape for each in self._signature.inputs])

    def _check_bound(self, form: Form) -> None:
        bound = self._options.max_shape
        if bound is None:
            return
        for name, shape in zip(self._names, form):
            if not covers((bound.get(name, shape),), (shape,)):
                raise NotRun(
                    f'input "{name}": expected a shape of at most {list(bound[name])}, which the key '
                    f"mindspore_lite.max_shape of the model sets, got {list(shape)}"
                )

    def _build_again(self) -> None:
        # The memory of the old Model is free before the new one is built.
        self.discard()
        try:
            self._begin(self._handle)
            self._build_model()
        except BuildError as error:
            raise Spoilt(f"building the model again for another shape failed: {error}") from None

    def _build_model(self) -> None:
        self._first = self._last = None
        self._build(self._path, self._context(), {})

    def discard(self) -> None:
        """Free the built model. Pages that it shares stay in the page store, which is a file."""
        self._bind([])
        del self._model

    def _context(self) -> Any:
        context = self._library.Context()
        context.target = ["cpu"]
        context.cpu.thread_num = self._settings.threads
        self._options.set_cpu(context.cpu)
        return context


@contextlib.contextmanager
def _one_at_a_time(path: str) -> Generator[None, None, None]:
    """Have the processes that serve one model build one after another: a build takes several times its weights."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Spoilt(f"building the model again for another shape failed: {path}: {error.strerror}") from None
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Take the lock if it can be had within some seconds: to build at once takes memory, and changes no answer."""
    # The process that has it may be stopped; and a file system may have no locks.
    end = time.monotonic() + _LOCK_PATIENCE_S
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.01)
