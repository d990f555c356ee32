"""What is known of each engine outside its processes: one `EngineSpec` each, and what its files and cards demand.

No engine is imported; of weightd only `platform`, the protocol and what is shared may be.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightd_daemon.engines import mindspore, mindspore_lite, onnxruntime
from weightd_daemon.engines.spec import EngineSpec

ENGINES: Mapping[str, EngineSpec] = {
    each.name: each for each in (onnxruntime.SPEC, mindspore_lite.SPEC, mindspore.SPEC)
}
"""The engines by name. Of several with one suffix, the first is the default."""


def engine_for(suffix: str) -> str:
    """Return the name of the engine whose models have that suffix, "" where none has."""
    return next((each.name for each in ENGINES.values() if each.suffix == suffix), "")
