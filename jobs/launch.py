"""The driver's side of a job: what is checked before a worker starts, how it starts, and what is said when it fails."""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import ray
import ray.train
from ray.train import (
    CheckpointConfig,
    ControllerError,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)

import ingest
from ingest.cluster import ensure_ray, require_resources
from ingest.lanes import require_world_size
from ingest.pipeline import cause_of
from ingest.run import Run
from ingest.stores import require_no_credential
from ingest.train import newest_position
from jobs.elastic import DividingPolicy, ElasticTrainer, free_groups
from jobs.mailbox import opened
from jobs.notices import at_sigterm

CPUS_PER_TRAINER = 1
START_S = 60.0  # Ray Train's limit for the start of a group


def check(options: argparse.Namespace) -> ingest.IngestConfig:
    """Finds the faults of the input: settings, files, tokenizer, and the position to resume at."""
    for option in ("max_steps", "checkpoint_every", "micro_batch_rows"):
        count = getattr(options, option)
        if count is not None and count < 1:
            raise ingest.ConfigError(f"--{option.replace('_', '-')} must be > 0; got {count}: set it to 1 or more")
    if options.resize_every < 0:
        raise ingest.ConfigError(f"--resize-every must be >= 0; got {options.resize_every:g}: set it to 60 or so")
    if options.max_failures < -1:
        raise ingest.ConfigError(f"--max-failures must be >= -1; got {options.max_failures}: set it to -1 for ever")
    require_no_credential("--storage", options.storage)
    config = ingest.IngestConfig.from_yaml(options.config)
    low, high = options.num_workers
    if low > high:
        raise ingest.ConfigError(f"--num-workers must be N or MIN:MAX; got {low}:{high}: swap them")
    for size in (low, high):  # of those between, elastic.py takes the ones that divide the lanes
        require_world_size(size, config.lanes)
    logging.getLogger("ray.train").setLevel(logging.WARNING)  # else it explains at length that there is a run to resume
    prepared = Run.prepare(config, progress=print)
    position = newest_position(f"{options.storage}/{options.name}")
    if position is not None:
        prepared.require(position)
    return config


def fit(
    train: Callable[[dict[str, Any]], None], options: argparse.Namespace, config: ingest.IngestConfig
) -> tuple[ray.train.Result, bool]:
    """Runs ``train`` on every worker, saying here what they log; returns also whether a SIGTERM ended it.

    Raises:
        ResourceError: the cluster lacks the CPUs or GPUs.
        TrainingFailedError: a worker failed more often than is forgiven.
    """
    low, high = options.num_workers
    ensure_ray(config, extra_cpus=high * CPUS_PER_TRAINER)
    with opened(print) as mailbox, at_sigterm(mailbox) as told:
        group = _group(options, config)
        settings = {"mailbox": mailbox, "config": config.to_dict()}
        settings["micro_batch_rows"] = options.micro_batch_rows or config.global_batch_rows // high
        for name in ("max_steps", "checkpoint_every", "learning_rate", "parallel"):
            settings[name] = getattr(options, name)
        # A group that does not start is given up after START_S, and as often as an autoscaler may need.
        waits = math.ceil(config.resources.cluster_wait_s / START_S)
        starts = options.max_failures + waits if options.max_failures >= 0 else -1  # -1: for ever
        forgiving: Any = FailureConfig  # typed as that of Ray Train 1
        forgives = forgiving(options.max_failures, controller_failure_limit=starts)
        run = RunConfig(
            name=options.name,
            storage_path=options.storage,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=forgives,
        )
        policy = DividingPolicy(group, config, mailbox) if low < high else None
        for left in itertools.count(options.max_failures, -1):  # never 0 where it begins below
            try:
                trainer = ElasticTrainer(
                    policy, train, train_loop_config=settings, scaling_config=group, run_config=run
                )
                return trainer.fit(), told.is_set()
            except ControllerError as error:  # Ray Train gives up where a worker is lost while its group starts
                if left == 0:
                    raise
                print(f"the group did not start, it is tried again: {_one_line(error)}")
                free_groups()
    raise AssertionError


def _group(options: argparse.Namespace, config: ingest.IngestConfig) -> ScalingConfig:
    """The workers, on a cluster that has what they and tokenization need."""
    low, high = options.num_workers
    require_resources(config.resources, extra_cpus=low * CPUS_PER_TRAINER)
    gpus = ray.cluster_resources().get("GPU", 0)  # the driver may run on a head without one
    use_gpu = gpus > 0 if options.gpu is None else options.gpu
    if use_gpu and gpus < low and not config.resources.cluster_wait_s:
        raise ingest.ResourceError(
            f"the job must fit the cluster; needs {low} GPUs for trainers, the cluster has {gpus:g}: lower "
            "--num-workers, leave out --gpu, or set resources.cluster_wait_s where an autoscaler will add nodes"
        )
    own = {options.worker_resource: 1} if options.worker_resource else {}
    workers: Any = low if low == high else (low, high)
    make: Any = ScalingConfig  # typed as that of Ray Train 1
    group: ScalingConfig = make(
        num_workers=workers,
        elastic_resize_monitor_interval_s=options.resize_every,
        use_gpu=use_gpu,
        resources_per_worker={"CPU": CPUS_PER_TRAINER, "GPU": int(use_gpu), **own},
    )
    return group


def explain(failed: TrainingFailedError) -> int:
    """Says which rank failed and why, one line each.

    Returns:
        The exit code: 2 where the input is at fault, else 1.
    """
    ranks = failed.worker_failures if isinstance(failed, WorkerGroupError) else {}
    failures = {f"rank {rank}": failure for rank, failure in sorted(ranks.items())} or {"all ranks": failed}
    codes = []
    for who, failure in failures.items():
        cause = cause_of(failure)
        print(f"{who}: {f'{type(cause).__name__}: {cause}' if cause else _one_line(failure)}", file=sys.stderr)
        codes.append(1 if cause is None or isinstance(cause, ingest.ResourceError) else cause.exit_code)
    return max(codes)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:600]
