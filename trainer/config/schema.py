"""The root of the typed schema.

Hydra composes `conf/*.yaml` onto these dataclasses. Each key carries its bounds or choices (`trainer.config.fields`);
what must hold between keys is in `trainer.config.rules`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from trainer.config.algorithm import AlgorithmConfig
from trainer.config.data import DataConfig, DPOConfig, NamedData, RMConfig, SFTConfig
from trainer.config.engines import EngineSpec, find_engine
from trainer.config.fields import Section, matches, subsection, value_of, walk_keys, walk_sections
from trainer.config.rollout import EnvironmentConfig, InferenceConfig, RewardConfig, RewardModelConfig, RolloutConfig
from trainer.config.tasks import OPTIONS, RoleSpec, ServerSpec, TaskSpec, find_task, servers_of
from trainer.config.trainer import LoggerConfig, ModelConfig, PlanConfig, TrainerConfig
from trainer.errors import did_you_mean


@functools.cache
def foreign_keys() -> dict[str, str]:
    """Return the keys of other packages, each with the keys here that take its place and a remark in brackets.

    A section stands for all keys below it that have no row. The keys of TRL have no sections.
    """
    with open(os.path.join(os.path.dirname(__file__), "foreign.tsv"), encoding="utf-8") as file:
        return dict(line.rstrip("\n").split("\t") for line in file)


def counterpart_of(key: str) -> str:
    """Return what a key of another package is called here, as a clause of a sentence. Empty: no package has the key."""
    parts, known = key.split("."), foreign_keys()
    begins = (0,) if parts[0] == "environment" else (0, 1)  # people write some section before it
    names = [".".join(parts[begin:end]) for begin in begins for end in range(len(parts), begin, -1)]
    name = next((name for name in names if name in known), None)
    return f"in place of {name}, this project has {known[name]}" if name else ""


_Section = TypeVar("_Section")


@dataclass
class Config(Section):
    trainer: TrainerConfig = subsection(TrainerConfig)
    algorithm: AlgorithmConfig = subsection(AlgorithmConfig)
    model: ModelConfig = subsection(ModelConfig)
    data: DataConfig = subsection(DataConfig)
    reward: RewardConfig = subsection(RewardConfig)
    environment: EnvironmentConfig = subsection(EnvironmentConfig)
    rollout: RolloutConfig = subsection(RolloutConfig)
    inference: InferenceConfig = subsection(InferenceConfig)
    sft: SFTConfig = subsection(SFTConfig)
    dpo: DPOConfig = subsection(DPOConfig)
    rm: RMConfig = subsection(RMConfig)
    logger: LoggerConfig = subsection(LoggerConfig)
    plan: PlanConfig = subsection(PlanConfig)

    def of_source(self, source: str) -> Config:
        """Return the config of a run on the rows of one source alone. Messages about its data name the source's keys.

        Args:
            source: dotted name below `data`, such as `mix.math`. Empty: the run's own data.
        """
        if not source:
            return self
        named: NamedData = value_of(self.data, source)
        data = self.data.with_source(f"data.{source}", named)
        return dataclasses.replace(self, data=data, environment=named.environment, reward=named.reward)

    @property
    def reward_model(self) -> RewardModelConfig:
        """The reward model that a source of data is rewarded by. Without a path and an address: there is none."""
        for name, reward in self.sections(RewardConfig):
            environment: EnvironmentConfig = value_of(self, f"{name.removesuffix('reward')}environment")
            if reward.is_model and environment.name is None and self.task.reward_functions:
                return reward.model
        return RewardModelConfig()

    @property
    def on_failure(self) -> str:
        """What the run does with an episode whose reward or environment failed, one of `ON_FAILURE`."""
        return self.environment.on_failure if self.environment.name else self.reward.on_failure

    @property
    def environments(self) -> list[EnvironmentConfig]:
        """The environments of the run and of all its sources of data, also those that are not set."""
        of_sources = (section for _, section in walk_sections(self.data) if isinstance(section, EnvironmentConfig))
        return [self.environment, *of_sources]

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a prompt and its completion."""
        plain = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        return max(e.max_tokens if e.name and e.max_tokens > 0 else plain for e in self.environments)

    @property
    def longest_row(self) -> int:
        """Most tokens of a sequence that the ranks compute."""
        return self.longest_sequence if self.task.generates else value_of(self, self.task.longest)

    @property
    def rollout_of_engines(self) -> RolloutConfig:
        """The settings of engines: a prompt and its completion have at most `longest_sequence` tokens."""
        completion = min(self.rollout.max_response_tokens, self.longest_sequence - 1)
        prompt = self.longest_sequence - completion
        return dataclasses.replace(self.rollout, max_prompt_tokens=prompt, max_response_tokens=completion)

    @property
    def task(self) -> TaskSpec:
        """The kind of training.

        Raises:
            UserError: `trainer.task` names none.
        """
        return find_task(self.trainer.task)

    @property
    def total_steps(self) -> int:
        """Number of steps after which the run is finished."""
        return value_of(self, self.task.total_steps)

    @property
    def compared_by(self) -> tuple[str, str]:
        """The metric that steps and runs are compared by, and its mode (`max` or `min`)."""
        return self.task.compared_by(self.trainer.best_metric)

    @property
    def export_dtype(self) -> str:
        """Dtype of exported weights, one of those of `rollout.dtype`."""
        return self.rollout.dtype if self.task.generates else "float32"

    @property
    def validates_start(self) -> bool:
        """The initial weights are validated, as step 0."""
        return self.task.generates and self.reads("trainer.val_interval") and self.validates(0)

    def validates(self, step: int) -> bool:
        """Return whether validation prompts, or a named set of them, are evaluated at `step`."""
        sets = self.data.val_sets.values() if self.reads("data.val_sets") else ()
        intervals = (self.trainer.val_interval, *(one.interval_in(self) for one in sets))
        return any(self.is_due(interval, step) for interval in intervals)

    def is_due(self, interval: int, step: int) -> bool:
        """Return whether a validation every `interval` steps (-1: never), and after the last one, is due at `step`."""
        return interval > 0 and (step % interval == 0 or step == self.total_steps)

    @property
    def engine(self) -> EngineSpec:
        """The inference engine.

        Raises:
            UserError: `rollout.engine` names none.
        """
        return find_engine(self.rollout.engine)

    @property
    def num_engines(self) -> int:
        """Number of inference engines."""
        return self.rollout.num_engines if self.task.generates else 0

    def reads(self, key: str) -> bool:
        """Return whether the run reads the key (see `TaskSpec.unread`)."""
        task, key = self.task, without_source(key)
        if task.options and f"{key}.".startswith(f"{OPTIONS}."):
            return True
        unread = (*task.unread, *(task.unused_with_path if self.model.path is not None else ()))
        return not matches(key, unread)

    def reads_section(self, name: str) -> bool:
        """Return whether the run reads a key of the section."""
        return not matches(f"{name}.", self.task.unused)

    def sections(self, kind: type[_Section]) -> Iterator[tuple[str, _Section]]:
        """Yield the dotted names and the values of all sections of a kind that the run reads."""
        for name, section in walk_sections(self):
            if isinstance(section, kind) and self.reads_section(name):
                yield name, section

    @property
    def roles(self) -> tuple[RoleSpec, ...]:
        """The models of the run, the policy first. Made of the config as it is at each call, within microseconds."""
        return self.task.roles_of(self)

    @property
    def servers(self) -> tuple[ServerSpec, ...]:
        """The frozen models of the run that are on inference servers."""
        return servers_of(self) if self.task.generates else ()

    @property
    def syncs_adapter(self) -> bool:
        """Whether engines serve the adapters over the initial weights."""
        rank, setting = self.trainer.policy.lora.rank, self.rollout.lora_sync
        if rank is None or setting == "merged" or self.rollout.fleet:
            return False
        return setting == "adapter" or rank <= self.engine.max_lora_rank


NAME = "<name>"
"""Stands for the names that users choose, in names of keys such as `data.mix.<name>.weight`."""
MAPPINGS = {key: constraint.section for key, _, constraint in walk_keys(Config()) if constraint.section is not None}
"""The keys that are mappings of sections, by names that users choose, with the class of these sections."""


def with_sections() -> Config:
    """Return the default config with a section `<name>` in each of `MAPPINGS`."""
    config = Config()
    for key, section in MAPPINGS.items():
        value_of(config, key)[NAME] = section()
    return config


SECTIONS = {name: type(section) for name, section in walk_sections(with_sections())}
"""The dataclass of each section, by its dotted name; "" is the config itself."""
KEYS = tuple(key for key, *_ in walk_keys(with_sections()))
NAMES = frozenset(filter(None, (*SECTIONS, *KEYS)))
"""The dotted names of all sections and keys."""
OPEN_SECTIONS = tuple(key for key, _, constraint in walk_keys(with_sections()) if constraint.is_open)
"""Sections whose keys the user chooses."""


def plain(key: str) -> str:
    """Return a key with `<name>` in place of a name that the user has chosen, as `NAMES` has it."""
    for mapping in MAPPINGS:
        if key.startswith(f"{mapping}."):
            _, dot, rest = key.removeprefix(f"{mapping}.").partition(".")
            return f"{mapping}.{NAME}{dot}{rest}"
    return key


def without_source(key: str) -> str:
    """Return the key of the run that a key of an environment or a reward in `MAPPINGS` stands for, else `key`."""
    own = plain(key).partition(f".{NAME}.")[2]
    return own if own.partition(".")[0] in ("environment", "reward") else key


def is_name(name: str) -> bool:
    """Return whether this is the dotted name of a section or a key."""
    return plain(name) in NAMES


def is_open(key: str) -> bool:
    """Return whether this is a section whose keys the user chooses."""
    return plain(key) in OPEN_SECTIONS


def section_named(name: str) -> type | None:
    """Return the dataclass of a section; None: there is no such section."""
    return SECTIONS.get(plain(name))


def type_of(key: str) -> str:
    """Return the type of a key, such as `int | None`; empty: there is no such key."""
    section, _, last = plain(key).rpartition(".")
    cls = section_named(section)
    return next((str(f.type) for f in dataclasses.fields(cls) if f.name == last), "") if cls is not None else ""


def valid_keys(prefix: str = "") -> list[str]:
    """Return the dotted names of all keys below the section `prefix` (empty: all sections)."""
    section = section_named(prefix)
    fields = dataclasses.fields(section) if section is not None else ()
    return [f"{prefix}.{field.name}".lstrip(".") for field in fields]


def no_such_key(key: str, groups: Iterable[str] = ()) -> str:
    """Return a message about a key that the schema does not have, and similar keys.

    Args:
        groups: names of groups of values, which the command line takes as well.
    """
    section, _, last = key.rpartition(".")
    counterpart, shown = counterpart_of(key), plain(key)
    inside = shown.partition(NAME)[0] if shown != key else ""
    known = [name for name in (*SECTIONS, *KEYS) if name.startswith(inside) and (inside or NAME not in name)]
    suggestion = counterpart or did_you_mean(shown, dict.fromkeys(filter(None, (*groups, *known))))
    suggestion = suggestion if counterpart else suggestion.replace(NAME, key.removeprefix(inside).partition(".")[0])
    if not suggestion:
        valid = valid_keys(section) or valid_keys()
        listed = f"valid are {', '.join(valid)}"
        suggestion = listed if len(valid) <= 14 else f"docs/config.md lists the keys of {section}"
    if f"{section}.options" in OPEN_SECTIONS and (counterpart or f" {section}." not in suggestion):
        suggestion += f"; an option of your own function or task is +{section}.options.{last}=VALUE"
    return f"{key}: no such key; {suggestion}"
