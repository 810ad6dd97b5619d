"""The network interface of this process's groups."""

from __future__ import annotations

from collections.abc import MutableMapping

import psutil


def use_network_of(address: str, environment: MutableMapping[str, str]) -> None:
    """Let process groups use the network interface with this address, unless the user has chosen another one.

    Args:
        environment: of the process.
    """
    for name, entries in psutil.net_if_addrs().items():
        if address in (entry.address for entry in entries):
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
            environment.setdefault("NCCL_SOCKET_IFNAME", name)
    environment.setdefault("VLLM_HOST_IP", address)
