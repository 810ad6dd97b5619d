"""What a decoding step of an engine takes on CPU, and what `trainer plan` says of it: `python -m benchmarks.decode`.

One engine of a model with random weights and one thread generates 4 and then 24 tokens for each of 2, 8, 32 and 128
prompts of 16 tokens; a twentieth of the difference is a step. Prints its processor time, the shortest of `--tries`,
with the time that `trainer plan` says for this machine, in milliseconds, and first the speeds that the plan measures.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from benchmarks.models import SHAPES, Shape, make_model
from trainer.config import Config, RolloutConfig, compose
from trainer.config.engines import ENGINES
from trainer.generation.engine import Engine, Request, Sampling
from trainer.plan.hardware import parse_cluster
from trainer.plan.plan import make_plan

MODELS = {
    "17M": SHAPES["17M"],
    "17M, two blocks, vocabulary of 32,768": Shape(32768, 384, 1152, 2, 6, 2),
    "8 blocks of 64": Shape(512, 64, 128, 8, 1, 1),
    "2 blocks of 64": Shape(512, 64, 128, 2, 1, 1),
    "2 blocks of 64, vocabulary of 32,768": Shape(32768, 64, 128, 2, 1, 1),
}
ROWS = (2, 8, 32, 128)
PROMPT, SHORT, LONG = 16, 4, 24


def config_of(engine: str, path: str, dtype: str, rows: int, response: int) -> Config:
    """Return the config of a job whose only engine generates `rows` completions of `response` tokens in a step."""
    return compose(
        [
            *(f"rollout={engine}", f"model.path={path}", f"rollout.dtype={dtype}", "rollout.n=2"),
            *(f"trainer.train_batch_size={rows // 2}", f"trainer.mini_batch_size={rows // 2}"),
            *(f"rollout.max_prompt_tokens={PROMPT}", f"rollout.max_response_tokens={response}"),
            *(f"plan.prompt_tokens={PROMPT}", f"plan.response_tokens={response}"),
            *("rollout.max_num_seqs=128", "rollout.kv_cache_mb=600"),
        ]
    )


def planned(engine: str, path: str, dtype: str, rows: int) -> float:
    """Return the seconds of a decoding step by the plan for this machine."""
    short, long = (
        make_plan(config_of(engine, path, dtype, rows, tokens), parse_cluster("cpu"), traced=False).time.phases
        for tokens in (SHORT, LONG)
    )
    return (long["rollout"] - short["rollout"]) / (LONG - SHORT)


def measure(name: str, path: str, dtype: str, tries: int) -> list[float]:
    """Return the processor seconds of a decoding step for each number of sequences."""
    torch.set_num_threads(1)
    rollout = RolloutConfig(max_prompt_tokens=PROMPT, max_response_tokens=LONG, max_num_seqs=128, kv_cache_mb=600)
    engine = ENGINES[name](path, dtype=dtype, seed=1, rollout=rollout, device="cpu")
    generate(engine, 8, LONG)
    steps = []
    for rows in ROWS:
        differences = [generate(engine, rows, LONG) - generate(engine, rows, SHORT) for _ in range(tries)]
        steps.append(min(differences) / (LONG - SHORT))
    return steps


def generate(engine: Engine, rows: int, tokens: int) -> float:
    """Return the processor seconds in which the engine generates so many tokens for each prompt."""
    rng = random.Random(rows)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=tokens, stop_token_ids=())
    requests = [Request([rng.randrange(8, 256) for _ in range(PROMPT)], seed, sampling) for seed in range(rows)]
    begin = time.process_time()  # both engines compute in this process
    completions = engine.generate(requests)
    seconds = time.process_time() - begin
    assert all(len(one.token_ids) == tokens for one in completions)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="*", choices=("vllm", "transformers"), default=["vllm", "transformers"])
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tries", type=int, default=3, help="(default: 3)")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"This machine, by the plan: {parse_cluster('cpu').device}\n")
    print("| engine | model | " + " | ".join(f"{rows} sequences" for rows in ROWS) + " |\n" + "|---" * 6 + "|")
    with tempfile.TemporaryDirectory() as directory:
        for number, model in enumerate(args.models):
            path = os.path.join(directory, str(number))
            make_model(MODELS[model], None, path)
            for engine in args.engines:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    steps = process.submit(measure, engine, path, args.dtype, args.tries).result()
                cells = []
                for rows, seconds in zip(ROWS, steps, strict=True):
                    cells.append(f"{1e3 * planned(engine, path, args.dtype, rows):.1f} / {1e3 * seconds:.1f}")
                print(f"| {engine} | {model} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
