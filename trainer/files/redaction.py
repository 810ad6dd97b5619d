"""Find secrets in configs, commands and texts, and remove them from everything that is written or shown.

Everything that writes a config, a command or a foreign error message calls a function of this module. The values that a
run works with do not change.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus, urlsplit

HIDDEN = "***"
_MIN_SECRET = 8
"""Length of the shortest known secret to search for in any text. Shorter ones could be ordinary words."""
_MIN_FRAGMENT = 4
"""Length of the shortest fragment of a secret that `SecretFilter` hides."""

# --------------------------------------------------------------------------------------------------------
# Names


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STRONG = ("secret", "password", "passwd", "passphrase", "credential", "apikey", "authtoken", "accesstoken")
"""Prefixes or suffixes of a word in a name that make the value a secret."""
_STRONG_WORDS = _words(
    "accesskey appkey authkey authorization bearer cookie cookies creds passcode passwords privatekey pwd secretkey "
    "userpass"
)
_LAST_WORDS = _words("auth dsn jwt otp")
_KEY_OWNERS = _words(
    "api access account admin anthropic app auth aws azure brave client cohere daytona deepseek deploy e2b encryption "
    "endpoint exa fireworks gemini google groq hf host hub huggingface jina judge kaggle langfuse langsmith license "
    "llm master mistral modal nvidia openai openrouter perplexity private replicate sandbox secret serpapi serper "
    "server service session shared signing ssh storage subscription tavily together wandb webhook"
)
"""Words before `key` that make it a secret: `api_key`, but not `prompt_key`."""
_TOKEN_OWNERS = _words(
    "access api auth bearer bot csrf deploy github gitlab hf hub id identity jwt login oauth personal private "
    "refresh secret security session user wandb"
)
"""Words before `tokens` that make them secrets: `access_tokens`, but not `max_tokens`."""
_TEXT_WORDS = _words(
    "added action answer assistant audio begin beginning bod bom bos bot boundary by chat class cls code "
    "completion control cost count current decoder delimiter document draft dummy each encoder end ending eod eoh "
    "eoi eom eos eot eou every extra fake fill fim final first forced generated image img in infix input "
    "instruction is language last length loss marker mask max mean middle min modality multi n name new newline "
    "next non num number observation of open close out output overlong pad padding patch per placeholder prefix "
    "prev previous prompt query reason reasoning register repo response reward role row sentinel sep separator "
    "seq sequence single soft space special speech start stop sub suffix system text think thinking thought to "
    "tool top total train turn unk unknown video vision vocab word"
)
"""Words before `token` that make it a token of a text: `eos_token`."""
_PAIRS = frozenset(
    tuple(pair.split("_"))
    for pair in _words(
        "api_key access_key anthropic_key openai_key private_key wandb_key access_token api_token auth_token "
        "bearer_token github_token gitlab_token hf_token auth_header auth_headers auth_value"
    )
)
"""Adjacent words that make a name a secret at any position: `api_key_prod`, `HF_TOKEN_READ`."""
_OWNERS = {
    "key": _KEY_OWNERS,
    "keys": _KEY_OWNERS,
    "tokens": _TOKEN_OWNERS,
    "pass": _words("admin db ftp http login mail mysql pg postgres proxy redis root smtp ssh user") | {""},
    "pat": _words("gh github gitlab"),
    "session": {""},
}
"""Last words of names, and the words before that make it a secret; empty: there is none."""
_ABOUT = _words(
    "bits bonus budget chance coef column count digits dir directory enabled env expiry field file files folder "
    "format fraction helper interval len length level limit manager max min mode name names path paths penalty policy "
    "prob probability provider range rate required reward scheme score size store timeout ttl type uri url var "
    "variable weight"
)
"""Last words of names that describe a secret, but do not contain it: `password_file`, `api_key_env`."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@functools.lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return whether a key with this name, or with a dotted name, contains a secret: `api_key`, `Authorization`."""
    return any(_is_secret_name(name) for name in re.split(r"[./:\s]+", unicodedata.normalize("NFKC", name)))


def _is_secret_name(name: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or len(words) > 1 and (words[-1] in _ABOUT or words[0] in ("n", "num")):
        return False
    if any(word in _STRONG_WORDS or word.startswith(_STRONG) or word.endswith(_STRONG) for word in words):
        return True
    last, previous = words[-1], words[-2] if len(words) > 1 else ""
    if last not in ("id", "ids") and not _PAIRS.isdisjoint(zip(words, words[1:], strict=False)):
        return True
    if last == "id":
        return previous == "session" or words[-3:-1] == ["access", "key"]
    if last == "token":
        return previous not in _TEXT_WORDS
    return last in _LAST_WORDS or previous in _OWNERS.get(last, ())


# --------------------------------------------------------------------------------------------------------
# Known secrets

_remembered: dict[str, None] = {}
_NO_SECRETS = ("PWD", "OLDPWD", "GOOGLE_APPLICATION_CREDENTIALS")  # paths, despite their names
_HARMLESS = re.compile(r"-?\d{0,3}(\.\d*)?(e[+-]?\d+)?|<[^<>\s]{1,40}>", re.IGNORECASE)
"""Numbers that are too short for a secret, such as weights and counts, and special tokens, such as `<eot>`."""
_MIN_LINE = 16
"""Length of the shortest line of a multi-line secret to search for."""


def remember(*secrets: str) -> None:
    """Make `redact_text` also hide these values in any text of this process."""
    _remembered.update(dict.fromkeys(secret for secret in secrets if len(secret) >= _MIN_SECRET))


def secrets_of(config: Any) -> list[str]:
    """Return the texts and numbers of a nested config that are secrets according to their names."""
    return [str(value) for _, hides, value in _leaves(config) if hides and _has_content(value)]


def hidden_keys(config: Any) -> list[str]:
    """Return the keys of a nested config whose secret has been hidden: the value is `***`."""
    texts = ((key, value) for key, hides, value in _leaves(config) if hides and isinstance(value, str))
    return [key for key, value in texts if HIDDEN in value.split()]


def _leaves(value: Any, key: str = "", hides: bool = False) -> Iterator[tuple[str, bool, Any]]:
    """Yield the dotted key of each value of a nested config, whether its names make it a secret, and the value."""
    if isinstance(value, Mapping):
        is_named = _is_named_secret(value)
        for name, inner in value.items():
            names_secret = is_secret(str(name)) or name == "value" and is_named
            yield from _leaves(inner, f"{key}.{name}" if key else str(name), hides or names_secret)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner, key, hides)
    else:
        yield key, hides, value


def forms_of(secret: str) -> set[str]:
    """Return a secret in all forms in which programs may repeat it.

    The value of a header also counts without its scheme (`Bearer`). The value of `Basic` also counts decoded.
    """
    stripped = secret.strip()
    scheme, _, rest = stripped.partition(" ")
    values = {stripped, rest.strip()} if rest and re.fullmatch(r"[A-Za-z-]{1,16}", scheme) else {stripped}
    if scheme.lower() == "basic":
        try:
            decoded = base64.b64decode(rest.strip() + "==", validate=False).decode()
        except ValueError:
            decoded = ""
        values |= {decoded, decoded.partition(":")[2]}
    values.discard("")
    forms = set(values)
    for value in values:
        data = value.encode(errors="surrogatepass")
        for shift in range(3):  # base64 of a text that contains the value after any other bytes
            inner = base64.b64encode(b"\0" * shift + data).decode().rstrip("=")
            # The first and the last characters also depend on the neighbouring bytes.
            inner = inner[(0, 2, 3)[shift] : len(inner) if (shift + len(data)) % 3 == 0 else -1]
            forms |= {inner, inner.replace("+", "-").replace("/", "_")}
        forms |= {quote(value, safe=""), quote(value), quote_plus(value), quote(quote(value, safe=""), safe="")}
        forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
        forms |= {json.dumps(json.dumps(value))[3:-3], value.replace("/", "\\/"), html.escape(value), data.hex()}
    return {form for form in forms if len(form) >= _MIN_FRAGMENT or form in values}


def secrets_in_address(address: str) -> list[str]:
    """Return user and password of a URL, and the values of its query that are secrets according to their names."""
    try:
        url = urlsplit(address)
    except ValueError:
        return []
    secrets = [value for value in (url.password, url.username) if value]
    return secrets + [value for name, value in parse_qsl(url.query) if _is_secret_parameter(name) and value]


def _is_secret_parameter(name: str) -> bool:
    return is_secret(name) or name.lower() in ("key", "sig", "signature") or name.lower().endswith("-signature")


def _environment() -> list[tuple[str, str]]:
    return [(name, os.environ.get(name, "")) for name in list(os.environ)]  # another thread may remove one


def _variables() -> dict[str, str]:
    """Return the environment variables that contain secrets: name by value."""
    return {
        value.strip(): name
        for name, value in _environment()
        if name not in _NO_SECRETS and len(value.strip()) >= _MIN_SECRET and is_secret(name)
    }


def _known() -> re.Pattern[str] | None:
    return _pattern((*_remembered, *_variables()))


@functools.lru_cache(maxsize=64)
def _pattern(secrets: tuple[str, ...]) -> re.Pattern[str] | None:
    forms = {form for secret in secrets for form in forms_of(secret) if len(form) >= _MIN_SECRET}
    lines = {line.strip() for secret in secrets if "\n" in secret for line in secret.splitlines()}
    forms |= {line for line in lines if len(line) >= _MIN_LINE and " " not in line}  # a log is shown line by line
    longest_first = sorted(forms, key=lambda form: (-len(form), form))
    return re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE) if forms else None


# --------------------------------------------------------------------------------------------------------
# Configs and commands


def redact(value: Any, name: str = "", references: bool = True) -> Any:
    """Return a config, a value of it or a text without secrets. Tuples become lists.

    A secret is the value of a key with a secret's name, the user and password in an address, a token in a well-known
    format, or the value of an environment variable with a secret's name.

    Args:
        name: the key of `value`.
        references: replace a secret by the environment variable that contains it, as `${oc.env:NAME}`. False: by `***`,
            so that two configs that differ only in secrets are equal.
    """
    return _redact(value, name, is_secret(name), references)


def _redact(value: Any, name: str, hides: bool, references: bool) -> Any:
    if isinstance(value, Mapping):
        is_named = _is_named_secret(value)
        return {
            key: _redact(inner, str(key), hides or is_secret(str(key)) or key == "value" and is_named, references)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_redact(inner, name, hides, references) for inner in value]
    if hides:
        return _hidden(value, references)
    return _redact_string(value, references) if isinstance(value, str) else value


def _is_named_secret(value: Mapping[Any, Any]) -> bool:
    """Return whether `value` is of the form `{name: Authorization, value: …}`."""
    return is_secret(str(value.get("name") or value.get("key") or ""))


def _redact_string(text: str, references: bool) -> str:
    if references:
        for secret, variable in _variables().items():
            text = text.replace(secret, f"${{oc.env:{variable}}}")
    else:
        text = re.sub(r"\$\{oc\.env:[^{}]*\}", HIDDEN, text)
    return redact_text(text)


def _hidden(value: Any, references: bool) -> Any:
    """Return the replacement for the value of a key that contains a secret."""
    if value is None or value == "":
        return value if references else HIDDEN
    if not _has_content(value):
        return value
    if not references:
        return HIDDEN
    text = str(value)
    if re.fullmatch(r"\$\{oc\.env:[A-Za-z_]\w*\}", text):  # a reference from a saved config
        return text
    if variable := _variable_with(text):
        return f"${{oc.env:{variable}}}"
    shown = _redact_string(text, references)
    return shown if re.fullmatch(r"[A-Za-z]{1,16} \$\{oc\.env:[A-Za-z_]\w*\}", shown) else HIDDEN  # Bearer …


def _variable_with(secret: str) -> str | None:
    if len(secret) < _MIN_SECRET:  # the name of the variable with this value could reveal the value
        return None
    named = [name for name, value in _environment() if value == secret and name not in _NO_SECRETS]
    return min(named, key=lambda name: (not is_secret(name), name), default=None)


def _has_content(value: Any) -> bool:
    """Return whether a value can be a secret."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    if isinstance(value, str) and not value.startswith("<"):  # quoted digits can be a short password
        return True
    return _HARMLESS.fullmatch(str(value)) is None


def agree(saved: Any, current: Any) -> bool:
    """Return whether two values are equal, except for secrets that are hidden in one of them."""
    if isinstance(saved, dict) and isinstance(current, dict):
        return saved.keys() == current.keys() and all(agree(saved[key], current[key]) for key in saved)
    if isinstance(saved, list) and isinstance(current, list):
        return len(saved) == len(current) and all(map(agree, saved, current))
    if isinstance(saved, str) and isinstance(current, str) and saved != current:
        return _matches(saved, current) or _matches(current, saved)
    return bool(saved == current)


def _matches(hidden: str, text: str) -> bool:
    pattern = ".*".join(map(re.escape, hidden.split(HIDDEN)))
    return HIDDEN in hidden and re.fullmatch(pattern, text, re.DOTALL) is not None


def redact_command(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command without secrets: `KEY=VALUE`, values in braces, and `--key VALUE`."""
    shown: list[str] = []
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        follows = i > 0 and arguments[i - 1].startswith("--") and "=" not in arguments[i - 1]
        if equals and re.fullmatch(r"[-+~]*[\w./@-]+", name) and is_secret(name):
            shown.append(f"{name}={value if _HARMLESS.fullmatch(value) else _hidden(value, True)}")
        elif follows and is_secret(arguments[i - 1]):
            shown.append(str(_hidden(argument, True)))
        else:
            shown.append(name + equals + _redact_string(value, True) if equals else _redact_string(argument, True))
    return shown


# --------------------------------------------------------------------------------------------------------
# Texts

_IN_ADDRESS = re.compile(r"(?<=://)[^/\s\"'<>]+(?=@)")
_PARAMETER = re.compile(r"(?<=[?&;])([\w.-]+)=([^&#;\s\"'<>]+)")
_AFTER_SCHEME = re.compile(r"\b(Bearer|Basic)(\s+)(?=[\w.~+/=-]*[\d.=_-]|[\w~+/]{20})[\w.~+/=-]{8,}", re.IGNORECASE)
_FORMATS = re.compile(
    r"\bsk-(?:[A-Za-z0-9]{20,}|(?:proj|ant|or|svcacct|admin)-[\w-]{20,})|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}|\bxox[abeprs]-[\w-]{10,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{35}"
    r"|\bya29\.[\w.-]{20,}|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|(?<=hooks\.slack\.com/services/)[\w/]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
# Without the lookbehind, the search in a word of n letters would take n² steps.
_NAMED = re.compile(r"""(?P<quote>\\?["']|(?<![\w.@-]))(?P<name>[\w.@-]+)(?P=quote)\s*(?P<sign>[:=])[ \t]*""")
_FLAG = re.compile(r"(?<!\S)--(?P<name>[A-Za-z][\w.-]*)[ \t]+(?=[^-\s])")
_BARE = re.compile(r"(?:(?:Bearer|Basic|Token|Digest|Bot|ApiKey)[ \t]+)?(?:\\.|[^\s,;&\"'`)}\]])*", re.IGNORECASE)
_BARE_IN_BRACES = re.compile(r"(?:\\.|[^\n,}\]])*")
_SOURCE_LINE = re.compile(r'^ *File "[^"\n]*", line \d+.*\n(?P<code>.*)$', re.MULTILINE)
_CLOSING = {"{": "}", "[": "]", "(": ")"}


def redact_text(text: str) -> str:
    """Return a text, such as an error message, without the secrets that can be recognised in it.

    Hidden are `name=value` and, in braces, `name: value` with a secret's name, credentials in addresses, tokens in
    well-known formats, and known secrets: those of environment variables and those passed to `remember`.
    """
    text = _FORMATS.sub(HIDDEN, _IN_ADDRESS.sub(HIDDEN, text))
    text = _PARAMETER.sub(lambda m: f"{m[1]}={HIDDEN}" if _is_secret_parameter(m[1]) else m[0], text)
    text = _AFTER_SCHEME.sub(rf"\1\2{HIDDEN}", _hide_named(text))
    return hide_known(text)


def redact_yaml(text: str) -> str:
    """Return YAML, as a program prints a config, without the values of secret keys (see `redact_text`)."""
    shown: list[str] = []
    below: int | None = None  # the indent of the key whose content is secret
    for line in text.split("\n"):
        indent, key = len(line) - len(line.lstrip()), re.match(r"([ -]*)([\w.@/-]+):(?: |$)", line)
        is_item = line.lstrip().startswith("-")
        if line.strip() and below is not None and not (indent > below or indent == below and is_item):
            below = None
        if key is not None and below is None and is_secret(key[2]):
            below = indent
        if below is not None:
            content = line[key.end() :] if key is not None else line.strip()
            if not re.fullmatch(r"\s*|\*\*\*|null|true|false|\{\}|\[\]", content):
                line = (line[: key.end()] if key is not None else " " * indent + "- " * is_item) + HIDDEN
        shown.append(line)
    return redact_text("\n".join(shown))


def hide_known(text: str) -> str:
    """Return a text without the known secrets: those of environment variables and those passed to `remember`."""
    return known.sub(HIDDEN, text) if (known := _known()) is not None else text


def _hide_named(text: str) -> str:
    shown, done, depth, counted = [], 0, 0, 0
    code = [match.span("code") for match in _SOURCE_LINE.finditer(text)]
    matches = sorted([*_NAMED.finditer(text), *_FLAG.finditer(text)], key=lambda match: match.start())
    for match in matches:
        start = match.end()
        if match.start() < done or not is_secret(match["name"]):
            continue
        depth, counted = depth + _depth(text, counted, match.start()), match.start()
        in_braces = depth > 0
        # An error message has the form `key: problem`, so a colon alone does not precede a value.
        if match.re is _NAMED and match["sign"] == ":" and not (in_braces or match["quote"]):
            continue
        if text[start : start + 1] not in ('"', "'") and any(begin <= start < end for begin, end in code):
            continue  # `token = row["token"]` in a traceback: only a literal is a secret
        end = _end_of_value(text, start, in_braces)
        value = text[start:end].strip("\\\"' ")
        if value in ("", HIDDEN, "null", "None", "true", "True", "false", "False", "VALUE") or value.startswith("${"):
            continue
        if _HARMLESS.fullmatch(value):
            continue
        shown += [text[done:start], HIDDEN]
        done = end
    return "".join([*shown, text[done:]])


def _depth(text: str, start: int, end: int) -> int:
    """Return how many more brackets open than close between two offsets."""
    return sum(text.count(a, start, end) - text.count(b, start, end) for a, b in (("{", "}"), ("[", "]")))


def _end_of_value(text: str, start: int, in_braces: bool) -> int:
    opening = re.compile(r"\\?[\"']|[{\[(]").match(text, start)
    if opening is None:
        match = (_BARE_IN_BRACES if in_braces else _BARE).match(text, start)
        return match.end() if match else start
    if (begin := opening[0]) not in _CLOSING:
        closing = re.compile(rf"(?:(?!{re.escape(begin)})(?:\\.|.))*{re.escape(begin)}", re.DOTALL)
        match = closing.match(text, opening.end())
        return match.end() if match else len(text)
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == begin) - (text[i] == _CLOSING[begin])
        if depth == 0:
            return i + 1
    return len(text)


_STARS = r"\*{2,}|\.{3,}|…|•{2,}|x{4,}"
_END = r"\s\"'`:=,;(){}\[\]"
# The lookbehind keeps the search linear, as in `_NAMED`.
_AROUND_HIDDEN = re.compile(rf"(?<![^{_END}])[^{_END}]*(?:\0|{_STARS})[^\s\"'`,;(){{}}\[\]]*", re.IGNORECASE)
_HIDDEN_WORDS = re.compile(r"\*\*\*(?:\s+\*\*\*)+")
_LONGEST_TEXT = 4000


class SecretFilter:
    """Hides some secrets, and fragments of them, in a text from a program that has received them.

    Call it before a text is truncated, because truncation can leave a fragment that is too short to be found.

    Args:
        secrets: values of headers, tokens, passwords.
    """

    def __init__(self, secrets: Iterable[str]):
        secrets = [secret for secret in secrets if secret.strip()]
        self._forms = {_lower(form) for secret in secrets for form in forms_of(secret)}
        self._is_too_short = any(len(form) < _MIN_FRAGMENT for form in self._forms)
        self._fragments = {form[i : i + _MIN_FRAGMENT] for form in self._forms for i in range(len(form) - 3)}

    def __call__(self, text: str) -> str:
        """Return the first 4000 characters, with every fragment of a secret of at least 4 characters replaced by `***`.

        The case of letters does not matter. If a secret is shorter than 4 characters, the complete text is hidden.
        """
        if not self._forms:
            return text
        if self._is_too_short:
            return HIDDEN
        # Invisible and wide characters could split a secret.
        text = unicodedata.normalize("NFKC", text[:_LONGEST_TEXT])
        text = "".join(c for c in text if c.isprintable() or c in "\n\t")
        lower, hidden = _lower(text), bytearray(len(text))
        for i in range(len(text) - _MIN_FRAGMENT + 1):
            if lower[i : i + _MIN_FRAGMENT] in self._fragments:
                hidden[i : i + _MIN_FRAGMENT] = b"\1" * _MIN_FRAGMENT
        shown = "".join("\0" if hide and not c.isspace() else c for c, hide in zip(text, hidden, strict=True))
        # Programs show the ends of a key, as in `sk-1…9f`: the rest of such a word is hidden too.
        return _HIDDEN_WORDS.sub(HIDDEN, _AROUND_HIDDEN.sub(self._hide, shown))

    def _hide(self, match: re.Match[str]) -> str:
        word = match[0]
        if "\0" in word:
            return HIDDEN
        ends = [end for end in re.split(_STARS, _lower(word)) if end]
        is_end = any(form.startswith(end) or form.endswith(end) for end in ends for form in self._forms)
        return HIDDEN if is_end else word


def _lower(text: str) -> str:
    """Return `text` in lower case with the same number of characters."""
    return "".join(lower if len(lower := c.lower()) == 1 else c for c in text)
