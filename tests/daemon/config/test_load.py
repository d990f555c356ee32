from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from weightd_common import endpoints
from weightd_common import toml_schema as tables
from weightd_common.toml_schema import ErrorCollector
from weightd_daemon.config.batching import BatchingConfig, SplitConfig
from weightd_daemon.config.daemon import DaemonConfig, default_cache_dir, default_path, default_runtime_dir, unit_of
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.config.load import Config, ConfigError, check_config, load, load_text, parse
from weightd_daemon.config.model import Membership, ModelConfig
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.engines.mindspore_lite import MindSporeLiteOptions

MODEL = '[models.m]\npath = "m.onnx"\n'


DIRECTORIES = ("RUNTIME_DIRECTORY", "CACHE_DIRECTORY", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def _no_directories_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*DIRECTORIES, "CONFIGURATION_DIRECTORY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "weightd.toml"


def loaded(file: Path, text: str) -> Config:
    file.write_text(text, "utf-8")
    return load(file)


def refusal(file: Path, text: str) -> str:
    """Return the only problem of this configuration, without the file name that each problem starts with."""
    [problem] = refusals(file, text)
    return problem


def refusals(file: Path, text: str) -> list[str]:
    """Return all problems of this configuration, without the file name."""
    with pytest.raises(ConfigError) as caught:
        loaded(file, text)
    assert all(each.startswith(f"{file}: ") and "\n" not in each for each in caught.value.problems)
    return [each.removeprefix(f"{file}: ") for each in caught.value.problems]


# --- the file -------------------------------------------------------------------------------------------------------


def test_minimal_file_gets_defaults(file: Path) -> None:
    config = loaded(file, MODEL)
    model = config.models["m"]
    assert dict(config.models) == {"m": model}
    path = str(file.parent / "m.onnx")
    assert model == ModelConfig(path=path, engine="onnxruntime", python=sys.executable, spares=0, sharing="on")
    assert (model.workers, model.threads, model.timeout, model.load_timeout) == (1, 1, 30.0, 600.0)
    assert (model.devices, model.sharing, model.policy, model.holder_loss) == (("cpu",), "on", "auto", "strict")
    assert config.devices == {}
    assert (model.max_queue, model.max_queue_bytes, config.daemon.drain_timeout) == (1024, 1024**3, 30.0)


GIVEN_DAEMON: dict[str, Any] = {
    "socket": "ipc:///run/other/weightd.sock",
    "runtime_dir": "/run/other",
    "cache_dir": "/var/other",
}
GIVEN: dict[str, Any] = {
    "path": "/models/resnet.mindir",
    "engine": "mindspore_lite",
    "python": "/opt/mslite/bin/python",
    "start": "spawn",
    "workers": 8,
    "threads": 2,
    "spares": 3,
    "devices": ["ascend:0", "ascend:12"],
    "sharing": "auto",
    "process_mib": 300,
    "policy": "replace",
    "holder_loss": "frozen",
    "timeout": 0.5,
    "load_timeout": 60.0,
    "max_queue": 7,
    "max_queue_bytes": 8,
    "priority_levels": 16,
    "default_priority": 3,
}
GIVEN_OPTIONS: dict[str, Any] = {"precision_mode": "enforce_fp32", "config_file": "/etc/acl.ini"}


def toml(table: str, values: Mapping[str, Any]) -> str:
    """Return a TOML table. TOML writes these values in the same way as JSON."""
    return "\n".join([f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""])


def test_keys_of_file_are_parsed(file: Path) -> None:
    name = 'models."resnet-50.v1"'
    text = toml("daemon", {**GIVEN_DAEMON, "drain_timeout": 3}) + toml(name, GIVEN)
    text += toml(f"{name}.mindspore_lite", GIVEN_OPTIONS) + toml(f"{name}.batching", {"sizes": [2, 8]})
    text += toml(f"{name}.split", {"part_rows": 8, "max_rows": 512, "exact": False})
    text += toml('devices."ascend:0"', {"memory_mib": 1000, "processes": 32}) + toml('devices."ascend:12"', {})
    config = loaded(file, text)
    assert config.devices == {"ascend:0": DeviceConfig(1000, 32), "ascend:12": DeviceConfig(0, 63)}
    assert config.daemon == DaemonConfig(**GIVEN_DAEMON, drain_timeout=3.0)
    expected: dict[str, Any] = {
        **GIVEN,
        "devices": tuple(GIVEN["devices"]),
        "batching": BatchingConfig(8, exact=True, sizes=(2, 8)),
        "split": SplitConfig(8, 512, exact=False),
        "mindspore_lite": MindSporeLiteOptions(**GIVEN_OPTIONS),
    }
    assert config.models["resnet-50.v1"] == ModelConfig(**expected)


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    for path, text in ((tmp_path / "missing.toml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"{path}.*{text}"):
            load(path)


def test_rejects_pipes_and_huge_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    for name, problem in (("pipe", "expected a regular file"), ("huge", "expected a file of at most 4,194,304 bytes")):
        with pytest.raises(ConfigError, match=problem):
            load(tmp_path / name)


def test_problem_lookup_does_not_grow_with_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    wrong = ErrorCollector.wrong_keys

    def counted(problems: ErrorCollector) -> set[str]:
        calls.append(None)
        return wrong(problems)

    monkeypatch.setattr(ErrorCollector, "wrong_keys", counted)
    for count in (1, 100):
        calls.clear()
        with pytest.raises(ConfigError) as caught:
            load_text("".join(f"a{number}.b = 1\n" for number in range(count)), tmp_path / "weightd.toml")
        assert len(caught.value.problems) >= count
        assert len(calls) < 50


@pytest.mark.parametrize(
    "text",
    ["[models.m", "path", "a = 1\na = 2", 'a = "', "a = " + "[" * 20_000, "a = " + "9" * 10_000],
    ids=["table", "key", "twice", "string", "nesting", "digits"],
)
def test_invalid_toml_is_rejected(file: Path, text: str) -> None:
    assert refusal(file, text).startswith("not TOML: ")


def test_file_must_be_utf8_with_optional_bom(file: Path) -> None:
    file.write_bytes(b"a = '\xff\xfe'")
    with pytest.raises(ConfigError, match=r"weightd\.toml: not UTF-8: invalid byte 0xff at offset 5$"):
        load(file)
    # A byte order mark at the beginning is not an error.
    assert loaded(file, f"\ufeff{MODEL}") == loaded(file, MODEL)


# --- rejected configurations; * in an expected message matches any text ---------------------------------------------

CARD = '[models.m]\npath = "m.mindir"\n'
NO_SELFTEST = 'selftest = "off"\n'
OPTIONS = "[models.m.mindspore_lite]\n"
NO_TABLES = "models: expected at least one table [models.NAME]"
NO_NUL, NO_HOME = "expected text without a NUL character*", "expected a path without ~, which is not expanded, got '~*"
NO_SUFFIX, MIXED = (
    "path: expected a file that ends in .onnx or .mindir, got",
    "expected either the CPU or cards, not both*",
)
OF_NO_ENGINE = "path: expected a .onnx file for engine onnxruntime, got"
NO_DEVICE, NO_CARD = 'expected "cpu", a set of cores such as*', "expected the name of a card*"
CORES = '[devices."cpu:0"]\ncpus = "0"\n'
BATCHING, SPLIT = "[models.m.batching]\n", "[models.m.split]\n"
GEARS = f'{CARD}devices = ["ascend:0"]\n{BATCHING}sizes'
ON_A_CARD = "has no effect on the CPU, only on a card"
QUOTED = 'unknown table; a name with a dot is quoted: [models."m.v1"]'

REFUSED = [
    ("", NO_TABLES),
    ("[models]", NO_TABLES),
    ("models = 3", NO_TABLES),
    (f"{MODEL}[model.n]\n", "model: unknown table; did you mean models?"),
    (
        f"workers = 3\n{MODEL}",
        "workers: unknown table; expected one of daemon, listeners, tenants, models, groups, devices, repository",
    ),
    (f"daemon = 3\n{MODEL}", "daemon: expected a table, got int*"),
    ("[models]\nm = 'm.onnx'\n", "models.m: expected a table, got str*"),
    (f"[daemon]\nruntime_dir = '/{'a' * 100}'\n{MODEL}", "daemon.runtime_dir: expected a socket path of at most 107 *"),
    (f"devices = 1\n{CARD}", "devices: expected tables [devices.NAME]"),
    (f"{CARD}[devices.cpu]\n", f"devices.cpu: {NO_CARD}"),
    (f"{CARD}[devices.gpu]\n", f"devices.gpu: {NO_CARD}"),
    (f'{CARD}[devices."ascend:0"]\nmemory = 5\n', "devices.ascend:0.memory: unknown key; did you mean memory_mib?"),
    (f'{CARD}[devices."ascend:0"]\nmemory_mib = -5\n', "devices.ascend:0.memory_mib: expected*"),
    (f'{CARD}[devices."ascend:0"]\nprocesses = 0\n', "devices.ascend:0.processes: expected*"),
    (f'{CARD}[devices."ascend:0"]\nip = "192.168.1"\n', "devices.ascend:0.ip: expected an address*"),
    (f'{CARD}[devices."ascend:0"]\ncpus = "0"\n', "devices.ascend:0.cpus: has no effect on a card*"),
    (f"{MODEL}{CORES}memory_mib = 5\n", f"devices.cpu:0.memory_mib: {ON_A_CARD}"),
    (f"{MODEL}{CORES}processes = 5\n", f"devices.cpu:0.processes: {ON_A_CARD}"),
    (f'{MODEL}{CORES}ip = "192.168.1.8"\n', f"devices.cpu:0.ip: {ON_A_CARD}"),
    (f'{MODEL}[devices."cpu:01"]\ncpus = "0"\n', f"devices.cpu:01: {NO_CARD}"),
    (f'{MODEL}[devices."cpu:0"]\ncpus = 0\n', "devices.cpu:0.cpus: expected text*"),
    *(
        (f'{MODEL}[devices."cpu:0"]\ncpus = "{cpus}"\n', f"devices.cpu:0.cpus: expected cores such as*'{cpus}'")
        for cpus in ("", "a", "0-", "-1", "0,,1", "3-2", "0 1", "0-3:2", "100000", "1-", "٣")
    ),
    (
        f'{MODEL}[devices."cpu:0"]\ncpus = "0,777-778"\n',
        "devices.cpu:0.cpus: expected cores that weightd may use*, got 777-778",
    ),
    (f'{MODEL}[devices."cpu:0"]\n', "devices.cpu:0.cpus: expected cores such as*"),
    (f'{MODEL}devices = ["cpu:0"]\n[devices."cpu:0"]\ncpus = "x"\n', "devices.cpu:0.cpus: expected cores such*"),
]
REFUSED_OF_A_MODEL = [
    (f"{MODEL}worker = 3", "worker: unknown key; did you mean workers?"),
    (f"{MODEL}Threads = 3", "Threads: unknown key; did you mean threads?"),
    (f"{MODEL}[models.m.mindspore_light]", "mindspore_light: unknown key; did you mean mindspore_lite?"),
    (f"{MODEL}[models.m.v1]", f"v1: {QUOTED}"),
    (f'{MODEL}"v\\n1" = {{}}', "'v\\n1': unknown key; expected one of path, engine, *"),
    (f"{MODEL}port = 1", "port: unknown key; expected one of path, engine, python, start, *"),
    (f"{MODEL}{'p' * 10_000} = 1", f"'{'p' * 36}...: unknown key; expected one of path, *"),
    ("[models.m]\nworkers = 1\n", "path: missing"),
    ('[models.m]\npath = "a\\u0000b/m.onnx"', f"path: {NO_NUL}"),
    ('[models.m]\npath = "~/m.onnx"', f"path: {NO_HOME}"),
    ('[models.m]\npath = "~alice/m.onnx"', f"path: {NO_HOME}"),
    (f'{MODEL}python = "a\\u0000b"', f"python: {NO_NUL}"),
    (f'{MODEL}python = "~/python"', f"python: {NO_HOME}"),
    ('[models.m]\npath = "m.pt"', f"{NO_SUFFIX} 'm.pt'"),
    ('[models.m]\npath = "m"', f"{NO_SUFFIX} 'm'"),
    ('[models.m]\npath = ".onnx"', f"{NO_SUFFIX} '.onnx'"),
    (f'{MODEL}engine = "mindspore_lite"', "path: expected a .mindir file for engine mindspore_lite, got 'm.onnx'"),
    (f'{CARD}engine = "onnxruntime"', f"{OF_NO_ENGINE} 'm.mindir'"),
    ('[models.m]\npath = "m.pt"\nengine = "onnxruntime"', f"{OF_NO_ENGINE} 'm.pt'"),
    (f'{MODEL}devices = ["ascend:0"]\n', "devices[0]: expected cpu, the only device of engine onnxruntime*"),
    (f'{CARD}engine = "mindspore"', "engine: engine mindspore needs a table [models.NAME.ranks]"),
    (f'{CARD}devices = ["cpu", "ascend:0"]', f"devices[0]: {MIXED}"),
    (f'{CARD}devices = ["ascend:0", "cpu"]', f"devices[1]: {MIXED}"),
    (f'{CARD}devices = ["ascend:0", "ascend:1", "ascend:0"]', "devices[0]: ascend:0 is given twice"),
    (f'{CARD}devices = ["cpu", "cpu"]', "devices[0]: cpu is given twice"),
    (f'{CARD}devices = ["npu"]', f"devices[0]: {NO_DEVICE}"),
    (f'{CARD}devices = ["cuda:0"]', "devices[0]: expected *, got 'cuda:0'; GPUs are not supported"),
    (f'{CARD}devices = ["ascend"]', f"devices[0]: {NO_DEVICE}"),
    (f'{CARD}devices = ["ascend:0", "ascend:1234"]', f"devices[1]: {NO_DEVICE}"),
    (f'{CARD}devices = ["ascend:01"]', f"devices[0]: {NO_DEVICE}"),
    (f"{CARD}devices = [1]", "devices[0]: expected*"),
    (f'{MODEL}devices = ["cpu:1"]\n{CORES}', 'devices[0]: expected a table [devices."cpu:1"] with the key cpus'),
    (f'{MODEL}devices = ["cpu:0", "cpu"]\n{CORES}', 'devices[1]: expected either "cpu" or sets of cores'),
    (f'{CARD}devices = ["cpu:0", "ascend:0"]\n{CORES}', f"devices[0]: {MIXED}"),
    (
        f'{MODEL}devices = ["cpu:0", "cpu:2"]\n{CORES}[devices."cpu:2"]\ncpus = "0"\n',
        "devices[1]: cpu:2 and cpu:0 have cores in common: 0",
    ),
    (f'{MODEL}copies = "each"', "copies: has an effect only on sets of cores*"),
    (f"{MODEL}default_priority = 2", "default_priority: expected at most priority_levels, 1, got 2"),
    (f"{MODEL}{BATCHING}max_row = 2", "batching.max_row: unknown key; did you mean max_rows?"),
    (f"{MODEL}{BATCHING}exact = false", "batching.exact: has no effect without max_rows"),
    (f"{MODEL}{BATCHING}sizes = [1, 4]", f"batching.sizes: {ON_A_CARD}"),
    (f"{GEARS} = [1, 4, 4]", "batching.sizes[2]: expected ascending numbers, got 4 after 4"),
    (f"{GEARS} = [1, 4]\nmax_rows = 3", "batching.max_rows: expected 4, the largest of sizes, or no max_rows, got 3"),
    (f"{GEARS} = [1, 4]\n{SPLIT}part_rows = 5", "split.part_rows: expected at most the largest of batching.sizes, 4*"),
    (f"{MODEL}{SPLIT}exact = false", "split.exact: has no effect without part_rows"),
    (f"{MODEL}{SPLIT}max_rows = 9", "split.max_rows: has no effect without part_rows"),
    (f"{MODEL}{SPLIT}part_rows = 9\nmax_rows = 8", "split.max_rows: expected at least part_rows, 9, got 8"),
    (f'{CARD}devices = ["cpu", ""]', "devices[1]: expected*"),
    (f'{CARD}{OPTIONS}precision = "x"', "mindspore_lite.precision: unknown key; did you mean precision_mode?"),
    (f'{CARD}{OPTIONS}provider = "ge"', "mindspore_lite.provider: has no effect on the CPU*"),
    (f'{CARD}devices = ["ascend:0"]\n{OPTIONS}provider = "ge"', "mindspore_lite.provider: weights cannot be shared*"),
    (f"{MODEL}{OPTIONS}inter_op_parallel = 2", "mindspore_lite: has no effect: the engine of the model is onnxruntime"),
    (f"{MODEL}selftest = {{x = 3}}", "selftest.x: expected list, got int 3"),
    (f"{MODEL}selftest = {{x = [0]}}", "selftest.x[0]: expected integer, 1 to 1099511627776, got int 0"),
    (f'{MODEL}selftest = {{"" = [1]}}', "selftest.'': expected text, 1 to 256 bytes, got 0"),
    (f"{MODEL}{NO_SELFTEST}selftest_interval = 3", 'selftest_interval: has no effect with selftest = "off"'),
    (f"{MODEL}{NO_SELFTEST}selftest_tolerance = 0.1", 'selftest_tolerance: has no effect with selftest = "off"'),
]
REFUSED_SOCKETS = [
    (
        f'[daemon]\nsocket = "{socket}"\n{MODEL}',
        f"daemon.socket: expected ipc:///ABSOLUTE/PATH or {endpoints.TCP_ADDRESS_FORM}, got '{socket}'",
    )
    for socket in (
        *("ipc://relative/a.sock", "ipc://@abstract", "ipc:///", "ipc:///run/", "/run/a.sock", "inproc://a"),
        *("tcp://", "tcp://localhost", "tcp://:5555", "tcp://localhost:http", "tcp://127.0.0.1:0"),
        *("tcp://127.0.0.1:65536", "tcp://[::1]:99999", "http://localhost:80"),
    )
]


@pytest.mark.parametrize(
    ("text", "problem"),
    [*REFUSED, *REFUSED_SOCKETS, *((text, f"models.m.{problem}") for text, problem in REFUSED_OF_A_MODEL)],
)
def test_rejects_invalid_configuration(file: Path, text: str, problem: str) -> None:
    reported = refusal(file, text)
    first, *rest = problem.split("*")
    assert reported.startswith(first)
    assert reported.endswith(rest[-1]) if rest else reported == first


MANY_ERRORS = """
deamon = {}
daemon = {sokcet = "x", runtime_dir = 3}
[models]
one = {path = "m.bin", workers = 0, timeout = 9999, mindspore_lite = {provider = "ge", dec_mode = "no"}}
two = {path = "m.mindir", devices = 7, mindspore_lite = {provider = "ge"}}
good = {path = "m.onnx"}
three = {path = "m.mindir", devices = ["ascend:0"], mindspore_lite = {provider = "ge", inter_op_parallel = 3}}
four = {path = "m.onnx", wrokers = 3}
resnet.v1.b = {path = "m.onnx"}
[devices]
gpu = {}
"ascend:0" = {processes = 0}
"""


def test_reports_all_errors_without_consequential_ones(file: Path) -> None:
    problems = refusals(file, MANY_ERRORS)
    assert [problem.partition(": ")[0] for problem in problems] == [
        *("deamon", "daemon.sokcet", "daemon.runtime_dir", "devices.gpu", "devices.ascend:0.processes"),
        *(f"models.one.{key}" for key in ("workers", "timeout", "mindspore_lite.dec_mode", "path")),
        "models.two.devices",
        *(f"models.three.mindspore_lite.{key}" for key in ("inter_op_parallel", "provider")),
        *("models.four.wrokers", "models.resnet.v1"),
    ]
    assert 'models.resnet.v1: unknown table; a name with a dot is quoted: [models."resnet.v1.b"]' in problems
    examined = check_config(file)
    assert list(examined.config.models) == ["good"]
    # The check can still examine the files of these models.
    assert list(examined.loadable) == ["good", "four"]


TEXTS = ["3", "true", "1979-05-27", "[]", '"' + "x" * 4097 + '"']
COUNTS = ["0", "-1", "true", "1.0", '"1"', "10_000_000_000_000_000_000", "[]"]
SECONDS = ["31536001", "-1", "-0.1", "nan", "inf", "-inf", "9" * 400, "true", '"1"', "[]"]
DAEMON_KEYS = {"socket": TEXTS, "runtime_dir": TEXTS, "cache_dir": TEXTS, "drain_timeout": SECONDS}
DAEMON_KEYS["max_memory_bytes"] = ["1", "16_777_215", *COUNTS[1:]]
DAEMON_KEYS["max_shm_bytes"] = COUNTS[1:]
DAEMON_KEYS["max_user_connections"] = COUNTS[1:]
DAEMON_KEYS["max_user_connection_rate"] = ["1_000_001", "-1", "nan", "inf", "true", '"1"', "[]"]
DAEMON_KEYS["accounting_interval"] = [*SECONDS, "0.5"]
DAEMON_KEYS["max_batch_seconds"] = [*SECONDS, "0", "0.0009"]
DAEMON_KEYS["max_model_bytes"] = DAEMON_KEYS["cache_bytes"] = COUNTS[1:]
DAEMON_KEYS["min_resident"] = SECONDS
DAEMON_KEYS["max_load_queue"] = [*COUNTS, "100_001"]
DAEMON_KEYS["pass_environment"] = ["1", '"A"', "[1]", '[""]']
MODEL_KEYS = {
    "path": [*TEXTS, '""'],
    "engine": ["3", '"tensorflow"'],
    "python": TEXTS,
    "versions": ["1", '""', "[]"],
    "traffic": ["1", '""', "[]"],
    "load": ["true", '""', '"lazy"'],
    "idle_unload": SECONDS,
    "workers": [*COUNTS, "1025"],
    "start": ["true", '""', '"forked"'],
    "threads": [*COUNTS, "1025"],
    "spares": ["-1", "1.5", '"1"', "true", "1025"],
    "devices": ["0", '"cpu"', "[]"],
    "copies": ["2", '"both"', '""'],
    "sharing": ["true", '"yes"'],
    "process_mib": ["-1", "0.5", '"1"'],
    "policy": ["1", '""', '"Overlap"'],
    "holder_loss": ["false", '""', '"keep"'],
    "mindspore_lite": ["1", '""', "[]"],
    "timeout": [*SECONDS, "0", "0.0", "3600.1", "9e99"],
    "required": ["1", '"yes"', "0"],
    "load_timeout": [*SECONDS, "0"],
    "predict_timeout": [*SECONDS, "0"],
    "watchdog": [*SECONDS, "0"],
    "selftest": ['""', '"on"', "true", "[]", "{}", '"a.npy"', '"\\u0000.npz"'],
    "selftest_tolerance": [*SECONDS, "1.1"],
    "selftest_interval": SECONDS,
    "max_queue": [*COUNTS, "1_000_001"],
    "max_queue_bytes": COUNTS,
    "priority_levels": [*COUNTS, "17"],
    "default_priority": [*COUNTS[1:], "17"],
    "batching": ["1", '""', "[]"],
    "split": ["1", '""', "[]"],
    "ranks": ["1", '""', "[]"],
}
INNER_KEYS = {
    "batching": {"max_rows": [*COUNTS, "4097"], "exact": ["1"], "sizes": ["4", "[0]", "[4097]"]},
    "split": {"part_rows": [*COUNTS[1:], "4097"], "max_rows": COUNTS, "exact": ["1"]},
}


def test_every_key_has_invalid_values_in_this_test() -> None:
    assert set(DAEMON_KEYS) == {each.name for each in dataclasses.fields(DaemonConfig)}
    assert set(MODEL_KEYS) == {each.name for each in tables.table_keys(ModelConfig)}
    for name, keys in INNER_KEYS.items():
        assert set(keys) == {each.name for each in dataclasses.fields(getattr(ModelConfig(), name))}


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        *(("daemon", key, value) for key, values in DAEMON_KEYS.items() for value in values),
        *(("models.m", key, value) for key, values in MODEL_KEYS.items() for value in values),
        *(
            (f"models.m.{table}", key, value)
            for table, keys in INNER_KEYS.items()
            for key, values in keys.items()
            for value in values
        ),
    ],
)
def test_invalid_value_is_reported_with_key(file: Path, table: str, key: str, value: str) -> None:
    others = MODEL if table != "models.m" else ""
    path = "" if key == "path" or others else 'path = "m.onnx"'
    reported = refusal(file, f"{others}[{table}]\n{path}\n{key} = {value}\n")
    assert re.match(rf"{table}\.{key}(\[0\])?: expected ", reported)


def test_seconds_may_be_integers(file: Path) -> None:
    model = loaded(file, MODEL + "timeout = 3600\nload_timeout = 1\n").models["m"]
    assert (model.timeout, model.load_timeout) == (3600.0, 1.0)
    assert type(model.timeout) is float
    assert loaded(file, "[daemon]\ndrain_timeout = 0\n" + MODEL).daemon.drain_timeout == 0.0


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m", "M_2", "resnet-50", "v1.2", "_x", "7", "a" * 64])
def test_accepts_valid_names(file: Path, name: str) -> None:
    assert list(loaded(file, f'[models."{name}"]\npath = "m.onnx"\n').models) == [name]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "m\\n", "a b", "größe", "٣", "a" * 65, "a\\u0000"])
def test_rejects_invalid_names(file: Path, name: str) -> None:
    problem = refusal(file, f'[models."{name}"]\npath = "m.onnx"\n'.replace("\\n", "\\t"))
    assert problem.startswith("models.")
    assert "expected a model name of 1 to 64 ASCII letters, digits, '_', '.' and '-'" in problem


# --- paths and engines ----------------------------------------------------------------------------------------------


def test_paths_are_relative_to_configuration_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.joinpath("elsewhere").mkdir()
    monkeypatch.chdir(file.parent / "elsewhere")
    paths = {"path": "~a.mindir", "python": "venv/bin/python", "selftest": "a/s.npz"}
    text = toml("daemon", {"runtime_dir": "run", "cache_dir": "cache"}) + toml("models.m", paths)
    config = loaded(file, text + toml("models.m.mindspore_lite", {"config_file": "acl.ini"}))
    model, daemon = config.models["m"], config.daemon
    there = [model.path, model.python, model.selftest, model.mindspore_lite.config_file]
    there += [daemon.runtime_dir, daemon.cache_dir]
    relative = ["~a.mindir", "venv/bin/python", "a/s.npz", "acl.ini", "run", "cache"]
    assert there == [str(file.parent / each) for each in relative]
    assert daemon.socket == f"ipc://{file.parent}/run/weightd.sock"
    # The path of the configuration file itself may be relative.
    monkeypatch.chdir(file.parent)
    assert load(Path("weightd.toml")) == config


def test_interpreter_without_slash_is_command(file: Path) -> None:
    assert loaded(file, MODEL + 'python = "python3.7"\n').models["m"].python == "python3.7"


def test_command_line_paths_are_relative_to_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = {"daemon": {"cache_dir": "cache"}, "models": {"m": {"path": "m.onnx"}}}
    assert parse(tables, Path()).daemon.cache_dir == str(tmp_path / "cache")


@pytest.mark.parametrize(("path", "engine"), [("m.onnx", "onnxruntime"), ("m.mindir", "mindspore_lite")])
def test_engine_follows_from_suffix(file: Path, path: str, engine: str) -> None:
    for given in ({"path": path}, {"path": path, "engine": engine}):
        assert loaded(file, toml("models.m", given)).models["m"].engine == engine


# --- sockets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "socket",
    ["ipc:///run/a.sock", "ipc:///a", "tcp://127.0.0.1:5555", "tcp://*:1", "tcp://[::1]:65535", "tcp://localhost:80"],
)
def test_accepts_valid_sockets(file: Path, socket: str) -> None:
    insecure = "insecure = true\n" if socket.startswith("tcp://") else ""
    listener = f'[listeners.one]\naddress = "{socket}"\n{insecure}'
    assert loaded(file, f'[daemon]\nsocket = "{socket}"\n{listener}{MODEL}').daemon.socket == socket


def test_socket_path_limit_includes_unix_suffix(file: Path) -> None:
    fits = "/" + "a" * 101
    assert loaded(file, f'[daemon]\nsocket = "ipc://{fits}"\n{MODEL}').daemon.socket == f"ipc://{fits}"
    # The limit counts bytes, not characters.
    for path, size in ((f"{fits}b", 108), ("/" + "é" * 51, 108)):
        problem = refusal(file, f'[daemon]\nsocket = "ipc://{path}"\n{MODEL}')
        assert problem == f"daemon.socket: expected a socket path of at most 107 bytes, got {size}: '{path}.unix'"


def test_sockets_have_separate_files() -> None:
    one = DaemonConfig("ipc:///run/one.sock", "/run", "/cache")
    two = dataclasses.replace(one, socket="ipc:///run/two.sock")
    assert one.private_dir != two.private_dir
    assert one.children_socket != two.children_socket
    assert one.unix_socket == Path("/run/one.sock.unix")
    assert one.private_dir.parent == Path("/cache")
    assert one.children_socket.parent == Path("/run")
    assert one.daemon_key == dataclasses.replace(one, cache_dir="/other").daemon_key


# --- defaults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uid", "given", "runtime_dir", "cache_dir"),
    [
        # Directories from systemd have priority, for root and for other users.
        (0, ("/run/given:/run/second", "/var/cache/given", "/run/user/0", ""), "/run/given", "/var/cache/given"),
        (1000, ("/run/given:/run/second", "/var/cache/given", "/run/user/1000", ""), "/run/given", "/var/cache/given"),
        (0, ("", "", "/run/user/0", "/home/someone/.cache"), "/run/weightd", "/var/cache/weightd"),
        (1000, (), "/tmp/weightd-1000", "/home/someone/.cache/weightd"),
        (1000, ("", "", "", ""), "/tmp/weightd-1000", "/home/someone/.cache/weightd"),
        (1000, ("", "", "/run/user/1000", "/somewhere"), "/run/user/1000/weightd", "/somewhere/weightd"),
    ],
)
def test_default_directories(
    monkeypatch: pytest.MonkeyPatch, uid: int, given: tuple[str, ...], runtime_dir: str, cache_dir: str
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setenv("HOME", "/home/someone")
    for variable, value in zip(DIRECTORIES, given, strict=False):
        monkeypatch.setenv(variable, value)
    assert (default_runtime_dir(), default_cache_dir()) == (runtime_dir, cache_dir)
    daemon = parse({"models": {"m": {"path": "m.onnx"}}}, Path()).daemon
    assert daemon == DaemonConfig(f"ipc://{runtime_dir}/weightd.sock", runtime_dir, cache_dir)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (None, "/etc/weightd/weightd.toml"),
        ("", "/etc/weightd/weightd.toml"),
        ("/etc/weightd/one", "/etc/weightd/one/weightd.toml"),
        ("/first:/second", "/first/weightd.toml"),
    ],
)
def test_default_path_uses_systemd_directory(monkeypatch: pytest.MonkeyPatch, given: str | None, path: str) -> None:
    if given is not None:
        monkeypatch.setenv("CONFIGURATION_DIRECTORY", given)
    assert default_path() == Path(path)


@pytest.mark.parametrize(
    ("file", "unit", "socket"),
    [
        ("weightd.toml", "weightd.service", "ipc:///run/weightd/weightd.sock"),
        ("card0.toml", "weightd@card0.service", "ipc:///run/weightd/card0.sock"),
    ],
)
@pytest.mark.parametrize("runtime_dir", [None, "/run/weightd"])
def test_unit_file_is_checked_with_defaults_of_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, unit: str, socket: str, runtime_dir: str | None
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 999)
    monkeypatch.setenv("CONFIGURATION_DIRECTORY", str(tmp_path))
    if runtime_dir:
        monkeypatch.setenv("RUNTIME_DIRECTORY", runtime_dir)
    path = tmp_path / file
    path.write_text(MODEL, "utf-8")
    found = unit_of(path)
    assert found is not None
    assert found.name == unit
    daemon = check_config(path, found).config.daemon
    assert daemon == DaemonConfig(socket, "/run/weightd", "/var/cache/weightd")
    assert str(daemon.unix_socket) == f"{socket.removeprefix('ipc://')}.unix"
    path.write_text(f'[daemon]\nsocket = "ipc:///elsewhere"\n{MODEL}', "utf-8")
    assert check_config(path, found).config.daemon.socket == "ipc:///elsewhere"


def test_only_files_in_configuration_directory_have_unit(tmp_path: Path) -> None:
    assert unit_of(tmp_path / "weightd.toml") is None
    assert unit_of(Path("/etc/weightd/../weightd.toml")) is None
    assert unit_of(Path("/etc/weightd/sub/../card0.toml")) is not None


# --- sockets that the service manager opened ------------------------------------------------------------------------

LISTENING = ["ipc:///run/weightd.sock", "ipc:///run/other.sock", "ipc:///run/third.sock"]


def test_default_socket_is_first_passed_socket(file: Path) -> None:
    config = loaded(file, MODEL).daemon
    taken = load(file, ["ipc:///run/one.sock", "ipc:///run/two.sock"]).daemon
    assert taken.socket == "ipc:///run/one.sock"
    assert taken.daemon_key == dataclasses.replace(config, socket="ipc:///run/one.sock").daemon_key


def test_socket_must_be_among_passed_sockets(file: Path) -> None:
    for address in LISTENING[1:]:
        assert loaded(file, f'[daemon]\nsocket = "{address}"\n{MODEL}').daemon.socket == address
        assert load(file, LISTENING).daemon.socket == address
    file.write_text(f'[daemon]\nsocket = "ipc:///mine.sock"\n{MODEL}')
    with pytest.raises(ConfigError) as caught:
        load(file, LISTENING)
    expected = f"expected {' or '.join(LISTENING)}, on which the service manager listens (weightd.socket)"
    assert str(caught.value) == f"{file}: daemon.socket: {expected}, got 'ipc:///mine.sock'"


# --- sets of cores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "concurrency"),
    [
        ({"workers": 3}, 3),
        ({"workers": 3, "devices": ("ascend:0", "ascend:1")}, 6),
        ({"ranks": RanksConfig(size=2, groups=(("cpu", "cpu"),) * 2)}, 2),
        ({"devices": ("ascend:0", "ascend:1"), "group": Membership("g", "both", ("m", "n"), "digest")}, 2),
    ],
)
def test_max_concurrency_counts_workers_or_groups(keys: dict[str, Any], concurrency: int) -> None:
    assert ModelConfig("/m.onnx", **keys).max_concurrency == concurrency


def test_model_has_cores_of_its_devices(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", mock.Mock(return_value=set(range(16))))
    tables = '[devices."cpu:0"]\ncpus = "3,0-1,8"\n[devices."cpu:1"]\ncpus = "2,4"\n'
    two_devices = f'{MODEL}devices = ["cpu:1", "cpu:0"]\n'
    model = loaded(file, two_devices + tables).models["m"]
    assert (model.devices_by_weight_copy, model.is_on_cards, model.spares) == ({"cpu": ("cpu:1", "cpu:0")}, False, 0)
    assert [model.cores_of(each) for each in ("cpu:1", "cpu:0", "cpu")] == ["2,4", "0-1,3,8", "2,4,0-1,3,8"]
    each = loaded(file, f'{two_devices}copies = "each"\n{tables}').models["m"]
    assert each.devices_by_weight_copy == {"cpu:1": ("cpu:1",), "cpu:0": ("cpu:0",)}
    assert loaded(file, MODEL).models["m"].cores_of("cpu") == ""


def test_model_table_has_no_cores_key(file: Path) -> None:
    assert refusal(file, f"{MODEL}cores = []").startswith("models.m.cores: unknown key; ")


def test_library_threads_cannot_leave_cores(file: Path) -> None:
    text = f'{CARD}devices = ["cpu:0"]\n{OPTIONS}thread_affinity_cores = [1]\n{CORES}'
    assert refusal(file, text).startswith("models.m.mindspore_lite.thread_affinity_cores: threads stay on the cores ")


# --- defaults and limits that depend on other keys ------------------------------------------------------------------


def test_models_on_cards_have_one_spare_by_default(file: Path) -> None:
    assert loaded(file, CARD).models["m"].spares == 0
    assert loaded(file, f'{CARD}devices = ["ascend:0"]\n').models["m"].spares == 1
    assert loaded(file, f'{CARD}devices = ["ascend:0"]\nspares = 0\n').models["m"].spares == 0


def test_limits_sum_of_workers_and_spares(file: Path) -> None:
    assert loaded(file, f"{CARD}workers = 1000\nspares = 24\n").models["m"].spares == 24
    text = "models.m.spares: expected at most 1024 workers and spares, got 1025"
    assert refusal(file, f"{CARD}workers = 1000\nspares = 25\n") == text
    assert refusal(file, f'{CARD}workers = 1024\ndevices = ["ascend:0"]\n') == text


def test_limits_workers_of_one_weight_copy(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", mock.Mock(return_value={0, 1}))
    text = f'{MODEL}workers = 513\ndevices = ["cpu:0", "cpu:1"]\n%s{CORES}[devices."cpu:1"]\ncpus = "1"\n'
    assert refusal(file, text % "").endswith("expected at most 1024 workers and spares on 2 sets of cores, got 1026")
    assert loaded(file, text % 'copies = "each"\n').models["m"].workers == 513


def test_default_priority_is_middle_level(file: Path) -> None:
    levels = [loaded(file, f"{MODEL}priority_levels = {count}").models["m"].default_level for count in (1, 2, 3, 16)]
    assert levels == [1, 1, 2, 8]
    assert loaded(file, f"{MODEL}priority_levels = 3\ndefault_priority = 3").models["m"].default_level == 3


def test_max_batch_rows_covers_batching_and_split(file: Path) -> None:
    tables = [
        "",
        f"{BATCHING}max_rows = 8\n",
        f"{SPLIT}part_rows = 3\n",
        f"{SPLIT}part_rows = 5\n{BATCHING}max_rows = 8\n",
    ]
    assert [loaded(file, MODEL + each).models["m"].max_batch_rows for each in tables] == [1, 8, 6, 10]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('"auto"', "auto"),
        ('"off"', "off"),
        ('"/a/s.npz"', "/a/s.npz"),
        ("{x = [1, 3, 48, 320], n = []}", {"x": (1, 3, 48, 320), "n": ()}),
    ],
)
def test_selftest_is_keyword_path_or_shapes(file: Path, given: str, expected: object) -> None:
    assert loaded(file, MODEL + f"selftest = {given}\n").models["m"].selftest == expected


def test_sharing_on_card_needs_selftest(file: Path) -> None:
    card = '[models.m]\npath = "m.mindir"\ndevices = ["ascend:0"]\nselftest = "off"\n'
    assert refusal(file, card).startswith("models.m.selftest: on a card only the self-test detects wrong weights ")
    assert loaded(file, card + 'sharing = "off"\n').models["m"].selftest == "off"
