"""Preferences and reward models end as if never killed, also on another number of ranks."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.support.jobs import comparable, metrics
from tests.support.killed_jobs import run_until
from trainer import load_checkpoint
from trainer.config import DataConfig
from trainer.data.examples import load_pairs
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer, stop_token_ids

pytestmark = [pytest.mark.early, pytest.mark.slow]
STEPS = 4
EXPORT = f"exports/global_step_{STEPS}/policy"
DPO = ("trainer.task=dpo", "dpo.max_length=64", "trainer.mini_batch_size=4")
KINDS = {
    "dpo": (*DPO, "dpo.loss_type=ipo"),
    "adapters": (*DPO, "dpo.sft_coef=0.1", "trainer.policy.lora.rank=4"),
    "rm": ("trainer.task=rm", "rm.center_rewards_coefficient=0.01", "rm.max_length=64",
           "trainer.policy.optimizer.lr=1e-2"),
}  # fmt: skip
PHASES = ("scored,3", "updating,1", "logged,1")
"""Each is in step 3: the first start saves step 2, and the others begin behind it."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_over_pairs_ends_as_if_never_killed(tmp_path, kind):
    """DPO, whose reference is the initial policy after a resume, too; DPO with adapters, whose base is the reference; a
    reward model, which transformers reads. They are killed, DPO in several phases, and continue on other ranks.
    """
    size = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "head_dim": 16}
    build_tiny(TinyShape(**size, num_kv_heads=1), str(tmp_path / "model"))
    rows = [{"prompt": f"{i}?", "chosen": f"{i * 7}!", "rejected": "no" * (i % 3 + 1)} for i in range(10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = (f"model.path={tmp_path}/model", "data=files", "trainer.num_workers=2",
            f"data.train_files=[{tmp_path}/pairs.jsonl]", f"data.val_files=[{tmp_path}/pairs.jsonl]",
            f"trainer.total_steps={STEPS}", "trainer.val_interval=2", *KINDS[kind])  # fmt: skip
    whole, killed, moved = (tmp_path / name for name in ("whole", "killed", "moved"))
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={whole}", *base)
    first, *_, last = rows_of_whole = metrics(whole)
    assert last["progress/samples"] == 2 * 4 * STEPS and last["val/rewards/margins"] > 0
    assert last["val/loss"] < rows_of_whole[1]["val/loss"]
    if kind != "rm":
        assert first["rewards/chosen"] == first["rewards/rejected"] == 0.0

    log, is_saved = tmp_path / "killed.log", killed / "checkpoints/global_step_2"
    for phase in PHASES if kind == "dpo" else ("logged,3",):
        reached = tmp_path / phase.partition(",")[0]
        env = {"TRAINER_FAILPOINT": f"{phase},{reached}"}
        at_phase = lambda _, reached=reached: reached.exists() and is_saved.exists()  # noqa: E731
        assert not run_until(log, f"trainer.run_dir={killed}", *base, env=env, kill_when=at_phase), phase
    shutil.copytree(killed, moved)
    if kind == "dpo":
        check_other_reference(tmp_path, f"trainer.run_dir={killed}", *base)
    assert run_until(tmp_path / "killed.log", f"trainer.run_dir={killed}", *base)
    assert "resume verified: 1 replayed step" in (tmp_path / "killed.log").read_text()
    assert comparable(metrics(killed)) == comparable(rows_of_whole)
    weights = f"{EXPORT}/model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()
    assert run_until(tmp_path / "moved.log", f"trainer.run_dir={moved}", *base, "trainer.num_workers=1")
    for one, two in zip(comparable(metrics(moved)), comparable(rows_of_whole), strict=True):
        assert one == pytest.approx(two, rel=1e-3, abs=1e-5)
    if kind == "rm":
        check_scores(whole, tmp_path, last)
        chain = (f"trainer.run_dir={tmp_path}/chain", f"model.path={tmp_path}/model", "data=files", "reward.name=model",
                 f"data.train_files=[{tmp_path}/pairs.jsonl]", "data.answer_key=chosen", "trainer.total_steps=1",
                 f"reward.model.path={whole}/{EXPORT}", "trainer.val_interval=-1")  # fmt: skip
        assert run_until(tmp_path / "chain.log", *chain)
        (row,) = metrics(tmp_path / "chain")
        assert row["reward/reward_model/mean"] == row["reward/mean"] != 0, "a policy learns from its scores"


def check_other_reference(tmp_path, *overrides: str) -> None:
    """Other weights at `model.path` would be another reference, so a resume refuses them."""
    weights = tmp_path / "model/model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-4] + bytes(4))
    assert run_until(tmp_path / "refused.log", *overrides, status=1)
    assert "allow_config_change=[model.path]" in (tmp_path / "refused.log").read_text()
    weights.write_bytes(kept)


def check_scores(run, tmp_path, last) -> None:
    """The export, and the model of the checkpoint, give texts the scores that the ranks have measured."""
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    data = DataConfig(train_files=[str(tmp_path / "pairs.jsonl")], train_size=4)
    stops = stop_token_ids(str(tmp_path / "model"), tokenizer)
    samples = [
        sample for pair in load_pairs(data, "train", tokenizer, stops, ("", 64), False) for sample in pair.samples
    ]
    exported = AutoModelForSequenceClassification.from_pretrained(run / EXPORT)
    saved = load_checkpoint(run / f"checkpoints/global_step_{STEPS}").model()
    assert type(saved) is type(exported) and exported.num_labels == 1
    padded = AutoTokenizer.from_pretrained(run / EXPORT).pad({"input_ids": [one.token_ids.tolist() for one in samples]})
    with torch.no_grad():
        scores = exported(**{name: torch.tensor(value) for name, value in padded.items()}).logits[:, 0].numpy()
        alone = [float(saved(torch.from_numpy(one.token_ids[None].astype(np.int64))).logits) for one in samples]
    assert scores.tolist() == pytest.approx(alone, abs=1e-5)
    assert last["val/rewards/chosen"] == pytest.approx(scores[::2].mean(), abs=1e-5)
    assert last["val/rewards/rejected"] == pytest.approx(scores[1::2].mean(), abs=1e-5)
