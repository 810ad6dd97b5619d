"""A mixture of experts in a whole job with vLLM: trained, synced, exported, and resumed."""

from __future__ import annotations

import shutil

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from tests.support.engines import start_vllm, vllm_launcher
from tests.support.generation import SAMPLED, assert_agrees, make_requests
from tests.support.jobs import comparable, metrics, run_job
from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config, TinyConfig
from trainer.models.tiny import build_tiny


def test_experts_train_sync_export_and_resume(tmp_path):
    build_tiny(TinyConfig(), str(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
        max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    run, export = tmp_path / "outputs/run", tmp_path / "export"

    def train(*overrides: str) -> list[dict]:
        done = run_job(
            "model.path=model", "trainer.ray_address=processes", "trainer.run_name=run", "trainer.val_interval=-1",
            "trainer.hf_save_interval=2", "rollout.journal=false", *overrides, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return metrics(run)

    rows = train()
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4
    shutil.move(run / "exports/global_step_2/policy", export)
    shutil.rmtree(run / "checkpoints/global_step_2")
    assert comparable(train("trainer.resume_mode=latest")) == comparable(rows)
    whole, again = (load_file(path / "model.safetensors") for path in (export, run / "exports/global_step_2/policy"))
    assert whole.keys() == again.keys() == load_file(tmp_path / "model/model.safetensors").keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    with vllm_launcher() as launcher, ProcessCluster(Config(), "cpu", launcher) as cluster:
        requests = make_requests(6)
        completions = start_vllm(cluster, str(export)).generate(requests)
        assert_agrees(model, requests, completions, SAMPLED.temperature)
