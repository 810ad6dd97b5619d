"""`data.*`, `sft.*`, `dpo.*`, `rm.*`: prompts, examples, pairs. Any resume may change `data.*`: rows are compared."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from trainer.config.fields import Section, setting, subsection
from trainer.config.rollout import LOWEST_TEMPERATURE, EnvironmentConfig, RewardConfig
from trainer.config.trainer import SCHEDULE_STEPS
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config.schema import Config


GENERATORS: dict[str, tuple[str, ...] | None] = {
    "arithmetic": ("max_value",),
    "look_up": ("max_calls",),
    "reverse_text": ("min_letters", "max_letters"),
    "reasoning_gym": None,
}
"""The generators of `trainer.data.generators`, each with the names of its options. None: the option `task` has them."""


@dataclass
class NamedData(Section):
    """The rows of a source or a set of data that the user names, with what answers and rewards them. A base class."""

    files: list[str] = setting(default_factory=list, resume="harmless")
    """Files with the rows, in the formats of `data.train_files`."""
    synthetic: str | None = setting(None, choices=(None, *GENERATORS), resume="harmless")
    """Make the rows instead of reading files (see `data.synthetic`)."""
    synthetic_args: dict[str, Any] = setting(default_factory=dict, is_open=True, resume="harmless")
    """Options of the generator (see `data.synthetic_args`)."""
    size: int = setting(-1, at_least=1, off=-1, resume="harmless")
    """Number of examples to generate, or most examples to use from the files. -1: all."""
    prompt_key: str = setting("prompt", resume="harmless")
    """Column of the prompt. If it is not set: `data.prompt_key`."""
    answer_key: str = setting("answer", resume="harmless")
    """Column of the reference answer. If it is not set: `data.answer_key`."""
    messages_key: str | None = setting(None, resume="harmless")
    """Column of whole chats. If it is not set: `data.messages_key`."""
    system_prompt: str | None = setting(None, resume="harmless")
    """System message that is put before every prompt. If it is not set: `data.system_prompt`."""
    environment: EnvironmentConfig = subsection(EnvironmentConfig)
    """The environment of these rows, with the keys of `environment`. A key that is not set has the run's value; with a
    `name` of its own, the run's `kwargs` do not apply."""
    reward: RewardConfig = subsection(RewardConfig)
    """The reward of these rows, with the keys of `reward`. A key that is not set has the run's value; with a `name` of
    its own, the run's `weights` and `url` do not apply."""

    @classmethod
    def of_run(cls, config: Config) -> Self:
        """Return the section that has the run's values wherever there are any."""
        return cls(
            **{column: getattr(config.data, column) for column in COLUMNS},
            environment=config.environment,
            reward=config.reward,
        )


COLUMNS = ("prompt_key", "answer_key", "messages_key", "system_prompt")
"""Keys of `data` that its sources and sets have, too."""
PAIR_COLUMNS = ("chosen_key", "rejected_key", "margin_key")
"""Keys of `data` that are for all its sources."""


@dataclass
class SourceConfig(NamedData):
    weight: float = setting(1.0, above=0, resume="rollouts")
    """How often rows of this source are drawn, relative to the other sources. Each batch has its share of every
    source, rounded, and what is rounded off in one batch is made up for in the next ones."""
    curriculum: str | None = setting(None, resume="harmless")
    """Function that chooses the prompts of each epoch of this source, and their order (see `data.curriculum`)."""
    replay: bool = setting(False, resume="harmless")
    """`files` are rollouts that another run has kept (`logger.save_rollouts`), which are trained on again."""


@dataclass
class ValSetConfig(NamedData):
    n: int = setting(1, at_least=1, at_most=4096, resume="validation")
    """Completions for each row."""
    temperature: float | None = setting(None, at_least=LOWEST_TEMPERATURE, at_most=100, off=0, resume="validation")
    """Sampling temperature of these completions. 0: greedy. null: greedy with `n=1`, else `rollout.temperature`."""
    top_p: float | None = setting(None, above=0, at_most=1, resume="validation")
    """Nucleus sampling (see `rollout.top_p`, which null stands for)."""
    top_k: int | None = setting(None, at_least=1, off=-1, resume="validation")
    """Most likely tokens to sample from (see `rollout.top_k`, which null stands for)."""
    max_response_tokens: int | None = setting(None, at_least=1, resume="validation")
    """Longest completion, in tokens: at most `rollout.max_response_tokens`, which null stands for."""
    interval: int | None = setting(None, at_least=1, off=-1, resume="harmless")
    """Evaluate this set every this many steps and after the last step. -1: only by `trainer evaluate`. null:
    `trainer.val_interval`."""

    def interval_in(self, config: Config) -> int:
        """Return the steps between two evaluations of this set; -1: it is not evaluated in the run."""
        return config.trainer.val_interval if self.interval is None else self.interval

    def temperature_in(self, config: Config) -> float:
        """Return the sampling temperature; 0: greedy."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.n == 1 else config.rollout.temperature or 1.0


@dataclass
class DataConfig(Section):
    train_files: list[str] = setting(default_factory=list, resume="harmless")
    """Training prompts: `.jsonl`, `.parquet` or `.arrow` files, or Hub datasets as
    `hf://OWNER/NAME?config=C&split=S&revision=COMMIT`. On the command line it implies `data=files`, unless a group or
    an experiment chooses the data."""
    val_files: list[str] = setting(default_factory=list, resume="validation")
    """Prompts for validation, in the same formats as `train_files`."""
    val_sets: dict[str, Any] = setting(default_factory=dict, section=ValSetConfig, resume="validation")
    """Further sets of validation prompts, by names of your choice ([docs/evaluation.md](evaluation.md)). Each has the
    keys of `data.val_sets.<name>`, and metrics `val/<name>/…`."""
    prompt_key: str = setting("prompt", resume="harmless")
    """Column of the prompt: a string, or a list of chat messages."""
    answer_key: str = setting("answer", resume="harmless")
    """Column of the reference answer, which is passed to the reward."""
    messages_key: str | None = setting(None, resume="harmless")
    """Column of whole chats, used instead of `prompt_key` and `answer_key`: the last message is the answer."""
    synthetic: str | None = setting(None, choices=(None, *GENERATORS), resume="harmless")
    """Make prompts instead of reading files: `arithmetic`, `look_up` (for an environment with a tool, see
    docs/environments.md), `reverse_text`, or a task of the package `reasoning_gym`."""
    synthetic_args: dict[str, Any] = setting(default_factory=dict, is_open=True, resume="harmless")
    """Options of the generator: `arithmetic` {max_value}; `look_up` {max_calls}; `reverse_text` {min_letters,
    max_letters}; of `reasoning_gym` {task}, such as `chain_sum`, with its options, and {seed}."""
    train_size: int = setting(-1, at_least=1, off=-1, resume="harmless")
    """Number of training examples to generate, or most examples to use from the files. -1: all."""
    val_size: int = setting(-1, at_least=1, off=-1, resume="validation")
    """Number of validation examples to generate, or most examples to use from the files. -1: all."""
    chosen_key: str = setting("chosen", resume="harmless")
    """Column of the better answer (tasks `dpo` and `rm`): a text, or a list of chat messages."""
    rejected_key: str = setting("rejected", resume="harmless")
    """Column of the worse answer."""
    margin_key: str = setting("margin", resume="harmless")
    """Column with the number by which the score of the better answer should be higher (task `rm`), if rows have it."""
    system_prompt: str | None = setting(None, resume="harmless")
    """System message that is put before every prompt."""
    curriculum: str | None = setting(None, resume="harmless")
    """Import path `package.module:function` of a function (prompts, epoch, rewards) that chooses the prompts of an
    epoch and their order (see `trainer.data.ledger.Curriculum`). null: all prompts, shuffled."""

    mix: dict[str, Any] = setting(default_factory=dict, section=SourceConfig, resume="rollouts")
    """Several sources of training prompts, by names of your choice, instead of `train_files` or `synthetic`
    ([docs/data.md](data.md)). Each has the keys of `data.mix.<name>`. To add or drop a source needs permission."""

    replay = False
    """Whether the rows are recorded rollouts. Of a source alone."""

    def task_with_options(self) -> tuple[str | None, dict[str, Any]]:
        """Return the option `task` of the generator (None: it has none), and the others."""
        others = dict(self.synthetic_args)
        return others.pop("task", None), others

    def name_of(self, key: str) -> str:
        """Return the dotted name of a key of this section, for messages."""
        return f"data.{key}"

    def refusal(self, key: str, problem: str) -> UserError:
        """Return an error about a key of this section, with its value."""
        return UserError(f"{self.name_of(key)}={getattr(self, key)}: {problem}")

    def with_own_names(self, error: UserError) -> UserError:
        """Return an error about keys of `data` as one about those that this section stands for."""
        return UserError(re.sub(r"\bdata\.(\w+)", lambda match: self.name_of(match[1]), str(error)))

    def with_source(self, section: str, source: NamedData) -> DataConfig:
        """Return the section of a run that reads only these rows."""
        return _DataOfSource(
            train_files=source.files,
            val_files=source.files,
            synthetic=source.synthetic,
            synthetic_args=source.synthetic_args,
            train_size=source.size,
            val_size=source.size,
            curriculum=source.curriculum if isinstance(source, SourceConfig) else None,
            section=section,
            replay=isinstance(source, SourceConfig) and source.replay,
            **{column: getattr(self, column) for column in PAIR_COLUMNS},
            **{column: getattr(source, column) for column in COLUMNS},
        )


@dataclass
class _DataOfSource(DataConfig):
    """`data` of a run that reads one source alone."""

    section: str = setting("data", resume="harmless")
    replay: bool = setting(False, resume="harmless")

    def name_of(self, key: str) -> str:
        renamed = {"train_files": "files", "val_files": "files", "train_size": "size", "val_size": "size"}
        return f"{self.section}.{renamed.get(key, key)}"


@dataclass
class SFTOptimizerConfig(Section):
    lr: float = setting(2e-3, at_least=0, resume="update")
    """Peak learning rate."""
    scheduler: str = setting("constant", choices=("constant", "cosine"), resume="update")
    """Learning rate after warm-up (see `trainer.policy.optimizer.scheduler`)."""
    warmup_steps: int = setting(10, at_least=0, resume="update")
    """Optimizer steps of linear warm-up from 0."""
    schedule_steps: int | None = setting(None, at_least=1, resume=SCHEDULE_STEPS)
    """Steps of the run after which `cosine` has ended (see `trainer.policy.optimizer.schedule_steps`). null:
    `sft.steps`."""


@dataclass
class SFTConfig(Section):
    steps: int = setting(200, at_least=1, resume="rollouts")
    """Optimizer steps of supervised training. Most optimizer steps of the warm start of the built-in model (see
    `model.tiny.start_accuracy`)."""
    batch_size: int = setting(8, at_least=1, resume="rollouts")
    """An optimizer step trains on as many whole examples as fill this many rows of `sft.max_length` tokens."""
    max_length: int = setting(256, at_least=1, resume="rollouts")
    """Longest example in tokens. A longer one is cut."""
    source: str = setting("examples", choices=("examples", "rollouts"), resume="rollouts")
    """Content of `data.train_files`: `examples`, or `rollouts` as `logger.save_rollouts` writes them."""
    min_reward: float | None = setting(None, resume="rollouts")
    """`source=rollouts`: train only on completions with at least this reward (rejection sampling). null: all."""
    max_weight: float | None = setting(None, above=0, resume="rollouts")
    """`source=rollouts`: multiply the loss of each token by its importance weight, at most this (the loss
    `importance_weighted_ce`). The weight is the token's probability under the model divided by its probability under
    the policy that sampled it. null: plain cross-entropy (distillation)."""
    optimizer: SFTOptimizerConfig = subsection(SFTOptimizerConfig)
    """Optimizer of supervised training. What it does not have is as in `trainer.policy.optimizer`."""


SIMPO, EXO = "simpo", "exo_pair"
_WITHOUT_OPTIONS = ("hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down", "nca_pair", "sppo_hard", "bco_pair")
DPO_LOSSES = ("sigmoid", "robust", EXO, SIMPO, *_WITHOUT_OPTIONS)
"""The losses of `trainer.algorithms.preferences`."""
SMOOTHED = ("sigmoid", "robust", EXO)
"""Those that read `dpo.label_smoothing`."""


@dataclass
class DPOConfig(Section):
    beta: float = setting(0.1, above=0, resume="update")
    """Strength of the pull to the reference: a reward is `beta` times the log-ratio of policy and reference."""
    loss_type: str = setting("sigmoid", choices=DPO_LOSSES, resume="update")
    """Loss of a pair (docs/preferences.md has the formulas): `sigmoid` is DPO."""
    label_smoothing: float = setting(0.0, at_least=0, at_most=0.499, resume="update")
    """Share of pairs with exchanged answers, for `sigmoid` (conservative DPO), `robust` and `exo_pair`."""
    simpo_gamma: float | None = setting(None, at_least=0, resume="update")
    """`simpo`: by how much the reward of the chosen answer should be higher. null: 0.5."""
    sft_coef: float = setting(0.0, at_least=0, resume="update")
    """Weight of the cross-entropy of the chosen answers, a mean over their tokens in the mini-batch. 0: none."""
    max_length: int = setting(1024, at_least=2, resume="rollouts")
    """Longest prompt and answer in tokens. A longer answer is cut; a pair is left out if the cut leaves nothing to
    learn, or two equal answers."""


@dataclass
class RMConfig(Section):
    center_rewards_coefficient: float | None = setting(None, above=0, resume="update")
    """Weight of the squared sum of the two scores of a pair, which keeps scores around 0, such as 0.01. null: none."""
    max_length: int = setting(1024, at_least=2, resume="rollouts")
    """Longest prompt and answer in tokens. A pair with a longer one is left out, because its score is that of the stop
    token."""
