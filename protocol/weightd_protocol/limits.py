"""Every bound of the wire, with its reason."""

from __future__ import annotations

PROTOCOL_VERSION = 2

# A header names tensors and carries error texts. The largest legal one, of a model with 64 inputs and 64 outputs whose
# names and shapes are as long as they may be, fits; and a hostile one costs little to refuse.
MAX_HEADER_BYTES = 64 * 1024

# A status answer lists every process of every model (about 400 bytes each): 63 processes on each
# of 8 devices fit several times over. Only a client that asked for status, metrics or logs accepts such a header.
MAX_STATUS_BYTES = 4 * 1024 * 1024

# Between the daemon and its children: the inputs of a self-test name every tensor, and so do those that are left out.
MAX_CHILD_HEADER_BYTES = 1024 * 1024

# ZMQ_MAXMSGSIZE of both sides: libzmq drops a peer that announces a larger frame before it
# allocates memory for it.
MAX_FRAME_BYTES = 1024 * 1024 * 1024

# Frames before those of the tensors: the envelope, and a description of the tensors.
MAX_HEADER_FRAMES = 2

# What a server understands beyond the first version of the protocol.
MAX_EXTENSIONS = 64

# Inputs or outputs of one request. The largest exported graphs have a few dozen.
MAX_TENSORS = 64

# Regions of shared memory of one connection: each costs the daemon a descriptor. An arena that doubles needs few.
MAX_REGIONS = 16

# 128 random bits in hex: nobody finds another's region.
MAX_REGION_ID_BYTES = 32

# numpy before 2.0 has at most 32 dimensions; no engine is known to take more than 8.
MAX_RANK = 16

# A thousand times what a frame can hold, and small enough for a double: JSON and Lua have no other numbers.
MAX_DIM = 2**40

# Room for two UUIDs, or for a client's own numbering.
MAX_ID_BYTES = 128

# Names are written by people or exported from module paths; this is the length of a file name, too.
MAX_NAME_BYTES = 256

# Names of models, which are parts of file names and process names.
MAX_MODEL_NAME_BYTES = 64

# A screenful: an error text is read by people, who find the rest in the log.
MAX_TEXT_BYTES = 4096

# PATH_MAX of Linux: the path of a model's file, or of a page store.
MAX_PATH_BYTES = 4096

# One hour: a request that may wait longer is a batch batch.
MAX_TIMEOUT_US = 3_600_000_000

# Models of one daemon: as many names of full length as fit in a header twice over.
MAX_MODELS = 128

# Cards of one host, and as many again: so many ranks may a model be cut over.
MAX_DEVICES = 64

# Models of one process that has several: what all of them take and give fits in a header of a child.
MAX_GROUP_MODELS = 16

# Tenants of one daemon: some hundred departments, not the users of a site.
MAX_TENANTS = 256

# Of all tenants: a proxy is told them in one message.
MAX_KEYS = 1024

# Accounts that a status answer lists, less than a kilobyte each: the sum of those that have no room is one of them.
MAX_ACCOUNTS = 1024

# Bounds of a tenant and codes of errors: twice as many as there are.
MAX_REFUSAL_REASONS = 64

# Places where clients connect that speak ZeroMQ: each is a process.
MAX_LISTENERS = 64

# Generations of one model that a status answer lists: the present one and those that wind down.
MAX_GENERATIONS = 64

# Processes of one generation: a holder, its workers, of which the configuration allows 1,024, and those that leave.
MAX_PROCESSES = 2048

# Of a histogram, but for what is beyond the last: from half a millisecond to half a minute there are 15.
MAX_BUCKETS = 32

# Roles of processes, and states that each can be in.
MAX_PROCESS_COUNTS = 64

# The driver keeps at most 65,535 pids to a handle, a card at most 64 processes: 1,024 is generous.
MAX_PIDS = 1024

# Requests, or parts of them, in one predict of the model: each has a row at least, of which the configuration allows so
# many.
MAX_BATCH_ITEMS = 4096

# Rows of one predict, where requests are put together or divided: as many as a request that is divided may have.
MAX_ROWS = 2**17

# Numbers of rows that a model's graph exists for: the converter takes 100 at most.
MAX_ROW_SIZES = 100

# Predicts that one process runs at once.
MAX_CONCURRENCY = 64

# A decimal number, with room for a namespace's.
MAX_PID_BYTES = 32

# Of a request; the daemon's configuration may allow for fewer levels.
MAX_PRIORITY = 16

# A pid as the kernel counts them: PID_MAX_LIMIT of its include/linux/threads.h. Its calls take no more than a C int.
MAX_PID = 2**22

# A sha256 in hex.
MAX_DIGEST_BYTES = 64

# Libraries that a child names the version of.
MAX_VERSIONS = 32

# Of the command line of a process that is forked: more than there are options.
MAX_ARGUMENTS = 64
MAX_ARGUMENT_BYTES = 8192

# Inputs of the self-test: it is run at each attach, so they are few.
MAX_SELFTEST_CASES = 4

# Inputs that a model was found not to run on, before the search for a self-test ends: each may have cost a build.
MAX_SELFTEST_UNFIT_CASES = 16

# Counters, and sizes in bytes: an int64 in every language.
MAX_COUNT = 2**63 - 1

# Sizes that a model was converted for: the converter takes 100 at most. What exceeds these is left to the card.
MAX_GEARS = 100
MAX_GEAR_DIMS = 4
MAX_GEAR_SIZE = 65535

# A list or a map counts as so many items of a header: to build one costs as much as to build so many other values. How
# many items a header may have follows from the fields of its message.
CONTAINER_ITEMS = 8

# What the unpacker allocates for a list or a map before its items are looked at: more than the longest of any message
# has, so that one which is a little too long is refused by its name.
MAX_LIST_ITEMS = MAX_BATCH_ITEMS + 64
MAX_MAP_ITEMS = 2 * MAX_TENSORS

# Events of one answer: as many short ones as fit into a header.
MAX_EVENTS = 512

# The end of what a process has written: a few dumps of stacks.
MAX_LOG_BYTES = 64 * 1024
MAX_LOG_LINES = 10_000

# Processes whose ends are in one answer, together within MAX_STATUS_BYTES.
MAX_LOGS = 64

# ipc:// addresses are sun_path of a sockaddr_un: 108 bytes with the terminating NUL.
MAX_IPC_PATH_BYTES = 107
