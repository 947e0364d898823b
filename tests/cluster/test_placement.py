"""Which nodes tokenize: those whose labels ``resources.label_selector`` admits, and no others."""

import json

import pytest
import yaml

from ingest.cluster import admits
from ingest.config import ResourcesConfig
from tests.cluster.heads import head_in
from tests.conftest import ROOT, starting, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def head(rays, tmp_path_factory):
    """A head of two CPUs that is there to train."""
    rays.stop()
    options = ("--num-cpus=2", "--labels=pool=train")
    with starting(tmp_path_factory.mktemp("head")) as start, head_in(start, *options) as head:
        yield head


@pytest.fixture
def stream(head, started, config, tmp_path):
    """Starts ``ingest stream`` on the head's cluster with these resources."""

    def start(**resources):
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "epochs": 40, "resources": resources}))
        environment = {**head.environment, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": head.address}
        return started("-m", "ingest.cli", "stream", path, "--json", **environment)

    return start


def tokenizing(process):
    return [each.pid for each in process.tree() if each.name().startswith("ray::MapWorker")]


@pytest.mark.slow
def test_actors_start_on_the_nodes_that_the_labels_admit_and_a_demand_that_none_meets_is_refused(head, stream):
    refused = stream(tokenize_actors=1, label_selector={"pool": "tokenize"}).wait(100)
    assert refused.code == 2
    assert (
        "ResourceError: the job must fit the cluster; needs 1 CPUs (1 tokenization actors of 1 CPUs), the cluster has "
        "2 CPUs in all, 2 free, the largest node 0, 0 on nodes that resources.label_selector {'pool': 'tokenize'} "
        "admits: label more nodes so, "
    ) in refused.err

    node = head.node("--num-cpus=1", "--labels=pool=tokenize")
    running = stream(tokenize_actors=1, label_selector={"pool": "!train"}, cluster_wait_s=60)
    until(lambda: tokenizing(node), 100, "an actor works on the node")
    assert tokenizing(head.process) == []
    done = running.wait(150)
    assert done.code == 0, done
    assert json.loads(done.out)["steps"] > 1000


@pytest.mark.parametrize(
    ("rule", "admitted"),
    [("a", "a"), ("!a", "bc-"), ("in(a,b)", "ab"), ("!in(a,b)", "c-"), ("in(a)", "a"), ("!in(a, b)", "c-")],
)
def test_a_label_is_admitted_as_ray_does(rule, admitted):
    resources = ResourcesConfig(label_selector={"pool": rule})
    nodes = {"a": {"pool": "a"}, "b": {"pool": "b"}, "c": {"pool": "c"}, "-": {"other": "a"}}
    assert "".join(name for name, labels in nodes.items() if admits(resources, labels)) == admitted


def test_every_rule_must_hold_and_no_rule_admits_all():
    both = ResourcesConfig(label_selector={"pool": "a", "zone": "!x"})
    assert [admits(both, labels) for labels in ({"pool": "a"}, {"pool": "a", "zone": "x"}, {"zone": "y"})] == [
        True,
        False,
        False,
    ]
    assert admits(ResourcesConfig(), {})
