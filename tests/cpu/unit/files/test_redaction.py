"""Secrets in names, configs, commands and texts."""

from __future__ import annotations

import json

import pytest

from trainer.config import Config
from trainer.config.fields import walk_keys
from trainer.config.hydra import compose
from trainer.errors import UserError
from trainer.files.redaction import hidden_keys, is_secret, redact, redact_command, redact_text

SECRET_NAMES = [
    "api_key",
    "apikey",
    "apiKey",
    "API_KEY",
    "x-api-key",
    "secret_key",
    "SECRET",
    "access_key",
    "aws_secret_access_key",
    "private_key",
    "passphrase",
    "password",
    "db_password",
    "credentials",
    "authorization",
    "Authorization",
    "auth",
    "bearer",
    "token",
    "hf_token",
    "HF_TOKEN",
    "access_tokens",
    "cookie",
    "client_secret",
    "openai_api_key",
    "WANDB_API_KEY",
    "refreshToken",
    "api_key_prod",
    "environment.kwargs.api_key",
]
OTHER_NAMES = [
    "max_tokens",
    "tokenizer",
    "token_ids",
    "eos_token",
    "pad_token",
    "stop_token",
    "prompt_key",
    "data.prompt_key",
    "keyboard",
    "num_tokens",
    "keys",
    "public_key",
    "token_mean",
    "author",
    "password_file",
    "api_key_env",
    "header_env",
    "auth_url",
    "secret_name",
    "HF_TOKEN_PATH",
    "TOKENIZERS_PARALLELISM",
    "forward_pass",
    "bypass",
    "monkey",
    "group_key",
    "first_token",
    "num_key_value_heads",
]


def test_a_secret_is_known_by_its_name():
    assert [name for name in SECRET_NAMES if not is_secret(name)] == []
    assert [name for name in OTHER_NAMES if is_secret(name)] == []
    assert [key for key, *_ in walk_keys(Config()) if is_secret(key)] == []


def test_values_of_secret_keys_and_passwords_in_addresses_are_masked():
    config = {
        "n": 1,
        "options": {"api_key": "hush-1", "list": [{"token": "hush-2"}], "auth": True, "password": None},
        "credentials": {"user": "hush-3", "deep": {"n": 4}},
        "url": "https://user:hush-5@host/path",
    }
    shown = redact(config)
    assert "hush" not in json.dumps(shown)
    assert shown == {
        "n": 1,
        "options": {"api_key": "***", "list": [{"token": "***"}], "auth": True, "password": None},
        "credentials": {"user": "***", "deep": {"n": "***"}},
        "url": "https://***@host/path",
    }


def test_commands_show_no_secret():
    arguments = [
        "environment.kwargs.api_key=hush",
        "+environment.kwargs.password=hush",
        "environment.kwargs={api_key:hush,n:1}",
        "environment.kwargs={a: {token: 'hush'}, n: 1}",
        "environment.kwargs={api_key: ${oc.env:KEY}}",
        "reward.url=https://u:hush@host",
        "trainer.total_steps=3",
    ]
    shown = redact_command(arguments)
    assert "hush" not in " ".join(shown)
    assert shown[2] == "environment.kwargs={api_key:***,n:1}"
    assert shown[4] == arguments[4] and shown[6] == arguments[6]


def test_a_named_secret_stays_as_it_was_written(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "0123456789")
    monkeypatch.setenv("NEUTRAL", "abcdefghij")
    monkeypatch.setenv("FOLDER", "some/where")
    monkeypatch.setenv("HEADER", "klmnopqrst")
    words = ["api_key: ${oc.env:JUDGE_API_KEY}", "password: ${oc.env:NEUTRAL}", "path: ${oc.env:FOLDER}/x"]
    more = ["header: 'Bearer ${oc.env:JUDGE_API_KEY}'", "header_env: HEADER", "plain: ${environment.kwargs.api_key}"]
    cfg = compose(["+environment.kwargs={" + ", ".join(words + more) + "}", "environment.name=a:b"])
    kwargs = cfg.environment.kwargs
    assert kwargs["api_key"] == "0123456789" and kwargs["header"] == "Bearer 0123456789"
    saved = redact(kwargs)
    assert saved == {
        "api_key": "${oc.env:JUDGE_API_KEY}",
        "password": "${oc.env:NEUTRAL}",
        "path": "some/where/x",
        "header": "Bearer ${oc.env:JUDGE_API_KEY}",
        "header_env": "HEADER",
        "plain": "${oc.env:JUDGE_API_KEY}",
    }
    for changed, is_same in (({}, True), ({"password": "new"}, True), ({"path": "else/where"}, False)):
        assert (redact({**saved, **changed}, references=False) == redact(kwargs, references=False)) == is_same
    for secret in ("0123456789", "abcdefghij", "klmnopqrst"):
        assert redact_text(f"HTTP 401 for {secret}") == "HTTP 401 for ***"
    assert redact_text("some/where is missing") == "some/where is missing"
    monkeypatch.setenv("HF_TOKEN", "hf-98765zyxwv")
    assert redact_text("unknown token hf-98765zyxwv") == "unknown token ***"


def test_a_config_with_a_hidden_secret_is_refused():
    config = {"options": {"api_key": "***", "separator": "***", "n": 1}}
    assert hidden_keys(config) == ["options.api_key"]
    with pytest.raises(UserError, match=r"environment.kwargs.api_key: \*\*\* stands for a secret"):
        compose(["+environment.kwargs={api_key: '***'}"])
