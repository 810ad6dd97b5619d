"""The reward `remote`, against real servers that work, fail, hang and lie."""

from __future__ import annotations

import pytest

from tests.support.judges import Server, by_length, rewards, serving
from tests.support.rewards import judge, reward_pool
from trainer.config import RewardConfig
from trainer.errors import UserError
from trainer.rewards import scoring
from trainer.rewards.cache import CACHE_FILE, RewardCache
from trainer.rewards.scorer import RewardInput
from trainer.rewards.scoring import reward_functions
from trainer.sources.trials import try_rewards


def attempts(*completions: str) -> list[RewardInput]:
    return [RewardInput(completion, "5", "why?", row={"points": 3}) for completion in completions]


def judged(
    server: Server,
    *completions: str,
    cache: RewardCache | None = None,
    batch_size: int = 16,
    timeout_s: float = 20.0,
    env: str | None = None,
    **more,
):
    more |= {"timeout_s": timeout_s, "authorization_env": env, "url": f"{server.url}/score?v=1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "COMPLETIONS_PER_REQUEST", batch_size)
        pool = reward_pool("remote", kept=cache, **more)
    with pool:
        return judge(pool, attempts(*completions))


def test_a_server_scores_in_batches_at_the_same_time():
    def together(server: Server, document):
        while server.most_at_once < 3:
            server.closing.wait(0.01)
        return by_length(server, document)

    with serving(together) as server:
        scores = judged(server, *["a" * i for i in range(1, 8)], batch_size=2, concurrency=3)
        sizes = [len(request["completions"]) for request in server.requests]
    assert scores.rewards == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0] and scores.failures.count == 0
    assert sorted(sizes) == [1, 2, 2, 2] and server.most_at_once == 3
    names = {"completion", "answer", "prompt", "messages", "row", "status"}
    assert all(set(item) == names for request in server.requests for item in request["completions"])


def test_a_server_may_return_terms():
    with serving(lambda *_: rewards([{"style": 0.5, "facts": 1}])) as server:
        scores = judged(server, "x")
    assert scores.terms == [{"style": 0.5, "facts": 1.0}] and scores.rewards == [1.5]


@pytest.mark.parametrize("status, headers", [(503, {}), (429, {"Retry-After": "0"}), (500, {"Retry-After": "soon"})])
def test_a_server_that_fails_at_first_is_asked_again(status, headers):
    def recovering(server: Server, document):
        return by_length(server, document) if len(server.requests) > 2 else (status, headers, b"busy")

    with serving(recovering) as server:
        scores = judged(server, "abc")
        assert len(server.requests) == 3
    assert scores.rewards == [3.0] and scores.failures.count == 0


def test_a_server_is_not_asked_again_before_the_time_that_it_asks_for():
    def busy_once(server: Server, document):
        return by_length(server, document) if len(server.requests) > 1 else (429, {"Retry-After": "30"}, b"busy")

    with serving(busy_once) as server:
        scores = judged(server, "abc", timeout_s=2.5)
        assert len(server.requests) == 1, "the second request would have been answered"
    assert scores.failures.first.startswith("no answer within reward.timeout_s=2.5")


LIES = {
    "not JSON": ((200, {}, b"<html>"), "answered what is not JSON (JSONDecodeError: Expecting value"),
    "too deep": ((200, {}, b"[" * 100_000), "answered what is not JSON (RecursionError: "),
    "another shape": ((200, {}, b'{"scores": [1, 2]}'), "answered without a list `rewards`"),
    "too few": (rewards([1.0]), "answered 1 rewards for 2 completions"),
    "too many": (rewards([1.0] * 3), "answered 3 rewards for 2 completions"),
    "text": (rewards(["1", "2"]), "returned str, which is not a number"),
    "null": (rewards([None, None]), "returned NoneType, which is not a number"),
    "NaN": ((200, {}, b'{"rewards": [NaN, NaN]}'), "is nan"),
    "infinity": ((200, {}, b'{"rewards": [1e999, -Infinity]}'), "is inf"),
    "huge": ((200, {}, b'{"rewards": [' + b" " * (2 << 20) + b"1, 2]}"), "answered with more than 1 MiB"),
    "refusal": ((404, {}, b"no such\x1b page"), "answered HTTP 404: no such? page"),
    "redirect": ((302, {"Location": "http://127.0.0.1:9/"}, b""), "answered HTTP 302"),
    "an error, always": ((500, {}, b"oh"), "no answer within reward.timeout_s=3 (the last: answered HTTP 500"),
}  # fmt: skip


def test_what_is_no_reward_is_a_failure_with_a_reason():
    answers = []
    with (
        serving(lambda *_: answers[-1]) as server,
        reward_pool("remote", timeout_s=3, url=f"{server.url}/score") as pool,
    ):
        for name, (answer, reason) in LIES.items():
            answers.append(answer)
            before = len(server.requests)
            scores = judge(pool, attempts("x", "y"))
            assert scores.rewards == [0.0, 0.0] and scores.failures.count == 2, name
            assert scores.failures.first.startswith(reason), (name, scores.failures)
            assert (len(server.requests) - before > 1) == (name == "an error, always"), name


def test_a_server_that_hangs_or_is_not_there_is_given_up_at_the_deadline():
    def hanging(server: Server, document):
        server.closing.wait()
        return by_length(server, document)

    with serving(hanging) as server:
        scores = judged(server, "x", timeout_s=0.5)
    assert scores.failures.first == "no answer within reward.timeout_s=0.5 (the last: nothing yet)"
    scores = judged(server, "x", timeout_s=3)  # it is closed
    assert scores.failures.first.startswith("no answer within reward.timeout_s=3 (the last: ConnectError")


def test_one_bad_number_costs_one_completion_and_a_dead_server_refuses_the_start():
    with serving(lambda *_: rewards([1.0, None, 3.0])) as server:
        assert judged(server, "x", "y", "z").rewards == [1.0, 0.0, 3.0]
    config = RewardConfig(name="remote", url=server.url, timeout_s=3)
    with pytest.raises(
        UserError, match="^reward.name=remote: fails for the first 2 rows .*ConnectError.*start the service"
    ):
        try_rewards(config, attempts("x", "y"), 1)


def test_credentials_come_from_the_environment_and_are_not_repeated(monkeypatch):
    def refusing(server: Server, document):
        return 401, {}, f"unknown {server.headers[-1]['Authorization']}".encode()

    monkeypatch.setenv("JUDGE_TOKEN", "Bearer secret-123\n")
    with serving(refusing) as server:
        scores = judged(server, "x", env="JUDGE_TOKEN")
        assert server.headers[0]["Authorization"] == "Bearer secret-123"
    assert scores.failures.first == "answered HTTP 401"
    config = RewardConfig(name="remote", url=server.url, authorization_env="NO_SUCH_TOKEN")
    with pytest.raises(UserError, match="reward.authorization_env=NO_SUCH_TOKEN: the environment has no such variable"):
        reward_functions(config)


def test_a_server_is_asked_once_for_what_it_has_answered_and_again_for_what_failed(tmp_path):
    def drifting(server: Server, document):
        answers = [len(server.requests) + i / 10 for i in range(len(document["completions"]))]
        failed = [item["completion"] == "bad" and len(server.requests) < 3 for item in document["completions"]]
        return rewards([None if fails else answer for answer, fails in zip(answers, failed, strict=True)])

    with serving(drifting) as server:
        first = judged(server, "x", "bad", "y", "x", cache=RewardCache(str(tmp_path)))
        assert first.rewards == [1.0, 0.0, 1.2, 1.0], "the same content has the same reward"
        again = judged(server, "y", "x", "z", "bad", cache=RewardCache(str(tmp_path)))
        assert again.rewards == [1.2, 1.0, 2.0, 0.0] and again.failures.count == 1
        assert judged(server, "bad", "z", cache=RewardCache(str(tmp_path))).rewards == [3.0, 2.0]
        asked = [[item["completion"] for item in request["completions"]] for request in server.requests]
        assert asked == [["x", "bad", "y"], ["z", "bad"], ["bad"]]
    assert (tmp_path / CACHE_FILE).stat().st_mode & 0o777 == 0o600
