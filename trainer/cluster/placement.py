"""Placement of processes on a Ray cluster: placement groups, and the nodes that they may use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from trainer.cluster.node_health import Node
from trainer.process import time_limits
from trainer.process.signals import SIGNALS

NODE_ID = "ray.io/node-id"  # the node label that contains the id of the node


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
            remove(groups)


def remove(groups: Sequence[PlacementGroup]) -> None:
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
