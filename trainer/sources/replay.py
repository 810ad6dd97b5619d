"""Recorded rollouts as a source of a mix: groups that another run has sampled, which are trained on again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from trainer.config import Config
from trainer.data.datasets import Prompt, name_in_mix
from trainer.data.rollout_io import read_episodes
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.journal.history import digest_episodes


def recorded_prompts(cfg: Config, tokenizer: Any) -> list[Prompt]:
    """Return a prompt for each recorded group of a source, with its episodes, in the order of the files.

    Args:
        cfg: of a run on the source alone (`Config.of_source`).

    Raises:
        UserError: a file holds no rollouts, or those of another tokenizer; or a sample has no log-probs or is too long.
    """
    groups: dict[tuple[str, str], list[Episode]] = {}
    for file in cfg.data.train_files:
        for episode in read_episodes(file, tokenizer, f"{cfg.data.name_of('replay')}=true"):
            groups.setdefault((file, episode.group), []).append(episode)
    prompts = [_prompt(cfg, *key, some) for key, some in groups.items()]
    most = len(prompts) if cfg.data.train_size < 0 else cfg.data.train_size
    return [dataclasses.replace(one, index=index) for index, one in enumerate(prompts[:most])]


def _prompt(cfg: Config, file: str, group: str, episodes: list[Episode]) -> Prompt:
    longest, name = cfg.longest_row, cfg.data.name_of("files")
    for sample in (sample for episode in episodes for sample in episode.samples):
        if sample.logprobs is None:
            raise UserError(f"{name}: {file}, group {group}: has no log-probs, because nobody sampled it; leave it out")
        if len(sample.token_ids) > longest:
            raise UserError(
                f"{name}: {file}, group {group}: has a sample of {len(sample.token_ids)} tokens, and sequences of this "
                f"run have at most {longest}; raise rollout.max_prompt_tokens or rollout.max_response_tokens"
            )
    first = episodes[0]
    messages, _ = first.split_messages()
    text = messages[-1]["content"] if messages else ""
    # The ledger compares rows, so the row stands for all that is trained on.
    return Prompt(0, (), text, first.answer, {"recorded": digest_episodes(episodes)}, messages, recorded=episodes)


def replayed(prompt: Prompt, group: str) -> Iterator[Episode]:
    """Yield the recorded episodes of a prompt as those of a group. Their samples say that they are another policy's."""
    for number, episode in enumerate(prompt.recorded):
        samples = [
            dataclasses.replace(sample, sampled_by=sample.sampled_by or name_in_mix(prompt.source))
            for sample in episode.samples
        ]
        yield dataclasses.replace(
            episode, uid=f"{group}:{number}", group=group, samples=samples, source=prompt.source, failure=""
        )
