"""A real head node on the loopback address, in processes of its own, and the commands that a user would give it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import Done, Started, until

RAY = ("-m", "ray.scripts.scripts")  # what the command `ray` is
OBJECT_STORE = 200 << 20
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
HEAD_ID = "f" * 51 + "00000"  # what the fake provider calls the head
AUTOSCALER = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_FAKE_CLUSTER": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    "RAY_enable_autoscaler_v2": "1",
}
Pools = dict[str, dict[str, Any]]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, all different."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


class Head:
    """A head node with its job server; every process of the cluster and of its jobs ends with it.

    Args:
        start: starts its processes.
        folder: for its files.
        options: of ``ray start``.
        pools: types of nodes that it starts by demand, by name; none without.
    """

    def __init__(self, start: Callable[..., Started], folder: Path, *options: str, pools: Pools | None = None) -> None:
        self._start = start
        gcs, dashboard, client, self._agent = free_ports(4)
        self.address, self.dashboard = f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}"
        # Code comes from what is submitted, not from the tests' own path; a token, as `ray start --head` wants one. The
        # `python` of a job is what the head finds on its PATH: the tests' own, also where no environment is activated.
        self.environment = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": "",
            "RAY_ADDRESS": "",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        if pools:
            options += autoscaling(folder / "autoscaling.yaml", pools, self.address)
            self.environment |= AUTOSCALER
        self.process = start(
            *(*RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"),
            *(f"--object-store-memory={OBJECT_STORE}", f"--temp-dir={folder}"),
            *(f"--dashboard-agent-listen-port={self._agent}", *options),
            **self.environment,
        )
        until(self._answers, 90, "the job server answers")

    def _answers(self) -> bool:
        assert self.process.process.poll() is None, self.process.wait(1)
        try:
            self.get("/api/jobs/")
            socket.create_connection(("127.0.0.1", self._agent), 1).close()  # without it a job is refused
        except OSError:
            return False
        return True

    def get(self, path: str) -> Any:
        """What the job server says at a path, as JSON."""
        token = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        with urllib.request.urlopen(urllib.request.Request(self.dashboard + path, headers=token), timeout=10) as answer:
            return json.load(answer)

    def node(self, *options: str, **environment: str) -> Started:
        """Starts one more node."""
        port = f"--address={self.address}"
        whole = {**self.environment, **environment}
        return self._start(
            *RAY, "start", "--block", port, "--node-ip-address=127.0.0.1", f"--object-store-memory={OBJECT_STORE}",
            *options, **whole,
        )  # fmt: skip

    def ray(self, *words: object) -> Done:
        """``ray ...`` as a process of its own, until it ends."""
        return self._start(*RAY, *words, **self.environment).wait(60)

    def submit(self, name: str, working_dir: Path, *command: object, **env_vars: str) -> Started:
        """``ray job submit``, which follows the job's lines and ends with the job."""
        environment = json.dumps({"env_vars": env_vars})
        return self._start(
            *(*RAY, "job", "submit", "--address", self.dashboard, "--submission-id", name),
            *("--working-dir", working_dir, "--runtime-env-json", environment, "--", *command),
            **self.environment,
        )

    def status(self, name: str) -> str:
        """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
        return str(self.get(f"/api/jobs/{name}")["status"])


def autoscaling(path: Path, pools: Pools, address: str) -> tuple[str, ...]:
    """Options of a head without work of its own that starts nodes of these pools by demand.

    Ray's own fake provider starts them as processes on this machine; they leave after six idle seconds. It is named
    as an external one, whose defaults do not need a file that the wheel lacks. The first version of the autoscaler
    knows nodes by their IP address, the same for all here, and never ends one: hence the second.
    """
    pools = {name: {"node_config": {}, "min_workers": 0, **pool} for name, pool in pools.items()}
    settings = {
        "cluster_name": "tests",
        "max_workers": sum(pool["max_workers"] for pool in pools.values()),
        "idle_timeout_minutes": 0.1,
        "provider": {"type": "external", "module": PROVIDER, "launch_multiple": True, "gcs_address": address},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            **pools,
        },
        "file_mounts_sync_continuously": False,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{f"{name}_commands": [] for name in COMMANDS},
    }
    path.write_text(json.dumps(settings))
    return f"--autoscaling-config={path}", "--num-cpus=0"


@contextmanager
def head_in(start: Callable[..., Started], *options: str, pools: Pools | None = None) -> Iterator[Head]:
    """A head node whose files lie in a folder with a short name: a socket's path may have 107 letters."""
    folder = Path(tempfile.mkdtemp(prefix="r"))
    head = None
    try:
        head = Head(start, folder, *options, pools=pools)
        yield head
    finally:
        if head:
            head.process.kill()
        shutil.rmtree(folder, ignore_errors=True)
