"""Loads and validates the gateway's configuration file."""

from __future__ import annotations

import dataclasses
import os
import pwd
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from weightd_common import toml_schema
from weightd_common.peer_credentials import OVERFLOW_ID
from weightd_common.safe_open import MAX_CONFIG_BYTES, read_regular
from weightd_common.toml_schema import ErrorCollector
from weightd_gateway import auth
from weightd_gateway.auth import Authenticator
from weightd_gateway.config import addresses
from weightd_gateway.config.schema import GatewayConfig, GatewayFile
from weightd_protocol import limits
from weightd_protocol.errors import WeightdError
from weightd_protocol.schema import FieldError, describe_value, label, mapping, text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT = Path("/etc/weightd/gateway.toml")

_TABLES = ("gateway", "certificates", "users")

# Maximum number of entries in the table [certificates], and in the table [users].
_MAX_CALLERS = 65536

_FILE_KEYS = ("tokens", "tls_cert", "tls_key", "client_ca")

_CALLER_TABLE = mapping(text(limits.MAX_NAME_BYTES), _MAX_CALLERS)["field_type"]


class ConfigError(WeightdError):
    """The configuration is invalid.

    Attributes:
        problems: one line for each problem, with the file, the key and the expected value.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def default_path() -> Path:
    """Return the default path of the configuration file."""
    directory = os.environ.get("CONFIGURATION_DIRECTORY", "")
    return Path(directory, DEFAULT.name) if directory else DEFAULT


def load(path: Path, listen_addresses: Sequence[str] = ()) -> tuple[GatewayFile, Authenticator]:
    """Load a configuration file and its token file; return the configuration and the authenticator for their callers.

    Args:
        path: the TOML file.
        listen_addresses: addresses of the HTTP sockets that the service manager has opened; they replace the key
            `http`.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8 or not TOML, or has invalid content.
    """
    try:
        # Some editors write a byte order mark at the beginning of a file.
        content = tomllib.loads(read_regular(path, MAX_CONFIG_BYTES).decode("utf-8").removeprefix("\ufeff"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"{path}: not UTF-8: invalid byte 0x{byte:02x} at offset {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    problems = ErrorCollector()
    config = parse(content, path.resolve().parent, problems, listen_addresses)
    errors = [f"{path}: {error}" for error in problems.errors]
    try:
        authenticator = make_authenticator(config)
    except auth.TokenFileError as error:
        raise ConfigError(*errors, *error.problems) from None
    if errors:
        raise ConfigError(*errors)
    return config, authenticator


def parse(
    content: Mapping[str, Any], base: Path, problems: ErrorCollector, listen_addresses: Sequence[str] = ()
) -> GatewayFile:
    """Return the configuration from parsed TOML. Relative paths are relative to `base`.

    Every error is added to `problems`; the result is valid only if there are no errors. For `listen_addresses`, see
    `load`.
    """
    gateway, certificates, users = GatewayConfig(), dict[str, str](), dict[int, str]()
    for key in content:
        if key not in _TABLES:
            problems.add([FieldError(toml_schema.unknown_name_text("table", key, _TABLES)).at(f".{label(key)}")])
    with problems.at(".gateway"):
        gateway = toml_schema.read_table(GatewayConfig, content.get("gateway", {}), problems)
        gateway = dataclasses.replace(gateway, http=tuple(listen_addresses) or gateway.http)
        gateway = _complete(gateway, base, problems)
    with problems.at(".certificates"):
        certificates = _CALLER_TABLE.check(content.get("certificates", {}))
        if certificates and not gateway.client_ca:
            raise FieldError("has no effect without client_ca in [gateway]")
    with problems.at(".users"):
        users = _parse_users(_CALLER_TABLE.check(content.get("users", {})), problems)
        if users and not any(each.startswith(addresses.UNIX_PREFIX) for each in gateway.http):
            raise FieldError("has no effect without a unix: address in http of [gateway]")
    return GatewayFile(gateway, certificates, users)


def make_authenticator(config: GatewayFile) -> Authenticator:
    """Return the authenticator of a configuration.

    Raises:
        TokenFileError: the token file cannot be used.
    """
    gateway = config.gateway
    return Authenticator(
        auth.read_tokens(Path(gateway.tokens)) if gateway.tokens else {},
        {name: auth.parse_caller(tenant, f"certificate {name}") for name, tenant in config.certificates.items()},
        {uid: auth.parse_caller(tenant, f"uid {uid}") for uid, tenant in config.users.items()},
        auth.parse_caller(gateway.anonymous, "anonymous") if gateway.anonymous else None,
    )


def _complete(config: GatewayConfig, base: Path, problems: ErrorCollector) -> GatewayConfig:
    paths = {key: str((base / value).absolute()) for key in _FILE_KEYS if (value := getattr(config, key))}
    config = dataclasses.replace(config, **cast("dict[str, Any]", paths))
    problems.add((each.at(".http") for each in addresses.check_addresses(config.http)), "http")
    problems.add((each.at(".grpc") for each in addresses.check_addresses(config.grpc)), "grpc")
    problems.add(_check_memory(config), "max_memory_bytes", "max_body_bytes")
    problems.add(_check_tls(config), "tls_cert", "tls_key", "client_ca")
    if problems.wrong_keys().isdisjoint({"http", "grpc"}):
        http, grpc = (tuple(map(addresses.parse, each)) for each in (config.http, config.grpc))
        config = dataclasses.replace(config, http_addresses=http, grpc_addresses=grpc)
        problems.add(_check_exposure(config), "tls_cert", "anonymous", "insecure")
        problems.add(_check_shared_memory(config), "shared_memory")
        if not (http or grpc):
            problems.add([FieldError("expected at least one address in http or grpc").at(".http")])
    return config


def _check_memory(config: GatewayConfig) -> Iterator[FieldError]:
    minimum = 2 * config.max_body_bytes
    if config.max_memory_bytes < minimum:
        expected = f"expected at least twice max_body_bytes ({minimum}), got {config.max_memory_bytes}"
        yield FieldError(expected).at(".max_memory_bytes")


def _check_tls(config: GatewayConfig) -> Iterator[FieldError]:
    if bool(config.tls_cert) != bool(config.tls_key):
        missing = "tls_key" if config.tls_cert else "tls_cert"
        yield FieldError("missing: tls_cert and tls_key require each other").at(f".{missing}")
    if config.client_ca and not config.tls_cert:
        yield FieldError("has no effect without tls_cert and tls_key").at(".client_ca")
    for key in ("tls_cert", "tls_key", "client_ca"):
        path = getattr(config, key)
        if path and not os.access(path, os.R_OK):
            yield FieldError(f"expected a file that the gateway's user may read, got {path!r}").at(f".{key}")


def _check_exposure(config: GatewayConfig) -> Iterator[FieldError]:
    """Yield an error for each address at which other hosts need no TLS or no credentials, unless `insecure` is set."""
    if config.insecure or (config.tls_cert and (config.client_ca or not config.anonymous)):
        return
    risk = "would be accepted without credentials" if config.tls_cert else "would be sent without TLS"
    expected = "no `anonymous`" if config.tls_cert else "tls_cert"
    for key, named in (("http", config.http_addresses), ("grpc", config.grpc_addresses)):
        for index, address in enumerate(named):
            if not address.is_local:
                text = f"{address}: requests from other hosts {risk}; expected {expected}, or insecure = true"
                yield FieldError(text).at(f".{key}[{index}]")


def _check_shared_memory(config: GatewayConfig) -> Iterator[FieldError]:
    remote_addresses = [address for address in (*config.http_addresses, *config.grpc_addresses) if not address.is_local]
    if config.shared_memory and remote_addresses:
        yield FieldError(f"expected only addresses on this host, got {remote_addresses[0]}").at(".shared_memory")


def _parse_users(tenants_by_user: Mapping[str, str], problems: ErrorCollector) -> dict[int, str]:
    users: dict[int, str] = {}
    for name, tenant in tenants_by_user.items():
        with problems.at(f".{label(name)}"):
            uid = _parse_user_id(name)
            if uid == OVERFLOW_ID:
                raise FieldError("expected another user, because the kernel uses this number for unknown users")
            if uid in users:
                raise FieldError("duplicate user")
            users[uid] = tenant
    return users


def _parse_user_id(name: str) -> int:
    if name.isascii() and name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError, OSError):
        raise FieldError(f"expected a user of this host, by name or number, got {describe_value(name)}") from None


def keys_needing_restart(before: GatewayFile, after: GatewayFile) -> list[str]:
    """Return the keys of [gateway] that have changed and take effect only after a restart of the gateway."""
    reloadable = {"tokens", "anonymous"}
    fields = [each.name for each in toml_schema.table_keys(GatewayConfig)]
    return [
        key for key in fields if key not in reloadable and getattr(before.gateway, key) != getattr(after.gateway, key)
    ]
