"""The TRL side of `benchmarks.vs_trl` and `benchmarks.resume_vs_trl`, in an environment without this project.

    python trl_job.py SETTINGS

SETTINGS is a JSON file (see these two). Prints a JSON object: the seconds of each step after the first, the CPU seconds
of one, and the mean reward of each. A job that saves (`save_every`) is deterministic, can be continued (`resume`), and
writes a line for each step to `steps.jsonl`, and at its end a digest of its weights to `weights.txt`.
"""

from __future__ import annotations

import hashlib
import json
import os
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


class StepLog(TrainerCallback):
    """Writes what the trainer logs of each step of `minis` optimizer steps, and how long it took."""

    def __init__(self, path, minis):
        self.path = path
        self.minis = minis
        self.begin = None

    def on_step_begin(self, args, state, control, **_):
        self.begin = self.begin or time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_):
        if self.begin is None or "loss" not in logs:
            return  # the summary at the end
        seconds, self.begin = time.perf_counter() - self.begin, None
        with open(self.path, "a", encoding="utf-8") as file:
            row = {"step": state.global_step // self.minis, "seconds": seconds, "logged": logs}
            file.write(json.dumps(row) + "\n")


def digest(model) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def status(name: str) -> int:
    with open("/proc/self/status", encoding="utf-8") as file:
        return int(next(line for line in file if line.startswith(f"{name}:")).split()[1]) * 1024


def train_on_pairs(s: dict) -> dict:
    """DPO with reference log-probs that are computed before the first step, as fast as TRL can without a GPU."""

    class Peak(Clock):
        def on_step_end(self, *given, **named):
            super().on_step_end(*given, **named)
            if len(self.times) == 1:
                with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
                    file.write("5")

    args = trl.DPOConfig(
        output_dir=s["out"], use_cpu=True, bf16=False, per_device_train_batch_size=s["pairs"], max_steps=s["steps"],
        learning_rate=s["lr"], lr_scheduler_type="constant", beta=0.1, gradient_checkpointing=False, report_to=[],
        precompute_ref_log_probs=True, max_length=1024, save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    with open(s["data"], encoding="utf-8") as file:
        rows = Dataset.from_list([json.loads(line) for line in file][: s["pairs"] * s["steps"]])
    begin = time.process_time()
    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(s["model"], dtype=torch.float32),
        args=args, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(s["model"]),
        callbacks=[clock := Peak()],
    )  # fmt: skip
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {
        "seconds": [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)],
        "cpu_seconds": (clock.cpu_times[-1] - clock.cpu_times[0]) / (len(clock.times) - 1),
        "before": clock.cpu_times[0] - begin,
        "losses": losses,
        "peak": status("VmHWM"),
    }


def main(s: dict) -> dict:
    torch.set_num_threads(s["threads"])
    if "pairs" in s:
        return train_on_pairs(s)
    with open(s["data"], encoding="utf-8") as file:
        questions = [json.loads(line)["question"] for line in file][: s["rows"]]
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in questions])
    samples, minis = s["prompts"] * s["n"], s["mini_batches"]

    rewards: list[float] = []

    def reward(completions, **_):
        scores = [score(completion[0]["content"], "") for completion in completions]
        rewards.append(sum(scores) / len(scores))
        return scores

    saving = {"save_strategy": "no"}
    callbacks = [clock := Clock()]
    if s.get("save_every"):
        saving = {"save_strategy": "steps", "save_steps": s["save_every"] * minis, "full_determinism": True}
        callbacks.append(StepLog(os.path.join(s["out"], "steps.jsonl"), minis))
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
        report_to=[],
        disable_tqdm=True,
        **saving,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(s["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=args,
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained(s["model"], padding_side="left"),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=s.get("resume", False))
    if s.get("save_every"):
        with open(os.path.join(s["out"], "weights.txt"), "w", encoding="utf-8") as file:
            file.write(digest(trainer.model))
        return {}
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
