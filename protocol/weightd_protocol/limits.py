"""All limits of the protocol between clients, the daemon and its child processes, with their reasons."""

from __future__ import annotations

PROTOCOL_VERSION = 2

# Maximum size of a header frame in bytes. The largest legal header fits: it describes 64 inputs and 64 outputs with
# names and shapes of maximum length. A malicious header of this size is cheap to reject.
MAX_HEADER_BYTES = 64 * 1024

# Maximum size of a header in a response with status, metrics, logs or the names of models. Only a client that has
# requested such a response accepts it. A status response lists every process of every model, with about 400 bytes each:
# 63 processes on each of 8 devices fit several times over.
MAX_STATUS_BYTES = 4 * 1024 * 1024

# Maximum size of a header between the daemon and a child process. It is larger than for clients, because the inputs of
# the self-test, and the inputs excluded from it, name every tensor of the model.
MAX_CHILD_HEADER_BYTES = 1024 * 1024

# Maximum size of a frame in bytes, also set as ZMQ_MAXMSGSIZE on both sides: libzmq disconnects a peer that announces a
# larger frame, before libzmq allocates memory for the frame.
MAX_FRAME_BYTES = 1024 * 1024 * 1024

# Maximum number of frames before the tensor frames: the envelope and the description of the tensors.
MAX_HEADER_FRAMES = 2

# Maximum number of extensions of the protocol that a server reports.
MAX_EXTENSIONS = 64

# Maximum number of inputs, and of outputs, of one request. The largest exported graphs have a few dozen.
MAX_TENSORS = 64

# Maximum number of shared-memory regions of one connection. Each region costs the daemon a file descriptor. A client
# whose regions double in size needs few.
MAX_REGIONS = 16

# Maximum length of a region's id. An id consists of 128 random bits in hex, so no client can guess the id of another
# client's region.
MAX_REGION_ID_BYTES = 32

# Maximum number of dimensions of a tensor. numpy before 2.0 supports 32; no known engine supports more than 8.
MAX_RANK = 16

# Maximum size of a dimension: a thousand times the bytes of the largest frame. A double, the only kind of number in
# JSON and Lua, represents it exactly.
MAX_DIM = 2**40

# Maximum length of a request id in bytes. Two UUIDs fit, and so does a client's own numbering.
MAX_ID_BYTES = 128

# Direct channels of one device: the channels, the tenants that use them, and the workers. The daemon and each worker
# have a descriptor for each channel of the model.
MAX_CHANNELS = 256
MAX_CHANNEL_TENANTS = 64
MAX_CHANNEL_ROWS = 256

# Maximum size of a packet on a direct channel. By default, the kernel accepts packets of up to 212,960 bytes. But from
# 128 KiB on, glibc may map and unmap memory for each buffer into which a packet is read, which takes time.
MAX_PACKET_BYTES = 120 * 1024

# Maximum number of different descriptions of the requests on one direct channel.
MAX_CHANNEL_DESCRIPTIONS = 64

# Maximum length of a name in bytes. People write names, or export them from module paths. Linux has about the same
# limit for a file name.
MAX_NAME_BYTES = 256

# Maximum length of a model's name in bytes. It is short because file names and process names contain it.
MAX_MODEL_NAME_BYTES = 64

# Maximum length of an error text in bytes: about one screen. People read error texts, and find details in the log.
MAX_TEXT_BYTES = 4096

# Maximum length of the path of a model file or page store: PATH_MAX of Linux.
MAX_PATH_BYTES = 4096

# Maximum timeout of a request in microseconds: one hour. A longer computation is batch processing, for which weightd is
# not meant.
MAX_TIMEOUT_US = 3_600_000_000

# Maximum number of models of one daemon. A status response has room for many times as many names of full length.
MAX_MODELS = 1024

# Versions of one model.
MAX_MODEL_VERSIONS = 64

# Maximum number of devices of one daemon: twice the number of cards in a host. Also the maximum number of ranks of a
# model.
MAX_DEVICES = 64

# Maximum number of models in a model group, which share one process. Their signatures must fit into one header between
# the daemon and the process.
MAX_GROUP_MODELS = 16

# Maximum number of tenants of one daemon: enough for a few hundred departments, not for all users of a site.
MAX_TENANTS = 256

# Maximum number of keys of all tenants together, because a ZeroMQ proxy receives all keys in one message.
MAX_KEYS = 1024

# Maximum number of usage accounts in a status response, each of less than a kilobyte. Accounts beyond the limit are
# merged into one account.
MAX_ACCOUNTS = 1024

# Maximum number of reasons for which an account counts failed requests: error codes, and the limits of a tenant. There
# are half as many today.
MAX_REFUSAL_REASONS = 64

# Maximum number of listeners for ZeroMQ clients. Each listener has its own process.
MAX_LISTENERS = 64

# Maximum number of generations of one model in a status response: the serving generations, and earlier generations that
# still finish requests.
MAX_GENERATIONS = 64

# Maximum number of processes of one generation: a holder, its workers (the configuration allows 1,024) and processes
# that are exiting.
MAX_PROCESSES = 2048

# Maximum number of buckets of a histogram, without the overflow bucket. The range from 0.5 ms to 30 s takes 15.
MAX_BUCKETS = 32

# Maximum number of combinations of a process role and a process state in metrics.
MAX_PROCESS_COUNTS = 64

# Maximum number of pids that may attach to one handle. The Ascend driver stores at most 65,535 pids for a handle, and a
# card supports at most 64 processes.
MAX_PIDS = 1024

# Maximum number of batch items in one predict. Each item has at least one row, and the configuration allows this many
# rows.
MAX_BATCH_ITEMS = 4096

# Maximum number of rows in one predict, if requests are batched or split. Also the maximum of one request before it is
# split.
MAX_ROWS = 2**17

# Maximum number of batch sizes (numbers of rows) for which a model's graph was compiled. The Ascend converter supports
# at most 100.
MAX_ROW_SIZES = 100

# Maximum number of predicts that one process runs at the same time.
MAX_CONCURRENCY = 64

# Maximum length of an engine's pid as text: a decimal number, with room for a namespace prefix.
MAX_PID_BYTES = 32

# Maximum value of a request's priority. The daemon's configuration may allow fewer levels.
MAX_PRIORITY = 16

# Maximum pid of the kernel (PID_MAX_LIMIT in include/linux/threads.h). The check keeps larger numbers from system
# calls, which take a C int.
MAX_PID = 2**22

# A sha256 in hex.
MAX_DIGEST_BYTES = 64

# Maximum number of libraries whose versions a child process reports.
MAX_VERSIONS = 32

# Maximum number of command-line arguments of a forked process, and of bytes in one argument. `weightd_worker` has fewer
# options than this.
MAX_ARGUMENTS = 64
MAX_ARGUMENT_BYTES = 8192

# Maximum number of inputs of the self-test. They are few, because every worker runs them when it attaches.
MAX_SELFTEST_CASES = 4

# Maximum number of self-test inputs on which a model may fail before the search for a self-test ends. Each failure may
# have cost a build of the model.
MAX_SELFTEST_UNFIT_CASES = 16

# Maximum value of counters and of sizes in bytes: the largest int64, which every language supports.
MAX_COUNT = 2**63 - 1

# Maximum number of gears (sizes for which a model was converted for Ascend), of free dimensions of a gear, and of the
# size of such a dimension. The converter supports at most 100 gears. The card itself checks all other limits.
MAX_GEARS = 100
MAX_GEAR_DIMS = 4
MAX_GEAR_SIZE = 65535

# A list or map counts as this many msgpack items, because creating it costs as much as creating this many other values.
# The fields of a message determine how many items its header may have.
CONTAINER_ITEMS = 8

# Maximum number of items of a list, and of entries of a map, that the unpacker accepts. These limits exceed the limits
# of all fields. So a slightly too long list is unpacked, and then rejected with the name of its field.
MAX_LIST_ITEMS = MAX_BATCH_ITEMS + 64
MAX_MAP_ITEMS = 2 * MAX_TENSORS

# Maximum number of events in one response: as many short events as fit into a header.
MAX_EVENTS = 512

# Maximum number of bytes of one log tail, which is the end of a process's log: enough for a few stack dumps.
MAX_LOG_BYTES = 64 * 1024
MAX_LOG_LINES = 10_000

# Maximum number of log tails in one response. Together they fit into MAX_STATUS_BYTES.
MAX_LOGS = 64

# Maximum length of the path of a Unix or ipc:// socket: `sun_path` of the kernel's `sockaddr_un` has 108 bytes,
# including a terminating NUL.
MAX_IPC_PATH_BYTES = 107
