"""Optimizers: Muon against its formula, the same on any number of ranks; those of the user; saves and loads."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor
from transformers import Phi3Config, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

from tests.support.architectures import ALL, CONVERTED, SHAPE, random_model
from tests.support.pages import commands_of_page, load_page
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import GROUPS, config, make_batch, update
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import Config, OptimizerConfig, compose
from trainer.errors import UserError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.objectives.optimizer_check import check_optimizers
from trainer.workers.muon import muon_matrices, newton_schulz
from trainer.workers.optimizers import Optimizers
from trainer.workers.rank import Rank

MODELS = {
    "qwen3": Qwen3Config(**{**SHAPE, "tie_word_embeddings": True}),
    "fewer rows than ranks": Qwen3Config(**{**SHAPE, "head_dim": 2, "num_key_value_heads": 1}),
    "phi3": Phi3Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16),
    "gpt_oss": CONVERTED["gpt_oss"],
}
FUSED = {
    "phi3": {"qkv_proj": lambda w: np.split(w, [32, 48]), "gate_up_proj": lambda w: np.split(w, 2)},
    "qwen3_moe": {"gate_up_proj": lambda w: np.split(w, 2, axis=-2)},
    "gpt_oss": {"gate_up_proj": lambda w: [w[..., ::2], w[..., 1::2]]},
}
"""Views of the matrices that one tensor holds, by the end of its name."""
LR, DECAY, MOMENTUM = 1e-2, 0.1, 0.95
Lion: Any = load_page("docs/optimizers.md")["Lion"]
"""The optimizer of a user that the page shows."""


def with_optimizer(name: str, **settings: Any) -> Config:
    cfg = config()
    cfg.trainer.policy.optimizer = OptimizerConfig(name=name, lr=LR, weight_decay=DECAY, **settings)
    return cfg


def gradient(name: str, parameter: nn.Parameter, step: int) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(f"{name}/{step}".encode()).digest()[:4], "big")
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


def train(rank: Rank, steps: range) -> dict[str, np.ndarray]:
    """Make optimizer steps with gradients that do not depend on the weights; returns the whole weights."""
    worker = rank.roles["policy"]
    for step in steps:
        for name, parameter in worker.module.named_parameters():
            whole = gradient(name, parameter, step)
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        worker.optimizers.step()
    return {name: p.detach().full_tensor().numpy().copy() for name, p in worker.module.named_parameters()}


def build_and_train(rank: Rank, path: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rank.build(roles(rank.cfg, ["policy"]), path)
    return train(rank, range(0)), train(rank, range(3))


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """The quintic iteration in float64, for each of the last two dimensions."""
    if matrix.ndim == 3:
        return np.stack([orthogonal(one) for one in matrix])
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return 0.2 * max(matrix.shape) ** 0.5 * x


def by_muon(start: np.ndarray, gradients: list[np.ndarray], views: Callable) -> np.ndarray:
    weight, momentum = start.astype(np.float64), np.zeros(start.shape)
    for g in gradients:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * g
        update = (1 - MOMENTUM) * g + MOMENTUM * momentum
        direction = np.zeros_like(update)
        for target, source in zip(views(direction), views(update), strict=True):
            target[...] = orthogonal(source)
        weight = (1 - LR * DECAY) * weight - LR * direction
    return weight


def by_adamw(start: np.ndarray, gradients: list[np.ndarray], views: Any) -> np.ndarray:
    weight, first, second = start.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        weight = (1 - LR * DECAY) * weight
        weight = weight - LR * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
    return weight


@pytest.mark.parametrize("family", MODELS)
def test_muon_is_its_formula_on_any_number_of_ranks_and_leaves_the_rest_to_adamw(family, tmp_path):
    random_model(MODELS[family], "eager").save_pretrained(tmp_path)
    layouts: list[dict[str, int]] = [{"num_workers": 3}]
    if family == "qwen3":
        layouts = [{"num_workers": 1}, {"num_workers": 4, "dp_replicate": 2}]
        layouts += [{"num_workers": 4, "tensor_parallel_size": 2}]
    results = []
    for layout in layouts:
        cfg = with_optimizer("muon")
        cfg.model.attn_implementation = "eager"
        cfg.trainer = dataclasses.replace(cfg.trainer, **layout)
        results.append(run_ranks(layout["num_workers"], build_and_train, str(tmp_path), cfg=cfg)[0])
    start, ours = results[0]
    orthogonalised = set()
    for name, weight in start.items():
        layer, end = name.rpartition(".")[0], name.split(".")[-1]
        is_expert = weight.ndim == 3
        is_muon = "layers." in name and weight.ndim > 1 and (is_expert or end == "weight")
        is_muon &= not layer.endswith((".gate", ".router", "norm"))
        views = next((f for key, f in FUSED.get(family, {}).items() if key in name), lambda w: [w])
        parameter = nn.Parameter(torch.from_numpy(weight))
        gradients = [gradient(name, parameter, step).double().numpy() for step in range(3)]
        expected = (by_muon if is_muon else by_adamw)(weight, gradients, views)
        for layout, (_, found) in zip(layouts, results, strict=True):
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-6, err_msg=f"{layout} {name}")
        orthogonalised |= {name.split(".")[-2] if not is_expert else end} if is_muon else set()
    assert {"o_proj", "down_proj"} <= orthogonalised and "embed_tokens" not in orthogonalised


def step_with_clipped_gradients(rank: Rank, path: str) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """The gradient norm, and by matrix the change and the momentum after one step without and one with a clip."""
    found = []
    for rank.cfg.trainer.policy.optimizer.max_grad_norm in (0.0, 1e-3):
        rank.build(roles(rank.cfg, ["policy"]), path)
        worker = rank.roles["policy"]
        taken = muon_matrices(worker.module)
        matrices = {name: p for name, p in worker.module.named_parameters() if p in taken}
        before = {name: p.detach().full_tensor().clone() for name, p in matrices.items()}
        norm = update(rank, "policy", make_batch(), 1)["grad_norm"]
        changes = {name: p.detach().full_tensor() - before[name] for name, p in matrices.items()}
        state = worker.optimizers.all[0].state
        momenta = {f"{name} momentum": state[p]["momentum_buffer"].full_tensor() for name, p in matrices.items()}
        found.append((norm, changes | momenta))
    return found


def test_gradients_are_clipped_before_they_are_orthogonalised(tmp_path):
    """Then the length of a step does not depend on the clip, and the momentum does."""
    build_tiny(TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, head_dim=16), str(tmp_path))
    cfg = with_optimizer("muon")
    cfg.trainer.mini_batch_size = GROUPS
    (norm, free), (_, clipped) = run_ranks(2, step_with_clipped_gradients, str(tmp_path), cfg=cfg)[0]
    assert norm > 1e-2 and len(free) == 2 * 7
    for name, tensor in free.items():
        scale = 1e-3 / norm if name.endswith("momentum") else 1.0
        assert tensor.abs().max() > 0
        torch.testing.assert_close(
            clipped[name], scale * tensor, rtol=1e-3, atol=1e-5 * scale * float(tensor.abs().max())
        )


def compare_with_torch(rank: Rank, path: str) -> list[str]:
    """Make steps with the same gradients through torch's functions on DTensors; returns what has other bits."""
    found, layout = [], rank.layout
    assert layout is not None
    rank.build(roles(rank.cfg, ["policy"]), path)
    worker = rank.roles["policy"]
    parameters = dict(worker.module.named_parameters())
    others = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    config = worker.optimizer_config
    plain = torch.optim.AdamW(others.values(), lr=LR, weight_decay=DECAY, fused=True, betas=tuple(config.betas))
    for step in range(2):
        for name, parameter in parameters.items():
            whole = gradient(name, parameter, step)
            grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad, others[name].grad = grad, grad.clone()
        limit = (0.0, 1.5)[step]
        norm = layout.clip_grad_norm(parameters.values(), limit)
        expected = nn.utils.clip_grad_norm_(others.values(), limit or float("inf")).full_tensor()
        found += [f"norm {norm} {float(expected)}"] if norm != float(expected) else []
        pairs = {name: (p.grad.to_local(), others[name].grad.to_local()) for name, p in parameters.items()}
        worker.optimizers.step()
        plain.step()
        pairs |= {f"{name} after": (p.to_local(), others[name].to_local()) for name, p in parameters.items()}
        found += [f"{step} {name}" for name, (one, two) in pairs.items() if not torch.equal(one, two)]
    return found


@pytest.mark.parametrize("layout", [{}, {"dp_replicate": 2}, {"tensor_parallel_size": 2}])
def test_clipping_and_adamw_have_the_bits_of_torch_on_dtensors(layout, tmp_path):
    random_model(MODELS["fewer rows than ranks"], "eager").save_pretrained(tmp_path)
    cfg = with_optimizer("adamw")
    cfg.model.attn_implementation = "eager"
    cfg.trainer = dataclasses.replace(cfg.trainer, num_workers=4, **layout)
    assert run_ranks(4, compare_with_torch, str(tmp_path), cfg=cfg) == [[]] * 4


def test_queries_that_hold_gates_and_latent_projections_stay_on_adamw():
    shape = {**SHAPE, "num_experts": 2, "moe_intermediate_size": 16, "layer_types": ["full_attention"] * 2}
    for model, kept in [
        (Qwen3NextConfig(**shape, shared_expert_intermediate_size=16), {"q_proj", "gate", "shared_expert_gate"}),
        (CONVERTED["deepseek_v3"], {"kv_a_proj_with_mqa", "kv_b_proj"}),
    ]:
        module = random_model(model, "eager")
        linear = {name.rpartition(".")[2] for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
        taken = muon_matrices(module)
        found = {name.split(".")[-2] for name, parameter in module.named_parameters() if parameter in taken}
        assert kept <= linear | {"gate"} and not kept & found
        assert {"o_proj", "down_proj"} <= found


def test_each_optimizer_follows_the_schedule_from_a_learning_rate_of_its_own():
    settings = {"scheduler": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.0, "options": {"adamw_lr": 3 * LR}}
    module, mesh = random_model(MODELS["qwen3"], "eager"), SimpleNamespace(device_type="cpu")
    made = Optimizers(module, OptimizerConfig(name="muon", lr=LR, **settings), 6, mesh)
    for step, factor in enumerate([0.5, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]):
        made.steps = step
        assert made.configure() == pytest.approx(LR * factor)
        found = {type(one).__name__: [group["lr"] for group in one.param_groups] for one in made.all}
        assert found == {"Muon": pytest.approx([LR * factor]), "AdamW": pytest.approx([3 * LR * factor])}, step


def test_newton_schulz_in_float64():
    """Values of the original iteration, computed with numpy."""
    matrix = torch.tensor([[3.0, 0, 1], [0, 2, -1]], dtype=torch.float64)
    expected = [[1.057837564, -0.015901187, 0.360563115], [-0.023851781, 0.625719107, -0.320810147]]
    np.testing.assert_allclose(newton_schulz(matrix, 5), expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(newton_schulz(matrix.T, 5), np.transpose(expected), rtol=0, atol=1e-9)


class Forgetful(Lion):
    """What decides a step is outside of the state."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            group["lr"] *= self.count
        super().step()


def halves(parameters: list[tuple[str, nn.Parameter]], lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Optimizers with learning rates of their own, one of them without states, one with more states than AdamW's."""
    vectors, matrices = ([p for _, p in parameters if (p.ndim < 2) is is_vector] for is_vector in (True, False))
    amsgrad = torch.optim.AdamW(matrices[:1], lr=lr, weight_decay=weight_decay, amsgrad=True)
    return [Lion(matrices[1:], lr / 2, weight_decay), amsgrad, torch.optim.SGD(vectors, lr=lr)]


def one_of_all(parameters: list[tuple[str, nn.Parameter]], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameters[0][1]], lr=lr)


def save_in_the_middle(rank: Rank, path: str, directory: str) -> dict[str, np.ndarray]:
    """Save before the first step and after two; train a third step."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    for steps in (0, 2):
        train(rank, range(steps))
        rank.begin_save(["policy"], ShardedFiles(f"{directory}/{steps}"))
        rank.finish_save()
    return train(rank, range(2, 3))


def resume(rank: Rank, path: str, directory: str) -> list[dict[str, np.ndarray]]:
    weights = []
    for steps in (0, 2):
        rank.build(roles(rank.cfg, ["policy"]), path)
        rank.call("policy", "load", ShardedFiles(f"{directory}/{steps}"), ("weights", "optimizer", "rng"))
        weights.append(train(rank, range(steps, 3)))
    return weights


@pytest.mark.parametrize("name", ["muon", f"{__name__}:halves"])
def test_a_run_continues_from_a_save_on_other_ranks_as_if_undisturbed(name, tmp_path):
    random_model(ALL["qwen3"], "sdpa").save_pretrained(tmp_path / "model")
    paths = str(tmp_path / "model"), str(tmp_path)
    cfg = with_optimizer(name)
    cfg.trainer.policy.optimizer.scheduler, cfg.trainer.policy.optimizer.schedule_steps = "cosine", 4
    expected = run_ranks(2, save_in_the_middle, *paths, cfg=cfg)[0]
    for ranks in (2, 3):
        for found in run_ranks(ranks, resume, *paths, cfg=cfg)[0]:
            for parameter, weight in expected.items():
                tolerance = 0 if ranks == 2 else 2e-6
                np.testing.assert_allclose(found[parameter], weight, rtol=0, atol=tolerance, err_msg=parameter)


def refusal(rank: Rank, path: str) -> str:
    try:
        rank.build(roles(rank.cfg, ["policy"]), path)
    except UserError as error:
        return str(error)
    return ""


def test_an_optimizer_that_does_not_do_what_a_resume_needs_is_refused(tmp_path):
    random_model(ALL["qwen3"], "sdpa").save_pretrained(tmp_path)
    for name, words in {"Forgetful": "is trained differently", "one_of_all": "not exactly once"}.items():
        cfg = with_optimizer(f"{__name__}:{name}")
        assert words in run_ranks(2, refusal, str(tmp_path), cfg=cfg)[0]


def test_optimizers_and_options_that_do_not_exist_are_refused_before_the_start():
    for name, options, words in [
        ("adam", {}, "choose one of adamw, muon, or"),
        ("adamw", {"momentum": 0.9}, "options.momentum=0.9: adamw has no such option"),
        ("muon", {"beta": 0.9}, "the options are momentum, nesterov, ns_steps, adamw_lr"),
        ("muon", {"momentum": 1.0}, "must be a number, at least 0 and below 1"),
        ("muon", {"ns_steps": 0}, "must be from 1 to 100"),
        (f"{__name__}:Lion", {"gamma": 1}, "got an unexpected keyword argument 'gamma'"),
        (f"{__name__}:lion", {}, "has no function lion"),
    ]:
        with pytest.raises(UserError, match=words):
            check_optimizers(with_optimizer(name, options=options))
    with pytest.raises(UserError, match="does not get it; set it in trainer.policy.optimizer.options"):
        check_optimizers(with_optimizer(f"{__name__}:Lion", betas=[0.8, 0.9]))
    command = commands_of_page("docs/optimizers.md", "lion:Lion").replace("lion:", f"{__name__}:")
    cfg = compose(command.replace("\\\n", "").split()[2:])
    check_optimizers(cfg)
    assert cfg.trainer.policy.optimizer.options == {"betas": [0.9, 0.98]}
