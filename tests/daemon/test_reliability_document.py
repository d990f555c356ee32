import re
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_tests_that_it_names_are_there() -> None:
    text = (_REPOSITORY / "docs" / "reliability.md").read_text("utf-8")
    named = set(re.findall(r"`((?:\w+/)+test_\w+\.py)", text))
    assert len(named) > 30
    assert [each for each in named if not (_REPOSITORY / "tests" / each).is_file()] == []
