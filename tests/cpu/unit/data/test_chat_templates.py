"""A chat template is a program of somebody else's: it reaches nothing of this process, and it ends."""

from __future__ import annotations

import concurrent.futures
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.templates import ESCAPES
from trainer.data.chats import check_generation_prompt
from trainer.data.datasets import render_text
from trainer.errors import UserError
from trainer.models.tokenizer import load_tokenizer, stop_token_ids
from trainer.process import time_limits
from trainer.process.watchdog import deadline

FAILURES = [
    "{% if %}", "{{ undefined.x }}", "{{ 1 / 0 }}", "{{ range(10 ** 9) | list }}", "{{ none() }}", "{{ messages + 1 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}",
    "{{ raise_exception('No!') }}", "{{ 'x' * 2 ** 62 }}", "{{ messages[0].content.nothing() }}",
]  # fmt: skip


def tokenizer_with(model: str, tmp_path: Path, template: str, own: bool) -> Any:
    """A tokenizer with this template, its own or that of `model.chat_template`."""
    if not own:
        (tmp_path / "template.jinja").write_text(template)
        return load_tokenizer(model, str(tmp_path / "template.jinja"))
    copy = shutil.copytree(model, tmp_path / "copy", dirs_exist_ok=True)
    (copy / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(copy))


@pytest.mark.parametrize("own", [True, False], ids=["own", "key"])
@pytest.mark.parametrize("template", [*ESCAPES, *FAILURES], ids=range(len(ESCAPES) + len(FAILURES)))
def test_a_template_has_no_access_to_the_process(model, tmp_path, template, own):
    executed = tmp_path / "executed"
    template = template.format(executed=executed) if template in ESCAPES else template
    tokenizer = tokenizer_with(model, tmp_path, template, own)
    with pytest.raises(
        UserError, match="model.chat_template: the chat template in use .*cannot render a chat of user"
    ) as e:
        text = render_text(tokenizer, [{"role": "user", "content": "hé"}], add_generation_prompt=True)
        raise AssertionError(text)
    assert "\n" not in str(e.value) and (not own or str(tmp_path / "copy") in str(e.value))
    assert not executed.exists()


def test_an_endless_template_is_stopped_on_every_thread_and_never_later(model, tmp_path, monkeypatch):
    monkeypatch.setattr(time_limits, "RENDER_S", 0.2)
    monkeypatch.setattr(time_limits, "POLL_INTERVAL_S", 0.02)
    loops = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    tokenizer = tokenizer_with(model, tmp_path, loops, own=True)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    chats = [[{"role": "user", "content": "x"}], [{"role": "assistant", "content": "", "tool_calls": [call]}]]

    def render() -> str:
        for chat in chats:
            with pytest.raises(UserError, match="model.chat_template: .*ran for more than 0.2 seconds"):
                render_text(tokenizer, chat, add_generation_prompt=True)
        check_generation_prompt(tokenizer)
        with deadline(0.2):
            pass
        time.sleep(0.5)  # the time of the last block is over
        return "went on"

    assert render() == "went on"
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert [threads.submit(render).result(60) for _ in range(2)] == ["went on"] * 2
    assert stop_token_ids(model, tokenizer)
