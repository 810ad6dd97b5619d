"""The metrics and the health of a run over HTTP."""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.ports import reserved_port
from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.metrics.names import METRICS
from trainer.metrics.prometheus import MetricsServer, legal_name
from trainer.metrics.tracker import Tracker
from trainer.process import time_limits
from trainer.process.signals import Progress

DASHBOARD = Path(__file__).parents[4] / "docs" / "files" / "grafana.json"
OWN = {"trainer_last_step", "trainer_total_steps", "trainer_progress_age_seconds", "trainer_healthy"}


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with reserved_port() as port, MetricsServer("127.0.0.1", port, 'a "run"\n', 100) as server:
        yield server


def get(server: MetricsServer, path: str, **headers: str) -> tuple[int, str]:
    host, port = server.address
    request = urllib.request.Request(f"http://{host}:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scraped(server: MetricsServer) -> dict[tuple[str, str], tuple[str, float]]:
    """The samples of a scrape, parsed: kind and value, by the name and the label `metric`."""
    status, text = get(server, "/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["run"] == 'a "run"\n'
            key = sample.name, sample.labels.get("metric", "")
            assert key not in found
            found[key] = family.type, sample.value
    return found


def test_every_metric_is_there_by_its_name(server):
    server.log(3, {"policy/kl": 0.25, "val/pass@4": 0.5, "progress/tokens": 1000, "reward/a-b/mean": 1.0})
    server.log(4, {"policy/kl": math.nan, "progress/tokens": 2000, "reward/a_b/mean": 2.0, "mine/own\ud800": 3.0})
    found = scraped(server)
    kind, value = found.pop(("trainer_policy_kl", "policy/kl"))
    assert kind == "gauge" and math.isnan(value)
    assert found["trainer_last_step", ""] == ("gauge", 4) and found["trainer_total_steps", ""] == ("gauge", 100)
    assert found["trainer_healthy", ""] == ("gauge", 1)
    assert {key: value for key, value in found.items() if key[1]} == {
        ("trainer_val_pass_4", "val/pass@4"): ("gauge", 0.5),
        ("trainer_progress_tokens_total", "progress/tokens"): ("counter", 2000),
        ("trainer_reward_a_b_mean", "reward/a-b/mean"): ("gauge", 1.0),
        ("trainer_reward_a_b_mean", "reward/a_b/mean"): ("gauge", 2.0),
        ("trainer_mine_own_", "mine/own\\ud800"): ("gauge", 3.0),
    }, "a value that a step did not measure stays"


def test_all_known_metrics_have_names_of_their_own_that_prometheus_takes(server):
    server.log(1, dict.fromkeys(METRICS, 1.0))
    found = scraped(server)
    assert {metric for _, metric in found} == {"", *METRICS}
    names = {legal_name(metric) for metric in METRICS}
    assert len(names) == len(METRICS) and names | OWN == {name for name, _ in found}
    assert all(re.fullmatch("[a-z][a-zA-Z0-9_]*", name) for name in names)


def test_prometheus_may_ask_for_openmetrics(server):
    server.log(1, {"progress/tokens": 5, "policy/kl": 0.5})
    status, text = get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert status == 200 and text.endswith("# EOF\n") and "trainer_progress_tokens_total{" in text


def test_a_run_that_goes_back_serves_what_it_has_kept(server):
    server.log(5, {"policy/kl": 5.0, "policy/entropy": 5.0})
    server.start([{"step": 1, "policy/kl": 1.0, "val/accuracy": 0.5}, {"step": 2, "policy/kl": None}], 2)
    found = scraped(server)
    assert math.isnan(found["trainer_policy_kl", "policy/kl"][1])
    assert found["trainer_val_accuracy", "val/accuracy"][1] == 0.5
    assert found["trainer_last_step", ""][1] == 2 and ("trainer_policy_entropy", "policy/entropy") not in found
    server.start([], -1)
    assert {metric for _, metric in scraped(server)} == {""}


def test_a_tracker_brings_a_server_up_to_date(server, tmp_path):
    def tracker() -> Tracker:
        return Tracker(str(tmp_path), LoggerConfig(), {}, server=server)

    with tracker() as first:
        for step in (1, 2, 3):
            first.log(step, {"reward/mean": float(step)})
    assert scraped(server)["trainer_reward_mean", "reward/mean"][1] == 3
    with tracker() as resumed:
        resumed.rewind(2)
        assert scraped(server)["trainer_reward_mean", "reward/mean"][1] == 2
        resumed.log(3, {"reward/mean": 33.0})
    assert scraped(server)["trainer_reward_mean", "reward/mean"][1] == 33, "the tracker leaves the server open"


def test_health_has_the_age_of_the_last_progress_and_fails_when_the_run_is_stalled(server):
    status, text = get(server, "/health")
    answer = json.loads(text)
    assert status == 200 and answer["status"] == "starting" and answer["step"] is None and answer["limit_s"] is None
    server.log(7, {})
    server.progress = lambda: Progress("training", 59.0, 60.0)
    status, text = get(server, "/health?verbose=1")
    answer = json.loads(text)
    assert answer.pop("step_age_s") >= 0
    assert (status, answer) == (200, {
        "status": "training", "run": 'a "run"\n', "step": 7, "total_steps": 100, "progress_age_s": 59.0,
        "limit_s": 60.0,
    })  # fmt: skip
    server.progress = lambda: Progress("stalled", 61.0, 60.0)
    status, text = get(server, "/health")
    assert status == 503 and json.loads(text)["progress_age_s"] == 61
    assert scraped(server)["trainer_healthy", ""][1] == 0


def test_other_requests_are_answered_and_end_nothing(server):
    assert get(server, "/") == (404, "this server has /metrics and /health\n")
    host, port = server.address
    head, post = b"HEAD /health HTTP/1.0\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n"
    for sent in (b"rubbish\r\n\r\n", post, head, b"", b"\0" * 70_000):
        with socket.create_connection((host, port), timeout=60) as client, contextlib.suppress(ConnectionError):
            client.sendall(sent)
            if sent:
                client.recv(100)
    server.progress = lambda: 1 / 0
    with socket.create_connection((host, port), timeout=60) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.recv(100) == b"", "a bug of ours ends the request"
    server.progress = lambda: Progress("training", 0.0)
    assert get(server, "/health")[0] == 200


def test_clients_that_say_nothing_keep_nobody_waiting(server):
    silent = [socket.create_connection(server.address, timeout=60) for _ in range(40)]
    try:
        server.log(1, {"policy/kl": 1.0})
        assert get(server, "/health")[0] == 200
    finally:
        for client in silent:
            client.close()


def test_slow_clients_and_threads_that_cannot_start_keep_nobody_away_for_long(server, monkeypatch):
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(server._server, "process_request", no_thread)
        for _ in range(70):
            with contextlib.suppress(OSError):
                get(server, "/health")
    assert get(server, "/health")[0] == 200
    monkeypatch.setattr(time_limits, "SCRAPE_S", 1.0)
    clients = [socket.create_connection(server.address) for _ in range(64)]
    for _ in range(40):
        for client in clients:
            with contextlib.suppress(OSError):
                client.send(b"G")
        with contextlib.suppress(OSError):
            assert get(server, "/health")[0] == 200
            break
        time.sleep(0.1)
    else:
        raise AssertionError("clients that send a byte at a time have kept all others away")


def test_a_port_that_is_taken_and_a_host_of_another_machine_are_refused_in_a_sentence(server):
    _, port = server.address
    with pytest.raises(UserError) as refused:
        MetricsServer("127.0.0.1", port, "run", 1)
    assert str(refused.value) == (f"logger.prometheus=127.0.0.1:{port}: cannot listen there (Address already in use)")
    with pytest.raises(UserError, match=r"logger.prometheus=203.0.113.1:.*: cannot listen there"):
        MetricsServer("203.0.113.1", port, "run", 1)


def test_the_end_of_the_block_frees_the_port():
    with reserved_port() as port:
        for _ in range(3):
            with MetricsServer("127.0.0.1", port, "run", 1) as server:
                assert get(server, "/health")[0] == 200


def test_the_dashboard_shows_metrics_that_exist():
    dashboard = json.loads(DASHBOARD.read_text())
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    texts += [variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["name"] == "run"]
    used = {name for text in texts for name in re.findall(r"\btrainer_\w+", text)}
    assert used <= {legal_name(metric) for metric in METRICS} | OWN
    assert used >= OWN and len(used) > 25
    assert all(text.count("(") == text.count(")") and text.count("{") == text.count("}") for text in texts)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
