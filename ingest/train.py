"""Ray Train glue: one stream for all ranks, and checkpoints that hold the model and the position together.

Rank 0 opens the stream at the position that it restored and tells the others its name, so the position always comes
from the very checkpoint that the model was restored from, at whatever world size this attempt has. A checkpoint is a
directory:

    model.pt        model, optimizer and schedule, written by rank 0, loaded with weights_only
    rng-<rank>.pt   random number generators of each rank (torch, CUDA, numpy, Python)
    position.json   readable JSON, the same on every rank
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import ray.train
import ray.train.torch
import torch
from ray.train.collective import broadcast_from_rank_zero
from torch import nn

from ingest.config import IngestConfig
from ingest.errors import ResumeError
from ingest.lanes import require_world_size
from ingest.loader import Loader
from ingest.pipeline import Stream
from ingest.position import Position
from ingest.run import Run

POSITION_FILE = "position.json"


class Stateful(Protocol):
    """What an optimizer or a schedule offers."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it back."""
        ...


def train_loader(config: IngestConfig, *, device: torch.device | str | None = None) -> Loader:
    """The loader of this Ray Train worker; rank and world size come from Ray. Every rank must call it.

    Args:
        config: the run, the same on every rank.
        device: where the tensors go; None is the worker's device.

    Raises:
        ConfigError: the world size does not divide ``config.lanes``.
        ResumeError: this node sees other data than rank 0 does.
        StorageError, DataError: the run cannot be prepared.
    """
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    require_world_size(world_size, config.lanes)
    run = Run.prepare(config) if rank == 0 else None  # first, so that the others find a stored manifest
    expected = broadcast_from_rank_zero(run.manifest.hash if run else None)
    run = run or Run.prepare(config)
    if run.manifest.hash != expected:
        raise ResumeError(
            f"every rank must see the same data; rank {rank} has manifest {run.manifest.hash}, rank 0 has {expected}: "
            "mount the same files on every node"
        )
    if device is None:
        device = ray.train.torch.get_device()
    return Loader(config, rank=rank, world_size=world_size, device=device, run=run, connect=_joined_stream)


def _joined_stream(run: Run, position: Position) -> Stream:
    context = ray.train.get_context()
    stream = None
    if context.get_world_rank() == 0:
        stream = Stream.open(run, position.cursors, context.get_world_size())
    told = broadcast_from_rank_zero((stream.name, position.step, position.digest) if stream else None)
    name, step, digest = told
    if (step, digest) != (position.step, position.digest):
        raise ResumeError(
            f"every rank must resume at the same position; rank {context.get_world_rank()} is at step {position.step}, "
            f"rank 0 at step {step}: restore the same checkpoint on every rank"
        )
    return stream or Stream.join(name)


def save_checkpoint(
    loader: Loader,
    model: nn.Module,
    optimizer: Stateful | None = None,
    schedule: Stateful | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Saves model and position in one directory and reports it to Ray Train. Every rank must call it at the same step.

    Args:
        loader: its position is that of the last batch handed out; train on that batch first.
        model: wrapped by DDP or not.
        optimizer: saved where given.
        schedule: saved where given.
        metrics: reported with the checkpoint; ``step``, ``tokens`` and ``digest`` are added.

    Raises:
        OSError: the local disk is full. The checkpoint before stays the newest.
    """
    rank = ray.train.get_context().get_world_rank()
    position = loader.position
    reported = {**(metrics or {}), "step": position.step, "tokens": position.tokens, "digest": position.digest}
    with tempfile.TemporaryDirectory(prefix="ingest-checkpoint-") as folder:
        torch.save(_rng_state(), Path(folder, f"rng-{rank}.pt"))
        if rank == 0:
            parts = {"model": _bare(model), "optimizer": optimizer, "schedule": schedule}
            states = {name: part.state_dict() for name, part in parts.items() if part is not None}
            torch.save(states, Path(folder, "model.pt"))
            Path(folder, POSITION_FILE).write_text(position.to_json(), encoding="utf-8")
        ray.train.report(reported, checkpoint=ray.train.Checkpoint.from_directory(folder))


def newest_position(run_path: str) -> Position | None:
    """The position in the newest checkpoint of a run, read without the model; None if there is no checkpoint.

    Args:
        run_path: ``storage_path`` of the ``RunConfig`` and the run's name.

    Raises:
        ResumeError: the checkpoint holds no position.
    """
    try:
        checkpoint = ray.train.Result.from_path(run_path).checkpoint
    except RuntimeError:  # no such run, or none that has reported yet
        return None
    if checkpoint is None:
        return None
    try:
        with checkpoint.filesystem.open_input_stream(f"{checkpoint.path}/{POSITION_FILE}") as file:
            return Position.from_json(file.read().decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ResumeError(
            f"a checkpoint must hold {POSITION_FILE}; got {checkpoint.path}, {error}: was it saved by save_checkpoint?"
        ) from None


def restore_checkpoint(
    loader: Loader, model: nn.Module, optimizer: Stateful | None = None, schedule: Stateful | None = None
) -> bool:
    """Restores what ``save_checkpoint`` saved, from the newest checkpoint of this run. Every rank must call it.

    Args:
        loader: gets the position; not yet iterating.
        model: as given to ``save_checkpoint``.
        optimizer: likewise.
        schedule: likewise.

    Returns:
        Whether there was a checkpoint; False leaves everything as it is.

    Raises:
        ResumeError: the checkpoint belongs to other data or settings, or a part is missing from it.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return False
    with checkpoint.as_directory() as folder:
        path = Path(folder, POSITION_FILE)
        if not path.exists():
            raise ResumeError(
                f"a checkpoint must hold {POSITION_FILE}; got {checkpoint.path}: was it saved by save_checkpoint?"
            )
        loader.load_state_dict(Position.from_json(path.read_text(encoding="utf-8")).to_dict())
        states = torch.load(Path(folder, "model.pt"), map_location="cpu", weights_only=True)
        for name, part in (("model", _bare(model)), ("optimizer", optimizer), ("schedule", schedule)):
            if part is not None:
                if name not in states:
                    raise ResumeError(
                        f"checkpoint {checkpoint.path} must hold {name}; got {sorted(states)}: save it too"
                    )
                part.load_state_dict(states[name])
        rng = Path(folder, f"rng-{ray.train.get_context().get_world_rank()}.pt")
        if rng.exists():  # a rank that the saving run did not have starts from its own seed
            _set_rng_state(torch.load(rng, weights_only=True))
    return True


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
