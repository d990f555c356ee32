from __future__ import annotations

import json

from testkit.fakedaemon import FakeDaemon, silent
from weightctl import exit_codes

from .conftest import Ctl, fails


def test_prints_metrics_as_text_or_json(ctl: Ctl, daemon: FakeDaemon) -> None:
    ran = ctl("metrics")
    assert (ran.status, ran.err) == (exit_codes.OK, "")
    assert ran.out.startswith("# HELP weightd_build_info ")
    assert ran.out.endswith('weightd_build_info{version="9.9"} 1\n')
    ran = ctl("metrics", "--json")
    assert (json.loads(ran.out)["version"], ran.out[-1]) == ("9.9", "\n")
    daemon.handle = fails("UNAUTHENTICATED", "unknown user")
    assert ctl("metrics") == (exit_codes.ERROR, "", "UNAUTHENTICATED: unknown user\n")
    daemon.handle = silent
    assert ctl("--timeout", "0.2", "metrics").status == exit_codes.UNAVAILABLE
