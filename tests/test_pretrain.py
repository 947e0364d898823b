"""The main job as real processes: killed and started again, at the same and at another number of workers."""

import json
import shutil

import pytest
import ray
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray.train import ScalingConfig
from ray.util.placement_group import placement_group

from ingest.config import IngestConfig
from jobs.elastic import DividingPolicy, fitting, free_groups
from jobs.pretrain import main
from tests.conftest import starting, steps_without_ray, until, write_job

STEPS = 60


@pytest.fixture(scope="module")
def config(tmp_path_factory, tokenizer_file):
    return write_job(tmp_path_factory.mktemp("pretrain"), tokenizer_file)


@pytest.fixture(scope="module")
def expected(config):
    steps = steps_without_ray(config)
    assert len(steps) > STEPS
    return steps[STEPS - 1].position


class Job:
    """Runs of one name in one storage directory, each with a Ray of its own."""

    def __init__(self, start, config, storage):
        self.storage = storage
        self._start, self._config = start, config

    def start(self, num_workers=1, config=None):
        config = config or self._config
        command = ["-m", "jobs.pretrain", "--config", config, "--storage", self.storage, "--name", "run"]
        options = ["--num-workers", num_workers, "--max-steps", STEPS, "--checkpoint-every", 20]
        return self._start(*command, *options, RAY_ADDRESS="local")

    def finish(self, num_workers=1):
        done = self.start(num_workers).wait(120)
        assert (done.code, done.err) == (0, "")
        return done.out

    def kill_in_mid_run(self, num_workers=1):
        """Kills driver, workers and Ray itself once Ray Train knows of a checkpoint: it commits after the report."""
        job, known = self.start(num_workers), self.storage / "run" / "checkpoint_manager_snapshot.json"
        until(lambda: known.exists() and "checkpoint_2" in known.read_text(), 120, "a committed checkpoint")
        assert job.process.poll() is None, job.wait(1)
        assert job.kill() > 5
        assert 20 <= self.newest()["step"] < STEPS

    def checkpoints(self):
        """(position, directory) of each complete one, oldest first."""
        folders = [file.parent for file in (self.storage / "run").glob("checkpoint_*/model.pt")]
        found = [
            (json.loads((folder / "position.json").read_text()), folder)
            for folder in folders
            if (folder / "position.json").exists()
        ]
        return sorted(found, key=lambda each: each[0]["step"])

    def newest(self):
        return self.checkpoints()[-1][0] if self.checkpoints() else None

    def states(self):
        return torch.load(self.checkpoints()[-1][1] / "model.pt", weights_only=True)


@pytest.fixture
def job(started, config, tmp_path):
    return Job(started, config, tmp_path / "storage")


@pytest.fixture(scope="module")
def uninterrupted(rays, config, tmp_path_factory):
    rays.stop()
    folder = tmp_path_factory.mktemp("uninterrupted")
    with starting(folder) as start:
        whole = Job(start, config, folder / "storage")
        whole.out = whole.finish()
        yield whole


def assert_equal_states(one, other):
    """Model, optimizer and schedule, bit for bit."""
    assert one.keys() == other.keys() == {"model", "optimizer", "schedule"}
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name
    for number, moments in one["optimizer"]["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(tensor, other["optimizer"]["state"][number][name]), (number, name)
    assert one["schedule"]["last_epoch"] == other["schedule"]["last_epoch"] == STEPS


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_the_job_trains_on_the_steps_of_the_plan_and_says_how_it_went(uninterrupted, expected):
    assert uninterrupted.newest() == expected.to_dict()
    said = dict(line.split(None, 1) for line in uninterrupted.out.splitlines())
    assert (said["step"], said["steps"]) == (str(STEPS), str(STEPS))
    assert float(said["last_loss"]) < 0.9 * float(said["first_loss"])
    assert (said["digest"], said["tokens"]) == (expected.digest, str(expected.tokens))
    assert said.keys() >= {"tokens_per_s", "wait_share", "padding_share"}
    assert said["checkpoint"] == str(uninterrupted.checkpoints()[-1][1])
    assert "python -m jobs.pretrain --config" in uninterrupted.out.splitlines()[-1]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_and_started_again_it_reaches_the_same_weights_and_elsewhere_the_same_digest(
    uninterrupted, job, no_ray, started, config, tmp_path
):
    job.kill_in_mid_run()
    shutil.copytree(job.storage, tmp_path / "copy")
    said = job.finish()
    assert "resumed at step" in said
    assert job.newest() == uninterrupted.newest()
    assert_equal_states(job.states(), uninterrupted.states())

    elsewhere = Job(started, config, tmp_path / "copy")
    assert "resumed at step" in elsewhere.finish(num_workers=2)
    assert elsewhere.newest() == uninterrupted.newest()


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_started_again_after_its_end_it_ends_at_once_at_the_same_step(uninterrupted, no_ray):
    before, states = uninterrupted.newest(), uninterrupted.states()
    said = uninterrupted.finish()
    assert f"resumed at step {STEPS}" in said
    assert uninterrupted.newest() == before
    assert_equal_states(uninterrupted.states(), states)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_killed_and_started_again_reach_the_same_weights(job, no_ray, started, config, tmp_path, expected):
    whole = Job(started, config, tmp_path / "whole")
    whole.finish(num_workers=2)
    assert whole.newest() == expected.to_dict()
    job.kill_in_mid_run(num_workers=2)
    job.finish(num_workers=2)
    assert job.newest() == expected.to_dict()
    assert_equal_states(job.states(), whole.states())


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_run_of_other_settings_under_the_same_name_is_refused_with_both_values(uninterrupted, config, no_ray):
    other = changed(config, shuffle={"window_tokens": 4000, "seed": 7})
    done = uninterrupted.start(config=other).wait(150)
    assert done.code == 2
    [line] = done.err.splitlines()
    assert line.startswith("ResumeError: position at step 60 belongs to another run; ")
    assert "shuffle.seed: 0 then, 7 now" in line


def changed(config, **settings):
    path = config.with_name("changed.yaml")
    path.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **settings}))
    return path


@given(possible=st.integers(0, 100), lanes=st.integers(1, 100))
def test_workers_of_an_elastic_group_divide_the_lanes_and_are_as_many_as_fit(possible, lanes):
    sizes = [size for size in range(1, possible + 1) if lanes % size == 0]
    assert fitting(possible, lanes) == (sizes[-1] if sizes else 0)


@pytest.mark.ray
def test_an_elastic_group_leaves_tokenization_its_cpus_and_takes_no_size_that_does_not_divide_the_lanes(
    config, shared_ray
):
    group = ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1})
    settings = IngestConfig.from_yaml(config)
    assert (settings.lanes, ray.cluster_resources()["CPU"]) == (4, 4)
    policy = DividingPolicy(group, settings, None)
    sizes = [
        policy._count_possible_workers({"one": {"CPU": 1.0}, "two": {"CPU": cpus}}) for cpus in (0.0, 1.0, 2.0, 3.0)
    ]
    assert sizes == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("options", "settings", "line"),
    [
        (["--num-workers", "3"], {}, "ConfigError: world_size must divide lanes; got 3 and 4: "),
        (["--num-workers", "1:3"], {}, "ConfigError: world_size must divide lanes; got 3 and 4: "),
        (["--num-workers", "0"], {}, "ConfigError: world_size must divide lanes; got 0 and 4: "),
        ([], {"sources": [{"name": "only", "path": "elsewhere"}]}, "StorageError: "),
        ([], {"sources": [{"name": "only", "path": "corpus", "text_column": "body"}]}, "DataError: "),
        ([], {"lane": 8}, "ConfigError: "),
        (["--max-steps", "0"], {}, "ConfigError: --max-steps must be > 0; got 0: "),
        (["--max-failures", "-2"], {}, "ConfigError: --max-failures must be >= -1; got -2: "),
        (["--micro-batch-rows", "0"], {}, "ConfigError: --micro-batch-rows must be > 0; got 0: "),
        (["--resize-every", "-1"], {}, "ConfigError: --resize-every must be >= 0; got -1: "),
        (["--checkpoint-every", "0"], {}, "ConfigError: --checkpoint-every must be > 0; got 0: "),
    ],
)
def test_what_the_user_got_wrong_is_one_line_and_exit_code_2(config, tmp_path, capsys, options, settings, line):
    path = changed(config, **settings)
    assert main(["--config", str(path), "--storage", str(tmp_path), "--name", "run", *options]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith(line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray
def test_what_a_group_that_did_not_start_still_holds_comes_free(shared_ray):
    cpus = int(ray.cluster_resources()["CPU"])
    held, waiting = (placement_group([{"CPU": 1}] * cpus) for _ in range(2))
    assert (held.wait(30), waiting.wait(1)) == (True, False)
    free_groups()
    again = placement_group([{"CPU": 1}] * cpus)
    assert again.wait(30)
    free_groups()
