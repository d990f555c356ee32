"""All limits of the protocol, with their reasons."""

from __future__ import annotations

PROTOCOL_VERSION = 2

# A header names tensors and carries error texts. The largest legal header, for a model with 64 inputs and 64 outputs
# with names and shapes of the maximum length, fits. A hostile header of this size is cheap to reject.
MAX_HEADER_BYTES = 64 * 1024

# A status response lists every process of every model, with about 400 bytes each: 63 processes on each of 8 devices fit
# several times over. Only a client that requested status, metrics, logs or names of models accepts such a header.
MAX_STATUS_BYTES = 4 * 1024 * 1024

# Headers between the daemon and its child processes are larger, because all inputs of the self-test name every tensor,
# also the excluded inputs.
MAX_CHILD_HEADER_BYTES = 1024 * 1024

# ZMQ_MAXMSGSIZE on both sides: libzmq disconnects a peer that announces a larger frame, before it allocates memory.
MAX_FRAME_BYTES = 1024 * 1024 * 1024

# Frames before the tensor frames: the envelope and the description of the tensors.
MAX_HEADER_FRAMES = 2

# Extensions that a server supports beyond the first version of the protocol.
MAX_EXTENSIONS = 64

# Inputs or outputs of one request. The largest exported graphs have a few dozen.
MAX_TENSORS = 64

# Shared-memory regions of one connection. Each costs the daemon a descriptor. An arena that doubles its size needs few.
MAX_REGIONS = 16

# 128 random bits in hex: no client can guess the region of another.
MAX_REGION_ID_BYTES = 32

# numpy before 2.0 supports at most 32 dimensions. No known engine supports more than 8.
MAX_RANK = 16

# The largest dimension is a thousand times the capacity of a frame. It is exact as a double, the only kind of number in
# JSON and Lua.
MAX_DIM = 2**40

# Request ids: two UUIDs fit, or the numbering of a client.
MAX_ID_BYTES = 128

# Names are written by people or exported from module paths. The longest file name has about the same length.
MAX_NAME_BYTES = 256

# Model names are parts of file names and process names.
MAX_MODEL_NAME_BYTES = 64

# Error texts are at most about a screenful: people read them, and find details in the log.
MAX_TEXT_BYTES = 4096

# PATH_MAX of Linux, for the path of a model file or page store.
MAX_PATH_BYTES = 4096

# The longest timeout of a request is one hour. Requests that may wait longer are batch processing.
MAX_TIMEOUT_US = 3_600_000_000

# Models of one daemon. Names of full length fit many times into a status response.
MAX_MODELS = 1024

# Devices of one daemon: twice the number of cards in a host. Also the maximum number of ranks of a model.
MAX_DEVICES = 64

# Models that share one process. Their signatures together fit into a child's header.
MAX_GROUP_MODELS = 16

# Tenants of one daemon: a few hundred departments, not all users of a site.
MAX_TENANTS = 256

# Keys of all tenants together: a proxy receives them in one message.
MAX_KEYS = 1024

# Accounts in a status response, less than a kilobyte each. Those beyond the limit are merged into one.
MAX_ACCOUNTS = 1024

# Limits of a tenant and error codes, with room for twice as many.
MAX_REFUSAL_REASONS = 64

# Listeners for ZeroMQ clients. Each has its own process.
MAX_LISTENERS = 64

# Generations of one model in a status response: the current one and the draining ones.
MAX_GENERATIONS = 64

# Processes of one generation: a holder, its workers (the configuration allows 1,024) and processes that are exiting.
MAX_PROCESSES = 2048

# Buckets of a histogram without the overflow bucket. Half a millisecond to half a minute takes 15.
MAX_BUCKETS = 32

# Combinations of process role and process state.
MAX_PROCESS_COUNTS = 64

# The driver stores at most 65,535 pids for a handle, and a card supports at most 64 processes, so 1,024 is generous.
MAX_PIDS = 1024

# Batch items in one predict. Each has at least one row, and the configuration allows this many rows.
MAX_BATCH_ITEMS = 4096

# Rows in one predict with batched or split requests. A request that is split may have this many rows.
MAX_ROWS = 2**17

# Numbers of rows for which a model's graph was compiled. The converter supports at most 100.
MAX_ROW_SIZES = 100

# Predicts that one process runs at once.
MAX_CONCURRENCY = 64

# A pid of the driver is a decimal number, with room for a namespace prefix.
MAX_PID_BYTES = 32

# Priority of a request. The daemon's configuration may allow fewer levels.
MAX_PRIORITY = 16

# The kernel's limit for pids (PID_MAX_LIMIT of include/linux/threads.h). Its system calls take a C int.
MAX_PID = 2**22

# A sha256 in hex.
MAX_DIGEST_BYTES = 64

# Libraries whose versions a child process reports.
MAX_VERSIONS = 32

# Command line of a forked process. There are fewer options than this number of arguments.
MAX_ARGUMENTS = 64
MAX_ARGUMENT_BYTES = 8192

# Inputs of the self-test. They are few because every attach runs them.
MAX_SELFTEST_CASES = 4

# Inputs on which a model failed before the search for a self-test ends. Each may have cost a build.
MAX_SELFTEST_UNFIT_CASES = 16

# Counters and sizes in bytes: an int64 in every language.
MAX_COUNT = 2**63 - 1

# Sizes for which a model was converted. The converter supports at most 100; the card checks other limits.
MAX_GEARS = 100
MAX_GEAR_DIMS = 4
MAX_GEAR_SIZE = 65535

# A list or map counts as this many items of a header, because creating it costs as much as that many other values. The
# limit for the items of a header follows from the fields of its message.
CONTAINER_ITEMS = 8

# Lengths that the unpacker allocates for a list or map before the items are checked. They exceed the limit of every
# field, so that a slightly longer list is rejected with the name of its field.
MAX_LIST_ITEMS = MAX_BATCH_ITEMS + 64
MAX_MAP_ITEMS = 2 * MAX_TENSORS

# Events in one response: as many short ones as fit into a header.
MAX_EVENTS = 512

# The last part of a process's log: a few stack dumps.
MAX_LOG_BYTES = 64 * 1024
MAX_LOG_LINES = 10_000

# Log tails in one response. Together they fit into MAX_STATUS_BYTES.
MAX_LOGS = 64

# The path of an ipc:// address is sun_path of a sockaddr_un: 108 bytes with the terminating NUL.
MAX_IPC_PATH_BYTES = 107
