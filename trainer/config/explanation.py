"""One sentence of ours for each error that Hydra and OmegaConf raise about a config."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainer.config.config_file import GROUP, ConfigFiles
from trainer.config.overrides import find_groups, kind_of
from trainer.config.schema import NAMES, is_name, no_such_key, section_named, valid_keys
from trainer.errors import UserError, as_list, did_you_mean, one_line

_MEANT = {"model": "model.path={}", "data": "data=files data.train_files=[{}]"}
"""What to write in place of `GROUP=PATH`."""
_MOST_KEYS = 20
"""Number of keys of a section that a sentence names at most."""


def explain(error: BaseException, words: Sequence[str], files: ConfigFiles, conf: str) -> str:
    """Return one sentence for an error of the config: what is wrong, where, and what is valid.

    Args:
        words: of the command line.
        files: of the user.
        conf: directory of the groups of the project.
    """
    explanation = _Explanation(words, find_groups(conf, *files.directories))
    sentence = explanation.of(error)
    key = re.split(r"[=: ]", sentence, maxsplit=1)[0]
    return sentence if explanation.given(key) else files.located(key, sentence)


def unresolved(error: BaseException) -> str:
    """Return one sentence for an interpolation, such as `${trainer.seed}`, that has no value."""
    from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, UnsupportedInterpolationType

    key, text = getattr(error, "full_key", None) or "the config", str(error).splitlines()[0]
    name = (re.findall(r"'(.*?)'", text) or [text.rpartition(" ")[2]])[0]
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: has no value; write {key}=VALUE"
    if isinstance(error, UnsupportedInterpolationType):
        return f"{key}: there is no function {name} for ${{{name}:…}}; write ${{oc.env:VARIABLE}} or ${{SECTION.KEY}}"
    if isinstance(error, InterpolationKeyError):
        return f"{key}: ${{{name}}} names no key; write ${{SECTION.KEY}}, or 'KEY=\"\\${{…}}\"' for the text itself"
    if "Environment variable" in text:
        return f"{key}: the environment variable {name} is not set; export it, or write ${{oc.env:{name},DEFAULT}}"
    if "Recursive" in text:
        return f"{key}: refers to itself; give it a value"
    if "could not be converted" in text or "is not Optional" in text:
        return f"{key}: {name} gives a value of another kind; it must be {kind_of(key) or 'another'}"
    return f"{key}: cannot be computed ({one_line(text.partition('interpolation: ')[2] or text)})"


class _Explanation:
    def __init__(self, words: Sequence[str], groups: dict[str, list[str]]):
        self._words = words
        self._groups = groups

    def of(self, error: BaseException) -> str:
        from hydra.errors import MissingConfigException
        from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ValidationError

        if isinstance(error, UserError):
            return str(error)
        chain: list[BaseException] = [error]
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        for cause in chain:
            if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
                return self._of_key(cause.full_key)
            if isinstance(cause, ValidationError) and cause.full_key:
                return self._of_value(cause.full_key)
        if isinstance(error, MissingConfigException):
            return self._of_choice(error)
        text = str(error)
        if named := re.search(r"full_key: (\S+)", text):
            return self._of_value(named[1])
        if named := re.search(r"[Mm]erging override (\S+?)=", text):
            return self._of_value(named[1].lstrip("+"))
        if named := re.search(r"(?:override|with|for|from config\.) '?\+*([\w/.@]+)", text):
            return f"{named[1]}: the command cannot be composed ({one_line(text.partition('. ')[0])})"
        return f"the command cannot be composed ({one_line(text)})"

    def _of_key(self, key: str) -> str:
        if key.startswith("hydra."):
            return f"{key}: Hydra has no such key; `trainer train --cfg hydra` prints those that it has"
        if is_name(key):
            return self._of_value(key)
        if key in self._groups:
            return f"{key}={self.given(key)}: no such choice; choose one of {', '.join(self._groups[key])}"
        return self._with_wrong_keys(key)

    def _of_value(self, key: str) -> str:
        given = self.given(key)
        shown = f"{key}={given}" if given else key
        if section_named(key) is not None:
            keys = valid_keys(key)
            if len(keys) > _MOST_KEYS:
                keys[_MOST_KEYS:] = ["… (docs/config.md lists all)"]
            return self._with_wrong_keys(text=f"{shown}: {key} is a section; its keys are {', '.join(keys)}")
        kind = kind_of(key)
        if kind.startswith("a list") and given and given[0] not in "[{":
            return f"{key}: must be a list; write {key}=[{given}]"
        return f"{shown}: must be {kind}" if kind else f"{shown}: this value is not possible here"

    def _of_choice(self, error: BaseException) -> str:
        path = getattr(error, "missing_cfg_file", None) or ""
        group, _, choice = path.partition("/") if path.partition("/")[0] in self._groups else path.rpartition("/")
        options = self._groups.get(group) or sorted(getattr(error, "options", None) or [])
        if group == GROUP or not options:
            return self._with_wrong_keys(group or choice)
        known = f"choose one of {', '.join(options)}"
        own = f"write {_MEANT[group].format(choice)}" if group in _MEANT else ""
        meant = own if own and "/" in choice else did_you_mean(choice, options)
        meant = meant or (f"{known}, or {own}" if own else known)
        return self._with_wrong_keys(text=f"{group}={choice}: no such choice; {meant}")

    def _with_wrong_keys(self, key: str = "", text: str = "") -> str:
        """Return a sentence about `key`, or `text`, and one about each other wrong key on the command line."""
        wrong = self._wrong_keys()
        if any(one.startswith(f"{key}.") for one in wrong):
            key = ""  # a section that there is not; the key in it says more
        keys = dict.fromkeys([*filter(None, [key]), *wrong])
        sentences = [no_such_key(one, self._groups) for one in keys]
        return as_list("the command has wrong keys:", [*filter(None, [text]), *sentences])

    def _wrong_keys(self) -> list[str]:
        """Return the keys of `KEY=VALUE` on the command line that the schema does not have."""
        known = NAMES | set(self._groups)
        keys = [word.partition("=")[0] for word in self._words if re.match(r"[\w.]+=", word)]
        return [
            key for key in keys if not (key in known or is_name(key)) and not key.startswith("hydra.") and key != GROUP
        ]

    def given(self, key: str) -> str:
        """Return the last value that the command line gives to `key`; empty if it gives none."""
        words = (word.lstrip("+") for word in reversed(self._words))
        return next((word[len(key) + 1 :] for word in words if word.startswith(f"{key}=")), "")
