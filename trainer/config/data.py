"""`data.*`: prompts and answers. Any resume may change these keys, because the ledger compares the examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.fields import Section, choice, config_error, number, open_section, setting, value_of

if TYPE_CHECKING:
    from trainer.config.schema import Config

GENERATORS: dict[str, tuple[str, ...]] = {"arithmetic": ("max_value",), "reverse_text": ("min_letters", "max_letters")}
"""The generators of `trainer.data.generators`, each with the names of its options."""


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
    """Make prompts instead of reading files: `arithmetic` or `reverse_text`."""
    synthetic_args: dict[str, int] = open_section(resume="harmless")
    """Options of the generator: `arithmetic` {max_value}; `reverse_text` {min_letters, max_letters}."""
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
            self._check_generator(config, GENERATORS[self.synthetic])
        elif not self.train_files and config.reads("data.train_files"):
            problem = "name at least one file, or choose a data group such as data=arithmetic"
            raise config_error(config, "data.train_files", problem)
        elif not self.val_files and config.trainer.val_interval > 0 and self._is_validated(config):
            raise config_error(config, "trainer.val_interval", "needs data.val_files; name some or set it to -1")
        if self.curriculum is not None and ":" not in self.curriculum:
            raise config_error(config, "data.curriculum", "must be an import path package.module:function")

    def _is_validated(self, config: Config) -> bool:
        """Return whether the run validates as `trainer.val_interval` says."""
        return config.reads("data.val_files") and config.reads("trainer.val_interval")

    def _check_generator(self, config: Config, options: tuple[str, ...]) -> None:
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
        for option in self.synthetic_args:
            if option not in options:
                problem = f"data.synthetic={self.synthetic} takes {', '.join(options)}, not {option}"
                raise config_error(config, "data.synthetic_args", problem)
