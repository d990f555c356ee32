"""docs/protocol.md and docs/children.md say what the code does: each message, field, limit, code and example."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Type

import msgpack
import pytest

from weightd_protocol import limits
from weightd_protocol.codec import decode, encode
from weightd_protocol.datatypes import ITEM_BYTES
from weightd_protocol.errors import ERRORS, RemoteProtocolError
from weightd_protocol.messages import accounts, control, events, metrics, ranks, regions, status, worker_common
from weightd_protocol.messages import inference as messages
from weightd_protocol.messages import worker as worker_messages
from weightd_protocol.messages.inference import NO_PARAMETERS
from weightd_protocol.messages.types import FROM_CLIENT, TO_CLIENT
from weightd_protocol.messages.worker import FROM_CHILD, TO_CHILD
from weightd_protocol.schema import describe_fields

DOCS = Path(__file__).parents[2] / "docs"
WIRE = (DOCS / "protocol.md").read_text("utf-8")
CHILDREN = (DOCS / "children.md").read_text("utf-8")

CHAPTERS: Mapping[str, Mapping[str, Type[Any]]] = {
    "Client to daemon": FROM_CLIENT,
    "Daemon to client": TO_CLIENT,
    "Child to daemon": FROM_CHILD,
    "Daemon to child": TO_CHILD,
}
MESSAGES: Dict[str, Type[Any]] = {tag: cls for table in CHAPTERS.values() for tag, cls in table.items()}
RECORDS: Dict[str, Type[Any]] = {
    name: cls
    for module in (messages, regions, control, status, events, metrics, accounts, worker_common, ranks, worker_messages)
    for name, cls in inspect.getmembers(module, inspect.isclass)
    if dataclasses.is_dataclass(cls) and cls not in MESSAGES.values()
}


def sections(page: str, level: int) -> Dict[str, str]:
    """Heading to text, for the headings of one level; the text ends at the next heading of that or a higher level."""
    found: Dict[str, str] = {}
    heading = ""
    for line in without_code(page):
        if re.match(f"#{{1,{level}}} ", line):
            heading = line[level + 1 :] if line.startswith("#" * level + " ") else ""
            assert heading not in found, f"{heading} stands twice"
        if heading:
            found[heading] = found.get(heading, "") + line.replace("\0", "") + "\n"
    return found


def without_code(page: str) -> Iterator[str]:
    """The lines; those in a block of code begin with NUL, so that none is taken for a heading."""
    code = False
    for line in page.splitlines():
        yield "\0" + line if code else line
        code ^= line.startswith("```")


def rows(section: str) -> List[List[str]]:
    """The cells of the section's first table, without its head."""
    table = re.search(r"(^\|.*\|\n)+", section, re.MULTILINE)
    lines = table.group().splitlines()[2:] if table else []
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def examples(section: str) -> List[bytes]:
    return [bytes.fromhex(block.replace("\n", " ")) for block in re.findall(r"```hex\n(.*?)\n```", section, re.DOTALL)]


def default(value: object) -> str:
    if value == "required":
        return "required"
    if value is None:
        return "absent"
    return "`{}`" if value == NO_PARAMETERS else f"`{json.dumps(value)}`"


CHAPTER = sections(WIRE, 2)
OF_CHILDREN = sections(CHILDREN, 2)
SECTION = {**sections(WIRE, 3), **sections(CHILDREN, 3)}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_holds_the_messages_of_its_direction(chapter: str) -> None:
    # None that has messages stands on both pages.
    section = {**OF_CHILDREN, **CHAPTER}[chapter]
    assert re.findall(r"\n### `(\w+)`\n", section) == [*CHAPTERS[chapter]]


def test_each_record_is_there_and_no_other() -> None:
    named = [name for page in (CHAPTER, OF_CHILDREN) for name in re.findall(r"\n### (\w+)\n", page["Records"])]
    assert sorted(named) == sorted(RECORDS)


@pytest.mark.parametrize(("heading", "cls"), [*((f"`{tag}`", cls) for tag, cls in MESSAGES.items()), *RECORDS.items()])
def test_each_field_is_described_with_its_kind_and_default(heading: str, cls: Type[Any]) -> None:
    described = rows(SECTION[heading])
    assert [row[:3] for row in described] == [
        [f"`{name}`", kind, default(value)] for name, kind, value in describe_fields(cls)
    ]
    assert all(len(row) == 4 and row[3] for row in described)
    assert described or "It has no fields." in SECTION[heading]


@pytest.mark.parametrize("tag", MESSAGES)
def test_each_example_is_such_a_message_and_these_are_its_bytes(tag: str) -> None:
    frames = examples(SECTION[f"`{tag}`"])
    message = decode(frames, MESSAGES)
    assert type(message) is MESSAGES[tag]
    header = encode(message)
    assert header == frames[: len(header)]
    blocks = re.findall(r"```json\n(.*?)\n```", SECTION[f"`{tag}`"], re.DOTALL)
    for block, frame in zip(blocks, header):
        assert json.loads(block) == msgpack.unpackb(frame)


def test_the_examples_answer_each_other() -> None:
    def example(tag: str) -> Any:
        return decode(examples(SECTION[f"`{tag}`"]), MESSAGES)

    for tag in ("infer", "server_metadata", "model_metadata", "status", "metrics"):
        assert example(tag).id == example(f"{tag}_response").id
    assert example("predict").description == example("infer").description
    assert example("predict").request == example("predict_result").request == example("predict_failed").request
    assert example("predict_result").description == example("infer_response").description
    assert example("attach").handle == example("built").handle
    assert example("attached").selftest_digest == example("built").selftest_digest
    # Deep enough to show each record, with a field that is absent and one that is not.
    process, worker = example("status_response").models[0].generations[0].processes
    assert process.p50_us is None
    assert worker.p50_us
    assert example("status_response").memory.high_bytes is None


def test_each_limit_is_there_with_its_value_and_a_reason() -> None:
    values = {name: value for name, value in vars(limits).items() if name.isupper()}
    described = rows(CHAPTER["Limits"]) + rows(OF_CHILDREN["Limits"])
    assert sorted(row[:2] for row in described) == sorted([f"`{name}`", f"{value:,}"] for name, value in values.items())
    assert all(row[2] for row in described)


def test_each_error_code_is_there_with_its_meaning_and_occasion() -> None:
    described = rows(CHAPTER["Error codes"])
    assert [row[0] for row in described] == [f"`{code}`" for code in ERRORS]
    assert all(len(row) == 4 and all(row) for row in described)


def test_each_question_is_there_with_the_codes_that_it_may_end_in_and_whether_it_may_be_sent_again() -> None:
    described = rows(CHAPTER["Error codes"].partition("What each message may end in")[2])
    assert [row[0] for row in described] == [f"`{tag}`" for tag in FROM_CLIENT]
    for _, codes, *_ in described:
        named = codes.split(", ")
        assert named in (["none"], [code for code in ERRORS if code in named])
    again = {tag for row in rows(SECTION["When the connection is lost"]) for tag in re.findall(r"`(\w+)`", row[0])}
    assert {"infer", "cancel", "status", "metrics", "events", "logs", "update", "reload"} == again <= {*FROM_CLIENT}


def test_each_datatype_is_there_with_its_size() -> None:
    described = [(row[0], int(row[1])) for row in rows(SECTION["Datatypes"])]
    assert described == [(f"`{name}`", size) for name, size in ITEM_BYTES.items()]


def test_the_diagrams_show_messages_in_their_directions() -> None:
    directions: Dict[str, Mapping[str, Type[Any]]] = {
        "C>>D": FROM_CLIENT,
        "D>>C": TO_CLIENT,
        "D>>W": TO_CHILD,
        "W>>D": FROM_CHILD,
    }
    diagrams = "".join(re.findall(r"```mermaid\n(.*?)```", WIRE + CHILDREN, re.DOTALL))
    arrows = [
        each for each in re.findall(r"(\w+--?>>\w+): (\w+)(.*)", diagrams) if each[1:] != ("starts", " the process")
    ]
    assert len(arrows) > 15
    for arrow, tag, words in arrows:
        table = directions[re.sub(r"\d|-", "", arrow).replace("H", "W")]
        known = {*ERRORS, *(field.name for field in dataclasses.fields(table[tag]))}
        for named in re.findall(r"\((.*?)\)", words):
            assert known.issuperset(named.replace("the same ", "").split(", ")), words


def test_the_page_shows_an_error_as_it_is() -> None:
    raw: List[Dict[str, Any]] = [
        {"v": 2, "type": "infer", "id": "7"},
        {"model_name": "m", "inputs": [{"shape": [1, True]}]},
    ]
    with pytest.raises(RemoteProtocolError) as caught:
        decode([*map(msgpack.packb, raw)], FROM_CLIENT)
    assert f"\n```\n{caught.value}\n```\n" in SECTION["Strictness"]


@pytest.mark.parametrize("page", ["protocol.md", "children.md", "design.md"])
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", (DOCS / page).read_text("utf-8")):
        assert (DOCS / (target or page)).exists()
        if anchor:
            text = (DOCS / (target or page)).read_text("utf-8")
            headings = [line.lstrip("#").strip() for line in without_code(text) if line.startswith("#")]
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
