"""The client of a server with a frozen model: what it asks, and one sentence for each refusal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.inference import free_port
from tests.support.model_server import FrozenModel
from trainer.config import Config
from trainer.errors import UserError, WorkerError
from trainer.files.atomic_io import digest_weights
from trainer.models.checks import check_vocabularies
from trainer.models.tiny import TinyShape, build_tiny
from trainer.process import time_limits
from trainer.process.model_server import ModelServer


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_tiny(TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, head_dim=16), str(path))
    return path


def test_a_server_gives_log_probs_by_token_ids_and_other_weights_are_refused(path, tmp_path, monkeypatch):
    """And a server that does not answer ends the run, to be started again."""
    sequences = [np.arange(5, 5 + length, dtype=np.int32) for length in (2, 7, *[3] * 20)]
    with FrozenModel(path, "logprobs") as server:
        client = ModelServer(f"{server.url}/", "algorithm.teacher.url", "logprobs")
        assert client.weights == digest_weights(str(path))
        model = AutoModelForCausalLM.from_pretrained(path)
        answers = zip(sequences, client.logprobs(sequences), client.logprobs(sequences, 3), strict=True)
        for ids, (tokens, logprobs), (likeliest, of_likeliest) in answers:
            with torch.no_grad():
                whole = model(torch.from_numpy(ids)[None].long()).logits[0, :-1].log_softmax(-1)
            assert tokens.tolist() == ids[1:].tolist() and likeliest.tolist() == whole.topk(3).indices.tolist()
            expected = whole[range(len(ids) - 1), ids[1:]].tolist(), whole.topk(3).values.tolist()
            for found, right in zip((logprobs, of_likeliest), expected, strict=True):
                np.testing.assert_allclose(found, right, atol=2e-2)  # the server drifts with repetitions
        assert sorted(len(request["token_ids"]) for request in server.requests) == [6, 6, 16, 16]
        server.weights = "other"
        with pytest.raises(UserError, match=f"^algorithm.teacher.url={server.url}: serves other weights$"):
            client.logprobs(sequences[:1])
        other = ModelServer(server.url, "reward.model.url", "scores")
        with pytest.raises(UserError, match="serves another kind of model; start it with a reward model"):
            other.scores(sequences)
    monkeypatch.setattr(time_limits, "SERVER_ABSENCE_S", 0.3)
    with pytest.raises(WorkerError, match="does not answer .* waited for 0.3 s; restart the job") as raised:
        ModelServer(f"http://127.0.0.1:{free_port()}", "reward.model.url", "scores").scores(sequences)
    assert raised.value.cause == "server_absent"


def test_a_model_with_other_tokens_or_shorter_sequences_is_refused_before_the_start(path, tmp_path):
    cfg = Config()
    cfg.model.path, cfg.algorithm.opd_kl_coef = str(path), 1.0
    with FrozenModel(path, "logprobs") as server:
        cfg.algorithm.teacher.url = server.url
        check_vocabularies(cfg, str(path))
        cfg.rollout.max_prompt_tokens = 4000
        with pytest.raises(UserError, match="takes sequences of 3999 tokens, and those of this run have up to 4512"):
            check_vocabularies(cfg, str(path))
        cfg.rollout.max_prompt_tokens = 64
        server.tokens = {**server.tokens, "more": 4000}
        check_vocabularies(cfg, str(path))
        server.tokens["A"], server.tokens["B"] = server.tokens["B"], server.tokens["A"]
        with pytest.raises(UserError, match=r"url=http.*: 2 tokens of the policy, such as 'A' .* of the teacher"):
            check_vocabularies(cfg, str(path))
