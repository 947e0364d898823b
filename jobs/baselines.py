"""What people write today, as well as it is usually written: the contenders of ``jobs.bench``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import ray
import ray.data
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ingest.run import Run
from ingest.tokenizer import Tokenizer

REPEATS = 100  # of the list of files, so that no contender runs out
SHUFFLE_ROWS = 2048


class Packer:
    """Concatenates documents and cuts them into rows of T + 1 tokens, carrying the rest."""

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        self._tokenizer, self._width = tokenizer, width
        self._rest: npt.NDArray[Any] = np.zeros(0, tokenizer.token_dtype)

    def rows(self, texts: list[str | None]) -> npt.NDArray[np.int32]:
        """int32 [rows, T + 1]."""
        flat, _ = self._tokenizer.encode([text for text in texts if text])
        tokens = np.concatenate((self._rest, flat))
        count = len(tokens) // self._width
        self._rest = tokens[count * self._width :]
        return tokens[: count * self._width].reshape(count, self._width).astype(np.int32)


class _Map:
    """The callable class of ``map_batches``."""

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        self._packer = Packer(tokenizer, width)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self._packer.rows(list(batch["text"]))}


def _files(run: Run) -> list[str]:
    return [file.path for source in run.manifest.sources for file in source.files]


def _processes(run: Run) -> int:
    return run.config.resources.max_actors


def ray_data_rows(run: Run) -> Iterator[torch.Tensor]:
    """Ray Data's documented way, on a Ray that is up; int32 [G, T + 1]."""
    config, width = run.config, run.config.packing.sequence_length + 1
    column, files = config.sources[0].text_column, _files(run)
    tokens = sum(int(source.unit_tokens.sum()) for source in run.manifest.sources)
    passes = 1 + -(-(config.total_tokens or tokens) // tokens)
    texts = ray.data.read_parquet(files, columns=[column]).rename_columns(
        {column: "text"}
    )  # a path named twice is read once
    rows = texts.union(*[texts] * (passes - 1)).map_batches(
        _Map,
        fn_constructor_args=(run.tokenizer, width),
        batch_size=256,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=_processes(run)),
    )
    (iterator,) = rows.streaming_split(1, equal=True)
    batches = iterator.iter_torch_batches(
        batch_size=config.global_batch_rows, local_shuffle_buffer_size=SHUFFLE_ROWS, prefetch_batches=4
    )
    for batch in batches:
        yield batch["tokens"]


class _Texts(IterableDataset[torch.Tensor]):
    """Files dealt to workers, row groups in shuffled order, rows shuffled in a buffer."""

    def __init__(self, run: Run) -> None:
        self._files, self._config, self._tokenizer = _files(run) * REPEATS, run.config, run.tokenizer

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker: Any = get_worker_info()
        generator = np.random.default_rng(worker.id)
        packer = Packer(self._tokenizer, self._config.packing.sequence_length + 1)
        buffer: list[npt.NDArray[np.int32]] = []
        for path in self._files[worker.id :: worker.num_workers]:
            file = pq.ParquetFile(path)
            for group in generator.permutation(file.num_row_groups).tolist():
                column = self._config.sources[0].text_column
                buffer.extend(packer.rows(file.read_row_group(group, columns=[column])[column].to_pylist()))
                while len(buffer) > SHUFFLE_ROWS + self._config.global_batch_rows:
                    yield self._draw(buffer, generator)

    def _draw(self, buffer: list[npt.NDArray[np.int32]], generator: np.random.Generator) -> torch.Tensor:
        chosen = []
        for _ in range(self._config.global_batch_rows):
            index = int(generator.integers(len(buffer)))
            buffer[index], buffer[-1] = buffer[-1], buffer[index]
            chosen.append(buffer.pop())
        return torch.from_numpy(np.stack(chosen))


def torch_rows(run: Run) -> Iterator[torch.Tensor]:
    """A tuned torch loader; int32 [G, T + 1]."""
    workers = DataLoader(_Texts(run), batch_size=None, num_workers=_processes(run), prefetch_factor=64)
    yield from workers
