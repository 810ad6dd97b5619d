"""A trained score head is a reward model: for transformers, for a task that starts from it, for no language model."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.support.architectures import ARCHITECTURES, CONVERTED, VOCABULARY, random_model
from tests.support.ranks import run_ranks
from tests.support.runs import OpenRun, configured
from tests.support.saved_policy import SavedPolicy
from tests.support.tables import table
from trainer.checkpoint.components import json_component
from trainer.config import LM, SCORE, VALUE, Config, RoleSpec, policy_role
from trainer.errors import UserError
from trainer.evaluate.job import _weights
from trainer.evaluate.subject import Subject, find_subject
from trainer.models.checks import check_head, check_trained_models, classifier_fields, refuse_classifier_in
from trainer.models.export import policy_assets, write_files
from trainer.models.export_weights import export, write_safetensors
from trainer.models.files import ADAPTER_CONFIG
from trainer.models.loading import load_model, load_pretrained
from trainer.parallel.packing import Packing
from trainer.workers.rank import Rank

LENGTHS = [5, 2, 7]
IDS = torch.randint(2, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))


class Tokenizer:
    eos_token_id, pad_token_id = 1, 0


def policy(head: str, cfg: Config | None = None) -> RoleSpec:
    return dataclasses.replace(policy_role(cfg or Config()), head=head)


def train(rank: Rank, paths: dict[str, str], out: str) -> dict[str, Any]:
    """Give each model a head, and write it; return the scores, the head of a task that starts from it, and refusals."""
    found = {}
    for name, path in paths.items():
        export_path = f"{out}/{name}"
        module = load_model(rank.cfg, path, rank.layout, policy(SCORE, rank.cfg))
        assert not module.value_head.weight.full_tensor().any(), "it starts at 0 where the files have none"
        with torch.no_grad():
            module.value_head.weight.fill_(0.5)
            module.value_head.weight.mul_(2)
            scores = module(IDS, Packing(LENGTHS, "cpu"))
        write_safetensors(module, export_path, torch.float32)
        config = json.loads(Path(path, "config.json").read_text())
        fields = classifier_fields(module.config, Tokenizer(), "model.path", False)
        write_files(export_path, {"config.json": json.dumps(config | fields).encode()})
        again = load_model(rank.cfg, export_path, rank.layout, policy(SCORE, rank.cfg))
        with torch.no_grad():
            rescored = again(IDS, Packing(LENGTHS, "cpu"))
        try:
            load_model(rank.cfg, export_path, rank.layout, policy(LM, rank.cfg))
            refusal = ""
        except UserError as error:
            refusal = str(error)
        found[name] = (scores, rescored, refusal)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("models")
    configs = {"qwen3": ARCHITECTURES["qwen3"], "mixtral": CONVERTED["mixtral"]}
    for name, config in configs.items():
        random_model(config, "eager").save_pretrained(root / name)
    paths = {name: str(root / name) for name in configs}
    return root / "out", run_ranks(1, train, paths, str(root / "out"), cfg=Config())[0]


@torch.no_grad()
@table("name", ["qwen3", "mixtral"])
def test_transformers_reads_a_trained_score_head_and_gives_the_same_scores(trained, name):
    out, found = trained
    scores, rescored, refusal = found[name]
    model, report = AutoModelForSequenceClassification.from_pretrained(
        out / name, output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.config.num_labels == 1
    rows = IDS[0].split(LENGTHS)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=Tokenizer.pad_token_id)
    last = scores[torch.arange(3), torch.tensor(LENGTHS) - 1]
    torch.testing.assert_close(model.eval()(padded, attention_mask=(padded != 0).long()).logits[:, 0], last)
    torch.testing.assert_close(rescored, scores, atol=1e-5, rtol=1e-5)  # a task that starts from it
    assert "is a reward model, which scores texts and writes none" in refusal
    assert type(load_pretrained(str(out / name), "auto", False)) is type(model)
    with pytest.raises(UserError, match=r"^model\.path=.*: .*ForSequenceClassification is a reward model"):
        refuse_classifier_in(str(out / name), "model.path")


def test_a_tokenizer_that_pads_with_its_end_token_lets_transformers_score_single_texts():
    tokenizer = Tokenizer()
    tokenizer.pad_token_id = tokenizer.eos_token_id
    fields = classifier_fields(ARCHITECTURES["qwen3"], tokenizer, "x", False)
    assert fields["pad_token_id"] is None and fields["architectures"] == ["Qwen3ForSequenceClassification"]


def test_a_family_without_a_sequence_classifier_is_refused():
    config = CONVERTED["ernie4_5_moe"]
    with pytest.raises(UserError, match=r"^model\.path=x: transformers has no sequence classifier for .*ernie4_5_moe"):
        check_head(config, policy(SCORE), "x")
    check_head(config, policy(VALUE), "x")
    check_head(config, dataclasses.replace(policy(SCORE), trained=False), "x")


def with_head(architecture: str) -> SavedPolicy:
    """Return a checkpoint of a policy with a head."""
    model = random_model(ARCHITECTURES["qwen3"], "eager")
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    weights["value_head.weight"] = torch.ones(1, 32)
    return SavedPolicy(weights, {**model.config.to_dict(), "architectures": [architecture]})


def test_a_checkpoint_of_a_score_head_is_exported_as_a_reward_model(tmp_path):
    export(with_head("Qwen3ForSequenceClassification"), str(tmp_path / "out"), "float32", 10**9)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written["score.weight"].all() and not {"value_head.weight", "lm_head.weight"} & set(written)
    with pytest.raises(UserError, match="has a head for values or scores, which an adapter's files lack"):
        export(with_head("Qwen3ForSequenceClassification"), str(tmp_path / "adapter"), "float32", 1, adapter=True)
    with pytest.raises(UserError, match="has a head for values or scores, which no class of transformers reads"):
        export(with_head("Qwen3ForCausalLM"), str(tmp_path / "values"), "float32", 10**9)


class Adapted(SavedPolicy):
    """A checkpoint of adapters and a head, which belong to the weights in the directory `base`."""

    def __init__(self, weights: dict[str, torch.Tensor], config: dict[str, Any], base: Path):
        super().__init__(weights, config)
        self._lora = {"r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base)}

    def json(self, path: str, shape: dict) -> dict[str, Any]:
        return self._lora if path.endswith(ADAPTER_CONFIG) else super().json(path, shape)


def test_a_reward_model_says_what_it_is_wherever_a_model_is_named(tmp_path):
    """With adapters, merged without ranks. Rewards, a critic and more training start from it; no policy, no teacher."""
    base, out, layer = tmp_path / "base", str(tmp_path / "out"), "model.layers.0.self_attn.q_proj"
    lm = random_model(ARCHITECTURES["qwen3"], "eager")
    lm.save_pretrained(base)
    before = lm.state_dict()[f"{layer}.weight"]
    a, b = torch.ones(2, before.shape[1]), torch.ones(before.shape[0], 2)
    adapters = {f"{layer}.lora_A.default.weight": a, f"{layer}.lora_B.default.weight": b}
    config = {**lm.config.to_dict(), "architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    head = {"value_head.weight": torch.full((1, 32), 2.0)}
    export(Adapted({**adapters, **head}, config, base), out, "float32", 10**9)
    model, report = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(model.score.weight, head["value_head.weight"])
    torch.testing.assert_close(model.state_dict()[f"{layer}.weight"], before + 2 * b @ a)

    sentence = "=.*/out: Qwen3ForSequenceClassification is a reward model, which scores texts and writes none"
    for keys, refused in [
        ({"trainer.task": "rm", "model.path": out}, None),
        ({"reward.name": "model", "reward.model.path": out}, None),
        ({"algorithm.advantage_estimator": "gae", "trainer.critic.path": out}, None),
        ({"algorithm.teacher.path": out, "algorithm.opd_kl_coef": 1.0}, "algorithm.teacher.path"),
        ({"model.path": out}, "model.path"),
        ({"trainer.task": "sft", "model.path": out}, "model.path"),
        ({"trainer.task": "dpo", "model.path": out}, "model.path"),
    ]:
        cfg = configured(tmp_path / "run", {"model.path": str(base), **keys})
        with pytest.raises(UserError, match=f"^{refused}{sentence}") if refused else nullcontext():
            check_trained_models(cfg)
    with pytest.raises(UserError, match="base: its files lack the weight score.weight$"):  # for rewards
        load_pretrained(str(base), torch.float32, False, {"score.weight"})
    cfg = configured(tmp_path / "run", {"model.path": out, "trainer.task": "rm"})
    with OpenRun(cfg, {"step": 1}) as run:
        run.components.append(json_component("policy/huggingface/config", lambda: config, lambda _: None))
        run.save(1, roles=["policy"])
    for evaluate in (lambda: _weights(cfg, Subject(out), "cpu"), lambda: find_subject([str(tmp_path / "run")])):
        with pytest.raises(UserError, match="Qwen3ForSequenceClassification is a reward model, which scores texts"):
            evaluate()


def test_an_export_that_cannot_have_the_head_is_refused_before_the_first_step(tmp_path, monkeypatch):
    random_model(ARCHITECTURES["qwen3"], "eager").save_pretrained(tmp_path)
    cfg = Config()
    cfg.trainer.hf_save_interval = 2
    monkeypatch.setattr(Config, "roles", property(lambda config: (policy(VALUE, config),)))
    with pytest.raises(UserError, match=r"trainer\.hf_save_interval.*the policy has a head for values"):
        policy_assets(cfg, str(tmp_path), Tokenizer())
    cfg.trainer.hf_save_lora, cfg.trainer.policy.lora.rank = "adapter", 4
    monkeypatch.setattr(Config, "roles", property(lambda config: (policy(SCORE, config),)))
    with pytest.raises(UserError, match=r"trainer\.hf_save_lora.*an adapter's files lack"):
        policy_assets(cfg, str(tmp_path), Tokenizer())
    cfg.trainer.hf_save_lora = "merged"
    config = json.loads(policy_assets(cfg, str(tmp_path), Tokenizer())["config.json"])
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and config["pad_token_id"] == 0
