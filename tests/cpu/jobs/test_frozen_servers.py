"""`trainer inference` as the server of a frozen model: vLLM gives what transformers gives, from token ids."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.inference import ROLLOUT, TOKEN, Server, engine
from tests.support.reward_model import add_score_head
from trainer.errors import UserError
from trainer.files.atomic_io import digest_weights
from trainer.models.tiny import TinyShape, build_tiny
from trainer.process.model_server import SCORE, ModelServer
from trainer.process.model_server import TOKEN as VARIABLE

# Each waits for an engine of vLLM.
pytestmark = [pytest.mark.release, pytest.mark.slow, pytest.mark.timeout(900)]
SEQUENCES = [np.random.default_rng(0).integers(5, 250, length).astype(np.int32) for length in (2, 17, 40, 250)]


def build(path: Path) -> Path:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "head_dim": 32}
    build_tiny(TinyShape(**size, num_kv_heads=1), str(path))
    return path


def test_a_reward_model_gives_its_raw_score_and_no_text(tmp_path, monkeypatch):
    path = build(tmp_path / "judge")
    add_score_head(path, scale=9)
    monkeypatch.setenv(VARIABLE, TOKEN)
    judge = AutoModelForSequenceClassification.from_pretrained(path)
    with Server(tmp_path / "log", f"model.path={path}", *ROLLOUT, token=TOKEN) as server:
        client = ModelServer(server.wait().url, "reward.model.url", "scores")
        expected = [judge(torch.from_numpy(ids)[None].long()).logits.item() for ids in SEQUENCES]
        assert client.scores(SEQUENCES).tolist() == pytest.approx(expected, abs=1e-4)
        assert max(map(abs, expected)) > 1, "an activation would change it"
        assert client.weights == digest_weights(str(path)) and client.vocabulary()["A"] == 32
        with pytest.raises(UserError, match=r"cannot read a sequence \(Token id 100000 is out of vocabulary"):
            client.scores([np.asarray([100000])])
        assert httpx.post(f"{server.url}{SCORE}", json={}).status_code == 401
        with pytest.raises(UserError, match="serves a frozen model to a run; start another server"), engine(server.url):
            pass


def test_a_teacher_gives_log_probs_and_keeps_its_weights(tmp_path, monkeypatch):
    path = build(tmp_path / "teacher")
    monkeypatch.setenv(VARIABLE, TOKEN)
    teacher = AutoModelForCausalLM.from_pretrained(path)
    with Server(tmp_path / "log", f"model.path={path}", *ROLLOUT, token=TOKEN) as server:
        client = ModelServer(server.wait().url, "algorithm.teacher.url", "logprobs")
        with engine(server.url), pytest.raises(UserError, match="has weights of a job that samples"):
            client.logprobs(SEQUENCES)
        found = zip(SEQUENCES, client.logprobs(SEQUENCES), client.logprobs(SEQUENCES, 3), strict=True)
        for ids, (_, logprobs), (likeliest, of_likeliest) in found:
            with torch.no_grad():
                whole = teacher(torch.from_numpy(ids)[None].long()).logits[0, :-1].log_softmax(-1)
            np.testing.assert_allclose(logprobs, whole[range(len(ids) - 1), ids[1:]], atol=1e-4)
            np.testing.assert_allclose(of_likeliest, whole.topk(3).values, atol=1e-4)
            assert likeliest.tolist() == whole.topk(3).indices.tolist()
        with pytest.raises(UserError, match="serves a frozen model to a run"), engine(server.url):
            pass
        client.description["weights"] = "others"
        with pytest.raises(UserError, match="serves other weights than those that this run began with"):
            client.logprobs(SEQUENCES)
