"""The driver is told to end, or killed without a word: what is left of the run, and how it goes on."""

import json
import os
import re
import shutil
import signal
import time

import psutil
import pytest
import yaml

from jobs.mailbox import Mailbox
from jobs.notices import at_sigterm
from tests.conftest import ROOT, steps_without_ray, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

FEW = 20  # steps of the run that goes on
GONE_S = 120.0
AGENTS = ("ray::DashboardA", "ray::RuntimeEnv")  # of Ray, on each node; they take no work


@pytest.fixture(scope="module")
def long_config(config):
    """More steps than are made before something happens."""
    path = config.with_name("driver.yaml")
    path.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "epochs": 1000}))
    return path


def options(config, storage, every, steps=10**6, workers=2):
    command = ["-m", "jobs.pretrain", "--config", config, "--storage", storage, "--name", "run"]
    return [*command, "--num-workers", workers, "--max-steps", steps, "--checkpoint-every", every]


def committed(job, storage):
    def holds():
        assert job.process.poll() is None, job.wait(1)
        known = storage / "run" / "checkpoint_manager_snapshot.json"
        return known.exists() and "checkpoint_2" in known.read_text()

    return holds


def newest(storage):
    return json.loads(max((storage / "run").glob("checkpoint_*/position.json")).read_text())


def goes_on_from(start, config, storage):
    """The same command resumes, and the digest is that of an undisturbed run; returns the step it resumed at.

    That is the newest checkpoint which Ray Train had noted: after a kill it may be the one before the newest directory.
    """
    step = newest(storage)["step"]
    done = start(*options(config, storage, 10**6, step + FEW)).wait(150)
    assert done.code == 0, done
    assert newest(storage) == steps_without_ray(config, count=step + FEW)[-1].position.to_dict()
    return int(re.search(r"resumed at step (\d+) on 2 workers", done.out)[1])


def kill_and_see_gone(victims, processes, what):
    """SIGKILL to some; how long others live on is printed, for the table in the README."""
    agents = [process for process in processes if process.name().startswith(AGENTS)]
    began = time.monotonic()
    for victim in victims:
        victim.kill()
    for waited, kind in ([process for process in processes if process not in agents], ""), (agents, " of Ray's agents"):
        _, left = psutil.wait_procs(waited, timeout=GONE_S)
        assert not left, left
        if waited:
            print(f"recovered: {what}, {len(waited)} processes{kind} gone after {time.monotonic() - began:.1f} s")


@pytest.mark.slow
def test_a_driver_that_gets_sigterm_saves_once_more_ends_with_143_and_goes_on_from_there(
    no_ray, started, long_config, tmp_path
):
    def start(*command):
        return started(*command, RAY_ADDRESS="local")

    job = start(*options(long_config, tmp_path, every=10**6))  # no checkpoint of its own accord
    until(lambda: "step 1: loss" in job.said(), 150, "the first step")
    told = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    done = job.wait(60)
    print(f"recovered: driver told to end, saved and gone after {time.monotonic() - told:.1f} s")
    saved = newest(tmp_path)["step"]
    assert done.code == 143, done
    assert done.err == "SIGTERM: a last checkpoint, then exit code 143; another SIGTERM ends at once\n"
    assert goes_on_from(start, long_config, tmp_path) == saved


@pytest.mark.slow
def test_a_killed_driver_takes_its_local_ray_along_and_the_same_command_goes_on(no_ray, started, long_config, tmp_path):
    def start(*command):
        return started(*command, RAY_ADDRESS="local")

    job = start(*options(long_config, tmp_path, every=20))
    until(committed(job, tmp_path), 150, "a committed checkpoint")
    children = [process for process in job.tree() if process.pid != job.process.pid]
    assert any(process.name().startswith("ray::RayTrain") for process in children)
    kill_and_see_gone([job.process], children, "driver killed, local Ray")
    assert goes_on_from(start, long_config, tmp_path) % 20 == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["ray::JobSuperv", "python"], ids=["its supervisor", "itself"])
def test_a_submitted_driver_that_is_killed_leaves_the_cluster_free_and_submitted_again_goes_on(
    head, long_config, tmp_path, victim
):
    folder = tmp_path / "work"
    for package in ("ingest", "jobs"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    names = iter(("first", "second"))

    def start(*command):
        return head.submit(f"{tmp_path.name}-{next(names)}", folder, "python", *command)

    before = {process.pid for process in head.process.tree()}
    job = start(*options(long_config, tmp_path, every=20))
    until(committed(job, tmp_path), 150, "a committed checkpoint")
    new = [process for process in head.process.tree() if process.pid not in before]
    working = [
        process for process in new if process.name().startswith(("ray::RayTrain", "ray::MapWorker", "ray::_Serv"))
    ]
    assert len(working) >= 4
    drivers = [process for process in new if process.name().startswith(victim) and is_driver(process, victim)]
    assert drivers
    kill_and_see_gone(drivers, working, f"driver of a submitted job killed ({victim})")
    assert goes_on_from(start, long_config, tmp_path) % 20 == 0  # refused at once if the CPUs were not free: 3 of 4


def is_driver(process, victim):
    return victim.startswith("ray::") or process.cmdline()[1:3] == ["-m", "jobs.pretrain"]


def test_the_first_sigterm_is_passed_on_and_the_second_ends_at_once(shared_ray, capsys):
    import ray

    mailbox = Mailbox.remote()
    before = signal.getsignal(signal.SIGTERM)
    with at_sigterm(mailbox) as told:
        assert not told.is_set()
        assert not ray.get(mailbox.ends.remote())
        os.kill(os.getpid(), signal.SIGTERM)
        until(told.is_set, 10, "it is seen")
        assert ray.get(mailbox.ends.remote())
        with pytest.raises(SystemExit, match="143"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err.count("SIGTERM") == 2  # one line
