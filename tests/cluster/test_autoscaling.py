"""Nodes come when tokenization asks for them and leave afterwards, on a real autoscaling cluster on this machine."""

import pytest
import yaml

from tests.cluster.heads import head_in
from tests.conftest import ROOT, lines_of, read_lines, starting, steps_without_ray, texts, until, write_corpus

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def head(rays, tmp_path_factory):
    """A head without CPUs of its own; by demand, up to four nodes of one CPU, and two that have a GPU too."""
    rays.stop()
    pools = {
        "tokenize": {"resources": {"CPU": 1}, "max_workers": 4},
        "train": {"resources": {"CPU": 1, "GPU": 1}, "max_workers": 2},
    }
    with starting(tmp_path_factory.mktemp("head")) as start, head_in(start, pools=pools) as head:
        yield head


@pytest.fixture
def long_config(tmp_path, config):
    """Windows that take an actor about a second each, and more than a minute in all."""
    write_corpus(tmp_path / "corpus", texts(2000, seed=5, words=(1000, 3000)), files=4, row_group_size=10)
    settings = {
        "sources": [{"name": "only", "path": str(tmp_path / "corpus")}],
        "packing": {"sequence_length": 512},
        "shuffle": {"window_tokens": 120_000},
        "global_batch_rows": 16,
        "epochs": 6,
        "resources": {"tokenize_actors": [1, 3], "cluster_wait_s": 120},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **settings}))
    return path


def nodes(head):
    """The pool of each node that is alive, the head apart."""
    table = head.get("/api/v0/nodes?limit=100&detail=true")["data"]["result"]["result"]
    alive = [node["resources_total"] for node in table if node["state"] == "ALIVE" and not node["is_head_node"]]
    return sorted("train" if "GPU" in resources else "tokenize" for resources in alive)


def test_nodes_come_by_demand_tokenize_and_leave_and_the_steps_stay_the_same(head, started, long_config, tmp_path):
    assert nodes(head) == []
    digests, seen = tmp_path / "digests", []
    environment = {**head.environment, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": head.address}
    stream = started("-m", "ingest.cli", "stream", long_config, "--digests", digests, "--json", **environment)

    def ended():
        seen.append(nodes(head))
        return stream.process.poll() is not None

    until(ended, 400, "the stream ends")
    done = stream.wait(1)
    assert (done.code, max(seen, key=len)) == (0, 3 * ["tokenize"]), done
    assert not [pools for pools in seen if "train" in pools]
    until(lambda: nodes(head) == [], 60, "the nodes leave")
    expected = lines_of(steps_without_ray(long_config))
    assert read_lines(digests) == expected
    assert len(expected) > 1000
