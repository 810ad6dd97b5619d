"""The one datum that travels from a source to the learner: an episode, and the samples that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

REPLY_MARK = "Reply-7f3a91c4"
"""Stands for a reply in a rendered chat where only the text around it matters. No chat says it."""

MARGIN = "margin"
"""The term of `Episode.rewards` that says by how much the chosen answer of a pair should win."""


@dataclass(frozen=True)
class Sample:
    """One row of training data: the tokens of a prompt, of what the policy said, and of what its tools answered."""

    token_ids: np.ndarray
    """`(T,)` int32."""
    mask: np.ndarray
    """`(T,)` float32, 1 for a token that the policy sampled, or that is to be learnt."""
    logprobs: np.ndarray | None = None
    """`(T,)` float32, under the policy that sampled, 0 where `mask` is 0. None: nobody sampled the tokens."""
    weight_versions: tuple[int, int] | None = None
    """The oldest and the newest weights of this run's policy that sampled tokens of it; they count from 1. None, or 0:
    another policy sampled the tokens, or, without `logprobs`, nobody did."""
    version_spans: tuple[tuple[int, int], ...] = ()
    """Which weights sampled which tokens, if several did: pairs of a version and a number of tokens, in the order of
    the tokens whose `mask` is 1. Empty: one version did, or the engine does not say."""
    reward: float | None = None
    """Of the conversation that the sample belongs to. None: it is not known (see `Episode.reward`)."""
    player: str = ""
    """Who of the environment's players the policy was. The samples of a player are compared with those of the same
    player in other episodes of the prompt. Empty: there is one player."""
    sampled_by: str = ""
    """The name of another policy that sampled the tokens; `weight_versions` are then its own. Empty: this run's."""

    @property
    def is_foreign(self) -> bool:
        """Whether another policy than this run's sampled its tokens, so that no version says how far away it is."""
        is_sampled = self.logprobs is not None and bool((self.mask > 0).any())
        return is_sampled and bool(self.sampled_by or self.weight_versions is None or self.weight_versions[0] == 0)

    @property
    def scored_length(self) -> int:
        """Number of tokens after which a reward model reads the score: up to the last one that the policy sampled, its
        stop token, whatever follows it. All tokens if it sampled none."""
        sampled = np.flatnonzero(self.mask > 0)
        return int(sampled[-1]) + 1 if len(sampled) else len(self.token_ids)


@dataclass(frozen=True)
class TokenScores:
    """What the trainer computed for the tokens of a sample, each `(T,)` float32, 0 where `mask` is 0. None: the
    objective, or the config, does not need it."""

    logprobs: np.ndarray | None = None
    """Under the policy before the step."""
    entropy: np.ndarray | None = None
    """Of the distribution that the token was chosen from, in nats, when the sample was first trained on. NaN: the
    step left the sample out."""
    advantages: np.ndarray | None = None
    """As the loss reads them."""


@dataclass(frozen=True)
class Episode:
    """One attempt at one row of the data."""

    uid: str
    """`epoch:row:number`, or `source:epoch:row:number` in a mix. Every random draw for the episode is keyed by it."""
    group: str
    """The same for all episodes of one prompt. Estimators compare the samples of one group and one player."""
    samples: list[Sample]
    """Those of one player together. One for each, unless a later turn could not be written as the earlier ones with
    more tokens after them."""
    reward: float | None = 1.0
    """Also that of its samples, unless players have rewards of their own: then it is their mean. None: it is not scored
    yet, or that failed, or its environment failed before the policy could cause that: then losses, baselines and means
    of rewards leave the episode out."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What `reward` consists of."""
    status: str = "stop"
    """Why the episode ended: `stop` (the policy ended its completion, or the environment is done), `length` (cut),
    `turns` (`environment.max_turns` replies), or `timeout` and `failed` (its environment failed)."""
    baseline: float | None = None
    """The reward of a greedy episode of the same prompt, where the advantage estimator asks for it (`remax`). None
    there: it failed, and the episode is not learnt from."""
    failure: str = ""
    """Why the reward, or a part of it, or the environment failed. Empty: it did not."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What its environment, or its tools, have counted."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The whole conversation, prompt included. Empty: the episode has no text for people to read."""
    turns: int = 1
    """Replies of the policy: the last ones of the role `assistant` in `messages`."""
    answer: str = ""
    """The reference answer; empty if the data has none."""
    source: str = ""
    """The row's source: its dotted name below `data`, such as `mix.math`. Empty: the run's own data."""

    def __post_init__(self) -> None:
        by_player: dict[str, list[Sample]] = {}
        for sample in self.samples:
            has_own = sample.player and sample.reward is not None
            sample = sample if has_own or sample.reward == self.reward else replace(sample, reward=self.reward)
            by_player.setdefault(sample.player, []).append(sample)
        object.__setattr__(self, "samples", [sample for some in by_player.values() for sample in some])

    @property
    def player_rewards(self) -> dict[str, float | None]:
        """The reward of each player, in the order of the samples; that of the episode if there is one player."""
        return {sample.player: sample.reward for sample in self.samples} or {"": self.reward}

    @property
    def number(self) -> int:
        """Its number among the episodes of its group."""
        return int(self.uid.rpartition(":")[2])

    @property
    def text(self) -> str:
        """The last reply of the policy; empty if it gave none."""
        replies = (message["content"] for message in reversed(self.messages) if message["role"] == "assistant")
        return next(replies, "") if self.turns else ""

    @property
    def length(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(sum((sample.mask > 0).sum() for sample in self.samples))

    def split_messages(self) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """Return the messages before the policy's first reply, and the others."""
        return split_messages(self.messages, self.turns)


def split_messages(
    messages: Sequence[Mapping[str, Any]], turns: int
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """Return the messages before the first of the policy's `turns` replies, and the others."""
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    first = replies[-turns] if turns else len(messages)  # a prompt may show example replies
    return messages[:first], messages[first:]
