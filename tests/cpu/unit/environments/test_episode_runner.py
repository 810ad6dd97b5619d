"""Episodes between a scripted policy and environments in processes of their own."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_rewards import BAD, NUMBERS
from tests.support.episodes import Policy, requests_of, run, runner_of
from tests.support.generation import SAMPLED
from tests.support.jobs import wait_until
from trainer.config import Config
from trainer.data.datasets import Prompt
from trainer.environments import StepResult
from trainer.environments.episode_runner import EnvironmentRunner, RolloutRequest, Session, SingleTurnRunner
from trainer.episodes import Episode
from trainer.errors import UserError, WorkerError
from trainer.generation.engine import Completion, Request
from trainer.seeding import environment_seed, request_seed


@pytest.fixture(scope="module")
def runner(tokenizer) -> Iterator[EnvironmentRunner]:
    with runner_of(tokenizer) as runner:
        yield runner


def test_policy_and_environment_take_turns(runner, tokenizer):
    """Until each episode is done; each keeps its tokens, and adds up its rewards."""
    policy = Policy(tokenizer, "a", "bb", "ccc")
    short, long, endless = run(runner, policy, requests_of({"prompt": "x", "turns": 1}, {"prompt": "y"}, {"turns": 9}))
    assert policy.asked == [
        ["<|user|><|assistant|>", "<|user|>x<|assistant|>", "<|user|>y<|assistant|>"],
        [
            "<|user|><|assistant|>a<|end|><|user|>1:a<|assistant|>",
            "<|user|>y<|assistant|>a<|end|><|user|>1:a<|assistant|>",
        ],
        ["<|user|><|assistant|>a<|end|><|user|>1:a<|assistant|>bb<|end|><|user|>2:bb<|assistant|>"],
    ]
    found = [(one.status, one.turns, one.reward, one.text) for one in (short, long, endless)]
    assert found == [("stop", 1, 1.0, "a"), ("stop", 2, 3.0, "bb"), ("turns", 3, 6.0, "ccc")]
    (sample,) = long.samples
    assert tokenizer.decode(sample.token_ids) == "<|user|>y<|assistant|>a<|end|><|user|>1:a<|assistant|>bb<|end|>"
    assert tokenizer.decode(sample.token_ids[sample.mask > 0]) == "a<|end|>bb<|end|>" and long.length == 5
    assert [message["content"] for message in endless.messages] == ["", "a", "1:a", "bb", "2:bb", "ccc", "3:ccc"]


def test_each_player_has_a_conversation_and_a_reward_of_its_own(tokenizer):
    policy = Policy(tokenizer, "a", "bb")
    with runner_of(tokenizer, name="tests.support.environments:Duel") as runner:
        game, short, cut, wrong = run(
            runner, policy, requests_of({"turns": 3}, {"turns": 1}, {"turns": 9}, {"turns": 2, "player": "y"})
        )
    assert [(one.player, one.reward, tokenizer.decode(one.token_ids)) for one in game.samples] == [
        ("x", 1.5, "<|user|>x begins<|assistant|>a<|end|><|user|>x hears a<|assistant|>bb<|end|>"),
        ("o", -0.75, "<|user|>o hears a<|assistant|>a<|end|>"),
    ]
    assert [tokenizer.decode(one.token_ids[one.mask > 0]) for one in game.samples] == ["a<|end|>bb<|end|>", "a<|end|>"]
    assert (game.status, game.turns, game.reward, game.length) == ("stop", 3, 0.375, 7)
    assert game.player_rewards == {"x": 1.5, "o": -0.75} and len(set(policy.seeds[0])) == len(policy.seeds[0])
    assert short.player_rewards == {"x": 1.25}, "the other player was never asked"
    assert (cut.status, cut.turns, cut.player_rewards) == ("turns", 3, {"x": 0.5, "o": 0.25})
    assert wrong.player_rewards == {"x": 0.0} and "player='y': it must be one of x, o" in wrong.failure


def test_every_draw_is_keyed_by_its_turn(runner, tokenizer):
    """In the first turn as in an episode of a single turn. Episodes of one prompt share the seed of the environment."""
    policy = Policy(tokenizer, "a", "b")
    episodes = run(runner, policy, requests_of({"shows_seed": True}, n=2))
    assert [sorted(seeds) for seeds in policy.seeds] == [
        sorted(request_seed(3, 5, "0:0", j, turn) for j in range(2)) for turn in range(2)
    ]
    assert len({seed for seeds in policy.seeds for seed in seeds}) == 4
    single = Policy(tokenizer, "a")
    cfg = Config()
    cfg.trainer.seed = 3
    run(
        SingleTurnRunner(cfg, tokenizer),
        single,
        [RolloutRequest(Prompt(0, (65,), "", ""), "0:0", 5, j, SAMPLED) for j in range(2)],
    )
    assert sorted(single.seeds[0]) == sorted(policy.seeds[0])
    assert [one.messages[0]["content"] for one in episodes] == [str(environment_seed(3, "0:0"))] * 2


def test_a_reply_that_is_cut_is_the_last_one(runner, tokenizer):
    (one,) = run(runner, Policy(tokenizer, "a", "bb…"), requests_of({"turns": 9}))
    assert (one.status, one.turns, one.reward) == ("length", 2, 3.0)


@pytest.mark.parametrize("reply, turns, status", [("a…", 1, "stop"), ("a…", 9, "length"), ("a", 1, "stop")])
def test_an_episode_that_is_done_has_stopped_however_its_last_reply_ended(runner, tokenizer, reply, turns, status):
    (one,) = run(runner, Policy(tokenizer, reply), requests_of({"turns": turns}))
    assert (one.status, one.turns, one.reward) == (status, 1, 1.0)


@pytest.mark.parametrize("reply, turns, status", [("ccc", 3, "stop"), ("ccc…", 9, "length"), ("ccc", 9, "turns")])
def test_the_last_turn_has_the_status_of_what_ended_it(runner, tokenizer, reply, turns, status):
    (one,) = run(runner, Policy(tokenizer, "a", "bb", reply), requests_of({"turns": turns}))
    assert (one.status, one.turns, one.reward) == (status, 3, 6.0)


class Opening(Policy):
    """A policy that makes a file when it has nothing more to say."""

    def __init__(self, tokenizer: Any, file: Path, *script: str):
        super().__init__(tokenizer, *script)
        self._file = file

    def end_requests(self) -> None:
        assert not self._file.exists(), "once"
        self._file.touch()


@pytest.mark.parametrize("reply, turns", [("a", 1), ("a…", 3)])
def test_engines_are_free_before_environments_answer_the_last_replies(tokenizer, tmp_path, reply, turns):
    """The environment of the second episode answers after that. The first one has ended before."""
    file = tmp_path / "free"
    name = "tests.support.environments:AsyncEcho"
    with runner_of(tokenizer, name=name, max_turns=turns, num_processes=1) as runner:
        policy = Opening(tokenizer, file, reply)
        found = run(runner, policy, requests_of({"turns": 1}, {"turns": 9, "until": str(file)}))
    assert [one.status for one in found] == ["stop", "length" if turns > 1 else "turns"]


def test_an_episode_ends_before_a_prompt_that_is_too_long(tokenizer):
    with runner_of(tokenizer, max_prompt_tokens=15) as runner:
        policy = Policy(tokenizer, "abc", "defgh")
        (one,) = run(runner, policy, requests_of({"turns": 9}))
        assert (one.status, one.turns, one.reward, one.text) == ("length", 2, 8.0, "defgh")
        assert max(len(tokenizer.encode(text)) for asked in policy.asked for text in asked) <= 15
        (bad,) = run(runner, Policy(tokenizer), requests_of({"prompt": "x" * 20}))
        assert bad.failure == "has first messages of 22 tokens; rollout.max_prompt_tokens is 15"


class NeverLong:
    """A tokenizer that must not get long texts."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        assert len(text) < 100_000
        return self._tokenizer.encode(text, **options)


def test_text_that_is_far_too_long_is_not_tokenised(tokenizer):
    """It would take much memory, in a call that no signal interrupts."""
    long, name = "x" * 3_000_000, "tests.support.environments:Wrong"
    with runner_of(NeverLong(tokenizer), name=name) as runner:
        row = {"reset": [{"role": "user", "content": "x"}], "step": {"messages": [{"role": "tool", "content": long}]}}
        (one,) = run(runner, Policy(tokenizer, "a"), requests_of(row))
        assert (one.status, one.turns, len(one.samples[0].token_ids)) == ("length", 1, one.length + 3)
        (bad,) = run(runner, Policy(tokenizer), requests_of({"reset": [{"role": "user", "content": long}]}))
        assert re.match("has first messages of 65,5.. characters; rollout.max_prompt_tokens is 100", bad.failure)


@pytest.mark.parametrize("at, turns, length", [(0, 0, 0), (1, 1, 2), (2, 2, 5)])
def test_an_episode_whose_environment_fails_has_reward_0_and_says_why(runner, tokenizer, at, turns, length):
    policy = Policy(tokenizer, "a", "bb")
    failed, good = run(runner, policy, requests_of({"do": "raise", "at": at}, {"prompt": "y"}))
    reward = 0.0 if turns else None  # the policy cannot have caused it
    assert (failed.status, failed.turns, failed.reward, failed.length) == ("failed", turns, reward, length)
    assert len(failed.samples) == 1 and len(failed.samples[0].token_ids) > 0
    assert (good.status, good.reward) == ("stop", 3.0)
    assert "raised RuntimeError: it broke in environments.py:" in failed.failure and not good.failure


def test_a_lost_environment_leaves_no_trace_in_its_episode(runner, tokenizer, tmp_path):
    lost = run(runner, Policy(tokenizer, "a", "bb"), requests_of({"do": "die", "at": 1, "once": f"{tmp_path}/x"}))
    plain = run(runner, Policy(tokenizer, "a", "bb"), requests_of({}))
    assert (tmp_path / "x").exists()
    assert [(p.reward, p.status, p.messages, p.samples[0].token_ids.tolist()) for p in lost] == [
        (p.reward, p.status, p.messages, p.samples[0].token_ids.tolist()) for p in plain
    ]


def content(episode: Episode) -> tuple[Any, ...]:
    """Everything that a step trains on and logs of an episode."""
    samples = [[array.tolist() for array in (s.token_ids, s.mask, s.logprobs)] for s in episode.samples]
    return (
        episode.uid, episode.status, episode.reward, episode.turns, episode.messages, samples, episode.failure
    )  # fmt: skip


def test_episodes_do_not_depend_on_how_long_environments_take(tokenizer):
    """Environments that answer after random times, which differ from start to start, also in threads."""
    rows = [{"prompt": f"p{i}"} for i in range(20)]
    found = []
    for kind in ("Dawdling", "Threaded"):
        with runner_of(tokenizer, 200, name=f"tests.support.environments:{kind}", max_turns=5) as runner:
            policy = Policy(tokenizer, lambda seed: str(seed % 1000))
            found.append([content(episode) for episode in run(runner, policy, requests_of(*rows, n=2))])
    assert found[0] == found[1]
    assert len({turns for _, _, _, turns, *_ in found[0]}) > 2


def test_no_episode_waits_for_another(tokenizer, tmp_path):
    """The environment of the first one answers when the policy has said all to the second one."""

    class Touching(Policy):
        def complete(self, request: Request) -> Completion:
            completion = super().complete(request)
            if self._seeds.keys() == {0, 1, 2}:
                Path(f"{tmp_path}/ended").touch()
            return completion

    rows = {"turns": 3, "until": f"{tmp_path}/ended"}, {"turns": 3}
    with runner_of(tokenizer, name="tests.support.environments:AsyncEcho", num_processes=1) as runner:
        found = run(runner, Touching(tokenizer, "a", "b", "c"), requests_of(*rows))
    assert [(one.status, one.turns) for one in found] == [("stop", 3), ("stop", 3)]


def test_every_environment_is_closed_however_its_episode_has_ended(runner, tokenizer, tmp_path):
    rows = [{"turns": 1}, {"turns": 9}, {"turns": 3}, {"do": "raise", "at": 2, "turns": 9}]
    rows = [{**row, "closed": f"{tmp_path}/{i}"} for i, row in enumerate(rows)]
    episodes = run(runner, Policy(tokenizer, "a", "bb", "c…"), requests_of(*rows))
    assert [one.status for one in episodes] == ["stop", "length", "stop", "failed"]
    closed = {path.name for path in tmp_path.iterdir()}
    assert {"0", "1", "2"} <= closed


def test_the_built_in_environment_asks_again_and_rewards_the_best_answer(tokenizer):
    rows = {"prompt": "abc", "answer": "cba"}, {"prompt": "ab", "answer": "bx"}
    with runner_of(tokenizer, name="tests.support.retry:RetryEnv", kwargs={"tries": 2}) as runner:
        right, wrong = run(runner, Policy(tokenizer, "bx", "cba"), requests_of(*rows[:1], rows[1]))
        assert (right.status, right.turns, right.reward) == ("stop", 2, 1.0)
        assert (wrong.status, wrong.turns, wrong.reward) == ("stop", 1, 1.0)
        (worse,) = run(runner, Policy(tokenizer, "cb", ""), requests_of(rows[0]))
        assert (worse.turns, worse.reward) == (2, pytest.approx(0.8))


def valued(tokenizer: Any, *rows: list[dict[str, Any]], **config: Any) -> list[Episode]:
    """Episodes of environments that give these steps."""
    settings = {"name": "tests.support.environments:Valued", "max_error_rate": 1.0, "num_processes": 1, **config}
    with runner_of(tokenizer, **settings) as runner:
        return run(runner, Policy(tokenizer, "a", "b", "c"), requests_of(*({"steps": row} for row in rows)))


def test_an_episode_adds_up_its_named_rewards_and_metrics(tokenizer):
    first = {"reward": 0.5, "rewards": {"form": 1, "fact": -2}, "metrics": {"moves": 3, "tool_calls/add": 1}}
    one, plain = valued(tokenizer, [first, {"rewards": {"form": 0.25}, "metrics": {"moves": 1}}], [{"reward": 2}])
    assert (one.reward, one.rewards) == (0.5 + 1 - 2 + 0.25, {"form": 1.25, "fact": -2.0})
    assert one.metrics == {"moves": 4.0, "tool_calls/add": 1.0}
    assert (plain.reward, plain.rewards, plain.metrics) == (2.0, {}, {})


RANGE = ["returns nan", "returns -inf", "returns 1e308", "returns -1e13", "returns 10**400"]
TYPES = ["returns None", "returns complex", "returns an array", "returns a coroutine", "returns a hostile float"]


def test_one_rule_says_which_numbers_are_rewards_of_functions_judges_and_environments(tokenizer):
    """The reasons are those of `rewards/values.py`, whoever gives the number, and as whatever it is given."""
    bad = [(name, where) for name in RANGE + TYPES for where in ("reward", "rewards", "metrics")]
    rows = [[{where: name if where == "reward" else {"x": name}}] for name, where in bad]
    for (name, where), one in zip(bad, valued(tokenizer, *rows), strict=True):
        reason = BAD[name][1].replace("returned ", "is a ")
        of_reward = f"reward {reason}" if reason.startswith("is ") else f"reward: {reason}"
        said = of_reward if where == "reward" else f"{where}: term x {reason}"
        assert (one.status, one.reward, one.rewards) == ("failed", 0.0, {}), name
        assert one.failure.partition("): ")[2].startswith(said), one.failure
    good = [[{"reward": name, "rewards": {"x": name}}] for name in NUMBERS]
    assert [(one.reward, one.rewards) for one in valued(tokenizer, *good)] == [(2.0, {"x": 1.0})] * len(NUMBERS)


def test_rewards_beyond_the_range_and_odd_names_fail(tokenizer):
    cases = [
        ([{"reward": 1e12}, {"reward": 1e12}], "gave rewards that add up to 2e+12, beyond 1e+12"),
        ([{"reward": -1e12, "rewards": {"a": -1e12}}], "gave rewards that add up to -2e+12, beyond 1e+12"),
        ([{"rewards": {"a b": 1}}], "rewards: returned a term called 'a b'; names are letters, digits, _, . and -"),
        ([{"rewards": {"a/b": 1}}], "rewards: returned a term called 'a/b'; names are"),
        (
            [{"metrics": {"a//b": 1}}],
            "metrics: returned a term called 'a//b'; names are letters, digits, _, . and -, a",
        ),
        ([{"metrics": {"turns": 1}}], "metrics: turns is counted for every environment; choose another name"),
        ([{"rewards": {f"n{i}": 1 for i in range(65)}}], "rewards are 65; a step has at most 64"),
        ([{"metrics": [1]}], "metrics are a list, not a dict"),
    ]
    for (_, reason), one in zip(cases, valued(tokenizer, *(steps for steps, _ in cases)), strict=True):
        assert one.status == "failed" and reason in one.failure and one.reward == 0.0


def test_the_environments_of_episodes_that_fail_together_are_closed(runner, tokenizer):
    """A run that goes back to a checkpoint continues with the same processes."""

    def count() -> int:
        return sum(worker.sessions for worker in runner._pool._workers)

    class Gone(Policy):
        def complete(self, request: Request) -> Completion:
            assert before < count() <= before + 3
            raise UserError("the engines are gone")

    before = count()
    with pytest.raises(UserError, match="the engines are gone"):
        run(runner, Gone(tokenizer), requests_of({}, {}, {}))
    wait_until(lambda: count() == before)  # a process whose call was cut off is replaced meanwhile


def test_an_environment_that_hangs_costs_its_own_episode(tokenizer):
    rows = {"do": "wait", "at": 2}, {"turns": 3}, {"turns": 1}
    name = "tests.support.environments:AsyncEcho"
    with runner_of(tokenizer, name=name, timeout_s=3.0) as runner:
        episodes = run(runner, Policy(tokenizer, "a", "b", "c"), requests_of(*rows))
    assert [(one.status, one.turns) for one in episodes] == [("timeout", 2), ("stop", 3), ("stop", 1)]
    assert "step took longer than environment.timeout_s=3" in episodes[0].failure


def test_processes_that_cannot_start_end_the_run(tokenizer):
    with (
        runner_of(tokenizer, name="tests.support.environments:Missing") as runner,
        pytest.raises(WorkerError, match="environment.name=tests.support.environments:Missing die as they start"),
    ):
        run(runner, Policy(tokenizer, "a"), requests_of({}, {}))


@pytest.mark.parametrize("most, given, turns", [(40, [16, 16, 7], 3), (33, [16, 11], 2), (12, [9], 1)])
def test_an_episode_has_at_most_as_many_tokens_as_the_config_says(tokenizer, most, given, turns):
    """The replies get what is left; the first messages have a limit of their own."""
    settings = {"max_prompt_tokens": 5, "max_tokens": most, "max_error_rate": 1.0}
    with runner_of(tokenizer, **settings) as runner:
        policy = Policy(tokenizer, "abcdefg", "hij", "klm…")
        (one,) = run(runner, policy, requests_of({"prompt": "x", "turns": 9}))
        assert (one.turns, one.status, policy.most_tokens) == (turns, "length", given)
        assert len(one.samples[0].token_ids) <= most
        (bad,) = run(runner, Policy(tokenizer), requests_of({"prompt": "x" * 9}))
        assert bad.failure == "has first messages of 11 tokens; rollout.max_prompt_tokens is 5"


@pytest.mark.parametrize("at", ["reset", "step"])
def test_messages_that_the_chat_template_refuses_fail_their_episode(tokenizer, at):
    strict = copy.deepcopy(tokenizer)
    refusal = "{% if m.role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}"
    strict.chat_template = "{% for m in messages %}" + refusal + "{% endfor %}" + tokenizer.chat_template
    odd = [{"role": "judge", "content": "x"}]
    row = {"reset": odd if at == "reset" else [{"role": "user", "content": "x"}], "step": {"messages": odd}}
    good = {"reset": [{"role": "user", "content": "x"}], "step": {"messages": [], "done": True}}
    name = "tests.support.environments:Wrong"
    with runner_of(strict, name=name) as runner:
        bad, fine = run(runner, Policy(tokenizer, "a", "b"), requests_of(row, good))
    assert (bad.status, fine.status) == ("failed", "stop")
    assert "cannot render a chat of" in bad.failure and "no judges" in bad.failure


@pytest.mark.parametrize("values", [(1, True, 1.0), ({"a": 1, "b": 2}, {"b": 2, "a": 1})])
def test_first_messages_that_are_equal_but_written_differently_have_their_own_tokens(tokenizer, values):
    shows = copy.deepcopy(tokenizer)
    shows.chat_template = "{% for m in messages %}{{ m.shown }}{% endfor %}" + tokenizer.chat_template
    runner = runner_of(shows)
    for value in values:
        episode = Session({}, 0)
        episode.steps = [StepResult([{"role": "user", "content": "x", "shown": value}])]
        runner._begin(episode, episode.steps[0])
        assert shows.decode(episode.conversation.token_ids).startswith(f"{value}<|user|>")
