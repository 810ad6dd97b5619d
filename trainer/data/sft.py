"""Supervised examples: chats and rollouts as tokens with a loss mask, drawn in epochs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xxhash

from trainer.config import DataConfig, SFTConfig
from trainer.data.datasets import Example, as_messages, read_parts, render_text
from trainer.data.rollouts import read_rollouts
from trainer.data.source import check_ledger
from trainer.documents import is_count, mismatch
from trainer.errors import UserError
from trainer.keyed import permutation
from trainer.parallel.batching import Batch

_FORMAT = 1  # of `state_dict`


class Encoded(NamedTuple):
    """One example."""

    token_ids: list[int]
    loss_mask: list[float]
    """1: a token to be learnt."""
    logprobs: list[float] | None = None
    """Under the policy that sampled it; 0 where it sampled nothing. None: nobody sampled it."""


def load_train(data: DataConfig, sft: SFTConfig, tokenizer: Any, vocab_size: int | None = None) -> list[list[Encoded]]:
    """The training examples, one list a data set: a file each with `sft.weights`, else all in one.

    Examples of which nothing is left to learn are left out: the answer is cut off whole, or the reward too low.

    Raises:
        UserError: the data cannot be read, or a data set has nothing to learn.
    """
    if sft.source == "rollouts":
        left = None if data.train_size < 0 else data.train_size
        encoded = []
        for file in data.train_files:
            part = read_rollouts(file, tokenizer, sft.min_reward, vocab_size)[:left]
            encoded.append([_encode_rollout(row, sft) for row in part])
            left = None if left is None else left - len(part)
    else:
        encoded = [[encode(e, tokenizer, data.system_prompt, sft) for e in part] for part in read_parts(data, "train")]
    kept = [[example for example in part if any(example.loss_mask)] for part in encoded]
    if not sft.weights:
        encoded, kept = [[e for part in encoded for e in part]], [[e for part in kept for e in part]]
    for i, (all_of_it, part) in enumerate(zip(encoded, kept, strict=True)):
        if not part:
            where = data.train_files[i] if sft.weights else "training"
            if not all_of_it and (sft.source == "examples" or sum(map(len, encoded)) == data.train_size):
                raise UserError(
                    f"data.train_size={data.train_size}: leaves nothing of {where}, which sft.weights names"
                )
            if not all_of_it:
                raise UserError(f"sft.min_reward={sft.min_reward}: no rollout of {where} has that much")
            roles = ",".join(sft.train_on)
            raise UserError(f"sft.max_length={sft.max_length}: all {len(all_of_it)} {where} prompts fill it, or hold "
                            f"nothing of sft.train_on={roles}, which leaves nothing to learn")  # fmt: skip
    return kept


def load_val(data: DataConfig, sft: SFTConfig, tokenizer: Any) -> list[Encoded]:
    """The held-out examples; those without anything to learn are left out.

    Raises:
        UserError: the data cannot be read, or that leaves none.
    """
    encoded = [encode(e, tokenizer, data.system_prompt, sft) for part in read_parts(data, "val") for e in part]
    kept = [example for example in encoded if any(example.loss_mask)]
    if not kept:
        raise UserError(f"sft.max_length={sft.max_length}: none of {len(encoded)} held-out examples has anything to "
                        "learn; raise it, or set trainer.val_interval=-1")  # fmt: skip
    return kept


def encode(example: Example, tokenizer: Any, system_prompt: str | None, sft: SFTConfig) -> Encoded:
    """The example as a chat, cut to `sft.max_length`, with loss on the messages of the roles `sft.train_on`.

    The last message, the answer, is tokenised as the policy would have generated it: by itself, after the
    generation prompt, with the end token. Of earlier messages the content is learnt, with an end token after it.

    Raises:
        UserError: the tokens of a message cannot be told, because the chat template changes it.
    """
    messages = as_messages(example["prompt"], system_prompt)
    text = render_text(tokenizer, messages, add_generation_prompt=True)
    spans = _spans(tokenizer, text, messages, sft.train_on)
    if spans:
        if not tokenizer.is_fast:
            raise UserError(f"sft.train_on={','.join(sft.train_on)}: the tokenizer cannot tell which tokens are whose; "
                            "only the last message of a chat can be learnt with it")  # fmt: skip
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        prompt, learn = encoding["input_ids"], _mask(encoding["offset_mapping"], spans)
        for i in range(1, len(prompt)):
            if learn[i - 1] and prompt[i] == tokenizer.eos_token_id:
                learn[i] = 1.0
    else:
        prompt = tokenizer.encode(text, add_special_tokens=False)
        learn = [0.0] * len(prompt)
    answer = tokenizer.encode(example["answer"], add_special_tokens=False) + [tokenizer.eos_token_id]
    learn += [1.0 if "assistant" in sft.train_on else 0.0] * len(answer)
    return Encoded((prompt + answer)[: sft.max_length], learn[: sft.max_length])


def _spans(
    tokenizer: Any, text: str, messages: Sequence[dict[str, str]], roles: Sequence[str]
) -> list[tuple[int, int]]:
    """Where in the rendered chat `text` the contents of the messages of these roles are.

    What stands between the contents is known from rendering the same chat with other contents.
    """
    if not any(message["role"] in roles for message in messages):
        return []
    marks = [f"[message {i} of the chat]" for i in range(len(messages))]
    others = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
    rest = render_text(tokenizer, others, add_generation_prompt=True)
    between = []
    for mark in marks:
        piece, _, rest = rest.partition(mark)
        between.append(piece)
    between.append(rest)
    spans, position = [], len(between[0])
    for i, message in enumerate(messages):
        content, end = message["content"], between[i + 1]
        # Templates strip, and take the reasoning out of earlier turns.
        known_as = (content, content.strip(), content.rpartition("</think>")[2].strip())
        shown = next((c for c in known_as if text.startswith(c + end, position)), None)
        if shown is None or not text.startswith(between[0]):
            raise UserError(f"sft.train_on={','.join(roles)}: the chat template changes message {i + 1} "
                            f"({content[:40]!r}), so its tokens cannot be told from the others'")  # fmt: skip
        if message["role"] in roles and shown:
            spans.append((position, position + len(shown)))
        position += len(shown) + len(end)
    return spans


def _mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[float]:
    """1 for tokens of which a character lies in one of the spans, which are in order."""
    mask, i = [], 0
    for begin, end in offsets:
        while i < len(spans) and spans[i][1] <= begin:
            i += 1
        mask.append(1.0 if i < len(spans) and end > spans[i][0] and end > begin else 0.0)
    return mask


def _encode_rollout(row: dict[str, Any], sft: SFTConfig) -> Encoded:
    prompt, completion = row["prompt_ids"], row["completion_ids"]
    nothing = [0.0] * len(prompt)
    cut = slice(0, sft.max_length)
    logprobs = None if sft.max_weight is None else (nothing + row["logprobs"])[cut]
    return Encoded((prompt + completion)[cut], (nothing + [1.0] * len(completion))[cut], logprobs)


class PackedSource:
    """Batches of whole examples, each of about `batch_size` times `max_length` tokens.

    Each data set is drawn in epochs, permutations keyed by (seed, data set, epoch); with several, the next example
    comes from the one that is furthest behind its weight. `take` fills the rows in that order, until an example does
    not fit any more, and changes nothing; `commit` says that its examples have been trained on. So a run that died
    and goes on skips no example and repeats none.

    Args:
        parts: the data sets.
        weights: how often examples of each are drawn, relative to the others; empty for one data set.
    """

    def __init__(self, parts: Sequence[Sequence[Encoded]], weights: Sequence[float], seed: int, batch_size: int,
                 max_length: int, pad_id: int):  # fmt: skip
        assert parts and all(parts) and len(weights) in (0, len(parts)), (len(parts), weights)
        total = sum(weights)
        self._parts = parts
        self._shares = [weight / total for weight in weights] or [1.0]
        self._seed = seed
        self._shape = (batch_size, max_length)
        self._pad_id = pad_id
        self._consumed = [0] * len(parts)
        self._taken = list(self._consumed)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # the epoch that was drawn from last, by data set

    @property
    def epoch(self) -> float:
        """Examples trained on, by examples there are."""
        return sum(self._consumed) / sum(len(part) for part in self._parts)

    def take(self) -> Batch:
        """The next batch (see `as_batch`): as many examples as fill `batch_size` rows of `max_length` tokens."""
        rows, width = self._shape
        self._taken = list(self._consumed)
        taken: list[Encoded] = []
        filled, used = 1, 0  # rows begun, and tokens in the last of them
        while True:
            part = self._next_part(self._taken)
            example = self._example(part, self._taken[part])
            if used + len(example.token_ids) > width:
                if filled == rows:
                    return as_batch(taken, self._pad_id)
                filled, used = filled + 1, 0
            taken.append(example)
            used += len(example.token_ids)
            self._taken[part] += 1

    def commit(self) -> None:
        """What was taken last has been trained on."""
        self._consumed = list(self._taken)

    def _next_part(self, taken: Sequence[int]) -> int:
        count = sum(taken) + 1
        behind = [share * count - own for share, own in zip(self._shares, taken, strict=True)]
        return behind.index(max(behind))

    def _example(self, part: int, position: int) -> Encoded:
        epoch, offset = divmod(position, len(self._parts[part]))
        if part not in self._orders or self._orders[part][0] != epoch:
            self._orders[part] = epoch, permutation(len(self._parts[part]), self._seed, "sft", part, epoch)
        return self._parts[part][self._orders[part][1][offset]]

    def state_dict(self) -> dict[str, Any]:
        return {"format": _FORMAT, "seed": self._seed, "fingerprint": self._fingerprint, "consumed": self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            UserError: it was taken with other examples or another seed, or is written in another format.
        """
        check_ledger(state, self.state_dict(), "examples")
        problem = mismatch(state, {"consumed": [is_count]})
        if problem is None and len(state["consumed"]) != len(self._parts):
            problem = f"it has {len(state['consumed'])} data sets instead of {len(self._parts)}"
        if problem is not None:
            raise UserError(f"data: the checkpoint's place in the data is damaged ({problem}); use another checkpoint")
        self._consumed = list(state["consumed"])

    @cached_property
    def _fingerprint(self) -> str:
        """Of what is trained on. Computed once: checkpoints are frequent and data sets large."""
        digest = xxhash.xxh3_128()
        for part in self._parts:
            digest.update(f"data set of {len(part)}".encode())
            for example in part:
                digest.update(f"example of {len(example.token_ids)}".encode())
                digest.update(np.asarray(example.token_ids, dtype=np.int64).tobytes())
                for values in (example.loss_mask, example.logprobs or []):
                    digest.update(np.asarray(values, dtype=np.float64).tobytes())
        return digest.hexdigest()


def as_batch(examples: Sequence[Encoded], pad_id: int) -> Batch:
    """Examples as the rows of one mini-batch.

    Returns:
        `input_ids`, `mask` (1 = learn this token), `advantages` (the same: cross-entropy is `reinforce` with advantage
        1) and, if examples have them, `rollout_logprobs` and `old_logprobs` of the policy that sampled: `(B, T)`;
        `lengths`, `group_ids` (one group): `(B,)`.
    """
    lengths = np.asarray([len(example.token_ids) for example in examples], dtype=np.int64)
    shape = (len(examples), int(lengths.max()))
    ids = np.full(shape, pad_id, dtype=np.int64)
    mask, logprobs = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    sampled = False
    for row, example in enumerate(examples):
        ids[row, : lengths[row]], mask[row, : lengths[row]] = example.token_ids, example.loss_mask
        if example.logprobs is not None:
            logprobs[row, : lengths[row]] = example.logprobs
            sampled = True
    batch = {"input_ids": ids, "mask": mask, "advantages": mask, "lengths": lengths,
             "group_ids": np.zeros(len(examples), dtype=np.int64)}  # fmt: skip
    return {**batch, "rollout_logprobs": logprobs, "old_logprobs": logprobs} if sampled else batch
