"""docs/reliability.md describes each fault with the client's view, the daemon's action and tests that exist."""

import re
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]
_TEXT = (_REPOSITORY / "docs" / "reliability.md").read_text("utf-8")


def _fault_sections() -> dict[str, str]:
    """Return the text of each fault by its heading."""
    parts = re.split(r"^### (.*)$", re.sub(r"^## ", "### \0", _TEXT, flags=re.MULTILINE), flags=re.MULTILINE)
    return {heading: text for heading, text in zip(parts[1::2], parts[2::2], strict=True) if heading[0] != "\0"}


def test_named_test_files_exist() -> None:
    named = set(re.findall(r"`((?:\w+/)+test_\w+\.py)", _TEXT))
    assert len(named) > 30
    assert [each for each in named if not (_REPOSITORY / "tests" / each).is_file()] == []


def test_each_fault_has_client_view_action_and_tests() -> None:
    sections = _fault_sections()
    assert len(sections) > 60
    for heading, text in sections.items():
        labels = re.findall(r"^- (\w+): ", text, re.MULTILINE)
        assert [each for each in labels if each != "Time"] == ["Client", "weightd", "Tests"], heading
        tests = re.findall(r"`((?:\w+/)+(?:test_\w+\.py)?)`", text.partition("\n- Tests: ")[2])
        assert tests, heading
        assert [each for each in tests if not (_REPOSITORY / "tests" / each).exists()] == [], heading
