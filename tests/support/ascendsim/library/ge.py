"""Graph engine: the provider "ge" (ge_graph_executor.cc, ge_device_context.cc).

A process has one graph engine, with the options of the first model until the last one is released. A build neither
communicates with other ranks nor allocates memory for the model. The first predict compiles and loads it, and connects
to the other ranks if the graph has collective operators.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from ascendsim import addresses, driver_state, faults, glog, modelfile, network
from ascendsim.driver import AclError, Driver
from ascendsim.driver_state import MIB
from ascendsim.hccl import groupinfo, products, ranktable, settings
from ascendsim.hccl.errors import HcclError
from ascendsim.hccl.world import StreamSyncTimeout, World
from ascendsim.modelfile import Floats, ModelFile

Sections = Mapping[str, Mapping[str, str]]

_ASCEND = "ascend_context"
_GE_SECTIONS = ("ge_global_options", "ge_session_options", "ge_graph_options")
_EXECUTOR = "extendrt/delegate/graph_executor/ge/ge_graph_executor.cc"
_CONTEXT = "extendrt/delegate/graph_executor/ge/ge_device_context.cc"
_MAX_PROCESSES = 8  # per card, each with a separate port (hccl constraints.md)


class Options(NamedTuple):
    """Options of a build. For further models of a process, only the file counts."""

    device: int
    rank: int
    group_info: str
    sections: Sections

    @property
    def table(self) -> str:
        """Path of the rank table; if missing or empty, the model runs on one card (ge_device_context.cc:246)."""
        return self.sections.get(_ASCEND, {}).get("rank_table_file", "")

    def ge_option(self, name: str) -> str:
        """Return an option that is passed on unchanged."""
        return next((self.sections[each][name] for each in _GE_SECTIONS if name in self.sections.get(each, {})), "")


class _Context:
    """GE and HCCL in this process; `graphs` counts its models."""

    def __init__(self, driver: Driver, options: Options, *, other_table: bool) -> None:
        self._driver = driver
        self._port = 0
        self._buffers: Dict[str, int] = {}
        self._buffer_bytes = 0
        self.device = options.device
        self.rank = options.rank
        self.graphs = 1
        self.world: Optional[World] = None
        self._product = products.kind(driver.switches.soc_name)
        driver.set_device(self.device)
        try:
            if self._product != products.OLD and not driver.switches.libhccl:
                raise HcclError("dlopen", "libhccl.so failed (ge_device_context.cc:218)")
            if options.table:
                self._init_hccl(options, other_table=other_table)
            if options.group_info:
                self._create_groups(options.group_info)
        except (HcclError, OSError):
            self.close()
            raise

    def take_buffers(self, groups: Sequence[str]) -> None:
        """Allocate the memory of these groups' communicators, once."""
        for group in groups:
            if group not in self._buffers:
                self._buffers[group] = self._driver.allocate(self.device, self._buffer_bytes, driver_state.BUFFERS)

    def close(self) -> None:
        """Simulate GEFinalize."""
        for number in self._buffers.values():
            self._driver.free(number)
        if self.world is not None:
            self.world.close()
        if self._port:
            self._driver.close_port(self.device, self._port)
        self._driver.reset_device(self.device)

    def _init_hccl(self, options: Options, *, other_table: bool) -> None:
        driver, switches, product = self._driver, self._driver.switches, self._product
        if _initialised:
            raise HcclError("EI0004", "multiple initialization is not supported (hcom.cc:82)")
        if switches.vnpu:
            raise HcclError("EI0004", "HCCL does not run on a virtual instance (hccl constraints.md)")
        if product == products.DUO and driver.holds_memory(self.device):
            raise HcclError("EI0004", "HCCL is initialised before any memory is taken (hccl constraints.md)")
        values = settings.read(os.environ, options.ge_option("ge.exec.hcclExecuteTimeOut"), product)
        table = ranktable.load(options.table, lambda: faults.stall(switches.hccl_second))
        card = driver.physical(self.device)
        mine = ranktable.check_process(table, self.rank, card, addresses.of_card(card), product)
        has_ports = products.has_ports(product, switches.driver_version)
        port = mine.port if has_ports else ranktable.DEFAULT_PORT
        if not driver.open_port(self.device, port, _MAX_PROCESSES):
            raise HcclError("EI0019", f"The IP address and port {port} of device {card} have been bound already")
        self._port = port
        if other_table:
            table = table._replace(crc=table.crc ^ 1)
        self._buffer_bytes = 2 * values.buffer_mib * MIB
        self.world = World(driver.directory, driver.token, table, self.rank, values, self._second)
        _initialised.append(True)

    def _second(self) -> float:
        return self._driver.switches.hccl_second

    def _create_groups(self, file: str) -> None:
        try:
            groups = groupinfo.read(Path(file))
        except ValueError:
            glog.error("extendrt/delegate/comm_group_info.cc:60", "LoadGroupInfo", "Load strategy file failed")
            raise HcclError("EI0004", "group info") from None
        for name, ranks in groups.items():
            if self.world is not None:
                self.world.create_group(name, ranks)


class Session:
    """ge::Session: weights that the models of a ModelGroup share by the name of a parameter.

    A parameter that several models have gets the values of the model that was loaded first.
    """

    def __init__(self) -> None:
        self._options: Optional[Mapping[str, str]] = None
        self._parameters: Dict[str, Floats] = {}
        self._memory: List[int] = []
        self._graphs = 0

    def enter(self, options: Mapping[str, str]) -> bool:
        """Add a model; return False if it has other options (:2001)."""
        if self._options is None:
            self._options = dict(options)
        self._graphs += self._options == options
        return self._options == options

    def leave(self, driver: Driver) -> None:
        """Remove a model; the last one releases the memory."""
        self._graphs -= 1
        if self._graphs == 0:
            for number in self._memory:
                driver.free(number)
            self._memory.clear()
            self._parameters.clear()
            self._options = None

    def take(self, driver: Driver, device: int, model: ModelFile) -> Floats:
        """Return a model's weights, all of which are constants; models share them with ge.externalWeight=1."""
        own = modelfile.as_floats(model.weights, model)
        if (self._options or {}).get("ge.externalWeight") != "1":
            self._allocate(driver, device, model.weight_bytes)
            return own
        used = new = 0
        parts: List[Floats] = []
        for name, size in network.parameters(model):
            known = self._parameters.get(name)
            if known is not None and known.size != size:
                raise HcclError("E13999", f"the variable {name} is there with another size")
            if known is None:
                new += size
                known = self._parameters[name] = own[used : used + size]
            used += size
            parts.append(known)
        if new:
            self._allocate(driver, device, model.weight_bytes * new // used)
        return np.concatenate(parts)

    def _allocate(self, driver: Driver, device: int, size: int) -> None:
        self._memory.append(driver.allocate(device, size, driver_state.PRIVATE_WEIGHTS))


_contexts: List[_Context] = []  # the context of this process, if it has one
_initialised: List[bool] = []  # not empty once HCCL was initialised


def build(driver: Driver, model: ModelFile, options: Options, session: Optional[Session]) -> Optional[Graph]:
    """Build a model. If the build fails, log the reason and return None."""
    session = session or Session()
    who = "rank" if options.table else "private"
    try:
        other_table = False
        try:
            faults.begin(driver, "build", who, options.rank)
        except faults.OtherTable:
            other_table = True
        context = _acquire(driver, options, other_table=other_table)
    except (HcclError, AclError, OSError) as error:
        glog.error(f"{_CONTEXT}:176", "InitGe", f"Init ge failed: {error}")
        return None
    except (faults.Failed, faults.Garbage, faults.Skipped):
        glog.error(f"{_CONTEXT}:176", "InitGe", "Init ge failed")
        return None
    if not model.exported:
        glog.error(f"{_EXECUTOR}:1357", "CompileGraph", "Offline converted MindIR is not supported currently")
        _release(context)
        return None
    if options.sections.get(_ASCEND, {}).get("model_cache_mode"):
        Path(f"model_build_cache_{context.rank}").mkdir(
            exist_ok=True
        )  # in the current directory, like the vendor's (:553)
    if not session.enter(options.sections.get("ge_session_options", {})):
        glog.error(f"{_EXECUTOR}:2001", "InitSession", "The session options of the models of a group are not equal")
        _release(context)
        return None
    graph = Graph(driver, context, session, model, options.ge_option("stream_sync_timeout"))
    try:
        faults.suffer(driver, "build", who, "loaded", options.rank)
    except (faults.Failed, faults.Garbage, faults.Skipped, faults.OtherTable):
        glog.error(f"{_EXECUTOR}:700", "AddGraph", "Failed to add graph")
        graph.unload()
        return None
    return graph


def _acquire(driver: Driver, options: Options, *, other_table: bool) -> _Context:
    if _contexts:
        glog.warning(f"{_CONTEXT}:156", "Initialize", "GE Context has been initialized, skip.")
        _contexts[0].graphs += 1
    else:
        _contexts.append(_Context(driver, options, other_table=other_table))
    return _contexts[0]


def _release(context: _Context) -> None:
    context.graphs -= 1
    if context.graphs == 0:
        _contexts.remove(context)
        context.close()


class Graph:
    """A model in the graph engine. `handle` is 0, because it never shares memory with other processes."""

    handle = 0

    def __init__(
        self, driver: Driver, context: _Context, session: Session, model: ModelFile, stream_sync_ms: str
    ) -> None:
        self._driver = driver
        self._context = context
        self._session = session
        self.model = model
        self._weights: Floats = np.zeros(0, np.float32)
        self._groups = network.groups(model)
        self._memory: List[int] = []
        self._loaded = False
        self._runs = True  # whether the model's run loop is alive
        self._outputs: List[Floats] = []
        milliseconds = int(stream_sync_ms or -1)
        self._sync_s = milliseconds / 1000 if milliseconds > 0 else float("inf")

    def unload(self) -> None:
        """Release all memory."""
        for number in reversed(self._memory):
            self._driver.free(number)
        self._session.leave(self._driver)
        _release(self._context)

    def run(self, inputs: List[Floats]) -> Optional[List[Floats]]:
        """Return the outputs, or None. Waits without a limit and without the GIL (ge_graph_executor.cc:1514)."""
        if not self._runs:
            faults.stall(faults.FOREVER_S)
        return faults.uninterrupted(lambda: self._run(inputs)) if self._groups else self._run(inputs)

    def _run(self, inputs: List[Floats]) -> Optional[List[Floats]]:
        garbage = False
        try:
            faults.begin(self._driver, "predict", self._who, self._context.rank)
        except faults.Garbage:
            garbage = True
        except faults.Skipped:
            return self._skip(inputs)
        except (faults.Failed, faults.OtherTable):
            _log_failure("")
            return None
        try:
            self._load()
            outputs = self._compute(inputs, garbage=garbage)
        except (HcclError, AclError) as error:
            _log_failure(f", {error}")
            return None
        except StreamSyncTimeout:
            self._runs = False  # davinci_model.cc:5659
            _log_failure(", stream sync timeout")
            return None
        self._outputs = outputs
        noise = self._driver.switches.noise
        if noise:
            random = np.random.RandomState([os.getpid(), self._driver.count("noise")])
            return [each * (1 + noise * random.rand(*each.shape)).astype(np.float32) for each in outputs]
        return outputs

    @property
    def _who(self) -> str:
        return "private" if self._context.world is None else "rank"

    def _load(self) -> None:
        if self._loaded:
            return
        world, device = self._context.world, self._context.device
        if any(world is None or world.size(group) == 0 for group in self._groups):
            # ge hcom_ops_kernel_info_store.cc:358
            raise HcclError("EI0004", f"No valid communicator found for {self._groups}")
        if not self._memory:
            try:
                workspace = self.model.workspace_bytes or self._driver.switches.workspace_mib * MIB
                self._memory.append(self._driver.allocate(device, workspace, driver_state.WORKSPACE))
                self._context.take_buffers(self._groups)
                self._weights = self._session.take(self._driver, device, self.model)
            except AclError:
                for number in self._memory:
                    self._driver.free(number)
                self._memory.clear()
                raise
        if world is not None and self._groups:
            world.link(self._groups)
        self._loaded = True

    def _compute(self, inputs: List[Floats], *, garbage: bool) -> List[Floats]:
        if self.model.kind != network.SLICE:
            outputs = modelfile.compute(self.model, self._weights, inputs)
            return [-1 - each for each in outputs] if garbage else outputs
        run, world = network.run(self.model, self._weights, inputs), self._context.world
        try:
            collective = next(run)
            while True:
                assert world is not None, "checked in _load"
                mine = collective._replace(data=-1 - collective.data) if garbage else collective
                collective = run.send(world.run(mine, self._sync_s * self._driver.switches.hccl_second, self._sent))
        except StopIteration as end:
            value: List[Floats] = end.value
            return [-1 - each for each in value] if garbage else value

    def _sent(self) -> None:
        try:
            faults.suffer(self._driver, "predict", self._who, "sent", self._context.rank)
        except (faults.Failed, faults.Garbage, faults.Skipped, faults.OtherTable):
            raise HcclError("EI0002", "a fault that a test has ordered") from None

    def _skip(self, inputs: List[Floats]) -> List[Floats]:
        """Return the outputs of the previous request, or a meaningless array."""
        rows = len(inputs[0])
        shapes = [(rows, *spec.shape[1:]) for spec in self.model.outputs]
        if [each.shape for each in self._outputs] == shapes:
            return self._outputs
        return [np.zeros(shape, np.float32) for shape in shapes]


def _log_failure(why: str) -> None:
    glog.error(f"{_EXECUTOR}:1508", "RunGraph", f"RunGraphAsync failed{why}")
