"""The contract of an engine, for both kinds, and what only vLLM has. All tests that start vLLM are in this file."""

from __future__ import annotations

import copy
import dataclasses
import random
import shutil
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Dots1Config,
    FalconH1Config,
    GptOssConfig,
    Lfm2Config,
    PretrainedConfig,
)

from tests.support.engines import start_vllm
from tests.support.generation import (
    GREEDY,
    ROLLOUT,
    SAMPLED,
    assert_agrees,
    assert_same,
    contents,
    logits_of,
    make_requests,
    tokens_of,
    with_sampling,
)
from tests.support.plain_pool import begin
from trainer.cluster.process_cluster import ProcessCluster
from trainer.cluster.worker_groups import CallFutures
from trainer.config import Config, RolloutConfig
from trainer.errors import UserError
from trainer.generation.engine import CUT, Completion, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.weight_sync import Adapter, SharedMemory
from trainer.learner.train_workers import StoredBatch, TrainWorkers
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.weight_deltas import digest_of
from trainer.objectives.base import make_objective
from trainer.parallel.batching import Batch, select
from trainer.seeding import derive_seed

pytestmark = pytest.mark.early


@pytest.fixture(scope="module")
def trained(model_paths):
    """The tied model's initial weights, as the trainer sees them."""
    return AutoModelForCausalLM.from_pretrained(model_paths[True], dtype=torch.float32).eval()


def test_greedy_follows_the_trainer(engine, trained):
    requests = make_requests(8)
    completions = engine.generate(with_sampling(requests, GREEDY))
    assert_agrees(trained, requests, completions, temperature=0.0)
    assert {c.finish_reason for c in completions} == {"length"}
    assert {len(c.token_ids) for c in completions} == {GREEDY.max_tokens}


def test_logprobs_are_of_the_tempered_distribution(engine, trained):
    requests = make_requests(8)
    assert_agrees(trained, requests, engine.generate(requests), SAMPLED.temperature)


def test_a_completion_does_not_depend_on_its_company(engine):
    requests = make_requests(12)
    together = engine.generate(requests)
    order = random.Random(0).sample(range(12), 12)
    shuffled = engine.generate([requests[i] for i in order])
    assert_same([together[i] for i in order], shuffled)
    assert_same(together[:5], engine.generate(requests[:5]))
    assert_same(together[7:8], engine.generate(requests[7:8]))
    assert engine.generate([]) == []


def test_a_new_engine_of_transformers_generates_the_same(model_paths):
    """For vLLM, the engine with a small cache below is another engine, with another seed."""
    requests = make_requests(6)
    one, other = (
        TransformersEngine(model_paths[True], dtype="auto", seed=seed, rollout=ROLLOUT, device="cpu") for seed in (1, 2)
    )
    assert_same(one.generate(requests), other.generate(requests))


def test_another_seed_draws_other_tokens(engine):
    prompt = make_requests(1)[0].prompt_token_ids
    completions = engine.generate([Request(prompt, seed, SAMPLED) for seed in (1, 2, 2, 2**63 - 1)])
    assert contents(completions[1:2]) == contents(completions[2:3])
    assert len({tuple(tokens) for tokens in tokens_of(completions)}) == 3


def test_frequencies_follow_the_distribution(engine, trained):
    draws, bins = 1000, 20
    prompt = make_requests(1)[0].prompt_token_ids
    requests = [Request(prompt, derive_seed(1, "completion", 1, "prompt", j), SAMPLED) for j in range(draws)]
    sampling = Sampling(1.0, 1.0, -1, 1, ())
    tokens = np.array([c.token_ids[0] for c in engine.generate(with_sampling(requests, sampling))])

    with torch.no_grad():
        probabilities = trained(torch.tensor([prompt])).logits[0, -1].softmax(-1).double().numpy()
    order = np.argsort(probabilities)
    bin_of = np.empty(len(order), dtype=int)  # tokens of like probability together: bins of like mass
    bin_of[order] = np.minimum(np.cumsum(probabilities[order]) * bins, bins - 1e-9).astype(int)
    expected = np.bincount(bin_of, probabilities, minlength=bins) * draws
    observed = np.bincount(bin_of[tokens], minlength=bins)
    used = expected > 0
    assert expected[used].min() > 5
    assert ((observed - expected)[used] ** 2 / expected[used]).sum() < 45.3  # 99.9% quantile, 20 degrees of freedom


def test_top_p_and_top_k_cut_the_distribution(engine, trained):
    """Also where requests of one batch differ in them."""
    cuts = [(0.5, -1), (1.0, 4), (0.8, 6)] * 2
    requests = [
        dataclasses.replace(request, sampling=Sampling(0.9, top_p, top_k, 16, ()))
        for request, (top_p, top_k) in zip(make_requests(6), cuts, strict=True)
    ]
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        for logits, token, logprob in zip(
            logits_of(trained, request, completion), completion.token_ids, completion.logprobs, strict=True
        ):
            kept = kept_tokens(logits / 0.9, request.sampling.top_p, request.sampling.top_k)
            assert token in kept
            others = torch.tensor(sorted(kept))
            expected = (logits[token] - torch.logsumexp(logits[others] / 0.9, 0) * 0.9) / 0.9
            assert logprob == pytest.approx(float(expected), abs=1e-4)


def kept_tokens(logits: Tensor, top_p: float, top_k: int) -> set[int]:
    """The `top_k` most likely tokens, and of these the fewest that hold `top_p` of their probability."""
    order = logits.argsort(descending=True)[: top_k if top_k > 0 else None]
    mass = logits[order].softmax(0).cumsum(0)
    return set(order[: int((mass < top_p).sum()) + 1].tolist())


def test_stop_token_ends_a_completion_and_belongs_to_it(engine):
    requests = make_requests(4)
    free = engine.generate(requests)
    stops = (int(free[2].token_ids[5]), int(free[3].token_ids[9]))
    stopped = engine.generate(with_sampling(requests, dataclasses.replace(SAMPLED, stop_token_ids=stops)))
    for before, after in zip(free, stopped, strict=True):
        ends = [i + 1 for i, token in enumerate(before.token_ids) if token in stops]
        length = ends[0] if ends else 16
        assert after.token_ids.tolist() == before.token_ids[:length].tolist()
        assert len(after.logprobs) == length
        assert after.finish_reason == ("stop" if ends else "length")


def test_only_the_callers_stop_tokens_stop(engine, trained):
    sampling = Sampling(2.0, 1.0, -1, 32, ())
    completions = engine.generate(with_sampling(make_requests(40), sampling))
    assert any(trained.config.eos_token_id in c.token_ids for c in completions), "draw more"
    assert {(c.finish_reason, len(c.token_ids)) for c in completions} == {("length", 32)}


def test_completions_carry_the_version_of_the_weights(engine, model_paths):
    request = make_requests(1)
    engine.set_version(7)
    assert engine.generate(with_sampling(request, GREEDY))[0].weight_versions == (7, 7)
    engine.sync_weights(SharedMemory(model_paths[True]), 8)
    assert engine.generate(with_sampling(request, GREEDY))[0].weight_versions == (8, 8)


def test_a_sleeping_engine_must_be_woken(engine, model_paths):
    requests = make_requests(3)
    before = engine.generate(with_sampling(requests, GREEDY))
    engine.sleep()
    with pytest.raises(AssertionError, match="wake the engine"):
        engine.generate(with_sampling(requests, GREEDY))
    engine.wake()
    assert contents(engine.generate(with_sampling(requests, GREEDY))) == contents(before)
    engine.sleep()
    engine.sync_weights(SharedMemory(model_paths[True]), 3)
    engine.wake()
    assert tokens_of(engine.generate(with_sampling(requests, GREEDY))) == tokens_of(before)


# --------------------------------------------------------------------------------------------------------
# What only vLLM has: a bounded cache and a scheduler


def test_completions_come_one_after_another_and_a_sync_drops_the_rest(model_paths, vllm_engine):
    requests = make_requests(4)
    vllm_engine.sync_weights(SharedMemory(model_paths[True]), 0)
    expected = contents(vllm_engine.generate(requests))
    endless = dataclasses.replace(SAMPLED, max_tokens=60)
    first = vllm_engine.step({7: requests[0]})
    assert contents(list(first.values())) == expected[:1] and list(first) == [7]
    # The long ones are still generated when the short one is complete.
    stops = dataclasses.replace(endless, stop_token_ids=(int(expected[1][0][0]),))
    part = vllm_engine.step(dict(enumerate(with_sampling(requests * 32, stops))))
    assert 1 in part
    handed_back = vllm_engine.hand_back()
    vllm_engine.sync_weights(SharedMemory(model_paths[True]), 0)
    assert contents(vllm_engine.generate(requests)) == expected
    whole = vllm_engine.generate(with_sampling(requests, stops))
    assert handed_back and not handed_back.keys() & part.keys()
    for number, one in handed_back.items():
        count, of = len(one.token_ids), whole[number % 4]
        assert one.finish_reason == CUT and 0 < count < len(of.token_ids) and one.weight_versions == (0, 0)
        assert one.token_ids.tolist() == of.token_ids[:count].tolist()
        np.testing.assert_allclose(one.logprobs, of.logprobs[:count], atol=1e-4)


@pytest.mark.processes
def test_requests_under_way_survive_interrupts_and_syncs_that_keep_them(model_paths, trained, tmp_path, vllm_engine):
    """Under the same weights, no token differs from those of an engine without interruptions. After a sync, the rest of
    each completion is sampled from the new weights."""
    with torch.no_grad():
        changed = copy.deepcopy(trained)
        for parameter in changed.parameters():
            parameter.mul_(0.8)
    changed.save_pretrained(tmp_path)
    requests = make_requests(6)
    endless = with_sampling(requests, dataclasses.replace(SAMPLED, max_tokens=200))
    vllm_engine.sync_weights(SharedMemory(model_paths[True]), 1)
    expected = tokens_of(vllm_engine.generate(endless))

    group = vllm_engine._group
    step = CallFutures(group)
    step.begin(0, "step", dict(enumerate(endless)))
    group.start_background("interrupt").result()
    assert step.result()[0] == {}, "an interrupted engine returns before a request is complete"
    vllm_engine.sync_weights(SharedMemory(model_paths[True]), 2, "keep")
    short = vllm_engine.step({6: dataclasses.replace(requests[0], sampling=GREEDY)})
    assert list(short) == [6] and short[6].weight_versions == (2, 2), "the long ones are under way"
    vllm_engine.sync_weights(SharedMemory(str(tmp_path)), 3, "keep")
    completions: dict[int, Completion] = {}
    while len(completions) < 6:
        completions |= vllm_engine.step({})
    fresh = vllm_engine.generate(with_sampling(requests, GREEDY))
    assert_agrees(changed, requests, fresh, temperature=0.0)  # no keys and values of the old weights are left
    for i, one in completions.items():
        spans = dict(one.version_spans)
        assert set(spans) | {1} == {1, 2, 3} and sum(spans.values()) == len(one.token_ids) == 200
        old, new = (errors_of(model, requests[i], one) for model in (trained, changed))
        changed_at = 200 - spans[3]
        assert max([*old[:changed_at], *new[changed_at:]]) < 1e-3
        assert one.token_ids[:changed_at].tolist() == expected[i][:changed_at]


WIDE = TinyShape(hidden_size=768, intermediate_size=2304, num_layers=1, num_heads=12, num_kv_heads=6, seed=5)
"""On CPU, a batch of one token rounds in another way, with a model that is not tiny."""


def test_requests_that_join_at_any_time_get_the_same_bits(cluster, tmp_path):
    """Also one that is alone: after a kill, when the journal has the others, it is often the longest completion."""
    build_tiny(WIDE, str(tmp_path))
    engine = start_vllm(cluster, str(tmp_path))
    requests = make_requests(5, longest=90)
    expected = contents(engine.generate(requests))
    assert contents([engine.generate([request])[0] for request in requests[:2]]) == expected[:2]
    assert contents(engine.generate(requests[2:5])) == expected[2:5]
    turns = [
        Request([*request.prompt_token_ids, *tokens, 7, 8, 9], request.seed + 1, SAMPLED)
        for request, (tokens, *_) in zip(requests, expected, strict=True)
    ]
    cached = contents(engine.generate(turns))  # the keys and values of the first turns are still there
    engine.sync_weights(SharedMemory(str(tmp_path)), 0)
    assert contents(engine.generate(turns)) == cached
    engine.sync_weights(SharedMemory(str(tmp_path)), 0)
    completions: dict[int, Completion] = {}
    for number, request in enumerate(requests):
        completions |= engine.step({number: request})
    while len(completions) < len(requests):
        completions |= engine.step({})
    assert contents([completions[i] for i in range(len(requests))]) == expected
    engine.generate(turns)
    changed = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(0.8)
    changed.save_pretrained(tmp_path)
    engine.sync_weights(SharedMemory(str(tmp_path)), 1)
    assert_agrees(changed, turns, engine.generate(turns), SAMPLED.temperature)  # keys of the old weights are gone


def errors_of(model, request, completion) -> list[float]:
    """How far the log-prob of each token is from that of the trainer's model."""
    logprobs = (logits_of(model, request, completion) / SAMPLED.temperature).log_softmax(-1)
    tokens = torch.from_numpy(completion.token_ids).long()
    return (logprobs.gather(-1, tokens[:, None])[:, 0] - torch.from_numpy(completion.logprobs)).abs().tolist()


def test_more_work_than_the_engine_can_hold(cluster, model_paths, vllm_engine):
    """Prefill in parts, and requests thrown out of the cache and begun again, give the same completions."""
    requests = make_requests(60, longest=300)  # more than one prefill batch
    sampling = Sampling(0.7, 1.0, -1, 24, ())
    vllm_engine.sync_weights(SharedMemory(model_paths[True]), 0)
    expected = vllm_engine.generate(with_sampling(requests, sampling))
    cramped = start_vllm(
        cluster,
        model_paths[True],
        dataclasses.replace(ROLLOUT, max_num_seqs=16, engine_args={"kv_cache_memory_bytes": 2**20}),
        seed=2,
    )
    assert_same(expected, cramped.generate(with_sampling(requests, sampling)))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_prompt_tokens": 5000}, "rollout.engine=vllm .*4096"),
        ({"engine_args": {"no_such_setting": 1}}, "rollout.engine=vllm .*no_such_setting"),
        ({"engine_args": {"kv_cache_memory_bytes": 1000}}, "kv_cache_memory_bytes=1000: holds fewer than two"),
    ],
)
def test_settings_that_vllm_refuses_are_the_users(cluster, model_paths, settings, reason):
    with pytest.raises(UserError, match=reason):
        start_vllm(cluster, model_paths[True], RolloutConfig(**settings)).generate([])


# --------------------------------------------------------------------------------------------------------
# Weight sync


@pytest.fixture
def job(launcher) -> Iterator[ProcessCluster]:
    """A cluster for two ranks and two engines."""
    cfg = Config(rollout=dataclasses.replace(ROLLOUT, temperature=SAMPLED.temperature, num_engines=2))
    cfg.trainer.num_workers = 2
    cfg.trainer.mini_batch_size = 4
    cfg.trainer.policy.optimizer.lr = 3e-3  # large enough that old weights would show
    with ProcessCluster(cfg, "cpu", launcher) as cluster:
        yield cluster


def experience(step: int) -> Batch:
    """Two mini-batches of four groups with random tokens and advantages."""
    rng = np.random.default_rng(step)
    size, width = 16, 64
    return {
        "input_ids": rng.integers(0, 256, (size, width)),
        "mask": np.ones((size, width), np.float32),
        "lengths": np.full(size, width),
        "group_ids": np.repeat(np.arange(8), 2),
        "advantages": rng.normal(size=(size, width)).astype(np.float32),
        "old_logprobs": np.full((size, width), -5.0, np.float32),
    }


def train(ranks: TrainWorkers, step: int) -> None:
    """Make the optimizer steps of `experience`."""
    objective, batch = make_objective(ranks.cfg), experience(step)
    parts = objective.mini_batches(batch, step)
    totals = [objective.totals("policy", select(batch, rows)) for rows in parts]
    ranks.update("policy", StoredBatch(ranks.cluster, batch, parts), step, totals, objective.numbers())


def assert_same_as_old_logprobs(ranks: TrainWorkers, requests: list[Request], completions: list[Completion]) -> None:
    """The engine's log-probs are those that the ranks compute for the update."""
    rows = [[*r.prompt_token_ids, *c.token_ids] for r, c in zip(requests, completions, strict=True)]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    lengths = np.array([*map(len, rows)])
    mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.float32)
    batch = {"input_ids": ids, "mask": mask, "lengths": lengths, "group_ids": np.arange(len(rows))}
    logprobs = ranks.compute("policy", "logprobs", StoredBatch(ranks.cluster, batch))
    for values, row, request, completion in zip(logprobs, rows, requests, completions, strict=True):
        sampled = values[len(request.prompt_token_ids) : len(row)]
        np.testing.assert_allclose(sampled, completion.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied, way", [(False, "shared_memory"), (True, "broadcast")], ids=["untied", "tied"])
def test_engines_follow_the_ranks_through_optimizer_steps(job, tied, way, model_paths, tmp_path):
    """A pool of two engines of vLLM, and one of transformers. Prompts of several cache blocks, the same before and
    after each sync, as a stale cache would show."""
    ranks = TrainWorkers(job.cfg, job)
    ranks.begin(model_paths[tied])()
    cfg = dataclasses.replace(job.cfg, rollout=dataclasses.replace(job.cfg.rollout, weight_sync=way))
    pool = EnginePool(cfg, job, ranks, model_paths[tied])
    fallback = TransformersEngine(model_paths[tied], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(model_paths[tied], dtype=torch.float32).eval()
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (5, 210, 290)]
    requests = [Request(prompt, seed, SAMPLED) for prompt in prompts for seed in (1, 2)]

    before: list[Completion] = []
    for version in (1, 2):
        if before:
            train(ranks, version)
            pool.sync_weights(version)
        else:
            pool.start(version, is_initial=False)
        ranks.call("policy", "write_weights", str(tmp_path), "float32")
        assert fallback.sync_weights(SharedMemory(str(tmp_path)), version) == pool.weights_digest
        written = {name: x for file in tmp_path.glob("*.safetensors") for name, x in load_file(file).items()}
        assert set(model.load_state_dict(written, strict=False).missing_keys) <= {"lm_head.weight"}
        assert_agrees(model, requests[::2], fallback.generate(with_sampling(requests[::2], GREEDY)), temperature=0.0)
        after = pool.generate(with_sampling(requests, GREEDY))
        assert_agrees(model, requests, after, temperature=0.0)
        assert tokens_of(after) != tokens_of(before), "the steps changed too little to see"
        sampled = pool.generate(requests)
        assert_same_as_old_logprobs(ranks, requests, sampled)
        both = [begin(pool, with_sampling(requests, GREEDY)), begin(pool, requests)]
        assert [contents(one.result()) for one in both] == [contents(after), contents(sampled)]
        assert_same(sampled, one_after_another(pool, requests))
        before = after


def one_after_another(pool: EnginePool, requests: list[Request]) -> list[Completion]:
    """Completions of requests that join those which are generated."""
    waiting = []
    for first in range(0, len(requests), 3):
        waiting.append(begin(pool, requests[first : first + 3]))
        time.sleep(0.02)
    return [completion for one in waiting for completion in one.result()]


def test_a_sync_that_leaves_an_old_weight_is_an_error(cluster, model_paths, tmp_path):
    """vLLM itself would log a line, and generate with a mixture of weights."""
    shutil.copytree(model_paths[False], tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    del weights["model.layers.0.input_layernorm.weight"]
    save_file(weights, file)
    engine = start_vllm(cluster, model_paths[False])
    with pytest.raises(Exception, match="model.layers.0.input_layernorm.weight"):
        engine.sync_weights(SharedMemory(str(tmp_path / "model")), 2)


SHAPE = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.15,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS = {
    # Experts with biases, and attention sinks: vLLM's model copies them past its loaders.
    "copied experts": GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    # Its own kernel for rotations on CPU agrees with no other, and each load computes two weights from another.
    "latent attention": DeepseekV3Config(
        **{name: size for name, size in SHAPE.items() if name != "head_dim"} | {"num_key_value_heads": 4},
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=2,
    ),
    # vLLM's model has the experts that all tokens share in two places; its kernel pads the width of experts to 64.
    "shared experts": Dots1Config(
        **SHAPE,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
    # Heads are an axis of their own where vLLM turns them, and a published config has the fields of vLLM's class.
    "short convolutions": Lfm2Config(
        **{name: size for name, size in SHAPE.items() if name != "head_dim"} | {"hidden_size": 128},
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        block_dim=128,
        conv_dim=128,
        conv_dim_out=128,
    ),
    "recurrent layers": FalconH1Config(
        **SHAPE, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_expand=2
    ),
}


@pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))
def test_every_layer_computes_with_the_weights_of_the_last_sync(cluster, tmp_path, config: PretrainedConfig):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "start")
    engine = start_vllm(cluster, str(tmp_path / "start"))
    requests = with_sampling(make_requests(6), SAMPLED)
    assert_agrees(model, requests, engine.generate(requests), SAMPLED.temperature)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / str(version))
        engine.sync_weights(SharedMemory(str(tmp_path / str(version))), version)
        assert_agrees(model, requests, engine.generate(requests), SAMPLED.temperature)


TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_vllm_serves_the_adapters_it_is_given_in_place(cluster, model_paths, tmp_path):
    """With an engine that was started for adapters, asleep in between as it would be beside ranks.

    vLLM computes q, k and v as one layer, and k_proj has no adapter."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_paths[True], dtype=torch.float32),
        LoraConfig(r=5, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM"),
    )
    engine = start_vllm(cluster, model_paths[True], lora_rank=5)
    requests = make_requests(8)
    with model.disable_adapter():
        assert_agrees(model, requests, engine.generate(requests), SAMPLED.temperature)
    completions = []
    for version, scale in ((1, 0.1), (2, 0.3), (3, 0.1)):
        torch.manual_seed(round(scale * 10))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=scale)
        model.save_pretrained(tmp_path)
        files = [tmp_path / name for name in ("adapter_config.json", "adapter_model.safetensors")]
        engine.sleep()
        adapter = Adapter(files[0].read_text(), files[1].read_bytes())
        assert engine.sync_weights(adapter, version) == digest_of(adapter.weights)
        shutil.copytree(tmp_path, tmp_path / str(version), ignore=shutil.ignore_patterns("?"))
        served = {int(path.name) for path in tmp_path.glob("?") if engine.serves(str(path))}
        assert served == ({version} if version < 3 else {1, 3}), "an older adapter passes for the one that is served"
        engine.wake()
        completions.append(engine.generate(requests))
        assert {c.weight_versions for c in completions[-1]} == {(version, version)}
        assert_agrees(model, requests, completions[-1], SAMPLED.temperature)
    tokens = [[one[:2] for one in contents(drawn)] for drawn in completions]
    assert tokens[0] == tokens[2] != tokens[1]
    elsewhere = {name.replace("layers.0", "layers.7"): tensor for name, tensor in load_file(files[1]).items()}
    with pytest.raises(UserError, match=r"rollout.lora_sync: vLLM's model has no model.layers.7.*choose merged"):
        engine.sync_weights(Adapter(files[0].read_text(), save(elsewhere)), 4)
    engine.shutdown()  # ends what the process's other engines share: this is the file's last test
