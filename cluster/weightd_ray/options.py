"""Parses and validates the arguments of an application, and reports all errors at once."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from weightd_common import toml_schema
from weightd_common.toml_schema import ErrorCollector, derived, user_path
from weightd_daemon.config.daemon import default_cache_dir
from weightd_daemon.config.load import ConfigError, parse
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.engines import ENGINES
from weightd_gateway.config.schema import GatewayConfig
from weightd_protocol import limits
from weightd_protocol.errors import WeightdError
from weightd_protocol.schema import FieldError, FieldType, describe_value, integer, label, mapping, text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PUBLISHED_PREFIX = "sha256:"

_DIGEST = re.compile(r"[0-9a-f]{64}")

# Maximum of the concurrent requests of a replica. Further requests wait at Serve's routers.
_MAX_ONGOING = 65536

# Default number of concurrent requests of a replica for each worker, and minimum of all together. The numbers are high
# because requests should wait in the daemon's queue, which knows deadlines and priorities and can batch requests.
# Serve's router, if all replicas are busy, retries after delays of up to half a second, which reduces the throughput of
# waiting requests to a tenth.
_ONGOING_PER_WORKER = 32
_MIN_ONGOING = 128

_GATEWAY_FIELDS: Mapping[str, Any] = {each.name: each.metadata for each in dataclasses.fields(GatewayConfig)}


class ArgumentError(WeightdError):
    """Arguments are invalid; the text has one line for each error."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of an application, which also accepts the keys of [models.NAME], except `path`."""

    model: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """The model file, at a path that exists on every host, or "sha256:…" as returned by `weightd_ray.publish`."""

    name: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    """The model's name in requests. Default: the file's name without suffix."""

    sha256: str = field(default="", metadata=text(limits.MAX_DIGEST_BYTES, empty=True))
    """The expected digest of the model: a replica with another model does not serve. Default: the digest of the file on
    the host that builds the application, if the file is readable there."""

    address: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    """Address of the host's service, as for `weightctl --socket`, for replicas without an embedded daemon. Default:
    each replica starts a daemon."""

    tenant: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    """The tenant for requests to the host's service. Default: the tenant of the user that Ray runs as."""

    directory: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """The directory on each host for files of daemons and published models, on a disk. Default: `ray` in the daemon's
    default cache directory."""

    max_ongoing_requests: int = field(default=0, metadata=integer(0, _MAX_ONGOING))
    """Maximum number of concurrent requests of a replica; others wait at Serve's routers. Default: 32 per worker, and
    at least 128."""

    max_body_bytes: int = field(default=GatewayConfig.max_body_bytes, metadata=_GATEWAY_FIELDS["max_body_bytes"])
    """Maximum size of an HTTP request after decompression, in bytes."""

    max_memory_bytes: int = field(default=GatewayConfig.max_memory_bytes, metadata=_GATEWAY_FIELDS["max_memory_bytes"])
    """Maximum size of all HTTP requests in progress at a replica, in bytes."""

    request_timeout: float = field(default=GatewayConfig.timeout, metadata=_GATEWAY_FIELDS["timeout"])
    """Timeout of requests that do not set one, in seconds."""

    model_table: Mapping[str, Any] = field(
        default_factory=dict[str, Any], metadata=derived(mapping(text(limits.MAX_PATH_BYTES), limits.MAX_MODELS))
    )
    """The given arguments that are keys of [models.NAME]."""

    total_workers: int = field(default=0, metadata=derived(integer(0, _MAX_ONGOING)))
    """The number of worker processes of a replica; 0 if unknown, because the host's service starts them."""

    cores: int = field(default=1, metadata=derived(integer(0, _MAX_ONGOING)))
    """The number of cores that a replica keeps busy."""

    @property
    def published_digest(self) -> str:
        """The digest of the published model; "" if `model` is a file."""
        return self.model.removeprefix(PUBLISHED_PREFIX) if self.model.startswith(PUBLISHED_PREFIX) else ""

    @property
    def base_dir(self) -> Path:
        """The directory for the files of replicas."""
        return Path(self.directory or Path(default_cache_dir(), "ray"))


# Arguments that apply only to embedded daemons, and arguments that apply only to the host's service.
_EMBEDDED_KEYS = ("model", "directory")
_HOST_KEYS = ("tenant",)

_MODEL_KEYS: Mapping[str, FieldType] = {
    each.name: each.metadata["field_type"] for each in toml_schema.table_keys(ModelConfig) if each.name != "path"
}


def parse_arguments(args: Mapping[str, Any]) -> Arguments:
    """Return the parsed arguments of an application.

    On a command line every argument is text; text that is not valid for the argument's type is parsed as a TOML value.

    Raises:
        ArgumentError: arguments are invalid.
    """
    problems = ErrorCollector()
    argument_kinds = {
        each.name: cast("FieldType", each.metadata["field_type"]) for each in toml_schema.table_keys(Arguments)
    }
    known_kinds = {**argument_kinds, **_MODEL_KEYS}
    values: dict[str, Any] = {}
    for name, value in args.items():
        with problems.at(f".{label(name)}"):
            if name not in known_kinds:
                raise FieldError(toml_schema.unknown_name_text("argument", str(name), known_kinds))
            values[name] = _parse_text(known_kinds[name], value)
    with problems.at(""):
        arguments = toml_schema.read_table(
            Arguments, {key: values[key] for key in values if key in argument_kinds}, problems
        )
        if not problems.wrong_keys():
            arguments = _complete(
                arguments, {key: values[key] for key in values if key not in argument_kinds}, problems
            )
    if problems.errors:
        raise ArgumentError("\n".join(map(str, problems.errors)))
    return arguments


def _parse_text(kind: FieldType, value: Any) -> Any:
    if type(value) is not str:
        return value
    try:
        return kind.plain(kind.check(value))
    except FieldError:
        try:
            parsed = tomllib.loads(f"value = {value}")
        except (ValueError, RecursionError):
            return value
        # Reject text with several lines, which could define more keys than `value`.
        return parsed["value"] if len(parsed) == 1 else value


def _complete(arguments: Arguments, table: Mapping[str, Any], problems: ErrorCollector) -> Arguments:
    problems.add(_check_combinations(arguments, table))
    problems.add(_check_digests(arguments), "model")
    if problems.wrong_keys():
        return arguments
    path = "" if arguments.published_digest or not arguments.model else str(Path(arguments.model).absolute())
    arguments = dataclasses.replace(
        arguments,
        model=path or arguments.model,
        name=arguments.name or Path(arguments.model).stem,
        sha256=arguments.published_digest or arguments.sha256,
        model_table=table,
    )
    workers, cores = 0, 1
    if not arguments.address:
        model = _check_model(arguments, path or f"/{_placeholder_file(table)}", problems)
        workers = model.max_workers * len(model.devices)
        cores = 1 if model.is_on_cards else workers * model.threads
    default_ongoing = max(_ONGOING_PER_WORKER * workers, _MIN_ONGOING)
    return dataclasses.replace(
        arguments,
        max_ongoing_requests=arguments.max_ongoing_requests or default_ongoing,
        total_workers=workers,
        cores=cores,
    )


def _check_combinations(arguments: Arguments, table: Mapping[str, Any]) -> Iterator[FieldError]:
    if arguments.address:
        ignored_keys = [*(key for key in _EMBEDDED_KEYS if getattr(arguments, key)), *table]
        yield from (
            FieldError("has no effect with address, because the host's service has a separate configuration").at(
                f".{key}"
            )
            for key in ignored_keys
        )
        if not arguments.name:
            yield FieldError("missing: required with address to select the model of the host's service").at(".name")
        return
    if not arguments.model:
        yield FieldError("missing").at(".model")
    for key in _HOST_KEYS:
        if getattr(arguments, key):
            yield FieldError("has no effect without address, because embedded daemons have no tenants").at(f".{key}")
    if arguments.directory and not Path(arguments.directory).is_absolute():
        yield FieldError(f"expected an absolute path, got {describe_value(arguments.directory)}").at(".directory")
    if arguments.published_digest and not arguments.name:
        yield FieldError("missing: required for a published model, which has only a digest").at(".name")


def _check_digests(arguments: Arguments) -> Iterator[FieldError]:
    for key, value in (("model", arguments.published_digest), ("sha256", arguments.sha256)):
        is_given = value or (key == "model" and arguments.model.startswith(PUBLISHED_PREFIX))
        if is_given and not _DIGEST.fullmatch(value):
            yield FieldError(f"expected a sha256 of 64 hexadecimal digits, got {describe_value(value)}").at(f".{key}")
    if arguments.published_digest and arguments.sha256 not in ("", arguments.published_digest):
        yield FieldError(f"expected the digest of the model, {arguments.published_digest}, got {arguments.sha256}").at(
            ".sha256"
        )


def _placeholder_file(table: Mapping[str, Any]) -> str:
    """Return a stand-in for the file name of a published model, whose real name this process does not know."""
    engine = next((each for name, each in ENGINES.items() if name == table.get("engine")), None)
    return f"published{engine.suffix if engine else '.onnx'}"


def _check_model(arguments: Arguments, path: str, problems: ErrorCollector) -> ModelConfig:
    """Return the daemon's configuration of the model, validated by the daemon's own code."""
    models = {arguments.name: {"path": path, **arguments.model_table}}
    try:
        model, relocated = (parse({"models": models}, Path(base)).models[arguments.name] for base in ("/", "/other"))
    except ConfigError as error:
        problems.add(FieldError(_argument_problem(each, arguments.name)) for each in error.problems)
        return ModelConfig(path)
    for each in toml_schema.table_keys(ModelConfig):
        if getattr(model, each.name) != getattr(relocated, each.name):
            problems.add([FieldError("expected an absolute path").at(f".{each.name}")])
    return model


def _argument_problem(problem: str, name: str) -> str:
    """Return an error of the daemon's configuration with the argument's name instead of the configuration key."""
    rest = problem.removeprefix(f"models.{label(name)}")
    for key, argument in ((": ", "name: "), (".path", "model"), (".", "")):
        if rest.startswith(key):
            return argument + rest.removeprefix(key)
    return rest
