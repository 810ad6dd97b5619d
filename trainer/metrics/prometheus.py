"""The HTTP server of a run for Prometheus (`/metrics`) and for whoever watches over it (`/health`).

A scrape reads the last values, which the training loop replaces as a whole. So it never waits for the loop, nor the
loop for a scrape, and an error of a request ends that request alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.metrics.names import declared_as, is_counter
from trainer.metrics.sinks import Rows, Sink
from trainer.process import time_limits
from trainer.process.log_setup import encodable
from trainer.process.network import listen, most_connections
from trainer.process.signals import SIGNALS, Progress

if TYPE_CHECKING:
    from prometheus_client import Metric

_KEY = "logger.prometheus"
_PREFIX = "trainer_"


def legal_name(metric: str) -> str:
    """Return the name of a metric in Prometheus: `policy/kl` is `trainer_policy_kl`, counters end in `_total`."""
    name = _PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
    return f"{name}_total" if is_counter(metric) else name


class MetricsServer(Sink):
    """Serves the metrics of a run, and its health. A context manager; it listens from its construction on. Raises
    UserError: the port is taken, or the host is none of this machine."""

    def __init__(self, host: str, port: int, run_name: str, total_steps: int) -> None:
        import prometheus_client  # not at the first scrape, which would wait for it

        begin = time.monotonic()
        self.progress: Callable[[], Progress] = lambda: Progress("starting", time.monotonic() - begin)
        """Returns how the run gets on. It may be replaced at any time."""
        self._run = encodable(run_name)
        self._total_steps = total_steps
        self._values: dict[str, float] = {}
        self._step: tuple[int, float] | None = None  # the last step, and when it was logged
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        listener = listen(host, port, f"{_KEY}={host}:{port}")
        self._server = _Server(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket, self._server.daemon_threads = listener, True
        self._server.answer = self._answer  # type: ignore[attr-defined]
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that goes away is no matter
        try:
            self._server.server_activate()
        except OSError as error:
            listener.close()
            raise UserError(f"{_KEY}={host}:{port}: cannot listen there ({error.strerror})") from error

    @property
    def address(self) -> tuple[str, int]:
        return self._server.socket.getsockname()[:2]

    def __enter__(self) -> MetricsServer:
        with SIGNALS.blocked():
            threading.Thread(target=self._server.serve_forever, args=[0.1], name="prometheus", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.socket.close()

    def start(self, rows: Rows, step: int) -> None:
        last = dict(chain.from_iterable(row.items() for row in rows))
        self._step = (last.pop("step"), time.monotonic()) if last else None
        self._values = {name: _number(value) for name, value in last.items()}

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Serve the metrics of a finished step. What it did not measure keeps its last value."""
        self._values = self._values | {name: _number(value) for name, value in values.items()}
        self._step = step, time.monotonic()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. `prometheus_client` calls this at each scrape."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        progress, step, families = self.progress(), self._step, {}
        own = {
            "last_step": ("Last finished step.", math.nan if step is None else step[0]),
            "total_steps": ("Steps of the run.", self._total_steps),
            "progress_age_seconds": ("Seconds since the driver last made progress.", progress.age_s),
            "healthy": ("1, or 0 if the run is stalled.", float(progress.status != "stalled")),
        }
        for name, (meaning, value) in own.items():
            family = GaugeMetricFamily(_PREFIX + name, meaning, labels=["run"])
            family.add_metric([self._run], value)
            yield family
        for name, value in sorted(self._values.items()):
            legal = legal_name(name)
            if legal not in families:
                metric = declared_as(name)
                meaning = f"{metric.meaning} Unit: {metric.unit}." if metric else "A metric of the task."
                kind = CounterMetricFamily if is_counter(name) else GaugeMetricFamily
                families[legal] = kind(legal, meaning, labels=["run", "metric"])
            families[legal].add_metric([self._run, encodable(name)], value)
        yield from families.values()

    def health(self) -> dict[str, Any]:
        progress, step = self.progress(), self._step
        return {
            "status": progress.status,
            "run": self._run,
            "step": None if step is None else step[0],
            "total_steps": self._total_steps,
            "progress_age_s": round(progress.age_s, 3),
            "limit_s": progress.limit_s,
            "step_age_s": None if step is None else round(time.monotonic() - step[1], 3),
        }

    def _answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Return status, content type and body of the answer to a request."""
        from prometheus_client.exposition import choose_encoder

        path = path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return 200, content_type, encode(self._registry)
        if path == "/health":
            health = self.health()
            status = 503 if health["status"] == "stalled" else 200
            return status, "application/json", json.dumps(health).encode() + b"\n"
        return 404, "text/plain; charset=utf-8", b"this server has /metrics and /health\n"


class _Server(ThreadingHTTPServer):
    """Answers few requests at a time, and closes further connections: the descriptors are the run's."""

    request_queue_size = 1024

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._most = min(64, most_connections())
        self._open: dict[socket.socket, float] = {}  # connections, and when they were accepted

    def verify_request(self, request: Any, client_address: Any) -> bool:
        if len(self._open) >= self._most:
            return False
        self._open[request] = time.monotonic()
        return True

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)  # whoever calls this: also when no thread could start
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that take too long: a client may send, or take, one byte at a time."""
        for request, began in list(self._open.items()):
            if time.monotonic() > began + time_limits.SCRAPE_S:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    timeout = time_limits.SCRAPE_S

    def do_GET(self) -> None:
        status, content_type, body = self.server.answer(self.path, self.headers.get("Accept", ""))  # type: ignore
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log no request."""


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
