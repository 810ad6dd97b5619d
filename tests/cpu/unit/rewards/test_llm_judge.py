"""The example with a language model as the judge, against a server with OpenAI's chat protocol."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.judges import Server, serving
from tests.support.rewards import judge as scores_of
from tests.support.rewards import reward_pool
from trainer.rewards.scorer import RewardInput

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "llm_judge"


@pytest.fixture
def judged(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("JUDGE_API_KEY", "key-1")
    monkeypatch.setenv("JUDGE_MODEL", "wise")

    def judge(server: Server, *completions: str, **settings):
        monkeypatch.setenv("JUDGE_BASE_URL", f"{server.url}/v1")
        attempts = [RewardInput(completion, "7", "3 + 4") for completion in completions]
        with reward_pool("judge:score", **settings) as pool:
            return scores_of(pool, attempts)

    return judge


def says(text: str):
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def test_the_judge_grades_many_completions_at_the_same_time(judged):
    def grading(server: Server, document):
        while server.most_at_once < 8:
            server.closing.wait(0.01)
        completion = re.search(r"student:\n(.*)\n", document["messages"][0]["content"])[1]
        return says("10" if completion == "7" else " 2.5/10\n")

    with serving(grading) as server:
        scores = judged(server, "7", *"12345689", concurrency=8)
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer key-1"}
        assert {request["model"] for request in server.requests} == {"wise"}
        assert all("3 + 4" in request["messages"][0]["content"] for request in server.requests)
    assert scores.rewards == [1.0] + [0.25] * 8 and scores.failures.count == 0


def test_a_judge_that_is_busy_is_asked_again(judged):
    with serving(lambda server, _: says("5") if len(server.requests) > 2 else (503, {}, b"busy")) as server:
        assert judged(server, "7").rewards == [0.5]
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    "answer, reason",
    [
        (says("I would say seven of ten"), "raised ValueError: the judge gives no grade: 'I would say"),
        (says("11"), "raised ValueError: the judge gives no grade"),
        ((401, {}, b""), "raised HTTPStatusError: Client error '401 Unauthorized'"),
        ((200, {}, b"<html>"), "raised JSONDecodeError"),
    ],
)
def test_a_judge_that_lies_is_a_failed_reward(judged, answer, reason):
    with serving(lambda *_: answer) as server:
        scores = judged(server, "7")
    assert scores.failures.first.startswith(reason)


def test_a_judge_that_hangs_is_a_failed_reward(judged):
    def hanging(server: Server, document):
        if "\n8\n" in document["messages"][0]["content"]:
            server.closing.wait()
        return says("10")

    with serving(hanging) as server:
        scores = judged(server, "7", "8", timeout_s=2)
    assert scores.rewards == [1.0, 0.0] and scores.failures.first == "took longer than reward.timeout_s=2"
