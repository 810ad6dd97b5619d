"""Programs that people use as agents, unmodified, against the endpoint: the recipes of docs/agents.md."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import Policy, runs_of
from tests.support.episodes import event_loop
from trainer.agents.call_tree import CallTree
from trainer.agents.episode import AgentEpisode
from trainer.agents.requests import Rules
from trainer.agents.server import AgentServer, shared_server
from trainer.environments import Endpoint
from trainer.generation.engine import Sampling
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.seeding import turn_seed

PACKAGES = {
    "Claude Code": "@anthropic-ai/claude-code",
    "Codex": "@openai/codex",
    "opencode": "opencode-ai",
    "pi": "@mariozechner/pi-coding-agent",
    "qwen-code": "@qwen-code/qwen-code",
}
SHELL = {
    "claude": {"name": "Bash", "command": "command", "timeout": 5e3},
    "codex": {"name": "exec_command", "command": "cmd"},
    "opencode": {"name": "bash", "command": "command", "description": "x", "timeout": 5e3},
    "pi": {"name": "bash", "command": "command", "timeout": 5.0},
    "qwen": {"name": "run_shell_command", "command": "command", "is_background": False, "timeout": 5e3},
}
"""The tool of each program that runs a command, with arguments that come back in another form."""
TASK = "Write hi into the file said."


def recipes() -> dict[str, str]:
    """Return the versions that docs/agents.md names."""
    text = Path("docs/agents.md").read_text()
    return {name: re.findall(rf"^\| {name} \|.*\| ([\d.]+) \|$", text, re.M)[0] for name in PACKAGES}


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """The directory of the programs."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    root = tmp_path_factory.mktemp("programs")
    wanted = [f"{PACKAGES[name]}@{version}" for name, version in recipes().items()]
    options = ["--prefix", str(root), "--no-fund", "--no-audit", "--no-save", "--loglevel=error"]
    subprocess.run([npm, "install", *options, *wanted], check=True, timeout=600, cwd=root)
    return root / "node_modules/.bin"


class Served:
    """An episode whose policy follows a script."""

    def __init__(self, server: AgentServer, tokenizer: Any, replies: list[str]):
        left = iter(replies)
        self.policy = Policy(tokenizer, lambda *_: next(left))
        usual = Sampling(1.0, 1.0, -1, 2000, (tokenizer.eos_token_id,))
        rules = Rules("policy", usual, usual, overrides=False, max_turns=9)

        def submit(episode: AgentEpisode, turn: Any, request: Any) -> None:
            said = Policy(tokenizer, lambda *_: "a title") if turn.is_side else self.policy
            asyncio.get_running_loop().call_soon(episode.complete, turn, said.complete(request))

        self.episode = AgentEpisode(
            CallTree(tokenizer, 200_000), rules, lambda key: turn_seed(1, 1, "0:0", 0, key), submit, server.address
        )
        server.add(self.episode)
        self.endpoint = Endpoint(self.episode.base_url, "any", "policy")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("model")
    build_tiny(TinyShape(num_layers=1), str(path))
    return load_tokenizer(str(path))


@pytest.fixture(scope="module")
def server() -> Iterator[AgentServer]:
    with shared_server("127.0.0.1", 0, None) as server:
        event_loop().run(server.start())
        yield server


def settings_of(program: str, api: str, url: str, home: Path, work: Path) -> list[str]:
    """Write the files with which a program finds the policy; return its command."""
    match program:
        case "claude":
            return ["claude", "-p", TASK, "--model", "policy", "--dangerously-skip-permissions"]
        case "codex":
            (home / ".codex").mkdir()
            provider = f'name = "trainer"\nbase_url = "{url}"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
            text = (
                'model = "policy"\nmodel_provider = "trainer"\nmodel_context_window = 200000\nweb_search = "disabled"\n'
            )
            (home / ".codex/config.toml").write_text(f"{text}[model_providers.trainer]\n{provider}")
            return ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
        case "opencode":
            model = {"tool_call": True, "limit": {"context": 200_000, "output": 2000}}
            provider = {"npm": api, "options": {"baseURL": url, "apiKey": "any"}}
            models = {"models": {"policy": model, "policy-side": model}}
            config = {"model": "trainer/policy", "small_model": "trainer/policy-side", "autoupdate": False}
            config |= {"permission": {"*": "allow"}, "provider": {"trainer": {**provider, **models}}}
            (work / "opencode.json").write_text(json.dumps(config))
            return ["opencode", "run", TASK]
        case "pi":
            (home / ".pi/agent").mkdir(parents=True)
            base = url.removesuffix("/v1") if api == "anthropic-messages" else url
            model = {"id": "policy", "name": "policy", "reasoning": True, "input": ["text"], "contextWindow": 200_000}
            model |= {"maxTokens": 2000, "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)}
            provider = {"baseUrl": base, "api": api, "apiKey": "any", "models": [model]}
            (home / ".pi/agent/models.json").write_text(json.dumps({"providers": {"trainer": provider}}))
            return ["pi", "-p", "--provider", "trainer", "--model", "policy", TASK]
        case _:
            return ["qwen", "-p", TASK, "--yolo", "--auth-type", "openai"]


@pytest.mark.parametrize(
    "program, api",
    [
        ("claude", ""),
        ("codex", ""),
        ("opencode", "@ai-sdk/openai"),
        ("pi", "openai-completions"),
        ("pi", "openai-responses"),
        ("pi", "anthropic-messages"),
        ("qwen", ""),
    ],
)
def test_an_unmodified_program_runs_an_episode_that_gives_one_sample(
    server, tokenizer, programs, tmp_path, program, api
):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    name, key, *others = SHELL[program]
    more = {other: SHELL[program][other] for other in others}

    def call(command: str) -> str:
        arguments = {SHELL[program][key]: command, **more}
        return f"<tool_call>\n{json.dumps({'name': SHELL[program][name], 'arguments': arguments})}\n</tool_call>"

    replies = [
        f"<think>\nHm.\n</think>\n\nI write.\n{call('echo hi > said')}",
        f"I look.\n{call('cat said')}",
        "<think>\nSo.\n</think>\n\nIt says hi.",
    ]
    served = Served(server, tokenizer, replies)
    command = settings_of(program, api, served.endpoint.base_url, home, work)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "OPENAI_MODEL": "policy", "IS_SANDBOX": "1"}
    env |= {"NO_PROXY": "127.0.0.1", **served.endpoint.variables}
    done = subprocess.run(command, env=env, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, timeout=150)
    said = done.stdout.decode()
    assert done.returncode == 0 and "It says hi." in said, said + done.stderr.decode()
    assert (work / "said").read_text() == "hi\n"
    (sample,) = served.episode.tree.samples()
    trained = [tokenizer.decode(tokens) for _, tokens, _ in runs_of(sample)]
    assert trained == [f"{reply}<|end|>" for reply in replies]
