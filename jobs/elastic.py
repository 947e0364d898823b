"""Elastic groups of workers whose number always divides the lanes, and which grow back when nodes return.

Ray Train looks at times (``--resize-every``) at what the nodes have, and where another number of workers fits it
restarts the group at its newest checkpoint: with 3 workers as well as with 4. Here the number that fits is rounded down
to one that divides the lanes, and the CPUs of the smallest tokenization pool are left to it. Rejected: a callback that
rounds Ray Train's decisions. A group of 2 would be restarted as a group of 2 at every look where 3 fit.
"""

from __future__ import annotations

import time
from typing import Any

import ray.train
from ray._raylet import PlacementGroupID
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision, ResizeDecision
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from ingest.config import IngestConfig

SAY_EVERY_S = 30.0


def fitting(possible: int, lanes: int) -> int:
    """The largest number of workers up to ``possible`` that divides the lanes; 0 where none is possible."""
    return max((size for size in range(1, possible + 1) if lanes % size == 0), default=0)


class DividingPolicy(ElasticScalingPolicy):
    """Ray Train's elastic policy, for numbers of workers that divide the lanes; it runs in Ray Train's controller.

    Args:
        scaling: the ``ScalingConfig`` of the group.
        config: its lanes, and the CPUs that its smallest tokenization pool needs.
        mailbox: gets a line where the group waits for nodes or changes its size.
    """

    def __init__(self, scaling: Any, config: IngestConfig, mailbox: Any) -> None:
        super().__init__(scaling)
        self._lanes = config.lanes
        self._cpus_per_worker: float = (scaling.resources_per_worker or {}).get("CPU", 0.0)
        self._tokenize_cpus = config.resources.min_actors * config.resources.cpus_per_actor
        self._mailbox = mailbox
        self._said = time.monotonic()

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        possible: int = super()._count_possible_workers(reserved_resources)
        cpus = sum(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]) - self._tokenize_cpus
        each = self._cpus_per_worker
        return fitting(min(possible, int(cpus // each)) if each else possible, self._lanes)

    def make_decision_for_non_running_worker_group(self) -> Any:
        """As Ray Train decides; a group that goes on waiting is no longer silent about it."""
        decision = super().make_decision_for_non_running_worker_group()
        if isinstance(decision, NoopDecision) and time.monotonic() > self._said + SAY_EVERY_S:
            self._said = time.monotonic()
            fewest = self.scaling_config.min_workers
            self._mailbox.put.remote(f"waiting for nodes: {fewest} workers and the smallest tokenization pool must fit")
        return decision

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        """As Ray Train decides, and says what it decided."""
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        if isinstance(decision, ResizeDecision):
            before = worker_group_state.num_workers
            self._mailbox.put.remote(f"the group goes from {before} to {decision.num_workers} workers")
        return decision


class ElasticTrainer(TorchTrainer):
    """A ``TorchTrainer`` with a policy of one's own.

    Args:
        policy: made for the ``scaling_config`` of ``named``; None leaves it to Ray Train.
        arguments: those of ``TorchTrainer``.
        named: likewise.
    """

    def __init__(self, policy: DividingPolicy | None, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._policy = policy

    def _initialize_and_run_controller(self, **parts: Any) -> ray.train.Result:
        if self._policy is not None:  # the only place where Ray Train 2.60 takes one; it is not public
            parts["scaling_policy"] = self._policy
        run: Any = super()
        result: ray.train.Result = run._initialize_and_run_controller(**parts)
        return result


def free_groups() -> None:
    """Removes the placement groups of this job: Ray Train forgets that of a group which did not start.

    The next group would wait for its CPUs for ever.
    """
    mine = ray.get_runtime_context().get_job_id()
    for number, group in placement_group_table().items():
        if number.endswith(mine) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(number))))
