"""A reward model on the ranks is a scorer like the pool of reward functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tests.support.ranks import local_cluster
from tests.support.runs import configured
from trainer.config import Config, DataConfig
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.evaluate.subject import PATH as EVALUATION
from trainer.journal.history import Identity
from trainer.journal.journal import Journal
from trainer.learner.learner import Learner
from trainer.metrics.timing import Timer
from trainer.models.checks import check_vocabularies
from trainer.models.tiny import TinyShape, build_tiny
from trainer.sources.routes import check_source
from trainer.tasks import Ingredients, build_task

TINY = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "head_dim": 16}


def config(root: Path) -> Config:
    for seed, name in enumerate(("policy", "judge")):
        build_tiny(TinyShape(seed=seed, **TINY), str(root / name))
    file = root / "judge/model.safetensors"
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    save_file({**load_file(file), "score.weight": head}, file, metadata={"format": "pt"})
    lines = "".join(json.dumps({"prompt": f"p{i}", "answer": "x"}) + "\n" for i in range(6))
    (root / "prompts.jsonl").write_text(lines)
    cfg = configured(root / "run", train_batch_size=3, val_interval=1)
    cfg.reward.name, cfg.reward.model.path = "model", str(root / "judge")
    cfg.model.path = str(root / "policy")
    cfg.data = DataConfig(train_files=[str(root / "prompts.jsonl")], val_files=[str(root / "prompts.jsonl")])
    cfg.rollout.engine, cfg.rollout.n, cfg.rollout.max_response_tokens = "transformers", 2, 8
    cfg.algorithm.dynamic_sampling = True
    return cfg


def test_a_reward_model_on_two_ranks_scores_training_and_validation(tmp_path):
    cfg = config(tmp_path)
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge", num_labels=1, pad_token_id=0)

    def score(episode: Episode) -> float:
        return judge(torch.from_numpy(episode.samples[0].token_ids)[None].long()).logits.item()

    with local_cluster(2, cfg) as cluster:
        learner = Learner(cluster.cfg, cluster, Timer())
        task = build_task(cluster.cfg)
        journal = Journal(cfg.trainer.run_dir, Identity("", ""), lambda: None, is_on=False)
        given = Ingredients(cluster.cfg, cfg.model.path, learner, cluster, Timer(), lambda: None, journal)
        source, evaluator = task.source(given)
        with source:
            learner.build(cfg.model.path)
            for wait in given.waits:
                wait()
            source.start(version=1, is_initial=True)
            episodes = source.next(1)
            assert [episode.reward for episode in episodes] == pytest.approx([*map(score, episodes)], abs=1e-5)
            metrics = source.add_metrics(1, {})
            evaluation = evaluator.evaluate(0)
            assert learner.make_experience(episodes, 1).batch["advantages"].any()
    rewards = [episode.reward for episode in episodes]
    assert len(rewards) == 6 and metrics["sampling/batches"] == 1, "all prompts have completions of different rewards"
    assert metrics["reward/reward_model/mean"] == pytest.approx(sum(rewards) / 6)
    expected = [score(episode) for episode in evaluation.greedy]
    assert evaluation.metrics["val/reward/mean"] == pytest.approx(sum(expected) / 6, abs=1e-5)


def test_a_reward_model_with_other_tokens_than_the_policy_is_refused(tmp_path):
    """Its vocabulary has as many tokens, two of which have changed places."""
    cfg = config(tmp_path)
    check_vocabularies(cfg, str(tmp_path / "policy"))
    file = tmp_path / "judge/tokenizer.json"
    text = file.read_text()
    vocab = json.loads(text)["model"]["vocab"]
    one, two = sorted(vocab, key=vocab.get)[20:22]
    swapped = json.loads(text)
    swapped["model"]["vocab"] |= {one: vocab[two], two: vocab[one]}
    file.write_text(json.dumps(swapped))
    with pytest.raises(UserError, match="reward.model.path=.*judge: 2 tokens of the policy, such as .* of the reward_"):
        check_vocabularies(cfg, str(tmp_path / "policy"))
    cfg.trainer.task = EVALUATION
    with pytest.raises(UserError, match="reward.name=model: an evaluation has no ranks for a reward model"):
        check_source(cfg)
