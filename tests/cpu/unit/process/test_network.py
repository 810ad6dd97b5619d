"""The network interface of process groups."""

from __future__ import annotations

from trainer.process.network import use_network_of


def test_groups_use_the_interface_of_an_address_unless_the_user_has_chosen_another():
    environment: dict[str, str] = {}
    use_network_of("127.0.0.1", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    chosen = {"GLOO_SOCKET_IFNAME": "eth7", "VLLM_HOST_IP": "10.0.0.7"}
    environment = dict(chosen)
    use_network_of("127.0.0.1", environment)
    assert environment == {**chosen, "NCCL_SOCKET_IFNAME": "lo"}
    environment = {}
    use_network_of("203.0.113.1", environment)
    assert environment == {"VLLM_HOST_IP": "203.0.113.1"}, "no interface of this machine has this address"
