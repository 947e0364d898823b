"""Actors, workers, the splitter and the server are killed at random, again and again: the steps of a quiet run.

``pytest --long tests/cluster/test_soak.py --soak-minutes 30`` soaks for half an hour, with a kill about every twenty
seconds. The seed of the kills is printed; ``--soak-seed`` repeats it.
"""

from __future__ import annotations

import json
import random
import time

import psutil
import pytest
import yaml

from tests.conftest import starting, steps_without_ray

pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(0)]

TITLES = ("ray::MapWorker", "ray::RayTrain", "ray::SplitCoord", "ray::_Server")  # as psutil cuts them
EVERY_S = 20.0


@pytest.fixture(scope="module")
def config(config):
    """As many epochs as a soak may take."""
    path = config.with_name("soak.yaml")
    path.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "epochs": 10**6}))
    return path


def newest(storage):
    """Step of the newest checkpoint that Ray Train knows; 0 before the first."""
    try:
        known = json.loads((storage / "run" / "checkpoint_manager_snapshot.json").read_text())
        return known["latest_checkpoint_result"]["metrics"]["step"]
    except (OSError, ValueError, TypeError):  # not written yet, or being written
        return 0


def victims(job):
    """Processes of the job that may be killed."""
    found = []
    for process in job.tree():
        try:
            found += [process] if process.name().startswith(TITLES) else []
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: (process.name(), process.pid))


def test_whatever_is_killed_the_run_ends_with_the_digest_of_a_quiet_one(config, no_ray, tmp_path, pytestconfig):
    minutes = pytestconfig.getoption("--soak-minutes")
    seed = pytestconfig.getoption("--soak-seed")
    seed = random.randrange(2**32) if seed is None else seed
    draw, killed, storage = random.Random(seed), [], tmp_path / "storage"
    command = ["-m", "jobs.pretrain", "--config", config, "--storage", storage, "--name", "run"]
    options = ["--num-workers", 2, "--checkpoint-every", 20, "--max-failures", -1]
    with starting(tmp_path) as start:
        job, saved, began = start(*command, *options, RAY_ADDRESS="local"), 0, time.monotonic()
        last = began
        while time.monotonic() < began + 60 * minutes or not killed:
            assert job.process.poll() is None, (seed, killed, job.wait(1))
            assert time.monotonic() < last + 300, f"no checkpoint for 300 s; seed {seed}, killed {killed}"
            if newest(storage) > saved and time.monotonic() > last + EVERY_S and (found := victims(job)):
                saved, last = newest(storage), time.monotonic()
                victim = draw.choice(found)
                killed.append(victim.name())
                victim.kill()
            time.sleep(0.2)
        job.kill()  # the driver, and all that is left
        stop = newest(storage) + 20
        done = start(*command, *options, "--max-steps", stop, RAY_ADDRESS="local").wait(300)
    print(f"seed {seed}: {len(killed)} killed ({', '.join(sorted(set(killed)))}), {stop} steps")
    assert done.code == 0, (seed, done)
    position = json.loads(max((storage / "run").glob("checkpoint_*/position.json")).read_text())
    assert position == steps_without_ray(config, count=stop)[-1].position.to_dict(), seed
