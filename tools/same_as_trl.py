"""Compare DPO, reward models and distillation with the trainers of TRL 1.16: losses, gradients, weights after a step.

    python -m tools.same_as_trl [--cases sigmoid rm jsd]

Run it in an environment that has this project and `trl==1.16.0`. Each case trains one small model on the same ragged
rows, in float32 on one thread: by a rank of ours (packed rows, shared prompts, two micro-batches), and by TRL's own
`DPOTrainer`, `RewardTrainer` or `GKDTrainer` (padded rows, its own loop). Prints a line for each: the relative
difference of the losses, of the gradients (to their norm), and of the change of the weights by one step of SGD with
learning rate 1 and by one of AdamW with 1e-2 (to the norm of the change). Ends with status 1 if one is above
`--tolerance`. For AdamW, gradients below 1e-5 of the largest are left out: its first step is nearly the sign of a
gradient, and that of rounding has none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.whole_batches import compute_batch, update_batch
from trainer.config import Config, DataConfig
from trainer.config.algorithm import TeacherConfig
from trainer.data.examples import load_pairs
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer, stop_token_ids
from trainer.objectives import make_objective
from trainer.objectives.batches import batch_of
from trainer.parallel.mesh import destroy_process_group
from trainer.sources.supervised import episodes_of
from trainer.workers.rank import Rank

SMOOTHING = 0.1
PAIRS = {
    name: {"loss_type": name} | ({"label_smoothing": SMOOTHING} if name in ("robust", "exo_pair") else {})
    for name in ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "apo_zero", "apo_down", "nca_pair", "sppo_hard",
                 "bco_pair", "exo_pair")
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"rm": {}, "rm, centred": {"center_rewards_coefficient": 0.01}}
DIVERGENCES = {"forward": 0.0, "reverse": 1.0, "jsd": 0.3}
LENGTH = 512
Found = tuple[float, dict[str, Tensor], dict[str, Tensor]]
"""The loss, the gradients, and the weights after a step."""


class Recorder(torch.optim.SGD):
    """SGD that keeps the gradients of its last step."""

    gradients: Mapping[int, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        given = [parameter for group in self.param_groups for parameter in group["params"]]
        Recorder.gradients = {id(p): _whole(p.grad).clone() for p in given if p.grad is not None}
        super().step()


def _whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def make_rows() -> list[dict[str, Any]]:
    """Return ragged pairs of chats."""
    rng = random.Random(3)

    def text(longest: int) -> str:
        return "".join(rng.choices("abcdefgh ", k=rng.randint(1, longest))).strip() or "a"

    rows = []
    for _ in range(6):
        answers = {key: [{"role": "assistant", "content": text(12)}] for key in ("chosen", "rejected")}
        rows.append({"prompt": [{"role": "user", "content": text(24)}], **answers})
    return rows


def make_models(directory: Path) -> None:
    """Write a policy, a reference and a teacher that differ from it, and a reward model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "num_heads": 2, "head_dim": 32}
    build_tiny(TinyShape(**shape, num_kv_heads=1), str(directory / "reference"))
    build_tiny(TinyShape(**shape, num_kv_heads=1), str(directory / "policy"))
    tokenizer = load_tokenizer(str(directory / "policy"))
    model = AutoModelForCausalLM.from_pretrained(directory / "policy")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(directory / "policy")
    for parameter in model.parameters():  # in float32 a small divergence has few digits
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(directory / "teacher")
    judge = AutoModelForSequenceClassification.from_pretrained(directory / "policy", num_labels=1)
    judge.score.weight.data.normal_(generator=generator, std=0.2)
    judge.save_pretrained(directory / "rm")
    tokenizer.save_pretrained(directory / "rm")


# ---------------------------------------------------------------------------------------------------
# Ours


def beta_of(loss: str) -> float:
    return 2.0 if loss == "sigmoid_norm" else 0.1  # the former divides by lengths


def config_of(case: str, directory: Path) -> Config:
    cfg = Config()
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = len(make_rows())
    cfg.trainer.max_tokens_per_micro_batch = 120
    optimizer = cfg.trainer.policy.optimizer
    optimizer.max_grad_norm = optimizer.weight_decay = 0.0
    if case in PAIRS:
        cfg.trainer.task, cfg.dpo.beta = "dpo", beta_of(case)
        for name, value in PAIRS[case].items():
            setattr(cfg.dpo, name, value)
    elif case in MODELS:
        cfg.trainer.task = "rm"
        cfg.rm.center_rewards_coefficient = MODELS[case].get("center_rewards_coefficient")
    else:
        beta = DIVERGENCES[case] if case == "jsd" else 0.5
        cfg.algorithm.teacher = TeacherConfig(str(directory / "teacher"), case, beta)
        cfg.algorithm.opd_kl_coef, cfg.algorithm.advantage_estimator = 1.0, "zero"
        cfg.algorithm.kl_coef, cfg.rollout.n, cfg.rollout.max_logprob_diff = 0.0, 1, None
    return cfg


@contextmanager
def connected(cfg: Config) -> Iterator[Rank]:
    rank = Rank(cfg, 0, 1, "cpu")
    with tempfile.TemporaryDirectory() as store:
        rank.connect(f"file://{store}/store")
        try:
            yield rank
        finally:
            rank.roles.clear()
            destroy_process_group()


def batch_for(cfg: Config, directory: Path) -> dict[str, np.ndarray]:
    """Return the rows of a case as arrays, without what models compute for them."""
    tokenizer = load_tokenizer(str(directory / "policy"))
    data = DataConfig(train_files=[str(directory / "pairs.jsonl")])
    stops = stop_token_ids(str(directory / "policy"), tokenizer)
    pairs = load_pairs(data, "train", tokenizer, stops, ("", LENGTH), False)
    episodes = [episode for i, pair in enumerate(pairs) for episode in episodes_of(pair, str(i))]
    batch = batch_of(episodes)
    if cfg.trainer.task in ("dpo", "rm"):
        return make_objective(cfg).experience(episodes, batch).batch
    zeros = np.zeros_like(batch["mask"])
    return batch | {"advantages": zeros, "old_logprobs": zeros, "rollout_logprobs": zeros}


def ours(case: str, directory: Path, optimizer: str) -> Found:
    cfg = config_of(case, directory)
    settings = cfg.trainer.policy.optimizer
    settings.name, settings.lr = ("adamw", 1e-2) if optimizer == "adamw" else (f"{__name__}:Recorder", 1.0)
    batch = batch_for(cfg, directory)
    with connected(cfg) as rank:
        if case in PAIRS:
            rank.build(cfg.roles, str(directory / "reference"))
            numbers, scored = compute_batch(rank, "reference", "logprobs", batch)
            batch["ref_logprobs"] = scored[np.argsort(numbers)]
        rank.build(cfg.roles, str(directory / ("rm" if case in MODELS else "policy")))
        metrics = update_batch(rank, "policy", batch, 1).metrics
        parameters = dict(rank.roles["policy"].module.named_parameters())
        parameters = {name.replace("value_head.", "score."): p for name, p in parameters.items()}
        gradients = {name: Recorder.gradients.get(id(p)) for name, p in parameters.items()}
        weights = {name: _whole(p).clone() for name, p in parameters.items()}
    return metrics["loss"], {name: g for name, g in gradients.items() if g is not None}, weights


# ---------------------------------------------------------------------------------------------------
# TRL


def trl(
    case: str, directory: Path, optimizer: str, rows: list[dict[str, Any]], dtype: torch.dtype = torch.float32
) -> Found:
    import trl as package
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    common: dict[str, Any] = {
        "output_dir": str(directory / "trl"), "use_cpu": True, "bf16": False, "max_steps": 1, "report_to": [],
        "per_device_train_batch_size": len(rows), "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
        "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False, "max_length": LENGTH,
    }  # fmt: skip
    load = AutoModelForSequenceClassification if case in MODELS else AutoModelForCausalLM
    model = load.from_pretrained(directory / ("rm" if case in MODELS else "policy"), dtype=dtype)
    frozen = "teacher" if case in DIVERGENCES else "reference"
    reference = AutoModelForCausalLM.from_pretrained(directory / frozen, dtype=dtype)
    given: dict[str, Any] = {"model": model, "processing_class": load_tokenizer(str(directory / "policy"))}
    if case in PAIRS:
        base, args = package.DPOTrainer, package.DPOConfig(beta=beta_of(case), **PAIRS[case], **common)
        given |= {"ref_model": reference, "train_dataset": Dataset.from_list(rows)}
    elif case in MODELS:
        base, args = package.RewardTrainer, package.RewardConfig(**MODELS[case], **common)
        given["train_dataset"] = Dataset.from_list(rows)
    else:
        base, args = GKDTrainer, GKDConfig(beta=DIVERGENCES[case], temperature=1.0, lmbda=0.0, **common)
        inputs = padded(batch_for(config_of(case, directory), directory))
        messages = [{"messages": [*row["prompt"], *answer]} for row in rows for answer in (row["chosen"],)]
        given |= {"teacher_model": reference, "train_dataset": Dataset.from_list(messages)}
        given["data_collator"] = lambda _: dict(inputs)
    losses: list[float] = []

    class Trained(base):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss))
            return loss

    steps = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0) if optimizer == "adamw" else None
    steps = steps or Recorder(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(steps, lambda _: 1.0)
    Trained(args=args, optimizers=(steps, schedule), **given).train()
    parameters = dict(model.named_parameters())
    gradients = {name: Recorder.gradients.get(id(p)) for name, p in parameters.items()}
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    return losses[0], {name: g for name, g in gradients.items() if g is not None}, weights


def padded(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return what the collator of GKD makes of the rows."""
    ids = torch.from_numpy(batch["input_ids"].astype(np.int64))
    attention = (torch.arange(ids.shape[1]) < torch.from_numpy(batch["lengths"])[:, None]).long()
    labels = ids.where(torch.from_numpy(batch["mask"]) > 0, -100)
    return {"input_ids": ids, "attention_mask": attention, "labels": labels, "prompts": ids[:, :1],
            "prompt_attention_mask": attention[:, :1]}  # fmt: skip


# ---------------------------------------------------------------------------------------------------


def distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor], start: Mapping[str, Tensor] | None = None) -> float:
    """Return the norm of the difference of the tensors, relative to that of the second less `start`."""
    difference = sum(((one[name] - two[name]).double() ** 2).sum() for name in two)
    whole = sum(((two[name] - start[name] if start else two[name]).double() ** 2).sum() for name in two)
    return float((difference / whole) ** 0.5)


def summary(loss: float, gradients: Mapping[str, Tensor]) -> list[float]:
    """Return the loss, the norm of the gradients, and their product with fixed random numbers, relative to the norm."""
    generator, norm = torch.Generator().manual_seed(7), sum((g.double() ** 2).sum() for g in gradients.values()) ** 0.5
    product = 0.0
    for _, gradient in sorted(gradients.items()):
        product += float((gradient.double() * torch.randn(gradient.shape, generator=generator).double()).sum())
    return [loss, float(norm), product / float(norm)]


def compare(case: str, directory: Path, rows: list[dict[str, Any]]) -> list[float]:
    """Return the relative differences of a case: loss, gradients, step of SGD, step of AdamW; and those of the losses
    and gradients of ours and of TRL from TRL's in float64."""
    from safetensors.torch import load_file

    start = load_file(directory / ("rm" if case in MODELS else "policy") / "model.safetensors")
    loss, gradients, weights = ours(case, directory, "sgd")
    of_trl, theirs, their_weights = trl(case, directory, "sgd", rows)
    by_adamw = ours(case, directory, "adamw")[2], trl(case, directory, "adamw", rows)[2]
    exact_loss, exact, _ = trl(case, directory, "sgd", rows, torch.float64)
    largest = max(float(gradient.abs().max()) for gradient in exact.values())
    is_large = {name: gradient.abs() > 1e-5 * largest for name, gradient in exact.items()}
    steps = [{name: one[name].where(is_large[name], start[name]) for name in exact} for one in by_adamw]
    assert set(gradients) == set(theirs) == set(exact), set(gradients) ^ set(theirs)
    print(f"{case}: in float64, TRL has {summary(exact_loss, exact)}", file=sys.stderr)
    return [
        abs(loss - of_trl) / abs(of_trl),
        distance(gradients, theirs),
        distance(weights, {name: their_weights[name] for name in theirs}, start),
        distance(*steps, start),
        abs(loss - exact_loss) / abs(exact_loss),
        distance(gradients, exact),
        distance(theirs, exact),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*PAIRS, *MODELS, *DIVERGENCES]
    parser.add_argument("--cases", nargs="+", choices=known, default=known)
    parser.add_argument("--tolerance", type=float, default=1e-6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    worst = 0.0
    print("| case | loss | gradients | SGD | AdamW | loss, exact | ours, exact | TRL, exact |\n" + "|---" * 8 + "|")
    with tempfile.TemporaryDirectory() as name:
        directory, rows = Path(name), make_rows()
        make_models(directory)
        (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for case in args.cases:
            differences = compare(case, directory, rows)
            worst = max(worst, *differences[:4])
            print(f"| {case} | {' | '.join(f'{one:.1e}' for one in differences)} |", flush=True)
    raise SystemExit(int(worst > args.tolerance))


if __name__ == "__main__":
    main()
