"""Tests of client certificates: one signed by the gateway's authority identifies the caller; others are rejected."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from testkit.fakedaemon import FakeDaemon
from testkit.httpgateway import HttpGateway

REQUEST = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with an authority, ca.pem, and its certificates localhost.pem and shop.pem with their keys."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: apt install openssl")
    directory = tmp_path_factory.mktemp("certificates")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE"]
    for name, more in (("ca", []), ("localhost", ["-addext", "subjectAltName=DNS:localhost"]), ("shop", [])):
        who = ["-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        command = [openssl, "req", "-x509", *key, *who, *more, *(signed if name != "ca" else [])]
        subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=60)
    return directory


def asked(port: int, certificates: Path, own: str = "") -> bytes:
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    if own:
        context.load_cert_chain(certificates / f"{own}.pem", certificates / f"{own}.key")
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(REQUEST)
        answer = bytearray()
        while chunk := connection.recv(65536):
            answer += chunk
    return bytes(answer)


def test_certificate_identifies_tenant(fake: FakeDaemon, certificates: Path) -> None:
    files = {"tls_cert": "localhost.pem", "tls_key": "localhost.key", "client_ca": "ca.pem"}
    settings = {key: str(certificates / name) for key, name in files.items()}
    tables = {"gateway": {**settings, "anonymous": ""}, "certificates": {"shop": "sales"}}
    with HttpGateway(fake.address, tables) as gateway:
        assert asked(gateway.port, certificates, "shop").startswith(b"HTTP/1.1 200 ")
        assert fake.next()[0].tenant == "sales"  # type: ignore[union-attr]
        # This certificate is signed, but no tenant has its name.
        assert asked(gateway.port, certificates, "localhost").startswith(b"HTTP/1.1 401 ")
        with contextlib.suppress(OSError):  # The client sees the error in the handshake or, with TLS 1.3, afterwards.
            assert asked(gateway.port, certificates) == b""
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as plain:
            plain.sendall(REQUEST)
            assert not plain.recv(65536).startswith(b"HTTP/1.1 200")
