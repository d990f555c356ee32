from __future__ import annotations

import re
from pathlib import Path

import pytest

from weightd_daemon.platform import environment

ROOT = Path(__file__).resolve().parents[3]
SECRETS = {"https_proxy": "http://me:secret@proxy", "AWS_SECRET_ACCESS_KEY": "secret", "PASSWORD": "secret"}
NEEDED = {"PATH": "/bin", "LC_ALL": "C", "PYTHONPATH": "/p", "ASCEND_HOME_PATH": "/a", "HCCL_CONNECT_TIMEOUT": "1"}


@pytest.mark.parametrize(
    ("listed", "kept"),
    [
        ((), {}),
        (("PASSWORD", "AWS"), {"PASSWORD": "secret"}),
        (("AWS_*",), {"AWS_SECRET_ACCESS_KEY": "secret"}),
        (("*",), SECRETS),
    ],
)
def test_keeps_engine_variables_and_listed_ones(listed: tuple[str, ...], kept: dict[str, str]) -> None:
    variables = {**SECRETS, **NEEDED}
    environment.remove_unlisted(variables, listed)
    assert variables == {**NEEDED, **kept}


def test_keeps_every_variable_the_project_sets() -> None:
    """Engine variables that workers and the systemd drop-ins name are passed to child processes."""
    sources = [*ROOT.glob("worker/weightd_worker/engines/**/*.py"), *ROOT.glob("systemd/**/*.conf")]
    text = "\n".join(each.read_text("utf-8") for each in sources)
    names = set(re.findall(r'os\.environ(?:\[|\.get\(|\.setdefault\()"(\w+)"', text))
    names |= set(re.findall(r'^#?\s*Environment="?(\w+)=', text, re.MULTILINE))
    assert len(names) > 3
    variables = dict.fromkeys(names, "1")
    environment.remove_unlisted(variables)
    assert variables.keys() == names


def test_default_variables_are_documented() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    assert [each for each in environment.DEFAULT_VARIABLES if f"`{each}`" not in page] == []
