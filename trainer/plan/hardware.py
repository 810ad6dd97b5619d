"""The hardware that a plan computes with: constants of GPUs with their sources, and measured ones of this machine.

Speeds are those of data sheets: dense FLOP/s without sparsity, bytes per second in one direction. What passes reach of
them is `Device.reached`. The peaks of GPUs in bfloat16 are in `trainer.metrics.timing`, because runs count their
use of a GPU with them, too.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from trainer.errors import UserError
from trainer.files.shared_memory import free_space
from trainer.metrics.timing import peak_flops
from trainer.process.machine_limits import usable_cores, usable_memory

GB, GIB = 10**9, 2**30
CPU = "cpu"


@dataclass(frozen=True)
class Device:
    """A kind of GPU in a usual node, or a processor core of this machine."""

    name: str
    memory: int
    """Bytes that programs can take, of one GPU, or of the machine."""
    flops_float32: float
    flops_bfloat16: float
    bandwidth: float
    """Of its memory."""
    link: float
    """To the other GPUs of the node."""
    network: float
    """To GPUs of other nodes, for each GPU."""
    pcie: float
    """To the memory of the host."""
    host_memory: int
    """Bytes of a node's host. A node of fewer than eight GPUs is a part of such a node, and has a part of it."""
    host_bandwidth: float
    """Of the memory of a node's host, for each GPU."""

    @property
    def is_cpu(self) -> bool:
        return self.name == CPU

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`, as torch calls it."""
        return CPU if self.is_cpu else "cuda"

    @property
    def shared_memory(self) -> int:
        """Bytes that a run may put into `/dev/shm` of a node: on this machine, those that are free."""
        if not self.is_cpu:
            return int(SHARED_SHARE * self.host_memory)
        try:
            return free_space()
        except UserError:  # a run cannot use it
            return 0

    def reached(self, dtype: torch.dtype, has_experts: bool = False) -> float:
        """Return the FLOP/s that passes and decoding reach. `has_experts`: of ranks with a model that has experts."""
        share = _REACHED[self.kind] if not has_experts or self.is_cpu else _REACHED_WITH_EXPERTS
        return share * (self.flops_bfloat16 if dtype == torch.bfloat16 else self.flops_float32)


# Memory: GiB that torch reports as the total. float32: TFLOP/s without tensor cores. Then GB/s: of memory, of NVLink
# in one direction (L40S and RTX 4090: PCIe, where those of the RTX 4090 go through the host), of the network for each
# GPU (ConnectX-7 at 400 Gb/s; A100: HDR at 200 Gb/s; L40S: 100 Gb/s), and of PCIe in one direction (Gen 4: 32, Gen 5:
# 64, of which copies reach about 80 %). Then of the host of a node of eight: GB of memory, as in NVIDIA's DGX or in
# clouds' nodes with these GPUs, and GB/s of its two processors, eight channels each (A100: EPYC 7742 with DDR4-3200;
# H100 and H200: Xeon 8480C with DDR5-4800; B200: Xeon 8570 with DDR5-5600).
# Sources: NVIDIA's data sheets "H100 Tensor Core GPU", "H200 Tensor Core GPU", "A100 Tensor Core GPU", "L40S", "DGX
# B200", the user guides of DGX A100, H100, H200 and B200, and for the RTX 4090 the white paper "NVIDIA Ada GPU
# Architecture". Memory of the RTX 4090 and the A100 with 40 GB: by messages of torch.
# No vendor sells a usual node of RTX 4090, nor says which hosts L40S have: host and network are assumptions (RTX 4090:
# two EPYC as beside A100, half of its memory, one port of 25 Gb/s for the node; L40S: processors as beside H100).
_GPUS = {
    "A100": (79.2, 19.5, 2039, 300, 25, 26, 1000, 410),
    "A100-40GB": (39.4, 19.5, 1555, 300, 25, 26, 1000, 410),
    "L40S": (44.5, 91.6, 864, 26, 12.5, 26, 1000, 614),
    "RTX4090": (23.6, 82.6, 1008, 26, 0.4, 26, 500, 410),
    "H100": (79.1, 67, 3350, 450, 50, 51, 2000, 614),
    "H200": (139.8, 67, 4800, 450, 50, 51, 2000, 614),
    "B200": (178.3, 75, 8000, 900, 50, 51, 2000, 717),
}
_USUAL_GPUS = 8
"""GPUs of the nodes whose hosts are in the table. Clouds rent a part of such a node with a part of its memory."""


def _gpu(name: str) -> Device:
    memory, float32, bandwidth, link, network, pcie, host, host_bandwidth = _GPUS[name]
    bfloat16 = peak_flops(name.replace("RTX", "RTX "))
    assert bfloat16 is not None, name
    speeds = [GB * speed for speed in (bandwidth, link, network, pcie)]
    return Device(
        name, int(memory * GIB), float32 * 1e12, bfloat16, *speeds, int(host * GB), GB * host_bandwidth / _USUAL_GPUS
    )


DEVICES = {name.casefold(): _gpu(name) for name in _GPUS}

_REACHED = {CPU: 0.60, "cuda": 0.40}
"""Share of the peak FLOP/s that whole passes reach. CPU: of large square products, with all that is beside products;
by updates and log-prob passes of eight configs on two machines. GPU: what published runs of dense models with FSDP2 at
8k to 65k tokens reach (0.35 to 0.45). Measured on an H100 with a model of 1.7B parameters and 16,384 tokens: 0.449 in
the log-prob pass, 0.408 in the update."""
_REACHED_WITH_EXPERTS = 0.15
"""The same of GPUs for models with experts. Published: 0.15 for GPT-OSS 120B in bfloat16 on 64 H100 (153 TFLOP/s), 0.10
on 64 B200 (NVIDIA Megatron Bridge, "Performance", 25.11), and 0.135 to 0.21 for DeepSeek-V3 16B with FSDP2 and torch's
grouped products on 8 B200 (pytorch/torchtitan#1993). Not measured with our ranks."""
REACHED_BANDWIDTH = 0.7
"""Share of the bandwidth of links and memory that collectives, copies and decoding reach."""
BLOCK_S = {CPU: 2e-3, "cuda": 2.1e-3}
"""The least seconds of a block in a forward pass, because Python starts its kernels; a backward pass takes 1.4 times as
long. CPU: with six blocks of 64 hidden dimensions. GPU: from an H100 whose host has slow cores, with Qwen3-0.6B."""
GATHER_S = {CPU: 1e-3, "cuda": 1.1e-3}
"""The same of gathering a block with FSDP2."""
GLOO = 12
"""How many times slower than copying gloo is, which sends through sockets. Measured between two ranks."""
LATENCY_S = {CPU: 1e-4, "cuda": 2e-5}
"""Seconds that a collective takes at least."""
DECODE_S = {CPU: (1e-3, 4e-4, 4e-5), "cuda": (3e-3, 0.0, 1e-5)}
"""Seconds of Python in a decoding step: of each step, of each block of the model, and of each sequence. CPU: vLLM 0.32,
2 to 128 sequences, between a fast and a slow core. GPU: an estimate, for vLLM with CUDA graphs."""
LOGIT_BYTES = {CPU: 218, "cuda": 16}
"""Bytes that an engine reads and writes for each sequence and token of the vocabulary, to sample a token. CPU: by
vocabularies of 512 to 32,768. GPU: an estimate."""
SYNC_S = {CPU: 0.02, "cuda": 0.0}
"""Seconds that weights on their way to engines take at least."""
ROW_S = {CPU: 1.5e-4, "cuda": 2e-5}
"""Seconds of the driver for each completion: rows, calls of the ranks, and on CPU rewards, which share its cores."""
OTHER = 0.03
"""Share of a step in which the driver works: rows, advantages, logs. Measured with the demo (benchmarks/history.md)."""
RECOMPUTED = {"none": 0.0, "selective": 0.1, "full": 1.0}
"""Share of a forward pass that a backward pass computes again."""
COMPILED_KEEPS = {"none": 0.66, "selective": 0.91, "full": 1.0}
"""Share of a block's activations that stay for the backward pass if the block is compiled: the compiler computes cheap
ones again. Measured in bfloat16 with blocks of four shapes (Qwen3 and Llama) on CPU: 0.62 to 0.70 without recomputation
and 0.90 to 0.92 with `selective`. On an H100: 0.67 for Qwen3-0.6B without, 0.83 for Qwen3-1.7B with `selective`."""
OPTIMIZER_BYTES = 28
"""Bytes that AdamW reads and writes for each number: weight, gradient and two moments."""
CONTEXT_BYTES = int(1.0 * GIB)
"""GPU memory of the CUDA context, of cuBLAS' workspaces and of NCCL's buffers: a rank's and an engine's, each. Context
and workspaces of a rank on an H100 take 0.8 GB."""
GRAPHS_BYTES = 2**30
"""What CUDA graphs take, which vLLM captures unless `rollout.engine_args.enforce_eager` is set: an estimate."""
PROCESS_BYTES = {CPU: int(0.6 * GB), "cuda": int(3.0 * GB)}
"""Host memory of a rank or an engine without tensors: Python, torch, CUDA's libraries. CPU: measured. GPU: an
estimate."""
DRIVER_BYTES = int(1.5 * GB)
"""The same of the driver, Ray and its object store."""
SHARED_SHARE = 0.5
"""Share of a host's memory that its `/dev/shm` may take: Linux's default for a tmpfs (tmpfs(5), `size`). Containers
have 64 MB unless they are given more (`docker run --shm-size`)."""
FRAGMENTATION = 0.05
"""Share of the tensors' memory by which torch's allocator exceeds it, on GPUs."""
STORAGE = 2 * GB
"""Bytes per second that storage takes from each node: an assumption. Object stores reach it, disks may not."""


def prefill_tokens(device: Device) -> int:
    """Return the tokens of a prefill batch of vLLM, by its defaults for GPUs (`EngineArgs.get_batch_defaults`)."""
    return 16384 if device.memory >= 70 * GIB and device.name != "A100" and not device.is_cpu else 8192


@dataclass(frozen=True)
class Cluster:
    """The machines to plan for."""

    nodes: int
    per_node: int
    """GPUs of a node. CPU: the number of cores."""
    device: Device

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        if self.device.is_cpu:
            return f"this machine, {self.per_node} cores"
        return f"{f'{self.nodes} nodes of ' if self.nodes > 1 else ''}{self.per_node} {self.device.name}"

    def bandwidth_between(self, ranks: int, stride: int = 1) -> float:
        """Return the bytes per second that each of `ranks` ranks sends to the next one in a ring.

        NCCL has a ring for each NIC, so that each node of the ranks sends through those of all its ranks at once.
        """
        if self.nodes == 1 or 1 + (ranks - 1) * stride <= self.per_node:
            return self.device.link
        return min(self.device.link, self.device.network * max(1, self.per_node // stride))


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that `plan.gpus` names.

    Raises:
        UserError: it names none.
    """
    if text.casefold() == CPU:
        return Cluster(1, usable_cores(), this_machine())
    # No GPU has a name that begins with x, so an x there follows an empty number: xH100, 8xxH100.
    found = re.fullmatch(r"(?:(\d{1,6})x)?(?:(\d{1,6})x)?(?![xX])([A-Za-z][\w -]*|\d{4})", text.strip())
    nodes, per_node = (int(found[1] or 1), int(found[2] or 1)) if found else (0, 0)
    if found and not found[2]:
        nodes, per_node = 1, nodes
    if not found or nodes < 1 or per_node < 1:
        raise UserError(f"plan.gpus={text}: is no cluster; write NUMBERxGPU (8xH100), NODESxNUMBERxGPU, or cpu")
    device = DEVICES.get(found[3].casefold())
    if device is None:
        raise UserError(f"plan.gpus={text}: the GPU {found[3]} is not known; choose one of {', '.join(_GPUS)}, or cpu")
    share = min(1.0, per_node / _USUAL_GPUS)
    return Cluster(nodes, per_node, replace(device, host_memory=int(share * device.host_memory)))


@functools.cache
def this_machine() -> Device:
    """Return a core of this machine, by a measurement of a second."""
    memory = usable_memory()
    source, target = torch.zeros(2, 2**26, dtype=torch.uint8)
    copying = 2 * len(source) / _shortest(lambda: target.copy_(source))
    gloo = copying / GLOO
    products = [_product_speed(dtype) for dtype in (torch.float32, torch.bfloat16)]
    return Device(CPU, memory, *products, copying, gloo, gloo, copying, memory, copying)


def _product_speed(dtype: torch.dtype) -> float:
    """Return the FLOP/s of products of square matrices on one core.

    A factor is transposed, as that of a linear layer: without products of bfloat16 in hardware, others take ten times
    as long. In that case they are measured with small matrices alone.
    """
    speed = 0.0
    for side in (256, 512, 1024):
        matrix = torch.ones(side, side, dtype=dtype)
        seconds = _shortest(functools.partial(torch.mm, matrix, matrix.t()))
        speed = max(speed, 2 * side**3 / seconds)
        if seconds > 0.02:
            break
    return speed


def _shortest(compute: Callable[[], object], seconds: float = 0.1) -> float:
    """Return the shortest processor time of calls within `seconds`: other programs only make them longer."""
    compute()  # the first call loads the library
    times, end = [], time.process_time() + seconds
    while not times or time.process_time() < end:
        begin = time.process_time()
        compute()
        times.append(time.process_time() - begin)
    return min(times)
