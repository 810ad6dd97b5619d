"""The application over the transformers engine: the OpenAI API for people, beside the job."""

from __future__ import annotations

import httpx
import pytest


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
    chat = post(server, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    assert chat["choices"][0]["message"]["role"] == "assistant" and chat["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("body", "text"), [({"stream": True}, "streams nothing"), ({"prompt": [1] * 400}, "the prompt is too long")]
)
def test_what_it_cannot_do_is_refused(server, body, text):
    body = {"prompt": "a", "max_tokens": 3, **body}
    answer = httpx.post(f"{server.url}/v1/completions", headers=server.headers, json=body)
    assert answer.status_code == 400 and text in answer.text
