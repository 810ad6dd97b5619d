"""The prompts of a run and its sources, and the ledger of those that were trained."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer.config import Config
from trainer.data.datasets import Prompt, PromptSet, load_prompts, load_rows, name_in_mix
from trainer.data.ledger import Ledger, MixLedger, find_curriculum
from trainer.data.row_files import digest_rows
from trainer.data.tokens import changed_answer
from trainer.errors import one_line
from trainer.sources.routes import VAL_SETS, train_sources

LOG = logging.getLogger(__name__)


def read_prompts(cfg: Config, split: str, tokenizer: Any) -> PromptSet:
    """Return the prompts of `train` or `val`; with an environment, the rows that it makes prompts of.

    The training prompts of a mix are those of its sources, one source after another.
    """
    if split == "train" and cfg.data.mix:
        sets = {source: read_source(cfg, source, tokenizer) for source in train_sources(cfg)}
        firsts = (f"{one.first_dropped} of {name_in_mix(name)}" for name, one in sets.items() if one.dropped)
        prompts = [prompt for one in sets.values() for prompt in one.prompts]
        return PromptSet(prompts, sum(one.dropped for one in sets.values()), next(firsts, ""))
    if cfg.environment.name:
        found = load_rows(cfg.data, split)
        answers = [prompt.row.get(cfg.data.answer_key) for prompt in found.prompts]
    else:
        found = load_prompts(cfg.data, split, tokenizer, cfg.rollout.max_prompt_tokens)
        answers = [prompt.answer for prompt in found.prompts]
    _warn_of_changed_answer(cfg, split, found, answers, tokenizer)
    return found


def _warn_of_changed_answer(cfg: Config, split: str, found: PromptSet, answers: Sequence[Any], tokenizer: Any) -> None:
    """Name a reference answer that the policy cannot write, because the tokenizer changes it."""
    changed = changed_answer(tokenizer, [answer if isinstance(answer, str) else "" for answer in answers])
    if changed is not None:
        place, text = changed
        LOG.warning(
            "%s=%s: the tokenizer changes the reference answer of row %d of the %s data, %s, into %s, which is all "
            "that the policy can write; a reward that does not take both for equal gives 0 to a right completion",
            cfg.data.name_of("answer_key"),
            cfg.data.answer_key,
            found.prompts[place].index + 1,
            split,
            one_line(f"{answers[place]!r:.80}"),
            one_line(f"{text!r:.80}"),
        )


def read_source(cfg: Config, source: str, tokenizer: Any) -> PromptSet:
    """Return the prompts of a source, which name it.

    Args:
        source: dotted name below `data`, such as `mix.math` or `val_sets.math`.
    """
    found = read_prompts(cfg.of_source(source), "val" if source.startswith(VAL_SETS) else "train", tokenizer)
    return replace(found, prompts=[replace(prompt, source=source) for prompt in found.prompts])


def prompt_ledger(cfg: Config, prompts: Sequence[Prompt]) -> Ledger | MixLedger:
    """Return the ledger of a run that samples from `prompts`."""
    if not cfg.data.mix:
        return _ledger_of_source(cfg, prompts)
    rows: dict[str, list[Prompt]] = {name: [] for name in cfg.data.mix}
    for prompt in prompts:
        rows[name_in_mix(prompt.source)].append(prompt)
    ledgers = {name: _ledger_of_source(cfg.of_source(f"mix.{name}"), rows[name], name) for name in rows}
    weights = {name: source.weight for name, source in cfg.data.mix.items()}
    return MixLedger(ledgers, weights, {name: len(some) for name, some in rows.items()})


def _ledger_of_source(cfg: Config, prompts: Sequence[Prompt], name: str = "") -> Ledger:
    def fingerprint() -> str:
        """Return a digest of what the policy sees, and of all that rewards, environments and curricula can read."""
        system_prompt = None if cfg.environment.name else cfg.data.system_prompt  # a template may leave it out
        rows = ({"seen": (one.index, one.token_ids, one.answer), "row": one.row} for one in prompts)
        return digest_rows(rows, system_prompt)

    path = cfg.data.curriculum
    curriculum = find_curriculum(path, cfg.data.name_of("curriculum")) if path else None
    return Ledger(
        prompts,
        cfg.trainer.seed,
        "prompts",
        fingerprint,
        curriculum=curriculum,
        curriculum_name=path or "",
        source=name,
    )
