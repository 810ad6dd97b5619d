"""A job that trains a reward model: its checkpoints and exports are one, and transformers reads them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.support.forks import run_forked
from tests.support.jobs import environment, metrics
from trainer import load_checkpoint
from trainer.checkpoint.__main__ import main as checkpoint_command
from trainer.models.tiny import TinyShape, build_tiny

pytestmark = pytest.mark.slow
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
GENERATION = '{"do_sample": false, "temperature": 0.5}'


def test_a_trained_reward_model_is_saved_exported_and_read(tmp_path):
    """Also with a generation config that transformers does not write again."""
    build_tiny(TinyShape(**SIZE), str(tmp_path / "model"))
    (tmp_path / "model/generation_config.json").write_text(GENERATION)
    pairs = [{"prompt": f"{i}?", "chosen": f"{i * 7}!", "rejected": "no" * (i % 3 + 1)} for i in range(10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    job = ["trainer.task=tests.support.reward_model:TRAINED", f"model.path={tmp_path}/model", "data=files",
           f"data.train_files=[{tmp_path}/pairs.jsonl]", "trainer.val_interval=-1", "trainer.mini_batch_size=4",
           "trainer.train_batch_size=4", "trainer.total_steps=2", "trainer.hf_save_interval=2",
           "trainer.ckpt_interval=2", "trainer.policy.optimizer.lr=1e-2", "logger.plot=false"]  # fmt: skip
    job += [f"trainer.run_dir={tmp_path}/run", "trainer.ray_address=processes", "trainer.device=cpu"]
    done = run_forked("trainer", ["train", *job], tmp_path, environment(), 300)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = metrics(tmp_path / "run")
    assert first["policy/loss"] == pytest.approx(math.log(2)) and last["policy/margin"] > 0, "the head starts at 0"

    exported, offline = tmp_path / "run/exports/global_step_2/policy", tmp_path / "offline"
    checkpoint = tmp_path / "run/checkpoints/global_step_2"
    assert checkpoint_command(["export", str(checkpoint), str(offline), "--dtype", "float32"]) == 0
    weights, others = (load_file(path / "model.safetensors") for path in (exported, offline))
    assert set(weights) == set(others) and all(torch.equal(weights[name], others[name]) for name in weights)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (exported / name).read_text() == (offline / name).read_text(), name
    assert (exported / "generation_config.json").read_text() == GENERATION
    model, report = AutoModelForSequenceClassification.from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.score.weight.abs().sum() > 0
    assert type(load_checkpoint(checkpoint).model()) is type(model)


def test_the_presets_over_pairs_train_a_small_model_of_their_family(tmp_path):
    """On chats as those of UltraFeedback have them. Rewards are 0 first, and the pairs are learnt then."""
    build_tiny(TinyShape(**SIZE), str(tmp_path / "model"))
    chats = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i * 7}!"}] for i in range(8)]
    worse = [[chat[0], {"role": "assistant", "content": "no" * (i % 3 + 1)}] for i, chat in enumerate(chats)]
    rows = [{"chosen": chat, "rejected": bad, "score_chosen": 7.0} for chat, bad in zip(chats, worse, strict=True)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task in ("dpo", "rm"):
        job = [task, f"experiment={task}_qwen3_0.6b", f"model.path={tmp_path}/model", "data.train_files=[pairs.jsonl]",
               "data.val_files=[pairs.jsonl]", "trainer.train_batch_size=8", "trainer.mini_batch_size=8",
               "trainer.total_steps=3", "trainer.val_interval=3", "trainer.policy.optimizer.lr=1e-2",
               "trainer.device=cpu", "trainer.ray_address=processes"]  # fmt: skip
        done = run_forked("trainer", job, tmp_path, environment(), 300)
        assert done.returncode == 0, done.stdout + done.stderr
        run = tmp_path / f"outputs/{task}_qwen3_0.6b"
        before, *_, last = metrics(run)
        assert last["val/rewards/accuracies"] == 1 and last["val/loss"] < before["policy/loss"] == pytest.approx(
            math.log(2)
        )
        assert (last["step"], last["progress/samples"]) == (3, 48)
        assert json.loads((run / "exports/global_step_3/policy/config.json").read_text())["model_type"] == "qwen3"
