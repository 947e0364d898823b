"""Jobs given to a head node by ``ray job submit``: the code and its environment travel, and a stopped job goes on."""

import json
import shutil

import pytest

from tests.conftest import ROOT, steps_without_ray, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

STEPS = 60


@pytest.fixture
def working_dir(tmp_path, config):
    """What a user would submit: the code, and the settings beside it."""
    folder = tmp_path / "work"
    for package in ("ingest", "jobs"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(config, folder / "run.yaml")
    return folder


def pretrain(storage, config="run.yaml"):
    command = ["python", "-m", "jobs.pretrain", "--config", config, "--storage", storage, "--name", "run"]
    return [*command, "--max-steps", STEPS, "--checkpoint-every", 10]


def test_a_job_that_was_stopped_and_submitted_again_ends_with_the_digest_of_an_undisturbed_run(
    head, working_dir, config, tmp_path
):
    storage, cache = tmp_path / "storage", tmp_path / "cache"
    first = head.submit("first", working_dir, *pretrain(storage), INGEST_CACHE=str(cache))
    known = storage / "run" / "checkpoint_manager_snapshot.json"

    def committed():
        assert first.process.poll() is None, first.wait(1)
        return known.exists() and "checkpoint_2" in known.read_text()

    until(committed, 150, "a committed checkpoint")
    assert head.status("first") == "RUNNING"
    stopped = head.ray("job", "stop", "first", "--address", head.dashboard)
    assert (stopped.code, head.status("first")) == (0, "STOPPED"), stopped
    assert "step 1: loss " in first.wait(30).out
    assert [file.suffix for file in cache.iterdir()], "env_vars of the runtime environment reach the job"

    second = head.submit("second", working_dir, *pretrain(storage), INGEST_CACHE=str(cache)).wait(200)
    assert (second.code, head.status("second")) == (0, "SUCCEEDED"), second
    assert "resumed at step " in second.out
    newest = max((storage / "run").glob("checkpoint_*/position.json"))
    expected = steps_without_ray(config)[STEPS - 1].position
    assert json.loads(newest.read_text()) == expected.to_dict()


def test_a_job_whose_settings_are_wrong_fails_with_one_line_and_leaves_the_cluster_free(head, working_dir, tmp_path):
    (working_dir / "wrong.yaml").write_text((working_dir / "run.yaml").read_text() + "lane: 3\n")
    done = head.submit("wrong", working_dir, *pretrain(tmp_path / "storage", "wrong.yaml")).wait(100)
    assert done.code == 1
    assert "ConfigError: config wrong.yaml: lane is not a setting; got 3: did you mean lanes?" in done.out
    assert head.status("wrong") == "FAILED"
    assert "exit code 2" in head.get("/api/jobs/wrong")["message"]


def test_a_command_without_the_token_is_refused(head, started, working_dir, tmp_path):
    without = {**head.environment, "RAY_AUTH_TOKEN": "0" * 64}
    done = started("-m", "ray.scripts.scripts", "job", "list", "--address", head.dashboard, **without).wait(60)
    assert done.code != 0
    assert "AuthenticationError" in done.err
