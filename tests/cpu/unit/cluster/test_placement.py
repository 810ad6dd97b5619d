"""Placement on a Ray cluster, as far as no cluster is needed: labels, options and words."""

from __future__ import annotations

from trainer.cluster.ray_cluster import NODE_ID, describe_bundles, exclude_nodes, options_colocated_with


def test_all_nodes_but_the_excluded_ones_have_the_label():
    """Sorted and without spaces: Ray would read a space as a part of the next id."""
    assert exclude_nodes([]) == {}
    assert exclude_nodes({"b", "a"}) == {NODE_ID: "!in(a,b)"}


def test_an_engine_on_the_gpus_of_ranks_sees_them_and_takes_none_of_ray():
    ranks = [{"node": "ab" * 28, "gpus": ["3"]}, {"node": "ab" * 28, "gpus": ["1", "2"]}]
    options = options_colocated_with(ranks)
    assert (options["num_cpus"], options["num_gpus"]) == (0, 0)
    assert options["scheduling_strategy"].node_id == "ab" * 28 and not options["scheduling_strategy"].soft
    assert options["env"]["CUDA_VISIBLE_DEVICES"] == "3,1,2"
    assert options["env"]["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1", "or Ray would hide them"


def test_bundles_in_words():
    assert describe_bundles([{"CPU": 1}]) == "a process with 1 CPU"
    assert describe_bundles([{"CPU": 1.5, "GPU": 1}] * 3) == "3 processes with 1.5 CPU and 1 GPU each"
