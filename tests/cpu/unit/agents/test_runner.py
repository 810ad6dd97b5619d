"""Agents in processes of their own, the server, and a policy that a function speaks for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.agents import Policy, runs_of
from tests.support.episodes import requests_of, run
from tests.support.generation import SAMPLED
from trainer.agents.runner import AgentRunner
from trainer.config import Config, EnvironmentConfig
from trainer.episodes import Episode
from trainer.errors import UserError

AGENTS = "tests.support.agents"


@contextlib.contextmanager
def runner_of(tokenizer: Any, name: str, max_prompt_tokens: int = 200, **config: Any) -> Iterator[AgentRunner]:
    cfg = Config()
    cfg.trainer.seed = 3
    cfg.rollout.max_prompt_tokens = max_prompt_tokens
    cfg.rollout.temperature = SAMPLED.temperature
    settings = {"timeout_s": 120.0, "max_turns": 4, "max_error_rate": 1.0, **config}
    cfg.environment = EnvironmentConfig(name=f"{AGENTS}:{name}", **settings)
    with AgentRunner(cfg, tokenizer) as runner:
        yield runner


@pytest.fixture(scope="module")
def one_call(tokenizer) -> Iterator[AgentRunner]:
    with runner_of(tokenizer, "OneCall", num_processes=2) as runner:
        yield runner


def check_samples(policy: Policy, episodes: list[Episode]) -> None:
    """Each reply is trained once, after exactly the tokens that the engines got."""
    given = [
        (request.prompt_token_ids.tolist(), completion.token_ids.tolist(), completion.logprobs.tolist())
        for request, completion in zip(policy.asked, policy.completions, strict=True)
    ]
    assert sorted(given) == sorted(run for one in episodes for sample in one.samples for run in runs_of(sample))


def test_agents_ask_and_give_the_reward(one_call, tokenizer):
    policy = Policy(tokenizer, lambda prompt, seed: f"{seed % 10}" * 3)
    rows = [{"prompt": f"row {i}", "answer": i} for i in range(3)]
    episodes = run(one_call, policy, requests_of(*rows, n=2))
    check_samples(policy, episodes)
    for episode, request in zip(episodes, requests_of(*rows, n=2), strict=True):
        assert (episode.uid, episode.group, episode.status, episode.turns) == (request.uid, request.group, "stop", 1)
        assert episode.reward == 3.5 and episode.rewards == {"calls": 0.5} and episode.failure == ""
        assert episode.metrics == {"chars": 3.0, "samples": 1.0, "errors": 0.0}
        assert episode.messages[0] == {"role": "user", "content": request.prompt.row["prompt"]}
        assert episode.answer == str(request.prompt.row["answer"]) and len(episode.text) == 3
    assert len({request.seed for request in policy.asked}) == 6
    again = Policy(tokenizer, policy.say)
    run(one_call, again, requests_of(*rows, n=2))
    assert {request.seed for request in again.asked} == {request.seed for request in policy.asked}


def test_each_player_of_an_agent_asks_by_a_model_of_its_own(tokenizer):
    policy = Policy(tokenizer, lambda prompt, seed: "ab" * (1 + seed % 3))
    with runner_of(tokenizer, "Debate") as runner:
        both, unnamed = run(runner, policy, requests_of({"prompt": "x"}, {"prompt": "y", "unnamed": True}))
    pro, con = both.samples
    assert (pro.player, con.player) == ("pro", "con") and pro.token_ids[0] == con.token_ids[0]
    assert len({request.seed for request in policy.asked}) == 2 * 2, "though their prompts are equal"
    lengths = [len(tokenizer.decode(one.token_ids[one.mask > 0], skip_special_tokens=True)) for one in both.samples]
    assert [pro.reward, con.reward] == [0.5 + length for length in lengths]
    assert both.reward == sum(both.player_rewards.values()) / 2 and both.turns == 2
    assert "there is no model 'policy'; the policy is called policy:pro or policy:con" in unnamed.failure
    assert unnamed.player_rewards == {"pro": 0.0, "con": 0.0}


def test_few_agents_run_at_the_same_time_if_the_config_says_so(tokenizer, tmp_path):
    rows = [{"prompt": "a", "directory": str(tmp_path)}] * 5
    policy = Policy(tokenizer, lambda *_: "ok")
    for bound, running in [(None, 5), (2, 2)]:
        with runner_of(tokenizer, "Counted", agent_concurrency=bound) as runner:
            assert max(one.reward for one in run(runner, policy, requests_of(*rows))) == running


@pytest.mark.parametrize(
    "do, reason", [("raise", "run raised RuntimeError: it broke in agents.py:"), ("die", "run ended its process")]
)
def test_an_agent_that_fails_runs_again_from_the_start(one_call, tokenizer, tmp_path, do, reason):
    """Those that fail again are named, and nothing else is lost."""
    policy = Policy(tokenizer, lambda prompt, seed: "ok")
    rows = [{"prompt": "a", "do": do, "once": str(tmp_path / "once")}, {"prompt": "b", "do": do}, {"prompt": "c"}]
    again, failed, fine = run(one_call, policy, requests_of(*rows))
    assert (again.status, again.reward, again.text) == (fine.status, fine.reward, fine.text) == ("stop", 2.5, "ok")
    assert failed.status == "failed" and failed.failure.startswith(reason)
    assert failed.turns == 0 and not failed.samples[0].mask.any() and failed.metrics == {}


@pytest.mark.parametrize("name, do", [("OneCall", "hang"), ("AsyncOneCall", "wait")])
def test_an_agent_that_takes_too_long_is_ended(tokenizer, tmp_path, name, do):
    """The time of the policy does not count."""
    with runner_of(tokenizer, name, timeout_s=2.0) as runner:
        policy = Policy(tokenizer, lambda prompt, seed: "ok")
        rows = [{"prompt": "a", "do": do, "once": str(tmp_path / "once")}, {"prompt": "b", "do": do}]
        again, late = run(runner, policy, requests_of(*rows))
    assert (again.status, again.text) == ("stop", "ok")
    assert (late.status, late.failure) == ("timeout", "run took longer than environment.timeout_s=2")


def test_agents_reach_the_policy_where_others_are_reached_through_a_proxy(tokenizer, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "example.org")
    with runner_of(tokenizer, "OneCall") as runner:
        (one,) = run(runner, Policy(tokenizer, lambda *_: "ok"), requests_of({"prompt": "a"}))
    assert one.failure == "" and one.text == "ok"


def test_an_agent_that_asks_too_often_ends_with_the_status_of_the_limit(tokenizer, caplog):
    policy = Policy(tokenizer, lambda prompt, seed: "ok")
    with runner_of(tokenizer, "OneCall", kwargs={"times": 9}) as runner:
        (one,) = run(runner, policy, requests_of({"prompt": "a"}))
    assert (one.status, one.turns, one.reward, one.failure, one.metrics["errors"]) == ("turns", 4, 0.0, "", 1.0)
    assert len(policy.asked) == 4 == len(one.samples)
    assert "1 agents ended with an error after a limit" in caplog.text
    check_samples(policy, [one])


def test_a_prompt_that_is_too_long_ends_an_agent_that_does_not_expect_it(tokenizer):
    with runner_of(tokenizer, "OneCall", max_prompt_tokens=10) as runner:
        (one,) = run(runner, Policy(tokenizer, lambda *_: "ok"), requests_of({"prompt": "a" * 20}))
    assert (one.status, one.turns, one.reward, one.failure) == ("length", 0, 0.0, "")


def test_a_reply_that_is_cut_gives_its_status(one_call, tokenizer):
    (one,) = run(one_call, Policy(tokenizer, lambda *_: "x" * 99), requests_of({"prompt": "a"}))
    assert (one.status, one.reward, len(one.text)) == ("length", SAMPLED.max_tokens + 0.5, SAMPLED.max_tokens)


def test_agents_that_branch_give_samples_of_one_episode(tokenizer):
    with runner_of(tokenizer, "MadeUpTurns", max_turns=8) as runner:
        policy = Policy(tokenizer, lambda prompt, seed: str(seed)[:4])
        episodes = run(runner, policy, requests_of(*({"prompt": i, "turns": 5} for i in range(6))))
    check_samples(policy, episodes)
    assert max(len(episode.samples) for episode in episodes) > 1
    assert all(episode.turns == 5 and episode.metrics["samples"] == len(episode.samples) for episode in episodes)


def test_openai_s_client_in_processes_of_its_own_runs_its_tool_loop(tokenizer):
    """Several at once, with streaming and without. Each episode is one sample: the history is continued exactly."""

    def say(prompt: str, seed: int) -> str:
        if "<|tool|>" not in prompt:
            return 'Hm. <tool_call>\n{"name":"double",  "arguments": {"n": 4}}\n</tool_call>'
        return prompt.rpartition("<|tool|>")[2].removesuffix("<|assistant|>")

    with runner_of(tokenizer, "Subprocess", max_prompt_tokens=2000) as runner:
        policy = Policy(tokenizer, say)
        rows = [{"prompt": f"{i}?", "answer": "8" if i else "9", "stream": i % 2 == 0} for i in range(2)]
        requests = [
            dataclasses.replace(one, sampling=dataclasses.replace(SAMPLED, max_tokens=100))
            for one in requests_of(*rows)
        ]
        episodes = run(runner, policy, requests)
    check_samples(policy, episodes)
    assert [(one.status, one.turns, one.reward, len(one.samples)) for one in episodes] == [
        ("stop", 2, float(i > 0), 1) for i in range(2)
    ]
    assert all(one.metrics["replies"] == 2 for one in episodes)
    text = tokenizer.decode(episodes[1].samples[0].token_ids)
    assert text.startswith("<|system|>Be brief.\n\n# Tools") and '"name": "double"' in text
    assert text.endswith('"n": 4}}\n</tool_call><|end|><|tool|>8<|assistant|>8<|end|>')


def test_a_framework_runs_its_loop(tokenizer):
    """Each of its runs begins with a call of a tool. All of its calls are one history, and so one sample."""

    def say(prompt: str, seed: int) -> str:
        last = prompt.removesuffix("<|assistant|>").rpartition("<|")[2]
        if last.startswith("user"):
            return '<tool_call>\n{"name": "double", "arguments": {"n": 21}}\n</tool_call>'
        return f"{last.partition('>')[2]} it is"

    with runner_of(tokenizer, "Framework", max_prompt_tokens=2000) as runner:
        policy = Policy(tokenizer, say)
        (request,) = requests_of({"prompt": "21 twice?", "answer": "42 it is"})
        long = dataclasses.replace(SAMPLED, max_tokens=100)
        (one,) = run(runner, policy, [dataclasses.replace(request, sampling=long)])
    assert (one.status, one.turns, one.reward, one.failure) == ("stop", 4, 1.0, "")
    assert one.metrics == {"words": 3.0, "samples": 1.0, "errors": 0.0}
    check_samples(policy, [one])
    text = tokenizer.decode(one.samples[0].token_ids)
    assert '"description": "Return twice a number."' in text and text.count("<|tool|>42<|assistant|>42 it is") == 2


def test_agents_are_ended_when_nobody_waits_for_them(one_call, tokenizer):
    class Gone(Policy):
        def complete(self, request):
            raise UserError("the engines are gone")

    with pytest.raises(UserError, match="the engines are gone"):
        run(one_call, Gone(tokenizer, lambda *_: "ok"), requests_of({"prompt": "a"}, {"prompt": "b", "do": "hang"}))
    (one,) = run(one_call, Policy(tokenizer, lambda *_: "ok"), requests_of({"prompt": "a"}))
    assert one.status == "stop"
