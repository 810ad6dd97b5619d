"""Programs that people use as agents, unmodified, against the endpoint: the recipes of docs/agents.md."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
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
from trainer.process import time_limits
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
PYTHON_PACKAGES = {
    "aider": ("aider-chat", ()),
    "mini-swe-agent": ("mini-swe-agent", ()),
    "inspect-ai": ("inspect-ai", ("openai==3.57.0",)),
}
TASK = "Write hi into the file said."


def recipes() -> dict[str, str]:
    """Return the versions that docs/agents.md names."""
    text, names = Path("docs/agents.md").read_text(), [*PACKAGES, *PYTHON_PACKAGES]
    return {name: re.findall(rf"^\| {name} \|.*\| ([\d.]+) \|$", text, re.M)[0] for name in names}


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """The directory of the programs."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    root = tmp_path_factory.mktemp("programs")
    versions = recipes()
    wanted = [f"{package}@{versions[name]}" for name, package in PACKAGES.items()]
    options = ["--prefix", str(root), "--no-fund", "--no-audit", "--no-save", "--loglevel=error"]
    subprocess.run([npm, "install", *options, *wanted], check=True, timeout=600, cwd=root)
    return root / "node_modules/.bin"


@pytest.fixture(scope="module")
def python_programs(tmp_path_factory) -> dict[str, Path]:
    """The directories of programs of Python, each in an environment of its own: their libraries differ."""
    uv, versions, found = Path(sys.executable).with_name("uv"), recipes(), {}
    for name, (package, others) in PYTHON_PACKAGES.items():
        root = tmp_path_factory.mktemp(name)
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, root / "env"], check=True, timeout=60)
        found[name] = root / "env/bin"
        wanted = [f"{package}=={versions[name]}", *others]
        subprocess.run(
            [uv, "pip", "install", "-q", "--python", found[name] / "python", *wanted], check=True, timeout=600
        )
    return found


class Served:
    """An episode whose policy follows a script."""

    def __init__(
        self, server: AgentServer, tokenizer: Any, replies: list[str], overrides: bool = False, delay_s: float = 0.0
    ):
        left = iter(replies)
        self.policy = Policy(tokenizer, lambda *_: next(left))
        usual = Sampling(1.0, 1.0, -1, 2000, (tokenizer.eos_token_id,))
        rules = Rules("policy", usual, usual, overrides, max_turns=9)

        def submit(episode: AgentEpisode, turn: Any, request: Any) -> None:
            said = Policy(tokenizer, lambda *_: "a title") if turn.is_side else self.policy
            asyncio.get_running_loop().call_later(delay_s, episode.complete, turn, said.complete(request))

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
    "program, api, delay_s",
    [
        ("claude", "", 0),
        ("codex", "", 0),
        ("opencode", "@ai-sdk/openai", 0),
        ("pi", "openai-completions", 0),
        ("pi", "openai-responses", 0),
        ("pi", "anthropic-messages", 0),
        ("qwen", "", 0),
        ("claude", "", 1),
        ("codex", "", 1),
        ("qwen", "", 1),
    ],
)
def test_an_unmodified_program_runs_an_episode_that_gives_one_sample(
    server, tokenizer, programs, tmp_path, program, api, delay_s, monkeypatch
):
    monkeypatch.setattr(time_limits, "STREAM_QUIET_S", 0.3)  # a late reply is kept alive
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
    served = Served(server, tokenizer, replies, delay_s=delay_s)
    command = settings_of(program, api, served.endpoint.base_url, home, work)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "OPENAI_MODEL": "policy", "IS_SANDBOX": "1"}
    env |= {"NO_PROXY": "127.0.0.1", **served.endpoint.variables}
    done = subprocess.run(command, env=env, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, timeout=150)
    said = done.stdout.decode()
    assert done.returncode == 0 and "It says hi." in said, said + done.stderr.decode()
    assert (work / "said").read_text() == "hi\n"
    assert trained(served) == [[f"{reply}<|end|>" for reply in replies]]


def trained(served: Served) -> list[list[str]]:
    """Return the texts that are trained in each sample."""
    decode = served.policy.tokenizer.decode
    return [[decode(tokens) for _, tokens, _ in runs_of(sample)] for sample in served.episode.tree.samples()]


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


MINI = [
    f"I write.\n{call_of('bash', command='echo hi > said')}",
    f"I look.\n{call_of('bash', command='cat said')}",
    f"It says hi.\n{call_of('bash', command='echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT')}",
]
INSPECT = [f"I write.\n{call_of('write', text='hi', times=1.0)}", f"I look.\n{call_of('look')}", "It says hi."]
AIDER = ["I write.\n\nsaid\n```\n<<<<<<< SEARCH\nho\n=======\nhi\n>>>>>>> REPLACE\n```\n"]
AIDER = [AIDER[0], AIDER[0].replace("ho\n", "")]  # the file has no line `ho`: aider says so, and asks again
OWN_TOOLS = """
import sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

@tool
def write():
    async def execute(text: str, times: float):
        \"\"\"Write a line.

        Args:
            text: The line.
            times: How often.
        \"\"\"
        open("said", "w").write(f"{text}\\n" * int(times))
        return "done"
    return execute

@tool
def look():
    async def execute():
        \"\"\"Read what was written.\"\"\"
        return open("said").read()
    return execute

model = get_model("openai/policy", base_url=sys.argv[1], api_key="any", responses_api=False)
task = Task(dataset=[Sample(input=sys.argv[2])], solver=[use_tools([write(), look()], tool_choice="any"), generate()])
(log,) = eval(task, model=model, display="none", log_dir="logs")
assert log.status == "success", log.error
print(log.samples[0].output.completion)
"""


@pytest.mark.parametrize(
    "program, wire, replies",
    [("mini-swe-agent", "openai", MINI), ("mini-swe-agent", "anthropic", MINI), ("inspect-ai", "", INSPECT)]
    + [("aider", "", AIDER)],
)
def test_an_unmodified_program_of_python_runs_an_episode(
    server, tokenizer, python_programs, tmp_path, program, wire, replies
):
    """Inspect is told to force calls (`tool_choice=required`), aider sends `temperature=0`."""
    served = Served(server, tokenizer, replies, overrides=program != "mini-swe-agent")
    bin, url = python_programs[program], served.endpoint.base_url
    env = {"PATH": f"{bin}:{os.environ['PATH']}", "HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    env |= {"OPENAI_API_BASE": url, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    match program:
        case "mini-swe-agent":
            command = ["mini", "--yolo", "--exit-immediately", "-m", f"{wire}/policy", "-t", TASK]
        case "inspect-ai":
            command = ["python", "-c", OWN_TOOLS, url, TASK]
        case _:
            options = ["--yes-always", "--no-git", "--no-auto-commits", "--no-check-update", "--no-show-model-warnings"]
            command = [
                "aider",
                *options,
                "--edit-format",
                "diff",
                "--model",
                "openai/policy",
                "--message",
                TASK,
                "said",
            ]
    done = subprocess.run(
        command,
        env=env | served.endpoint.variables,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=150,
    )
    said = done.stdout.decode()
    assert done.returncode == 0, said + done.stderr.decode()
    assert (tmp_path / "said").read_text() == "hi\n"
    said = [f"{reply}<|end|>" for reply in replies]
    assert trained(served) == ([[one] for one in said] if program == "aider" else [said]), "aider rebuilds its chat"
