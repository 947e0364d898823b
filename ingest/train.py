"""Ray Train glue: one stream for all ranks, and checkpoints that hold the model and the position together.

Rank 0 opens the stream at the position that it restored and tells the others its name, so the position always comes
from the very checkpoint that the model was restored from, at whatever world size this attempt has.

A checkpoint is a directory of ``position.json`` and of what ``checkpoint.py`` writes. Saving holds training up for a
copy to host memory; files are written and uploaded behind it, one checkpoint at a time. It counts once every rank's
files are uploaded: Ray Train then names it in its list, and a directory that is not in there is never restored.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import CheckpointConsistencyMode, CheckpointUploadMode
from ray.train.collective import broadcast_from_rank_zero
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from ingest.checkpoint import Snapshot, Stateful, restore, words
from ingest.config import IngestConfig
from ingest.errors import ResumeError, StorageError
from ingest.lanes import require_world_size
from ingest.loader import Loader
from ingest.pipeline import Stream
from ingest.position import MAX_BYTES, Position
from ingest.run import Run

POSITION_FILE = "position.json"


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

    Returns when all is copied to host memory, and waits for the checkpoint before to be complete first. The last one
    is waited for at the end of the training function. A write that fails ends the attempt with a ``StorageError``
    that names the path, at once and not at the next save; the checkpoint before stays the newest.

    Args:
        loader: its position is that of the last batch handed out; train on that batch first.
        model: plain, wrapped by DDP, or sharded by ``fully_shard``.
        optimizer: saved where given.
        schedule: saved where given.
        metrics: reported with the checkpoint; ``step``, ``tokens`` and ``digest`` are added.
    """
    ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
    rank, position = ray.train.get_context().get_world_rank(), loader.position
    snapshot = Snapshot.take(rank, model, optimizer, schedule)
    storage: Any = ray.train.get_context().get_storage()
    folder = tempfile.TemporaryDirectory(prefix="ingest-checkpoint-")

    def write(checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        with folder as local:
            with _naming(position, local):
                snapshot.write(Path(local))
                if rank == 0:
                    Path(local, POSITION_FILE).write_text(position.to_json(), encoding="utf-8")
            with _naming(position, storage.build_checkpoint_path_from_name(name)):
                uploaded: ray.train.Checkpoint = storage.persist_current_checkpoint(checkpoint, name)
            return uploaded

    ray.train.report(
        {**(metrics or {}), "step": position.step, "tokens": position.tokens, "digest": position.digest},
        checkpoint=ray.train.Checkpoint.from_directory(folder.name),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=write,
        delete_local_checkpoint_after_upload=False,
    )


@contextlib.contextmanager
def _naming(position: Position, path: str) -> Iterator[None]:
    """Says where and of which step a checkpoint could not be written: torch has a RuntimeError for a full disk."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        raise StorageError(
            f"the checkpoint of step {position.step} must be written to {path}; got {words(error)}: "
            "free space there and start again, which goes on from the checkpoint before"
        ) from error


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
            return Position.from_json(file.read(MAX_BYTES + 1).decode("utf-8"))
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
        with path.open(encoding="utf-8") as file:
            loader.load_state_dict(Position.from_json(file.read(MAX_BYTES + 1)).to_dict())
        restore(Path(folder), ray.train.get_context().get_world_rank(), model, optimizer, schedule)
    return True
