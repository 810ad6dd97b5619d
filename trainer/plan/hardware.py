"""The constants of the hardware that a plan computes with, and their sources; and the measured ones of this machine.

Speeds are those of data sheets: dense FLOP/s without sparsity, bytes per second in one direction. What passes reach of
them is `Device.reached`. The peaks of GPUs in bfloat16 are in `trainer.metrics.throughput`, because runs count their
use of a GPU with them, too.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.mkldnn import to_mkldnn

from trainer.errors import UserError
from trainer.files.shared_memory import free_space
from trainer.metrics.throughput import peak_flops
from trainer.process.machine_limits import usable_cores, usable_memory

GB, GIB = 10**9, 2**30
CPU = "cpu"


@dataclass(frozen=True)
class Device:
    """A kind of GPU and its place in a usual node, or a processor core of this machine."""

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
    flops_packed: float = 0.0
    """Of products of float32 on CPU with packed weights, as vLLM computes them. 0: not measured."""
    slowness: float = 1.0
    """How many times as long the calls of small operators from Python take as on the core of `PYTHON_CALL_S`. On GPUs
    the constants are those of their hosts."""
    host_bandwidth: float = 0.0
    """Of the memory of a node's host, for each GPU."""
    shared_memory: int | None = None
    """Bytes of a node's `/dev/shm`, on this machine those that are free. None: as much as Linux gives it."""

    @property
    def shared_limit(self) -> int:
        """Bytes that a run may put into the shared memory of a node."""
        return int(SHARED_SHARE * self.host_memory) if self.shared_memory is None else self.shared_memory

    @property
    def is_cpu(self) -> bool:
        return self.name == CPU

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`, as torch calls it."""
        return CPU if self.is_cpu else "cuda"

    def reached(self, dtype: torch.dtype, has_experts: bool = False) -> float:
        """Return the FLOP/s that forward and backward passes and decoding reach.

        Args:
            has_experts: they are the passes of ranks with a model that has experts.
        """
        by_gpus = _REACHED_WITH_EXPERTS if has_experts else _REACHED_BY_GPUS
        return _REACHED.get((self.name, dtype), by_gpus) * self.flops(dtype)

    def flops(self, dtype: torch.dtype) -> float:
        """Return the peak FLOP/s of matrix products."""
        return self.flops_bfloat16 if dtype == torch.bfloat16 else self.flops_float32


def _gpu(
    name: str,
    memory: float,
    float32: float,
    bandwidth: float,
    link: float,
    network: float,
    pcie: float,
    host: int,
    host_bandwidth: float,
) -> Device:
    flops = peak_flops(name.replace("RTX", "RTX "))
    assert flops is not None, name
    speeds = [GB * speed for speed in (bandwidth, link, network, pcie)]
    return Device(
        name,
        int(memory * GIB),
        float32 * 1e12,
        flops,
        *speeds,
        host * GB,
        host_bandwidth=host_bandwidth * GB / _USUAL_GPUS,
    )


_USUAL_GPUS = 8
"""GPUs of the nodes whose hosts are in the table. Clouds rent a part of such a node with a part of its memory."""

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
DEVICES = {
    device.name.casefold(): device
    for device in (
        _gpu("A100", 79.2, 19.5, 2039, 300, 25, 26, 1000, 410),
        _gpu("A100-40GB", 39.4, 19.5, 1555, 300, 25, 26, 1000, 410),
        _gpu("L40S", 44.5, 91.6, 864, 26, 12.5, 26, 1000, 614),
        _gpu("RTX4090", 23.6, 82.6, 1008, 26, 0.4, 26, 500, 410),
        _gpu("H100", 79.1, 67, 3350, 450, 50, 51, 2000, 614),
        _gpu("H200", 139.8, 67, 4800, 450, 50, 51, 2000, 614),
        _gpu("B200", 178.3, 75, 8000, 900, 50, 51, 2000, 717),
    )
}
_SAME = {"a100-80gb": "a100", "h100-80gb": "h100", "h200-141gb": "h200", "b200-180gb": "b200", "4090": "rtx4090"}
"""Other names of GPUs."""

_REACHED = {(CPU, torch.float32): 1.0, (CPU, torch.bfloat16): 0.92}
_REACHED_BY_GPUS = 0.40
"""Share of the peak FLOP/s. CPU: of products in updates of a model with 384 hidden dimensions beside those of large
squares, without the time of the bytes of their factors and results, which counts apart like the rest of a pass;
measured on one core with AVX-512 and its products of bfloat16, in processor time of each operator. GPU: of whole
passes, what published runs of dense models with FSDP2 at 8k to 65k tokens reach (0.35 to 0.45). Measured on an H100
with a model of 1.7B parameters and 16,384 tokens: 0.449 in the log-prob pass, 0.408 in the update."""
_REACHED_WITH_EXPERTS = 0.15
"""The same of GPUs for models with experts. Published: 0.15 for GPT-OSS 120B in bfloat16 on 64 H100 (153 TFLOP/s), 0.10
on 64 B200 (NVIDIA Megatron Bridge, "Performance", 25.11), and 0.135 to 0.21 for DeepSeek-V3 16B with FSDP2 and torch's
grouped products on 8 B200 (pytorch/torchtitan#1993). Not measured with our ranks."""
REACHED_PACKED = 0.55
"""Share of `Device.flops_packed` that vLLM's products reach on CPU, or all of it where torch's `mm` is faster. Measured
with 32 and 128 sequences and 384 hidden dimensions: 131 to 200 GFLOP/s, where large squares of packed weights reach 150
to 250 and those of torch's `mm` 110; and 73 GFLOP/s, where they reach 73 and those of `mm` 96."""
PACKED_BFLOAT16 = 0.63
"""Time of these products in bfloat16, by that in float32. Measured in one process, an engine of each in turns: what
a sequence more adds to a decoding step of vLLM 0.32, without `DecodeStep.sequence` and `DecodeStep.logit`, with 32 to
128 sequences and three shapes of 384 hidden dimensions (0.56, 0.65, 0.68). Large squares gain much more (0.23)."""
CPU_ATTENTION = {torch.float32: 0.42, torch.bfloat16: 0.27}
"""Share of the peak FLOP/s in float32 that attention reaches on CPU, forward and backward passes together, of the FLOPs
that a causal mask leaves. Measured like the products: torch's kernel computes masked scores, too, and hardly gains from
bfloat16."""
REACHED_BANDWIDTH = 0.7
"""Share of the bandwidth of links and memory that collectives, copies and decoding reach."""
GPU_BLOCK_S = {"scores": 2.1e-3, "update": 5.0e-3}
"""The least seconds of a compiled block in a pass without gradients, and in forward and backward pass, because Python
starts the kernels. From an H100 whose host has slow cores, with Qwen3-0.6B in micro-batches of 8,448 tokens: 112 blocks
took 0.363 s and, without the optimizer, 0.81 s with `GPU_GATHER_S`; their kernels took 0.15 s and 0.48 s. A block that
is not compiled starts more kernels; how much longer that takes is not known."""
GPU_GATHER_S = 1.1e-3
"""The same of gathering a block. In that profile it was a third of the time of a pass without gradients."""
PYTHON_CALL_S = 4.8e-6
"""Seconds that a linear layer and its activation take with eight numbers on the core whose Python the constants below
count: one with AVX-512. It is derived. On a core with AVX2, where such a call takes 11.7 us, decoding steps of two and
eight blocks of 64 hidden dimensions took 2.4 to 2.6 times as long as there, with vLLM and with transformers."""
CPU_BLOCK_S = {"alone": 1.6e-3, "shards": 2e-3, "tp": 4e-3}
"""Seconds of Python and of hooks in a block's forward and backward pass on CPU: on one rank, and more if FSDP2 shards
the block, or with tensor parallelism. Measured with six blocks of 64 hidden dimensions, where nothing else counts, on
the slower of these cores (4, 5 and 10 ms)."""
CPU_AROUND_BLOCKS = 2
"""The same of what is around the blocks (embedding, output layer, loss, clipping, optimizer), in blocks. Measured with
2, 8 and 14 such blocks, as what is left if none were there: 7 ms in an update, 2 ms in a pass without gradients."""
CPU_GROUP_S = 8e-5
"""Seconds of Python in a block's forward and backward pass on CPU for each group of rows, whose attention is computed
alone. Measured with 4 and 68 groups of two short rows, one and five blocks of 64 hidden dimensions, on the slower core
(0.2 ms)."""
CPU_COMPLETION_S = 7e-5
"""Seconds of the driver and of rewards for each completion on CPU, measured with the demo."""
_GLOO = 12
"""How many times slower than copying gloo is, which sends through sockets, before `REACHED_BANDWIDTH`. Measured between
two ranks, in processor time: 1.0 to 2.1 GB/s that each sends, where copies read and write 38 GB/s."""
LATENCY_S = {CPU: 1e-4, "cuda": 2e-5}
"""Seconds that a collective takes at least."""


@dataclass(frozen=True)
class DecodeStep:
    """What an engine takes beside the weights and caches that it reads and the products."""

    base: float
    """Seconds of Python for each decoding step."""
    block: float
    """The same for each step and block of the model."""
    sequence: float
    """The same for each step and sequence in it."""
    request: float
    """The same for each request."""
    logit: float = 0.0
    """Seconds of a core for each step, sequence and token of the vocabulary: to draw the noise of a token."""
    logit_bytes: float = 0.0
    """Bytes that are read and written for each of them to draw a token."""


_DECODE_STEPS = {
    (CPU, True): DecodeStep(6e-4, 2.2e-4, 2.5e-5, 1.6e-4, logit_bytes=218),
    (CPU, False): DecodeStep(4e-4, 1.6e-4, 6e-6, 1.2e-4, 1.65e-8, 150),
    ("cuda", True): DecodeStep(3e-3, 0.0, 1e-5, 0.0),
    ("cuda", False): DecodeStep(3e-3, 4e-4, 1e-5, 0.0, 1.65e-8),
}
"""By the kind of device, and by whether the engine takes more requests while it generates: vLLM does, transformers does
not. CPU: measured on a quiet machine with 2 to 128 sequences and two and eight blocks. For vLLM 0.32, the model, the
output layer, the sampler and the rest apart, with vocabularies of 512 to 32,768: a logit took 6 to 11 ns where copies
read and write 39 GB/s, and 12 to 21 ns with 19 GB/s. For transformers, with vocabularies of 512 to 32,768. GPU: an
estimate, for vLLM with CUDA graphs. transformers has none, so the Python of each block counts as on a busy CPU, and the
noise of each sequence is drawn on the CPU: 2.5 ms for 151,936 tokens, measured on one core."""
PACKS_AGAIN = 2
"""How many times a decoding step of transformers on CPU takes the time to read the weights and caches, besides its
products. torch's `mm` puts the weights in another order for each product; vLLM does that once, when it loads them.
Measured with five models and 2 to 128 sequences (`benchmarks.decode`)."""
SYNC_BYTES = 40
"""Bytes that ranks and engines on CPU read and write for each byte of weights on their way: to gather, to fingerprint,
to shared memory and into the engine. By a model of 17M parameters on two machines: 0.12 s and 0.17 s."""
SYNC_S = 0.02
"""Seconds that weights on their way take at least, on CPU. Measured with the demo."""


def decode_step(kind: str, streaming: bool) -> DecodeStep:
    """Return the constants of a decoding step of an engine.

    Args:
        kind: `cpu` or `cuda`.
        streaming: it takes more requests while it generates.
    """
    return _DECODE_STEPS[kind, streaming]


CALL_S = 0.01
"""Seconds of the driver in a call of all ranks: the batch on its way. Measured with the demo, 512 rows."""
CALL_ROW_S = 1.6e-5
"""Seconds of the driver before such a call for each row of the batch: it plans the micro-batches of all ranks. Measured
with 512 rows and two ranks."""
CALL_RANK_S = 2e-4
"""The same for each data-parallel rank: its rows, and its message. Measured with `benchmarks.driver_scale`."""
OTHER = 0.03
"""Share of a step in which the driver works: rows, advantages, logs. Measured with the demo (benchmarks/RESULTS.md)."""
RECOMPUTED = {"none": 0.0, "selective": 0.1, "full": 1.0}
"""Share of a forward pass that a backward pass computes again."""
COMPILED_KEEPS = {"none": 0.66, "selective": 0.91, "full": 1.0}
"""Share of a block's activations that stay for the backward pass if the block is compiled: the compiler computes cheap
ones again. Measured in bfloat16 with blocks of four shapes (Qwen3 and Llama) on CPU: 0.62 to 0.70 without recomputation
and 0.90 to 0.92 with `selective`. On an H100: 0.67 for Qwen3-0.6B without, 0.83 for Qwen3-1.7B with `selective`."""
OPTIMIZER_BYTES = 28
"""Bytes that AdamW reads and writes for each number: weight, gradient and two moments."""
CLIPPED_BYTES = 12
"""Bytes that the host reads and writes for each gradient to clip it: once for the norm, and twice to scale it."""
ADDED_BYTES = 12
"""Bytes that the host reads and writes for each gradient to add it to that of the micro-batches before."""
ADAPTER_COPIES = 6
"""Copies of the adapters in host memory on their way to an engine, by the code: into the bytes of a file, out of the
process of rank 0, into that of the driver, into the object store, into that of the engine, and into shared memory."""
LOGIT_BYTES = {"scores": 44, "update": 84}
"""Bytes that the output layer reads and writes on CPU for each logit, beside products: by the passes over a chunk of
logits in `trainer.models.chunked_logprobs`."""
CAST_LOGIT_BYTES = {"scores": 8, "update": 24}
"""The same of casts, if the weights are in half precision: to float32 after a product, and back before one. As in
`MemoryMeter.moved`, a number counts as four bytes."""
CONTEXT_BYTES = int(1.0 * GIB)
"""GPU memory of the CUDA context, of cuBLAS' workspaces and of NCCL's buffers: a rank's and an engine's, each. Context
and workspaces of a rank on an H100 take 0.8 GB."""
_PREFILL_TOKENS = 8192
_PREFILL_TOKENS_OF_LARGE_GPUS = 16384


def prefill_tokens(device: Device) -> int:
    """Return the tokens of a prefill batch of vLLM, whose activations it sets aside.

    They are its own default for GPUs (`EngineArgs.get_batch_defaults`), which our engine leaves as it is.
    """
    large = device.memory >= 70 * GIB and device.name != "A100" and not device.is_cpu
    return _PREFILL_TOKENS_OF_LARGE_GPUS if large else _PREFILL_TOKENS


GRAPHS_BYTES = 2**30
"""What CUDA graphs take, which vLLM captures unless `rollout.enforce_eager` is set: an estimate."""
PROCESS_BYTES = {CPU: int(0.6 * GB), "cuda": int(3.0 * GB)}
"""Host memory of a rank or an engine without tensors: Python, torch, CUDA's libraries. CPU: measured. GPU: an
estimate."""
DRIVER_BYTES = int(1.5 * GB)
"""The same of the driver, Ray and its object store."""
START_S = {CPU: 20.0, "cuda": 90.0}
"""Seconds from the command to the first step, without reading weights: imports, Ray, engines, graphs. CPU: measured
(16 to 21 s, benchmarks/RESULTS.md). GPU: an estimate, with vLLM. There the first step compiles: it took 17 to
37 s on an H100, beside other jobs."""
SHARED_SHARE = 0.5
"""Share of a host's memory that its `/dev/shm` may take: Linux's default for a tmpfs (tmpfs(5), `size`). Hosts have it,
and jobs of Slurm on them. Containers have 64 MB unless they are given more (`docker run --shm-size`, a volume in memory
in Kubernetes): `plan.shared_memory_gb`."""
FRAGMENTATION = 0.05
"""Share of the tensors' memory by which torch's allocator exceeds it, on GPUs."""


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

    def bandwidth_between(self, ranks: int, stride: int = 1, ring: bool = True) -> float:
        """Return the bytes per second that each of `ranks` ranks sends to others.

        Args:
            stride: distance of their numbers.
            ring: they send to the next one only. NCCL has a ring for each NIC, so that each node of the ranks sends
                through those of all its ranks at once.
        """
        inside = 1 + (ranks - 1) * stride <= self.per_node
        if inside or self.nodes == 1:
            return self.device.link
        of_node = max(1, self.per_node // stride) if ring else 1
        return min(self.device.link, self.device.network * of_node)


def parse_cluster(text: str, host_memory_gb: float | None = None, shared_memory_gb: float | None = None) -> Cluster:
    """Return the cluster that `plan.gpus` names.

    Raises:
        UserError: it names none.
    """
    if text.casefold() == CPU:
        return _with_memory(Cluster(1, usable_cores(), this_machine()), host_memory_gb, shared_memory_gb)
    # No GPU has a name that begins with x, so an x there follows an empty number: xH100, 8xxH100.
    found = re.fullmatch(r"(?:(\d{1,6})x)?(?:(\d{1,6})x)?(?![xX])([A-Za-z][\w -]*|\d{4})", text.strip())
    nodes, per_node = (int(found[1] or 1), int(found[2] or 1)) if found else (0, 0)
    if found and not found[2]:
        nodes, per_node = 1, nodes
    if not found or nodes < 1 or per_node < 1:
        raise UserError(f"plan.gpus={text}: is no cluster; write NUMBERxGPU (8xH100), NODESxNUMBERxGPU, or cpu")
    device = _find_device(found[3])
    if device is None:
        known = ", ".join(one.name for one in DEVICES.values())
        raise UserError(f"plan.gpus={text}: the GPU {found[3]} is not known; choose one of {known}, or cpu")
    share = min(1.0, per_node / _USUAL_GPUS)
    cluster = Cluster(nodes, per_node, replace(device, host_memory=int(share * device.host_memory)))
    return _with_memory(cluster, host_memory_gb, shared_memory_gb)


def _find_device(name: str) -> Device | None:
    """Return the GPU of a name, such as `A100-SXM4-40GB` or `GeForce RTX 4090`; None: there is none."""
    words = [
        word for word in re.split("[ _-]+", name.casefold()) if word not in ("nvidia", "geforce", "sxm", "sxm4", "sxm5")
    ]
    short = "-".join(words).replace("rtx-", "rtx")
    return DEVICES.get(_SAME.get(short, short))


def _with_memory(cluster: Cluster, host_memory_gb: float | None, shared_memory_gb: float | None) -> Cluster:
    found = {"host_memory": host_memory_gb, "shared_memory": shared_memory_gb}
    sizes: dict[str, Any] = {name: int(size * GB) for name, size in found.items() if size is not None}
    return replace(cluster, device=replace(cluster.device, **sizes)) if sizes else cluster


@functools.cache
def this_machine() -> Device:
    """Return a core of this machine, by a measurement of a second."""
    memory = usable_memory()
    copying = _copy_speed()
    return Device(
        CPU,
        memory,
        _product_speed(torch.float32),
        _product_speed(torch.bfloat16),
        copying,
        copying / _GLOO,
        copying / _GLOO,
        copying,
        memory,
        flops_packed=_packed_speed(),
        slowness=_call_seconds() / PYTHON_CALL_S,
        shared_memory=_free_shared_memory(),
    )


def _free_shared_memory() -> int:
    """Return the bytes that are free in this machine's shared memory. 0: a run cannot use it."""
    try:
        return free_space()
    except UserError:
        return 0


_SIDES = (256, 512, 1024)
"""Dimensions of the square matrices whose products are measured: the largest that do not take too long."""
_LONGEST_PRODUCT_S = 0.1
_MEASURED_S = 0.2
"""Seconds in which a product is measured again and again."""


def _product_speed(dtype: torch.dtype) -> float:
    """Return the FLOP/s of matrix products on one core, in processor time, which other programs change little.

    A factor is transposed, as that of a linear layer: without products of bfloat16 in hardware, others take ten times
    as long.
    """

    def timed(side: int, seconds: float) -> float:
        matrix = torch.ones(side, side, dtype=dtype)
        product = torch.empty_like(matrix)
        return _shortest(lambda: torch.mm(matrix, matrix.t(), out=product), seconds)

    smallest = timed(_SIDES[0], 0.0)
    expected = {side: smallest * (side / _SIDES[0]) ** 3 for side in _SIDES}
    side = max((side for side in _SIDES if expected[side] <= _LONGEST_PRODUCT_S), default=_SIDES[0])
    return 2 * side**3 / timed(side, _MEASURED_S)


def _packed_speed(size: int = 1024) -> float:
    """Return the same of float32 and weights that oneDNN has packed. 0: torch has no oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return 0.0
    linear, matrix = to_mkldnn(nn.Linear(size, size, bias=False)), torch.ones(size, size)
    with torch.no_grad():
        return 2 * size**3 / _shortest(lambda: linear(matrix), _MEASURED_S)


def _call_seconds(calls: int = 100) -> float:
    """Return the processor time of a linear layer and its activation with eight numbers: Python and torch's calls."""
    layer, numbers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.SiLU()), torch.ones(1, 8)

    def call() -> None:
        for _ in range(calls):
            layer(numbers)

    with torch.no_grad():
        return _shortest(call, _MEASURED_S / 2) / calls


def _shortest(compute: Callable[[], object], seconds: float) -> float:
    """Return the shortest processor time of calls within `seconds`: other programs only make them longer."""
    compute()  # the first call loads the library
    times, end = [], time.process_time() + seconds
    while not times or time.process_time() < end:
        begin = time.process_time()
        compute()
        times.append(time.process_time() - begin)
    return min(times)


def _copy_speed(size: int = 2**26) -> float:
    """Return the bytes per second that this process reads and writes while it copies."""
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(5):
        begin = time.process_time()
        target.copy_(source)
        times.append(time.process_time() - begin)
    return 2 * size / min(times)
