"""Metrics of a batch: of all its episodes, and of those of each source of `data.mix`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.config import Config
from trainer.data.datasets import name_in_mix
from trainer.data.ledger import Ledger, MixLedger, SampleIndex
from trainer.episodes import Episode
from trainer.sources.routes import train_sources


def episode_metrics(cfg: Config, episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of the episodes that a step trains on.

    In a mix, the terms of rewards, and what environments count, are metrics of the sources alone.
    """
    if cfg.data.mix:
        by_source: dict[str, list[Episode]] = {}
        for episode in episodes:
            by_source.setdefault(episode.source, []).append(episode)
        foreign = [bool(sample.sampled_by) for episode in episodes for sample in episode.samples]
        return ({"rollout/replayed_frac": float(np.mean(foreign))} if any(foreign) else {}) | {
            f"data/{name_in_mix(source)}/{name}": value
            for source, some in sorted(by_source.items())
            for name, value in _metrics_of_source(cfg.of_source(source), some).items()
        }
    return _shared_metrics(cfg, episodes)


def player_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean reward of each player that has a name."""
    return {
        f"player/{player}/reward/mean": float(np.mean(rewards))
        for player, rewards in sorted(known_rewards(episodes).items())
        if player and rewards
    }


def known_rewards(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Return the rewards of each player that have not failed, in the order of the episodes."""
    known: dict[str, list[float]] = {}
    for player, reward in (item for episode in episodes for item in episode.player_rewards.items()):
        known.setdefault(player, []).extend([] if reward is None else [reward])
    return known


def failure_metrics(cfg: Config, episodes: Sequence[Episode]) -> dict[str, float]:
    """Return how many episodes have failed, by what has failed: the reward or the environment."""
    names = {
        source: "reward/failures" if cfg.of_source(source).environment.name is None else "environment/failures"
        for source in train_sources(cfg)
    }
    counts = dict.fromkeys(names.values(), 0.0)
    for episode in episodes:
        counts[names[episode.source]] += bool(episode.failure)
    return counts


def mix_progress(ledger: Ledger | MixLedger, indices: Sequence[SampleIndex]) -> dict[str, float]:
    """Return how far each source of a mix is once these rows are trained; without a mix, nothing."""
    if not isinstance(ledger, MixLedger):
        return {}
    metrics = {}
    for name, (rows, epochs) in ledger.progress(indices).items():
        metrics |= {f"data/{name}/prompts": float(rows), f"data/{name}/epoch": epochs}
    return metrics


def _metrics_of_source(cfg: Config, episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of episodes of one source, without its name. Without any known reward, there is no mean."""
    metrics = {"failures": float(sum(bool(episode.failure) for episode in episodes))}
    metrics["response_length/mean"] = float(np.mean([episode.length for episode in episodes]))
    rewards = np.asarray([reward for some in known_rewards(episodes).values() for reward in some])
    if len(rewards):
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        metrics["accuracy"] = float((rewards >= cfg.reward.success_threshold).mean())
    groups: dict[tuple[str, str], set[float]] = {}
    for episode in episodes:
        for player, reward in episode.player_rewards.items():
            groups.setdefault((episode.group, player), set()).update([] if reward is None else [reward])
    metrics["reward/zero_std_frac"] = float(np.mean([len(rewards) < 2 for rewards in groups.values()]))
    return metrics | _shared_metrics(cfg, episodes)


def _shared_metrics(cfg: Config, episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of rewards and players, and, with an environment, of what it counts."""
    metrics = means("reward", reward_terms(episodes)) | player_metrics(episodes)
    if cfg.environment.name:
        metrics |= means("episode", [episode.metrics for episode in episodes if episode.reward is not None])
        metrics["episode/turns/mean"] = float(np.mean([episode.turns for episode in episodes]))
        metrics["episode/tokens/mean"] = float(np.mean([episode.length for episode in episodes]))
    return metrics


def staleness(episodes: Sequence[Episode], step: int) -> dict[str, float]:
    """Return by how many versions the weights that sampled the episodes are older than those that the step trains."""
    ages = [step - oldest for oldest, _ in _versions(episodes)]
    return {"rollout/staleness_mean": float(np.mean(ages)), "rollout/staleness_max": float(max(ages))} if ages else {}


def mean_versions(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return how many versions of the weights have sampled an episode."""
    counts = [newest - oldest + 1 for oldest, newest in _versions(episodes)]
    return {"rollout/versions_mean": float(np.mean(counts))} if counts else {}


def _versions(episodes: Sequence[Episode]) -> list[tuple[int, int]]:
    """Return the versions of each sample that this run's policy has sampled."""
    samples = [sample for episode in episodes for sample in episode.samples if sample.mask.any()]
    return [one.weight_versions for one in samples if one.weight_versions is not None and not one.is_foreign]


def means(name: str, values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics `{name}/{term}/mean`. A term that one of the values lacks counts as 0 there."""
    terms = sorted({term for value in values for term in value})
    return {f"{name}/{term}/mean": sum(value.get(term, 0.0) for value in values) / len(values) for term in terms}


def reward_terms(episodes: Sequence[Episode]) -> list[Mapping[str, float]]:
    """Return the terms of the rewards that are not left out."""
    return [episode.rewards for episode in episodes if episode.reward is not None]
