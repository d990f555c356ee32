"""`weightd check --load`: loads one model after another in processes like the daemon's, and frees each again.

As when the daemon starts, a holder builds the model, runs the self-test and exports the weights. On a card, a worker
also attaches to the weights, because this can fail although the build succeeds. On the CPU a worker would only repeat
the holder's steps.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from weightd_common.devices import is_cpu
from weightd_daemon.config import selftest as selftest_config
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.doctor.selftest import sharing
from weightd_daemon.doctor.selftest.processes import ChildError, SelfTestProcesses
from weightd_daemon.generations.spec import SelfTestSpec
from weightd_daemon.platform.memory import MIB
from weightd_daemon.processes.spec import WorkerProgram
from weightd_protocol.messages.worker import Attached, Built

_log = logging.getLogger("weightd")

# By convention, /var/tmp is on a disk: a page store is as large as the model, and /tmp is often in memory.
_STORES_DIRECTORY = "/var/tmp"  # noqa: S108 - each use creates a private directory there


def find_load_failures(models: Mapping[str, ModelConfig]) -> Iterator[str]:
    """Load the models on each of their devices; log each result, and yield an error text for each failure.

    Each model is freed before the next one is loaded, and when the generator is closed.
    """
    models_without_ranks = {name: model for name, model in models.items() if model.ranks is None}
    for name in models.keys() - models_without_ranks.keys():
        _log.info("%s: not loaded, because it has ranks, which only weightd serve loads", name)
    loads = [
        (name, model, device) for name, model in models_without_ranks.items() for device in model.devices_by_weight_copy
    ]
    for count, (name, model, device) in enumerate(loads, 1):
        _log.info("%s on %s: loading, %d of %d", name, device, count, len(loads))
        begin = time.monotonic()
        failure, found = _load_model(model, device, is_shared=model.sharing != "off")
        if failure and model.sharing == "auto" and not is_cpu(device):
            unshared = failure
            failure, found = _load_model(model, device, is_shared=False)
            found = f"weights are not shared: {unshared}"
        if failure:
            yield f"models.{name}: does not load on {device}: {failure}"
        else:
            _log.info("%s on %s: loaded in %.1f s; %s", name, device, time.monotonic() - begin, found)


def _load_model(model: ModelConfig, device: str, *, is_shared: bool) -> tuple[str, str]:
    """Load a model; return the error ("" on success) and a description of the loaded model."""
    prefix = f"weightd-check-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=_STORES_DIRECTORY) as store:
        program = WorkerProgram(
            model.python,
            model.engine,
            model.path,
            device,
            threads=model.threads,
            sharing=is_shared,
            options=model.engine_options.to_json(),
            sample=selftest_config.inputs_path(model.selftest),
            tolerance=model.selftest_tolerance,
            cores=model.cores_of(device),
        )
        with SelfTestProcesses(program, model.load_timeout, prefix, Path(store)) as children:
            try:
                built, attached = sharing.load_model(
                    children, SelfTestSpec.from_config(model.selftest), should_attach=not is_cpu(device)
                )
            except ChildError as error:
                return str(error), ""
        if children.survivors:
            return f"processes {', '.join(map(str, children.survivors))} have not exited after SIGKILL", ""
    return _evaluate(built, attached, must_share=is_shared and not is_cpu(device))


def _evaluate(built: Built, attached: Attached | None, *, must_share: bool) -> tuple[str, str]:
    if must_share and not built.handle:
        reason = built.note or "no handle"
        return f'the library shares no weights: {reason}; set sharing = "auto" to load the model without sharing', ""
    if must_share and not built.selftest_digest:
        return f"no self-test: {built.selftest_note}; set the key selftest, or turn sharing off", ""
    if attached is not None and attached.selftest_digest != built.selftest_digest:
        return "the answer of a worker differs from the holder's answer", ""
    shared_text = f"{built.shared_bytes / MIB:,.0f} MiB shared" if built.shared_bytes else "nothing shared"
    selftest_text = "" if built.selftest_digest else f"no self-test: {built.selftest_note}"
    return "", "; ".join(filter(None, (shared_text, built.note, selftest_text)))
