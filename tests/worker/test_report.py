"""Tests of the report on an interpreter."""

from __future__ import annotations

import pytest

from weightd_worker.report import is_optimized


@pytest.mark.parametrize(
    ("config_args", "prefix", "optimized"),
    [
        ("'--prefix=/opt/python' '--enable-optimizations' '--with-lto'", "/opt/python", True),
        ("'--prefix=/usr' '--enable-shared'", "/usr", True),  # Debian
        ("'--prefix=/home/me/.pyenv/versions/3.11.7'", "/home/me/.pyenv/versions/3.11.7", False),
        ("", "/opt/python", False),
    ],
)
def test_build_of_interpreter(config_args: str, prefix: str, optimized: bool) -> None:
    assert is_optimized(config_args, prefix) is optimized
