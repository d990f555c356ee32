"""Tests that docs/protocol.md describes each client message, field, limit, error code and example as in the code.

client_examples.json has the examples that the page does not show. docs/architecture.md lists the messages between
the daemon and its children. child_messages.json has their fields and examples: the encoded bytes, which may change
only together with CHILD_PROTOCOL_VERSION.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple, Type

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
ARCHITECTURE = (DOCS / "architecture.md").read_text("utf-8")
CHILD: Dict[str, Any] = json.loads(Path(__file__).with_name("child_messages.json").read_text("utf-8"))
# The frames of an example in hex, for each message that has no example in protocol.md.
CLIENT_EXAMPLES: Dict[str, List[str]] = json.loads(Path(__file__).with_name("client_examples.json").read_text("utf-8"))

CLIENT_CHAPTERS: Mapping[str, Mapping[str, Type[Any]]] = {
    "Client to daemon": FROM_CLIENT,
    "Daemon to client": TO_CLIENT,
}
CHILD_CHAPTERS: Mapping[str, Mapping[str, Type[Any]]] = {
    "Child to daemon": FROM_CHILD,
    "Daemon to child": TO_CHILD,
}
CLIENT_MESSAGES: Dict[str, Type[Any]] = {tag: cls for table in CLIENT_CHAPTERS.values() for tag, cls in table.items()}
CHILD_MESSAGES: Dict[str, Type[Any]] = {tag: cls for table in CHILD_CHAPTERS.values() for tag, cls in table.items()}
MESSAGES: Dict[str, Type[Any]] = {**CLIENT_MESSAGES, **CHILD_MESSAGES}
RECORDS: Dict[str, Type[Any]] = {
    name: cls
    for module in (messages, regions, control, status, events, metrics, accounts, worker_common, ranks, worker_messages)
    for name, cls in inspect.getmembers(module, inspect.isclass)
    if dataclasses.is_dataclass(cls) and cls not in MESSAGES.values()
}


def sections(page: str, level: int) -> Dict[str, str]:
    """Map the headings of one level to their texts; a text ends at the next heading of the same or a higher level."""
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
    """Return the lines; lines in a code block begin with NUL, so that they do not count as headings."""
    code = False
    for line in page.splitlines():
        yield "\0" + line if code else line
        code ^= line.startswith("```")


def rows(section: str) -> List[List[str]]:
    """Return the cells of the section's first table without its header."""
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
SECTION = sections(WIRE, 3)
CHILD_SECTION = sections(ARCHITECTURE, 3)
CLIENT_RECORDS = {name: cls for name, cls in RECORDS.items() if name not in CHILD["records"]}


@pytest.mark.parametrize("chapter", CLIENT_CHAPTERS)
def test_chapter_holds_the_messages_of_its_direction(chapter: str) -> None:
    assert re.findall(r"\n### `(\w+)`\n", CHAPTER[chapter]) == [*CLIENT_CHAPTERS[chapter]]


@pytest.mark.parametrize("chapter", CHILD_CHAPTERS)
def test_table_lists_the_child_messages_of_its_direction(chapter: str) -> None:
    described = rows(CHILD_SECTION[chapter])
    assert [row[0] for row in described] == [f"`{tag}`" for tag in CHILD_CHAPTERS[chapter]]
    assert all(len(row) == 3 and all(row) for row in described)


def test_every_record_is_described_once() -> None:
    named = [*re.findall(r"\n### (\w+)\n", CHAPTER["Records"]), *CHILD["records"]]
    assert sorted(named) == sorted(RECORDS)


@pytest.mark.parametrize(
    ("fields", "cls"),
    [
        *((CHILD["messages"][tag]["fields"], cls) for tag, cls in CHILD_MESSAGES.items()),
        *((fields, RECORDS[name]) for name, fields in CHILD["records"].items()),
    ],
)
def test_child_field_has_the_recorded_kind_and_default(fields: Mapping[str, List[str]], cls: Type[Any]) -> None:
    assert {name: tuple(field) for name, field in fields.items()} == {
        name: (kind, default(value).strip("`")) for name, kind, value in describe_fields(cls)
    }


def described_fields(cls: Type[Any]) -> Iterator[str]:
    """Yield the fields that the docstring of a class names, or that have a docstring below them."""
    source = inspect.getsource(cls)
    for field in dataclasses.fields(cls):
        below = rf'\n    {field.name}: [^\n]*(?:\n        [^\n]*|\n    \)[^\n]*)*\n    """'
        if f"`{field.name}`" in (cls.__doc__ or "") or re.search(below, source):
            yield field.name


def test_every_child_field_is_described_in_the_code() -> None:
    # A field that several messages have is described once, where it first occurs.
    classes = [*CHILD_MESSAGES.values(), *(RECORDS[name] for name in CHILD["records"])]
    described = {name for cls in classes for name in described_fields(cls)}
    assert {field.name for cls in classes for field in dataclasses.fields(cls)} - described == set()


def listed_fields(section: str) -> List[Tuple[str, str, str]]:
    """Return name, type and meaning of the fields that a section of protocol.md lists."""
    return re.findall(r"^- `(\w+): ([^`]+)`: (.+)$", section, re.MULTILINE)


def notation(kind: str, names: Mapping[str, str]) -> str:
    """Return the kind of a field as protocol.md writes it, with the names that the page gives to some kinds."""
    if kind in names:
        return names[kind]
    for pattern, template in (
        (r"nil, or (?P<item>.*)", "nil or {item}"),
        (r"list of at most (\d+): (?P<item>.*)", "{item}[{0}]"),
        (r"map of at most (\d+) names to (?P<item>.*)", "map[{0}] of {item}"),
        (r"text, (\d+) to (\d+) bytes", "text({0}..{1})"),
        (r"integer, (-?\d+) to (\d+)", "int({0}..{1})"),
        (r"number of at least (0) and at most (\d+)", "number({0}..{1})"),
        (r"number of at least 0", "number"),
        (r"boolean", "bool"),
        (r"((?:one of )?\w+(?:, \w+)*)", "{0}"),
    ):
        matched = re.fullmatch(pattern, kind)
        if matched:
            item = matched.groupdict().get("item")
            return template.format(*matched.groups(), item=item and notation(item, names))
    raise AssertionError(kind)


def typed(kind: str, value: object, names: Mapping[str, str]) -> str:
    """Return the type of a field with its default, as protocol.md writes it."""
    suffix = {"required": "", "absent": "?"}.get(default(value), f" = {default(value)}".replace("`", ""))
    return notation(kind, names) + suffix


@pytest.mark.parametrize(
    ("heading", "cls"), [*((f"`{tag}`", cls) for tag, cls in CLIENT_MESSAGES.items()), *CLIENT_RECORDS.items()]
)
def test_each_field_is_described_with_its_type_and_default(heading: str, cls: Type[Any]) -> None:
    names = {row[1]: row[0].strip("`") for row in rows(SECTION["Types"]) if row[1].startswith(("one of ", "integer, "))}
    for name, listed in (("datatype", SECTION["Datatypes"]), ("code", CHAPTER["Error codes"])):
        assert f"`{name}`" in [row[0] for row in rows(SECTION["Types"])]
        names["one of " + ", ".join(sorted(row[0].strip("`") for row in rows(listed)))] = name
    [envelope_id] = [
        row[1] for row in rows(CHAPTER["Messages and frames"].partition("Every envelope")[2]) if "id" in row[0]
    ]
    fields = [(name, typed(kind, value, names)) for name, kind, value in describe_fields(cls)]
    described = listed_fields(SECTION[heading])
    assert [(name, kind) for name, kind, _ in described] == [field for field in fields if field != ("id", envelope_id)]
    assert described or "It has only `id`." in SECTION[heading]


def example_frames(tag: str) -> List[bytes]:
    """Return the frames of the example of a message."""
    if tag in CHILD_MESSAGES:
        return [bytes.fromhex(frame) for frame in CHILD["messages"][tag]["frames"]]
    if tag in CLIENT_EXAMPLES:
        return [bytes.fromhex(frame) for frame in CLIENT_EXAMPLES[tag]]
    return examples(SECTION[f"`{tag}`"])


def test_each_client_message_has_one_example() -> None:
    shown = [tag for tag in CLIENT_MESSAGES if examples(SECTION[f"`{tag}`"])]
    assert sorted([*shown, *CLIENT_EXAMPLES]) == sorted(CLIENT_MESSAGES)
    assert {"infer", "infer_response", "error"} <= {*shown}


@pytest.mark.parametrize("tag", MESSAGES)
def test_each_example_has_the_encoded_bytes(tag: str) -> None:
    frames = example_frames(tag)
    message = decode(frames, MESSAGES)
    assert type(message) is MESSAGES[tag]
    header = encode(message)
    assert header == frames[: len(header)]
    section = "" if tag in CHILD_MESSAGES else SECTION[f"`{tag}`"]
    blocks = re.findall(r"```json\n(.*?)\n```", section, re.DOTALL)
    for block, frame in zip(blocks, header):
        assert json.loads(block) == msgpack.unpackb(frame)


def test_examples_of_requests_and_responses_match() -> None:
    def example(tag: str) -> Any:
        return decode(example_frames(tag), MESSAGES)

    for tag in ("infer", "server_metadata", "model_metadata", "status", "metrics"):
        assert example(tag).id == example(f"{tag}_response").id
    assert example("predict").description == example("infer").description
    assert example("predict").request == example("predict_result").request == example("predict_failed").request
    assert example("predict_result").description == example("infer_response").description
    assert example("attach").handle == example("built").handle
    assert example("attached").selftest_digest == example("built").selftest_digest
    # The example is deep enough to show each record, with an absent and a present field.
    process, worker = example("status_response").models[0].generations[0].processes
    assert process.p50_us is None
    assert worker.p50_us
    assert example("status_response").memory.high_bytes is None


def test_documents_each_limit() -> None:
    values = {name: value for name, value in vars(limits).items() if name.isupper()}
    described = rows(CHAPTER["Limits"]) + rows(CHILD_SECTION["Limits"])
    assert sorted(row[:2] for row in described) == sorted([f"`{name}`", f"{value:,}"] for name, value in values.items())
    assert all(row[2] for row in described)


def test_documents_each_error_code() -> None:
    described = rows(CHAPTER["Error codes"])
    assert [row[0] for row in described] == [f"`{code}`" for code in ERRORS]
    assert all(len(row) == 4 and all(row) for row in described)


def test_documents_error_codes_of_each_request() -> None:
    described = rows(SECTION["Codes of each message"])
    assert [row[0] for row in described] == [f"`{tag}`" for tag in FROM_CLIENT]
    for _, codes, *_ in described:
        named = codes.split(", ")
        assert named in (["none"], [code for code in ERRORS if code in named])
    again = {tag for row in rows(SECTION["When the connection is lost"]) for tag in re.findall(r"`(\w+)`", row[0])}
    repeatable = {"infer", "cancel", "status", "metrics", "events", "logs", "load", "unload"}
    repeatable |= {"update", "rollout", "reload"}
    assert repeatable == again <= {*FROM_CLIENT}


def test_documents_each_datatype() -> None:
    described = [(row[0], int(row[1])) for row in rows(SECTION["Datatypes"])]
    assert described == [(f"`{name}`", size) for name, size in ITEM_BYTES.items()]


def test_diagrams_show_messages_in_their_directions() -> None:
    directions: Dict[str, Mapping[str, Type[Any]]] = {
        "C>>D": FROM_CLIENT,
        "D>>C": TO_CLIENT,
        "D>>W": TO_CHILD,
        "W>>D": FROM_CHILD,
    }
    diagrams = "".join(re.findall(r"```mermaid\n(.*?)```", WIRE + ARCHITECTURE, re.DOTALL))
    arrows = [
        each for each in re.findall(r"(\w+--?>>\w+): (\w+)(.*)", diagrams) if each[1:] != ("starts", " the process")
    ]
    assert len(arrows) > 15
    for arrow, tag, words in arrows:
        table = directions[re.sub(r"\d|-", "", arrow).replace("H", "W")]
        known = {*ERRORS, *(field.name for field in dataclasses.fields(table[tag]))}
        for named in re.findall(r"\((.*?)\)", words):
            assert known.issuperset(named.replace("the same ", "").split(", ")), words


def test_documents_a_real_error() -> None:
    raw: List[Dict[str, Any]] = [
        {"v": 2, "type": "infer", "id": "7"},
        {"model_name": "m", "inputs": [{"shape": [1, True]}]},
    ]
    with pytest.raises(RemoteProtocolError) as caught:
        decode([*map(msgpack.packb, raw)], FROM_CLIENT)
    assert f"\n```\n{caught.value}\n```\n" in SECTION["Strictness"]


@pytest.mark.parametrize("page", ["protocol.md", "architecture.md", "reliability.md"])
def test_links_work(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", (DOCS / page).read_text("utf-8")):
        assert (DOCS / (target or page)).exists()
        if anchor:
            text = (DOCS / (target or page)).read_text("utf-8")
            headings = [line.lstrip("#").strip() for line in without_code(text) if line.startswith("#")]
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
