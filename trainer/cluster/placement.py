"""Places of processes on a Ray cluster: its placement groups, and the nodes that they may be on."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from trainer.cluster.node_health import Node
from trainer.cluster.resources import by_node
from trainer.process.signals import SIGNALS

NODE_ID = "ray.io/node-id"
"""The label of a node that has its id."""
_SETTLE_S = 10.0  # how long to wait until Ray has taken a place that is to be removed


def ask(bundles: list[dict[str, float]], label: dict[str, str]) -> PlacementGroup:
    """Ask Ray for a place for these bundles, on nodes with this label. Does not wait."""
    return placement_group(bundles, strategy="PACK", bundle_label_selector=[label] * len(bundles) if label else None)


def remove(places: Sequence[PlacementGroup]) -> None:
    """Give up places; first wait, but not for long, until Ray is not about to take one: it would never free it.

    See ray-project/ray#64693.
    """
    end = time.monotonic() + _SETTLE_S
    while not all(map(is_settled, places)) and time.monotonic() < end:
        time.sleep(0.025)
    for place in places:
        remove_placement_group(place)


def is_settled(place: PlacementGroup) -> bool:
    """Return whether Ray has taken the place, has found no room for it, or does not know it any more.

    Where there was no room, Ray tries again once in a while: no state tells that it does so at this moment.
    """
    known = placement_group_table(place)
    if not known or known["state"] in ("CREATED", "REMOVED"):
        return True
    found = known["stats"]["scheduling_state"]
    return known["state"] != "PREPARED" and found in ("NO_RESOURCES", "INFEASIBLE", "FAILED_TO_COMMIT_RESOURCES")


def elsewhere(left_out: Collection[str]) -> dict[str, str]:
    """Return the label of the nodes that are not left out."""
    # Ray takes a space for a part of the id that follows.
    return {NODE_ID: f"!in({','.join(sorted(left_out))})"} if left_out else {}


def waiting(places: Sequence[PlacementGroup]) -> int:
    """Return how many of these wait for room."""
    with SIGNALS.held():
        return sum(placement_group_table(place)["state"] != "CREATED" for place in places)


def options_in(bundle: dict[str, float], place: PlacementGroup, index: int) -> dict[str, Any]:
    """Return Ray's options of an actor in a place."""
    return {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=index),
    }


def options_beside(home: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return options that let an engine see the GPUs of some ranks. For Ray, the GPUs belong to the ranks."""
    return {
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(home[0]["node"], soft=False),
        "env": {
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for place in home for gpu in place["gpus"]),
        },
    }


def bundles_by_node(placement: PlacementGroup) -> list[int]:
    """Return the numbers of the bundles of a place, those on one node one after another (see `by_node`)."""
    with SIGNALS.held():
        return by_node(placement_group_table(placement)["bundles_to_node_id"])


def alive_nodes() -> list[Node]:
    """Return the nodes that Ray counts on. It takes about a minute to notice that one is lost."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def described(bundles: list[dict[str, float]]) -> str:
    """Return what these bundles are for, as a part of a sentence."""
    each = " and ".join(f"{count:g} {kind}" for kind, count in bundles[0].items())
    return f"{len(bundles)} processes with {each} each" if len(bundles) > 1 else f"a process with {each}"


def held() -> str:
    """Return how much of the cluster all jobs together hold, as a part of a sentence."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{total[k] - free.get(k, 0):g} of {total[k]:g} {k}" for k in ("CPU", "GPU") if k in total)
