"""Names of clusters, and the constants of hardware."""

from __future__ import annotations

import pytest

from trainer.errors import UserError
from trainer.metrics.timing import peak_flops
from trainer.plan.hardware import DEVICES, parse_cluster, this_machine


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "name"),
    [("8xH100", 1, 8, "H100"), ("4x8xh100", 4, 8, "H100"), ("A100", 1, 1, "A100"), ("128x8xB200", 128, 8, "B200")],
)
def test_a_cluster_is_named_by_nodes_gpus_and_kind(text, nodes, per_node, name):
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.per_node, cluster.device.name) == (nodes, per_node, name)
    assert cluster.gpus == nodes * per_node


def test_small_gpus_have_their_own_memory_and_links():
    large, small, card = (parse_cluster(f"8x{name}").device for name in ("A100", "A100-40GB", "RTX4090"))
    assert small.memory == pytest.approx(large.memory / 2, rel=0.01) and small.link == large.link
    assert small.flops_bfloat16 == large.flops_bfloat16 and small.bandwidth < large.bandwidth
    assert card.memory < 24 * 2**30 and card.link == card.pcie  # no NVLink
    assert card.flops_bfloat16 == 165e12


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("eight", "the GPU eight is not known; choose one of A100, A100-40GB, L40S, RTX4090, H100, H200, B200, or cpu"),
        ("8xV100", "the GPU V100 is not known"),
        ("0xH100", "plan.gpus=0xH100: is no cluster; write NUMBERxGPU"),
        ("8H100", "is no cluster"),
        ("xH100", "plan.gpus=xH100: is no cluster; write NUMBERxGPU"),
        ("x8xH100", "is no cluster"),
        ("8xxH100", "is no cluster"),
        ("", "is no cluster"),
        ("8x8x8xH100", "is no cluster"),
        ("8x5090", "the GPU 5090 is not known"),
    ],
)
def test_other_text_is_refused(text, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_cluster(text)


def test_constants_are_plausible():
    for device in DEVICES.values():
        assert device.flops_bfloat16 == peak_flops(device.name.replace("RTX", "RTX ")) > device.flops_float32
        assert device.bandwidth > device.link >= device.network and device.link >= device.pcie / 2
        assert 24e9 < device.memory < device.host_memory
        assert device.pcie < device.host_bandwidth < device.bandwidth / 10


def test_traffic_between_nodes_takes_the_network():
    cluster = parse_cluster("2x8xH100")
    assert cluster.bandwidth_between(8) == cluster.device.link
    assert cluster.bandwidth_between(2, stride=8) == cluster.device.network
    assert cluster.bandwidth_between(16) == 8 * cluster.device.network  # a ring through each NIC
    assert cluster.bandwidth_between(8, stride=2) == 4 * cluster.device.network
    slow = parse_cluster("2x8xL40S")
    assert slow.bandwidth_between(16) == slow.device.link  # inside the nodes


def test_a_part_of_a_node_has_a_part_of_its_memory():
    memory = [parse_cluster(text).device.host_memory for text in ("H100", "4x2xH100", "8xH100", "16xH100")]
    assert memory == [250e9, 500e9, 2000e9, 2000e9]


def test_this_machine_is_measured():
    device = this_machine()
    assert device.is_cpu and device.kind == "cpu"
    assert device.flops_float32 > 1e8 and device.bandwidth > 1e7 and device.memory > 1e9
    assert parse_cluster("cpu").device is device
