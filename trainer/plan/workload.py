"""The work of a step as numbers: rows, tokens, micro-batches, and the micro-batch that takes most memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config import Config, RoleSpec, correction_of
from trainer.parallel.axes import AXES

Sizes = Mapping[str, int]
"""Size of each axis of a layout, by its name in `trainer.parallel.axes`."""


@dataclass(frozen=True)
class Row:
    """The sequences of a micro-batch."""

    lengths: tuple[int, ...]
    prefix_lengths: tuple[int, ...] | None
    """See `Packing`."""
    targets: int
    """Number of tokens whose log-probs are needed."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths) - sum(self.prefix_lengths or ())

    def tokens_of_rank(self, cp: int) -> int:
        """Return the tokens of the slice that each of `cp` ranks has."""
        return -(-self.tokens // cp)


@dataclass(frozen=True)
class Workload:
    """The work of a step."""

    groups: int
    """Prompts of a step."""
    n: int
    """Completions of a prompt; 1 without rollouts."""
    prompt: int
    """Tokens of a prompt, on average."""
    response: int
    """Tokens of a completion, on average."""
    longest: int
    """Tokens of the longest prompt and completion together."""
    longest_response: int
    """Most tokens that an engine generates one after another for a row; with an environment, in all turns."""
    optimizer_steps: int
    """In a step."""
    epochs: int
    dp: int
    """Data-parallel ranks of a role."""
    cp: int
    row_tokens: int
    """Most tokens of a micro-batch, of all ranks along `cp` together."""
    shares_prompts: bool
    fixed_tokens: bool = False
    """A step has as many rows as fill its tokens, so long rows are fewer."""
    packs: bool = True
    """A micro-batch has several sequences. False: it has one, as in models whose layers carry a state along a row."""

    @property
    def rows(self) -> int:
        """Sequences of a step."""
        return self.groups * self.n

    @property
    def tokens(self) -> int:
        """Tokens of prompts and completions of a step."""
        return self.rows * (self.prompt + self.response)

    @property
    def computed_tokens(self) -> int:
        """Tokens of a step that the ranks compute in one pass: a prompt that rows share counts once."""
        return (self.groups if self.shares_prompts else self.rows) * self.prompt + self.rows * self.response

    @property
    def computed_in_update(self) -> float:
        """Tokens that one optimizer step computes."""
        return self.computed_tokens * self.epochs / self.optimizer_steps

    def micro_batches(self, tokens: float) -> int:
        """Return the micro-batches of a data-parallel rank for `tokens` tokens of all ranks."""
        of_each = self.row_tokens if self.packs else self.computed_tokens / self.rows
        return max(1, math.ceil(tokens / self.dp / of_each))

    @property
    def groups_in_update(self) -> float:
        """Prompts of an optimizer step."""
        return self.groups * self.epochs / self.optimizer_steps

    @property
    def may_accumulate(self) -> bool:
        """Whether the rows of an optimizer step can need several micro-batches of a rank, when they are long."""
        if not self.packs or self.fixed_tokens or self.micro_batches(self.computed_in_update) > 1:
            return self.micro_batches(self.computed_in_update) > 1
        shared = self.prompt * (self.n - 1) if self.shares_prompts else 0
        return math.ceil(self.groups_in_update / self.dp) * (self.n * self.longest - shared) > self.row_tokens

    def largest_row(self, total: float) -> Row:
        """Return the largest micro-batch of a pass over `total` groups.

        If the rows of a data-parallel rank do not fill one with their mean lengths, some are longer.
        """
        if not self.packs:
            return Row((self.longest,), None, self.longest - self.prompt)
        lengths: list[int] = []
        prefixes: list[int] = []
        used = targets = 0
        for _ in range(max(1, math.ceil(total / self.dp))):
            for i in range(self.n):
                prefix = self.prompt if self.shares_prompts and i else 0
                length = min(self.prompt + self.response, self.row_tokens - used + prefix)
                if length - prefix < 1 or length <= self.prompt:
                    break
                lengths.append(length)
                prefixes.append(prefix)
                used += length - prefix
                targets += length - self.prompt
        for i, length in enumerate(lengths):
            more = 0 if self.fixed_tokens else max(0, min(self.longest - length, self.row_tokens - used))
            lengths[i] += more
            used += more
            targets += more
        if not lengths:
            lengths, prefixes, targets = [self.row_tokens], [0], self.row_tokens - 1
        return Row(tuple(lengths), tuple(prefixes) if self.shares_prompts else None, targets)


def workload_of(cfg: Config, sizes: Sizes, packs: bool = True) -> Workload:
    """Return the work of a step that the config describes. `packs`: see `Workload`."""
    t, r, p = cfg.trainer, cfg.rollout, cfg.plan
    dp = math.prod(size for name, size in sizes.items() if not AXES[name].same_rows)
    micro = t.max_tokens_per_micro_batch * sizes["cp"]
    shares = packs and cfg.model.attn_implementation == "sdpa"
    if not cfg.task.generates:
        length, n = cfg.longest_row, cfg.task.rows_of_group
        prompt = p.prompt_tokens or max(1, length // 2)
        response = p.response_tokens or max(1, length - prompt)
        if n:
            work = t.train_batch_size, n, prompt, response, length, 0, cfg.roles[0].updates_per_step, t.update_epochs
        else:
            work = max(1, cfg.sft.batch_size * length // (prompt + response)), 1, prompt, response, length, 0, 1, 1
        return Workload(*work, dp, sizes["cp"], max(micro, length), bool(n) and shares, n == 0, packs)
    prompt, reply = p.prompt_tokens or max(1, r.max_prompt_tokens // 2), r.max_response_tokens
    has_turns = any(environment.name for environment in cfg.environments)
    left = max(1, cfg.longest_sequence - prompt) if has_turns else reply  # most tokens after the prompt, of all turns
    policy = next(role for role in cfg.roles if role.name == "policy")
    return Workload(
        groups=t.train_batch_size,
        n=r.n,
        prompt=prompt,
        response=p.response_tokens or max(1, left // 2),
        longest=cfg.longest_sequence,
        longest_response=max(min(e.max_turns * reply, left) if e.name else reply for e in cfg.environments),
        optimizer_steps=policy.updates_per_step,
        epochs=t.update_epochs,
        dp=dp,
        cp=sizes["cp"],
        row_tokens=max(micro, cfg.longest_sequence),
        shares_prompts=shares and r.n > 1,
        packs=packs,
    )


def scored_share(cfg: Config, role: RoleSpec, workload: Workload) -> float:
    """Return the share of the rows that a role scores before the update: in a pass without gradients.

    Of the policy, these are the rows whose old log-probs `PolicyGradient.computes` asks for. The first optimizer step
    computes those of its rows itself, unless something reads them before it.
    """
    a = cfg.algorithm
    if role.name != "policy" or not cfg.task.generates:
        return float(bool(role.computes)) + float(bool(role.read_by))
    if a.old_logprobs == "rollout":
        return 0.0
    reads_before = a.kl_in == "reward" and any(role.name == "reference" for role in cfg.roles)
    reads_before |= "old_logprobs" in a.reads
    reads_before |= correction_of(cfg) is not None and a.options.get("rollout_correction_level", "token") != "token"
    return 1.0 if reads_before or cfg.trainer.update_epochs > 1 else 1 - 1 / workload.optimizer_steps
