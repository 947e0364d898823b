"""Whatever is killed while a group of workers trains, the steps of the whole run are those of an undisturbed one."""

import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer

import ingest
from ingest.config import IngestConfig
from tests.conftest import steps_without_ray, until, write_job

pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.timeout(400)]

STEPS, EVERY, KILLED_AFTER = 60, 4, 6  # the checkpoint after step 4 is the newest one when something is killed


@pytest.fixture(scope="module")
def config(tmp_path_factory, tokenizer_file):
    """A run of windows of about two steps: what is read ahead ends long before step 60."""
    return write_job(tmp_path_factory.mktemp("short"), tokenizer_file, row_group_size=2, window_tokens=500)


def fit(loop, config, folder, num_workers=2, max_failures=1):
    return TorchTrainer(
        loop,
        train_loop_config={"config": IngestConfig.from_yaml(config).to_dict(), "folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="run", storage_path=str(folder), failure_config=FailureConfig(max_failures=max_failures)
        ),
    ).fit()


def train(settings, disturb, parameters=4):
    """Writes a line a step; ``disturb`` may do harm after a step of the first attempt."""
    rank, folder = ray.train.get_context().get_world_rank(), Path(settings["folder"])
    model = torch.nn.Linear(parameters, 1)
    loader = ingest.train_loader(IngestConfig.from_dict(settings["config"]))
    first = not ingest.restore_checkpoint(loader, model)
    with loader, (folder / f"steps-{rank}.jsonl").open("a", buffering=1) as lines:
        for batch in loader:
            torch.distributed.barrier()
            step = batch.position.step
            lines.write(json.dumps([step, batch.position.digest, time.time()]) + "\n")
            if step in (EVERY, 2 * EVERY, STEPS) and (first or step > KILLED_AFTER):
                ingest.save_checkpoint(loader, model)
            if first:
                disturb(rank, step, folder)
            if step == STEPS:
                break


def kill_once_committed(step, folder, find):
    """SIGKILL, after a step and not before Ray Train knows of the checkpoint before it."""
    if step == KILLED_AFTER:
        wait_for_a_commit(folder)
        for pid in find():
            os.kill(pid, signal.SIGKILL)


def wait_for_a_commit(folder):
    known = folder / "run" / "checkpoint_manager_snapshot.json"
    until(lambda: known.exists() and "checkpoint_2" in known.read_text(), 60, "a committed checkpoint")


def of_this_ray(title):
    """Processes of the same node whose title begins so."""
    return [
        process.pid for process in psutil.Process().parent().children() if process.cmdline()[:1][0].startswith(title)
    ]


def loses_rank(victim):
    def disturb(rank, step, folder):
        if rank == victim:
            kill_once_committed(step, folder, lambda: [os.getpid()])

    return lambda settings: train(settings, disturb)


def loses_process(title):
    def disturb(rank, step, folder):
        if rank == 1:
            kill_once_committed(step, folder, lambda: of_this_ray(title))

    return lambda settings: train(settings, disturb)


def steps_of(folder, rank):
    return [json.loads(line) for line in (folder / f"steps-{rank}.jsonl").read_text().splitlines()]


def assert_undisturbed(folder, config, attempts, lost):
    """Each attempt's steps follow each other, from 1 and then from a checkpoint on, with the plan's digests.

    What was lost is printed with the longest time between two steps, for the table in the README.
    """
    digests = [step.position.digest for step in steps_without_ray(config)]
    for rank in range(2):
        lines = steps_of(folder, rank)
        assert [digest for _, digest, _ in lines] == [digests[step - 1] for step, _, _ in lines]
        got = [step for step, _, _ in lines]
        assert got[-1] == STEPS
        starts = [step for before, step in zip([0, *got], got, strict=False) if step != before + 1]
        assert (got[0], len(starts)) == (1, attempts - 1)
        assert set(starts) <= {EVERY + 1, 2 * EVERY + 1}  # the splitter is missed when what it handed out is used up
    times = [at for _, _, at in steps_of(folder, 0)]
    print(f"recovered: {lost}, {max(after - before for before, after in itertools.pairwise(times)):.1f} s")


@pytest.mark.parametrize(
    ("loop", "lost"),
    [
        (loses_rank(0), "rank 0, which opened the stream"),
        (loses_rank(1), "rank 1"),
        (loses_process("ray::SplitCoordinator"), "the splitter"),
        (loses_process("ray::_Server"), "the server"),
    ],
    ids=["rank 0, which opened the stream", "rank 1", "the splitter", "the server"],
)
@pytest.mark.slow
def test_what_is_killed_restarts_the_group_at_the_checkpoint_before(loop, lost, config, shared_ray, tmp_path):
    fit(loop, config, tmp_path)
    assert_undisturbed(tmp_path, config, 2, lost)


@pytest.mark.slow
def test_a_killed_actor_restarts_nothing(config, shared_ray, tmp_path):
    fit(loses_process("ray::MapWorker"), config, tmp_path, max_failures=0)
    assert_undisturbed(tmp_path, config, 1, "a tokenization actor")


def dies_while_it_uploads(settings):
    """Rank 0 is killed when a part of the second checkpoint has reached the storage."""

    def disturb(rank, step, folder):
        if rank == 0 and step == 2 * EVERY - 1:
            wait_for_a_commit(folder)
            before = set((folder / "run").glob("checkpoint_*/*"))
            threading.Thread(target=lambda: kill_at_a_new_file(folder, before), daemon=True).start()

    train(settings, disturb, parameters=40_000_000)


def kill_at_a_new_file(folder, before):
    while not (new := set((folder / "run").glob("checkpoint_*/*")) - before):
        pass
    (folder / "half-written").write_text(str(new.pop().parent))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_checkpoint_that_was_half_written_is_passed_over(config, shared_ray, tmp_path):
    fit(dies_while_it_uploads, config, tmp_path)
    half = Path((tmp_path / "half-written").read_text())
    assert not (half / "model.pt").exists() or (half / "model.pt").stat().st_size < 160_000_000
    assert_undisturbed(tmp_path, config, 2, "a rank that uploaded a checkpoint")


def rank_1_raises(settings):
    def disturb(rank, step, folder):
        if (rank, step) == (1, 3):
            (folder / "raised").touch()
            raise ValueError("no such thing as step 3")

    train(settings, disturb)


def test_a_rank_that_raises_ends_the_others_within_30_seconds_and_is_named(config, shared_ray, tmp_path):
    with pytest.raises(WorkerGroupError) as failed:
        fit(rank_1_raises, config, tmp_path, max_failures=0)
    assert time.time() - (tmp_path / "raised").stat().st_mtime < 30
    assert "no such thing as step 3" in str(failed.value.worker_failures[1])
    assert steps_of(tmp_path, 0)[-1][0] == 3
