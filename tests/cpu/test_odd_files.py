"""Files of odd shape: whatever a run or a checkpoint holds, the answer is a sentence or an older checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.runs import OpenRun
from trainer.checkpoint.__main__ import main as checkpoint_tool
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import DamagedError, verify
from trainer.checkpoint.parts import config_part, config_yaml, json_part
from trainer.config import Config
from trainer.data.ledger import Ledger
from trainer.documents import is_count, parse_yaml
from trainer.durable import digest_bytes
from trainer.errors import UserError
from trainer.metrics.report import write_report
from trainer.metrics.tracker import read_metrics
from trainer.parallel.rng import capture_rng, restore_rng, rng_as_text, rng_from_text

DEEP_JSON = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
DEEP_YAML = "a: " + "[" * 5_000 + "]" * 5_000
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
    run.parts = [
        config_part(cfg),
        json_part("trainer_state", lambda: state, state.update, {"step": int}),
        json_part("data", lambda: {"position": 1}, lambda _: None),
        json_part("models", lambda: {"weights": [1.0]}, lambda _: None),
    ]
    return run


@pytest.fixture(scope="module")
def real_run(tmp_path_factory) -> Path:
    """A run directory with two checkpoints and the metrics of two steps."""
    root = tmp_path_factory.mktemp("run")
    state: dict = {}
    with open_run(config(root), state) as run:
        for step in (1, 2):
            state["step"] = step
            with open(root / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "reward/mean": step / 2}) + "\n")
            run.save(step, roles=["policy"])
    return root


@pytest.fixture
def run_dir(real_run, tmp_path) -> Path:
    return shutil.copytree(real_run, tmp_path / "run")


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


# ----------------------------------------------------------------------------------------------------------
# The manifest

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([10**30, -(10**30), 2**63]), st.text(max_size=4),
    st.sampled_from([float("inf"), float("nan"), -0.5, 1e300, "../x", "\x1b[2J", "\ud800", "global_step_1", "\0"]),
    st.lists(st.none() | st.integers(0, 2), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(0, 1)),
)  # fmt: skip


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value in nested lists and objects."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for name, child in children for place in places(child, (*path, name))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_manifest_of_any_shape_is_valid_or_damaged(real_run, tmp_path, capsys, caplog, data):
    run_dir = tmp_path / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(real_run, run_dir)
    checkpoint = run_dir / "checkpoints/global_step_2"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["parent"] = data.draw(st.sampled_from([None, {"forked_from": "/x", "step": 1, "manifest": "0"}]))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from(places(manifest) or [("x",)]))
        holder = manifest
        for name in where[:-1]:
            holder = holder[name]
        if data.draw(st.booleans()):
            holder[where[-1]] = data.draw(VALUES)
        else:
            del holder[where[-1]]
    if is_count(manifest.get("metrics_from")):  # another number is of the right shape, and the lines would be missing
        manifest["metrics_from"] = None
    rewrite(checkpoint, manifest)
    valid = {}
    for level in ("off", "size", "hash"):
        try:
            valid[level] = verify(str(checkpoint), level) is not None
        except DamagedError as error:
            valid[level] = False
            assert str(checkpoint) in str(error)
    for arguments in (["ls", str(run_dir)], ["verify", str(run_dir), "--json"], ["show", str(checkpoint)]):
        assert checkpoint_tool(arguments) in (0, 1)
    assert "\x1b" not in capsys.readouterr().out
    state: dict = {}
    caplog.clear()
    with open_run(config(run_dir), state) as run:
        assert run.resume.checkpoint.step == (2 if valid["hash"] else 1)
        assert ("skipped a damaged checkpoint" in caplog.text) != valid["hash"]
        try:
            run.load()
        except UserError as error:
            assert valid["hash"] and "part" not in str(error), error


@pytest.mark.parametrize("content", ODD_JSON, ids=range(len(ODD_JSON)))
def test_a_manifest_that_is_no_manifest_falls_back(run_dir, content):
    (run_dir / "checkpoints/global_step_2/manifest.json").write_bytes(content)
    assert resume(run_dir) == 1


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "endless"])
def test_a_manifest_that_is_no_regular_file_falls_back(run_dir, kind):
    path = run_dir / "checkpoints/global_step_2/manifest.json"
    path.rename(run_dir / "kept")
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "endless" else run_dir / "kept")
    assert resume(run_dir) == 1


def test_a_manifest_without_files_is_not_valid(run_dir):
    checkpoint = run_dir / "checkpoints/global_step_2"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    rewrite(checkpoint, manifest | {"files": []})
    with pytest.raises(DamagedError, match="names no file"):
        verify(str(checkpoint), "off")
    assert resume(run_dir) == 1


def test_a_manifest_without_any_of_its_files_falls_back(run_dir):
    for name in os.listdir(run_dir / "checkpoints/global_step_2"):
        if name != "manifest.json":
            (run_dir / "checkpoints/global_step_2" / name).unlink()
    assert resume(run_dir) == 1


def test_a_checkpoint_of_a_step_that_no_run_reaches_is_compared_with_its_lines_at_once(run_dir):
    name, step = "global_step_900000000000000000", 900_000_000_000_000_000
    checkpoint = (run_dir / "checkpoints/global_step_2").rename(run_dir / "checkpoints" / name)
    rewrite(checkpoint, json.loads((checkpoint / "manifest.json").read_text()) | {"step": step, "metrics_from": 1})
    assert "metrics.jsonl: has no line for step 3" in resume(run_dir)


@pytest.mark.parametrize(
    "name", ["global_step_٢", "global_step_02", "global_step_9999999999999999999999", "global_step_2\n"]
)
def test_a_directory_with_almost_the_name_of_a_checkpoint_is_none(run_dir, name):
    shutil.copytree(run_dir / "checkpoints/global_step_2", run_dir / "checkpoints" / name)
    assert resume(run_dir) == 2


# ----------------------------------------------------------------------------------------------------------
# What the manifest names


@pytest.mark.parametrize("content", ODD_JSON, ids=range(len(ODD_JSON)))
@pytest.mark.parametrize("name", ["trainer_state.json", "data.json"])
def test_a_state_of_another_shape_is_refused(run_dir, name, content, capsys):
    checkpoint = run_dir / "checkpoints/global_step_2"
    replace(checkpoint, name, content)
    verify(str(checkpoint))
    result = resume(run_dir)
    if name == "trainer_state.json":
        assert isinstance(result, str) and "global_step_2: trainer_state.json is damaged" in result
    for arguments in (["show", str(checkpoint)], ["show", "--json", str(checkpoint)]):
        assert checkpoint_tool(arguments) in (0, 1)
    assert checkpoint_tool(["diff", str(run_dir / "checkpoints/global_step_1"), str(checkpoint)]) in (0, 1)


@pytest.mark.parametrize(
    "text",
    ["", "text", "- 1", "3", "a: 1", "trainer: text", "algorithm: null", "a: [", "a: !!python/object:os.system x",
     "a: !!timestamp x", "a: 2020-99-99", "a: !!int x", "a: !!bool x", "a: &x {b: *x}", "a: &x {}\nb: *x", DEEP_YAML,
     "\0", "? [1]\n: 2", "a: !!binary x", "a: !!float ''", "%YAML 9"],
)  # fmt: skip
def test_a_config_that_is_no_mapping_of_sections_is_refused(run_dir, text, capsys):
    checkpoint = run_dir / "checkpoints/global_step_2"
    replace(checkpoint, "config.yaml", text.encode())
    assert "global_step_2: config.yaml is damaged" in resume(run_dir)
    assert checkpoint_tool(["diff", str(run_dir / "checkpoints/global_step_1"), str(checkpoint)]) == 1
    assert "config.yaml is damaged" in capsys.readouterr().err


def test_configs_that_lack_keys_are_compared(run_dir, capsys):
    checkpoint = run_dir / "checkpoints/global_step_2"
    replace(checkpoint, "config.yaml", b"trainer: {policy: {optimizer: {schedule_steps: 3}}}")
    assert checkpoint_tool(["diff", str(run_dir / "checkpoints/global_step_1"), str(checkpoint)]) == 0


def test_a_checkpoint_with_the_old_names_of_keys_resumes(run_dir, capsys):
    first, second = (run_dir / f"checkpoints/global_step_{step}" for step in (1, 2))
    for checkpoint, names in ((first, ("colocate_roles", "share_gpus")), (second, ("colocate", "colocate"))):
        saved = yaml.safe_load((checkpoint / "config.yaml").read_bytes())
        del saved["trainer"]["colocate_roles"], saved["rollout"]["share_gpus"]
        saved["trainer"][names[0]], saved["rollout"][names[1]] = False, True
        replace(checkpoint, "config.yaml", yaml.safe_dump(saved).encode())
    checkpoint_tool(["diff", str(first), str(second)])
    assert capsys.readouterr().out.startswith("config:\ncounters:"), "the two configs differ in nothing"
    assert resume(run_dir) == 2


def test_the_config_of_a_run_is_read_as_it_was_written():
    assert parse_yaml(config_yaml(Config())) == yaml.safe_load(config_yaml(Config()))


@pytest.mark.parametrize(
    "change",
    [{"epoch": "1"}, {"position": -1}, {"position": 10**9}, {"position": None}, {"epoch": 2**70}, {"curriculum": 3}],
)
def test_a_place_in_the_data_that_cannot_be_is_refused(change):
    ledger = Ledger([range(4)], 1, "prompts", lambda: "content")
    state = ledger.state_dict()
    place = state["places"][0] | {name: value for name, value in change.items() if name != "curriculum"}
    changed = {**state, "places": [place], **{name: value for name, value in change.items() if name == "curriculum"}}
    with pytest.raises(UserError, match="place in the data is damaged|data.curriculum"):
        ledger.load_state_dict(changed)


def test_states_of_random_generators_that_cannot_be_are_refused():
    good = rng_as_text(capture_rng())
    restore_rng(rng_from_text(good))
    for bad in ({}, good | {"torch": ""}, good | {"torch": "AAAA"}, good | {"others": "e30="}, good | {"others": "x"}):
        with pytest.raises(UserError, match="random generators are damaged"):
            restore_rng(rng_from_text(bad))


# ----------------------------------------------------------------------------------------------------------
# The run directory


@pytest.mark.parametrize("content", [*ODD_JSON, None], ids=range(len(ODD_JSON) + 1))
def test_a_lineage_that_is_none_is_refused(run_dir, content):
    lineage = run_dir / "lineage.json"
    if content is None:
        lineage.mkdir()
    else:
        lineage.write_bytes(content)
    assert f"{lineage}: is damaged" in resume(run_dir)


@pytest.mark.parametrize("content", ODD_JSON, ids=range(len(ODD_JSON)))
def test_a_lock_that_is_garbage_is_taken_over_when_it_is_old(tmp_path, content):
    """Nobody keeps its heartbeat going."""
    lock = RunLock(str(tmp_path), 0.2)
    Path(lock.path).write_bytes(content)
    assert "took over the run directory from an unknown process" in lock.acquire()
    lock.release()


@pytest.mark.parametrize("name", [".lock", ".lock.guard"])
def test_a_lock_that_is_a_directory_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="the lock cannot be taken.*remove that path"):
        RunLock(str(tmp_path), 60).acquire()


@pytest.mark.parametrize(
    "line",
    [DEEP_JSON, b'{"step": "1"}', b'{"step": 1e3}', b'{"step": true}', b'{"step": 5, "a": "b"}',
     b'{"step": 5, "a": []}', b'{"step": -1}', b'{"step": 5, "a": ' + b"9" * 400 + b"}",
     b'{"step": 5, "a": Infinity}', b"\xff"],
    ids=range(10),
)  # fmt: skip
def test_lines_of_metrics_of_another_shape_are_refused(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "reward/mean": 0.5}\n' + line + b"\n" + b'{"step": 6}\n')
    for read in (lambda: read_metrics(str(path)), lambda: write_report(str(tmp_path))):
        with pytest.raises(UserError, match=r"metrics.jsonl:2 has no JSON object with a step"):
            read()
