"""The application over the transformers engine: the OpenAI API for people, beside the job."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import httpx
import pytest
import torch

from tests.support.generation import ROLLOUT, make_requests
from trainer.config import TinyConfig
from trainer.inference.transformers_server import TransformersServer
from trainer.models.tiny import build_tiny


def post(server, path: str, **body) -> dict:
    answer = httpx.post(server.url + path, headers=server.headers, json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_people_get_models_texts_and_chats(server):
    models = httpx.get(f"{server.url}/v1/models", headers=server.headers).json()
    assert [model["object"] for model in models["data"]] == ["model"]
    first = post(server, "/v1/completions", prompt="abc", max_tokens=5, seed=3)
    again = post(server, "/v1/completions", prompt="abc", max_tokens=5, seed=3)
    assert first["choices"] == again["choices"] and first["usage"]["completion_tokens"] <= 5
    neutral = {"top_k": 0, "best_of": 1, "repetition_penalty": 1.0, "presence_penalty": 0, "tools": []}
    neutral["logprobs"] = False
    assert post(server, "/v1/completions", prompt="abc", max_tokens=5, seed=3, **neutral)["choices"] == first["choices"]
    greedy = {post(server, "/v1/completions", prompt="abc", seed=s, top_k=1)["choices"][0]["text"] for s in (1, 2, 3)}
    assert len(greedy) == 1
    nulls = dict.fromkeys(("n", "stream", "temperature", "top_p", "max_completion_tokens", "stop", "logprobs"))
    assert post(server, "/v1/completions", prompt="abc", max_tokens=5, seed=3, **nulls)["choices"] == first["choices"]
    assert "text" in post(server, "/v1/completions", prompt="a", max_tokens=3, seed=None)["choices"][0]
    chat = post(server, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    assert chat["choices"][0]["message"]["role"] == "assistant" and chat["object"] == "chat.completion"


def test_an_answer_ends_before_a_stop(server):
    def ask(**body) -> tuple[str, str, int]:
        answer = post(server, "/v1/completions", prompt=["abc"], max_tokens=24, seed=3, **body)
        (choice,) = answer["choices"]
        return choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]

    whole, reason, tokens = ask()
    stop = whole[-3:]
    assert len(whole) > 6 and reason == "length"
    text, reason, fewer = ask(stop=stop)
    assert (text, reason) == (whole[: whole.index(stop)], "stop") and fewer <= tokens
    assert ask(stop=[stop, whole[:2]])[:2] == ("", "stop")
    assert ask(stop=["no such text"]) == (whole, "length", tokens)


REFUSED = [
    ({"stream": True}, "streams nothing"),
    ({"n": 2}, "leave out `n`"),
    ({"logprobs": 0}, "does not support `logprobs`"),
    ({"logprobs": 1}, "does not support `logprobs`; leave it out"),
    ({"best_of": 4}, "does not support `best_of`"),
    ({"stop_token_ids": [7]}, "does not support `stop_token_ids`"),
    ({"min_tokens": 5}, "does not support `min_tokens`"),
    *(({"stop": stop}, "`stop` is a text, or a list of up to 4") for stop in (3, [""], ["a"] * 5)),
    *(({"max_tokens": tokens}, "`max_tokens` is at least 1") for tokens in (0, -3)),
    ({"prompt": [1] * 400}, "the prompt is too long"),
    *(
        ({"prompt": prompt}, "a prompt is one text, or a list of tokens")
        for prompt in ([], [10**6], [-1], ["a", "b"], 3)
    ),
    *(({name: value}, "`temperature` is at least 0") for name, value in (("temperature", -1), ("top_p", 0))),
    ({"top_k": -2}, "`top_k` is at least 1"),
    ({"seed": 2**70}, "`seed` has"),
    ({"messages": [{"role": "user"}]}, "has no attribute 'content'"),
    ({"messages": "x"}, "Error"),
]


@pytest.mark.parametrize(("body", "text"), REFUSED)
def test_what_it_cannot_do_is_refused(server, body, text):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {"prompt": "a", "max_tokens": 3, **body}
    answer = httpx.post(server.url + path, headers=server.headers, json=body)
    assert answer.status_code == 400 and text in answer.text and "\n" not in answer.text


def test_an_engine_that_runs_out_of_memory_names_the_snapshot(tmp_path, monkeypatch):
    """The error is a stand-in for one of a GPU."""
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).touch())
    path, model = tmp_path / "profile/server.pickle", str(tmp_path / "model")
    build_tiny(TinyConfig(), model)
    settings = {"model_path": model, "name": "n", "device": "cpu", "seed": 1, "trust_remote_code": False}
    server = TransformersServer({**settings, "rollout": dataclasses.asdict(ROLLOUT), "snapshot": str(path)})
    assert len(server._engine.generate(make_requests(1))) == 1 and not path.exists()

    def run_out(*_) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    server._model.register_forward_pre_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError, match=f"See {path}"):
        server._engine.generate(make_requests(1))
    assert path.exists()
