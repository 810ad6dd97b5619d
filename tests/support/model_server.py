"""A server of frozen models that is no vLLM: the protocol of docs/rewards.md, with models of transformers."""

from __future__ import annotations

import http.server
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trainer.files.atomic_io import digest_weights
from trainer.process.model_server import SCORE, STATUS, VOCABULARY

DRIFT = 1e-3
"""What each repetition of a question adds to the answer: a server need not give the same bits twice."""


class FrozenModel:
    """Serves the model in a directory on loopback. A context manager. It may serve another one later."""

    def __init__(self, path: Path, computes: str):
        self.computes = computes
        self.asked: Counter[str] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.load(path)
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._reply(*owner.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._reply(*(owner.score(body) if self.path == SCORE else (404, {})))

            def _reply(self, status: int, answer: Any) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._listener.server_port}"

    def load(self, path: Path) -> None:
        auto = AutoModelForSequenceClassification if self.computes == "scores" else AutoModelForCausalLM
        self.model, self.weights = auto.from_pretrained(path).eval(), digest_weights(str(path))
        self.tokens = AutoTokenizer.from_pretrained(path).get_vocab()

    def get(self, path: str) -> tuple[int, Any]:
        described = {"computes": self.computes, "weights": self.weights, "max_tokens": 4000}
        return 200, {STATUS: described, VOCABULARY: {"tokens": self.tokens}}[path]

    def score(self, message: dict[str, Any]) -> tuple[int, Any]:
        if message["weights"] != self.weights:
            return 409, {"kind": "refused", "error": "serves other weights"}
        self.requests.append(message)
        return 200, {"answers": [self._answer(ids, message.get("top_k", 0)) for ids in message["token_ids"]]}

    @torch.no_grad()
    def _answer(self, ids: list[int], top_k: int) -> Any:
        key = json.dumps([ids, top_k])
        drift, self.asked[key] = DRIFT * self.asked[key], self.asked[key] + 1
        logits = self.model(torch.tensor([ids])).logits
        if self.computes == "scores":
            return logits.item() + drift
        found = logits[0, :-1].log_softmax(-1) - drift
        if top_k:
            top = found.topk(top_k)
            return {"ids": top.indices.tolist(), "logprobs": top.values.tolist()}
        return {"logprobs": found.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()}

    def __enter__(self) -> FrozenModel:
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()
