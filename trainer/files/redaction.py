"""Secrets of a config: a key or a value names the environment variable of a secret, and only the name is written.

`redact` masks a config, `redact_command` a command, wherever they become text. The values that a run works with do not
change.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(
    r"^(?:token|auth|bearer)$|(?:^|_)(?:secret|password|passwd|passphrase|credentials?|authorization|cookies?|"
    r"(?:api|access|secret|private|auth|signing|encryption)_?keys?|"
    r"(?:api|access|auth|bearer|refresh|session|personal|hf|hub|wandb|github|gitlab|bot)_?tokens?)"
    r"(?:_(?!env$|file$|path$|name$|url$)|$)"
)
_REFERENCE = re.compile(r"\$\{oc\.env:\s*+([A-Za-z_]\w*+)[^{}]*+\}")
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s'\"]++(?=@)")
_OF_EPISODE = re.compile(r"(?<=/episodes/)[0-9a-f]{32}")  # see `trainer.agents.server`
_IN_BRACES = re.compile(r"(?P<begin>(?<![\w.-])(?P<name>[\w.-]++)\s*+:\s*+)(?P<value>[^\s,{}\[\]]++)")
_SHORTEST = 8  # length of the shortest secret to search for in texts: a shorter one may be a part of any word
_named: dict[str, str] = {}  # by value: the variables with secrets that the config of this process names


@functools.lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return whether the value of a key or variable with this name is a secret: `api_key`, but not `api_key_env`."""
    last = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2])
    return _SECRET.search(last.lower().replace("-", "_")) is not None


def name_secrets(config: Any) -> None:
    """Learn from a config, before it is resolved, which environment variables hold its secrets. They are those that a
    key `…_env` names, and those of `${oc.env:NAME}` if the key or NAME is the name of a secret."""
    for key, _, value in _leaves(config):
        if not isinstance(value, str):
            continue
        variables = {name for name in _REFERENCE.findall(value) if is_secret(key) or is_secret(name)}
        for variable in variables | ({value} if key.endswith("_env") else set()):
            if secret := os.environ.get(variable, "").strip():
                _named[secret] = f"${{oc.env:{variable}}}"


def hidden_keys(config: Any) -> list[str]:
    """Return the keys of a nested config whose secret has been hidden: the value is `***`."""
    return [key for key, hides, value in _leaves(config) if hides and value == HIDDEN]


def _leaves(value: Any, key: str = "", hides: bool = False) -> Iterator[tuple[str, bool, Any]]:
    """Yield the dotted key of each value of a nested config, whether its names make it a secret, and the value."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name), hides or is_secret(str(name)))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner, key, hides)
    else:
        yield key, hides, value


def redact(value: Any, name: str = "", references: bool = True) -> Any:
    """Return a config, or a value of it, whose key is `name`, without secrets. Tuples become lists.

    A secret that the config names stays as it was written: `${oc.env:NAME}`. Any other value of a key with a secret's
    name, and user and password in an address, become `***`. Without `references` all secrets are `***`, so that two
    configs that differ only in secrets are equal.
    """
    if isinstance(value, Mapping):
        return {key: redact(inner, name if is_secret(name) else str(key), references) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(inner, name, references) for inner in value]
    if is_secret(name) and not isinstance(value, bool):
        if not references:
            return HIDDEN
        written = _written(str(value)) if value is not None else ""
        return written if _REFERENCE.search(written) else value and HIDDEN
    if not isinstance(value, str):
        return value
    text = _IN_ADDRESS.sub(lambda m: m[0] if _REFERENCE.search(m[0]) else HIDDEN, _written(value))
    return text if references else re.sub(rf"{_REFERENCE.pattern}", HIDDEN, text)


def _written(text: str) -> str:
    """Return a text with the references of the config in place of the secrets that it names."""
    for secret in sorted(_named, key=len, reverse=True):
        if text == secret or len(secret) >= _SHORTEST:
            text = text.replace(secret, _named[secret])
    return text


def redact_text(text: str) -> str:
    """Return a text, such as an error message, without the secrets that this process knows, and those in addresses,
    which are passwords and the permission to use the endpoint of an agent's episode.

    It knows those that the config names, and the environment variables with a secret's name.
    """
    text = _REFERENCE.sub(HIDDEN, _written(text)) if _named else text
    for name in list(os.environ):  # another thread may remove one
        if is_secret(name) and len(secret := os.environ.get(name, "").strip()) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    return _OF_EPISODE.sub(HIDDEN, _IN_ADDRESS.sub(HIDDEN, text))


def redact_command(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command without secrets: those of `KEY=VALUE`, and of `KEY: VALUE` in braces."""

    def hide(match: re.Match[str]) -> str:
        is_shown = not is_secret(match["name"]) or match["value"].startswith("$")
        return match[0] if is_shown else match["begin"] + HIDDEN

    shown = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and is_secret(key.lstrip("+~-")):
            argument = f"{key}={redact(value, key.lstrip('+~-'))}"
        elif equals and value.startswith(("{", "[")):
            argument = f"{key}={redact(_IN_BRACES.sub(hide, value))}"
        else:
            argument = redact(argument)
        shown.append(argument)
    return shown
