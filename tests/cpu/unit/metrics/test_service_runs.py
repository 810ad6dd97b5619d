"""The file that names the runs of services."""

from __future__ import annotations

from trainer.metrics.service_runs import FILE, ServiceRuns

SAVED = {"wandb_run_id": None}


def test_a_run_without_a_checkpoint_continues_its_runs_if_it_begins_with_the_same(tmp_path):
    first = ServiceRuns(str(tmp_path), SAVED, "a")
    assert first.get("mlflow_run_id") is None
    first.keep("mlflow_run_id", "one")
    first.keep("trackio_run_id", "two")
    assert first.all() == {"wandb_run_id": None, "mlflow_run_id": "one", "trackio_run_id": "two"}
    again = ServiceRuns(str(tmp_path), SAVED, "a")
    assert again.all() == first.all()
    other = ServiceRuns(str(tmp_path), SAVED, "b")
    assert other.all() == SAVED
    other.keep("trackio_run_id", "three")  # and is killed before the other service has a run
    assert ServiceRuns(str(tmp_path), SAVED, "b").all() == {"wandb_run_id": None, "trackio_run_id": "three"}


def test_a_checkpoint_lacks_the_runs_of_services_that_were_turned_on_after_it(tmp_path):
    ServiceRuns(str(tmp_path), SAVED, "a").keep("trackio_run_id", "one")
    resumed = ServiceRuns(str(tmp_path), {"trackio_run_id": "one"}, None)
    resumed.keep("mlflow_run_id", "two")
    assert ServiceRuns(str(tmp_path), {"trackio_run_id": "one"}, None).get("mlflow_run_id") == "two"
    assert ServiceRuns(str(tmp_path), SAVED, "a").get("mlflow_run_id") == "two", "its checkpoints were deleted"
    empty = tmp_path / "other machine"
    assert ServiceRuns(str(empty), {"trackio_run_id": "one"}, None).get("trackio_run_id") == "one"


def test_a_damaged_file_is_named_and_costs_no_run_that_a_checkpoint_holds(tmp_path, caplog):
    for content in (b"", b"[]", b"\xff", b'{"begins": 1, "run_ids": {}}', b'{"run_ids": {"a": 1}}'):
        (tmp_path / FILE).write_bytes(content)
        runs = ServiceRuns(str(tmp_path), {"mlflow_run_id": "one"}, None)
        assert runs.get("mlflow_run_id") == "one" and f"{tmp_path}/{FILE} cannot be read" in caplog.text
