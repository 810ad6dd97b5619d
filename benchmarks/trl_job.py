"""The TRL side of `benchmarks.vs_trl`. It runs in an environment that has TRL and does not have this project.

    python trl_job.py SETTINGS

SETTINGS is a JSON file (see `benchmarks.vs_trl`). Prints a JSON object: the seconds of each step after the first, the
CPU seconds of one, and the mean reward of each.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from vowels import score


class Clock(TrainerCallback):
    """Notes the time, and the CPU time of this process, at the end of every optimizer step."""

    def __init__(self):
        self.times = []
        self.cpu_times = []

    def on_step_end(self, args, state, control, **_):
        self.times.append(time.perf_counter())
        self.cpu_times.append(time.process_time())


def main(s: dict) -> dict:
    torch.set_num_threads(s["threads"])
    with open(s["data"], encoding="utf-8") as file:
        questions = [json.loads(line)["question"] for line in file][: s["rows"]]
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in questions])
    samples, minis = s["prompts"] * s["n"], s["mini_batches"]

    rewards: list[float] = []

    def reward(completions, **_):
        scores = [score(completion[0]["content"], "") for completion in completions]
        rewards.append(sum(scores) / len(scores))
        return scores

    args = trl.GRPOConfig(
        output_dir=s["out"],
        use_cpu=True,
        bf16=s["dtype"] == "bfloat16",
        per_device_train_batch_size=samples // minis,
        steps_per_generation=minis,
        gradient_accumulation_steps=1,
        num_generations=s["n"],
        max_completion_length=s["tokens"],
        max_steps=s["steps"] * minis,
        learning_rate=s["lr"],
        lr_scheduler_type="constant",
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        temperature=1.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        seed=s["seed"],
        logging_steps=minis,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(s["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=args,
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained(s["model"], padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    ends, cpu_ends = clock.times[minis - 1 :: minis], clock.cpu_times[minis - 1 :: minis]
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    return {
        "seconds": [after - before for before, after in zip(ends, ends[1:], strict=False)],
        "cpu_seconds": (cpu_ends[-1] - cpu_ends[0]) / (len(cpu_ends) - 1),
        "rewards": rewards,
        "mean_length": sum(lengths) / len(lengths),
        "version": trl.__version__,
    }


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as settings:
        result = main(json.load(settings))
    print(json.dumps(result))
