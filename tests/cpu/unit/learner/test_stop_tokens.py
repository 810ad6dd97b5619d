"""Models that stop at their first token and models that never stop: a step on their completions has finite numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.whole_batches import compute_batch, update_batch
from trainer.algorithms import ADVANTAGES, shape_rewards
from trainer.config import Config
from trainer.episodes import Sample
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.transformers_engine import TransformersEngine
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer, stop_token_ids
from trainer.objectives.batches import build_batch
from trainer.objectives.experience import add_advantages, describe_rewards, logprob_mismatch, mask_rows
from trainer.workers.rank import Rank

MAX_TOKENS, N = 6, 4


@pytest.fixture(scope="module", params=["first token", "never"])
def stopping_model(request, tmp_path_factory) -> tuple[str, str]:
    """A model whose every completion is the stop token alone, or one that never samples a stop token."""
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyShape(hidden_size=64, intermediate_size=128, tie_word_embeddings=False, seed=3), path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0  # the same large number in the state of every token
        model.lm_head.weight[tokenizer.eos_token_id, 0] = 20.0 if request.param == "first token" else -20.0
    model.save_pretrained(path)
    return path, request.param


def steps(rank: Rank, path: str) -> list[dict]:
    """One step with each advantage estimator; the metrics of each, with the lengths of its completions."""
    cfg = rank.cfg
    rank.build(roles(rank.cfg, ["policy", "critic"]), path)
    stops = stop_token_ids(path, load_tokenizer(path))
    engine = TransformersEngine(path, dtype="float32", seed=1, rollout=cfg.rollout, device="cpu")
    prompts = [tuple(range(65, 68 + i)) for i in range(4)]
    sampling = Sampling(1.0, 1.0, -1, MAX_TOKENS, stops)
    requests = [Request(prompt, 10 * i + j, sampling) for i, prompt in enumerate(prompts) for j in range(N)]
    results = []
    for estimator in ADVANTAGES:
        cfg.algorithm.advantage_estimator = estimator
        completions = engine.generate(requests)
        samples = [sample_of(r.prompt_token_ids, c) for r, c in zip(requests, completions, strict=True)]
        batch = build_batch(samples, [str(i // N) for i in range(len(samples))])
        shape = batch["input_ids"].shape
        for key, (rows, values) in {
            "old_logprobs": compute_batch(rank, "policy", "logprobs", batch),
            "values": compute_batch(rank, "critic", "values", batch),
        }.items():
            batch[key] = torch.zeros(shape).numpy()
            batch[key][rows] = values
        batch["teacher_logprobs"] = batch["old_logprobs"] - 0.25
        batch["player_baselines"] = torch.full((len(samples),), 0.25).numpy()
        a, lengths = cfg.algorithm, torch.tensor([len(c.token_ids) for c in completions])
        zeros = torch.zeros(len(requests)).double()
        rewards = shape_rewards(zeros, lengths, MAX_TOKENS, a.overlong_buffer, a.run_option("overlong_factor")).numpy()
        batch = add_advantages(batch, rewards, a, 0.0, rewards if estimator == "remax" else None)
        status = [c.finish_reason for c in completions]
        metrics = describe_rewards(batch, rewards, status) | logprob_mismatch(batch)
        batch = mask_rows(batch, rewards, status, a)
        metrics |= {f"policy/{name}": x for name, x in update_batch(rank, "policy", batch, 1).metrics.items()}
        if estimator == "gae":
            metrics |= {f"critic/{name}": x for name, x in update_batch(rank, "critic", batch, 1).metrics.items()}
        results.append(metrics | {"lengths": lengths.tolist()})
    return results


def sample_of(prompt: Sequence[int], completion: Completion) -> Sample:
    nothing = [0.0] * len(prompt)
    mask = np.asarray([*nothing, *([1.0] * len(completion.token_ids))], np.float32)
    logprobs = np.asarray([*nothing, *completion.logprobs], np.float32)
    return Sample(np.asarray([*prompt, *completion.token_ids]), mask, logprobs, (0, 0))


def test_a_step_on_such_completions_is_finite(stopping_model):
    """Their rewards differ by the penalty of long completions, or all rows are left out."""
    path, kind = stopping_model
    overlong, filtered = (3, False) if kind == "first token" else (0, True)
    cfg = Config()
    cfg.rollout.max_response_tokens, cfg.rollout.n = MAX_TOKENS, N
    cfg.algorithm.overlong_buffer = overlong
    cfg.algorithm.options |= {"filter_zero_variance": filtered, "overlong_masking": filtered}
    results = run_ranks(1, steps, path, cfg=cfg)[0]
    assert len(results) == len(ADVANTAGES)
    for metrics in results:
        assert set(metrics.pop("lengths")) == {1 if kind == "first token" else MAX_TOKENS}
        assert all(math.isfinite(value) for value in metrics.values()), metrics
