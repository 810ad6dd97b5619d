"""A whole job that a real Prometheus scrapes, and the dashboard of the docs, asked from that Prometheus."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.jobs import start_forked_job
from tests.support.lacking import lacking
from tests.support.ports import reserved_port
from trainer.cluster.supervisor import signal_on_death_of_parent

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs/files/grafana.json").read_text())
LACKING = {
    "trainer_environment_failures": "only jobs with an environment",
    "trainer_perf_mfu": "only jobs on GPUs",
    "trainer_time_environment": "only jobs with an environment",
}
"""The metrics of the dashboard that the job of this file cannot have."""


def query(url: str, path: str, **parameters: str) -> Any:
    """Ask Prometheus; return its data, or None while it is not up."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=60) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return None
        raise AssertionError(f"{parameters}: {error.read().decode()}") from error
    except OSError:
        return None


@contextlib.contextmanager
def prometheus(directory: Path, target: int) -> Iterator[str]:
    """Run a Prometheus that scrapes a port of this machine; yield its URL. Skip the test where there is none."""
    program = shutil.which("prometheus")
    if program is None:
        lacking("PROMETHEUS", "prometheus is not installed (Debian's package of that name)")
    job = {"job_name": "trainer", "scrape_interval": "250ms", "scrape_timeout": "250ms"}
    job["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
    config = directory / "prometheus.yml"
    config.write_text(json.dumps({"scrape_configs": [job]}))  # JSON is YAML, too
    with reserved_port() as port, open(directory / "prometheus.log", "w") as log:
        options = {"config.file": config, "storage.tsdb.path": directory / "tsdb"}
        options["web.listen-address"] = f"127.0.0.1:{port}"
        server = subprocess.Popen(
            [program, *(f"--{name}={value}" for name, value in options.items())],
            cwd=directory,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: signal_on_death_of_parent(signal.SIGKILL),
        )
        try:
            while query(f"http://127.0.0.1:{port}", "status/buildinfo") is None:
                assert server.poll() is None, Path(log.name).read_text()
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()
            server.wait()


def expressions_without_data(url: str) -> set[str]:
    """Return what is before the first brace of these expressions of the dashboard. All must be valid."""
    without = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$run", r"(mine\\.one|other)")  # as Grafana fills it in
            if not query(url, "query", query=expression)["result"]:
                without.add(target["expr"].partition("{")[0])
    return without


def test_every_expression_of_the_dashboard_gives_data_of_a_running_job(tmp_path):
    # The server binds with SO_REUSEADDR, so the port stays reserved.
    with reserved_port() as port, prometheus(tmp_path, port) as url:
        overrides = ["algorithm=ppo", "rollout.ahead=1", "trainer.total_steps=1000", "trainer.val_interval=2"]
        overrides += ["trainer.run_name=mine.one", f"logger.prometheus={port}", f"trainer.run_dir={tmp_path}/run"]
        job = start_forked_job(*overrides, cwd=tmp_path, log=tmp_path / "log")
        try:
            while not query(url, "query", query="trainer_last_step >= 2")["result"]:
                assert job.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
            (variable,) = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "run"]
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
            assert query(url, f"label/{label}/values", **{"match[]": metric}) == ["mine.one"]
            deadline = time.monotonic() + 60  # a rate needs two samples
            while (without := expressions_without_data(url)) != set(LACKING) and time.monotonic() < deadline:
                time.sleep(0.5)
        finally:
            job.send_signal(signal.SIGTERM)
            assert job.wait(300) == 75, (tmp_path / "log").read_text()
    assert without == set(LACKING)
