"""What a rank saves of its training, as files in a folder: a copy in host memory first, then the files in peace.

``Snapshot.take`` copies, so training may go on while ``Snapshot.write`` writes on another thread. A whole model (plain,
or wrapped by DDP) is written by rank 0. Of a sharded one (FSDP2) each rank writes its own shards, by
torch.distributed.checkpoint, and any number of ranks can load them.

    model.pt                        of a whole model: model, optimizer and schedule
    .metadata, __<rank>_<n>.distcp  the same of a sharded one
    rng-<rank>.pt                   random number generators of each rank (torch, CUDA, numpy, Python)

Nothing is unpickled that could run code: ``weights_only`` everywhere, and the index of the shards by a list of names.
"""

from __future__ import annotations

import functools
import io
import pickle
import random
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as by_name
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from ingest.errors import ResumeError

WHOLE_FILE = "model.pt"
INDEX_FILE = ".metadata"
# What the index of torch.distributed.checkpoint is made of.
INDEX_NAMES = {
    "torch": r"Size|device|(b?float|u?int|complex)\d+\w*|bool",
    "torch.serialization": r"_get_layout",
    "torch.distributed.checkpoint.filesystem": r"_StorageInfo",
    "torch.distributed.checkpoint.metadata": r"\w*Metadata(Index)?|StorageMeta|TensorProperties|_MEM_FORMAT_ENCODING",
    "pathlib": r"(Pure)?(Posix|Windows)?Path",
}


class Stateful(Protocol):
    """What an optimizer or a schedule offers."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it back."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """A copy in host memory of what one rank saves.

    Args:
        rank: of the world.
        states: by part (model, optimizer, schedule); empty on ranks that write no part of the model.
        rng: the random number generators.
        group: the ranks that write together; None for a whole model.
    """

    rank: int
    states: dict[str, Any]
    rng: dict[str, Any]
    group: dist.ProcessGroup | None = None

    @classmethod
    def take(
        cls, rank: int, model: nn.Module, optimizer: Stateful | None = None, schedule: Stateful | None = None
    ) -> Snapshot:
        """Copies; every rank must call it at the same step where the model is sharded."""
        sharded = is_sharded(model)
        states = _states(model, optimizer, schedule) if sharded or rank == 0 else {}
        stager = DefaultStager(StagingOptions(False, False, False, False))
        copied = cast("dict[str, Any]", stager.stage(states))
        stager.close()
        return cls(rank, copied, _rng_state(), _writers() if sharded else None)

    def write(self, folder: Path) -> None:
        """Writes the files; of a sharded model on all ranks at the same time.

        Raises:
            OSError, RuntimeError, CheckpointException: the disk is full, here or (the last) at another rank.
        """
        torch.save(self.rng, folder / f"rng-{self.rank}.pt")
        if self.group is not None:
            state_dict_saver.save(self.states, storage_writer=FileSystemWriter(folder), process_group=self.group)
        elif self.states:
            torch.save(self.states, folder / WHOLE_FILE)


def restore(
    folder: Path, rank: int, model: nn.Module, optimizer: Stateful | None = None, schedule: Stateful | None = None
) -> None:
    """Restores what snapshots wrote, at any number of ranks; every rank must call it.

    Raises:
        ResumeError: a part is missing or does not fit, only one of model and checkpoint is sharded, or the files hold
            more than data.
    """
    was_sharded, sharded = (folder / INDEX_FILE).exists(), is_sharded(model)
    if was_sharded != sharded:
        kinds = {True: "sharded", False: "whole"}
        raise ResumeError(
            f"checkpoint {folder} must be loaded by a model of its kind; got a {kinds[sharded]} model for a "
            f"{kinds[was_sharded]} one: wrap the model as when it was saved"
        )
    load, rng = _load_shards if sharded else _load_whole, folder / f"rng-{rank}.pt"
    try:
        load(folder, model, optimizer, schedule)
        if rng.exists():  # a rank that the saving run did not have starts from its own seed
            _set_rng_state(torch.load(rng, weights_only=True))
    except (CheckpointException, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ResumeError(
            f"checkpoint {folder} must hold tensors and plain values that fit this model; got {words(error)}: use the "
            "model that was saved, and a checkpoint that you trust"
        ) from error


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds only its part of the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def words(error: BaseException) -> str:
    """Class and message in one line; of what failed at several ranks the first one's."""
    if isinstance(error, CheckpointException):  # its own message is a traceback
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__} {' '.join(str(error).split())[:600]}"


def _states(model: nn.Module, optimizer: Stateful | None, schedule: Stateful | None) -> dict[str, Any]:
    parts = {"model": _bare(model), "optimizer": optimizer, "schedule": schedule}
    states = {name: part.state_dict() for name, part in parts.items() if part is not None}
    if is_sharded(model):  # by names instead of numbers, which the shards of an optimizer need
        states["model"] = by_name.get_model_state_dict(model)
        if optimizer is not None:
            states["optimizer"] = by_name.get_optimizer_state_dict(model, cast("torch.optim.Optimizer", optimizer))
    return states


def _load_whole(folder: Path, model: nn.Module, optimizer: Stateful | None, schedule: Stateful | None) -> None:
    states = torch.load(folder / WHOLE_FILE, map_location="cpu", weights_only=True)
    parts = {"model": _bare(model), "optimizer": optimizer, "schedule": schedule}
    for name, part in parts.items():
        if part is not None:
            _require(name, states, folder)
            part.load_state_dict(states[name])


def _load_shards(folder: Path, model: nn.Module, optimizer: Stateful | None, schedule: Stateful | None) -> None:
    reader = _Reader(folder)
    found = {name.partition(".")[0] for name in reader.read_metadata().state_dict_metadata}
    states = _states(model, optimizer, schedule)
    for name in states:
        _require(name, found, folder)
    state_dict_loader.load(states, storage_reader=reader, planner=_Planner())
    by_name.set_model_state_dict(model, states["model"])
    if optimizer is not None:
        by_name.set_optimizer_state_dict(model, cast("torch.optim.Optimizer", optimizer), states["optimizer"])
    if schedule is not None:
        schedule.load_state_dict(states["schedule"])


def _require(name: str, found: Any, folder: Path) -> None:
    if name not in found:
        raise ResumeError(f"checkpoint {folder} must hold {name}; got {sorted(found)}: save it too")


class _Index(pickle.Unpickler):
    """Reads the index of the shards, and nothing that is more than data."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if not re.fullmatch(INDEX_NAMES.get(module, r"(?!)"), name):
            raise ResumeError(
                f"{INDEX_FILE} of a checkpoint must hold sizes and names alone; got {module}.{name}, which could run "
                "code: use a checkpoint that you trust"
            )
        return super().find_class(module, name)


def _member(of: Any, name: str) -> Any:
    """What ``getattr`` may be in an index: a member of an enumeration, as some versions of Python write one."""
    if not (isinstance(of, type) and issubclass(of, Enum) and name in of.__members__):
        raise ResumeError(
            f"{INDEX_FILE} of a checkpoint must hold sizes and names alone; got an attribute {name!r} of {of!r}, which "
            "could run code: use a checkpoint that you trust"
        )
    return of[name]


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with Path(self.path, INDEX_FILE).open("rb") as file:
            _Index(file).load()
        metadata: Metadata = super().read_metadata(*args, **kwargs)
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert read_item.type == LoadItemType.BYTE_IO
        torch.load(value, weights_only=True)  # refuses what the line below, which torch loads freely, must not get
        value.seek(0)
        super().load_bytes(read_item, value)


@functools.cache
def _writers() -> dist.ProcessGroup:
    """The ranks again, on a wire of their own: they agree on files while training uses the other. Once a process."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _rng_state() -> dict[str, Any]:
    name, keys, *rest = cast("tuple[Any, ...]", np.random.get_state(legacy=True))  # noqa: NPY002 - users draw from it
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    python = random.getstate()
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": [name, keys.tolist(), *rest], "python": python}


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])
