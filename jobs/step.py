"""One step of training: micro-batches of a fixed size, and the mean loss over the labels of the global batch.

A group that shrinks gives each rank more rows a step. They go through the model in micro-batches of at most as many
rows as before, so a step takes longer and no more memory, and its weights are those of the step in one piece, up to the
order in which floats are added.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from ingest.batch import IGNORE_INDEX, Batch
from jobs.model import loss_sum


def micro_rows(rows: int, most: int) -> int:
    """The most rows of a micro-batch, up to ``most``, that divide the ``rows`` of a rank."""
    return max(size for size in range(1, min(rows, most) + 1) if rows % size == 0)


def train_step(model: torch.nn.Module, optimizer: Any, schedule: Any, batch: Batch, most_rows: int) -> float:
    """Trains on a batch of this rank, in micro-batches of at most ``most_rows`` rows.

    Returns:
        The mean loss over the labels of the global batch, in nats; the same on every rank.
    """
    device = batch.labels.device
    labels, world_size = summed((batch.labels != IGNORE_INDEX).sum().double())
    micros = list(batch.split(micro_rows(len(batch.labels), most_rows)))
    loss = torch.zeros((), dtype=torch.float64, device=device)
    optimizer.zero_grad(set_to_none=True)
    for number, micro in enumerate(micros, 1):
        # DDP adds up over the ranks once a step. FSDP does it each time: it would have to keep whole gradients.
        unsent = getattr(model, "no_sync", contextlib.nullcontext) if number < len(micros) else contextlib.nullcontext
        with unsent():
            part, _ = loss_sum(model, micro)
            (part * (world_size / max(1.0, labels))).backward()  # DDP and FSDP take the mean over ranks
        loss += part.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return summed(loss)[0] / max(1.0, labels)


def summed(value: torch.Tensor) -> tuple[float, int]:
    """The sum over the ranks, which ``value`` then holds, and their number."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size > 1:
        dist.all_reduce(value)
    return float(value), world_size
