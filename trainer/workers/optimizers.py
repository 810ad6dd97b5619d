"""The optimizers of a trained role, by name or import path: `trainer.policy.optimizer.name`."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from trainer.config import OptimizerConfig
from trainer.errors import UserError
from trainer.import_utils import import_function, user_code
from trainer.objectives.optimizer_check import KEY
from trainer.workers.host_memory import local_tensor
from trainer.workers.muon import Muon, muon_matrices


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `total_steps`: warm-up, then the schedule."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.scheduler == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def _adamw(module: nn.Module, config: OptimizerConfig, device: str) -> list[torch.optim.Optimizer]:
    return [_adamw_of(_trained(module).values(), config, config.lr)]


def _muon(module: nn.Module, config: OptimizerConfig, device: str) -> list[torch.optim.Optimizer]:
    options = dict(config.options)
    lr_of_others = options.pop("adamw_lr", config.lr)
    matrices = muon_matrices(module)
    others = [parameter for parameter in _trained(module).values() if parameter not in matrices]
    muon = Muon(matrices, device, config.lr, config.weight_decay, **options)
    return [muon, *([_adamw_of(others, config, lr_of_others)] if others else [])]


OPTIMIZERS: Mapping[str, Callable[[nn.Module, OptimizerConfig, str], list[torch.optim.Optimizer]]] = {
    "adamw": _adamw,
    "muon": _muon,
}
"""Each makes the optimizers of a sharded module, whose device is the last argument. Together they have every trained
parameter once. `optimizer_check` has their options."""


class Optimizers:
    """The optimizers of one trained module, sharded over `mesh`, their learning rates over `steps` optimizer steps and
    their states. With a trial, an optimizer of the user is tried on a small model first."""

    def __init__(
        self, module: nn.Module, config: OptimizerConfig, steps: int, mesh: DeviceMesh, with_trial: bool = True
    ):
        self.module = module
        self.config = config
        self.total_steps = steps
        self.steps = 0
        self._is_built_in = config.name in OPTIMIZERS
        if with_trial and not self._is_built_in:
            _try_custom(config, mesh)
        self.all = make_optimizers(module, config, mesh.device_type)
        self._configured = [[_settings(group) for group in one.param_groups] for one in self.all]

    def step(self) -> float:
        """Make an optimizer step with the gradients that are there, and delete them; returns the learning rate."""
        lr = self.configure()
        self.make_states()
        for optimizer in self.all:
            if not self._is_built_in:
                if self.steps == 0:
                    optimizer.state.clear()
                for parameter in _parameters_of(optimizer):  # so that each gets a state, as checkpoints expect
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            optimizer.step()
        self.zero_grad()
        self.steps += 1
        return lr

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad()

    def configure(self) -> float:
        """Set every parameter group to the values of the config; returns the learning rate of the next step. A
        checkpoint has its own values, which the config replaces. The schedule acts on each group's learning rate."""
        for optimizer, settings in zip(self.all, self._configured, strict=True):
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                config = dataclasses.replace(self.config, lr=values["lr"])
                group |= {**values, "lr": learning_rate(config, self.steps, self.total_steps)}
        return learning_rate(self.config, self.steps, self.total_steps)

    def make_states(self) -> None:
        """Make the states that are missing, at step 0 and equal to those that the first step makes.

        torch makes them for parameters with a gradient alone, so a checkpoint would lack the others. Before a save,
        torch would make them by a step with the learning rate 0, which counts in the bias correction of later steps.
        For an optimizer of the user it does so, and `step` drops these states before the first step.
        """
        for optimizer in self.all if self._is_built_in else ():
            for parameter in _parameters_of(optimizer):
                if parameter not in optimizer.state:
                    optimizer.state[parameter] = optimizer.initial_state(parameter)

    def state(self) -> dict[str, Any]:
        """Return the states by the names of the parameters (not copies), for a checkpoint or to be filled from one."""
        self.make_states()
        return get_optimizer_state_dict(self.module, self.all)

    def load(self, state: Mapping[str, Any], steps: int) -> None:
        """Restore what `state` returned and was filled, after `steps` optimizer steps."""
        if not self._is_built_in:  # whose states are tensors alone, and filled in place
            # Those of the user may have no state, as SGD without momentum.
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(self.module, self.all, dict(state), options=options)
        self.steps = steps
        self.configure()

    def description(self) -> dict[str, list[str]]:
        """Return which parameters each optimizer trains, by its class, with `*` for the number of a block."""
        names = {id(parameter): re.sub(r"\.\d+\.", ".*.", name) for name, parameter in _trained(self.module).items()}
        return {type(one).__name__: list(dict.fromkeys(names[id(p)] for p in _parameters_of(one))) for one in self.all}

    def tensors(self, device: str) -> list[Tensor]:
        """Return the states on a device, without counters. Not a collective."""
        states = [value for optimizer in self.all for state in optimizer.state.values() for value in state.values()]
        return [s for s in states if isinstance(s, Tensor) and s.numel() > 1 and s.device.type == device]

    def growth(self, device: str) -> int:
        """Return the bytes that states will yet take on a device. Not a collective. The first step makes them. An
        optimizer of the user is expected to take what AdamW takes."""
        numbers = 0
        for optimizer in self.all:
            new = [p for p in _parameters_of(optimizer) if p not in optimizer.state and p.device.type == device]
            numbers += sum((1 if isinstance(optimizer, Muon) else 2) * local_tensor(p).numel() for p in new)
        return 4 * numbers


def make_optimizers(module: nn.Module, config: OptimizerConfig, device: str) -> list[torch.optim.Optimizer]:
    """Return the optimizers that the config names for a sharded module. Raises UserError: the user's function raises,
    or leaves out a trained parameter."""
    if config.name in OPTIMIZERS:
        return OPTIMIZERS[config.name](module, config, device)
    function = import_function(config.name, f"{KEY}.name", known=OPTIMIZERS)
    parameters = _trained(module)
    with user_code(f"{KEY}.name={config.name}: raised {{}}", has_place=True):
        made = function(list(parameters.items()), lr=config.lr, weight_decay=config.weight_decay, **config.options)
    optimizers = list(made) if isinstance(made, (list, tuple)) else [made]
    if not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
        raise UserError(f"{KEY}.name={config.name}: must return a torch.optim.Optimizer, or a list of them")
    found = [id(parameter) for one in optimizers for parameter in _parameters_of(one)]
    lacking = [name for name, parameter in parameters.items() if found.count(id(parameter)) != 1]
    if lacking or len(found) != len(parameters):
        problem = f"{len(lacking)} trained parameters, such as {lacking[0]}," if lacking else "frozen parameters"
        raise UserError(f"{KEY}.name={config.name}: has {problem} not exactly once; take each parameter that it gets")
    return optimizers


def _try_custom(config: OptimizerConfig, mesh: DeviceMesh) -> None:
    """Try an optimizer of the user on small sharded matrices: steps, a save and a load. A collective. Raises UserError:
    it raises, or goes on otherwise after the load than without one."""

    def made() -> tuple[nn.Module, Optimizers]:
        with torch.device(mesh.device_type):  # names as those of a language model, because a function may go by them
            layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(64, 33), "input_layernorm": nn.LayerNorm(33)})])
            inner = nn.ModuleDict({"embed_tokens": nn.Embedding(5, 64), "layers": layers, "norm": nn.LayerNorm(33)})
            module = nn.Sequential(OrderedDict(model=inner, lm_head=nn.Linear(33, 5, bias=False)))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        fully_shard(module, mesh=mesh)
        return module, Optimizers(module, config, 10, mesh, with_trial=False)

    def step(module: nn.Module, optimizers: Optimizers, number: int) -> None:
        for parameter in module.parameters():
            parameter.grad = torch.sin(parameter.detach() * (number + 1))
        optimizers.step()

    with torch.random.fork_rng(), user_code(f"{KEY}.name={config.name}: fails on a small model ({{}})", has_place=True):
        (module, optimizers), (other, restored) = made(), made()
        for number in range(2):
            step(module, optimizers, number)
        other.load_state_dict(module.state_dict())
        saved = copy.deepcopy(optimizers.state())
        restored.state()
        restored.load(saved, optimizers.steps)
        step(module, optimizers, 2)
        step(other, restored, 2)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        if not torch.equal(local_tensor(one), local_tensor(two)):
            problem = "a model whose state was saved and loaded is trained differently after it"
            raise UserError(f"{KEY}.name={config.name}: {problem}; keep all that decides a step in its state_dict")


class AdamW(torch.optim.AdamW):
    """AdamW that steps on the shards: for lists of DTensors, torch first works out how the step is sharded, which takes
    most of the time of a rank's first step."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_tensor, tensors)
        return has_complex

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=parameter.device), **moments}


def _adamw_of(parameters: Iterable[Tensor], config: OptimizerConfig, lr: float) -> AdamW:
    return AdamW(
        list(parameters),
        lr=lr,
        betas=tuple(config.betas),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,  # without a temporary copy of the parameters
    )


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
