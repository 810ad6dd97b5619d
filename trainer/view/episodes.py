"""The episodes that a run directory has, step by step: kept rollouts, the journal's last steps, validations."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trainer.checkpoint.storage import JOURNAL, TURNS, records_in
from trainer.data.records import decode_groups, decode_scores, key_of_group
from trainer.data.rollout_io import kept_files
from trainer.episodes import Episode, Sample, TokenScores
from trainer.files.atomic_io import open_regular
from trainer.files.documents import parse_json
from trainer.metrics.samples import VALIDATION_FOLDER

TRAINING, VALIDATION = "training", "validation"
_PREVIEW = 160
"""Characters of the last reply that the table shows."""
_FINEST = {"logprob": 1000, "entropy": 1000}
"""The parts of a nat in which numbers are kept; others are kept as finely as 16 bits allow."""
_LIMIT, _NOTHING = 32767, -32768
_VALIDATION_UID = "val:"
_BASELINE_UID = ":-1"
"""The end of the uid of a greedy episode whose reward is the baseline of its group, which no step trains on."""


@dataclass(frozen=True)
class StepFiles:
    """The files with the episodes of one step."""

    step: int
    split: str
    """`training` or `validation`."""
    origin: str
    """`rollouts`, `journal` or `validation`."""
    paths: tuple[str, ...]


@dataclass
class StepData:
    """The episodes of one step in the form that the page reads."""

    files: StepFiles
    rows: dict[str, list[Any]] = field(default_factory=dict)
    """A list for each column of the table."""
    texts: dict[str, list[Any]] = field(default_factory=dict)
    """`messages`: each different one; `episodes`: their indices, for each episode."""
    tokens: bytes = b""
    """See `pack_tokens`."""
    token_ids: frozenset[int] = frozenset()
    """The different tokens."""
    num_tokens: int = 0
    left_out: int = 0
    """Episodes that a limit left out."""

    @property
    def count(self) -> int:
        return len(self.rows.get("uid", ()))


def find_steps(run_dir: str) -> list[StepFiles]:
    """Return the files with episodes in a run directory, by step.

    Kept rollouts are preferred to the journal, which has the steps since the last checkpoints, and which a running job
    changes.
    """
    found = {step: StepFiles(step, TRAINING, "rollouts", (path,)) for step, path in kept_files(run_dir).items()}
    records: dict[int, list[str]] = {}
    if os.path.isdir(journal := os.path.join(run_dir, JOURNAL)):
        episodes = (name for name in os.listdir(journal) if not name.endswith(TURNS))
        for name, step in records_in(episodes).items():  # the oldest first
            records.setdefault(step, []).append(os.path.join(journal, name))
    for step, paths in records.items():
        found.setdefault(step, StepFiles(step, TRAINING, "journal", tuple(paths)))
    folder = os.path.join(run_dir, VALIDATION_FOLDER)
    evaluated = []
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        number = name.removeprefix("step_").removesuffix(".jsonl")
        if name == f"step_{number}.jsonl" and number.isdecimal():
            evaluated.append(StepFiles(int(number), VALIDATION, VALIDATION_FOLDER, (os.path.join(folder, name),)))
    return sorted([*found.values(), *evaluated], key=lambda one: (one.split, one.step))


def read_step(
    files: StepFiles, most_episodes: int | None = None, decode: Callable[[list[int]], str | None] = lambda ids: None
) -> StepData:
    """Return the episodes of one step, whole groups of them up to `most_episodes`, but one group at least.

    A file of the journal that disappears meanwhile is left out.

    Args:
        decode: returns the text of tokens. The journal has the messages from which a prompt was rendered, and a chat
            template may leave out some of these: the page shows the prompt that the policy saw.

    Raises:
        ValueError: a file is damaged.
    """
    if files.split == VALIDATION:
        data = _read_lines(files)
        if most_episodes is not None and data.count > most_episodes:
            data.left_out = data.count - most_episodes
            data.rows = {name: column[:most_episodes] for name, column in data.rows.items()}
            data.texts["episodes"] = data.texts["episodes"][:most_episodes]
        return data
    episodes = _read_episodes(files)
    kept = episodes
    if most_episodes is not None and len(episodes) > most_episodes:
        sizes = Counter(episode.group for episode, _ in episodes)
        count = int(np.searchsorted(np.cumsum([*sizes.values()]), most_episodes, side="right"))
        groups = {*[*sizes][: max(1, count)]}
        kept = [scored for scored in episodes if scored[0].group in groups]
    if files.origin == "journal":
        kept = [(_as_seen(episode, decode), scores) for episode, scores in kept]
    data = StepData(files, _rows(kept), _texts([episode.messages for episode, _ in kept]))
    data.tokens, data.token_ids, data.num_tokens = pack_tokens(kept)
    data.left_out = len(episodes) - len(kept)
    return data


def _as_seen(episode: Episode, decode: Callable[[list[int]], str | None]) -> Episode:
    """Return an episode whose conversation begins with the decoded tokens of its prompt, if they can be decoded."""
    if not episode.messages or not episode.samples or not (episode.samples[0].mask > 0).any():
        return episode
    first = episode.samples[0]
    text = decode(first.token_ids[: np.argmax(first.mask > 0)].tolist())
    if text is None:
        return episode
    return replace(episode, messages=[{"role": "prompt", "content": text}, *episode.split_messages()[1]])


Scored = tuple[Episode, Sequence[TokenScores]]
"""An episode, and what the trainer computed for the tokens of its samples; empty: it is not kept."""


def _read_episodes(files: StepFiles) -> list[Scored]:
    """Return the training episodes. Of a group that the journal has twice, the newer one counts.

    The episodes of a group may be in several files.
    """
    groups: dict[str, tuple[str | None, dict[str, Scored]]] = {}  # the key of each group, and its episodes by uid
    for path in files.paths:
        try:
            with open_regular(path) as file:
                content = file.read()
        except FileNotFoundError:
            continue
        try:
            found = [(key, episode) for key, group in decode_groups(content)[0].items() for episode in group]
            scores = decode_scores(content) or [[]] * len(found)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from error
        for (key, episode), own in zip(found, scores, strict=True):
            if episode.uid.startswith(_VALIDATION_UID) or episode.uid.endswith(_BASELINE_UID):
                continue
            of_group = key and key_of_group(key)
            if episode.group not in groups or groups[episode.group][0] != of_group:
                groups[episode.group] = of_group, {}
            groups[episode.group][1][episode.uid] = episode, own
    return [scored for _, group in groups.values() for scored in group.values()]


def _rows(scored: Sequence[Scored]) -> dict[str, list[Any]]:
    episodes = [episode for episode, _ in scored]
    versions = [[sample.weight_versions for sample in episode.samples] for episode in episodes]
    return {
        "uid": [episode.uid for episode in episodes],
        "group": [episode.group for episode in episodes],
        "reward": [_finite(episode.reward) for episode in episodes],
        "terms": [_numbers(episode.rewards) for episode in episodes],
        "status": [episode.status for episode in episodes],
        "failure": [episode.failure for episode in episodes],
        "turns": [episode.turns for episode in episodes],
        "length": [episode.length for episode in episodes],
        "advantage": [_mean_advantage(episode.samples, own) for episode, own in scored],
        "players": [_players(*one) for one in scored],
        "answer": [episode.answer for episode in episodes],
        "source": [episode.source for episode in episodes],
        "metrics": [_numbers(episode.metrics) for episode in episodes],
        "versions": [next((list(one) for one in some if one is not None), None) for some in versions],
        "preview": [_preview(episode.messages) for episode in episodes],
    }


def _players(episode: Episode, scores: Sequence[TokenScores]) -> list[list[Any]] | None:
    """Return the player, the reward and the mean advantage of each sample; None: the players have no names."""
    if not any(sample.player for sample in episode.samples):
        return None
    own = scores or [TokenScores()] * len(episode.samples)
    pairs = zip(episode.samples, own, strict=True)
    return [[one.player or "policy", _finite(one.reward), _mean_advantage([one], [of])] for one, of in pairs]


def _mean_advantage(samples: Sequence[Sample], scores: Sequence[TokenScores]) -> float | None:
    """Return the mean advantage of the tokens that the policy sampled; None: it is not known."""
    known = [
        one.advantages[sample.mask > 0]
        for sample, one in zip(samples, scores, strict=False)
        if one.advantages is not None
    ]
    tokens = np.concatenate(known) if known else np.zeros(0)
    return _finite(float(tokens.mean(dtype=np.float64))) if len(tokens) else None


def _texts(conversations: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, list[Any]]:
    """Return the messages of conversations, each different one once."""
    places: dict[str, int] = {}
    messages: list[Any] = []
    of_episodes = []
    for conversation in conversations:
        indices = []
        for message in conversation:
            shown = _shown(message)
            indices.append(places.setdefault(json.dumps(shown), len(messages)))
            if indices[-1] == len(messages):
                messages.append(shown)
        of_episodes.append(indices)
    return {"messages": messages, "episodes": of_episodes}


def _shown(message: Mapping[str, Any]) -> list[str]:
    """Return the role, the text, and what else the message has, as JSON."""
    content = message.get("content", "")
    text = content if isinstance(content, str) else json.dumps(content, default=str, indent=1)
    others = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
    return [str(message.get("role", "")), text, json.dumps(others, default=str, indent=1) if others else ""]


def _preview(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the beginning of the last reply on one line."""
    replies = (message.get("content") for message in reversed(messages) if message.get("role") == "assistant")
    text = next(replies, "")
    text = text if isinstance(text, str) else json.dumps(text, default=str)
    flat = " ".join(text[: 4 * _PREVIEW].split())
    return flat if len(flat) <= _PREVIEW and len(text) <= 4 * _PREVIEW else f"{flat[:_PREVIEW]}…"


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and np.isfinite(value) else None


def _numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    return {str(name): _finite(value) for name, value in values.items()}


def _read_lines(files: StepFiles) -> StepData:
    """Return the episodes of a validation. Its files have no tokens."""
    names = ("uid", "group", "reward", "terms", "status", "failure", "turns", "length", "advantage", "answer")
    rows: dict[str, list[Any]] = {name: [] for name in (*names, "source", "metrics", "versions", "preview")}
    conversations = []
    (path,) = files.paths
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                row = parse_json(line)
                messages = [*row["prompt"], *row["completion"]]
                turns = sum(message["role"] == "assistant" for message in row["completion"])
                values = {"uid": f"{row['uid']}:{row['number']}", "group": str(row["uid"]), "turns": turns}
                values |= {"reward": _finite(row["reward"]), "terms": _numbers(row["rewards"])}
                values |= {"status": row["finish_reason"], "failure": row.get("failure") or "", "answer": row["answer"]}
                values |= {"metrics": _numbers(row.get("metrics", {})), "preview": _preview(messages)}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}:{number} is no episode of a validation ({error})") from error
            for name, column in rows.items():
                column.append(values.get(name, "" if name == "source" else None))
            conversations.append(messages)
    return StepData(files, rows, _texts(conversations))


def pack_tokens(scored: Sequence[Scored]) -> tuple[bytes, frozenset[int], int]:
    """Return the tokens of episodes as bytes, the different ones, and their number.

    The bytes are the length of a header (uint32, little endian), the header as JSON, spaces up to a multiple of four,
    and then one array after another, each with all tokens: `ids` (uint32), those that the header names in `scores`
    (int16, parts of a nat, so many as the header says; -32768: unknown), and `mask` (uint8, 1: the policy sampled it).
    The header's `samples` has a pair for each sample: the index of its episode, and its number of tokens.
    """
    samples = [sample for episode, _ in scored for sample in episode.samples]
    if not samples:
        return b"", frozenset(), 0
    owners = [index for index, (episode, _) in enumerate(scored) for _ in episode.samples]
    of_trainer = [one for episode, own in scored for one in (own or [TokenScores()] * len(episode.samples))]
    ids = np.concatenate([np.asarray(sample.token_ids) for sample in samples]).astype("<u4")
    mask = np.concatenate([np.asarray(sample.mask) > 0 for sample in samples]).astype("u1")
    lengths = [len(sample.token_ids) for sample in samples]
    columns = {
        "logprob": [sample.logprobs for sample in samples],
        "difference": [_difference(*one) for one in zip(samples, of_trainer, strict=True)],
        "entropy": [one.entropy for one in of_trainer],
        "advantage": [one.advantages for one in of_trainer],
    }
    arrays, factors = {}, {}
    for name, column in columns.items():
        if any(one is not None for one in column):
            blank = [np.full(n, np.nan) if one is None else one for one, n in zip(column, lengths, strict=True)]
            values = np.where(mask > 0, np.concatenate(blank).astype(np.float64), 0.0)
            arrays[name], factors[name] = _as_parts(values, _FINEST.get(name, 1_000_000))
    header = json.dumps({"samples": [*zip(owners, lengths, strict=True)], "scores": factors})
    head = header.encode() + b" " * (-len(header) % 4)
    body = b"".join(array.astype("<i2").tobytes() for array in arrays.values())
    data = len(head).to_bytes(4, "little") + head + ids.tobytes() + body + mask.tobytes()
    return data, frozenset(np.unique(ids).tolist()), len(ids)


def _difference(sample: Sample, scores: TokenScores) -> np.ndarray | None:
    """Return by how much the engine's log-probs are above the trainer's."""
    if sample.logprobs is None or scores.logprobs is None:
        return None
    return np.asarray(sample.logprobs, np.float64) - scores.logprobs


def _as_parts(values: np.ndarray, finest: int) -> tuple[np.ndarray, int]:
    """Return numbers in whole parts of 1, and in how many: a power of ten up to `finest`, so that they fit 16 bits."""
    finite = np.abs(values[np.isfinite(values)])
    largest = float(finite.max()) if len(finite) else 0.0
    factor = min(finest, 1000) if np.isinf(values).any() else finest  # what is infinite must look large
    while factor > 1 and largest * factor > _LIMIT:
        factor //= 10
    scaled = np.clip(np.nan_to_num(values * factor, nan=0.0, posinf=_LIMIT, neginf=-_LIMIT), -_LIMIT, _LIMIT)
    return np.where(np.isnan(values), _NOTHING, np.rint(scaled)), factor
