"""Checks of `weightd check` on the files of a model with ranks: slices, rank tables, and inputs of the self-test."""

from __future__ import annotations

import contextlib
import itertools
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weightd_common.devices import card_of
from weightd_common.modelfiles import mindir
from weightd_common.modelfiles.files import ModelFileError, OpenModel
from weightd_common.modelfiles.mindir import MindIr, MindIrTensor
from weightd_common.modelfiles.protobuf import Malformed
from weightd_common.safe_open import open_regular, read_regular
from weightd_daemon.config import selftest as selftest_config
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import MINDSPORE_LITE, RanksConfig
from weightd_daemon.engines import ranktable
from weightd_daemon.engines.mindspore_lite import config_items
from weightd_daemon.engines.ranktable import RankTable, physical_id
from weightd_protocol.schema import FieldError

_BLOCK_BYTES = 1024 * 1024
_ARRAY_SUFFIX = ".npy"

# By physical card number and port, the name of the model whose ranks use the port.
PortOwners = dict[tuple[int, int], str]


def find_problems(
    name: str, model: ModelConfig, ranks: RanksConfig, visible_devices: str, port_owners: PortOwners
) -> Iterator[str]:
    """Yield the errors in the files of a model with ranks; each text names the key.

    Args:
        name: the name of the model.
        model: the model, with its defaults filled in.
        ranks: the model's table of ranks.
        visible_devices: the value of ASCEND_RT_VISIBLE_DEVICES.
        port_owners: the ports of the models that were checked before this one; the function adds the ports of this
            model.
    """
    with contextlib.ExitStack() as stack:
        slices = _Slices([], [])
        for rank, path in enumerate(ranks.paths):
            yield from (f"path: rank {rank}: {problem}" for problem in _open_slice(Path(path), stack, slices))
        if len(slices.signatures) == ranks.size:
            yield from _compare_signatures(ranks, slices.signatures)
            yield from _check_inputs_file(model, slices.signatures[0])
        if len(slices.models) == ranks.size:
            yield from _find_equal_slices(ranks, slices.models)
    yield from _check_group_info(ranks)
    yield from _check_config_file(model)
    yield from _check_rank_tables(name, model, ranks, visible_devices, port_owners)


# --- Slices -----------------------------------------------------------------------------------------------------------


class _Slices(NamedTuple):
    """The slices of a model that could be opened, and the signatures of the slices that could be read."""

    models: list[OpenModel]
    signatures: list[MindIr]


def _open_slice(path: Path, stack: contextlib.ExitStack, slices: _Slices) -> Iterator[str]:
    try:
        model = stack.enter_context(OpenModel(path))
        slices.models.append(model)
        with model.open(model.files[0]) as file:
            signature = mindir.read(file)
    except ModelFileError as error:
        yield from str(error).splitlines()
    except OSError as error:
        yield f"{path}: {error.strerror}"
    except Malformed:
        yield f"{path}: expected a complete MindIR file"
    else:
        slices.signatures.append(signature)
        if not signature.is_mindspore_export:
            yield f"{path}: expected a MindIR exported by MindSpore, got one of the Converter"
        for what, tensors in (("input", signature.inputs), ("output", signature.outputs)):
            yield from (f"{path}: {problem}" for problem in mindir.find_problems(what, tensors))


def _compare_signatures(ranks: RanksConfig, signatures: Sequence[MindIr]) -> Iterator[str]:
    """Check that all slices have equal signatures: all ranks get the same inputs, and any rank may reply."""
    first_signature = signatures[0]
    for rank, other in enumerate(signatures[1:], 1):
        for what, one, another in (
            ("inputs", first_signature.inputs, other.inputs),
            ("outputs", first_signature.outputs, other.outputs),
        ):
            if one != another:
                difference = (
                    f"expected the {what} of rank 0, {_describe_tensors(one)}, got {_describe_tensors(another)}"
                )
                yield f"path: rank {rank}: {ranks.paths[rank]}: {difference}"


def _describe_tensors(tensors: Sequence[MindIrTensor]) -> str:
    shapes = ["of any rank" if each.shape is None else str(list(each.shape)) for each in tensors]
    return ", ".join(f"{each.name} {each.datatype} {shape}" for each, shape in zip(tensors, shapes, strict=True))


def _find_equal_slices(ranks: RanksConfig, models: Sequence[OpenModel]) -> Iterator[str]:
    """Reject slices with equal content. A user may have copied the file of one slice to the path of another slice.

    The check is necessary because a rank group with a wrong slice reports no error, but returns wrong results.
    """
    for (rank, one), (other_rank, other) in itertools.combinations(enumerate(models), 2):
        try:
            equal = _have_equal_content(one, other)
        except (OSError, ModelFileError) as error:
            yield f"path: rank {other_rank}: {error}"
            return
        if equal:
            text = (
                f"has the same content as the slice of rank {rank}, {ranks.paths[rank]};"
                " expected a different slice for each rank"
            )
            yield f"path: rank {other_rank}: {ranks.paths[other_rank]}: {text}"


def _have_equal_content(one: OpenModel, other: OpenModel) -> bool:
    """Return whether two slices have the same bytes; stop at the first difference, because slices are large."""
    if [each.nbytes for each in one.files] != [each.nbytes for each in other.files]:
        return False
    for mine, theirs in zip(one.files, other.files, strict=True):
        with one.open(mine) as file, other.open(theirs) as other_file:
            while block := file.read(_BLOCK_BYTES):
                if block != other_file.read(_BLOCK_BYTES):
                    return False
    return True


# --- Other files of ranks ---------------------------------------------------------------------------------------------


def _check_inputs_file(model: ModelConfig, signature: MindIr) -> Iterator[str]:
    path = selftest_config.inputs_path(model.selftest)
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            names = [each.removesuffix(_ARRAY_SUFFIX) for each in archive.namelist()]
    except OSError:
        return  # `check.find_problems` reports a missing file
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        yield f"selftest: {path}: expected an .npz of plain arrays: {error}"
        return
    inputs = [each.name for each in signature.inputs]
    outputs = [each.name for each in signature.outputs]
    if sorted(names) != sorted(inputs + outputs):
        expected = f"expected arrays {', '.join(inputs + outputs)}, the inputs and the correct outputs"
        yield f"selftest: {path}: {expected}, got {', '.join(names)}"


def _check_group_info(ranks: RanksConfig) -> Iterator[str]:
    for path in dict.fromkeys(ranks.group_info_path(rank) for rank in range(ranks.size)):
        problem = unreadable_reason(path) if path else ""
        if problem:
            yield f"ranks.group_info_file: {path}: {problem}"


def unreadable_reason(path: str) -> str:
    """Return why a file cannot be read; "" if it can."""
    try:
        open_regular(path).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _check_config_file(model: ModelConfig) -> Iterator[str]:
    path = model.mindspore_lite.config_file
    if not path:
        return
    with contextlib.suppress(OSError):  # `MindSporeLiteOptions.file_problems` reports a missing file
        for _, key, _ in config_items(Path(path)):
            if key == "stream_sync_timeout":
                reason = "after this timeout, the graph engine hangs in every further predict"
                yield f"mindspore_lite.config_file: {path}: {key}: {reason}; remove it from the file"


# --- Rank tables ------------------------------------------------------------------------------------------------------


def _check_rank_tables(
    name: str, model: ModelConfig, ranks: RanksConfig, visible_devices: str, port_owners: PortOwners
) -> Iterator[str]:
    for index, group in enumerate(ranks.groups):
        cards = {each: _physical_id_of(each, visible_devices) for each in group if card_of(each) is not None}
        for device, card in cards.items():
            if card is None:
                yield (f"ranks.devices: {device}: not in ASCEND_RT_VISIBLE_DEVICES, which is {visible_devices!r}")
        ports = [ranks.device_ports or (ranktable.DEFAULT_PORT,)] * len(cards)
        path = ranks.rank_table_path(index)
        if path and model.engine == MINDSPORE_LITE:
            table = read_rank_table(Path(path))
            if isinstance(table, str):
                yield f"ranks.rank_table: {path}: {table}"
                continue
            yield from (f"ranks.rank_table: {path}: {each}" for each in ranktable.device_problems(table, cards))
            ports = [(each.port or ranktable.DEFAULT_PORT,) for each in table.devices]
        yield from _check_ports(name, cards, ports, port_owners)


def _physical_id_of(device: str, visible_devices: str) -> int | None:
    number = card_of(device)
    return None if number is None else physical_id(number, visible_devices)


def _check_ports(
    name: str, cards: Mapping[str, int | None], ports: Sequence[Sequence[int]], port_owners: PortOwners
) -> Iterator[str]:
    for (device, card), each in zip(cards.items(), ports, strict=False):
        for port in each if card is not None else ():
            other = port_owners.setdefault((card or 0, port), name)
            if other != name:
                yield f"ranks.devices: the ranks of {other} already use port {port} on {device}"


def read_rank_table(path: Path) -> RankTable | str:
    """Return the rank table in a file, or a text that says why the file is invalid."""
    try:
        # Check the name of the resolved path, because HCCL resolves links before it checks the name of the file.
        resolved_path = os.path.realpath(path)
        content = read_regular(resolved_path, ranktable.MAX_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    problem = next(ranktable.path_problems(resolved_path), "")
    if problem:
        return f"links resolved, {problem}" if resolved_path != str(path) else problem
    try:
        return ranktable.parse(content.decode("utf-8", "replace"))
    except FieldError as error:
        return str(error)
