"""Compiler of the gateway's `.proto` files into the descriptor set that the gateway loads.

    python -m tools.descriptors

Run this command after a change to `gateway/weightd_gateway/grpc/proto/*.proto`, and commit the result. The gateway
then needs neither a compiler nor code that is bound to one release of protobuf. A test compiles the files again and
compares.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROTO_DIR = Path(__file__).resolve().parents[1] / "gateway" / "weightd_gateway" / "grpc" / "proto"
TARGET = PROTO_DIR / "descriptors.binpb"

# The folder of the files in their names, by which reflection reports them.
_VIRTUAL_DIR = "weightd"


def compile_protos(target: Path) -> None:
    """Write the descriptor set of all `.proto` files.

    Raises:
        subprocess.CalledProcessError: a file is invalid, or grpcio-tools is not installed; stderr says which.
    """
    names = sorted(each.name for each in PROTO_DIR.glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={_VIRTUAL_DIR}={PROTO_DIR}"]
    command += [f"--descriptor_set_out={target}", *(f"{_VIRTUAL_DIR}/{each}" for each in names)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    compile_protos(TARGET)
