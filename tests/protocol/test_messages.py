"""Tests of every message, field and limit, derived from the schema: legal values round-trip, illegal ones name their
path.

The tensor frames of these tests are `range` objects: they have a length, and the decoder may not read more of them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Pattern, Sequence, Tuple, Type

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from weightd_protocol import limits
from weightd_protocol.codec import clip, decode, encode
from weightd_protocol.errors import LocalProtocolError, RemoteProtocolError
from weightd_protocol.messages import (
    accounts,
    channels,
    control,
    events,
    metrics,
    ranks,
    regions,
    status,
    worker_common,
)
from weightd_protocol.messages import inference as messages
from weightd_protocol.messages import worker as worker_messages
from weightd_protocol.messages.types import FROM_CLIENT, TO_CLIENT
from weightd_protocol.schema import describe_fields

Raw = Dict[str, Any]
Path = Tuple[Any, ...]

TABLES: Sequence[Mapping[str, Type[Any]]] = (
    FROM_CLIENT,
    TO_CLIENT,
    worker_messages.FROM_CHILD,
    worker_messages.TO_CHILD,
)
ALL: Dict[str, Type[Any]] = {tag: cls for table in TABLES for tag, cls in table.items()}
MODULES = (
    messages, regions, channels, control, status, events, metrics, accounts, worker_common, ranks, worker_messages,
)  # fmt: skip
RECORDS: Dict[str, Type[Any]] = {
    name: cls
    for module in MODULES
    for name, cls in inspect.getmembers(module, inspect.isclass)
    if dataclasses.is_dataclass(cls)
}


def fields_of(name: str) -> List[Tuple[str, str, Any]]:
    """Return name, kind and default of each field; a class without fields has its description instead."""
    described = [each for each in dataclasses.fields(RECORDS[name]) if "description" in each.metadata]
    return [
        *describe_fields(RECORDS[name]),
        *((each.name, each.metadata["description"].__name__, "required") for each in described),
    ]


# This is so large that only the limits of fields apply.
NO_BOUND = 1 << 30


# --- values from field descriptions ------------------------------------------------------------------------------


class Domain(NamedTuple):
    """Legal values of a field including its limits, illegal values just beyond them, and a strategy of legal values."""

    good: List[Any]
    bad: List[Any]
    some: SearchStrategy[Any]


def a_text(low: str, high: str) -> Domain:
    least, most = int(low), int(high)
    bad: List[Any] = ["x" * (most + 1), "é" * (most // 2) + "xx", None, 1, True, b"x", ["x"], {}, *[""] * least]
    return Domain(
        ["x" * least, "x" * most, "é" * (most // 2)], bad, st.text(min_size=least, max_size=min(30, most // 4))
    )


def an_integer(low: str, high: str) -> Domain:
    least, most = int(low), int(high)
    bad: List[Any] = [least - 1, most + 1, True, False, float(low), low, None, [], {}]
    return Domain([least, most], bad, st.integers(least, most))


def a_nil_or(kind: str) -> Domain:
    other = domain(kind)
    return Domain([None, *other.good], [each for each in other.bad if each is not None], st.none() | other.some)


def a_list(most: str, item: str) -> Domain:
    one, count = smallest(item), int(most)
    bad: List[Any] = [[one] * (count + 1), {}, None, "", 0, b""]
    return Domain([[], [one] * count], bad, st.lists(domain(item).some, max_size=min(2, count)))


def a_map(most: str, item: str) -> Domain:
    one, count = smallest(item), int(most)
    names = [f"n{i}" for i in range(count + 1)]
    good: List[Any] = [{}, dict.fromkeys(names[1:], one), {"n" * limits.MAX_NAME_BYTES: one}]
    bad: List[Any] = [dict.fromkeys(names, one), {"": one}, {"n" * (limits.MAX_NAME_BYTES + 1): one}, {b"n": one}]
    some = st.dictionaries(st.text(min_size=1, max_size=20), domain(item).some, max_size=5)
    return Domain(good, [*bad, [], None, "", 0], some)


def one_of(names: str) -> Domain:
    good = names.split(", ")
    return Domain(good, ["", good[0] + " ", good[0].swapcase(), None, 0, True, b"", []], st.sampled_from(good))


def a_boolean() -> Domain:
    return Domain([True, False], [0, 1, None, "true", []], st.booleans())


def a_number() -> Domain:
    bad = [-1, -1e-300, float("nan"), float("inf"), True, "1", None]
    return Domain([0, 0.0, 5e-324, 1.7e308, 2**64 - 1], bad, st.floats(0, 1e308) | st.integers(0, 2**53))


def a_number_up_to(high: str) -> Domain:
    most = float(high)
    bad = [-1, -1e-300, most + 1e-9, float("nan"), float("inf"), True, "0", None]
    return Domain([0, 0.0, 5e-324, most, int(most)], bad, st.floats(0, most) | st.integers(0, int(most)))


def a_record(name: str) -> Domain:
    required: Dict[str, SearchStrategy[Any]] = {}
    optional: Dict[str, SearchStrategy[Any]] = {}
    for field, description, default in fields_of(name):
        some = SHAPES if (name, field) == ("TensorSpec", "shape") else domain(description).some
        (required if default == "required" else optional)[field] = some
    some = st.tuples(st.fixed_dictionaries(required), st.fixed_dictionaries({}, optional=optional)).map(merged)
    return Domain([smallest(name)], [None, [], "", 0, True, {"surplus": 1}], some)


def merged(parts: Tuple[Raw, Raw]) -> Raw:
    return {**parts[0], **parts[1]}


# The sizes are possible lengths of a frame, sometimes empty, sometimes of a scalar.
SHAPES = st.lists(st.integers(0, 4), max_size=16) | st.lists(st.integers(0, 2**29), max_size=2)

LIST = re.compile(r"list of at most (\d+): (.*)")
MAP = re.compile(r"map of at most (\d+) names to (.*)")
TEXT = re.compile(r"text, (\d+) to (\d+) bytes")
MAKERS: Sequence[Tuple[Pattern[str], Callable[..., Domain]]] = (
    (re.compile(r"nil, or (.*)"), a_nil_or),
    (LIST, a_list),
    (MAP, a_map),
    (TEXT, a_text),
    (re.compile(r"integer, (-?\d+) to (\d+)"), an_integer),
    (re.compile(r"one of (.*)"), one_of),
    (re.compile(r"boolean"), a_boolean),
    (re.compile(r"number of at least 0"), a_number),
    (re.compile(r"number of at least 0 and at most (\d+)"), a_number_up_to),
    (re.compile(r"(\w+)"), a_record),
)


@functools.lru_cache(maxsize=None)
def domain(description: str) -> Domain:
    for pattern, make in MAKERS:
        found = pattern.fullmatch(description)
        if found:
            return make(*found.groups())
    raise AssertionError(description)


def smallest(description: str) -> Any:
    """Return a legal value in which every list of records has one record, so that a path to every field exists."""
    if description in RECORDS:
        return {name: smallest(each) for name, each, _ in fields_of(description)}
    found = LIST.fullmatch(description.replace("nil, or ", ""))
    if found:
        return [smallest(found.group(2))]
    return domain(description).good[0]


def pack(tag: str, raw: Raw) -> List[bytes]:
    envelope = {name: value for name, value in raw.items() if name != "description"}
    frames = [msgpack.packb({"v": 2, "type": tag, **envelope})]
    return frames if len(envelope) == len(raw) else [*frames, msgpack.packb(raw["description"])]


def unpacked(header: Sequence[bytes]) -> Raw:
    """Return the argument of `pack`, with version and type."""
    envelope, *description = map(msgpack.unpackb, header)
    return {**envelope, "description": description[0]} if description else envelope


def frames(tag: str, raw: Raw) -> List[Any]:
    """Return the header, and a frame of the correct length for each described tensor."""
    described: Raw = raw.get("description", {})
    tensors = described.get("inputs" if "inputs" in described else "outputs", ())
    sizes = [messages.TensorSpec(**spec).nbytes for spec in tensors]
    return [*pack(tag, raw), *(range(size) for index, size in enumerate(sizes) if index not in elsewhere(raw))]


def places(raw: Raw) -> Raw:
    """Return the message's shared-memory part, or an empty map."""
    holder: Raw = raw if "regions" in raw else raw.get("parameters", {})
    found: Raw = holder.get("regions", {})
    return found


def elsewhere(raw: Raw) -> List[int]:
    """Return the positions of tensors that have no frame."""
    positions: List[int] = raw.get("shared_outputs") or [each["tensor_index"] for each in places(raw).get("inputs", ())]
    return positions


def coherent(raw: Raw) -> Raw:
    """Return the message with legal positions: each of an existing tensor, and at most once."""
    raw, positions = copy.deepcopy(raw), elsewhere(raw)
    if len({*positions}) < len(positions):
        positions = [*range(len(positions))]
        if "shared_outputs" in raw:
            raw["shared_outputs"] = positions
        else:
            places(raw)["inputs"] = [
                {**each, "tensor_index": index} for index, each in enumerate(places(raw)["inputs"])
            ]
    if positions:
        described: Raw = raw["description"]
        tensors = "inputs" if "inputs" in described else "outputs"
        more = max(positions) + 1 - len(described[tensors])
        described[tensors] = [*described[tensors], *[{"name": "t", "datatype": "BOOL", "shape": []}] * more]
    return raw


def header_size(raw: Raw) -> int:
    return 2 if "description" in raw else 1


def again(message: Any, tensors: Sequence[Any]) -> Any:
    """Encode and decode the message a second time."""
    return decode([*encode(message, max_bytes=NO_BOUND), *tensors], ALL, max_bytes=NO_BOUND)


VALID = st.one_of([st.tuples(st.just(tag), domain(ALL[tag].__name__).some.map(coherent)) for tag in sorted(ALL)])


# --- round trips -------------------------------------------------------------------------------------------------


@given(VALID)
def test_legal_messages_round_trip(sample: Tuple[str, Raw]) -> None:
    tag, raw = sample
    sent = frames(tag, raw)
    message = decode(sent, ALL)
    assert type(message) is ALL[tag]
    assert again(message, sent[header_size(raw) :]) == message
    assert unpacked(encode(message)) == {"v": 2, "type": tag, **complete(ALL[tag].__name__, raw)}


def complete(description: str, raw: Any) -> Any:
    """Return `raw` as it is encoded: missing fields have their defaults, except None and defaults that are omitted."""
    found = LIST.fullmatch(description)
    if found:
        return [complete(found.group(2), item) for item in raw]
    if description not in RECORDS:
        return raw
    whole: Raw = {}
    for name, each, default in fields_of(description):
        if name in raw:
            whole[name] = complete(each, raw[name])
        elif default is not None:
            whole[name] = {} if default == messages.NO_PARAMETERS else [] if default == () else default
    for field in dataclasses.fields(RECORDS[description]):
        without: Any = [] if field.default == () else field.default
        if "omit_default" in field.metadata and whole[field.name] == without:
            del whole[field.name]
    return whole


def test_messages_are_immutable() -> None:
    for cls in RECORDS.values():
        assert cls.__dataclass_params__.frozen, cls


def test_tags_are_unique() -> None:
    assert sum(map(len, TABLES)) == len(ALL) == len(set(ALL.values()))


@pytest.mark.parametrize("table", TABLES)
def test_rejects_message_of_other_direction(table: Mapping[str, Type[Any]]) -> None:
    for tag, cls in ALL.items():
        sent = frames(tag, coherent(smallest(cls.__name__)))
        if tag in table:
            assert type(decode(sent, table)) is cls
        else:
            with pytest.raises(RemoteProtocolError, match=f"^type: expected one of .*, got str '{tag}'$"):
                decode(sent, table)


# --- limits ------------------------------------------------------------------------------------------------------


class Site(NamedTuple):
    """A location in a message: the message's tag, the path to the value, and the value's description."""

    tag: str
    path: Path
    description: str
    required: bool

    def __str__(self) -> str:
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        return f"{self.tag}: {path[1:]}"


def sites(tag: str, path: Path, description: str, *, required: bool = False) -> Iterator[Site]:
    if path:
        yield Site(tag, path, description, required)
    found = LIST.fullmatch(description)
    if found:
        yield from sites(tag, (*path, 0), found.group(2))
    elif description in RECORDS:
        for name, each, default in fields_of(description):
            yield from sites(tag, (*path, name), each, required=default == "required")


SITES = [site for tag, cls in ALL.items() for site in sites(tag, (), cls.__name__)]


def put(raw: Any, path: Path, value: Any) -> Any:
    """Return a copy of `raw` with `value` at `path`, or without a value if it is GONE."""
    changed = here = copy.deepcopy(raw)
    for step in path[:-1]:
        here = here[step]
    here[path[-1]] = value
    if value is GONE:
        del here[path[-1]]
    return changed


GONE = object()

# There are more than a thousand locations: the report of a test for each would take longer than the tests.
PLACES: Dict[str, List[Site]] = {}
for _each in SITES:
    PLACES.setdefault(_each.tag, []).append(_each)


@pytest.mark.parametrize("tag", PLACES)
def test_value_at_its_limit_passes(tag: str) -> None:
    for site in PLACES[tag]:
        passes_at_its_bound(site)


@pytest.mark.parametrize("tag", PLACES)
def test_value_beyond_its_limit_names_its_path(tag: str) -> None:
    for site in PLACES[tag]:
        is_refused_beyond_its_bound(site)


@pytest.mark.parametrize("tag", PLACES)
def test_value_beyond_its_limit_is_not_encoded(tag: str) -> None:
    for site in PLACES[tag]:
        is_not_sent_beyond_its_bound(site)


def passes_at_its_bound(site: Site) -> None:
    base = smallest(ALL[site.tag].__name__)
    for value in domain(site.description).good:
        sent = frames(site.tag, coherent(put(base, site.path, value)))
        message = decode(sent, ALL, max_bytes=NO_BOUND)
        assert again(message, sent[header_size(base) :]) == message, site


def is_refused_beyond_its_bound(site: Site) -> None:
    base = smallest(ALL[site.tag].__name__)
    tensors = frames(site.tag, coherent(base))[header_size(base) :]

    def refusal(value: Any) -> str:
        with pytest.raises(RemoteProtocolError) as caught:
            decode(
                [*pack(site.tag, put(base, site.path, value)), *(() if value is GONE else tensors)],
                ALL,
                max_bytes=NO_BOUND,
            )
        assert caught.value.request_id == ("" if site.path == ("id",) else base.get("id", ""))
        return str(caught.value)

    for value in domain(site.description).bad:
        assert refusal(value).startswith(str(site)), value
    if site.required:
        assert refusal(GONE) == f"{site}: missing"
    if site.description in RECORDS:
        surplus = {**smallest(site.description), "surplus": 1}
        assert refusal(surplus).startswith(f"{site}.surplus: unknown field; expected one of ")


def is_not_sent_beyond_its_bound(site: Site) -> None:
    """Use the same illegal values, except None, which means absent, and values that a peer could not encode."""
    message = decode(frames(site.tag, coherent(smallest(ALL[site.tag].__name__))), ALL)
    more = ["a\ud800"] if TEXT.fullmatch(site.description) else []
    for value in [*domain(site.description).bad, *more]:
        if value is not None:
            with pytest.raises(LocalProtocolError) as caught:
                encode(replaced(message, site.path, typed(value)), max_bytes=NO_BOUND)
            assert str(caught.value).startswith(str(site)), value


def typed(value: Any) -> Any:
    """Return a decoded list as a tuple; a too long list must be rejected for its length and not for its type."""
    is_long = type(value) is LIST_TYPE and len(value) > 1
    return tuple(value) if is_long else value


LIST_TYPE: Type[Any] = list


def replaced(message: Any, path: Path, value: Any) -> Any:
    """Return a copy of the message with any `value` at `path`."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        return (*message[:step], replaced(message[step], rest, value), *message[step + 1 :])
    return dataclasses.replace(message, **{step: replaced(getattr(message, step), rest, value)})


def test_largest_messages_fit_into_a_header() -> None:
    """Responses with other limits, or with as many items as fit, are excluded."""
    for tag, cls in ALL.items():
        if tag not in ("status_response", "metrics_response", "logs_response", "events_response"):
            is_a_childs = tag in worker_messages.FROM_CHILD or tag in worker_messages.TO_CHILD
            # These two may name every model.
            is_long = tag in ("server_metadata_response", "reload_response")
            other_bound = limits.MAX_STATUS_BYTES if is_long else limits.MAX_HEADER_BYTES
            bound = limits.MAX_CHILD_HEADER_BYTES if is_a_childs else other_bound
            sent = frames(tag, coherent(largest(cls.__name__)))
            message = decode(sent, ALL, max_bytes=bound)
            header = encode(message, max_bytes=bound)
            assert decode([*header, *sent[len(header) :]], ALL, max_bytes=bound) == message


def largest(description: str) -> Any:
    if description in RECORDS:
        raw = {name: largest(each) for name, each, _ in fields_of(description)}
        # Sixteen times the largest dimension is no valid tensor.
        return {**raw, "shape": [0, 2**30, 2**20, *[0] * 13]} if description == "TensorSpec" else raw
    found = LIST.fullmatch(description)
    if found:
        return [largest(found.group(2))] * int(found.group(1))
    found = MAP.fullmatch(description)
    if found:
        names = [f"{i:0{limits.MAX_NAME_BYTES}}" for i in range(int(found.group(1)))]
        return dict.fromkeys(names, largest(found.group(2)))
    return max(domain(description).good, key=lambda value: len(msgpack.packb(value)))


# --- mutations ---------------------------------------------------------------------------------------------------


def decodes_to_an_equal_message_or_is_refused(sent: Sequence[Any], tensors: Sequence[Any]) -> None:
    try:
        message = decode([*sent, *tensors], ALL)
    except RemoteProtocolError as error:
        # The daemon replies with such an error, so it must be encodable.
        encode(messages.Error(error.request_id, "INVALID_ARGUMENT", clip(str(error))))
    else:
        assert again(message, tensors) == message


# Position, number of removed bytes, and inserted bytes.
CHANGE = st.tuples(st.integers(0, 400), st.integers(0, 8), st.binary(max_size=8))


@given(VALID, st.lists(CHANGE, min_size=1, max_size=4))
def test_changed_bytes(sample: Tuple[str, Raw], changes: List[Tuple[int, int, bytes]]) -> None:
    size = header_size(sample[1])
    sent = frames(*sample)
    header, tensors = sent[:size], sent[size:]
    for position, gone, come in changes:
        frame = header[position % size]
        at = position // size % (len(frame) + 1)
        header[position % size] = frame[:at] + come + frame[at + gone :]
    decodes_to_an_equal_message_or_is_refused(header, tensors)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@given(st.sampled_from(SITES), JUNK)
def test_anything_anywhere(site: Site, junk: Any) -> None:
    base = smallest(ALL[site.tag].__name__)
    tensors = frames(site.tag, base)[header_size(base) :]
    decodes_to_an_equal_message_or_is_refused(pack(site.tag, put(base, site.path, junk)), tensors)
