"""The only owner of CUDA: batches copied to the device ahead of the training step, on a stream of their own.

A ring of page-locked slots holds what travels: narrow ids, piece lengths, document numbers, ``cu_seqlens``. For each
step a thread fills the next slot, queues its copy on the copy stream, and widens ids and makes positions and labels
there too. One event a slot marks that the copy is done: a slot is filled again only after its event, and the
consumer's stream waits for the batch's event, not the host. Memory is bounded: ``depth`` slots on the host, ``depth``
+ 1 batches on the device.

On a CPU the same path runs without pinning and streams: the thread makes the tensors while the model computes.

Rejected: ``DataLoader(pin_memory=True)``, which pins each batch anew (a page-locked allocation costs more than the
copy), and Ray's own option, which copies on the current stream, so that a copy waits for the kernels before it.

Source: CUDA C++ Programming Guide, "Asynchronous Concurrent Execution"; PyTorch notes "CUDA semantics", record_stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ingest.batch import Batch, Staged
from ingest.lanes import Step
from ingest.readahead import ReadAhead

_ALIGN = 64


@dataclass
class _Slot:
    """Host memory for one step, and the event after which it may be filled again."""

    memory: Tensor
    free: Any = None


class Prefetcher:
    """Steps to batches on a device, ``depth`` ahead of the consumer.

    Args:
        device: where the tensors go; None is the CPU.
        depth: batches ready or on their way beyond the one handed out, at least 1.
    """

    def __init__(self, device: torch.device | None = None, depth: int = 2) -> None:
        self._device = device or torch.device("cpu")
        self._depth = depth
        self._cuda = self._device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(self._device) if self._cuda else None
        self._slots = [_Slot(torch.empty(0, dtype=torch.uint8)) for _ in range(depth)]

    def batches(self, steps: Iterator[Step]) -> Generator[Batch, None, None]:
        """Yields the batch of each step; what is ahead is dropped when the generator is closed.

        Args:
            steps: consumed on a thread of the prefetcher's own.
        """
        with contextlib.closing(ReadAhead(self._copied(steps), self._depth, "ingest-prefetch")) as ready:
            for batch, done in ready:
                if done is not None:
                    current = torch.cuda.current_stream(self._device)
                    current.wait_event(done)
                    for tensor in batch.tensors():  # or the allocator could give its memory to the copy stream again
                        tensor.record_stream(current)
                yield batch

    def _copied(self, steps: Iterator[Step]) -> Iterator[tuple[Batch, Any]]:
        for number, step in enumerate(steps):
            if not self._cuda:
                yield Batch.from_rows(step.rows, step.position, self._device), None
                continue
            slot = self._slots[number % self._depth]
            if slot.free is not None:
                slot.free.synchronize()
            yield self._launch(slot, Staged.of(step.rows), step)

    def _launch(self, slot: _Slot, staged: Staged, step: Step) -> tuple[Batch, Any]:
        pinned = self._fill(slot, staged.tensors())
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            narrow = [tensor.to(self._device, non_blocking=True) for tensor in pinned]
            slot.free = torch.cuda.Event()
            slot.free.record(self._stream)
            batch = Batch.widened(staged, narrow, step.position)
            done = torch.cuda.Event()
            done.record(self._stream)
        return batch, done

    def _fill(self, slot: _Slot, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Copies tensors end to end into the slot's page-locked memory, which grows to the largest step seen."""
        begins, size = [], 0
        for tensor in tensors:
            begins.append(size)
            size += -(-tensor.nbytes // _ALIGN) * _ALIGN
        if slot.memory.nbytes < size:
            slot.memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)
        views = []
        for begin, tensor in zip(begins, tensors, strict=True):
            view = slot.memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            views.append(view.copy_(tensor))
        return views
