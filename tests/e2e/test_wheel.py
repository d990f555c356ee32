"""The wheel: its content and metadata, and its use on CPython 3.7 in a vendor's environment."""

from __future__ import annotations

import email
import email.message
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from testkit import mindir
from weightd_protocol.version import VERSION

PACKAGES = [
    "weightctl",
    "weightd",
    "weightd_common",
    "weightd_daemon",
    "weightd_gateway",
    "weightd_protocol",
    "weightd_ray",
    "weightd_worker",
]
ENGINES = ["mindspore", "mindspore-lite", "onnxruntime"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--wheel-dir", str(out), str(mindir.REPOSITORY)], check=True, timeout=240)
    [path] = out.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("target")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True, timeout=60)
    return target


@pytest.fixture(scope="module")
def python37() -> Path:
    """An interpreter with the packages of a vendor's environment: numpy, pyzmq, msgpack and an engine."""
    python = mindir.interpreter()
    if python is None:
        if os.environ.get("CI") == "true":
            pytest.fail(mindir.HOW_TO_GET_IT)
        pytest.skip(mindir.HOW_TO_GET_IT)
    return python


def run(python: Path | str, target: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [str(python), *arguments], env=environment, cwd=target, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_wheel_metadata(wheel: Path) -> None:
    fields = metadata(wheel)
    assert (fields["Name"], fields["Version"], fields["Requires-Python"]) == ("weightd", VERSION, ">=3.7")
    assert fields["License-Expression"] == "Apache-2.0"
    requirements = [str(each) for each in fields.get_all("Requires-Dist", [])]
    core = sorted(each.partition(">")[0].strip() for each in requirements if "extra ==" not in each)
    assert core == ["msgpack", "numpy", "pyzmq"]
    assert sorted(fields.get_all("Provides-Extra", [])) == ["daemon", "gateway", "images", *ENGINES, "ray"]
    extras = [each for each in requirements if "extra ==" in each]
    needed = {
        "grpcio",
        "grpcio-reflection",
        "httptools",
        "pillow",
        "protobuf",
        "pynacl",
        "ray[serve]",
        "tomli",
        *ENGINES,
    }
    assert {each.partition(">")[0] for each in extras} == needed
    assert wheel.name == f"weightd-{VERSION}-py3-none-any.whl"


def test_wheel_contains_only_packages_with_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top_level = {name.split("/")[0] for name in names}
    assert top_level == {*PACKAGES, f"weightd-{VERSION}.dist-info"}
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    assert not [name for name in names if name.endswith(".pyc")]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_worker_runs_on_python_37(installed: Path, python37: Path) -> None:
    assert run(python37, installed, "-c", "import sys; print(sys.version_info[:2])") == "(3, 7)\n"
    assert "python -m weightd_worker" in run(python37, installed, "-m", "weightd_worker", "--help")
    assert "weightctl" in run(python37, installed, "-m", "weightctl", "--help")


_IMPORT = """
import pkgutil, sys
import weightd, weightctl, weightd_protocol, weightd_common, weightd_worker
for package in (weightd, weightctl, weightd_protocol, weightd_common, weightd_worker):
    assert package.__file__.startswith(sys.argv[1]), package.__file__
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            __import__(module.name)
print(weightd.Client.__name__, "mindspore_lite" in sys.modules, "onnxruntime" in sys.modules)
"""


def test_python_37_modules_import_without_engine(installed: Path, python37: Path) -> None:
    for python in (python37, sys.executable):
        assert run(python, installed, "-c", _IMPORT, str(installed)) == "Client False False\n"


def test_wheel_installs_units_and_manual(installed: Path, tmp_path: Path) -> None:
    for name in ("systemd", "manual"):
        where = run(
            sys.executable, installed, "-c", f"from weightctl.install import plan; print(plan.source({name!r}))"
        )
        assert where.startswith(str(installed))
    run(sys.executable, installed, "-m", "weightctl", "install-units", "--prefix", str(tmp_path))
    units = {path.name for path in (mindir.REPOSITORY / "systemd").iterdir() if path.is_file()}
    assert "weightd.service" in units
    assert {path.name for path in (tmp_path / "etc/systemd/system").iterdir()} == units
    assert {path.name for path in (tmp_path / "usr/local/share/man").glob("*/*")} == {
        "weightctl.1",
        "weightd.toml.5",
        "weightd.8",
        "weightd-gateway.toml.5",
    }


def test_daemon_runs_from_wheel(installed: Path) -> None:
    assert run(sys.executable, installed, "-m", "weightd_daemon", "--version") == f"weightd {VERSION}\n"
    said = run(sys.executable, installed, "-c", "import weightd_daemon; print(weightd_daemon.__file__)")
    assert said.startswith(str(installed))
