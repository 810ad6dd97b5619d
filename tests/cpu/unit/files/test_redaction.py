"""Secrets in names, configs, commands and texts."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote, quote_plus

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import Config
from trainer.config.fields import walk_keys
from trainer.config.hydra import compose
from trainer.errors import UserError
from trainer.files.redaction import (
    SecretFilter,
    hidden_keys,
    is_secret,
    redact,
    redact_command,
    redact_text,
    redact_yaml,
    remember,
    secrets_of,
)
from trainer.run.compatibility import find_changes


def words(text: str) -> list[str]:
    return text.split()


SECRET_NAMES = words("""
    api_key apikey apiKey API_KEY x-api-key X-Api-Key secret_key secretKey SECRET access_key aws_secret_access_key
    private_key privateKey passphrase password PASSWORD db_password dbPassword PGPASSWORD passwd pwd credential
    credentials GOOGLE_APPLICATION_CREDENTIALS authorization Authorization proxy-authorization auth http_auth bearer
    bearer_token token hf_token HF_TOKEN api_token access_tokens cookie cookies session session_id session_key jwt
    client_secret AccountKey SharedAccessKey openai_api_key judge_key signing_key db_pass creds api_key_2 token1 otp dsn
    environment.kwargs.api_key credentials.user WANDB_API_KEY RAY_AUTH_TOKEN --api-key refreshToken AWS_ACCESS_KEY_ID
    api_key_prod OPENAI_KEY_PROD HF_TOKEN_READ auth_headers tavily_key authKey github_pat pass use_auth_token
""")
OTHER_NAMES = words("""
    max_tokens tokenizer token_ids token_id eos_token pad_token bos_token stop_token think_end_token image_token
    prompt_key answer_key data.prompt_key messages_key keyboard num_tokens max_prompt_tokens tokens key keys sort_key
    public_key token_mean token_level author authors authority session_timeout max_sessions password_file api_key_env
    header_env token_path auth_url auth_type secret_name RAY_AUTH_TOKEN_PATH HF_TOKEN_PATH SSH_AUTH_SOCK
    TOKENIZERS_PARALLELISM GPG_KEY KEYBOARD_LAYOUT DBUS_SESSION_BUS_ADDRESS forward_pass bypass compass passes
    monkey turkey_size tokens_per_s pin_memory header group_key row_key basic keyed first_token user_key
    max_tokens_per_micro_batch chat_template_kwargs num_key_value_heads key_cache authored per_token password_reward
    num_secrets n_secrets secret_range secret_max cookie_bonus bearer_weight password_penalty forward_pass_rate path
""")


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_no_secrets(name):
    assert not is_secret(name)


def test_no_key_of_the_schema_and_no_metric_holds_a_secret():
    assert not [key for key, *_ in walk_keys(Config()) if is_secret(key)]


SECRETS = st.text("abcdefgh01234567-_ABC+/=.", min_size=9, max_size=40).map(lambda text: f"k{text}9")


@given(secret=SECRETS, name=st.sampled_from([name for name in SECRET_NAMES if "." not in name and name[0] != "-"]))
@settings(max_examples=200, deadline=None)
def test_a_secret_appears_in_no_config_command_or_text(secret, name):
    config = {"n": 1, "options": {name: secret, "list": [{name: secret}], "text": f"{name}={secret}"}}
    assert secret not in json.dumps(redact(config)) and redact(config)["n"] == 1
    assert redact({"headers": [{"name": "Authorization", "value": secret}]})["headers"][0]["value"] == "***"
    arguments = [
        f"environment.kwargs.{name}={secret}",
        f"+environment.kwargs.{name}={secret}",
        f"environment.kwargs={{{name}:{secret},n:1}}",
        f"environment.kwargs={{a:{{{name}: '{secret}'}}, n: 1}}",
        f'environment.kwargs={{"{name}":"{secret}"}}',
        f"environment.kwargs={{{name}:[{secret},{secret}],n:1}}",
        f"--{name.lstrip('-')}",
        secret,
    ]
    shown = redact_command(arguments)
    assert secret not in " ".join(shown)
    assert shown[2] == f"environment.kwargs={{{name}:***,n:1}}"
    for text in (
        f"cannot parse {{{name}:{secret}}} here",
        f"{name}={secret} is wrong",
        f'{{"{name}": "{secret}"}}',
        f"{{'{name}': '{secret}', 'n': 1}}",
        json.dumps(json.dumps({name: secret})),
        f"https://user:{secret.replace('/', '')}@host/path",
        f"https://host/path?a=1&{name}={quote(secret, safe='')}&b=2",
        f"Authorization: Bearer {secret}",
    ):
        assert secret not in redact_text(text), text


@given(
    config=st.dictionaries(
        st.sampled_from(OTHER_NAMES),
        st.one_of(st.integers(), st.booleans(), st.none(), st.text("abc xyz,.:", max_size=20)),
    )
)
def test_text_without_secrets_is_unchanged(config):
    assert redact({"a": [config]}) == {"a": [config]} and secrets_of(config) == []
    text = " ".join(f"{name}=7" for name in config)
    assert redact_text(text) == text and redact_command(text.split()) == text.split()


def test_numbers_are_hidden_unless_they_are_short_and_switches_are_not():
    given = {"api_key": 123456, "auth": True, "password": None, "token": "", "credentials": {"user": "u", "n": 1234}}
    assert redact(given) == {
        "api_key": "***",
        "auth": True,
        "password": None,
        "token": "",
        "credentials": {"user": "***", "n": "***"},
    }
    assert secrets_of(given) == ["123456", "u", "1234"]
    harmless = {"secret": 7, "auth": {"weight": 0.5, "lr": 1e-6}, "token": "<eot>", "cookies": [-1, 999]}
    assert redact(harmless) == redact(harmless, references=False) == harmless and secrets_of(harmless) == []
    command = ["environment.kwargs={secret: 7, token: <eot>}", "environment.kwargs.secret=7"]
    assert redact_command(command) == command
    assert redact({"password": "123"})["password"] == "***", "the user has put quotes around it"


@given(
    name=st.sampled_from([*SECRET_NAMES, *OTHER_NAMES]),
    values=st.lists(
        st.one_of(st.integers(-999, 999), st.floats(-999, 999), st.sampled_from(["<eot>", "<|end|>"])),
        min_size=2,
        max_size=2,
        unique_by=str,
    ),
)
@settings(deadline=None)
def test_a_changed_number_is_noticed_whatever_its_name(name, values):
    saved, now = ({"environment": {"kwargs": {name: value}}} for value in values)
    pair = redact(redact(saved), references=False), redact(now, references=False)
    assert len(find_changes(*pair, {})) == (values[0] != values[1])


def test_the_search_is_linear_in_the_length_of_the_text():
    word = "a" * 1_000_000
    assert redact_text(word) == word and redact_text(f"{word}.api_key=hush") == f"{word}.api_key=***"
    assert "hush" not in redact_text("[token:hush] " * 20_000)
    assert SecretFilter(["abcd1234efgh"])(word) == word[:4000]


def test_a_traceback_keeps_its_code_but_no_literal():
    code = "    token = self.next(row, api_key=api_key)"
    text = f'Traceback (most recent call last):\n  File "a.py", line 3, in reward\n{code}\nKeyError: 5'
    assert redact_text(text) == text
    assert "hush" not in redact_text(text.replace("self.next", '"hush"; x'))
    assert "hush" not in redact_text(f"{text}\napi_key=hush")


def test_each_line_of_a_secret_of_several_lines_is_hidden(monkeypatch):
    monkeypatch.setenv("SIGNING_KEY", "begin the key\nMIIEvQIBADANBgkqhkiG9w0B\nAQEFAASCBKcwggSjAgEAAoIB\n")
    assert redact_text("line 2: MIIEvQIBADANBgkqhkiG9w0B") == "line 2: ***"
    assert redact_text("to begin the key") == "to begin the key"


def test_the_path_of_a_file_with_credentials_is_no_secret(monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/home/somebody/key.json")
    assert redact_text("/home/somebody/key.json: no such file") == "/home/somebody/key.json: no such file"


def test_the_value_of_a_named_header_is_a_secret():
    assert secrets_of({"headers": [{"name": "Authorization", "value": "hush-hush"}]}) == ["hush-hush"]


def test_a_config_with_a_hidden_secret_is_refused():
    config = {"options": {"api_key": "***", "separator": "***", "list": [{"auth": "Bearer ***"}], "n": 1}}
    assert hidden_keys(config) == ["options.api_key", "options.list.auth"]
    with pytest.raises(UserError, match=r"environment.kwargs.api_key: \*\*\* stands for a secret"):
        compose(["+environment.kwargs={api_key: '***'}"])


def test_a_reference_names_the_variable_that_holds_the_secret(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "0123456789")
    monkeypatch.setenv("NEUTRAL", "abcdefghij")
    monkeypatch.setenv("SHORT", "x1")
    config = {
        "api_key": "0123456789",
        "password": "abcdefghij",
        "secret": "x1",
        "authorization": "Bearer 0123456789",
        "plain": "at 0123456789",
        "saved": {"token": "${oc.env:OTHER}"},
    }
    assert redact(config) == {
        "api_key": "${oc.env:JUDGE_API_KEY}",
        "password": "${oc.env:NEUTRAL}",
        "secret": "***",
        "authorization": "Bearer ${oc.env:JUDGE_API_KEY}",
        "plain": "at ${oc.env:JUDGE_API_KEY}",
        "saved": {"token": "${oc.env:OTHER}"},
    }
    without = redact(config, references=False)
    assert without == redact(redact(config), references=False), "what was saved compares equal to what is given"
    assert set(without) - {"plain", "saved"} == {key for key, value in without.items() if value == "***"}
    assert redact_command(["options.api_key=0123456789"]) == ["options.api_key=${oc.env:JUDGE_API_KEY}"]


def test_a_printed_config_has_no_secrets():
    config = {
        "a": {"api_key": "hush-1", "n": 1, "cookies": {"x": "hush-2", "y": ["hush-3", 4]}, "max_tokens": 5},
        "passwords": ["hush-4", {"deep": "hush-5"}],
        "secret": "hush-6 " * 40,
        "token": None,
        "end": "plain",
    }
    shown = redact_yaml(yaml.safe_dump(config, sort_keys=False))
    assert "hush" not in shown
    parsed = yaml.safe_load(shown.replace("***", "hidden"))
    assert parsed["a"]["cookies"] == {"x": "hidden", "y": ["hidden", "hidden"]} and parsed["a"]["max_tokens"] == 5
    assert parsed["end"] == "plain" and parsed["a"]["n"] == 1 and parsed["token"] is None


def test_the_working_directory_is_no_secret(monkeypatch):
    monkeypatch.setenv("PWD", "/home/somebody/here")
    assert redact_text("/home/somebody/here/run: no such directory") == "/home/somebody/here/run: no such directory"


def test_tokens_in_known_formats_and_remembered_values_are_hidden_everywhere():
    for token in ("hf_" + "aB3" * 10, "sk-proj-" + "a1_" * 8, "AKIA" + "ABCD1234" * 2, "ghp_" + "a1" * 18):
        assert redact_text(f"the token {token} is unknown") == "the token *** is unknown"
    remember("a value of the user")
    assert redact_text("said: A%20Value%20of%20the%20user!") == "said: ***!"
    assert redact_text("environment.kwargs.api_key: must be text") == "environment.kwargs.api_key: must be text"


def echoes(secret: str, user: str = "") -> list[str]:
    """Return what servers make of a secret in their answers."""
    return [
        secret,
        secret.lower(),
        secret.upper(),
        quote(secret, safe=""),
        quote_plus(secret),
        json.dumps(secret),
        repr(secret),
        base64.b64encode(secret.encode()).decode(),
        base64.urlsafe_b64encode(secret.encode()).decode().rstrip("="),
        base64.b64encode(f"{user}:{secret}".encode()).decode(),
        secret.encode().hex(),
        "\u200b".join(secret),
        "\0".join(secret),
        "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in secret),
    ]


@given(secret=SECRETS, header=st.sampled_from(["{}", "Bearer {}", "Token {}"]), user=st.text("uvw", max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_secret_that_a_server_repeats_is_hidden_in_every_form(secret, header, user):
    hide = SecretFilter([header.format(secret)])
    for echo in echoes(secret, user):
        shown = hide(f"Incorrect API key provided: {echo} - see https://judge/keys")
        assert shown.replace("'", "").replace('"', "") == "Incorrect API key provided: *** - see https://judge/keys", (
            echo
        )


@pytest.mark.parametrize(
    "form", ["sk-12345678ab********************wxyz", "sk-1...wxyz", "sk…yz", "s***z", "sk-12345678ab"]
)
def test_fragments_of_a_key_are_hidden(form):
    shown = SecretFilter(["Bearer sk-12345678abQRSTUVwxyz"])(f"Incorrect API key provided: {form}, see the manual")
    assert shown == "Incorrect API key provided: ***, see the manual"


def test_basic_authentication_is_known_in_both_forms():
    header = "Basic " + base64.b64encode(b"alice:open sesame").decode()
    hide = SecretFilter([header])
    assert hide("no user alice:open sesame") == "no user ***"
    assert "sesame" not in hide("the password was open%20sesame")
    assert hide(header.lower()) == "***"


def test_the_complete_text_is_hidden_if_a_secret_is_too_short_to_find():
    assert SecretFilter(["Bearer abc"])("unknown key abc") == "***"
    assert SecretFilter([])("unknown key abc") == "unknown key abc"
