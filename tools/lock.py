"""Re-resolve the dependencies and write a uv.lock that names no host.

uv records where it found each file. Here a package index is the user's own business, so every address is cut
down to the bare file name: the hashes stay, and any mirror, or a directory `wheels/`, can serve the files.
Arguments go to `uv lock`, for example `--upgrade` or `--upgrade-package ray`; without any, pins that fit
stay.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def without_hosts(lock: str) -> str:
    """The text of a lock file, with `wheels` for every index and `path = "<file name>"` for every address."""
    lock = re.sub(r'registry = "[a-z]+://[^"]*"', 'registry = "wheels"', lock)
    return re.sub(r'url = "[a-z]+://[^"]*/([^/"]+)"', r'path = "\1"', lock)


def main() -> None:
    """Lock, strip, and ask uv whether it still agrees."""
    path = ROOT / "uv.lock"
    subprocess.run(["uv", "lock", *sys.argv[1:]], cwd=ROOT, check=True)
    before = path.read_text()
    text = without_hosts(before)
    if "://" in text:
        raise SystemExit("uv.lock still holds an address: " + re.search(r'[^"]*://[^"]*', text).group())
    if text != before:  # an untouched file keeps `make setup` quiet
        path.write_text(text)
    subprocess.run(["uv", "lock", "--check", "--offline"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
