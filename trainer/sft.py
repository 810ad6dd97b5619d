"""Supervised training on prompts and answers: the warm start of the embedded model, or a run of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable

from trainer.cluster.ranks import Ranks
from trainer.cluster.runtime import Cluster
from trainer.config import Config
from trainer.data.sft import PackedBatches, load_encoded
from trainer.keyed import key
from trainer.models.export import write_assets
from trainer.models.loading import resolve_model_path
from trainer.models.tiny import build_tiny
from trainer.models.tokenizer import load_tokenizer


def train_supervised(cfg: Config, cluster: Cluster, model_path: str, target: str,
                     report: Callable[[int, dict[str, float]], None]) -> None:  # fmt: skip
    """`sft.steps` optimizer steps from `model_path`; the result goes to `target` in Hugging Face format.

    Args:
        report: called with each step and its metrics (`sft/loss`, `policy/grad_norm`, `policy/lr`).
    """
    tokenizer = load_tokenizer(model_path, cfg.model.chat_template, cfg.model.trust_remote_code)
    examples = load_encoded(cfg.data, tokenizer, cfg.sft.max_length)
    batches = PackedBatches(examples, cfg.trainer.seed, cfg.sft.batch_size, cfg.sft.max_length, tokenizer.pad_token_id)
    ranks = Ranks(dataclasses.replace(cfg, algorithm=dataclasses.replace(
        cfg.algorithm, advantage_estimator="grpo", kl_coef=0.0)), cluster)  # fmt: skip
    ranks.connect()
    ranks.build_for_sft(model_path)
    for step in range(1, cfg.sft.steps + 1):
        metrics = ranks.supervised_update(batches.batch(step))
        report(step, {"sft/loss": metrics["loss"], "policy/grad_norm": metrics["grad_norm"],
                      "policy/lr": metrics["lr"]})  # fmt: skip
    writing = f"{target}.writing-{os.getpid()}"
    shutil.rmtree(writing, ignore_errors=True)
    write_assets(model_path, writing, tokenizer, cfg.model.trust_remote_code)
    ranks.write_weights(os.path.abspath(writing), "float32")
    cluster.release(ranks.policy)
    if os.path.exists(os.path.join(target, "config.json")):  # another job was faster, with the same result
        shutil.rmtree(writing)
    else:
        os.replace(writing, target)


def prepare_model(cfg: Config, cluster: Cluster) -> str:
    """The start weights' path: `model.path`, or the embedded model, built and warm-started once per config."""
    if cfg.model.path is not None:
        return cfg.model.path
    recipe = {
        "tiny": dataclasses.asdict(cfg.model.tiny),
        "sft": dataclasses.asdict(cfg.sft),
        "data": dataclasses.asdict(cfg.data),
        "seed": cfg.trainer.seed,
    }
    target = os.path.join(cfg.model.cache_dir, f"tiny-{key(json.dumps(recipe, sort_keys=True)):016x}")
    if not os.path.exists(os.path.join(target, "config.json")):
        start = f"{target}.start-{os.getpid()}"
        build_tiny(cfg.model.tiny, start, cfg.trainer.seed)
        print(f"warm start of the embedded model: {cfg.sft.steps} supervised steps, once for this config", flush=True)

        def report(step: int, metrics: dict[str, float]) -> None:
            if step % 20 == 0 or step == cfg.sft.steps:
                print(f"  step {step}/{cfg.sft.steps}  loss {metrics['sft/loss']:.3f}", flush=True)

        train_supervised(cfg, cluster, start, target, report)
        shutil.rmtree(start)
    return target


def main() -> None:
    from trainer.main import run_app

    def job(cfg: Config, device: str) -> None:
        with Cluster(cfg, device) as cluster:
            print(f"model: {resolve_model_path(prepare_model(cfg, cluster))}")

    run_app(job)


if __name__ == "__main__":
    main()
