#!/usr/bin/env bash
# torch 2.13.0, FSDP2 (fully_shard with reshard_after_forward, gloo, CPU, two ranks). A forward hook that reads the
# gathered weight of its layer, as a log of statistics would.
#   With torch's own functions the steps run.
#   With Tensor.numpy() the next reshard raises "Trying to resize storage that is not resizable", although the array is
#   gone by then: the call marks the tensor's storage as fixed, for good, and FSDP2 frees that storage by a resize to 0.
# Fails if that changes.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT; cd "$dir"
python3 -m venv venv && venv/bin/pip install -q torch==2.13.0 numpy
cat > ranks.py <<'PY'
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

READS = {"torch": lambda weight: weight.max().item(), "numpy": lambda weight: weight.numpy().max().item()}
torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
fully_shard(layers, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True)
read = READS[sys.argv[1]]
layers[0].register_forward_hook(lambda module, inputs, output: print("largest weight", read(module.weight.detach())))
try:
    for step in range(2):
        layers(torch.ones(1, 64)).sum().backward()
    print("outcome: ran")
except RuntimeError as error:
    print("outcome:", error)
dist.destroy_process_group()
PY
for way in torch numpy; do
  OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node 2 ranks.py "$way" > "$way.log" 2> "$way.errors" || true
  echo "$way:"; grep outcome "$way.log"
done
test "$(grep -c 'outcome: ran' torch.log)" = 2
test "$(grep -c 'outcome: Trying to resize storage that is not resizable' numpy.log)" = 2
echo "as described"
