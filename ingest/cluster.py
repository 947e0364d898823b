"""The cluster a stream runs on: joined or started, and checked for what the job needs before anything waits for it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.services import canonicalize_bootstrap_address

from ingest.config import IngestConfig, ResourcesConfig
from ingest.errors import ResourceError
from ingest.forecast import actor_bytes
from ingest.run import Run

_log = logging.getLogger("ingest")
CONNECT_S = 10.0
LOCAL_FACTOR = 4  # logical CPUs a core at most where Ray is started here: each is a process of 200 MB
SETTLE_S = 20.0  # time for the CPUs of a stream that was just closed to come free


def ensure_ray(config: IngestConfig, extra_cpus: float = 0.0) -> None:
    """Joins the Ray cluster there is, or starts a local one with as many logical CPUs as the job needs.

    ``RAY_ADDRESS`` names the cluster; ``local`` starts one even where another runs on this machine. Unset, the one
    that ``ray start`` began on this machine is joined.

    Args:
        config: its ``resources`` say what tokenization needs.
        extra_cpus: logical CPUs that others need at the same time (trainers).

    Raises:
        ResourceError: ``RAY_ADDRESS`` names a cluster that cannot be reached, or this machine is far too small.
    """
    if ray.is_initialized():
        return
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address != "local":
        found = running() if address == "auto" else _listening(address)
        if found is not None:
            with contextlib.suppress(ConnectionError):
                ray.init(address=found, **quiet)
                if address == "auto":
                    _log.warning("joined the Ray cluster at %s; RAY_ADDRESS=local starts one of its own", found)
                return
        if os.environ.get("RAY_ADDRESS"):
            raise ResourceError(f"RAY_ADDRESS must name a running cluster; got {address}: start it, or set it to local")
    need = config.resources.min_actors * config.resources.cpus_per_actor + extra_cpus
    cores = os.cpu_count() or 1
    cpus = max(cores, math.ceil(need))
    if cpus > max(8, LOCAL_FACTOR * cores):
        raise ResourceError(
            f"a local Ray must fit this machine; the job needs {need:g} CPUs, it has {cores} cores: set "
            f"resources.tokenize_actors to {[1, cores]}, or set RAY_ADDRESS to a cluster"
        )
    with _loopback():
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Lets the Ray that is started inside listen on loopback alone, by the switch it has for desktops.

    Without it Ray listens on all interfaces; an address of 127.0.0.1 as an argument is replaced by a public one.
    """
    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    set_before = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False  # for its processes, and for this one
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(name)
        if set_before is not None:
            os.environ[name] = set_before


def running() -> str | None:
    """The address of the cluster that ``ray start`` began on this machine; None if there is none or nobody answers.

    Ray's note of the last cluster outlives it, and Ray tries an address for a quarter of an hour.
    """
    services = logging.getLogger("ray._private.services")
    level = services.level
    services.setLevel(logging.ERROR)  # it speaks of clusters long gone, and of connecting before anybody does
    try:
        noted: str | None = canonicalize_bootstrap_address(None)  # type: ignore[arg-type]
    except ConnectionError:
        return None
    finally:
        services.setLevel(level)
    return noted and _listening(noted)


def _listening(address: str) -> str | None:
    """The address, where somebody listens at it."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError, OverflowError):
        return None
    return address


def require_resources(resources: ResourcesConfig, extra_cpus: float = 0.0) -> None:
    """Compares what the job needs with what the cluster has, so that it cannot wait for ever.

    Args:
        resources: the tokenization pool.
        extra_cpus: logical CPUs that trainers will take beside it and do not hold yet.

    Raises:
        ResourceError: the demand does not fit; with the numbers and the smallest change that makes it fit.
    """
    each, fewest = resources.cpus_per_actor, resources.min_actors
    need = fewest * each + extra_cpus
    deadline = time.monotonic() + max(SETTLE_S, resources.cluster_wait_s)
    with _requested(resources, extra_cpus) if resources.cluster_wait_s else contextlib.nullcontext():
        while True:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            sizes = [node["Resources"].get("CPU", 0.0) for node in nodes if admits(resources, node["Labels"] or {})]
            total = sum(node["Resources"].get("CPU", 0.0) for node in nodes)
            free, largest = ray.available_resources().get("CPU", 0.0), max(sizes, default=0)
            fits = total >= need and largest >= each and sum(sizes) >= fewest * each
            if fits and free >= need:
                return
            if time.monotonic() > deadline or (not fits and not resources.cluster_wait_s):
                break
            time.sleep(0.1)
    demand = f"{fewest} tokenization actors of {each:g} CPUs" + (
        f" and {extra_cpus:g} for trainers" if extra_cpus else ""
    )
    has = f"{total:g} CPUs in all, {free:g} free, the largest node {largest:g}"
    if resources.label_selector:
        has += f", {sum(sizes):g} on nodes that resources.label_selector {resources.label_selector} admits"
    room = int(min(free - extra_cpus, sum(sizes)) // each)
    step = "label more nodes so" if resources.label_selector else "add CPUs or lower resources.cpus_per_actor"
    if room >= 1:
        step = f"set resources.tokenize_actors to {[room, room]}"
    raise ResourceError(
        f"the job must fit the cluster; needs {need:g} CPUs ({demand}), the cluster has {has}: {step}, "
        "start Ray with more num_cpus, or set resources.cluster_wait_s where an autoscaler will add nodes"
    )


@contextlib.contextmanager
def _requested(resources: ResourcesConfig, extra_cpus: float) -> Iterator[None]:
    """Asks the autoscaler for the CPUs while the block runs; a request that stands keeps its nodes for ever."""
    from ray.autoscaler.sdk import request_resources

    tokenize = [resources.label_selector] * resources.min_actors
    train: list[dict[str, str]] = [{}] * math.ceil(extra_cpus)
    bundles = [{"CPU": resources.cpus_per_actor}] * len(tokenize) + [{"CPU": 1.0}] * len(train)
    request_resources(bundles=bundles, bundle_label_selectors=[*tokenize, *train])
    try:
        yield
    finally:
        request_resources(bundles=[])


def admits(resources: ResourcesConfig, labels: Mapping[str, str]) -> bool:
    """Whether a node of these labels may tokenize; the forms are ``a``, ``!a``, ``in(a,b)`` and ``!in(a,b)``."""
    for key, rule in resources.label_selector.items():
        values = re.sub(r"^in\((.*)\)$", r"\1", rule.removeprefix("!")).replace(" ", "").split(",")
        if (labels.get(key) in values) == rule.startswith("!"):
            return False
    return True


def require_memory(run: Run) -> None:
    """Compares the memory that windows of this size need with what the cluster has.

    In the object store lie the windows that ranks have open and ahead, and those that actors have made and nobody has
    taken yet; for the actors themselves see ``forecast.actor_bytes``.

    Raises:
        ResourceError: it does not fit; with the numbers and the window size that would.
    """
    resources, wire = run.config.resources, run.largest_window_tokens * run.token_dtype.itemsize
    windows = resources.prefetch_windows + 2 + 2 * resources.min_actors
    demands = {
        "memory": resources.min_actors * actor_bytes(run, run.largest_window_tokens),
        "object_store_memory": windows * wire,
    }
    cluster = ray.cluster_resources()
    tightest = max(demands, key=lambda what: demands[what] / max(1.0, cluster.get(what, 0.0)))
    need, has = demands[tightest], cluster.get(tightest, 0.0)
    if need > has:
        fitting = max(1, int(run.largest_window_tokens * has / need / 2))
        raise ResourceError(
            f"windows of up to {run.largest_window_tokens:,} tokens must fit the cluster's {tightest}; they need "
            f"{need / 1e6:,.0f} MB with {resources.min_actors} actors, it has {has / 1e6:,.0f} MB: set "
            f"shuffle.window_tokens to {fitting:,} (another order), write smaller row groups, or give Ray more"
        )
