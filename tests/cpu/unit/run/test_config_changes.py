"""What a resume may change, which changes act on what is restored, and which are refused."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.config_keys import ALLOWED, EXPERIENCE, HARMLESS, KL, LEDGER, PROOFS, REFUSED
from tests.support.runs import OpenRun
from trainer.algorithms import AdaptiveKL, FixedKL, shape_rewards
from trainer.checkpoint.parts import json_part
from trainer.config import OPEN_SECTIONS, AlgorithmConfig, Config, DataConfig, SFTConfig, TinyConfig
from trainer.data.datasets import Prompt, load_prompts
from trainer.data.examples import load_train
from trainer.data.ledger import Ledger
from trainer.data.rollouts import write_rollouts
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.learner.experience import add_advantages, correct_rollouts, leave_out_rows
from trainer.models.tiny import build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.run import compatibility
from trainer.run.compatibility import Change
from trainer.run.directory import RunDirectory
from trainer.run.replay import REPLAY_FILE, ReplayAudit
from trainer.sources.supervised import SupervisedSource


def keys_of(section: Any, prefix: str = "") -> list[str]:
    """Every key of the schema."""
    keys = []
    for f in dataclasses.fields(section):
        value, key = getattr(section, f.name), f"{prefix}{f.name}"
        keys += keys_of(value, f"{key}.") if dataclasses.is_dataclass(value) else [key]
    return keys


def passes(key: str, allowed: list[str]) -> bool:
    try:
        compatibility.check([Change(key, "before", "after")], allowed)
    except UserError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------
# Every key has a decision


def test_every_key_has_one_decision():
    decided = [*HARMLESS, *ALLOWED, *REFUSED]
    assert sorted(decided) == sorted(keys_of(Config())), "decide in config_keys.py what a resume may change"


@pytest.mark.parametrize("key", keys_of(Config()))
def test_a_resume_may_change_what_the_written_list_says(key):
    assert passes(key, []) == (key in HARMLESS)
    assert passes(key, [key]) == passes(key, [key.partition(".")[0]]) == (key not in REFUSED)


@pytest.mark.parametrize("proof", PROOFS)
def test_the_proof_of_an_allowed_change_is_a_test(proof):
    file, _, name = PROOFS[proof].partition("::")
    assert callable(getattr(importlib.import_module(f"tests.cpu.{file.removesuffix('.py').replace('/', '.')}"), name))
    assert proof in ALLOWED.values()


def test_the_lists_name_real_keys():
    keys = keys_of(Config())
    for patterns in (
        compatibility.HARMLESS,
        compatibility.IMPOSSIBLE,
        compatibility.ROUNDING,
        compatibility.VALIDATION,
    ):
        for pattern in patterns:
            assert any(compatibility.matches(key, (pattern,)) for key in keys), pattern
    assert all(any(compatibility.matches(key, (pattern,)) for key in ALLOWED) for pattern in compatibility.REASONS)
    assert set(OPEN_SECTIONS) <= set(keys)


# ----------------------------------------------------------------------------------------------------------
# At the start of a resumed run


Settings = dict[str, Any]


def configured(root: Any, *changes: Settings, **trainer: Any) -> Config:
    cfg = Config()
    paths = {"trainer.run_dir": str(root), "trainer.ckpt_path": str(root / "checkpoints")}
    for key, value in {**paths, **{f"trainer.{k}": v for k, v in trainer.items()}, **_merged(changes)}.items():
        *sections, name = key.split(".")
        node: Any = cfg
        for section in sections:
            node = getattr(node, section)
        assert hasattr(node, name), key
        setattr(node, name, value)
    return cfg


def _merged(changes: tuple[Settings, ...]) -> Settings:
    return {key: value for change in changes for key, value in change.items()}


def opened(cfg: Config, supervised: bool = False) -> OpenRun:
    run = OpenRun(cfg, {"step": 0}, supervised)
    run.parts.append(json_part("models", dict, lambda _: None))
    return run


def save(cfg: Config, *steps: int, supervised: bool = False, metrics: dict[str, float] | None = None) -> None:
    """A run of `cfg` that has saved these steps."""
    cfg.trainer.resume_mode = "latest"
    with opened(cfg, supervised=supervised) as run:
        for step in steps:
            run.save(step, metrics)


POLICY_COSINE = {"trainer.policy.optimizer.scheduler": "cosine"}
SFT_COSINE = {"sft.optimizer.scheduler": "cosine"}
CRITIC_COSINE = {"algorithm.advantage_estimator": "gae", "trainer.critic.optimizer.scheduler": "cosine"}
ADAPTIVE = {"algorithm.kl_controller": "adaptive", "algorithm.kl_coef": 0.1}


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"rollout.temperature": 0.5}, r"rollout.temperature=0.5: .*saved with 1.0.*change=\[rollout.temperature\]"),
        ({"rollout.top_p": 0.5}, r"rollout.top_p=0.5: .*saved with 1.0.*change=\[rollout.top_p\]"),
        ({"rollout.top_k": 5}, r"rollout.top_k=5: .*saved with -1.*change=\[rollout.top_k\]"),
        (
            {"trainer.policy.optimizer.weight_decay": 0.1},
            r"weight_decay=0.1: .*change=\[trainer.policy.optimizer.weight_decay\]",
        ),
    ],
)
def test_what_is_computed_changes_with_permission_alone(tmp_path, caplog, change, sentence):
    save(configured(tmp_path), 1)
    cfg = configured(tmp_path, change, resume_mode="latest")
    with pytest.raises(UserError, match=sentence):
        RunDirectory(cfg).open()
    (key,) = change
    cfg.trainer.allow_config_change = [key]
    caplog.set_level("INFO")
    with RunDirectory(cfg).open():
        assert any(line.startswith(f"config changed since the checkpoint: {key}: ") for line in caplog.messages)


@pytest.mark.parametrize(
    "settings, key, supervised, refused",
    [
        ({}, "trainer.total_steps", False, ""),
        (POLICY_COSINE, "trainer.total_steps", False, "trainer.policy.optimizer.schedule_steps"),
        (CRITIC_COSINE, "trainer.total_steps", False, "trainer.critic.optimizer.schedule_steps"),
        (POLICY_COSINE | {"trainer.policy.optimizer.schedule_steps": 5}, "trainer.total_steps", False, ""),
        (SFT_COSINE, "trainer.total_steps", False, ""),
        (POLICY_COSINE, "trainer.total_steps", True, ""),
        ({}, "sft.steps", True, ""),
        (SFT_COSINE, "sft.steps", True, "sft.optimizer.schedule_steps"),
        (SFT_COSINE | {"sft.optimizer.schedule_steps": 5}, "sft.steps", True, ""),
        ({}, "sft.steps", False, "sft.steps"),
        ({"model.path": "a/model"}, "sft.steps", False, ""),
    ],
)
def test_the_number_of_steps_is_free_unless_a_schedule_goes_by_it(tmp_path, settings, key, supervised, refused):
    save(configured(tmp_path, settings), 1, supervised=supervised)
    cfg = configured(tmp_path, settings, {key: 777}, resume_mode="latest")
    if refused:
        with pytest.raises(UserError, match=rf"{refused}=777: .*allow_config_change=\[{refused}\]"):
            RunDirectory(cfg, supervised).open()
        cfg.trainer.allow_config_change = [refused]
    with RunDirectory(cfg, supervised).open() as run:
        assert run.resume.checkpoint.step == 1


@pytest.mark.parametrize(
    "change, critic, policy",
    [
        ({}, 0, 0),
        ({"trainer.mini_batch_size": 16}, 6, 6),
        ({"trainer.train_batch_size": 32}, -3, -3),
        ({"trainer.train_batch_size": 128, "trainer.mini_batch_size": 64}, 0, 0),
        ({"trainer.update_epochs": 3}, 12, 12),
        ({"trainer.critic.warmup_steps": 2}, 0, -4),
        ({"trainer.critic.warmup_steps": 9, "trainer.update_epochs": 2}, 6, -6),
        ({"trainer.policy.optimizer.lr": 1.0}, 0, 0),
    ],
)
def test_a_schedule_is_where_a_run_started_with_the_new_batch_sizes_would_be(tmp_path, change, critic, policy):
    """After 3 steps of 2 optimizer steps each."""
    gae = {"algorithm.advantage_estimator": "gae"}
    save(configured(tmp_path, gae), 3)
    allowed = {"trainer.allow_config_change": list(change)}
    with RunDirectory(configured(tmp_path, gae, change, allowed, resume_mode="latest")).open() as run:
        assert run.resume.restore.added_steps == {"critic": critic, "policy": policy}
    save(configured(tmp_path / "sft"), 3, supervised=True)
    with RunDirectory(
        configured(tmp_path / "sft", change, allowed, resume_mode="latest"), supervised=True
    ).open() as run:
        assert not any(run.resume.restore.added_steps.values())


def test_the_weight_of_the_kl_does_not_change_under_an_adaptive_controller(tmp_path):
    change = {"algorithm.kl_coef": 0.3, "trainer.allow_config_change": ["algorithm"]}
    save(configured(tmp_path / "adaptive", ADAPTIVE), 1)
    with pytest.raises(UserError, match="algorithm.kl_coef=0.3: .*saved with 0.1.*adaptive controller has steered"):
        RunDirectory(configured(tmp_path / "adaptive", ADAPTIVE, change, resume_mode="latest")).open()
    fixed = {"algorithm.kl_controller": "fixed"}
    with RunDirectory(configured(tmp_path / "adaptive", ADAPTIVE, change, fixed, resume_mode="latest")).open():
        pass
    fork = {
        "trainer.resume_path": str(tmp_path / "adaptive/checkpoints/global_step_1"),
        "trainer.resume_load": ["weights", "optimizer"],
    }
    with RunDirectory(configured(tmp_path / "fork", ADAPTIVE, change, fork, resume_mode="from_path")).open():
        pass  # the steered weight is not taken over
    save(configured(tmp_path / "fixed", ADAPTIVE, fixed), 1)
    with RunDirectory(configured(tmp_path / "fixed", ADAPTIVE, change, resume_mode="latest")).open():
        pass


def test_a_fall_back_is_held_against_the_config_of_the_older_checkpoint(tmp_path):
    save(configured(tmp_path), 1)
    save(configured(tmp_path, {"rollout.n": 4, "trainer.allow_config_change": ["rollout.n"]}), 2)
    cfg = configured(tmp_path, {"rollout.n": 4}, resume_mode="latest", on_resume_mismatch="fallback")
    with opened(cfg) as run:
        with pytest.raises(UserError, match=r"rollout.n=4: .*saved with 8.*change=\[rollout.n\]"):
            run.directory.fall_back()


# ----------------------------------------------------------------------------------------------------------
# After the resume


@pytest.mark.parametrize(
    "change, compared, tolerated",
    [
        ({}, True, False),
        ({"logger.samples": 1}, True, False),
        ({"trainer.total_steps": 9}, True, False),
        ({"trainer.max_tokens_per_micro_batch": 99}, True, True),
        ({"rollout.num_engines": 2}, True, True),
        ({"rollout.val_n": 3}, False, False),
        ({"rollout.n": 4, "trainer.allow_config_change": ["rollout.n"]}, False, False),
    ],
)
def test_replayed_steps_are_compared_as_far_as_the_config_is_the_same(tmp_path, caplog, change, compared, tolerated):
    save(configured(tmp_path), 1)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "policy/loss": 1.0}) + "\n" for n in (1, 2)))
    caplog.set_level("INFO")
    with opened(configured(tmp_path, change, resume_mode="latest")) as run:
        resume = run.resume
        audit = ReplayAudit(str(tmp_path), 1, 0.0, resume.same_rounding, resume.same_run)
        assert os.path.exists(tmp_path / REPLAY_FILE) == compared
        problem = audit.check(2, {"policy/loss": 1.0001})
    assert (problem is not None) == (compared and not tolerated)
    assert any("resume verified" in line for line in caplog.messages) == (compared and tolerated)


def test_the_best_checkpoints_are_those_by_the_metric_of_now(tmp_path):
    keep = {"trainer.max_ckpts_to_keep": 1, "trainer.keep_best": 1}
    for step, value in ((1, 0.9), (2, 0.1)):
        save(configured(tmp_path, keep), step, metrics={"val/accuracy": value, "val/reward/mean": 0.1})
    other = {"trainer.best_metric": "val/reward/mean"}
    for step, value in ((3, 0.5), (4, 0.2), (5, 0.1)):
        save(configured(tmp_path, keep, other), step, metrics={"val/reward/mean": value})
    kept = {name for name in os.listdir(tmp_path / "checkpoints") if name.startswith("global_step_")}
    assert kept == {"global_step_3", "global_step_5"}
    lower = {**other, "trainer.best_mode": "min"}
    save(configured(tmp_path, keep, lower), 6, metrics={"val/reward/mean": 0.9})
    kept = {name for name in os.listdir(tmp_path / "checkpoints") if name.startswith("global_step_")}
    assert kept == {"global_step_5", "global_step_6"}


def test_the_kl_controller_takes_its_settings_from_the_config():
    controller = AdaptiveKL(0.1, target=0.5, horizon=100)
    controller.load_state_dict({"kind": "adaptive", "coef": 0.3})
    controller.update(kl=0.55, samples=10)
    assert controller.coef == pytest.approx(0.3 * (1 + 0.1 * 10 / 100))  # the saved weight, the new target and horizon
    assert set(controller.state_dict()) == set(FixedKL(0.1).state_dict()) == {"kind", "coef"}
    adaptive, fixed = AdaptiveKL(0.1, 0.5, 100), FixedKL(0.1)
    adaptive.load_state_dict(FixedKL(0.7).state_dict())
    fixed.load_state_dict(AdaptiveKL(0.7, 0.5, 100).state_dict())
    assert adaptive.coef == fixed.coef == 0.1
    assert {key for key, proof in ALLOWED.items() if proof == KL} == {
        "algorithm.kl_controller",
        "algorithm.kl_target",
        "algorithm.kl_horizon",
    }


def gae(**options: Any) -> Settings:
    return {"advantage_estimator": "gae", **options}


CORRECTED = {"rollout_correction": "mis", "rollout_correction_low": 0.5, "rollout_correction_high": 2.0}
EXPERIENCE_CHANGES: list[tuple[str, Any, Settings]] = [
    ("normalize_std", False, {}),
    ("gamma", 0.5, gae(gamma=1.0)),
    ("lam", 0.5, gae(lam=1.0)),
    ("pass_k", 2, {"advantage_estimator": "grpo_passk", "pass_k": 1}),
    ("rollout_correction", "tis", {}),
    ("rollout_correction_level", "product", CORRECTED),
    ("rollout_correction_low", 0.9, CORRECTED),
    ("rollout_correction_high", 1.01, CORRECTED),
    ("filter_zero_variance", True, {}),
    ("overlong_buffer", 2, {}),
    ("overlong_factor", 3.0, {"overlong_buffer": 2}),
    ("overlong_masking", True, {}),
]


def experience(algorithm: AlgorithmConfig) -> dict[str, np.ndarray]:
    """What a step trains on, from two groups of three completions."""
    rng = np.random.default_rng(0)
    mask = (np.arange(5) < np.array([[5], [3], [4], [5], [2], [5]])).astype(np.float32)
    old = -np.abs(rng.normal(size=mask.shape)).astype(np.float32) * mask
    batch = {
        "mask": mask,
        "group_ids": np.array([0, 0, 0, 1, 1, 1]),
        "old_logprobs": old,
        "rollout_logprobs": (old + 0.5 * rng.normal(size=mask.shape).astype(np.float32)) * mask,
        "values": rng.normal(size=mask.shape).astype(np.float32),
    }
    lengths = mask.sum(axis=1).astype(int)
    status = ["length" if n == 5 else "stop" for n in lengths]
    rewards = shape_rewards(
        torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0]).double(),
        torch.from_numpy(lengths),
        5,
        algorithm.overlong_buffer,
        algorithm.overlong_factor,
    ).numpy()
    corrected, _ = correct_rollouts(add_advantages(batch, rewards, algorithm), algorithm)
    return leave_out_rows(corrected, rewards, status, algorithm)


@pytest.mark.parametrize("key, value, before", EXPERIENCE_CHANGES, ids=[key for key, *_ in EXPERIENCE_CHANGES])
def test_a_step_s_experience_follows_the_config(key, value, before):
    """The experience is a pure function of the step's rollouts and the config: nothing restored can hide a change."""
    old, new = (experience(AlgorithmConfig(**settings)) for settings in (before, {**before, key: value}))
    assert any(not np.array_equal(old[name], new[name]) for name in ("advantages", "mask"))


def test_every_key_of_the_experience_is_tried():
    assert {f"algorithm.{key}" for key, *_ in EXPERIENCE_CHANGES} == {
        key for key, proof in ALLOWED.items() if proof == EXPERIENCE
    }


# ----------------------------------------------------------------------------------------------------------
# The place in the data


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """A model's directory, another chat template, examples and rollouts."""
    root = tmp_path_factory.mktemp("files")
    build_tiny(TinyConfig(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1), str(root / "model"))
    (root / "other.jinja").write_text("{% for m in messages %}<|user|>Q: {{ m['content'] }}{% endfor %}<|assistant|>")
    for name, words in (("a", ("one", "three")), ("b", ("seven", "eleven"))):
        lines = [json.dumps({"prompt": word * (i + 1), "answer": word[::-1]}) for i, word in enumerate(words)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    tokenizer = load_tokenizer(str(root / "model"), None, False)
    episodes, texts = [], []
    for number, (tokens, reward) in enumerate((([65, 66], 1.0), ([67], 0.0))):
        ids = np.asarray([1, 2, *tokens])
        sample = Sample(ids, (np.arange(len(ids)) > 1).astype(np.float32), -np.arange(len(ids), dtype=np.float32))
        episodes.append(Episode(f"0:0:{number}", "0:0", [sample], reward))
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    write_rollouts(str(root), 1, [Prompt(0, (1, 2), "p", "a")], episodes, texts)
    rollouts = str(root / "rollouts/step_1.jsonl")
    return {
        "model": str(root / "model"),
        "template": str(root / "other.jinja"),
        "a": str(root / "a.jsonl"),
        "b": str(root / "b.jsonl"),
        "rollouts": rollouts,
    }


ROLLOUTS = {"source": "rollouts", "files": ("rollouts", "rollouts"), "max_length": 8}
LEDGER_CHANGES: list[tuple[str, Any, Settings, bool]] = [
    ("model.chat_template", "template", {}, False),
    ("rollout.max_prompt_tokens", 8, {}, False),
    ("sft.batch_size", 2, {}, True),
    ("sft.max_length", 64, {}, True),
    ("sft.max_length", 12, {}, False),
    ("sft.train_on", ["user"], {}, False),
    ("sft.weights", [3.0, 1.0], {"weights": [1.0, 1.0]}, True),
    ("sft.weights", [1.0, 1.0], {}, False),
    ("sft.source", "rollouts", {}, False),
    ("sft.min_reward", 0.5, ROLLOUTS, False),
]
"""Key, new value, what supervised training has set, and whether the change is accepted; else the ledger refuses it."""


def source_of(files: dict[str, str], before: Settings, key: str, value: Any = None) -> Ledger | SupervisedSource:
    """The source that `key` belongs to, with its new value if one is given."""
    settings = {"batch_size": 1, "max_length": 40, **before}
    names = settings.pop("files", ("a", "b"))
    section, _, name = key.partition(".")
    changed = {} if value is None else {name: value}
    if changed.get("source") == "rollouts":
        names = ("rollouts", "rollouts")
    data = DataConfig(train_files=[files[file] for file in names])
    template = files[changed["chat_template"]] if "chat_template" in changed else None
    tokenizer = load_tokenizer(files["model"], template, False)
    if section != "sft":
        prompts = load_prompts(data, "train", tokenizer, changed.get("max_prompt_tokens", 512)).prompts
        return Ledger([prompts], 1, "prompts", lambda: repr(prompts))
    sft = SFTConfig(**{**settings, **changed})
    parts = load_train(data, sft, tokenizer)
    return SupervisedSource(sft, parts, [], 1, lambda _: 0.0)


@pytest.mark.parametrize("key, value, before, accepted", LEDGER_CHANGES)
def test_a_change_of_what_is_drawn_acts_or_is_refused_by_the_ledger(files, key, value, before, accepted):
    old, new = source_of(files, before, key), source_of(files, before, key, value)
    if isinstance(old, SupervisedSource):
        old.next(1)
        old.commit(1)
    else:
        old.commit(old.take(1))
    state = json.loads(json.dumps(old.state_dict()))
    if not accepted:
        with pytest.raises(UserError, match="data: the .* is not that of the checkpoint"):
            new.load_state_dict(state)
        return
    new.load_state_dict(state)
    assert isinstance(old, SupervisedSource) and isinstance(new, SupervisedSource)
    before_change, after_change = old.next(2), new.next(2)
    assert [e.uid for e in before_change] != [e.uid for e in after_change]


def test_every_key_of_the_ledger_is_tried():
    assert {key for key, *_ in LEDGER_CHANGES} == {key for key, proof in ALLOWED.items() if proof == LEDGER}
