"""Runs whose files are of any shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.runs import OpenRun
from trainer.checkpoint.components import config_component, json_component
from trainer.config import Config
from trainer.errors import UserError
from trainer.files.atomic_io import digest_bytes

DEEP_JSON = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
ODD_JSON = [
    b"", b"\x00", b"{", b"null", b"3", b'"text"', b"[]", b"{}", b"[[]]", b'{"step": "2"}', b'{"step": 1e400}',
    b"\xff\xfe", b'{"step": ' + b"9" * 5000 + b"}", DEEP_JSON, DEEP_JSON[:200_000],
]  # fmt: skip


def config(root: Path, **trainer) -> Config:
    cfg = Config()
    cfg.trainer.run_dir, cfg.trainer.ckpt_path = str(root), str(root / "checkpoints")
    cfg.trainer.resume_mode = "latest"
    for name, value in trainer.items():
        setattr(cfg.trainer, name, value)
    return cfg


def open_run(cfg: Config, state: dict) -> OpenRun:
    run = OpenRun(cfg, state)
    run.components = [
        config_component(cfg),
        json_component("trainer_state", lambda: state, state.update, {"step": int}),
        json_component("data", lambda: {"position": 1}, lambda _: None),
        json_component("models", lambda: {"weights": [1.0]}, lambda _: None),
    ]
    return run


def make_run(root: Path) -> None:
    """Make a run directory with two checkpoints and the metrics of two steps."""
    state: dict = {}
    with open_run(config(root), state) as run:
        for step in (1, 2):
            state["step"] = step
            with open(root / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "reward/mean": step / 2}) + "\n")
            run.save(step, roles=["policy"])


def rewrite(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest whose hash of itself is right, whatever it says."""
    body = {name: value for name, value in manifest.items() if name != "self"}
    own = digest_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    (checkpoint / "manifest.json").write_text(json.dumps({**body, "self": own}))


def replace(checkpoint: Path, name: str, data: bytes) -> None:
    """Replace a file of a checkpoint, and its size and hash in the manifest."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / name).write_bytes(data)
    for entry in manifest["files"]:
        if entry["path"] == name:
            entry |= {"bytes": len(data), "hash": digest_bytes(data)}
    rewrite(checkpoint, manifest)


def resume(root: Path) -> int | str:
    """The step that a run resumes from, or the sentence with which it refuses."""
    state: dict = {}
    try:
        with open_run(config(root), state) as run:
            run.load()
    except UserError as error:
        assert str(error) and "\n" not in str(error)
        return str(error)
    return state["step"]
