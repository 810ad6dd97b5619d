"""The image and the recipes of deploy/: linted, and every command of the trainer in them composed."""

from __future__ import annotations

import contextlib
import fnmatch
import http.server
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from tests.cpu.test_docs import check
from tests.support.recipes import COMPOSE, KUBERAY, ROOT, SKYPILOT, compose_words, expand, read_yaml
from tools import install
from trainer.process.model_server import TOKEN

IMAGE = ROOT / "Dockerfile"
SCRIPTS = [
    path.relative_to(ROOT)
    for pattern in ("examples/**/*.sh", "examples/**/*.bash", "examples/**/*.sbatch", ".ci/run")
    for path in sorted(ROOT.glob(pattern))
]
BIN = Path(sys.executable).parent


def run_tool(name: str, *arguments: object) -> str:
    """Run a linter; return what it has to say."""
    program = shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    assert program, f"no {name}; `make setup` installs it"
    words = [program, *map(str, arguments)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr if done.returncode else ""


# The image


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """By name of a stage: what it builds on, and its instructions."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    lines = [line for line in IMAGE.read_text().splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = (base, [])
        elif word and found:
            found[name][1].append((word, rest.strip()))
    return found


def test_the_image_has_no_lint():
    assert run_tool("hadolint", "--no-color", IMAGE) == ""


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_runs_the_command_without_root_and_without_tools_of_the_build(target):
    base, instructions = stages()[target]
    assert base == "base"
    last = dict(instructions)
    assert last["USER"] == "1000:1000" and last["ENTRYPOINT"] == '["tini", "--", "trainer"]'
    assert {word for word, _ in instructions} <= {"COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT", "CMD", "ENV"}
    assert all(f"--from=build-{target} " in rest for word, rest in instructions if word == "COPY")


def test_a_target_installs_the_locked_packages_alone():
    for extra, name in (("cpu", "build-cpu"), ("gpu", "build-cuda")):
        commands = [rest for word, rest in stages()[name][1] if word == "RUN"]
        assert len(commands) == 2
        assert re.search(rf"\bpython tools/install.py {extra} --image$", commands[0])
        assert {"--offline", "--no-deps", "--no-build-isolation"} <= set(commands[1].split())
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert {re.split(r"\W", requirement)[0] for requirement in groups["build"]} == {"editables", "hatchling"}


def test_what_the_image_copies_is_sent_to_the_build():
    rules = (ROOT / ".dockerignore").read_text().split()
    assert rules[0] == "*", "nothing is sent that is not named"
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert all((ROOT / name).exists() for name in sent)
    copied = [shlex.split(rest)[:-1] for word, rest in stages()["build"][1] if word == "COPY"]
    assert {name.split("/")[0] for names in copied for name in names} <= sent
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {wheel["project"]["readme"], *wheel["project"]["license-files"], "conf", "tools", "trainer"}
    assert needed <= sent


# All files


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_has_no_lint(script):
    assert run_tool("shellcheck", "--external-sources", "--source-path=SCRIPTDIR", "--severity=warning", script) == ""


@pytest.mark.parametrize("path", [COMPOSE, KUBERAY, SKYPILOT, ROOT / "mkdocs.yml"], ids=lambda path: path.name)
def test_a_yaml_file_has_no_lint(path):
    rules = {"document-start": "disable", "line-length": {"max": 130}, "comments": {"min-spaces-from-content": 1}}
    config = YamlLintConfig(yaml.safe_dump({"extends": "default", "rules": rules}))
    assert [str(problem) for problem in linter.run(path.read_text(), config)] == []


# Compose


def test_the_compose_file_fits_the_schema():
    assert run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE) == ""


def test_the_services_of_compose_give_commands_that_compose(monkeypatch):
    check(["trainer", *compose_words("trainer", OVERRIDES="trainer.total_steps=5 rollout.n=4")], monkeypatch)
    check(["trainer", *compose_words("inference")], monkeypatch)
    shared = "model=qwen3_0.6b rollout.max_prompt_tokens=512 rollout.max_response_tokens=1024"
    server, trainer = (compose_words(service, SHARED=shared) for service in ("inference", "trainer"))
    check(["trainer", *server], monkeypatch)
    check(["trainer", *trainer], monkeypatch)
    assert set(shared.split()) <= set(server) & set(trainer), "the server has the job's model and lengths"


def test_the_services_of_compose_find_one_another():
    file = read_yaml(COMPOSE)
    services = file["services"]
    text = COMPOSE.read_text()
    assert set(re.findall(r"(?:http://|@)(\w+):\d+", text)) <= {*services, "127"}
    trainer, inference = services["trainer"], services["inference"]
    assert trainer["image"] == inference["image"] and trainer["build"]["target"] in ("${TARGET:-cpu}",)
    assert expand(trainer["build"]["target"], {}) in stages()
    assert (COMPOSE.parent / trainer["build"]["context"]).resolve() == ROOT
    assert trainer["environment"][TOKEN] == inference["environment"][TOKEN]
    assert {name for service in services.values() for name in service.get("depends_on", {})} <= set(services)
    bucket = services["bucket"]["entrypoint"][-1].partition("/")[2]
    assert any(word.startswith(f"trainer.ckpt_path=s3://{bucket}/") for word in compose_words("trainer"))


@pytest.mark.parametrize(("token", "status"), [("t0ken", 200), ("t0ken", 503), ("another", 200)])
def test_the_check_of_the_server_of_compose_sends_the_token_and_does_not_show_it(token, status):
    """Every user of the machine can read the command lines of containers."""
    kind, *words = read_yaml(COMPOSE)["services"]["inference"]["healthcheck"]["test"]
    assert kind == "CMD" and "$" not in "".join(words), "Compose or a shell would put the token into the words"

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            is_right = self.headers["Authorization"] == "Bearer t0ken" and self.path == "/health"
            self.send_response(status if is_right else 401)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        words = [sys.executable, *(word.replace("8000", str(server.server_port)) for word in words[1:])]
        done = subprocess.run(words, env={**os.environ, TOKEN: token}, capture_output=True, text=True, timeout=60)
        thread.join()
    assert (done.returncode == 0) == (token == "t0ken" and status == 200), done


def test_the_image_can_be_built_without_the_registry_and_the_index_of_the_dockerfile():
    """Compose gives the build the arguments of the Dockerfile, and the Dockerfile names no frontend to download."""
    given = set(read_yaml(COMPOSE)["services"]["trainer"]["build"]["args"])
    assert given == set(re.findall(r"^ARG (\w+)", IMAGE.read_text(), flags=re.MULTILINE))
    assert not re.search(r"^# *syntax *=", IMAGE.read_text(), flags=re.MULTILINE)


def test_git_does_not_see_the_secrets_of_compose():
    assert "/deploy/.env" in (ROOT / ".gitignore").read_text().splitlines()


def test_trainer_and_server_of_compose_have_a_gpu_each(tmp_path):
    text = re.sub(r"# (deploy: )", r"\1", COMPOSE.read_text())
    (tmp_path / "compose.yaml").write_text(text)
    assert run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", tmp_path / "compose.yaml") == ""
    services = yaml.safe_load(text)["services"]
    chosen = [services[name]["deploy"]["resources"]["reservations"]["devices"] for name in ("inference", "trainer")]
    assert [[device["device_ids"] for device in devices] for devices in chosen] == [[["0"]], [["1"]]]


# KubeRay


def containers(group: dict[str, Any]) -> list[dict[str, Any]]:
    return group["template"]["spec"]["containers"]


def test_the_job_of_kuberay_composes_and_fits_its_cluster(monkeypatch):
    spec = read_yaml(KUBERAY)["spec"]
    words = shlex.split(spec["entrypoint"])
    check(words, monkeypatch)
    given = dict(word.split("=", 1) for word in words if "=" in word)
    assert given["trainer.resume_mode"] == "latest" and given["trainer.ckpt_path"].startswith("s3://")
    assert spec["backoffLimit"] > 0, "a run whose head is lost would end"
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    gpus = int(containers(workers)[0]["resources"]["limits"]["nvidia.com/gpu"]) * workers["replicas"]
    assert int(given["trainer.num_workers"]) + int(given["rollout.num_engines"]) == gpus
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]


def test_the_cluster_of_kuberay_fits_the_image_and_is_closed():
    cluster = read_yaml(KUBERAY)["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    lock = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    assert cluster["rayVersion"] == next(package["version"] for package in lock if package["name"] == "ray")
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        for container in pod["containers"]:
            assert container["image"].endswith("trainer:cuda")
            assert {mount["name"] for mount in container["volumeMounts"]} <= {
                volume["name"] for volume in pod["volumes"]
            }
            assert container["workingDir"] == dict(stages()["cuda"][1])["WORKDIR"]


def model_path(words: list[str]) -> str:
    """The Hub id of the model that overrides choose."""
    (name,) = [word.removeprefix("model=") for word in words if word.startswith("model=")]
    return read_yaml(ROOT / f"conf/model/{name}.yaml")["path"]


def test_every_pod_of_kuberay_has_the_model_at_the_same_path():
    spec = read_yaml(KUBERAY)["spec"]
    wanted = model_path(shlex.split(spec["entrypoint"]))
    cluster = spec["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (download,) = pod["initContainers"]
        assert download["command"] == ["hf", "download", wanted]
        (hub,) = [one["value"] for one in download["env"] if one["name"] == "HF_HOME"]
        for container in (download, *containers(group)):
            assert {"name": "HF_HOME", "value": hub} in container["env"]
            assert hub in [mount["mountPath"] for mount in container["volumeMounts"]], "it would be lost"


def test_the_image_has_the_job_server_and_the_agents_that_kuberay_asks(tmp_path):
    """Without these packages Ray's dashboard takes no jobs, and its agents do not answer the probes of pods."""
    environment = {**os.environ, "UV_CACHE_DIR": str(tmp_path)}
    for extra in ("cpu", "gpu"):
        command = [BIN / "uv", "export", "--quiet", "--offline", "--frozen", f"--extra={extra}", *install.IMAGE]
        words = [*map(str, command), "--no-emit-project", "--no-hashes", "--no-annotate", "--no-header"]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        packages = {line.split("==")[0] for line in done.stdout.splitlines()}
        assert {"aiohttp-cors", "colorful", "opencensus", "opentelemetry-exporter-prometheus", "ray"} <= packages


# SkyPilot

# Writes its name and words, and the variables that matter, to a file of its node. Ray lives until it is
# ended, and the trainer until both nodes are there.
STUB = r"""#!/usr/bin/env bash
echo "${0##*/} $* [$RAY_AUTH_MODE $RAY_AUTH_TOKEN]" >> "$HOME/calls"
case "${0##*/} $*" in
  "ray start --head "*)
    trap 'rm ../head; kill $!; echo ended >> "$HOME/calls"; exit 1' TERM
    sleep 600 & touch ../head; wait ;;
  "ray start "*) while [ -e ../head ]; do sleep 0.1; done; exit 1 ;;
  "ray health-check "*) [ -e ../head ]; exit ;;
  "trainer "*) until grep -q "ray start" ../1/calls; do sleep 0.1; done 2> /dev/null ;;
esac
exit "${STATUS:-0}"
"""


def run_nodes(task: dict[str, Any], directory: Path, status: int = 0) -> tuple[list[int], list[list[str]]]:
    """Run a task on two nodes, whose trainer ends with a status; return what the nodes end with, and their calls."""
    (directory / "bin").mkdir(parents=True)
    for name in ("ray", "trainer"):
        (directory / "bin" / name).write_text(STUB)
        (directory / "bin" / name).chmod(0o755)
    shared = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    env = {**os.environ, **task["envs"], **shared, "RAY_AUTH_TOKEN": "t", "STATUS": str(status)}
    env["PATH"] = f"{directory}/bin:{os.environ['PATH']}"
    nodes = []
    for rank in ("0", "1"):
        home = directory / rank
        (home / ".venv/bin").mkdir(parents=True)
        (home / ".venv/bin/activate").write_text("")
        own = {"HOME": str(home), "SKYPILOT_NODE_RANK": rank}
        nodes.append(subprocess.Popen(["bash", "-c", task["run"]], cwd=home, env=env | own, start_new_session=True))
    try:
        statuses = [node.wait(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
    calls = [(directory / rank / "calls").read_text().splitlines() for rank in ("0", "1")]
    return statuses, [[call for call in node if "health-check" not in call] for node in calls]


def test_the_nodes_of_skypilot_form_a_cluster_and_the_first_one_trains(tmp_path, monkeypatch):
    task = read_yaml(SKYPILOT)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    _, calls = run_nodes(task, tmp_path / "nodes")
    start, train, _ = calls[0]
    assert start == "ray start --head --port=6379 --node-ip-address=10.0.0.1 --block [token t]"
    assert calls[1] == ["ray start --address=10.0.0.1:6379 --node-ip-address=10.0.0.2 --block [token t]"]
    words = shlex.split(train.removesuffix(" [token t]"))
    check(words, monkeypatch)
    given = dict(word.split("=", 1) for word in words if "=" in word)
    assert given["trainer.num_workers"] == given["rollout.num_engines"] == "16"
    assert given["trainer.ckpt_path"] == "s3://BUCKET/runs/one" and given["trainer.resume_mode"] == "latest"


@pytest.mark.parametrize("status", [0, 75])
def test_all_nodes_of_skypilot_end_with_the_run(tmp_path, status):
    """Also after status 0: a job whose nodes do not all end keeps its machines."""
    statuses, calls = run_nodes(read_yaml(SKYPILOT), tmp_path / "nodes", status)
    assert statuses == [status, 0]
    assert calls[0][-1] == "ended", "the Ray of the first node"
    assert not [call for node in calls for call in node if call.startswith("ray stop")], "it would end SkyPilot's Ray"


def test_every_node_of_skypilot_gets_a_python_of_the_project_and_the_model(tmp_path):
    """The Python of its images may be too old. Ranks look for the model where the first node has it."""
    task = read_yaml(SKYPILOT)
    assert task["envs"]["MODEL"] == model_path(task["envs"]["OVERRIDES"].split())
    for path in ("bin/uv", "bin/make", ".venv/bin/hf"):
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        find = '[ "$1 $2" != "python find" ] || echo /the/python'
        program.write_text(f'#!/bin/bash\n{find}\necho "${{0##*/}} $* [$EXTRA $PYTHON]" >> "$HOME/calls"\n')
        program.chmod(0o755)
    env = {**os.environ, **task["envs"], "HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    env |= {"EXTRA": "", "PYTHON": ""}
    subprocess.run(["bash", "-c", task["setup"]], cwd=tmp_path, env=env, check=True, timeout=300)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-2:] == ["make setup [gpu /the/python]", "hf download Qwen/Qwen3-0.6B [ ]"]


def test_the_scripts_of_skypilot_have_no_lint(tmp_path):
    task = read_yaml(SKYPILOT)
    script = tmp_path / "run.sh"
    script.write_text(f"#!/usr/bin/env bash\n{task['setup']}\n{task['run']}")
    assert run_tool("shellcheck", "--severity=warning", script) == ""
    assert not fnmatch.filter(task["envs"], "*TOKEN*"), "secrets are no plain variables"
