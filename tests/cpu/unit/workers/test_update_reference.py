"""Policy and critic updates against plain transformers, autograd and AdamW, written from docs/algorithms.md.

The reference runs one sequence at a time, without padding, ranks or micro-batches, and shares no code with ours.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import update
from tests.support.whole_batches import compute_batch
from trainer.config import AlgorithmConfig, Config, OptimizerConfig
from trainer.parallel.batching import Batch, select
from trainer.workers.rank import Rank

VOCABULARY, WIDTH, TEMPERATURE, MAX_RESPONSE = 48, 14, 0.5, 9
PROMPTS, LENGTHS = [3, 3, 5, 5, 2, 2], [9, 14, 6, 11, 5, 12]  # tokens of each prompt, and with its completion
KL_COEFS = (0.7, 0.2)  # of the two steps; the config names another
OPTIMIZER = OptimizerConfig(
    lr=0.01, betas=[0.6, 0.8], eps=1e-3, weight_decay=0.2, max_grad_norm=0.05, warmup_steps=4
)  # an epsilon above the clipped gradients: without it AdamW does not notice a scaled gradient


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,  # far from uniform: temperature and entropy matter
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(11)
        Qwen3ForCausalLM(config).float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def experience(model_path) -> Batch:
    """Six completions in three groups: unequal lengths, tool output inside of one, one that is not to be learnt."""
    rng = np.random.default_rng(5)
    ids = np.zeros((6, WIDTH), np.int64)
    mask = np.zeros((6, WIDTH), np.float32)
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        ids[row, :length] = rng.integers(2, VOCABULARY, length)
        mask[row, prompt:length] = 1
    mask[1, 7:9] = 0
    mask[4] = 0
    noise = rng.normal(size=(5, 6, WIDTH)).astype(np.float32)
    logprobs = np.zeros((6, WIDTH), np.float32)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        for row, length in enumerate(LENGTHS):
            logprobs[row, 1:length] = token_scores(model, torch.from_numpy(ids[row, :length]))[0].numpy()
    return {
        "input_ids": ids,
        "mask": mask,
        "lengths": np.asarray(LENGTHS),
        "group_ids": np.asarray([0, 0, 1, 1, 2, 2]),
        "advantages": noise[0] * mask,
        "old_logprobs": (logprobs + 0.3 * noise[1]) * mask,  # ratios beyond both bounds
        "rollout_logprobs": logprobs,
        "ref_logprobs": (logprobs + 0.5 * noise[2]) * mask,
        "values": 0.6 * noise[3] * mask,
        "returns": noise[4] * mask,
    }


def config(algorithm: AlgorithmConfig, max_tokens: int = 30) -> Config:
    cfg = Config()
    cfg.rollout.max_logprob_diff = None  # no engine has sampled the batch
    cfg.algorithm = dataclasses.replace(algorithm, kl_coef=0.05)
    cfg.rollout.temperature = TEMPERATURE
    cfg.rollout.max_response_tokens = MAX_RESPONSE
    cfg.trainer.mini_batch_size = 3  # all groups: one optimizer step
    cfg.trainer.max_tokens_per_micro_batch = max_tokens
    cfg.trainer.policy.optimizer, cfg.trainer.critic.optimizer.lr = OPTIMIZER, OPTIMIZER.lr
    return cfg


# ----------------------------------------------------------------------------------------------------------
# The reference


def token_scores(model: torch.nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the tokens after the first, and the entropies of the distributions they came from."""
    logp = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, dim=-1)
    return logp[torch.arange(len(ids) - 1), ids[1:]], -(logp.exp() * logp).sum(dim=-1)


def aggregate(rows: list[list[Tensor]], kind: str) -> Tensor:
    """One number from lists of token values."""
    rows = [row for row in rows if row]
    if kind == "token_mean":
        return sum(x for row in rows for x in row) / sum(len(row) for row in rows)
    if kind == "seq_mean_token_mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    total = sum(sum(row) for row in rows) / len(rows)
    return total / MAX_RESPONSE if kind == "seq_mean_token_sum_norm" else total


def step_optimizer(optimizer: torch.optim.Optimizer, loss: Tensor, step: int) -> float:
    """The second half of a training step; returns the gradient norm before clipping."""
    optimizer.zero_grad()
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.sqrt(sum(p.grad.square().sum() for p in parameters))
    assert norm > 2 * OPTIMIZER.max_grad_norm, "nothing is clipped"
    for p in parameters:
        p.grad *= OPTIMIZER.max_grad_norm / (norm + 1e-6)
    for group in optimizer.param_groups:
        group["lr"] = OPTIMIZER.lr * (step + 1) / OPTIMIZER.warmup_steps
    optimizer.step()
    return float(norm)


def adamw(module: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=OPTIMIZER.lr, betas=(0.6, 0.8), eps=1e-3, weight_decay=0.2)


def plain_policy_steps(path: str, batch: Batch, a: AlgorithmConfig) -> tuple[list[dict], dict[str, Tensor]]:
    """Two updates; returns their metrics and the weights after them."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = adamw(model)
    metrics = []
    for step, kl_coef in enumerate(KL_COEFS):
        losses, kls, entropies, clipped = ([[] for _ in batch["lengths"]] for _ in range(4))
        for row, length in enumerate(batch["lengths"]):
            logprobs, entropy = token_scores(model, torch.from_numpy(batch["input_ids"][row, :length]))
            for t in np.flatnonzero(batch["mask"][row]):
                log_r = logprobs[t - 1] - batch["old_logprobs"][row, t].item()
                r, gain = log_r.exp(), batch["advantages"][row, t].item()
                inside = 1 - a.clip_low <= r <= 1 + a.clip_high
                bounded = r if inside else torch.tensor(1 - a.clip_low if r < 1 else 1 + a.clip_high)
                losses[row].append(-torch.minimum(r * gain, bounded * gain))
                clipped[row].append(float((r < 1 - a.clip_low and gain < 0) or (r > 1 + a.clip_high and gain > 0)))
                entropies[row].append(entropy[t - 1])
                if "ref_logprobs" in batch:
                    d = logprobs[t - 1] - batch["ref_logprobs"][row, t].item()
                    kls[row].append((-d).exp() - 1 + d if a.kl_estimator == "k3" else d * d / 2)
                else:
                    kls[row].append((r - 1 - log_r).detach())  # k3 of old to new
        loss = aggregate(losses, a.aggregation) - a.entropy_coef * aggregate(entropies, a.aggregation)
        if "ref_logprobs" in batch and a.kl_in == "loss":
            loss = loss + kl_coef * aggregate(kls, a.aggregation)
        clip_frac = aggregate(clipped, "token_mean")
        assert 0.1 < clip_frac < 0.9
        metrics.append(
            {
                "loss": loss.item(),
                "kl": aggregate(kls, "token_mean").item(),
                "entropy": aggregate(entropies, "token_mean").item(),
                "clip_frac": clip_frac,
                "grad_norm": step_optimizer(optimizer, loss, step),
                "lr": OPTIMIZER.lr * (step + 1) / 4,
            }
        )
    return metrics, model.state_dict()


def value_head() -> Tensor:
    """It starts at 0, which hides the backbone's gradients."""
    return 0.2 * torch.randn(1, 32, generator=torch.Generator().manual_seed(2))


def plain_critic_steps(path: str, batch: Batch, clip: float) -> tuple[list[dict], dict[str, Tensor]]:
    """Two updates; returns their metrics and the weights after them."""
    backbone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).model
    critic = torch.nn.ModuleDict({"model": backbone, "value_head": torch.nn.Linear(32, 1, bias=False)})
    critic["value_head"].weight.data.copy_(value_head())
    optimizer = adamw(critic)
    metrics = []
    for step in range(2):
        losses, clipped = [], []
        for row, length in enumerate(batch["lengths"]):
            ids = torch.from_numpy(batch["input_ids"][row, :length])
            values = critic["value_head"](backbone(ids[None]).last_hidden_state[0]).squeeze(-1)
            for t in np.flatnonzero(batch["mask"][row]):
                v, old, target = values[t - 1], batch["values"][row, t].item(), batch["returns"][row, t].item()
                near = v if abs(v.item() - old) <= clip else torch.tensor(old + clip if v > old else old - clip)
                losses.append(torch.maximum((v - target) ** 2, (near - target) ** 2) / 2)
                moved = (near is not v) and (near - target) ** 2 > (v - target) ** 2
                clipped.append((1 if v > old else -1) if moved else 0)
        assert {1, 0, -1} == set(clipped), "the clip must act both ways"
        loss = sum(losses) / len(losses)
        metrics.append(
            {
                "loss": loss.item(),
                "clip_frac": sum(map(abs, clipped)) / len(clipped),
                "grad_norm": step_optimizer(optimizer, loss, step),
                "lr": OPTIMIZER.lr * (step + 1) / 4,
            }
        )
    return metrics, critic.state_dict()


# ----------------------------------------------------------------------------------------------------------
# Ours


def policy_steps(rank: Rank, path: str, batch: Batch) -> tuple[list[dict], dict[str, Tensor]]:
    rank.build(roles(rank.cfg, ["policy"]), path)
    metrics = [update(rank, "policy", batch, step, kl_coef) for step, kl_coef in enumerate(KL_COEFS, start=1)]
    return metrics, {name: tensor.clone() for name, tensor in rank.roles["policy"].stream_weights("float32")}


def critic_steps(rank: Rank, path: str, batch: Batch) -> tuple[list[dict], dict[str, Tensor]]:
    rank.build(roles(rank.cfg, ["critic"]), path)
    head = rank.roles["critic"].module.value_head.weight
    with torch.no_grad():
        head.copy_(distribute_tensor(value_head(), head.device_mesh, head.placements))
    metrics = [update(rank, "critic", batch, step) for step in (1, 2)]
    return metrics, {n: p.full_tensor().detach().clone() for n, p in rank.roles["critic"].module.named_parameters()}


def scores(rank: Rank, path: str, batch: Batch) -> tuple[tuple, tuple]:
    """Log-probs and values of this rank's rows."""
    rank.build(roles(rank.cfg, ["policy", "critic"]), path)
    head = rank.roles["critic"].module.value_head.weight
    with torch.no_grad():
        head.copy_(distribute_tensor(value_head(), head.device_mesh, head.placements))
    return compute_batch(rank, "policy", "logprobs", batch), compute_batch(rank, "critic", "values", batch)


def first_update(rank: Rank, path: str, batch: Batch) -> tuple[dict[str, dict], np.ndarray]:
    """With old and reference log-probs of our own: the metrics of updates with and without a reference."""
    rank.build(roles(rank.cfg, ["policy", "reference"]), path)
    batch = {name: array for name, array in batch.items() if name != "ref_logprobs"}
    found = {}
    for name, role in (("old_logprobs", "policy"), ("ref_logprobs", "reference")):
        parts: list = [None] * rank.world_size
        dist.all_gather_object(parts, compute_batch(rank, role, "logprobs", batch))
        found[name] = assemble(parts, batch)
    metrics = {"reference": update(rank, "policy", {**batch, **found}, 1)}
    rank.build(roles(rank.cfg, ["policy"]), path)
    metrics["none"] = update(rank, "policy", {**batch, "old_logprobs": found["old_logprobs"]}, 1)
    return metrics, found["old_logprobs"]


def step_of_mini_batches(rank: Rank, path: str, batch: Batch) -> tuple[dict, list[tuple[float, dict]], dict]:
    """Metrics of a step, tokens and metrics of each of its mini-batches, and metrics of a step without any token."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    seen = []
    optimizer_step = rank.roles["policy"].optimizer_step

    def recording(share, part, *others):
        seen.append((part.tokens, optimizer_step(share, part, *others)))
        return seen[-1][1]

    rank.roles["policy"].optimizer_step = recording
    metrics = update(rank, "policy", batch, 1)
    parts = seen[:]
    nothing = {**batch, "mask": np.zeros_like(batch["mask"])}
    return metrics, parts, update(rank, "policy", nothing, 2)


def losses_at(rank: Rank, path: str, batch: Batch, kl_coefs: list[float | None]) -> list[float]:
    """The first update's loss with each of these coefficients."""
    found = []
    for kl_coef in kl_coefs:
        rank.build(roles(rank.cfg, ["policy"]), path)
        found.append(update(rank, "policy", batch, 1, kl_coef)["loss"])
    return found


BOUNDS = {"clip_low": 0.1, "clip_high": 0.3, "entropy_coef": 0.3}
CRITIC = AlgorithmConfig(advantage_estimator="gae", options={"value_clip": 0.3})


def assert_same(results: list[tuple], expected: tuple[list[dict], dict[str, Tensor]], path: str) -> None:
    start = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    start["value_head.weight"] = value_head()
    for metrics, weights in results:
        for ours, theirs in zip(metrics, expected[0], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-7)
        assert weights.keys() == expected[1].keys()
        for name, tensor in weights.items():
            moved = (expected[1][name] - start[name]).abs().max()
            assert moved > 1e-4, name
            assert (tensor - expected[1][name]).abs().max() < 1e-3 * moved, name


CASES = {
    "tokens": AlgorithmConfig(aggregation="token_mean"),
    "sequences": AlgorithmConfig(aggregation="seq_mean_token_mean", kl_estimator="k2"),
    "sums": AlgorithmConfig(aggregation="seq_mean_token_sum"),
    "normalised sums": AlgorithmConfig(aggregation="seq_mean_token_sum_norm"),
    "kl in the reward": AlgorithmConfig(kl_in="reward", aggregation="token_mean"),
    "no reference": AlgorithmConfig(aggregation="token_mean"),
}


def steps_of_cases(rank: Rank, path: str, cases: list[tuple[str, Config, Batch]]) -> list[tuple]:
    """What the policy or the critic does in each case, one after the other."""
    found = []
    for role, cfg, batch in cases:
        rank.cfg = cfg
        found.append((policy_steps if role == "policy" else critic_steps)(rank, path, batch))
    return found


def test_updates_equal_plain_pytorch(model_path, experience):
    """Each aggregation of the policy, with and without a reference, and the critic, on two ranks."""
    cases, expected = [], []
    for name, case in CASES.items():
        algorithm = dataclasses.replace(case, **BOUNDS)
        batch = dict(experience)
        if name == "no reference":
            del batch["ref_logprobs"]
        cases.append(("policy", config(algorithm), batch))
        expected.append(plain_policy_steps(model_path, batch, algorithm))
    cases.append(("critic", config(CRITIC), experience))
    expected.append(plain_critic_steps(model_path, experience, clip=0.3))
    results = run_ranks(2, steps_of_cases, model_path, cases, cfg=config(CRITIC))
    for number, name in enumerate((*CASES, "critic")):
        try:
            assert_same([result[number] for result in results], expected[number], model_path)
        except AssertionError as error:
            error.add_note(f"in the case {name}")
            raise


def steps_and_scores(rank: Rank, path: str, batches: list[Batch], cases: list[tuple]) -> tuple[list, list]:
    found = steps_of_cases(rank, path, cases)
    return found, [scores(rank, path, batch) for batch in batches]


def test_ranks_without_rows_contribute_nothing(model_path, experience):
    """Four ranks, one row a micro-batch: some micro-batches are empty, the last one of a rank among them."""
    batches = [select(experience, rows) for rows in ([0, 1, 3], [0, 1, 2, 3, 5])]
    algorithm = dataclasses.replace(CASES["sequences"], **BOUNDS)
    critic = config(CRITIC, max_tokens=1)
    cases, expected = [], []
    for batch in batches:
        cases += [("policy", config(algorithm, max_tokens=1), batch), ("critic", critic, batch)]
        expected += [
            plain_policy_steps(model_path, batch, algorithm),
            plain_critic_steps(model_path, batch, clip=0.3),
        ]
    results = run_ranks(4, steps_and_scores, model_path, batches, cases, cfg=critic)
    for number, of_plain in enumerate(expected):
        assert_same([steps[number] for steps, _ in results], of_plain, model_path)

    ((_, alone),) = run_ranks(1, steps_and_scores, model_path, batches, [], cfg=config(CRITIC))
    for number, batch in enumerate(batches):
        for i, name in enumerate(("log-probs", "values")):
            single = assemble([alone[number][i]], batch)
            several = assemble([of_rank[number][i] for _, of_rank in results], batch)
            np.testing.assert_allclose(several, single, atol=1e-5, err_msg=name)


def assemble(parts: list[tuple[np.ndarray, np.ndarray]], batch: Batch) -> np.ndarray:
    """The ranks' rows put together; 0 at tokens that are not a completion's."""
    found = np.full(batch["input_ids"].shape, np.nan, np.float32)
    for rows, values in parts:
        assert values.shape == (len(rows), found.shape[1])
        found[rows] = values
    assert not np.isnan(found).any()
    return found * batch["mask"]


def test_the_first_update_has_no_kl_with_old_logprobs_at_the_sampling_temperature(model_path, experience):
    algorithm = dataclasses.replace(CASES["tokens"], **BOUNDS)
    for metrics, logprobs in run_ranks(2, first_update, model_path, experience, cfg=config(algorithm)):
        for name, found in metrics.items():
            assert abs(found["kl"]) < 1e-8 and found["clip_frac"] == 0, name
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        for row, length in enumerate(LENGTHS):
            with torch.no_grad():
                plain = token_scores(model, torch.from_numpy(experience["input_ids"][row, :length]))[0]
            mask = experience["mask"][row, 1:length]
            np.testing.assert_allclose(logprobs[row, 1:length], plain.numpy() * mask, atol=1e-5)


def test_the_kl_coefficient_defaults_to_the_config(model_path, experience):
    algorithm = dataclasses.replace(CASES["tokens"], **BOUNDS)
    cfg = config(algorithm)
    losses = run_ranks(1, losses_at, model_path, experience, [None, cfg.algorithm.kl_coef, 0.0, 1.0], cfg=cfg)[0]
    assert losses[0] == losses[1] != losses[2]
    assert losses[1] - losses[2] == pytest.approx(cfg.algorithm.kl_coef * (losses[3] - losses[2]), rel=1e-4)


def test_metrics_of_a_step_are_means_over_its_mini_batches_and_kl_over_tokens(model_path, experience):
    cfg = config(dataclasses.replace(CASES["tokens"], **BOUNDS))
    cfg.trainer.mini_batch_size = 1
    step, parts, without_tokens = run_ranks(1, step_of_mini_batches, model_path, experience, cfg=cfg)[0]
    assert sorted(tokens for tokens, _ in parts) == [7, 10, 15]
    assert step["kl"] == pytest.approx(sum(tokens * m["kl"] for tokens, m in parts) / 32)
    for name in ("loss", "entropy", "clip_frac", "grad_norm"):
        assert step[name] == pytest.approx(sum(m[name] for _, m in parts) / 3), name
    assert step["lr"] == parts[-1][1]["lr"] != parts[0][1]["lr"]
    assert "kl" not in without_tokens and without_tokens["loss"] == 0
