"""Start or join Ray, and place ranks and engines on it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.state import available_resources_per_node
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer.cluster import placement
from trainer.cluster.actors import launch_actors
from trainer.cluster.gpu_health import GpuHealthCheck
from trainer.cluster.node_health import NodeHealth
from trainer.cluster.ray_head import LocalRay
from trainer.cluster.ray_tmpdir import temporary_directory
from trainer.cluster.resources import FindHome, check_gpus, fitting_ranks, forwarded_variables, rank_groups
from trainer.cluster.timeouts import patience_of
from trainer.cluster.worker_groups import WorkerGroup, stacks_of
from trainer.config import Config
from trainer.errors import RESTART_HINT, UserError, WorkerError, one_line
from trainer.process.failure_log import INCIDENTS, INFRASTRUCTURE, Incident
from trainer.process.signals import SIGNALS, Stopped
from trainer.process.startup import stage
from trainer.process.xid import gpu_lines

LOG = logging.getLogger(__name__)

_PLACEMENT_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.5  # between two checks of signals while Ray places processes
_ROOM_S = 10.0  # how long to wait for room for all ranks before fewer are started
_KERNEL_S = 20.0  # how long to wait for what the kernels of the nodes say
_LOSSES = 2  # a node that was lost so often is not used again
_SHUTDOWN_S = 30.0  # how long to wait for `ray.shutdown`, which may hang after its processes have died
_DRAINED = "trainer.excluded_nodes names it"
RAY_LOGS = "ray_logs"
"""Directory below the run directory for Ray's logs of a job that failed."""
CPU_OBJECT_STORE_BYTES = 512 * 2**20  # batches on CPU are small, and Ray's default is a third of the memory


class RayCluster:
    """Ray for one run: `with RayCluster(cfg, device) as cluster`. All processes that it has started end with it.

    Args:
        device: `cuda` or `cpu`.
    """

    object_store_bytes = CPU_OBJECT_STORE_BYTES

    def __init__(self, cfg: Config, device: str):
        self.cfg = cfg
        self.device = device
        self._groups: list[tuple[WorkerGroup, list[PlacementGroup]]] = []
        self._reported: set[str] = set()  # ids of nodes that are left out
        self._local: LocalRay | None = None  # None: another cluster is joined
        self._watch: NodeHealth | None = None  # None: Ray runs on this machine alone
        self._drained: dict[str, str] = dict.fromkeys(cfg.trainer.excluded_nodes, _DRAINED)  # addresses, with reasons
        self._patience = patience_of(cfg.trainer, self._lost, self._lost_nodes)
        self.examine = GpuHealthCheck(self._gpu_lines, self._drained.setdefault).examine

    def __enter__(self) -> RayCluster:
        address = self.cfg.trainer.ray_address
        try:
            if address is None:
                slots = max(os.cpu_count() or 1, self._slots_needed())
                directory = temporary_directory(CPU_OBJECT_STORE_BYTES)
                store = CPU_OBJECT_STORE_BYTES if self.device == "cpu" else None
                with SIGNALS.held():  # `__exit__` needs `_local` to end Ray
                    self._local = LocalRay(directory, slots, store)
                with stage("starting Ray"):
                    address = self._local.connect()
            else:
                _probe(address)
            self._join(address)
            if self._local is None:
                self._watch = NodeHealth(self.cfg.trainer.node_timeout_s, ray.util.get_node_ip_address())
                self._watch.watch(placement.alive_nodes())
            self._check_resources()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def _join(self, address: str) -> None:
        try:
            # On another thread: on the main one Ray would install a handler for SIGTERM that ends the process.
            with SIGNALS.held(), SIGNALS.blocked(), ThreadPoolExecutor(1) as thread:
                thread.submit(ray.init, address=address, log_to_driver=False, logging_level="ERROR").result()
                SIGNALS.reinstall()  # Ray's C++ part has installed some all the same
        except (ConnectionError, RuntimeError, ValueError) as error:
            if self._local is not None:
                raise
            reason = str(error).splitlines()[0]
            raise UserError(f"trainer.ray_address={self.cfg.trainer.ray_address}: {reason}") from error

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        with SIGNALS.held():
            if self._watch is not None:
                self._watch.close()
            if not self._lost():
                for group, _ in list(self._groups):
                    # If the cluster itself has failed, its actors and placement groups are already gone.
                    with contextlib.suppress(RayError):
                        self.release(group)
            if self._local is not None and kind is not None and not issubclass(kind, (UserError, Stopped)):
                self._local.save_logs(os.path.join(self.cfg.trainer.run_dir, RAY_LOGS))
            if self._local is not None:
                # Before `ray.shutdown`, which does not wait for the end of the processes: the next job may need their
                # memory, above all on a GPU.
                self._local.close()
            with SIGNALS.blocked():
                if not ends_within(ray.shutdown, _SHUTDOWN_S):
                    LOG.warning("Ray has not shut down within %g s; the job ends without waiting", _SHUTDOWN_S)
                SIGNALS.reinstall()  # Ray has set SIGTERM to its default, which ends the process

    def _lost(self) -> str | None:
        part = self._local.lost() if self._local is not None else None
        return part and f"Ray's {part}"

    def _lost_nodes(self) -> dict[str, str]:
        lost = self._watch.lost() if self._watch is not None else {}
        return {node.address: reason for node, reason in lost.items()}

    def meeting_place(self, group: WorkerGroup, port: int = 0) -> str:
        """Return the address at which the members of a process group meet. The first rank of `group` is its first rank.

        Args:
            port: port on the machine of that rank. 0: a free port, or a file if all members are on this machine.
        """
        if self._local is not None and not port:
            return f"file://{self._local.directory}/store-{secrets.token_hex(8)}"
        return group.call_one(0, "find_address", group.where()[0]["host"], port)

    def release(self, group: WorkerGroup) -> None:
        """End the processes of the group and free their resources."""
        entry = next(entry for entry in self._groups if entry[0] is group)
        self._groups.remove(entry)
        group.kill()
        placement.remove(entry[1])

    def count_ranks(self) -> int:
        """Return how many ranks to start: `trainer.num_workers`, or fewer if there is no room for so many.

        Raises:
            UserError: there is no room for `trainer.min_world_size`.
        """
        t = self.cfg.trainer
        if self._watch is None or t.min_world_size is None:
            return t.num_workers
        engines = next((places for group, places in self._groups if group.name == "engine"), None)
        started = time.monotonic()
        while True:
            left_out = self._left_out()
            with SIGNALS.held():
                free = [free for node, free in available_resources_per_node().items() if node not in left_out]
            homeless = self.cfg.num_engines if engines is None else placement.waiting(engines)
            count, waited_s = fitting_ranks(self.cfg, self.device, free, homeless), time.monotonic() - started
            if count == t.num_workers or count >= t.min_world_size and waited_s > _ROOM_S:
                break
            if waited_s > self._placement_timeout_s:
                raise UserError(
                    f"trainer.min_world_size={t.min_world_size}: the cluster of trainer.ray_address={t.ray_address} "
                    f"has room for {count} ranks; other jobs hold {placement.held()}"
                )
            SIGNALS.check()
            time.sleep(_POLL_INTERVAL_S)
        if count < t.num_workers:
            LOG.warning("the cluster has room for %d of %d ranks", count, t.num_workers)
        return count

    def launch_ranks(self, name: str, factory: Any, env: dict[str, str], count: int | None = None) -> WorkerGroup:
        """Start `count` actors that host `factory(rank, world_size, device)`, with a GPU or CPU each."""
        count = count or self.cfg.trainer.num_workers
        bundle = self._bundle(gpus=1)
        (place,) = self._place([[bundle] * count])
        options = [placement.options_in(bundle, place, index) for index in placement.bundles_by_node(place)]
        args = [(rank, count, self.device) for rank in range(count)]
        return self._keep(self._launch(name, factory, args, options.__getitem__, env), [place])

    def launch_engines(
        self, factory: Any, args: tuple, env: dict[str, str], home: FindHome | None = None
    ) -> WorkerGroup:
        """Start `rollout.num_engines` actors that host `factory(*args)` (see `worker_groups.Cluster`)."""
        r = self.cfg.rollout
        places: list[PlacementGroup] = []
        if home is not None:

            def options(engine: int) -> dict[str, Any]:
                return placement.options_beside(home(engine))
        else:
            bundle, started = self._bundle(r.tensor_parallel_size), set[int]()
            places = self._place_apart(bundle, r.num_engines)

            def options(engine: int) -> dict[str, Any]:
                if engine in started:
                    self._leave_lost_node(places, engine, bundle)
                started.add(engine)
                return placement.options_in(bundle, places[engine], 0)

        return self._keep(self._launch("engine", factory, [args] * r.num_engines, options, env), places)

    def has_room(self, group: WorkerGroup) -> bool:
        """Return whether a member of `group` has a place. One whose node was lost may have to wait for a place."""
        places = next(places for kept, places in self._groups if kept is group)
        return not places or placement.waiting(places) < len(places)

    def _gpu_lines(self, seconds: float) -> dict[str, list[str]]:
        """Return what the kernel of each node says of its GPUs (see `gpu_lines`), of the nodes that answer in time."""
        if self._watch is None or self.device != "cuda":
            return {ray.util.get_node_ip_address(): gpu_lines(seconds)}
        lost, ask = self._lost_nodes(), ray.remote(num_cpus=0, max_retries=0)(gpu_lines)
        answers = {}
        with SIGNALS.held():
            for node in placement.alive_nodes():
                if node.address not in lost:
                    place = NodeAffinitySchedulingStrategy(node.id, soft=False)
                    answers[ask.options(scheduling_strategy=place).remote(seconds)] = node.address
            done, _ = ray.wait(list(answers), num_returns=len(answers), timeout=_KERNEL_S)
        lines = {}
        for answer in done:
            with SIGNALS.held(), contextlib.suppress(RayError):
                lines[answers[answer]] = ray.get(answer)
        return lines

    def stacks(self) -> dict[str, str]:
        """Return the stacks of all processes, by name. Any thread may ask."""
        return stacks_of([group for group, _ in self._groups])

    def _launch(
        self,
        name: str,
        factory: Any,
        args: list[tuple],
        options: Callable[[int], dict[str, Any]],
        env: dict[str, str],
    ) -> WorkerGroup:
        forwarded = forwarded_variables(os.environ) if self._local is None else {}
        return launch_actors(name, factory, args, options, {**forwarded, **env}, self._patience)

    def _bundle(self, gpus: int) -> dict[str, float]:
        """Return what a place has: a CPU and, on GPUs, so many GPUs."""
        return {"CPU": 1, **({"GPU": gpus} if self.device == "cuda" else {})}

    def _place_apart(self, bundle: dict[str, float], count: int) -> list[PlacementGroup]:
        """Return `count` places that can be given up one by one, on the nodes that one placement group would have."""
        if self._watch is None or count == 1:
            return self._place([[bundle]] * count)
        (together,) = self._place([[bundle] * count])
        with SIGNALS.held():
            nodes = placement_group_table(together)["bundles_to_node_id"].values()
            placement.remove([together])
        return self._place([[bundle]] * count, [{placement.NODE_ID: node} for node in sorted(nodes)])

    def _leave_lost_node(self, places: list[PlacementGroup], engine: int, bundle: dict[str, float]) -> None:
        """Give an engine whose node is lost a place on another node. Without room there, it waits for room.

        Ray itself would move the place once it notices the loss, after about a minute.
        """
        if self._watch is None:
            return
        left_out = self._left_out()
        with SIGNALS.held():
            node = placement_group_table(places[engine])["bundles_to_node_id"].get(0)
            if node in {one.id for one in placement.alive_nodes()} and node not in left_out:
                return
            placement.remove([places[engine]])
            free = available_resources_per_node()
            have_room = {node for node in free if all(free[node].get(name, 0) >= bundle[name] for name in bundle)}
            excluded: Collection[str] = left_out
            if have_room <= left_out.keys():
                LOG.warning("engine %d waits for room on another node", engine)
                # One that answers again may be taken, but Ray must not take it before: it may believe that it has room.
                excluded = left_out.keys() - (self._may_return() - have_room)
            places[engine] = placement.ask([bundle], placement.elsewhere(excluded))

    def put(self, value: Any) -> Any:
        """Store `value` in the object store and return a reference. Actors get the value, and arrays without a copy.

        Raises:
            WorkerError: Ray has died, or its object store is full.
        """
        self._patience.check_cluster()
        try:
            with SIGNALS.held():
                return ray.put(value)
        except RayError as error:
            self._patience.check_cluster()  # it may have died since
            reason = f"Ray cannot store a batch: {one_line(str(error))}"
            raise WorkerError(reason, RESTART_HINT) from error

    def _keep(self, group: WorkerGroup, places: list[PlacementGroup]) -> WorkerGroup:
        self._groups.append((group, places))
        return group

    def _place(
        self, groups: Sequence[list[dict[str, float]]], labels: Sequence[dict[str, str]] | None = None
    ) -> list[PlacementGroup]:
        """Return a placement group for each list of bundles, when all have their place.

        Args:
            labels: of the nodes of each group. None: of any node that is not left out.
        """
        self._patience.check_cluster()
        places: list[PlacementGroup] = []
        asked, end = None, time.monotonic() + self._placement_timeout_s
        try:
            while time.monotonic() < end:
                wanted = labels or [placement.elsewhere(self._left_out())] * len(groups)
                with SIGNALS.held():
                    if wanted != asked and all(map(placement.is_settled, places)):  # a node was lost, or answers again
                        placement.remove(places)
                        places = [placement.ask(bundles, label) for bundles, label in zip(groups, wanted, strict=True)]
                        asked = wanted
                    if wanted == asked and all(place.wait(_POLL_INTERVAL_S) for place in places):
                        return places
                self._patience.check_cluster()
        except BaseException:
            with SIGNALS.held(), contextlib.suppress(RayError):
                placement.remove([] if self._lost() else places)
            raise
        with SIGNALS.held():
            placement.remove(places)
        raise UserError(
            f"trainer.ray_address={self.cfg.trainer.ray_address}: the cluster has no room for "
            f"{placement.described([bundle for bundles in groups for bundle in bundles])} within "
            f"{self._placement_timeout_s:g} s; jobs hold {placement.held()}; raise trainer.placement_timeout_s if "
            "nodes are still to start"
        )

    def _may_return(self) -> set[str]:
        """Return the ids of the nodes that are left out only as long as they do not answer."""
        unsteady = {node for node in self._watch.lost() if self._watch.losses(node.address) >= _LOSSES}
        return {node.id for node in self._watch.lost().keys() - unsteady if node.address not in self._drained}

    def _left_out(self) -> dict[str, str]:
        """Return the ids of the nodes on which nothing is placed, each with the reason.

        They are lost, which Ray itself has not noticed yet, were lost more than once, or the config drains them.
        """
        if self._watch is None:
            return {}
        with SIGNALS.held():
            nodes = placement.alive_nodes()
        self._watch.watch(nodes)
        reasons = self._watch.look()
        unsteady = {node: f"lost {_LOSSES} times" for node in nodes if self._watch.losses(node.address) >= _LOSSES}
        drained = {node: self._drained[node.address] for node in nodes if node.address in self._drained}
        left_out = {**unsteady, **reasons, **drained}
        for node, reason in left_out.items():
            if node.id not in self._reported:
                self._reported.add(node.id)
                LOG.warning("node %s is left out: %s", node, reason)
                if reason == _DRAINED:
                    continue  # no incident
                fact, cause = f"node {node} is left out: {reason}", reason if node in drained else "lost node"
                INCIDENTS.record(
                    Incident(INCIDENTS.step, "node", str(node), str(node), INFRASTRUCTURE, cause, "left out", 0.0, fact)
                )
        return {node.id: reason for node, reason in left_out.items()}

    @property
    def _placement_timeout_s(self) -> float:
        return self.cfg.trainer.placement_timeout_s or _PLACEMENT_TIMEOUT_S

    def _slots_needed(self) -> int:
        return self.cfg.trainer.num_workers * rank_groups(self.cfg) + self.cfg.num_engines

    def _check_resources(self) -> None:
        t = self.cfg.trainer
        if self._watch is not None and (t.min_world_size is not None or t.placement_timeout_s is not None):
            return  # `count_ranks` looks, or nodes are still to start
        if self.device == "cuda":
            check_gpus(self.cfg, int(ray.cluster_resources().get("GPU", 0)))
            return
        slots, cpus = self._slots_needed(), int(ray.cluster_resources().get("CPU", 0))
        if slots > cpus:
            raise UserError(
                f"trainer.num_workers={t.num_workers}: ranks and engines need {slots} CPUs, the "
                f"cluster of trainer.ray_address={t.ray_address} has {cpus}"
            )


def ends_within(action: Callable[[], object], limit_s: float) -> bool:
    """Call `action` on another thread, and return whether it has ended after `limit_s`."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def _probe(address: str) -> None:
    """Raise UserError if no cluster answers at `address`, or if it wants a token. Ray itself retries for a minute."""
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
            "`ray start --head`, or leave the key out to run on this machine"
        ) from error
    try:
        with SIGNALS.held():
            ensure_token_if_auth_enabled(None, create_token_if_missing=False)
            GcsClient(address=address)
    except AuthenticationError as error:
        raise UserError(
            f"trainer.ray_address={address}: the cluster wants a token, and this process has none or another one; set "
            "RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"
        ) from error
