"""The RayJob for Kubernetes: what KubeRay's autoscaler reads from it, and what the job is told."""

import copy
import shlex

import pytest
import yaml

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def job():
    return yaml.safe_load((ROOT / "jobs" / "rayjob.yaml").read_text())


def autoscaling(job):
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    cluster = {"metadata": {"name": "a", "namespace": "b"}, "spec": copy.deepcopy(job["spec"]["rayClusterSpec"])}
    return _derive_autoscaling_config_from_ray_cr(cluster)


@pytest.mark.ray
def test_the_autoscaler_reads_pools_that_start_from_nothing_and_a_head_without_work(job):
    config = autoscaling(job)
    pools = {
        name: (pool["min_workers"], pool["max_workers"], pool["resources"].get("CPU"), pool["resources"].get("GPU"))
        for name, pool in config["available_node_types"].items()
    }
    assert pools == {"headgroup": (0, 0, 0, None), "tokenize": (0, 8, 16, None), "train": (0, 1, 48, 4)}
    labels = {name: pool["labels"].get("pool") for name, pool in config["available_node_types"].items()}
    assert labels == {"headgroup": None, "tokenize": "tokenize", "train": "train"}
    assert (config["max_workers"], config["idle_timeout_minutes"]) == (9, 2.0)


@pytest.mark.ray
def test_the_autoscaler_refuses_a_pool_without_a_maximum(job):
    broken = copy.deepcopy(job)
    del broken["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"]
    with pytest.raises(KeyError, match="maxReplicas"):
        autoscaling(broken)


@pytest.mark.ray
def test_the_command_is_one_that_the_job_takes(job):
    from jobs.pretrain import parse

    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "jobs.pretrain"]
    options = parse(words[3:])
    assert (options.num_workers, options.gpu, options.storage) == ((4, 4), True, "s3://BUCKET/runs")


def test_every_pod_has_the_image_and_the_settings_and_a_token_is_required(job):
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert {pod["containers"][0]["image"] for pod in pods} == {"REGISTRY/INGEST:TAG"}
    assert [pod["containers"][0]["volumeMounts"] for pod in pods] == 3 * [
        [{"name": "settings", "mountPath": "/etc/ingest"}]
    ]
    assert [pod["volumes"][0]["name"] for pod in pods] == 3 * ["settings"]
    assert cluster["rayVersion"] == "2.60.0"
