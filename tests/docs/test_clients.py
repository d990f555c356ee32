"""docs/clients.md: each code block runs as it stands, and prints the output that the page shows."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weightd import Client
from weightd_protocol import errors

from .page import DOCS, blocks, broken_links, long_lines, output, promised_output, run, sections
from .runner import CELL

pytestmark = pytest.mark.e2e

PAGE = "clients.md"
SECTIONS = sections(PAGE)

# Sections whose blocks are not complete programs.
APART = {"Notebooks", "FastAPI", "In another language"}
PROGRAMS = [name for name, text in SECTIONS.items() if blocks(text) and name not in APART]


def test_all_blocks_of_clients_page_are_tested() -> None:
    assert {block.language for text in SECTIONS.values() for block in blocks(text)} == {"python", "sh", ""}
    assert {name for name, text in SECTIONS.items() if "```" in text} == {*PROGRAMS, *APART}
    assert len(PROGRAMS) == 9


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, env: Mapping[str, str]) -> dict[str, list[str]]:
    """The lines that the programs of each section print."""
    programs = {name: blocks(SECTIONS[name])[0].code for name in PROGRAMS}
    programs["Notebooks"] = CELL.join(block.code for block in blocks(SECTIONS["Notebooks"]))
    return run(programs, tmp_path_factory.mktemp("programs"), env)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_print_shown_output(name: str, printed: dict[str, list[str]]) -> None:
    [program, *shown] = blocks(SECTIONS[name])
    assert program.language == "python"
    assert [block.language for block in shown] == [""] * len(shown)
    expected = promised_output(program.code) + [line for block in shown for line in block.code.splitlines()]
    assert expected
    assert printed[name] == expected


def test_notebook_cells_share_event_loop(printed: dict[str, list[str]]) -> None:
    assert printed["Notebooks"] == [
        line for block in blocks(SECTIONS["Notebooks"]) for line in promised_output(block.code)
    ]
    assert printed["Notebooks"]


def module(code: str, directory: Path) -> ModuleType:
    """Import a code block as a module."""
    path = directory / "app.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("app", path)
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_fastapi_recipe_answers_and_reports_errors(
    tmp_path: Path, env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    monkeypatch.setenv("WEIGHTD_SOCKET", env["WEIGHTD_SOCKET"])
    [block] = blocks(SECTIONS["FastAPI"])
    app: Any = module(block.code, tmp_path).app

    async def test() -> None:
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as web:
            good, wrong = await asyncio.gather(
                web.post("/digits", json={"pixels": [[0.0] * 64, [1] * 64]}),
                web.post("/digits", json={"pixels": [[0.0] * 63]}),
            )
            assert good.status_code == 200
            assert len(good.json()["digits"]) == 2
            assert wrong.status_code == 400
            assert "expected shape [-1, 64]" in wrong.json()["error"]
            ragged = await web.post("/digits", json={"pixels": [[0.0], [1.0, 2.0]]})
            assert ragged.json()["error"].startswith("input x[1]: ")
            app.state.digits = busy
            late = await web.post("/digits", json={"pixels": []})
            assert (late.status_code, late.headers["Retry-After"]) == (429, "2")

    asyncio.run(test())


async def busy(_: object) -> Any:
    raise errors.ResourceExhausted("the queue is full", retry_after=1.5)


def test_fastapi_recipe_maps_all_codes(tmp_path: Path) -> None:
    [block] = blocks(SECTIONS["FastAPI"])
    assert {*errors.ERRORS} - {"INTERNAL", "FAILED_PRECONDITION", "CANCELLED"} == {*module(block.code, tmp_path).STATUS}


def need(program: str) -> None:
    """Skip a test where a program is missing."""
    if shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") is None:
        pytest.skip(f"{program} is not installed: its part of docs/clients.md is not tested")


def test_c_client_prints_answer(tmp_path: Path, env: Mapping[str, str]) -> None:
    need("cc")
    compiled, refused = blocks(SECTIONS["In another language"])
    (tmp_path / "docs").symlink_to(DOCS)
    [line] = output(["bash", "-ec", compiled.code], tmp_path, env)
    label, _, values = line.partition(":")
    assert f"`{label}:`" in SECTIONS["In another language"]
    with Client(env["WEIGHTD_SOCKET"]) as client:
        expected = client.infer("digits", [[*range(1, 65)]])["y"]
    assert [float(each) for each in values.split()] == pytest.approx(expected[0].tolist(), rel=1e-8)
    few = ["./infer", f"{env['WEIGHTD_SOCKET']}.unix", "digits", "x", "1", "2"]
    assert output(few, tmp_path, env, 1) == refused.code.splitlines()
    strict = "cc -std=c11 -Wall -Wextra -Wpedantic -Werror -fsyntax-only docs/examples/infer.c"
    assert output(["bash", "-ec", strict], tmp_path, env) == []
    assert output(["./infer", "/nowhere", "m", "x", "1"], tmp_path, env, 1) == ["/nowhere: No such file or directory"]
    assert output(["./infer", "/nowhere", "m", "x", "one"], tmp_path, env, 64) == ["one: expected a number"]


def test_typed_example_passes_mypy(tmp_path: Path) -> None:
    shutil.copy(DOCS / "examples" / "typed.py", tmp_path)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir=/dev/null",
        "--no-error-summary",
        "typed.py",
    ]
    assert output(command, tmp_path, {}) == []


def test_typed_example_passes_pyright(tmp_path: Path) -> None:
    need("pyright")
    shutil.copy(DOCS / "examples" / "typed.py", tmp_path)
    settings = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    bin_ = Path(sys.executable).parent
    output_lines = output([str(bin_ / "pyright"), "--pythonpath", sys.executable], tmp_path, {})
    assert output_lines[-1] == "0 errors, 0 warnings, 0 informations"


def test_links_and_line_lengths() -> None:
    assert broken_links(PAGE) == []
    assert long_lines(PAGE) == []


def test_error_table_is_complete() -> None:
    import weightd

    table = SECTIONS["When something fails"]
    named = {name for name in weightd.__all__ if name[0].isupper() and _is_error(getattr(weightd, name))}
    assert [name for name in sorted(named - {"WeightdError", "RequestError"}) if f"`{name}`" not in table] == []


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, errors.WeightdError)
