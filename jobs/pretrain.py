"""Trains a small GPT on text that is tokenized and packed on the fly, with checkpoints that resume exactly.

    python -m jobs.pretrain --config run.yaml --storage URI --name NAME [--num-workers N | MIN:MAX] [--max-steps K]

Started again with the same storage and name, it goes on from the newest checkpoint; nothing else is needed. The loss of a
step is averaged over the labels of the global batch, whatever ranks or micro-batches they fell on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import ingest
from ingest.lanes import require_world_size
from ingest.pipeline import ensure_ray, require_resources
from ingest.run import Run
from jobs.model import GPT, GPTConfig, loss_sum
from jobs.progress import Progress

CPUS_PER_TRAINER = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a worker needs; plain values, so that Ray can ship it."""

    config: dict[str, Any]
    max_steps: int | None
    checkpoint_every: int
    learning_rate: float


def train(settings: Settings) -> None:
    """The loop of one worker."""
    torch.set_num_threads(CPUS_PER_TRAINER)  # and the same sums in the same order at a resume
    config = ingest.IngestConfig.from_dict(settings.config)
    loader = ingest.train_loader(config)
    length = config.packing.sequence_length
    bare = GPT(GPTConfig(vocab_size=loader.run.tokenizer.vocab_size, sequence_length=length))
    model = prepare_model(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    ingest.restore_checkpoint(loader, model, optimizer, schedule)
    progress = Progress(loader, config)
    saved = None
    if not reached(loader.position, settings.max_steps):
        for batch in loader:
            loss = train_step(model, optimizer, schedule, batch)
            progress.step(loss)
            if batch.position.step % settings.checkpoint_every == 0:
                ingest.save_checkpoint(loader, model, optimizer, schedule, progress.metrics())
                saved = batch.position.step
            if reached(batch.position, settings.max_steps):
                break
    loader.close()
    if saved != loader.position.step:
        ingest.save_checkpoint(loader, model, optimizer, schedule, progress.metrics())


def reached(position: ingest.Position, max_steps: int | None) -> bool:
    """Whether the run has as many steps as it may have."""
    return max_steps is not None and position.step >= max_steps


def train_step(model: torch.nn.Module, optimizer: Any, schedule: Any, batch: ingest.Batch) -> float:
    """One step; returns the mean loss over the labels of the global batch, in nats."""
    loss, labels = loss_sum(model, batch)
    sums = torch.tensor([float(loss.detach()), float(labels)], dtype=torch.float64, device=loss.device)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size > 1:
        dist.all_reduce(sums)
    total = max(1.0, float(sums[1]))
    optimizer.zero_grad(set_to_none=True)
    (loss * (world_size / total)).backward()  # DDP takes the mean over ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return float(sums[0]) / total


def world_sizes(text: str) -> int | tuple[int, int]:
    """``N`` or ``MIN:MAX``."""
    low, _, high = text.partition(":")
    return (int(low), int(high)) if high else int(low)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m jobs.pretrain", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, metavar="FILE", help="run.yaml")
    parser.add_argument("--storage", required=True, metavar="URI", help="directory or URI of all runs")
    parser.add_argument("--name", required=True, help="of this run; the same name resumes it")
    parser.add_argument("--num-workers", type=world_sizes, default=1, metavar="N|MIN:MAX", help="ranks (default 1)")
    parser.add_argument("--max-steps", type=int, metavar="K", help="stop after step K; default: the end of the data")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="K", help="steps (default 50)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, metavar="X", help="peak (default 0.001)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the job; returns the exit code: 0, 1 failed, 2 the input is at fault."""
    options = parse(arguments)
    try:
        return run(options)
    except ingest.IngestError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def run(options: argparse.Namespace) -> int:
    """Checks everything that can be checked, trains, and prints what came of it."""
    config = ingest.IngestConfig.from_yaml(options.config)
    sizes = options.num_workers if isinstance(options.num_workers, tuple) else (options.num_workers,) * 2
    for size in range(sizes[0], sizes[1] + 1):
        require_world_size(size, config.lanes)
    Run.prepare(config, progress=lambda line: print(line, flush=True))
    ensure_ray(config, extra_cpus=sizes[1] * CPUS_PER_TRAINER, log_to_driver=True)
    require_resources(config.resources, extra_cpus=sizes[0] * CPUS_PER_TRAINER)
    storage = options.storage if "://" in options.storage else str(Path(options.storage).resolve())
    settings = Settings(
        config=config.to_dict(),
        max_steps=options.max_steps,
        checkpoint_every=options.checkpoint_every,
        learning_rate=options.learning_rate,
    )
    use_gpu = torch.cuda.is_available()
    began = time.perf_counter()
    result = TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(
            num_workers=options.num_workers, use_gpu=use_gpu, resources_per_worker={"CPU": CPUS_PER_TRAINER, "GPU": int(use_gpu)}
        ),
        run_config=RunConfig(
            name=options.name,
            storage_path=storage,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()
    again = f"python -m jobs.pretrain --config {options.config} --storage {options.storage} --name {options.name}"
    report = {**(result.metrics or {}), "checkpoint": result.checkpoint and result.checkpoint.path, "wall_s": time.perf_counter() - began}
    for name, value in report.items():
        print(f"{name:<16} {value:,.4g}" if isinstance(value, float) else f"{name:<16} {value}")
    print(f"{'resume with':<16} {again}")
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    sys.exit(main())
