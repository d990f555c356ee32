from __future__ import annotations

import gc

import pytest

from weightd_common.gc_control import gc_disabled


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_is_back_whatever_the_import_does(fails: bool) -> None:
    try:
        with gc_disabled():
            assert not gc.isenabled()
            kept = [None]
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    assert gc.isenabled()
    assert not any(each is kept for each in gc.get_objects())
