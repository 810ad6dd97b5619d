"""The recipes for KubeRay and SkyPilot as their tools read them: every key is known and has the right type."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.packages import install, make_venv
from tests.support.recipes import KUBERAY, ROOT, SKYPILOT, read_yaml

# KubeRay


def closed(**properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has all of these keys and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
NAME = {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,40}[a-z0-9]$"}
GROUP = {
    "rayStartParams": {"type": "object", "additionalProperties": TEXT},
    "template": closed(spec={"type": "object"}),
}
RAY_CLUSTER = closed(
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
    authOptions=closed(mode={"enum": ["token", "disabled"]}),
    headGroupSpec=closed(**GROUP),
    workerGroupSpecs={
        "type": "array",
        "items": closed(groupName=NAME, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT, **GROUP),
    },
)
RAY_JOB = closed(
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=closed(name=NAME),
    spec=closed(
        entrypoint=TEXT,
        backoffLimit=COUNT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=RAY_CLUSTER,
    ),
)
"""The keys of a RayJob that the recipe has. Before you add one, look it up in KubeRay's definition of RayJob."""
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")


def problems(job: dict[str, Any]) -> list[str]:
    """What does not fit `RAY_JOB`."""
    return [error.message for error in jsonschema.Draft202012Validator(RAY_JOB).iter_errors(job)]


def test_the_job_of_kuberay_has_the_keys_of_a_ray_job():
    assert problems(read_yaml(KUBERAY)) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("backoffLimit", "backofLimit"),
        ("backoffLimit: 20", 'backoffLimit: "20"'),
        ("rayVersion: 2.60.0", "rayVersion: 2.6"),
        ("authOptions: {mode: token}", "authOptions: {mode: tokens}"),
        ("maxReplicas", "maximumReplicas"),
        ('num-cpus: "0"', "num-cpus: 0"),
    ],
)
def test_a_wrong_line_in_the_job_of_kuberay_does_not_fit(right, wrong):
    text = KUBERAY.read_text()
    assert right in text
    assert problems(yaml.safe_load(text.replace(right, wrong)))


def pods() -> list[dict[str, Any]]:
    """A pod of the head and one of each group of workers."""
    cluster = read_yaml(KUBERAY)["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    named = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
    return [copy.deepcopy({**named, **group["template"]}) for group in groups]


@pytest.fixture(scope="module")
def kubernetes_schemas(tmp_path_factory) -> Path:
    """A folder with kubernetes-validate, which holds the schemas of Kubernetes."""
    path = tmp_path_factory.mktemp("kubernetes")
    install("kubernetes-validate", "--target", path, "kubernetes-validate==1.37.0", "importlib-resources==7.1.0")
    return path


def validate_pods(schemas: Path, found: list[dict[str, Any]], directory: Path) -> str:
    """Return what kubernetes-validate says of pods; nothing if they fit."""
    file = directory / "pods.yaml"
    file.write_text(yaml.safe_dump_all(found))
    words = [sys.executable, "-m", "kubernetes_validate", "--strict", "--quiet", "-k", "1.37.0", file]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(schemas)}, capture_output=True, text=True)
    assert bool(done.returncode) == bool(done.stdout), done.stderr
    return done.stdout


def test_the_pods_of_kuberay_fit_the_schema_of_kubernetes(kubernetes_schemas, tmp_path):
    assert validate_pods(kubernetes_schemas, pods(), tmp_path) == ""
    for pod in pods():
        resources = [container.get("resources", {}) for container in pod["spec"]["containers"]]
        amounts = [value for one in resources for kind in one.values() for value in kind.values()]
        amounts += [volume["emptyDir"].get("sizeLimit", "1") for volume in pod["spec"]["volumes"]]
        assert len(amounts) > 3 and all(QUANTITY.fullmatch(amount) for amount in amounts), amounts


def test_a_wrong_line_in_a_pod_of_kuberay_does_not_fit(kubernetes_schemas, tmp_path):
    def said(pod: dict[str, Any]) -> str:
        return validate_pods(kubernetes_schemas, [pod], tmp_path)

    _, worker = pods()
    worker["spec"]["containers"][0]["resources"]["limit"] = {}
    assert "'limit' was unexpected" in said(worker)
    _, worker = pods()
    worker["spec"]["volumes"][1]["emptyDir"]["sizelimit"] = "64Gi"
    assert "'sizelimit' was unexpected" in said(worker)
    _, worker = pods()
    worker["spec"]["terminationGracePeriodSeconds"] = "60"
    assert "terminationGracePeriodSeconds" in said(worker)


# SkyPilot

# Reads a command line as `sky jobs launch` does, for each file that it is given, and the file as the server of SkyPilot
# does, which knows all keys; prints what it has read, or the error.
PARSER = """
import json, sys
import yaml
from sky.client.cli.command import jobs_launch
from sky.server import plugins
from sky.task import Task
from sky.utils.registry import JOBS_RECOVERY_STRATEGY_REGISTRY

def read(path, words):
    options = jobs_launch.make_context("launch", [path, *words]).params
    with open(path) as file:
        task = Task.from_yaml_config(yaml.safe_load(file), options["env"], options["secret"])
    task.validate_name()
    task.validate_run()
    task.expand_and_validate_workdir()
    task.expand_and_validate_file_mounts()
    (resources,) = task.resources
    assert JOBS_RECOVERY_STRATEGY_REGISTRY.from_str(resources.job_recovery["strategy"])
    secrets = {name: secret.get_secret_value() for name, secret in task.secrets.items()}
    return {**task.to_yaml_config(), "secrets": secrets}

plugins.load_plugins(plugins.ExtensionContext())
found = {}
for path in json.loads(sys.argv[1]):
    try:
        found[path] = read(path, sys.argv[2:])
    except ValueError as error:
        found[path] = str(error)
print("\\n" + json.dumps(found))
"""
WRONG_TASKS = {
    "use_spot:": "use_spots:",
    "EAGER_NEXT_REGION": "EAGER_NEXT_REGIONS",
    "max_restarts_on_errors:": "max_restarts:",
    "[75]": "[seventy-five]",
    "num_nodes: 2": "num_nodes: two",
    "workdir: .": "workdir: missing",
    "envs:": "env:",
    "BUCKET: ": "BUCKET-URL: ",
}
"""By what the recipe says: what a wrong one says there. SkyPilot names the last word."""


@pytest.fixture(scope="module")
def sky_tasks(tmp_path_factory) -> dict[str, Any]:
    """What SkyPilot reads in the recipe, and in each wrong one, when the command of the page launches it."""
    directory = tmp_path_factory.mktemp("sky")
    python = make_venv(directory / "venv", "SkyPilot", Path(__file__).parents[2] / "support/skypilot-requirements.txt")
    (command,) = re.findall(r"^sky jobs launch .*", (ROOT / "docs/deploy.md").read_text(), flags=re.MULTILINE)
    recipe, *words = shlex.split(re.sub(r"\$\(.*?\)", "TOKEN", command))[3:]
    names = {recipe: recipe}
    for number, (right, wrong) in enumerate(WRONG_TASKS.items()):
        file = directory / f"{number}.yaml"
        file.write_text(SKYPILOT.read_text().replace(right, wrong))
        names[str(file)] = wrong
    env = {"HOME": str(directory), "PATH": os.environ["PATH"], "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    env["IS_SKYPILOT_SERVER"] = "true"
    script = [python, "-c", PARSER, json.dumps(list(names)), *words]
    done = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {names[path]: task for path, task in found.items()}


def test_skypilot_reads_in_the_recipe_what_it_says(sky_tasks):
    task, text = sky_tasks["deploy/skypilot.yaml"], read_yaml(SKYPILOT)
    assert task["resources"] == {
        "infra": "aws",
        "accelerators": {"H100": 8},
        "image_id": {"null": "skypilot:custom-gpu-ubuntu-cuda13"},
        "use_spot": True,
        "disk_size": 512,
        "job_recovery": {
            "strategy": "EAGER_NEXT_REGION",
            "max_restarts_on_errors": 0,
            "recover_on_exit_codes": [75],
        },
    }
    assert task["num_nodes"] == 2 and task["workdir"] == str(ROOT) and not task["file_mounts"]
    assert task["envs"] == text["envs"] and task["secrets"] == {"RAY_AUTH_TOKEN": "TOKEN"}
    for name in ("setup", "run"):
        assert task[name] == text[name]
        subprocess.run(["bash", "-n", "-c", task[name]], check=True, timeout=60)


@pytest.mark.parametrize(("right", "wrong"), WRONG_TASKS.items())
def test_skypilot_refuses_a_wrong_line(sky_tasks, right, wrong):
    assert right in SKYPILOT.read_text()
    error = sky_tasks[wrong]
    assert isinstance(error, str), "it was read"
    assert wrong.split()[-1].strip("[]:") in error
