"""Every bound of the wire, with its reason."""

from __future__ import annotations

PROTOCOL_VERSION = 1

# A header names tensors and carries error texts; 64 KiB is a hundred times what 64 tensors need
# and little enough that a hostile header costs nothing to refuse.
MAX_HEADER_BYTES = 64 * 1024

# A status answer lists every process of every model (about 400 bytes each): 63 processes on each
# of 8 devices fit several times over. Only a client that asked for status accepts such a header.
MAX_STATUS_BYTES = 4 * 1024 * 1024

# ZMQ_MAXMSGSIZE of both sides: libzmq drops a peer that announces a larger frame before it
# allocates memory for it.
MAX_FRAME_BYTES = 1024 * 1024 * 1024

# Inputs or outputs of one request. The largest exported graphs have a few dozen.
MAX_TENSORS = 64

# numpy before 2.0 has at most 32 dimensions; no engine is known to take more than 8.
MAX_RANK = 16

# A dimension is an int64 in ONNX and in MindIR; this bound keeps products in 64 bits meaningful.
MAX_DIM = 2**40

MAX_ID_BYTES = 128
MAX_NAME_BYTES = 256
MAX_TEXT_BYTES = 4096

# A relative path of a model's file, or the path of a page store.
MAX_PATH_BYTES = 4096

# One hour: a request that may wait longer is a batch job.
MAX_TIMEOUT_US = 3_600_000_000

# The driver keeps at most 65,535 pids to a handle, a card at most 64 processes: 1,024 is generous.
MAX_PIDS = 1024

# ipc:// addresses are sun_path of a sockaddr_un: 108 bytes with the terminating NUL.
MAX_IPC_PATH_BYTES = 107
