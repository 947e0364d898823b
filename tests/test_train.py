"""The loader and its checkpoints in Ray Train, and as Stateful of torch.distributed.checkpoint."""

import json
import re
import resource
import time
from pathlib import Path

import pytest
import ray.train
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import (
    CheckpointConfig,
    CheckpointConsistencyMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from ray.train.torch import TorchTrainer

import ingest
from ingest.config import IngestConfig
from ingest.loader import Loader
from ingest.pipeline import translated
from ingest.run import Run
from ingest.train import newest_position
from tests.conftest import steps_without_ray, texts, until, write_config, write_corpus


@pytest.fixture(scope="module")
def config(tmp_path_factory, tokenizer_file):
    folder = tmp_path_factory.mktemp("train")
    write_corpus(folder / "corpus", texts(80, seed=8), files=[3, 40, 37])
    path = write_config(folder / "run.yaml", tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"})
    return IngestConfig.from_yaml(path)


@pytest.fixture(scope="module")
def expected(config):
    return [step.position for step in steps_without_ray(config)]


def fit(loop, config, storage, num_workers=1, filesystem=None):
    return TorchTrainer(
        loop,
        train_loop_config={"config": config.to_dict(), "storage": str(storage)},
        scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="run",
            storage_path=str(storage),
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=0),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def three_steps_and_a_checkpoint(settings):
    torch.manual_seed(5)
    model = torch.nn.Linear(2, 2)
    loader = ingest.train_loader(IngestConfig.from_dict(settings["config"]))
    assert not ingest.restore_checkpoint(loader, model)
    for batch in loader:
        if batch.position.step == 3:
            break
    ingest.save_checkpoint(loader, model, metrics={"loss": 1.5})


def restored_and_one_step(settings):
    torch.manual_seed(6)
    model = torch.nn.Linear(2, 2)
    loader = ingest.train_loader(IngestConfig.from_dict(settings["config"]))
    assert ingest.restore_checkpoint(loader, model)
    with loader:
        batch = next(iter(loader))
        ingest.save_checkpoint(loader, model, metrics={"rows": len(batch.input_ids)})


def restored_with_an_optimizer_that_was_not_saved(settings):
    model = torch.nn.Linear(2, 2)
    loader = ingest.train_loader(IngestConfig.from_dict(settings["config"]))
    ingest.restore_checkpoint(loader, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_checkpoint_holds_the_position_and_the_model_and_restores_both(config, expected, shared_ray, tmp_path):
    result = fit(three_steps_and_a_checkpoint, config, tmp_path)
    saved = expected[2]
    assert result.metrics == {"loss": 1.5, "step": 3, "tokens": saved.tokens, "digest": saved.digest}
    folder = Path(result.checkpoint.path)
    assert {file.name for file in folder.iterdir()} >= {"model.pt", "position.json", "rng-0.pt"}
    written = json.loads((folder / "position.json").read_text())
    assert written == saved.to_dict()
    assert (written["step"], written["digest"]) == (3, saved.digest)
    states = torch.load(folder / "model.pt", weights_only=True)
    assert states.keys() == {"model"}

    again = fit(restored_and_one_step, config, tmp_path, num_workers=2)
    folder = Path(again.checkpoint.path)
    assert json.loads((folder / "position.json").read_text()) == expected[3].to_dict()
    assert again.metrics["rows"] == 4
    weight = torch.load(folder / "model.pt", weights_only=True)["model"]["weight"]
    assert torch.equal(weight, states["model"]["weight"])

    with pytest.raises(WorkerGroupError) as failed:
        fit(restored_with_an_optimizer_that_was_not_saved, config, tmp_path)
    [(rank, failure)] = failed.value.worker_failures.items()
    cause = translated(failure)
    assert (rank, type(cause)) == (0, ingest.ResumeError)
    assert "must hold optimizer; got ['model']: save it too" in str(cause)


class SlowDisk(LocalFileSystem):
    """A local filesystem on which the files of a checkpoint take until ``go`` lies beside the run."""

    def open(self, path, mode="rb", **options):
        if "w" in mode and path.endswith("model.pt"):
            until(Path(path).parents[2].joinpath("go").exists, 60, "the training that should go on beside the upload")
        return super().open(path, mode, **options)


def save_and_train_on(settings):
    model = torch.nn.Linear(2, 2)
    loader = ingest.train_loader(IngestConfig.from_dict(settings["config"]))
    with loader:
        for batch in loader:
            torch.nn.init.constant_(model.weight, batch.position.step)
            if batch.position.step == 3:
                ingest.save_checkpoint(loader, model)
            if batch.position.step == 5:
                Path(settings["storage"], "go").touch()
                break
    ingest.save_checkpoint(loader, model)  # waits for the one before
    [first] = ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)[:1]
    position = json.loads(Path(first.checkpoint.path, "position.json").read_text())
    weight = torch.load(Path(first.checkpoint.path, "model.pt"))["model"]["weight"]
    assert (position["step"], first.metrics["step"], weight.unique().tolist()) == (3, 3, [3.0])


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_training_goes_on_while_a_checkpoint_is_written_and_the_last_one_is_waited_for(config, shared_ray, tmp_path):
    slow = PyFileSystem(FSSpecHandler(SlowDisk()))
    result = fit(save_and_train_on, config, tmp_path, filesystem=slow)
    assert result.metrics["step"] == 5
    assert json.loads(Path(result.checkpoint.path, "position.json").read_text())["step"] == 5
    assert torch.load(Path(result.checkpoint.path, "model.pt"))["model"]["weight"].unique().tolist() == [5.0]


def save_onto_a_full_disk(settings):
    """One small checkpoint, then one of 4 MB where no file may be larger than 1 MiB."""
    loader = ingest.train_loader(IngestConfig.from_dict(settings["config"]))
    ingest.save_checkpoint(loader, torch.nn.Linear(2, 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    ingest.save_checkpoint(loader, torch.nn.Linear(1000, 1000))
    until(lambda: False, 60, "the error, which ends this attempt")


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_full_disk_is_named_and_the_checkpoint_before_stays_the_newest(config, shared_ray, tmp_path):
    with pytest.raises(WorkerGroupError) as failed:
        fit(save_onto_a_full_disk, config, tmp_path)
    error = translated(failed.value.worker_failures[0])
    assert type(error) is ingest.StorageError
    said = (
        r"the checkpoint of step 0 must be written to /\S*ingest-checkpoint-\w+; got \w+ .*: free space there and start"
    )
    assert re.match(said, str(error)), error
    kept = ray.train.Result.from_path(str(tmp_path / "run")).checkpoint
    assert newest_position(str(tmp_path / "run")).step == 0
    assert torch.load(Path(kept.path, "model.pt"))["model"]["weight"].shape == (2, 2)


def rank_1_fails_at_step_3(settings):
    loader = ingest.train_loader(IngestConfig.from_dict(settings["config"]))
    for batch in loader:
        if batch.position.step == 3 and ray.train.get_context().get_world_rank() == 1:
            raise ValueError("no such thing as step 3")
        torch.distributed.barrier()


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_rank_that_fails_ends_the_run_and_is_named(config, shared_ray, tmp_path):
    began = time.monotonic()
    with pytest.raises(WorkerGroupError) as failed:
        fit(rank_1_fails_at_step_3, config, tmp_path, num_workers=2)
    assert time.monotonic() - began < 150  # about 25 on free cores; without the failure it would wait for ever
    assert "no such thing as step 3" in str(failed.value.worker_failures[1])


class InThisProcess:
    """A stream without Ray: the core's slabs, made when they are asked for."""

    def __init__(self, run, position):
        self._run, self._position = run, position

    def slabs(self, rank):
        for spec in self._run.specs(self._position.cursors):
            yield from self._run.maker(spec).slabs(1)

    def leave(self, rank):
        pass

    def standing(self):
        return []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_loader_is_stateful_for_distributed_checkpoints(config, expected, tmp_path):
    run = Run.prepare(config)
    loader = Loader(config, run=run, connect=InThisProcess)
    for batch in loader:
        if batch.position.step == 5:
            break
    dcp.save({"loader": loader}, checkpoint_id=tmp_path / "checkpoint")
    other = Loader(config, run=run, connect=InThisProcess)
    dcp.load({"loader": other}, checkpoint_id=tmp_path / "checkpoint")
    assert other.position == expected[4]
    assert [batch.position for batch in other] == expected[5:]
