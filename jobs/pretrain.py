"""Trains a small GPT on text that is tokenized and packed on the fly, with checkpoints that resume exactly.

    python -m jobs.pretrain --config run.yaml --storage URI --name NAME [--num-workers N | MIN:MAX] [--max-steps K]

Started again with the same storage and name, it goes on from the newest checkpoint; nothing else is needed. The loss
of a step is averaged over the labels of the global batch, whatever ranks or micro-batches they fell on.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import TrainingFailedError

import ingest
from jobs.launch import CPUS_PER_TRAINER, check, explain, fit
from jobs.mailbox import send_log
from jobs.model import GPT, GPTConfig
from jobs.notices import ENDED, Notices
from jobs.parallel import PARALLEL, spread
from jobs.progress import Progress, report
from jobs.step import train_step


def train(settings: dict[str, Any]) -> None:
    """The loop of one worker; ``settings`` holds plain values, as ``run`` fills them in."""
    torch.set_num_threads(CPUS_PER_TRAINER)  # and the same sums in the same order at a resume
    log = send_log(settings["mailbox"])
    config = ingest.IngestConfig.from_dict(settings["config"])
    loader = ingest.train_loader(config)
    model = spread(GPT(GPTConfig(vocab_size=loader.run.tokenizer.vocab_size)), settings["parallel"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    ingest.restore_checkpoint(loader, model, optimizer, schedule)
    saved, last, notices = None, settings["max_steps"], Notices(settings["mailbox"])
    progress = Progress(loader, config, log if ray.train.get_context().get_world_rank() == 0 else None)
    with loader:
        for batch in () if reached(loader.position, last) else loader:
            progress.step(train_step(model, optimizer, schedule, batch, settings["micro_batch_rows"]))
            told, ends = notices.ask()
            done = ends or reached(batch.position, last)
            if done or told or batch.position.step % settings["checkpoint_every"] == 0:
                ingest.save_checkpoint(loader, model, optimizer, schedule, progress.metrics())
                saved = batch.position.step
            if done:
                break
    if saved != loader.position.step:
        ingest.save_checkpoint(loader, model, optimizer, schedule, progress.metrics())


def reached(position: ingest.Position, max_steps: int | None) -> bool:
    """Whether the run has as many steps as it may have."""
    return max_steps is not None and position.step >= max_steps


def world_sizes(text: str) -> tuple[int, int]:
    """``N`` or ``MIN:MAX``."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m jobs.pretrain", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, metavar="FILE", help="run.yaml")
    parser.add_argument("--storage", required=True, metavar="URI", help="directory or URI of all runs")
    parser.add_argument("--name", required=True, help="of this run; the same name resumes it")
    parser.add_argument(
        "--num-workers", type=world_sizes, default=(1, 1), metavar="N|MIN:MAX", help="ranks (default 1)"
    )
    parser.add_argument("--parallel", choices=PARALLEL, default="ddp", help="a model on each rank, or its shards")
    gpu_help = "train on GPUs, one a worker (default: if the cluster has any now)"
    parser.add_argument("--gpu", action=argparse.BooleanOptionalAction, help=gpu_help)
    resource_help = "a custom resource of which each worker takes one; says which nodes train"
    parser.add_argument("--worker-resource", metavar="NAME", help=resource_help)
    parser.add_argument("--max-steps", type=int, metavar="K", help="stop after step K; default: the end of the data")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="K", help="steps (default 50)")
    failures_help = "how often a group that failed starts again (default 3); -1: for ever"
    parser.add_argument("--max-failures", type=int, default=3, metavar="N", help=failures_help)
    resize_help = "seconds between looks at whether another number of workers fits, with MIN:MAX (default 60)"
    parser.add_argument("--resize-every", type=float, default=60.0, metavar="S", help=resize_help)
    micro_help = "rows that a worker's model sees at once, at most (default: those of a step on MAX workers)"
    parser.add_argument("--micro-batch-rows", type=int, metavar="R", help=micro_help)
    parser.add_argument("--learning-rate", type=float, default=1e-3, metavar="X", help="peak (default 0.001)")
    options = parser.parse_args(arguments)
    options.storage = options.storage if "://" in options.storage else str(Path(options.storage).resolve())
    given = sys.argv[1:] if arguments is None else arguments
    stops = [place for place, word in enumerate(given) if "--max-steps" in (word, *given[max(0, place - 1) : place])]
    options.arguments = [word for place, word in enumerate(given) if place not in stops]
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the job; returns the exit code: 0, 1 failed, 2 the input is at fault, 143 saved and ended by SIGTERM."""
    options = parse(arguments)
    began = time.perf_counter()
    try:
        result, ended = fit(train, options, check(options))
    except ingest.IngestError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except TrainingFailedError as failed:
        return explain(failed)
    report(result, time.perf_counter() - began)
    more = ["--max-steps", str(2 * options.max_steps)] if options.max_steps else []
    print(f"{'go on with':<16} python -m jobs.pretrain {shlex.join([*options.arguments, *more])}")
    return ENDED if ended else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
