"""Transcripts of episodes: samples for the terminal, W&B and TensorBoard, and files of the run directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from trainer.config import Config
from trainer.data.rollout_io import remove_rollouts, write_rollouts
from trainer.episodes import Episode, TokenScores
from trainer.errors import is_disk_unwritable
from trainer.metrics.samples import Transcript, draw, write_validation
from trainer.sources.base import Evaluation

LOG = logging.getLogger(__name__)

SAMPLES_INTERVAL = 10  # steps between two times that training completions are sampled
_MOST_WAITING = 8
"""Files that wait for room on the disk. Each holds the episodes of a step in memory."""


class TranscriptLog:
    """Writes the episodes of steps and evaluations, and samples some of them for people to read.

    Episodes without messages have no transcript. Files for which a full disk has no room wait in memory (see `flush`).

    What they have before the first reply is the decoded prompt that the policy saw, and not the messages from which it
    was rendered: a chat template may leave out some of these.

    Args:
        fence: raises when this process no longer holds the run directory.
        tokenizer: decodes prompts. None: their messages are shown.
    """

    def __init__(self, cfg: Config, fence: Callable[[], None], tokenizer: Any = None):
        self.cfg = cfg
        self._fence = fence
        self._tokenizer = tokenizer
        self._samples: dict[int, dict[str, list[Transcript]]] = {}
        self._waiting: list[Callable[[], None]] = []  # each writes a file

    def add_step(self, step: int, episodes: Sequence[Episode], scores: Sequence[TokenScores] | None = None) -> None:
        """Sample from the episodes that `step` has trained on, and write them if they are kept.

        Args:
            scores: one for each sample of the episodes; None: they are not known.
        """
        logger, trainer = self.cfg.logger, self.cfg.trainer
        if not any(episode.messages for episode in episodes):
            return
        has_samples = logger.samples > 0 and step % SAMPLES_INTERVAL == 0
        if not (has_samples or logger.save_rollouts or logger.keeps_rollouts(step)):
            return
        episodes = self._as_seen(episodes)
        if has_samples:
            self._sample("training", step, episodes, shown=trainer.val_interval <= 0)
        write = partial(write_rollouts, trainer.run_dir, step, episodes, self._fence, scores)
        if logger.save_rollouts:
            self._write(write)
        elif logger.keeps_rollouts(step):
            try:
                write()
            except OSError as error:  # they are for people to look at: no save waits for them
                LOG.warning("the rollouts of step %d are not kept (%s)", step, error)

    def rewind(self, step: int) -> None:
        """Delete the rollouts that were kept of the steps after `step`, which are trained again."""
        self._fence()
        self._waiting.clear()  # what is committed does not wait
        remove_rollouts(self.cfg.trainer.run_dir, step)

    def add_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Sample from the greedy episodes of an evaluation, and write all of its episodes.

        Of a run with named sets alone, the samples are from these.
        """
        greedy = self._as_seen(evaluation.greedy)
        of_sets = self._as_seen([episode for episodes in evaluation.sets.values() for episode in episodes])
        if not (greedy or of_sets):
            return
        written = [transcript(episode) for episode in [*greedy, *self._as_seen(evaluation.sampled), *of_sets]]
        self._write(partial(write_validation, self.cfg.trainer.run_dir, step, written, self._fence))
        self._sample("validation", step, greedy or of_sets, shown=True)

    def _as_seen(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return episodes that begin with the decoded tokens of their prompt, as one message of the role `prompt`."""
        prompts: dict[bytes, Mapping[str, Any]] = {}  # episodes of a group share theirs
        seen = []
        for episode in episodes:
            if self._tokenizer is not None and episode.messages and episode.turns:
                first = episode.samples[0]
                tokens = first.token_ids[: np.argmax(first.mask > 0)]
                key = tokens.tobytes()
                if key not in prompts:
                    text = self._tokenizer.decode(tokens, skip_special_tokens=False)
                    prompts[key] = {"role": "prompt", "content": text}
                episode = replace(episode, messages=[prompts[key], *episode.split_messages()[1]])
            seen.append(episode)
        return seen

    def pop(self, step: int) -> Mapping[str, Sequence[Transcript]]:
        """Return the samples of `step` by `training` and `validation`, and forget them."""
        return self._samples.pop(step, {})

    def flush(self) -> None:
        """Write the files that wait.

        Raises:
            OSError: one of them cannot be written, and still waits.
        """
        while self._waiting:
            self._waiting[0]()
            self._waiting.pop(0)

    def _write(self, write: Callable[[], None]) -> None:
        """Write a file, after those that wait. If the disk is full, it waits, too, unless many do."""
        is_first = not self._waiting
        self._waiting.append(write)
        try:
            self.flush()
        except OSError as error:
            if not is_disk_unwritable(error) or len(self._waiting) > _MOST_WAITING:
                raise
            if is_first:
                LOG.warning(
                    "%s: cannot be written (%s); its episodes wait in memory for room: free space on the disk, or "
                    "repair it",
                    error.filename,
                    error.strerror,
                )

    def _sample(self, split: str, step: int, episodes: Sequence[Episode], shown: bool) -> None:
        """Keep `logger.samples` of the episodes.

        Args:
            shown: print them, too.
        """
        indices = draw(len(episodes), self.cfg.logger.samples, self.cfg.trainer.seed, split, step)
        chosen = [transcript(episodes[i]) for i in indices]
        if chosen:
            self._samples.setdefault(step, {})[split] = chosen
        for number, sample in enumerate(chosen if shown else [], start=1):
            block = sample.block(brief=True).replace("\n", "\n  ")
            LOG.info("%s of step %d, sample %d of %d: %s\n  %s", split, step, number, len(chosen), sample.name, block)


def transcript(episode: Episode) -> Transcript:
    """Return an episode as text."""
    prompt, completion = episode.split_messages()
    return Transcript(
        episode.group,
        episode.number,
        prompt,
        completion,
        episode.answer,
        episode.reward,
        episode.rewards,
        episode.status,
        episode.failure,
        episode.metrics,
    )
