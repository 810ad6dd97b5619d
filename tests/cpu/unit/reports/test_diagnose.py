"""The lines of `trainer diagnose` about a run in each of its possible states."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import OpenRun, configured
from trainer.checkpoint.lock import NAME as LOCK_NAME
from trainer.errors import FailureSource, UserError, WorkerError, set_failure_source
from trainer.process.failures import INCIDENTS, describe
from trainer.process.signals import CONTINUES
from trainer.reports.diagnose import main
from trainer.run.run_metadata import record_start

COMMAND = ["/usr/bin/python3", "-m", "trainer", "train", "trainer.run_name=a b", "trainer.total_steps=9"]


def said(run: Path, capsys, status: int = 0) -> list[str]:
    assert main([str(run)]) == status
    output = capsys.readouterr()
    return (output.out + output.err).splitlines()


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run of 9 steps that has logged four, saved one and restarted its ranks once."""
    monkeypatch.setattr(sys, "orig_argv", COMMAND)
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "bin/trainer"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m trainer "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    directory = tmp_path / "run"
    cfg = configured(directory, total_steps=9)
    with OpenRun(cfg, {"step": 2}) as held:
        record_start(str(directory), cfg)
        held.save(2)
        error = WorkerError("rank 1 died", "restart the job", "killed")
        INCIDENTS.record(describe(error, 3, "restarted the ranks", 12.0))
    rows = [{"step": step, "time/step": 1.0} for step in (1, 2, 3, 4)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "log.txt").write_text("2026-11-22 04:00:00 error: rank 1 died; restart the job\n")
    return directory


def test_a_run_that_failed(run, capsys, tmp_path):
    lines = said(run, capsys)
    assert lines[0].endswith("step 4 of 9 is logged")
    assert lines[1] == "ended      error: rank 1 died; restart the job"
    assert lines[2] == "incidents  1 infrastructure; they cost 12 s"
    assert "step 3  driver" in lines[3] and "restarted the ranks; rank 1 died" in lines[3]
    assert f"{run}/checkpoints/global_step_2, saved at" in lines[5]
    command = "trainer train 'trainer.run_name=a b' trainer.total_steps=9 trainer.resume_mode=latest"
    assert lines[-1] == f"next       cd {tmp_path} && {command}"


def test_what_the_metrics_say_leads_to_the_page_of_remedies(run, capsys):
    rows = [{"step": step, "response_length/clip_ratio": 0.9} for step in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (line,) = [line for line in said(run, capsys) if line.startswith("advice")]
    assert line.startswith("advice     since step 1, response_length/clip_ratio is above 0.5: ")
    assert line.endswith("(more: docs/troubleshooting.md)")


def lose(run: Path, *roles_and_nodes: tuple[str, str]) -> None:
    """Record a lost process for each name and node."""
    INCIDENTS.open(str(run))
    for name, node in roles_and_nodes:
        error = WorkerError(f"{name} died", cause="killed")
        set_failure_source(error, FailureSource(name, node))
        INCIDENTS.record(describe(error, 3, "restarted the ranks", 1.0))
    INCIDENTS.close()


@pytest.mark.parametrize(("deadline", "kept"), [("2020-01-01T00:00:00", False), ("2999-01-01T00:00:00", True)])
def test_a_deadline_that_has_passed_is_left_out_of_the_next_command(run, capsys, deadline, kept):
    start = json.loads((run / "starts.jsonl").read_text())
    start["command"].append(f"trainer.deadline={deadline}")
    start["config"]["trainer"]["deadline"] = deadline
    (run / "starts.jsonl").write_text(json.dumps(start) + "\n")
    assert ("trainer.deadline" in said(run, capsys)[-1]) == kept


@pytest.mark.parametrize("address, drains", [("10.0.0.1:6379", True), ("processes", False), (None, False)])
def test_nodes_with_several_incidents_are_named_and_drained_by_the_next_command(run, capsys, address, drains):
    lose(run, ("rank 1", "10.0.0.7"), ("engine 0", "10.0.0.8"), ("rank 0", "10.0.0.8"), ("critic rank 1", "10.0.0.7"))
    assert "bad nodes" not in "\n".join(said(run, capsys)), "a node takes a rank and an engine with it"
    lose(run, ("rank 3", "10.0.0.7"), ("engine 1", "10.0.0.9"), ("engine 2", "10.0.0.9"))
    cfg = configured(run, total_steps=9, ray_address=address, excluded_nodes=["10.0.0.2"])
    record_start(str(run), cfg)
    lines = said(run, capsys)
    assert lines[-2] == "bad nodes  10.0.0.7 (2 incidents), 10.0.0.9 (2 incidents)"
    assert lines[-1].endswith(" 'trainer.excluded_nodes=[10.0.0.2,10.0.0.7,10.0.0.9]'") == drains


def test_a_node_with_a_gpu_error_is_bad_at_once(run, capsys):
    INCIDENTS.open(str(run))
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    set_failure_source(error, FailureSource("rank 1", "10.0.0.7"))
    INCIDENTS.record(describe(error, 3, "restarted the ranks", 1.0))
    INCIDENTS.close()
    assert said(run, capsys)[-2] == "bad nodes  10.0.0.7 (GPU error)"


def test_the_place_of_the_report_is_not_how_a_run_ended(run, capsys):
    with (run / "log.txt").open("a") as file:
        file.write("2026-11-22 04:00:00 finished step 9 of 9\n2026-11-22 04:00:01 report: run/report.png\n")
    assert said(run, capsys)[1] == "ended      finished step 9 of 9"


def test_a_later_start_that_was_refused_is_not_how_a_run_ended(run, tmp_path, capsys):
    (run / "metrics.jsonl").touch()
    with pytest.raises(UserError) as refused, OpenRun(configured(run)):
        pass
    with (run / "log.txt").open("a") as file:
        file.write("2026-11-22 04:00:00 stopped after step 9\n2026-11-22 04:00:01 importing torch …\n")
        file.write(f"2026-11-22 04:00:02 error: {refused.value}\n")
    assert said(run, capsys)[1] == "ended      stopped after step 9"


def test_a_damaged_checkpoint_is_not_good(run, capsys):
    (run / "checkpoints/global_step_2/trainer_state.json").write_text("{}")
    text = "\n".join(said(run, capsys))
    assert "global_step_2: DAMAGED (trainer_state.json has 2 bytes" in text and "initial weights" not in text


def test_what_is_not_uploaded_is_good_where_it_can_be_read(run, capsys, tmp_path):
    """The last start had a local directory, in which step 4 is. Then that is lost, as with its machine."""
    local = tmp_path / "local"
    with OpenRun(configured(tmp_path / "other", ckpt_path=str(local)), {"step": 4}) as other:
        other.save(4)
    starts = run / "starts.jsonl"
    start = json.loads(starts.read_text())
    start["config"]["trainer"]["ckpt_cache_dir"], start["host"] = "local", "node7"
    with starts.open("a") as file:
        file.write(json.dumps(start) + "\n")
    lines = said(run, capsys)
    above = lines.index("known good") + 2
    assert f"{local}/global_step_4, saved at" in lines[above - 1] and lines[above - 1].endswith("; not uploaded")
    assert f"{run}/checkpoints/global_step_2, saved at" in lines[above]
    shutil.rmtree(local)
    lines = said(run, capsys)
    assert f"{run}/checkpoints/global_step_2, saved at" in lines[above - 1]
    assert lines[above] == f"           checkpoints that were not uploaded may be in {local} on node7"


def test_a_run_whose_driver_was_killed_and_a_run_that_runs(run, capsys):
    sleeper = subprocess.Popen(["sleep", "60"])
    with OpenRun(configured(run, total_steps=9, resume_mode="latest")):
        owner = json.loads((run / LOCK_NAME).read_text())
        lines = said(run, capsys)
        assert lines[1].startswith(f"now        it is running: process {os.getpid()} on ")
        assert lines[-1].startswith("next       nothing: wait for it")
    sleeper.kill()
    sleeper.wait()
    (run / LOCK_NAME).write_text(json.dumps(owner | {"pid": sleeper.pid}))
    lines = said(run, capsys)
    assert (
        lines[1].startswith(f"ended      without a last message: process {sleeper.pid} on ")
        and "was killed, perhaps because memory ran out" in lines[1]
    )
    with open(run / "log.txt", "a") as file:
        file.write(f"2026-11-23 01:02:03 stopped by a third signal; {CONTINUES}\n")
    assert said(run, capsys)[1] == f"ended      stopped by a third signal; {CONTINUES}"
    with OpenRun(configured(run, total_steps=9, resume_mode="latest")):
        pass
    last = said(run, capsys)[4]
    assert "driver" in last and "killed process (infrastructure); started again with the same command" in last


def test_a_run_that_is_finished(run, capsys):
    with OpenRun(configured(run, total_steps=9, resume_mode="latest"), {"step": 9}) as held:
        held.save(9)
    assert said(run, capsys)[-1] == "next       nothing: the last step is saved"


def test_a_cut_file_in_the_last_checkpoint_is_found_and_the_restart_is_foretold(run, capsys):
    with OpenRun(configured(run, total_steps=9, resume_mode="latest"), {"step": 9}) as held:
        held.save(9)
    (run / "checkpoints/global_step_9/trainer_state.json").write_text("{}")
    lines = said(run, capsys)
    text = "\n".join(lines)
    assert "global_step_9: DAMAGED (trainer_state.json has 2 bytes" in text
    assert re.search(
        "global_step_2, saved at .* \\(sizes agree; `trainer checkpoint verify .*global_step_2` reads", text
    )
    assert lines[-1].startswith("next       cd ") and lines[-1].endswith("trainer.resume_mode=latest")
    (run / "checkpoints/global_step_2/trainer_state.json").write_text("{}")
    lines = said(run, capsys)
    assert lines[-1].startswith("next       a restart is refused: no checkpoint is valid; repair one, ")


def test_the_next_command_works_as_it_is_printed(run, capsys):
    next_line = said(run, capsys)[-1].removeprefix("next       ")
    done = subprocess.run(
        ["bash", "-c", f"{next_line} --cfg job -p trainer"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "run_name: a b" in done.stdout and "resume_mode: latest" in done.stdout


def test_a_fault_of_the_job_is_to_be_corrected_first(run, capsys):
    INCIDENTS.open(str(run))
    INCIDENTS.record(describe(WorkerError("no memory", "use more", "memory"), 5, "ended the run", 0.0))
    INCIDENTS.close()
    assert said(run, capsys)[-1].startswith("next       change what the sentence above names, then: cd ")


def test_what_refused_a_start_is_to_be_corrected_first(run, capsys):
    """Of a start that was refused there is no incident: all are older."""
    (run / "log.txt").write_text("2026-11-22 04:00:00 error: reward.name=x: fails for the first 3 rows of the data\n")
    assert said(run, capsys)[-1].startswith("next       cd ")
    start = json.loads((run / "starts.jsonl").read_text().splitlines()[-1])
    with open(run / "starts.jsonl", "a") as file:
        file.write(json.dumps(start | {"time": "2099-01-01T00:00:00+0000"}) + "\n")
    assert said(run, capsys)[-1].startswith("next       change what the sentence above names, then: cd ")


def test_a_directory_without_a_run(tmp_path, capsys):
    (line,) = said(tmp_path, capsys, status=2)
    assert line == f"error: {tmp_path}: holds no run (starts.jsonl is missing or damaged)"
    (tmp_path / "sweep/job=1").mkdir(parents=True)
    (tmp_path / "sweep/job=1/starts.jsonl").write_text("")
    (line,) = said(tmp_path / "sweep", capsys, status=2)
    assert line.endswith(f"sweep: holds 1 runs and is none; name one of them, such as {tmp_path}/sweep/job=1")
    (tmp_path / "file").write_text("")
    for name, what in (("none", "no such directory"), ("file", "is a file")):
        (line,) = said(tmp_path / name, capsys, status=2)
        assert line.startswith(f"error: {tmp_path}/{name}: {what}; name the directory of a run")
    assert main(["s3://bucket/run"]) == 2 and "is a URL" in capsys.readouterr().err


HOSTILE = "\x1b]0;gone\x07\x1b[2J\x9b31m\u202etxt\u2066\u200b\u2028\rnext       rm -rf /\nnext       rm -rf /"


def test_what_files_of_a_run_say_does_not_reach_the_terminal_as_commands(run, capsys):
    incident = json.loads((run / "incidents.jsonl").read_text()) | {"text": HOSTILE, "node": HOSTILE, "action": HOSTILE}
    (run / "incidents.jsonl").write_text(json.dumps(incident) + "\n")
    (run / "log.txt").write_text(f"2026-11-22 04:00:00 error: {HOSTILE.replace(chr(10), ' ')}\n")
    start = json.loads((run / "starts.jsonl").read_text())
    (run / "starts.jsonl").write_text(json.dumps(start | {"directory": f"/{HOSTILE}"}) + "\n")
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in shown) and r"\x1b[2J" in shown
    assert sum(line.startswith("next  ") for line in shown.split("\n")) == 1
    (run / "metrics.jsonl").write_text(f"{HOSTILE}\n{{}}\n{{}}")
    assert main([f"{run}"]) == 2 and main([f"{run}{HOSTILE}"]) == 2
    assert all(letter.isprintable() or letter == "\n" for letter in capsys.readouterr().err)
