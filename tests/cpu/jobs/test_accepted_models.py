"""A whole job on a model that the comparison with its own class refuses, with `model.check=accept`."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from tests.support.jobs import run_forked_job
from trainer.models.tiny import TinyShape, build_tiny

UNREAD = "model.layers.0.self_attn.q_proj.bias"


def test_an_accepted_model_is_named_at_each_start_and_in_the_manifest(tmp_path):
    build_tiny(TinyShape(hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16), f"{tmp_path}/model")
    file = tmp_path / "model/model.safetensors"
    save_file(load_file(file) | {UNREAD: torch.zeros(16)}, file, metadata={"format": "pt"})
    words = ("model.path=model", "trainer.run_name=run", "sft.steps=1", f"model.cache_dir={tmp_path}/cache")
    problem = f"its files hold {UNREAD}, which Qwen3ForCausalLM does not read"
    refused = run_forked_job(*words, cwd=tmp_path, job="sft")
    assert refused.returncode == 2 and f"{problem}; model.check=accept trains it nevertheless" in refused.stderr
    for steps, resumes in ((1, ()), (2, ("trainer.resume_mode=latest",))):
        own = ("model.check=accept", f"sft.steps={steps}", *resumes)
        done = run_forked_job(*words, *own, cwd=tmp_path, job="sft")
        assert done.returncode == 0, done.stderr
        assert f"{problem}; model.check=accept trains it nevertheless" in done.stdout + done.stderr
        manifest = json.loads((tmp_path / f"outputs/run/checkpoints/global_step_{steps}/manifest.json").read_text())
        assert [line.partition(": ")[2] for line in manifest["accepted"]] == [problem]
