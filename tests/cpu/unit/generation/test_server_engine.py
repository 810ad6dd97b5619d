"""The job's side of an inference server: the same bits as an engine of its own, and one sentence for each refusal."""

from __future__ import annotations

import dataclasses
import gc
import http.server
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.fault_proxy import CUT, LOST, PASS, Faults, fault_proxy
from tests.support.generation import GREEDY, ROLLOUT, contents, make_requests, with_sampling
from tests.support.inference import TOKEN, answering, copied, engine, free_port, job
from tests.support.jobs import wait_until
from tests.support.namespaces import small_disk
from trainer.errors import UserError, WorkerError
from trainer.files.shared_memory import SharedDirectory
from trainer.generation import server_engine
from trainer.generation.lifecycle import State
from trainer.generation.server_engine import silent_servers
from trainer.generation.server_protocol import GENERATE, LEASE, STATUS, WEIGHTS
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.weight_sync import SharedMemory
from trainer.process import time_limits
from trainer.process.signals import SIGNALS, NoServerStopped

REQUESTS = [*make_requests(70, longest=40), *with_sampling(make_requests(3), GREEDY)]


@pytest.fixture
def weights(model_paths) -> Iterator[SharedMemory]:
    """The model's weights, changed a little."""
    tensors = load_file(f"{model_paths[True]}/model.safetensors")
    with SharedDirectory() as shared:
        save_file({name: tensor * 1.1 for name, tensor in tensors.items()}, f"{shared.path}/model.safetensors")
        yield SharedMemory(shared.path)


@pytest.fixture(scope="session")
def expected(model_paths) -> list[tuple]:
    """What an engine of the job generates with these weights."""
    own = TransformersEngine(model_paths[True], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    with SharedDirectory() as shared, torch.no_grad():
        tensors = load_file(f"{model_paths[True]}/model.safetensors")
        save_file({name: tensor * 1.1 for name, tensor in tensors.items()}, f"{shared.path}/model.safetensors")
        own.sync_weights(SharedMemory(shared.path), 3)
    return contents(own.generate(REQUESTS))


def test_completions_are_those_of_an_engine_of_the_job_to_the_last_bit(server, weights, expected):
    with engine(server.url) as one:
        one.sync_weights(weights, 3)
        assert contents(one.generate(REQUESTS)) == expected
        completions, left = one.step(dict(enumerate(REQUESTS[:10]))), set(range(10))
        while left := left - completions.keys():
            completions |= one.step({})
        assert one.step({}) == {}


def test_the_company_of_a_request_may_change_its_bits(server):
    assert not server_engine.servers_join_exactly([server.url], 60)


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"nonsense", b'{"joins_exactly": "yes"}'])
def test_a_server_that_does_not_say_it_counts_as_one_that_may(answer):
    with answering({STATUS: answer}) as url:
        assert not server_engine.servers_join_exactly([url], 60)


def test_weights_travel_over_http_to_a_server_that_does_not_see_the_files(
    server, weights, expected, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        "trainer.generation.server_protocol.fingerprint", lambda directory: {"other machine": [1, 2, 3]}
    )
    tensors = list(load_file(f"{weights.path}/model.safetensors").items())
    with engine(server.url, job("a", 1)) as stopped:  # it has sent a file, and will send no more
        save_file({name: tensor * 2 for name, tensor in tensors}, tmp_path / "z.safetensors")
        stopped._upload(str(tmp_path))
        with engine(server.url, job("a", 2)) as one, SharedDirectory() as several:
            save_file(dict(tensors[:3]), f"{several.path}/model-00001-of-00002.safetensors")
            save_file(dict(tensors[3:]), f"{several.path}/model-00002-of-00002.safetensors")
            Path(several.path, "model.safetensors.index.json").write_text("{}")
            one.sync_weights(SharedMemory(several.path), 3)
            assert contents(one.generate(REQUESTS)) == expected


def test_files_that_are_no_weights_are_refused_and_the_engine_lives(server, weights, expected):
    with engine(server.url) as one, SharedDirectory() as shared:
        Path(shared.path, "model.safetensors").write_bytes(b"no weights")
        with pytest.raises(UserError, match=r"cannot read the weights of this job \(model.safetensors: "):
            one.sync_weights(SharedMemory(shared.path), 4)
        one.sync_weights(weights, 3)
        assert contents(one.generate(REQUESTS)) == expected


class Broadcast:
    """Sends weights as ranks on several nodes do."""

    total_bytes = 1 << 20

    def __init__(self, path: str):
        self._path = path

    def receive(self) -> Iterator:
        yield from load_file(f"{self._path}/model.safetensors").items()


def test_weights_that_ranks_broadcast_are_passed_on(server, weights, expected):
    with engine(server.url) as one:
        one.sync_weights(Broadcast(weights.path), 3)
        assert contents(one.generate(REQUESTS)) == expected


def test_broadcast_weights_that_fill_a_disk_are_refused_in_one_sentence(server, weights, expected, monkeypatch):
    """The server, and the engine, serve on."""
    sentence = f"^rollout.urls: the weights for {server.url} cannot be written to %s.* \\(%s.*\\); make space there"
    with engine(server.url) as one:
        monkeypatch.setattr(Broadcast, "total_bytes", 1 << 60)
        with pytest.raises(UserError, match=sentence % ("/", "1152921504607 MB, and /.* MB free")):
            one.sync_weights(Broadcast(weights.path), 3)
        with small_disk("64k") as directory, monkeypatch.context() as patch:
            patch.setattr(server_engine, "choose_directory", lambda size: directory)
            with pytest.raises(UserError, match=sentence % (directory, ".*No space left on device")):
                one.sync_weights(Broadcast(weights.path), 3)
            assert not os.listdir(directory), "what was written stays"
        monkeypatch.setattr(Broadcast, "total_bytes", 1 << 20)
        one.sync_weights(Broadcast(weights.path), 3)
        assert contents(one.generate(REQUESTS)) == expected


def test_a_job_gets_nothing_before_it_has_sent_weights(server, weights):
    with engine(server.url) as one:
        one.sync_weights(weights, 3)
    with engine(server.url) as one, pytest.raises(WorkerError, match="no weights of this job") as raised:
        one.generate(REQUESTS[:1])
    assert raised.value.cause == "server"


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(server, weights, expected):
    tensors = load_file(f"{weights.path}/model.safetensors")
    with engine(server.url) as one, SharedDirectory() as shared:
        one.sync_weights(weights, 3)
        name = "model.norm.weight"
        save_file({**tensors, name: tensors[name][:-1].clone()}, f"{shared.path}/model.safetensors")
        with pytest.raises(UserError, match=f"{server.url} serves another model: {name} has the shape"):
            one.sync_weights(SharedMemory(shared.path), 4)
        one.sync_weights(weights, 3)
        assert contents(one.generate(REQUESTS)) == expected


def test_a_model_with_equal_shapes_that_computes_something_else_is_refused(start, server, config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("10000.0", "500000.0"))
    sizes = {"max_prompt_tokens": 300, "max_response_tokens": 64}
    pool, _ = start(waits=False, engine="server", urls=[server.url], **sizes)
    sentence = f"{server.url} serves another model: rope_parameters.rope_theta is 10000.0 there, and 500000.0 in this"
    with pytest.raises(UserError, match=sentence):
        pool.start(0, False)


def test_a_copy_of_a_run_waits_for_the_end_of_the_original(server, weights, monkeypatch, capsys):
    monkeypatch.setattr(time_limits, "SERVER_WARNING_S", 0.1)
    with engine(server.url, original := job("a")) as one:
        one.sync_weights(weights, 3)
        with pytest.raises(WorkerError, match=r"is in use by run a 1, another copy of this run, until that has ended"):
            with engine(server.url, copied(original), server_timeout_s=1):
                pass
        warning = (
            "another copy of this run, until that has ended); waiting for it, up to 1 s (rollout.server_timeout_s)\n"
        )
        assert capsys.readouterr().err.count(warning) == 1
        assert len(one.generate(REQUESTS[:1])) == 1
    with engine(server.url, copied(original)) as second, pytest.raises(WorkerError, match="no weights of this job"):
        second.generate(REQUESTS[:1])


def test_a_new_process_of_a_job_ends_the_calls_of_the_old_one(server, weights, expected):
    with engine(server.url, user := job("a")) as old:
        old.sync_weights(weights, 2)
        with engine(server.url, user) as new:
            with pytest.raises(WorkerError, match="another process of this job uses it"):
                old.sync_weights(weights, 4)
            with pytest.raises(WorkerError, match="no weights of this job"):
                new.generate(REQUESTS[:1])
            new.sync_weights(weights, 3)
            assert contents(new.generate(REQUESTS)) == expected


def test_another_job_is_refused_and_a_restarted_one_is_not(server, weights, expected):
    with engine(server.url, job("a", 1)) as first:
        first.sync_weights(weights, 3)
        with pytest.raises(UserError, match="is in use by run a 1; choose another server, or end that job and wait"):
            with engine(server.url, job("b", 1)):
                pass
        with engine(server.url, job("a", 2)) as second:
            with pytest.raises(UserError, match="has been taken by run a 2: this job has lost it"):
                first.sync_weights(weights, 4)
            with pytest.raises(UserError, match="lost its lock"):
                with engine(server.url, job("a", 1)):
                    pass
            second.sync_weights(weights, 3)
            assert contents(second.generate(REQUESTS)) == expected


def test_a_job_that_shows_no_life_loses_the_server_after_the_lease(server):
    with engine(server.url, job("a")) as silent:
        silent._ended.set()  # as if its process were stopped
        with pytest.raises(UserError, match="is in use by run a 1"):
            with engine(server.url, job("b")):
                pass
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(5.5)  # inference.lease_s of this server is 5
        server.process.send_signal(signal.SIGCONT)
        with pytest.raises(UserError, match="is in use by run a"):  # the server itself could not listen
            with engine(server.url, job("b")):
                pass
        time.sleep(5.5)
        with engine(server.url, job("b")), pytest.raises(UserError, match="this job has lost it"):
            silent.set_version(1)


def test_a_job_that_needs_more_tokens_than_the_server_takes_is_refused(server):
    with pytest.raises(UserError, match="takes 364 tokens, prompt and completion together, and this job needs 400"):
        with engine(server.url, max_prompt_tokens=336):
            pass


def test_a_job_in_flight_is_refused_by_an_engine_that_drains_its_calls_for_new_weights(server):
    with pytest.raises(
        UserError, match=f"^rollout.urls: {server.url} runs inference.engine=transformers, .*; start it"
    ):
        with engine(server.url, in_flight_updates=True):
            pass


@pytest.mark.parametrize("broken", ["", f"{TOKEN}\n", "é" * 20])
def test_a_token_that_no_header_can_hold_is_refused_and_named_nowhere(server, monkeypatch, broken):
    monkeypatch.setenv("TRAINER_INFERENCE_TOKEN", broken)
    with pytest.raises(UserError, match="TRAINER_INFERENCE_TOKEN: a token needs at least 16 printable") as raised:
        with engine(server.url):
            pass
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize("wrong", [None, "another token of 24 letters"])
def test_a_wrong_token_is_refused_and_named_nowhere(server, monkeypatch, wrong):
    if wrong is None:
        monkeypatch.delenv("TRAINER_INFERENCE_TOKEN")
    else:
        monkeypatch.setenv("TRAINER_INFERENCE_TOKEN", wrong)
    with pytest.raises(
        UserError, match="refuses the token of this job; set the environment variable TRAINER_INFERENCE_TOKEN"
    ) as raised:  # noqa: E501
        with engine(server.url):
            pass
    assert TOKEN not in str(raised.value)


def test_an_address_where_nobody_answers_is_named_when_the_time_is_over(monkeypatch):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        WorkerError, match=rf"{url} .*Connection refused.*waited for 1 s \(rollout.server_timeout_s\)"
    ) as raised:  # noqa: E501
        with engine(url, server_timeout_s=1):
            pass
    assert raised.value.cause == "server_absent"


def test_another_program_at_the_address_is_no_inference_server():
    listener = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        with pytest.raises(WorkerError, match="HTTP 501"):
            with engine(f"http://127.0.0.1:{listener.server_port}", server_timeout_s=1):
                pass
    finally:
        listener.shutdown()
        listener.server_close()


def test_no_connection_is_left_open():
    """Neither of the questions after a signal, of which there may be many, nor of an engine that has ended."""
    answers = {STATUS: b"{}", LEASE: b'{"start": "1", "lease_s": 60}'}

    def connections(port: int) -> list:
        found = psutil.Process().net_connections("tcp")
        return [one for one in found if one.raddr and one.raddr.port == port and one.status == "ESTABLISHED"]

    gc.disable()  # the collector would close some
    try:
        with answering(answers) as url:
            port = int(url.rpartition(":")[2])
            assert [silent_servers([url], 30.0), silent_servers([url, url], 30.0)] == [[], []]
            assert connections(port) == []
            with engine(url):
                assert connections(port)
            assert connections(port) == []
    finally:
        gc.enable()


ONE_TOKEN = ["AQAAAA==", "", "stop", [1, 1], []]
NONSENSE = [(LEASE, answer) for answer in (b"[]", b"{}", b"null", b'{"start": 1, "lease_s": 9}')]
NONSENSE += [(WEIGHTS, answer) for answer in (b"5", b"<html>")]
NONSENSE += [(GENERATE, answer) for answer in (b"<html>", b"null", b"[[0, 1]]", b"[0]", b"\xff")]
NONSENSE += [(GENERATE, json.dumps([[0, *ONE_TOKEN]]).encode())]  # a token without its log-prob


@pytest.mark.parametrize(("path", "answer"), NONSENSE)
def test_a_server_that_answers_nonsense_is_no_inference_server(path, answer, weights):
    answers = {LEASE: b'{"start": "1", "lease_s": 60}', path: answer}
    with answering(answers) as url, pytest.raises(UserError, match=f"{url} is no inference server of this project"):
        with engine(url) as one:
            one.sync_weights(weights, 1)
            one.generate(make_requests(1))


def test_the_claim_of_a_job_is_read_by_servers_of_older_builds():
    claims = []

    class OlderServer(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            claims.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = b'{"start": "1", "lease_s": 3600}' if "place" in claims[0]["job"] else b""
            self.send_response(200 if answer else 400)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OlderServer)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        with engine(f"http://127.0.0.1:{listener.server_port}", user := job()):
            assert claims[0]["job"]["place"] == claims[0]["job"]["directory"] == user.directory
    finally:
        listener.shutdown()
        listener.server_close()


def test_new_weights_abort_the_requests_under_way(server, weights, expected):
    sampling = dataclasses.replace(REQUESTS[0].sampling, max_tokens=64)
    slow = [dataclasses.replace(request, sampling=sampling) for request in REQUESTS[:64]]
    with engine(server.url) as one:
        one.sync_weights(weights, 1)
        one._begin(dict(enumerate(slow)))
        one.sync_weights(weights, 3)
        assert one.step({}) == {} and contents(one.generate(REQUESTS)) == expected


@pytest.mark.parametrize("running", ["abort", "keep"])
def test_new_weights_wait_for_a_batch_that_is_being_sent(server, weights, expected, monkeypatch, running):
    with engine(server.url) as one:
        one.sync_weights(weights, 1)
        send, bodies = one._stream, []

        def late(path: str, body: bytes) -> Iterator[str]:
            if path == GENERATE:
                time.sleep(0.5)
                bodies.append(body)
            yield from send(path, body)

        monkeypatch.setattr(one, "_stream", late)
        one._begin(dict(enumerate(REQUESTS[:8])))
        one.sync_weights(weights, 3, running)
        assert len(bodies) <= 1
        sent = len(bodies)
        if running == "keep":
            assert {one.weight_versions for one in one.step({}).values()} == {(1, 1)}, "a call is completed first"
        assert contents(one.generate(REQUESTS)) == expected
        assert len(bodies) == sent + 1, "an aborted batch is not sent after the new weights"


def test_new_weights_do_not_wait_without_end_for_a_batch(server, weights, monkeypatch):
    with engine(server.url) as one:
        one.sync_weights(weights, 1)
        monkeypatch.setattr(time_limits, "SERVER_SILENCE_S", 0.1)
        one._unsent.add("a batch that its server never takes")
        with pytest.raises(WorkerError, match="does not take the requests that the new weights wait for"):
            one.sync_weights(weights, 2)


def test_a_step_that_is_interrupted_returns_and_its_requests_go_on(server, weights, expected):
    with engine(server.url) as one:
        one.sync_weights(weights, 3)
        one.interrupt()
        completions = one.step(dict(enumerate(REQUESTS)))
        assert not completions
        while len(completions) < len(REQUESTS):
            completions |= one.step({})
        assert contents([completions[number] for number in range(len(REQUESTS))]) == expected


@pytest.mark.parametrize("fault", [CUT, LOST])
def test_what_a_broken_connection_has_lost_is_asked_for_again(server, weights, expected, fault):
    faults = Faults()
    with fault_proxy(server.url, faults) as url, engine(url) as one:
        one.sync_weights(weights, 3)
        faults.plan = lambda method, path: fault if len(faults.seen) in (first, first + 1, first + 4) else PASS
        first = len(faults.seen)
        assert contents(one.generate(REQUESTS)) == expected
        assert [one[2] for one in faults.seen].count(fault) >= 2


def test_a_batch_that_broke_off_is_repeated_whole(server, weights, expected, monkeypatch):
    """What an engine computes can depend on the requests of a batch."""
    with engine(server.url) as one:
        one.sync_weights(weights, 3)
        stream, sent = one._stream, []

        def cut(path: str, body: bytes) -> Iterator[str]:
            lines = stream(path, body)
            if path == GENERATE:
                sent.append(body)
                if len(sent) == 1:
                    yield from itertools.takewhile(lambda line: not line, lines)
                    raise one._lost("cut")
            yield from lines

        monkeypatch.setattr(one, "_stream", cut)
        assert contents(one.generate(REQUESTS)) == expected
        assert len(sent) == 2 and sent[0] == sent[1]


def test_a_server_that_hangs_is_lost(server, weights, monkeypatch):
    monkeypatch.setattr(time_limits, "SERVER_SILENCE_S", 2.5)
    with engine(server.url) as one:
        one.sync_weights(weights, 1)
        server.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(WorkerError, match="no sign of life for 2.5 s") as raised:
                one.generate(REQUESTS)
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert raised.value.cause == "server"


@pytest.fixture
def config(model_paths, tmp_path) -> None:
    """The model of the pools that `start` makes."""
    shutil.copy(f"{model_paths[True]}/config.json", tmp_path)


@pytest.mark.usefixtures("config")
def test_a_run_ends_in_one_sentence_when_a_server_never_comes(start):
    url = f"http://127.0.0.1:{free_port()}"
    pool, _ = start(waits=False, max_restarts=3, engine="server", urls=[url], server_timeout_s=1.0)
    sentence = rf"{url} .*waited for 1 s \(rollout.server_timeout_s\); restart the job with the same command"
    with pytest.raises(WorkerError, match=sentence):
        pool.start(0, False)


@pytest.mark.usefixtures("config")
def test_a_server_that_refuses_ends_the_run_in_one_sentence(start, server):
    with engine(server.url, job("a")):
        pool, _ = start(
            waits=False,
            max_restarts=3,
            engine="server",
            urls=[server.url],
            max_prompt_tokens=300,
            max_response_tokens=64,
        )
        with pytest.raises(UserError, match=f"{server.url} is in use by run a 1; choose another server, or end that"):
            pool.start(0, False)


@pytest.mark.usefixtures("config")
def test_a_signal_within_a_step_ends_the_wait_for_a_server(start):
    url = f"http://127.0.0.1:{free_port()}"
    pool, _ = start(waits=False, engine="server", urls=[url], server_timeout_s=5.0)
    with SIGNALS.listening(), SIGNALS.in_training_loop():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(NoServerStopped, match=r"^stopped by SIGTERM while no inference server answered"):
            pool.start(0, False)


@pytest.mark.usefixtures("config")
def test_a_job_leaves_a_server_that_still_starts_for_it_and_does_not_take_it_later(start, server):
    server.engine()[-1].kill()
    server.wait("starting")
    sizes = {"max_prompt_tokens": 300, "max_response_tokens": 64}
    pool, _ = start(waits=False, engine="server", urls=[server.url], **sizes)
    wait_until(lambda: server.status()["job"] is not None)
    assert pool._engines.lifecycle.within(State.STARTING) == [0]
    pool.leave()
    assert server.status()["job"] is None
    server.wait()
    with engine(server.url, job("b")):
        assert server.status()["job"] == "run b 1"


def test_what_leaves_for_a_job_ends_the_lease_of_its_process_for_good(server, weights):
    user = job("a", owner="secret")
    with engine(server.url, user) as one:
        one.sync_weights(weights, 1)
        assert server_engine.leave_servers([f"{server.url}/"], user, 60)
        with pytest.raises(WorkerError):
            one.generate(REQUESTS[:1])
        with pytest.raises(WorkerError, match="lost it"):
            one._post(LEASE, one._claim)
    assert not server_engine.leave_servers([server.url, f"http://127.0.0.1:{free_port()}"], user, 60)


def test_the_process_that_speaks_for_a_server_imports_no_torch():
    """Every start of a job would wait for that import once more."""
    code = (
        "import pickle, sys\n"
        "from functools import partial\n"
        "from trainer.config import ENGINES\n"
        "from trainer.generation.engine import SharedMemory, build_engine\n"
        "spec = ENGINES['server']\n"
        "pickle.loads(pickle.dumps([partial(build_engine, spec), SharedMemory('weights')]))\n"
        "import trainer.cluster.fork_server, trainer.generation.server_engine\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
