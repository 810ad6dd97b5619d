"""Preferences and reward models: the loss against plain loops in float64, and against plain PyTorch on ranks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.ranks import local_cluster, run_ranks
from tests.support.whole_batches import update_batch
from tools.same_as_trl import Recorder, make_models, make_rows, ours, summary
from trainer.config import Config
from trainer.data.examples import Pair
from trainer.episodes import Sample
from trainer.learner.learner import Learner
from trainer.metrics.timing import Timer
from trainer.models.tiny import TinyShape, build_tiny
from trainer.objectives import Outputs, make_objective
from trainer.objectives.batches import batch_of
from trainer.parallel.batching import Batch, MicroBatch
from trainer.parallel.packing import Packing
from trainer.sources.supervised import episodes_of
from trainer.workers.rank import Rank

LENGTHS = [(9, 5, 12), (3, 14, 4), (6, 11, 8), (2, 4, 15), (7, 9, 8)]
"""Tokens of the prompt of each pair, and of the prompt with the chosen and with the rejected answer after it."""
BETA, COEFFICIENT, CENTER = 0.3, 0.2, 0.05
DPO = {"trainer.task": "dpo", "dpo.beta": BETA}
UNSET = {"dpo.label_smoothing": 0.0, "dpo.sft_coef": 0.0, "dpo.loss_type": "sigmoid", "dpo.simpo_gamma": None}
CASES = [
    {**DPO, "dpo.label_smoothing": 0.1, "dpo.sft_coef": COEFFICIENT},
    {**DPO, "dpo.loss_type": "ipo"},
    {**DPO, "dpo.loss_type": "simpo", "dpo.simpo_gamma": 0.7},
    {"trainer.task": "rm", "rm.center_rewards_coefficient": CENTER},
]


def set_keys(cfg: Config, keys: dict) -> None:
    for key, value in keys.items():
        section, name = key.split(".")
        setattr(getattr(cfg, section), name, value)


def config(keys: dict, **trainer) -> Config:
    cfg = Config()
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = len(LENGTHS)
    cfg.trainer.max_tokens_per_micro_batch = 24
    cfg.trainer.policy.optimizer.lr, cfg.trainer.policy.optimizer.max_grad_norm = 1e-2, 0.0
    set_keys(cfg, keys | {f"trainer.{name}": value for name, value in trainer.items()})
    return cfg


def pairs() -> list[Pair]:
    rng, made = np.random.default_rng(4), []
    for number, (prompt, *longs) in enumerate(LENGTHS):
        ids = rng.integers(3, 250, prompt)
        longs = [max(long, prompt + 1) for long in longs]
        rows = [np.append(ids, rng.integers(3, 250, long - prompt)).astype(np.int32) for long in longs]
        samples = [Sample(row, (np.arange(len(row)) >= prompt).astype(np.float32)) for row in rows]
        made.append(Pair(*samples, margin=0.1 * number))
    return made


def episodes() -> list:
    return [episode for number, pair in enumerate(pairs()) for episode in episodes_of(pair, str(number))]


def experience(cfg: Config) -> Batch:
    batch = batch_of(episodes())
    noise = np.random.default_rng(6).normal(size=batch["mask"].shape).astype(np.float32)
    batch = make_objective(cfg).experience(episodes(), batch).batch
    return batch | ({"ref_logprobs": (-5.5 + noise) * batch["mask"]} if cfg.trainer.task == "dpo" else {})


def expected_loss(cfg: Config, batch: Batch, values: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """In plain loops. `values` are log-probs, or scores, of each row without padding."""
    losses, chosen_nll, rewards = [], [], []
    for row in range(0, len(values), 2):
        masks = [torch.from_numpy(batch["mask"][i, : len(values[i])]) > 0 for i in (row, row + 1)]
        if cfg.trainer.task == "rm":
            c, r = (values[row + i][int(mask.nonzero()[-1])] for i, mask in enumerate(masks))
            losses.append(-F.logsigmoid(c - r - float(batch["margins"][row])) + CENTER * (c + r) ** 2)
            rewards.append((c, r))
            continue
        refs = [torch.from_numpy(batch["ref_logprobs"][i, : len(values[i])]).double() for i in (row, row + 1)]
        if cfg.dpo.loss_type == "simpo":
            refs = [torch.zeros_like(ref) for ref in refs]
        c, r = ((values[row + i] - refs[i])[mask].sum() for i, mask in enumerate(masks))
        if cfg.dpo.loss_type == "ipo":
            losses.append((c / masks[0].sum() - r / masks[1].sum() - 1 / (2 * BETA)) ** 2)
        elif cfg.dpo.loss_type == "simpo":
            c, r = c / masks[0].sum(), r / masks[1].sum()
            losses.append(-F.logsigmoid(BETA * (c - r) - 0.7))
        else:
            losses.append(-0.9 * F.logsigmoid(BETA * (c - r)) - 0.1 * F.logsigmoid(-BETA * (c - r)))
        chosen_nll.append(-values[row][masks[0]])
        rewards.append((BETA * c, BETA * r))
    loss = torch.stack(losses).mean()
    if cfg.dpo.sft_coef > 0:
        loss = loss + cfg.dpo.sft_coef * torch.cat(chosen_nll).mean()
    c, r = (torch.stack(column).detach() for column in zip(*rewards, strict=True))
    found = {"rewards/chosen": c.mean(), "rewards/rejected": r.mean(), "rewards/margins": (c - r).mean()}
    found["rewards/accuracies"] = (c > r).double().mean()
    if cfg.trainer.task == "rm":
        both = torch.cat((c, r))
        found |= {"rm/min_reward": both.min(), "rm/max_reward": both.max(), "rm/mean_reward": both.mean()}
    return loss, {name: float(value) for name, value in found.items()}


@pytest.mark.parametrize("keys", CASES, ids=["dpo", "ipo", "simpo", "rm"])
def test_micro_batches_in_any_order_add_up_to_the_loss_and_gradient_of_plain_loops(keys):
    """Ragged pairs in float64. A row that stands for none, with masks of 0, gives finite numbers."""
    cfg = config(keys)
    batch, objective = experience(cfg), make_objective(cfg)
    generator = torch.Generator().manual_seed(8)
    plain = [torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_() for n in batch["lengths"]]
    loss, metrics = expected_loss(cfg, batch, plain)
    loss.backward()
    totals = objective.totals("policy", batch)
    for size, order in ((1, [3, 0, 4, 1, 2]), (2, [1, 4, 2, 0, 3]), (5, [0, 1, 2, 3, 4])):
        values = [value.detach().clone().requires_grad_() for value in plain]
        total, found = torch.zeros((), dtype=torch.float64), []
        for start in range(0, len(order), size):
            rows = [row for pair in order[start : start + size] for row in (2 * pair + 1, 2 * pair)]
            width = max(len(values[row]) for row in rows)
            given = torch.stack([F.pad(values[row], (0, width - len(values[row]))) for row in rows])
            arrays = {name: torch.from_numpy(a[rows, :width] if a.ndim == 2 else a[rows]) for name, a in batch.items()}
            arrays = {name: a.double() if a.is_floating_point() else a for name, a in arrays.items()}
            mb = MicroBatch(rows, torch.zeros(1, 1), Packing([1], "cpu"), arrays)
            outputs = Outputs(values=given) if "rm" in keys["trainer.task"] else Outputs(logprobs=given)
            part, of_part = objective.loss("policy", outputs, mb, totals, {})
            total = total + part
            found.append(of_part)
        total.backward()
        assert total.item() == pytest.approx(loss.item(), abs=1e-9)
        for value, expected in zip(values, plain, strict=True):
            torch.testing.assert_close(value.grad, expected.grad, atol=1e-9, rtol=0)
        for name, value in metrics.items():
            reduce = {"min": min, "max": max}.get(objective.extremes.get(name, ""), sum)
            assert float(reduce(one[name] for one in found)) == pytest.approx(value, abs=1e-6), name
    empty = {name: a[:1] * 0 if a.is_floating_point() else a[:1] for name, a in arrays.items()}
    given = given[:1].detach().requires_grad_()
    outputs = Outputs(values=given) if "rm" in keys["trainer.task"] else Outputs(logprobs=given)
    nothing, _ = objective.loss("policy", outputs, MicroBatch([], torch.zeros(1, 1), mb.packing, empty), totals, {})
    assert math.isfinite(nothing.item())


def plain_step(path: str, keys: dict) -> dict[str, float]:
    """The same step with transformers, one row at a time, in float64."""
    cfg = config(keys)
    batch, model, values = experience(cfg), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), []
    head = torch.nn.Linear(model.config.hidden_size, 1, bias=False, dtype=torch.float64)
    head.weight.data.zero_()
    for row, length in enumerate(batch["lengths"]):
        ids = torch.from_numpy(batch["input_ids"][row, :length].astype(np.int64))
        if cfg.trainer.task == "rm":
            values.append(head(model.model(ids[None]).last_hidden_state)[0, :, 0])
            continue
        logp = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        values.append(F.pad(logp, (1, 0)))
    loss, metrics = expected_loss(cfg, batch, values)
    loss.backward()
    parameters = [*model.parameters(), *head.parameters()]
    norm = torch.sqrt(sum(p.grad.square().sum() for p in parameters if p.grad is not None))
    return {**metrics, "loss": loss.item(), "grad_norm": norm.item()}


def steps(rank: Rank, path: str) -> list[dict[str, float]]:
    """A step of each of the cases, with shared prompts, and the first one without."""
    found = []
    for keys in [*CASES, CASES[0]]:
        set_keys(
            rank.cfg,
            {
                "dpo.label_smoothing": 0.0,
                "dpo.sft_coef": 0.0,
                "dpo.loss_type": "sigmoid",
                "dpo.simpo_gamma": None,
                **keys,
            },
        )
        rank.build(rank.cfg.roles, path)
        rank.roles["policy"].shares_prompts &= len(found) < len(CASES)
        found.append(update_batch(rank, "policy", experience(rank.cfg), 1).metrics)
    return found


def test_a_step_on_ranks_is_that_of_plain_pytorch(tmp_path):
    build_tiny(TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, head_dim=16), str(tmp_path))
    expected = [plain_step(str(tmp_path), keys) for keys in [*CASES, CASES[0]]]
    for found in run_ranks(2, steps, str(tmp_path), cfg=config(CASES[0])):
        for one, plain in zip(found, expected, strict=True):
            assert {name: one[name] for name in plain} == pytest.approx(plain, rel=1e-5, abs=1e-6)


def test_rewards_are_0_until_the_policy_leaves_the_reference_and_held_out_numbers_are_those_of_training(tmp_path):
    """On one rank; on two with adapters, whose base is the reference; in several micro-batches."""
    build_tiny(TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, head_dim=16), str(tmp_path))
    for ranks, rank_of_adapters in ((1, None), (2, 4)):
        cfg = config(DPO)
        cfg.trainer.policy.lora.rank = rank_of_adapters
        with local_cluster(ranks, cfg) as cluster:
            learner = Learner(cluster.cfg, cluster, Timer())
            learner.build(str(tmp_path))
            assert learner.ranks.saved_roles == ["policy"]
            held_out, made = [learner.held_out(episodes())], []
            for step in (1, 2):
                made.append(learner.update(learner.make_experience(episodes(), step), step))
                held_out.append(learner.held_out(episodes()))
        for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
            assert made[0][name] == held_out[0][name] == 0.0, "to the last bit"
        assert made[1]["rewards/margins"] > 0 and held_out[2]["loss"] < held_out[1]["loss"] < math.log(2)
        for trained, before in zip(made, held_out, strict=False):
            trained["loss"] = trained["policy/loss"]
            assert {name: trained[name] for name in before} == pytest.approx(before, rel=1e-4, abs=1e-5)


def test_a_reward_model_is_read_at_the_stop_token_in_training_and_in_rollouts(tmp_path):
    """Whatever follows the token, as the output of a tool. The extremes are those of all ranks."""
    build_tiny(TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, head_dim=16), str(tmp_path))
    cfg = config({"trainer.task": "rm"})
    cfg.trainer.policy.lora.rank = 4  # the head is trained beside the adapters
    with local_cluster(2, cfg) as cluster:
        learner = Learner(cluster.cfg, cluster, Timer())
        learner.build(str(tmp_path))
        for step in (1, 2, 3):
            learner.update(learner.make_experience(episodes(), step), step)
        held_out = learner.held_out(episodes())
        longer = [
            Sample(np.append(one.token_ids, np.int32([9, 9, 9])), np.append(one.mask, np.float32([0, 0, 0])))
            for pair in pairs()
            for one in pair.samples
        ]
        scores = learner.last_scores("policy", longer)
    assert held_out["rewards/chosen"] == pytest.approx(scores[::2].mean(), abs=1e-5)
    assert held_out["rewards/rejected"] == pytest.approx(scores[1::2].mean(), abs=1e-5)
    assert held_out["rm/min_reward"] == pytest.approx(scores.min(), abs=1e-5)
    assert held_out["rm/max_reward"] == pytest.approx(scores.max(), abs=1e-5)
    assert scores.min() < scores.max() - 0.01 and held_out["loss"] < math.log(2)


# Of TRL's own trainers in float64, by `python -m tools.same_as_trl`: the loss, the norm of the gradients, and their
# product with random numbers.
OF_TRL = {
    "sigmoid": (0.6992361545562744, 1.0324320327244076, 0.5274457331526444),
    "exo_pair": (0.517448365688324, 1.131828589053694, 0.5320535101051428),
    "rm, centred": (0.5973226872095715, 9.137220081584543, 0.4731488941266805),
    "jsd": (0.32688025771326673, 0.08126101339396335, 0.5647676185721652),
}


def test_losses_and_gradients_of_packed_rows_are_those_of_the_trainers_of_trl(tmp_path, monkeypatch):
    """In float32, with shared prompts, in several micro-batches. The policy is not the reference."""
    make_models(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    monkeypatch.setattr(Recorder, "gradients", {})
    for case, expected in OF_TRL.items():
        loss, gradients, _ = ours(case, tmp_path, "sgd")
        found = summary(loss, gradients)
        assert found == pytest.approx(expected, rel=1e-6, abs=3e-6), case
