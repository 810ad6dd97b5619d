"""The sources of data of a run: their prompts and ledgers, how their episodes are run, and what rewards them."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import Config
from trainer.config.engines import engines_with
from trainer.config.fields import config_error, resume_rules
from trainer.config.schema import is_open
from trainer.data.datasets import Prompt, PromptSet, load_prompts, load_rows, name_in_mix
from trainer.data.ledger import Ledger, MixLedger, find_curriculum
from trainer.data.prompt_files import FilePrompts, MixedPrompts, load_large
from trainer.data.rollout_io import read_episodes
from trainer.data.row_files import digest_rows
from trainer.data.tokens import changed_answer
from trainer.environments.base import check_options
from trainer.environments.episode_runner import EnvironmentRunner, EpisodeRunner, SingleTurnRunner
from trainer.episodes import Episode
from trainer.errors import UserError, one_line, sentences_of
from trainer.files.documents import flatten
from trainer.files.redaction import redact
from trainer.journal.history import digest_episodes, identity
from trainer.rewards.scorer import Scorer
from trainer.rewards.scoring import reward_functions

LOG = logging.getLogger(__name__)

VAL_SETS = "val_sets."  # beginning of the names of the sources that are validation sets


def train_sources(cfg: Config) -> list[str]:
    """Return the sources of the training data, as `Prompt.source` names them. Without a mix, `""` alone."""
    return [f"mix.{name}" for name in sorted(cfg.data.mix)] or [""]


def sampled_sources(cfg: Config) -> list[str]:
    """Return the sources of the training data that are not recorded."""
    return [source for source in train_sources(cfg) if not cfg.of_source(source).data.replay]


def read_prompts(cfg: Config, split: str, tokenizer: Any) -> PromptSet:
    """Return the prompts of `train` or `val`; with an environment, the rows that it makes prompts of.

    The training prompts of a mix are those of its sources, one source after another.
    """
    if split == "train" and cfg.data.mix:
        sets = {source: read_source(cfg, source, tokenizer) for source in train_sources(cfg)}
        firsts = (f"{one.first_dropped} of {name_in_mix(name)}" for name, one in sets.items() if one.dropped)
        prompts = MixedPrompts({name_in_mix(source): one.prompts for source, one in sets.items()})
        return PromptSet(prompts, sum(one.dropped for one in sets.values()), next(firsts, ""))
    if cfg.data.replay:
        return PromptSet(recorded_prompts(cfg, tokenizer), 0)
    data, as_rows, longest = cfg.data, bool(cfg.environment.name), cfg.rollout.max_prompt_tokens
    found = load_large(data, tokenizer, longest, cfg.trainer.run_dir, as_rows) if split == "train" else None
    if found is None:
        found = load_rows(data, split) if as_rows else load_prompts(data, split, tokenizer, longest)
    key = data.answer_key if as_rows else None
    changed = changed_answer(tokenizer, found.prompts, lambda one: one.answer if key is None else one.row.get(key))
    if changed is not None:
        place, answer, text = changed
        LOG.warning(
            "%s=%s: the tokenizer changes the reference answer of row %d of the %s data, %s, into %s, which is all "
            "that the policy can write; a reward that does not take both for equal gives 0 to a right completion",
            cfg.data.name_of("answer_key"),
            cfg.data.answer_key,
            found.prompts[place].index + 1,
            split,
            one_line(f"{answer!r:.80}"),
            one_line(f"{text!r:.80}"),
        )
    return found


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
    prompts = [_recorded_prompt(cfg, *key, some) for key, some in groups.items()]
    most = len(prompts) if cfg.data.train_size < 0 else cfg.data.train_size
    return [dataclasses.replace(one, index=index) for index, one in enumerate(prompts[:most])]


def _recorded_prompt(cfg: Config, file: str, group: str, episodes: list[Episode]) -> Prompt:
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


def read_source(cfg: Config, source: str, tokenizer: Any) -> PromptSet:
    """Return the prompts of a source, which name it.

    Args:
        source: dotted name below `data`, such as `mix.math` or `val_sets.math`.
    """
    found = read_prompts(cfg.of_source(source), "val" if source.startswith(VAL_SETS) else "train", tokenizer)
    prompts = found.prompts
    named = prompts.of_source(source) if isinstance(prompts, FilePrompts) else None
    return dataclasses.replace(
        found, prompts=named or [dataclasses.replace(prompt, source=source) for prompt in prompts]
    )


def prompt_ledger(cfg: Config, prompts: Sequence[Prompt]) -> Ledger | MixLedger:
    """Return the ledger of a run that samples from `prompts`."""
    if not cfg.data.mix:
        return _ledger_of_source(cfg, prompts)
    assert isinstance(prompts, MixedPrompts)
    ledgers = {
        name: _ledger_of_source(cfg.of_source(f"mix.{name}"), rows, name) for name, rows in prompts.sources.items()
    }
    return MixLedger(ledgers, {name: source.weight for name, source in cfg.data.mix.items()})


def _ledger_of_source(cfg: Config, prompts: Sequence[Prompt], name: str = "") -> Ledger:
    def fingerprint() -> str:
        """Return a digest of what the policy sees, and of all that rewards, environments and curricula can read."""
        system_prompt = None if cfg.environment.name else cfg.data.system_prompt  # a template may leave it out
        if isinstance(prompts, FilePrompts):
            return prompts.digest
        rows = ({"seen": (one.index, one.token_ids, one.answer), "row": one.row} for one in prompts)
        return digest_rows(rows, system_prompt)

    path = cfg.data.curriculum or ""
    curriculum = find_curriculum(path, cfg.data.name_of("curriculum")) if path else None
    return Ledger(prompts, cfg.trainer.seed, "prompts", fingerprint, curriculum, curriculum_name=path, source=name)


@dataclass(frozen=True)
class Route:
    """How the episodes of one source are run, and what rewards them."""

    cfg: Config  # of a run on this source alone (`Config.of_source`)
    episodes: EpisodeRunner
    scorer: Scorer | None  # None: the environment gives the rewards, or all are 0
    decides: str = ""
    """Of a validation set: a digest of its environment and its reward, which the settings of the run do not hold."""

    @property
    def wants_groups(self) -> bool:
        """Whether the rewards of a group begin together, when its last episode has ended."""
        return self.scorer is not None and getattr(self.scorer, "wants_groups", True)


def make_scorers(
    cfg: Config, sources: Iterable[str], make: Callable[[Config], Scorer | None]
) -> dict[str, Scorer | None]:
    """Return what rewards the episodes of each source. Sources with the same reward share it.

    Args:
        sources: as `Prompt.source` names them.
        make: returns what rewards the episodes of a run with a config.
    """
    made: dict[str, Scorer | None] = {}
    scorers = {}
    for source in sources:
        own = cfg.of_source(source)
        key = repr((own.environment.name is None, own.reward))
        if key not in made:
            made[key] = make(own)
        scorers[source] = made[key]
    return scorers


def make_routes(cfg: Config, scorers: Mapping[str, Scorer | None], tokenizer: Any) -> dict[str, Route]:
    """Return the routes of sources, by their names. Sources with the same environment share its processes."""
    runners: dict[str, EpisodeRunner] = {}
    routes = {}
    tokenizer = copy.deepcopy(tokenizer)  # the event loop uses it, and the main thread the other one
    for source, scorer in scorers.items():
        own = cfg.of_source(source)
        environment = own.environment if own.environment.name else None
        key = repr((environment, own.data.answer_key if environment else None))
        if key not in runners:
            runners[key] = episode_runner(own, tokenizer)
        decides = ""
        if source.startswith(VAL_SETS):
            flat = flatten(redact(dataclasses.asdict(own), references=False), whole=is_open)
            keys = [key for key, rule in resume_rules(own).items() if rule.change == "rollouts"]
            deciding = {key: flat[key] for key in keys if key.startswith(("environment.", "reward."))}
            decides = identity(deciding, {}, "").rollouts
        routes[source] = Route(own, runners[key], scorer, decides)
    return routes


def episode_runner(cfg: Config, tokenizer: Any) -> EpisodeRunner:
    """Return what runs the episodes of a run with this config."""
    if not cfg.environment.name:
        return SingleTurnRunner(cfg, tokenizer)
    if cfg.environment.is_agent:
        from trainer.agents.runner import AgentRunner  # imports a web server

        return AgentRunner(cfg, tokenizer)
    return EnvironmentRunner(cfg, tokenizer)


def check_source(cfg: Config) -> None:
    """Refuse an environment, an agent or reward functions that cannot be used.

    Args:
        cfg: of a run on the source alone (`Config.of_source`).
    """
    if cfg.environment.name is not None:
        check_options(cfg.environment.name, cfg.environment.kwargs)
        if cfg.environment.is_agent and cfg.engine.unit != "request":  # calls come at any time
            problem = f"is an agent, and rollout.engine={cfg.rollout.engine} takes no request while it generates"
            raise config_error(cfg, "environment.name", f"{problem}; choose rollout={engines_with('streaming')}")
    elif cfg.task.reward_functions and not cfg.reward.is_model:
        reward_functions(cfg.reward)
    elif cfg.reward.is_model and cfg.reward.model.url is None and not cfg.task.trains:
        problem = "an evaluation has no ranks for a reward model; name a reward function, or a server (remote)"
        raise config_error(cfg, "reward.name", problem)


def find_refusals(cfg: Config, sources: Iterable[str], check: Callable[[Config], None]) -> list[str]:
    """Return why sources cannot be used, one sentence for each reason, with the keys that they have set themselves.

    Args:
        sources: as `Prompt.source` names them.
        check: raises a `UserError` for the config of a run on a source alone.
    """
    refused = []
    for source in sources:
        try:
            check(cfg.of_source(source))
        except UserError as error:
            refused += [with_keys_of(source, cfg, sentence) for sentence in sentences_of(error)]
    return refused


def with_keys_of(source: str, cfg: Config, sentence: str) -> str:
    """Return a sentence about keys of the run as one about those that the source has set."""
    own = cfg.of_source(source)
    for section in ("environment", "reward"):
        if getattr(own, section) != getattr(cfg, section):
            sentence = re.sub(rf"(?<![\w.]){section}\.(?=[a-z])", f"data.{source}.{section}.", sentence)
    return sentence
