"""Start or join Ray, and place ranks and engines on it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import cloudpickle
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.state import available_resources_per_node
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError, RayError
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import trainer
from trainer.cluster.actors import Actors, Host
from trainer.cluster.node_health import Node, NodeHealth
from trainer.cluster.ray_head import CPU_OBJECT_STORE_BYTES, RayHead
from trainer.cluster.resources import (
    FindGpus,
    by_node,
    check_gpus,
    forwarded_variables,
    gpus_per_engine,
    max_world_size,
    rank_groups,
    slots_needed,
)
from trainer.cluster.worker_groups import Cluster, Timeouts, WorkerGroup
from trainer.config import Config
from trainer.errors import RESTART_HINT, UserError, WorkerError, describe_error, one_line
from trainer.process import time_limits
from trainer.process.failures import INCIDENTS, broken_node
from trainer.process.signals import SIGNALS, Stopped
from trainer.process.startup import stage
from trainer.process.watchdog import ends_within

LOG = logging.getLogger(__name__)

_DRAINED = "trainer.excluded_nodes contains it"
NODE_ID = "ray.io/node-id"  # the node label that contains the id of the node
RAY_LOGS = "ray_logs"  # directory below the run directory with Ray's logs of a job that failed


class _JobConfig(JobConfig):
    """Keeps Ray from putting the working directory first in the import path of workers, where a file of the user hides
    modules of the same name. `_launch` appends the import path of the driver instead."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


class RayCluster(Cluster):
    """Ray for one run: `with RayCluster(cfg, device) as cluster`. Kills all processes that it has started at the end.
    `head` is Ray for a job on CPUs, which has begun to start; else the cluster starts its own, or joins one."""

    object_store_bytes = CPU_OBJECT_STORE_BYTES

    def __init__(self, cfg: Config, device: str, head: RayHead | None = None):
        self.cfg = cfg
        self.device = device
        self._groups: list[tuple[WorkerGroup, list[PlacementGroup]]] = []
        self._has_counted_ranks = False
        self._reported: set[str] = set()  # ids of excluded nodes that have been logged
        self._head = head if device == "cpu" else None  # None: the job uses an existing cluster
        self._node_health: NodeHealth | None = None  # None: Ray runs on this machine only
        self._drained: dict[str, str] = dict.fromkeys(cfg.trainer.excluded_nodes, _DRAINED)  # addresses, with reasons
        self._timeouts = Timeouts(time_limits.HEARTBEAT_S, time_limits.CALL_S, self._failed_process, self._failed_nodes)

    def __enter__(self) -> RayCluster:
        address = self.cfg.trainer.ray_address
        try:
            if address is None:
                if self._head is None:
                    with SIGNALS.deferred():  # `__exit__` needs `_head` to end Ray
                        self._head = RayHead.of_job(self.cfg, self.device)
                with stage("starting Ray"):
                    address = self._head.connect()
            else:
                _probe(address)
            self._join(address)
            if self._head is None:
                self._own_node = ray.get_runtime_context().get_node_id()
                self._node_health = NodeHealth(time_limits.NODE_ANSWER_S)
                self._node_health.watch(alive_nodes())
            self._check_resources()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def _join(self, address: str) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if not address.startswith("ray://"):  # else the server of the client, which may lack this module, gets it
            root = os.path.dirname(os.path.dirname(trainer.__file__))
            runs_in_sources = os.path.abspath(sys.path[0]) == root
            options["job_config"] = _JobConfig(_py_driver_sys_path=[root] if runs_in_sources else [])
        try:
            # On another thread: on the main thread, Ray would install a SIGTERM handler that ends the process.
            with SIGNALS.deferred(), SIGNALS.blocked(), ThreadPoolExecutor(1) as thread:
                thread.submit(ray.init, address=address, **options).result()
                SIGNALS.reinstall()  # Ray's C++ code installs handlers on any thread
        except (ConnectionError, RuntimeError, ValueError) as error:
            if self._head is not None:
                raise
            reason = str(error).splitlines()[0]
            raise UserError(f"trainer.ray_address={self.cfg.trainer.ray_address}: {reason}") from error

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        with SIGNALS.deferred():
            if self._node_health is not None:
                self._node_health.close()
            failed = self._failed_process()
            if not failed:
                for group, _ in list(self._groups):
                    # If the cluster itself has failed, its actors and placement groups no longer exist.
                    with contextlib.suppress(RayError):
                        self.release(group)
            if self._head is not None and kind is not None and not issubclass(kind, (UserError, Stopped)):
                self._head.save_logs(os.path.join(self.cfg.trainer.run_dir, RAY_LOGS))
            failed = failed or self._failed_process()  # it may have failed since
            if self._head is not None and failed:
                self._head.close()
            if not failed or os.getppid() != 1:
                # Before the head is closed. Without its processes `ray.shutdown` waits for seconds. If process 1 is the
                # parent, as in a container, it even ends this process with status 1, because Ray takes the parent for
                # its raylet.
                self._shut_ray_down()
            if self._head is not None:
                # `ray.shutdown` does not wait until the processes have exited: the next job may need their memory,
                # above all on a GPU.
                self._head.close()

    def _shut_ray_down(self) -> None:
        with SIGNALS.blocked():
            try:
                if not ends_within(ray.shutdown, time_limits.RAY_SHUTDOWN_S):
                    limit = f"{time_limits.RAY_SHUTDOWN_S:g} s"
                    LOG.warning("Ray has not shut down within %s; the job exits without waiting", limit)
            except Exception as error:  # how the job ends matters more
                LOG.warning("Ray has not shut down (%s); the job exits without it", describe_error(error))
            SIGNALS.reinstall()  # Ray has reset SIGTERM to its default, which ends the process

    def _failed_process(self) -> str | None:
        if self._node_health is not None and self._node_health.has_exited(self._own_node):
            return "Ray's raylet on this machine"
        process = self._head.failed_process() if self._head is not None else None
        return process and f"Ray's {process}"

    def _failed_nodes(self) -> dict[str, str]:
        failed = self._node_health.failed() if self._node_health is not None else {}
        return {node.address: reason for node, reason in failed.items()}

    @property
    def is_local(self) -> bool:  # type: ignore[override]
        return self._head is not None

    def rendezvous_address(self, group: WorkerGroup) -> str:
        if self._head is not None:
            return f"file://{self._head.directory}/store-{secrets.token_hex(8)}"
        return group.call_one(0, "find_address", group.placements()[0]["host"])

    def release(self, group: WorkerGroup) -> None:
        entry = next(entry for entry in self._groups if entry[0] is group)
        self._groups.remove(entry)
        group.kill()
        remove_groups(entry[1])

    def count_ranks(self) -> int:
        """Return how many ranks to start: `trainer.num_workers`, or fewer if the cluster has too little capacity.

        The first call waits for the capacity of all ranks for `trainer.placement_timeout_s`, if that is set, because
        nodes may be late. Later calls follow a failure. They wait for a moment only: the nodes may be lost for good.
        While a call waits, an autoscaler sees what is missing.

        Raises:
            UserError: the capacity is too small for `trainer.min_world_size`.
            WorkerError: Ray has died on this machine.
        """
        t = self.cfg.trainer
        if self._node_health is None or t.min_world_size is None:
            return t.num_workers
        engines = next((placed for group, placed in self._groups if group.name == "engine"), None)
        is_first, self._has_counted_ranks = not self._has_counted_ranks, True
        wait_for_all_s = (t.placement_timeout_s if is_first else None) or time_limits.CAPACITY_WAIT_S
        started, is_waiting = time.monotonic(), False
        with contextlib.ExitStack() as demand:
            asked: tuple[PlacementGroup, dict[str, str]] | None = None  # for all, on nodes with a label
            while True:
                self._timeouts.check_cluster()
                excluded = self._excluded_nodes()
                label = exclude_nodes(excluded)
                if asked is not None and asked[1] != label:
                    demand.close()
                    asked = None
                with SIGNALS.deferred():
                    free = [free for node, free in available_resources_per_node().items() if node not in excluded]
                unplaced = self.cfg.num_engines if engines is None else count_pending(engines)
                count = max_world_size(self.cfg, self.device, free, unplaced)
                if asked is not None and not count_pending([asked[0]]):
                    count = t.num_workers  # the group holds what they need
                limit_s = wait_for_all_s if count >= t.min_world_size else self._placement_timeout_s
                if count == t.num_workers or time.monotonic() - started > limit_s:
                    break
                if not is_waiting:
                    is_waiting = True
                    key = "" if limit_s == time_limits.CAPACITY_WAIT_S else " (trainer.placement_timeout_s)"
                    text = "the cluster has capacity for %d of %d ranks: waiting for more, up to %g s%s"
                    LOG.info(text, count, t.num_workers, limit_s, key)
                if asked is None:
                    bundles = self._bundles(unplaced if engines is None else 0)  # engines ask for themselves
                    asked = demand.enter_context(demanded(bundles, label)), label
                SIGNALS.check()
                time.sleep(time_limits.POLL_INTERVAL_S)
        if count < t.min_world_size:
            raise UserError(
                f"trainer.min_world_size={t.min_world_size}: the cluster of trainer.ray_address={t.ray_address} "
                f"has capacity for {count} ranks; other jobs hold {describe_usage()}"
            )
        if count < t.num_workers:
            LOG.warning("the cluster has capacity for %d of %d ranks: starting %d", count, t.num_workers, count)
        return count

    def launch_ranks(self, name: str, factory: Any, env: dict[str, str], count: int | None = None) -> WorkerGroup:
        count = count or self.cfg.trainer.num_workers
        bundle = self._bundle(gpus=1)
        (group,) = self._place([[bundle] * count])
        with SIGNALS.deferred():
            indices = by_node(placement_group_table(group)["bundles_to_node_id"])
        options = [options_in(bundle, group, index) for index in indices]
        args = [(rank, count, self.device) for rank in range(count)]
        return self._launch(name, factory, args, options.__getitem__, env, [group])

    def launch_engines(
        self, factory: Any, args: Sequence[tuple], env: dict[str, str], find_gpus: FindGpus | None = None
    ) -> WorkerGroup:
        placed: list[PlacementGroup] = []
        if find_gpus is not None:

            def options(engine: int) -> dict[str, Any]:
                return options_colocated_with(find_gpus(engine))
        else:
            bundle, started = self._bundle(gpus_per_engine(self.cfg, self.device)), set[int]()
            placed = self._place_separately(bundle, len(args))

            def options(engine: int) -> dict[str, Any]:
                if engine in started:
                    self._move_from_failed_node(placed, engine, bundle)
                started.add(engine)
                return options_in(bundle, placed[engine], 0)

        return self._launch("engine", factory, args, options, env, placed)

    def drain(self, error: Exception) -> None:
        if (broken := broken_node(error)) is not None:
            self._drained.setdefault(*broken)

    def has_capacity(self, group: WorkerGroup) -> bool:
        placed = next(placed for registered, placed in self._groups if registered is group)
        return not placed or count_pending(placed) < len(placed)

    def _launch(
        self,
        name: str,
        factory: Any,
        args: list[tuple],
        options: Callable[[int], dict[str, Any]],
        env: dict[str, str],
        placed: list[PlacementGroup],
    ) -> WorkerGroup:
        """Start one actor for each of `args`, each time with its `options` of Ray. Does not wait."""
        env = {**(forwarded_variables(os.environ) if self._head is None else {}), **env}
        groups = {"background": 1, "heartbeat": 1}
        remote = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups=groups)(Host)

        def launch(worker: int) -> Any:
            own = options(worker)
            variables = {"env_vars": {**env, **own.pop("env", {})}}
            process = remote.options(**own, runtime_env=variables).remote()
            path = [os.path.abspath(directory) for directory in sys.path]
            process.build.remote(path, cloudpickle.dumps((factory, args[worker])))
            return process

        group = WorkerGroup(name, len(args), launch, Actors(), self._timeouts)
        self._groups.append((group, placed))
        return group

    def _bundle(self, gpus: int) -> dict[str, float]:
        return {"CPU": 1, **({"GPU": gpus} if self.device == "cuda" and gpus else {})}

    def _bundles(self, engines: int) -> list[dict[str, float]]:
        """Return the resources of all ranks, and of so many engines."""
        size = gpus_per_engine(self.cfg, self.device)
        shares = self.cfg.rollout.colocate and size > 0
        ranks = self.cfg.trainer.num_workers * rank_groups(self.cfg)
        return [self._bundle(gpus=1)] * ranks + [self._bundle(size)] * (0 if shares else engines)

    def _place_separately(self, bundle: dict[str, float], count: int) -> list[PlacementGroup]:
        """Return `count` placement groups, on the nodes that Ray would choose for one group of `count` bundles. Each of
        them can be removed without the others."""
        if self._node_health is None or count == 1:
            return self._place([[bundle]] * count)
        (together,) = self._place([[bundle] * count])
        with SIGNALS.deferred():
            nodes = placement_group_table(together)["bundles_to_node_id"].values()
            remove_groups([together])
        return self._place([[bundle]] * count, [{NODE_ID: node} for node in sorted(nodes)])

    def _move_from_failed_node(self, placed: list[PlacementGroup], engine: int, bundle: dict[str, float]) -> None:
        """Place an engine whose node has failed on another node. Without capacity there, the engine waits. Ray itself
        moves a placement group only once it notices the failure, after about a minute."""
        if self._node_health is None:
            return
        excluded = self._excluded_nodes()
        with SIGNALS.deferred():
            current = placement_group_table(placed[engine])["bundles_to_node_id"].get(0)
            if current in {node.id for node in alive_nodes()} and current not in excluded:
                return
            remove_groups([placed[engine]])
            free = available_resources_per_node()
            with_capacity = {node for node in free if all(free[node].get(name, 0) >= bundle[name] for name in bundle)}
            node_ids: Collection[str] = excluded
            if with_capacity <= excluded.keys():
                LOG.warning("engine %d waits for capacity on another node", engine)
                # A failed node may be used once it answers again. Until then Ray must not schedule on it, although Ray
                # may believe that the node has free resources.
                recoverable = {node.id for node in self._node_health.failed() if node.address not in self._drained}
                node_ids = excluded.keys() - (recoverable - with_capacity)
            placed[engine] = create_placement_group([bundle], exclude_nodes(node_ids))

    def put(self, value: Any) -> Any:
        """Store `value` in the object store and return a reference. Actors receive the value, arrays without a copy.
        Raises WorkerError: Ray has died, or its object store is full."""
        self._timeouts.check_cluster()
        try:
            with SIGNALS.deferred():
                return ray.put(value)
        except RayError as error:
            self._timeouts.check_cluster()  # Ray may have died since the first check
            reason = f"Ray cannot store a batch: {one_line(str(error))}"
            raise WorkerError(reason, RESTART_HINT) from error

    def _place(
        self, groups: Sequence[list[dict[str, float]]], labels: Sequence[dict[str, str]] | None = None
    ) -> list[PlacementGroup]:
        """Return a placement group for each list of bundles, once Ray has scheduled all of them, on nodes with these
        labels, or on any that is not excluded."""
        self._timeouts.check_cluster()
        placed: list[PlacementGroup] = []
        requested, end = None, time.monotonic() + self._placement_timeout_s
        try:
            while time.monotonic() < end:
                allowed = labels or [exclude_nodes(self._excluded_nodes())] * len(groups)
                with SIGNALS.deferred():
                    if allowed != requested and all(map(is_settled, placed)):  # other nodes are usable
                        remove_groups(placed)
                        placed = list(map(create_placement_group, groups, allowed))
                        requested = allowed
                    if allowed == requested and (
                        all(group.wait(time_limits.POLL_INTERVAL_S) for group in placed)
                        or count_pending(placed) == 0  # answers may take longer than the wait
                    ):
                        return placed
                self._timeouts.check_cluster()
        except BaseException:
            with SIGNALS.deferred(), contextlib.suppress(RayError):
                remove_groups([] if self._failed_process() else placed)
            raise
        with SIGNALS.deferred():
            remove_groups(placed)
        raise UserError(
            f"trainer.ray_address={self.cfg.trainer.ray_address}: the cluster has no capacity for "
            f"{describe_bundles([bundle for bundles in groups for bundle in bundles])} within "
            f"{self._placement_timeout_s:g} s; jobs hold {describe_usage()}; raise "
            "trainer.placement_timeout_s if nodes have not started yet"
        )

    def _excluded_nodes(self) -> dict[str, str]:
        """Return the ids of the nodes on which no process is placed, each with the reason. A node is excluded while it
        fails (Ray itself may not have noticed yet), or if it is drained."""
        if self._node_health is None:
            return {}
        with SIGNALS.deferred():
            nodes = alive_nodes()
        self._node_health.watch(nodes)
        failed = self._node_health.check()
        drained = {node: self._drained[node.address] for node in nodes if node.address in self._drained}
        excluded = {**failed, **drained}
        for node, reason in excluded.items():
            if node.id not in self._reported:
                self._reported.add(node.id)
                LOG.warning("node %s is excluded: %s", node, reason)
                if reason == _DRAINED:
                    continue  # the user's choice is not an incident
                text, cause = f"node {node} is excluded: {reason}", reason if node in drained else "failed node"
                INCIDENTS.note("node", str(node), cause, "excluded", text, node=str(node))
        return {node.id: reason for node, reason in excluded.items()}

    @property
    def _placement_timeout_s(self) -> float:
        return self.cfg.trainer.placement_timeout_s or time_limits.PLACEMENT_S

    def _check_resources(self) -> None:
        t = self.cfg.trainer
        if self._node_health is not None and (t.min_world_size is not None or t.placement_timeout_s is not None):
            return  # `count_ranks` checks the capacity, or nodes have not started yet
        if self.device == "cuda":
            check_gpus(self.cfg, int(ray.cluster_resources().get("GPU", 0)))
            return
        slots, cpus = slots_needed(self.cfg), int(ray.cluster_resources().get("CPU", 0))
        if slots > cpus:
            raise UserError(
                f"trainer.num_workers={t.num_workers}: ranks and engines need {slots} CPUs, and the "
                f"cluster of trainer.ray_address={t.ray_address} has {cpus}"
            )


def _probe(address: str) -> None:
    """Raise UserError if no cluster answers at `address`, or if it requires a token. Ray would retry for a minute."""
    if address == "auto" or address.startswith("ray://"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"trainer.ray_address={address}: must be host:port, auto or null")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise UserError(
            f"trainer.ray_address={address}: no Ray cluster answers there ({error}); start one with "
            "`ray start --head`, or remove the key to run on this machine"
        ) from error
    try:
        with SIGNALS.deferred():
            ensure_token_if_auth_enabled(None, create_token_if_missing=False)
            GcsClient(address=address)
    except AuthenticationError as error:
        raise UserError(
            f"trainer.ray_address={address}: the cluster requires a token, and this process has none or a wrong one; "
            "set RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"
        ) from error


# ---------------------------------------------------------------------------------------------------
# Placement groups, and the nodes that they may use


def create_placement_group(bundles: list[dict[str, float]], label: dict[str, str]) -> PlacementGroup:
    return placement_group(bundles, strategy="PACK", bundle_label_selector=[label] * len(bundles) if label else None)


@contextlib.contextmanager
def demanded(bundles: list[dict[str, float]], label: dict[str, str]) -> Iterator[PlacementGroup]:
    """Ask for these bundles while the block runs, with a placement group. An autoscaler adds nodes for one that waits.
    `ray.autoscaler.sdk.request_resources` would outlive a killed job, and take what other jobs hold for capacity."""
    groups: list[PlacementGroup] = []
    try:
        with SIGNALS.deferred():  # its end raises
            groups.append(create_placement_group(bundles, label))
        yield groups[0]
    finally:
        with SIGNALS.deferred(), contextlib.suppress(RayError):
            remove_groups(groups)


def remove_groups(groups: Sequence[PlacementGroup]) -> None:
    """Remove placement groups. Pending ones have a moment: Ray would leak them (ray-project/ray#64693)."""
    end = time.monotonic() + time_limits.PLACEMENT_REMOVAL_S
    while not all(map(is_settled, groups)) and time.monotonic() < end:
        time.sleep(0.025)
    for group in groups:
        remove_placement_group(group)


def is_settled(group: PlacementGroup) -> bool:
    """Return whether Ray has scheduled the group, has found no capacity for it, or has removed it. Ray retries a group
    without capacity from time to time. No state shows that it is retrying at this moment."""
    table = placement_group_table(group)
    if not table or table["state"] in ("CREATED", "REMOVED"):
        return True
    scheduling = table["stats"]["scheduling_state"]
    return table["state"] != "PREPARED" and scheduling in ("NO_RESOURCES", "INFEASIBLE", "FAILED_TO_COMMIT_RESOURCES")


def exclude_nodes(node_ids: Collection[str]) -> dict[str, str]:
    # Ray would read a space after a comma as part of the next id.
    return {NODE_ID: f"!in({','.join(sorted(node_ids))})"} if node_ids else {}


def count_pending(groups: Sequence[PlacementGroup]) -> int:
    with SIGNALS.deferred():
        return sum(placement_group_table(group).get("state") != "CREATED" for group in groups)


def options_in(bundle: dict[str, float], group: PlacementGroup, index: int) -> dict[str, Any]:
    return {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }


def options_colocated_with(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return options that let an engine see the GPUs of some ranks. For Ray, the GPUs belong to the ranks."""
    return {
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ranks[0]["node"], soft=False),
        "env": {
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for rank in ranks for gpu in rank["gpus"]),
        },
    }


def alive_nodes() -> list[Node]:
    """Return the nodes that Ray believes to be alive. Ray needs about a minute to notice that a node has failed."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def describe_bundles(bundles: list[dict[str, float]]) -> str:
    each = " and ".join(f"{count:g} {resource}" for resource, count in bundles[0].items())
    return f"{len(bundles)} processes with {each} each" if len(bundles) > 1 else f"a process with {each}"


def describe_usage() -> str:
    """Return in words how much of the cluster all jobs together hold, as `3 of 4 CPU, 1 of 2 GPU`."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{total[k] - free.get(k, 0):g} of {total[k]:g} {k}" for k in ("CPU", "GPU") if k in total)
