#!/usr/bin/env bash
# transformers 5.19.0. Its import reads every Python file below transformers/models to find their `__all__` and what they
# require: once for the package transformers, and again for transformers.models, whose names differ in a prefix alone.
# The result of one scan depends on nothing but the installed files. It takes a third of a second of CPU time.
# Fails if that changes.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT; cd "$dir"
python3 -m venv venv && venv/bin/pip install -q transformers==5.19.0
cat > scans.py <<'PY'
import collections
import os

real, scans = os.scandir, collections.Counter()


def scandir(path="."):
    scans[str(path)] += 1
    return real(path)


os.scandir = scandir
from transformers import AutoConfig  # noqa: E402

models = {path: count for path, count in scans.items() if os.sep + os.path.join("transformers", "models") in path}
print(AutoConfig.__name__, len(models), "directories, each scanned at least", min(models.values()), "times")
PY
venv/bin/python scans.py | tee out
grep -q "at least 2 times" out
echo "as described"
