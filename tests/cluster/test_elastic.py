"""Nodes that are lost, and nodes that say so before: the group goes on with the workers that are left."""

import itertools
import json
import re
import shutil

import pytest
import yaml

from jobs.pretrain import main
from tests.cluster.heads import head_in
from tests.conftest import ROOT, starting, steps_without_ray, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 2000


@pytest.fixture(scope="module")
def head(rays, tmp_path_factory):
    """A head of two CPUs on which one worker may train."""
    rays.stop()
    options = ("--num-cpus=2", '--resources={"trainer": 1}', "--labels=host=head")
    with starting(tmp_path_factory.mktemp("head")) as start, head_in(start, *options) as head:
        yield head


@pytest.fixture
def node(head):
    """Starts a node of one CPU on which one worker may train; it ends with the test."""
    running = []

    def start(name):
        before = len(alive(head))
        running.append(head.node("--num-cpus=1", '--resources={"trainer": 1}', f"--labels=host={name}"))
        until(lambda: len(alive(head)) > before, 60, "the node joins")
        return running[-1]

    yield start
    for each in running:
        each.kill()


@pytest.fixture(scope="module")
def long_config(config):
    path = config.with_name("long.yaml")
    path.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "epochs": 100}))
    return path


@pytest.fixture(scope="module")
def expected(long_config):
    return steps_without_ray(long_config)[STEPS - 1].position


@pytest.fixture
def job(head, long_config, tmp_path):
    """Submits the main job."""
    folder = tmp_path / "work"
    for package in ("ingest", "jobs"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))

    shutil.copy(ROOT / "tests" / "cluster" / "traced.py", folder)

    def submit(name, workers, every, *more, job=("-m", "jobs.pretrain"), steps=STEPS):
        command = ["python", *job, "--config", long_config, "--storage", tmp_path, "--name", name]
        options = ["--num-workers", workers, "--max-steps", steps, "--checkpoint-every", every, *more]
        env_vars = {"RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5"}
        return head.submit(name, folder, *command, *options, "--worker-resource", "trainer", **env_vars)

    return submit


def alive(head):
    table = head.get("/api/v0/nodes?limit=100&detail=true")["data"]["result"]["result"]
    return {node["labels"]["host"]: node["node_id"] for node in table if node["state"] == "ALIVE"}


def committed(job, storage):
    def holds():
        assert job.process.poll() is None, job.wait(1)
        known = storage / "checkpoint_manager_snapshot.json"
        return known.exists() and "checkpoint_2" in known.read_text()

    return holds


def newest(storage):
    return json.loads(max(storage.glob("checkpoint_*/position.json")).read_text())


def test_two_workers_go_on_as_one_when_a_node_dies_and_the_steps_stay_the_same(head, node, job, expected, tmp_path):
    lost = node("lost")
    running = job("elastic", "1:2", 100)
    until(committed(running, tmp_path / "elastic"), 150, "a committed checkpoint")
    assert any(process.name().startswith("ray::RayTrain") for process in lost.tree()), "a worker is on the node"
    lost.kill()
    done = running.wait(300)
    assert done.code == 0, done
    step, workers = re.search(r"resumed at step (\d+) on (\d+) workers", done.out).groups()
    assert (int(step) % 100, workers) == (0, "1")
    assert newest(tmp_path / "elastic") == expected.to_dict()


def test_a_node_that_will_be_taken_brings_a_last_checkpoint_and_training_goes_on_elsewhere(
    head, node, job, expected, tmp_path
):
    until(lambda: list(alive(head)) == ["head"], 60, "the node of the test before is forgotten")
    lost = node("lost")
    running = job("notice", "2", 10**6)  # no checkpoint of its own accord before the end
    until(lambda: "step 1: loss" in running.said(), 150, "the first step")
    words = ["drain-node", "--address", head.address, "--node-id", alive(head)["lost"], "--reason"]
    told = head.ray(
        *words, "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", 60
    )
    assert told.code == 0, told
    until(committed(running, tmp_path / "notice"), 30, "the checkpoint after the notice")
    saved = newest(tmp_path / "notice")["step"]
    assert saved < STEPS
    lost.kill()
    node("next")
    done = running.wait(300)
    assert done.code == 0, done
    assert f"resumed at step {saved} on 2 workers" in done.out
    assert newest(tmp_path / "notice") == expected.to_dict()


def traced(storage):
    """[step, digest, workers, time] of every step that was trained on, in the order of time."""
    path = storage / "trace"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_group_grows_back_when_nodes_return_and_every_step_of_the_whole_run_stays_the_same(
    head, node, job, long_config, tmp_path
):
    until(lambda: list(alive(head)) == ["head"], 60, "the nodes of the tests before are forgotten")
    storage = tmp_path / "grown"
    running = job("grown", "1:4", 20, "--resize-every", 5, job=["traced.py"], steps=10**6)

    def grown(workers):
        def holds():
            assert running.process.poll() is None, running.wait(1)
            return [size for _, _, size, _ in traced(storage)][-1:] == [workers]

        return holds

    until(grown(1), 150, "one worker trains")
    first, second = node("first"), node("second")  # 3 may train, and lanes are 4: never more than 2 workers
    until(grown(2), 150, "the group has grown")
    first.kill()
    second.kill()
    until(grown(1), 150, "the group has shrunk")
    node("third")
    until(grown(2), 150, "the group has grown back")
    (storage / "stop").touch()
    done = running.wait(100)
    assert done.code == 0, done
    assert done.out.count("the group goes from 1 to 2 workers") == 2

    trace = traced(storage)
    most = max(step for step, _, _, _ in trace)
    digests = [step.position.digest for step in steps_without_ray(long_config, count=most)]
    assert [digest for _, digest, _, _ in trace] == [digests[step - 1] for step, _, _, _ in trace]
    assert {step for step, _, _, _ in trace} == set(range(1, most + 1))
    sizes = [size for size, _ in itertools.groupby(size for _, _, size, _ in trace)]
    assert sizes == [1, 2, 1, 2]
    for (_, _, before, last), (_, _, after, first) in itertools.pairwise(trace):
        if before != after:
            print(f"recovered: {before} to {after} workers, {first - last:.1f} s")


def test_gpus_that_the_cluster_does_not_have_are_refused_in_numbers(long_config, tmp_path, shared_ray, capsys):
    options = ["--config", str(long_config), "--storage", str(tmp_path), "--name", "gpu", "--num-workers", "2"]
    assert main([*options, "--gpu"]) == 2
    assert "ResourceError: the job must fit the cluster; needs 2 GPUs for trainers, the cluster has 0: " in (
        capsys.readouterr().err
    )
