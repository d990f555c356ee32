"""What is kept of freed memory, in a process of its own: the C library is told for good."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weightd_worker.pagesharing.libc import unsupported_reason

pytestmark = pytest.mark.skipif(bool(unsupported_reason()), reason="knows the malloc of glibc only")

_BEFORE = """
import resource
import numpy as np
from weightd_worker import pagesharing
from weightd_worker.process_memory import MAX_RETAINED_BYTES, MallocTuner, private_bytes
pagesharing.prepare()
asked = []
tuner = MallocTuner(lambda: asked.append(1))

def predict(nbytes):
    inputs = np.ones(nbytes, np.uint8)
    return inputs + inputs

def faults(times, nbytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        predict(nbytes)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def hole(nbytes, count=20):
    "Memory that is free, but not at the end of the heap."
    blocks = [np.ones(nbytes, np.uint8) for _ in range(count)]
    end = np.ones(500_000, np.uint8)
    del blocks
    return end
"""


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-c", _BEFORE + code], check=True)


def test_before_it_keeps_nothing_is_done() -> None:
    _run("""
tuner.limit_retained(), tuner.release_retained()
assert not asked
assert faults(10, 8_000_000) > 10 * 16_000_000 // 65_536 // 2
""")


@pytest.mark.parametrize("nbytes", [600_000, 8_000_000])
def test_a_predict_has_the_memory_of_the_one_before(nbytes: int) -> None:
    _run(f"""
tuner.retain_freed_memory()
predict({nbytes})
assert faults(20, {nbytes}) < 100
""")


def test_what_is_kept_is_bounded_and_given_back() -> None:
    _run("""
tuner.retain_freed_memory()
before = private_bytes()
end = hole(8_000_000)
assert private_bytes() - before > 2 * MAX_RETAINED_BYTES
tuner.limit_retained()
assert private_bytes() - before < 10_000_000
other = hole(2_000_000)
tuner.limit_retained()
assert private_bytes() - before > 30_000_000
assert len(asked) == 1
tuner.release_retained()
assert private_bytes() - before < 10_000_000
assert len(asked) == 2
""")


def test_what_each_predict_takes_anew_is_not_given_back_after_each() -> None:
    _run("""
import time
tuner.retain_freed_memory()
ends = []
for _ in range(3):
    ends.append(hole(8_000_000))
    tuner.limit_retained()
assert len(asked) == 1
now = time.monotonic() + 100
time.monotonic = lambda: now
tuner.limit_retained()
assert len(asked) == 2
""")


def test_what_is_needed_is_not_counted() -> None:
    _run("""
import time
tuner.retain_freed_memory()
needed = [np.ones(8_000_000, np.uint8) for _ in range(20)]
tuner.limit_retained()
end = hole(2_000_000)
now = time.monotonic() + 100
time.monotonic = lambda: now
tuner.limit_retained()
assert len(asked) == 1
""")
