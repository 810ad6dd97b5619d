"""`data.*`: prompts and answers. Any resume may change these keys, because the ledger compares the examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.fields import Section, choice, config_error, number, open_section, setting, value_of

if TYPE_CHECKING:
    from trainer.config.schema import Config

_WITH_TASKS = "reasoning_gym"
GENERATORS: dict[str, tuple[str, ...] | None] = {
    "arithmetic": ("max_value",),
    "reverse_text": ("min_letters", "max_letters"),
    _WITH_TASKS: None,
}
"""The generators of `trainer.data.generators`, each with the names of its options. None: `data.task` has them."""


@dataclass
class DataConfig(Section):
    train_files: list[str] = setting(default_factory=list, resume="harmless")
    """Training prompts: `.jsonl`, `.parquet` or `.arrow` files, or Hub datasets as
    `hf://OWNER/NAME?config=C&split=S&revision=COMMIT`. On the command line it implies `data=files`, unless a group or
    an experiment chooses the data."""
    val_files: list[str] = setting(default_factory=list, resume="validation")
    """Prompts for validation, in the same formats as `train_files`."""
    prompt_key: str = setting("prompt", resume="harmless")
    """Column of the prompt: a string, or a list of chat messages."""
    answer_key: str = setting("answer", resume="harmless")
    """Column of the reference answer, which is passed to the reward."""
    messages_key: str | None = setting(None, resume="harmless")
    """Column of whole chats, used instead of `prompt_key` and `answer_key`: the last message is the answer."""
    synthetic: str | None = choice(None, (None, *GENERATORS), resume="harmless")
    """Make prompts instead of reading files: `arithmetic`, `reverse_text`, or a task of the package `reasoning_gym`."""
    task: str | None = setting(None, resume="harmless")
    """Name of the task of `synthetic=reasoning_gym`, such as `chain_sum` (docs/environments.md)."""
    synthetic_args: dict[str, Any] = open_section(resume="harmless")
    """Options of the generator: `arithmetic` {max_value}; `reverse_text` {min_letters, max_letters}; of
    `reasoning_gym` those of the task, and {seed}."""
    train_size: int = number(-1, at_least=1, off=-1, resume="harmless")
    """Number of training examples to generate, or most examples to use from the files. -1: all."""
    val_size: int = number(-1, at_least=1, off=-1, resume="validation")
    """Number of validation examples to generate, or most examples to use from the files. -1: all."""
    system_prompt: str | None = setting(None, resume="harmless")
    """System message that is put before every prompt."""
    curriculum: str | None = setting(None, resume="harmless")
    """Import path `package.module:function` of a function (prompts, epoch, rewards) that chooses the prompts of an
    epoch and their order (see `trainer.data.ledger.Curriculum`). null: all prompts, shuffled."""

    def check(self, config: Config, name: str) -> None:
        if self.synthetic:
            self._check_generator(config, self.synthetic)
        elif not self.train_files and config.reads("data.train_files"):
            problem = "name at least one file, or choose a data group such as data=arithmetic"
            raise config_error(config, "data.train_files", problem)
        elif not self.val_files and config.trainer.val_interval > 0 and self._is_validated(config):
            raise config_error(config, "trainer.val_interval", "needs data.val_files; name some or set it to -1")
        if self.task is not None and self.synthetic != _WITH_TASKS:
            raise config_error(config, "data.task", f"is read by data.synthetic={_WITH_TASKS} alone")
        if self.curriculum is not None and ":" not in self.curriculum:
            raise config_error(config, "data.curriculum", "must be an import path package.module:function")

    def _is_validated(self, config: Config) -> bool:
        """Return whether the run validates as `trainer.val_interval` says."""
        return config.reads("data.val_files") and config.reads("trainer.val_interval")

    def _check_generator(self, config: Config, generator: str) -> None:
        if self.train_files or self.val_files:
            raise config_error(
                config,
                "data.synthetic",
                "data.train_files and data.val_files cannot be combined with a generator; choose data=files or drop "
                "them",
            )
        for key in ("data.train_size", "data.val_size"):
            if value_of(config, key) < 1:
                raise config_error(config, key, "a generator needs a number of examples")
        if generator == _WITH_TASKS and self.task is None:
            raise config_error(config, "data.task", "data.synthetic=reasoning_gym needs the name of a task")
        options = GENERATORS[generator]
        if options is None:
            return
        for option, value in self.synthetic_args.items():
            if type(value) is not int:
                raise config_error(config, "data.synthetic_args", f"{option} must be a whole number")
            if option not in options:
                problem = f"data.synthetic={self.synthetic} takes {', '.join(options)}, not {option}"
                raise config_error(config, "data.synthetic_args", problem)
