"""Episodes of which none waits for another. What they have in common with rounds is in `test_episode_runner.py`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tests.support.episodes import Policy, requests_of, run, runner_of
from trainer.episodes import Episode


def content(episode: Episode) -> tuple[Any, ...]:
    """Everything that a step trains on and logs of an episode."""
    samples = [[array.tolist() for array in (s.token_ids, s.mask, s.logprobs)] for s in episode.samples]
    return (
        episode.uid, episode.status, episode.reward, episode.turns, episode.messages, samples, episode.failure
    )  # fmt: skip


def test_a_stream_gives_the_episodes_of_rounds(tokenizer):
    """Environments that answer after random times, which differ from start to start."""
    rows = [{"prompt": f"p{i}"} for i in range(20)]
    found = []
    for schedule, kind in (("rounds", "Dawdling"), ("stream", "Dawdling"), ("stream", "Threaded")):
        name = f"tests.support.environments:{kind}"
        with runner_of(tokenizer, 200, name=name, schedule=schedule, max_turns=5) as runner:
            policy = Policy(tokenizer, lambda seed: str(seed % 1000))
            found.append([content(episode) for episode in run(runner, policy, requests_of(*rows, n=2))])
    assert found[0] == found[1] == found[2]
    assert len({turns for _, _, _, turns, *_ in found[0]}) > 2


def test_no_episode_of_a_stream_waits_for_another(tokenizer, tmp_path):
    """The environments of one answer when the other one has been yielded."""
    rows = {"turns": 3, "until": f"{tmp_path}/ended"}, {"turns": 3}
    name = "tests.support.environments:AsyncEcho"
    with runner_of(tokenizer, name=name, schedule="stream", num_processes=1) as runner:
        parts = runner.run(requests_of(*rows), Policy(tokenizer, "a", "b", "c"), contextlib.nullcontext)
        (first,) = next(parts).items()
        Path(f"{tmp_path}/ended").touch()
        (second,) = next(parts).items()
        assert [(index, one.status, one.turns) for index, one in (first, second)] == [(1, "stop", 3), (0, "stop", 3)]
        assert list(parts) == []
