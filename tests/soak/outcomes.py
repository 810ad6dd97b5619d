"""What is left of a finished job, and in what two jobs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.soak.kinds import STEPS, Kind
from tests.support.jobs import comparable, metrics
from tests.support.runs import rollouts_of
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.store import open_store
from trainer.files.atomic_io import digest_bytes

_OWN = ("config.yaml", "trainer_state.json", "carried.json")
"""Files of a checkpoint that hold paths, times or names of the run. Of `trainer_state.json` a part is compared."""
Outcome = dict[str, Any]


def outcome_of(kind: Kind, run: Path, root: str) -> Outcome:
    """Return all that a job has made and that must not depend on disturbances, by name.

    Args:
        root: directory or URL of its checkpoints.

    Raises:
        Exception: a file is missing or damaged.
    """
    found: Outcome = {"steps in metrics.jsonl": [row["step"] for row in metrics(run)]}
    store = open_store(root)
    for step in store.steps():
        manifests.verify(store.path(step), "hash")
    found["leftovers of interrupted saves"] = sorted(store.orphans())
    if not kind.is_exact:
        uids = {step: sorted(row["uid"] for row in rollouts_of(run, step)) for step in range(1, STEPS + 1)}
        if kind.in_order:
            return found | {f"episodes of step {step}": of_step for step, of_step in uids.items()}
        all_uids = [uid for of_step in uids.values() for uid in of_step]
        return found | {
            "episodes of each step": [len(of_step) for of_step in uids.values()],
            "episodes that are trained twice": sorted({uid for uid in all_uids if all_uids.count(uid) > 1}),
        }
    found |= {f"metrics of step {row['step']}": row for row in comparable(metrics(run))}
    files = [*run.glob("rollouts/*"), *run.glob("validation/*"), *run.glob("exports/**/*.safetensors")]
    found |= {str(path.relative_to(run)): digest_bytes(path.read_bytes()) for path in files}
    last = manifests.read(store.path(STEPS))
    for entry in last.entries:
        if entry.path not in _OWN and not entry.path.endswith(".metadata"):
            found[f"the last checkpoint's {entry.path}"] = entry.hash
    state = manifests.read_object(last, "trainer_state.json")
    found["the last checkpoint's state"] = {name: state.get(name) for name in ("step", "counters", "best")}
    return found


def difference(found: Outcome, expected: Outcome) -> str:
    """Say in what two outcomes differ; empty if they are the same."""
    if missing := sorted(expected.keys() - found.keys()):
        return f"missing: {', '.join(missing)}"
    if more := sorted(found.keys() - expected.keys()):
        return f"not there in the uninterrupted run: {', '.join(more)}"
    for name, value in expected.items():
        if found[name] == value:
            continue
        if isinstance(value, dict):
            keys = [key for key in {**value, **found[name]} if value.get(key) != found[name].get(key)]
            return f"{name}: " + ", ".join(f"{key} is {found[name].get(key)!r}, not {value.get(key)!r}" for key in keys)
        return f"{name}: is {found[name]!r}, not {value!r}"
    return ""
