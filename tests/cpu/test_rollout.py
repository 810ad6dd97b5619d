"""Engines: one contract for both, the weights they are given, and several of them as one."""

from __future__ import annotations

import dataclasses
import random
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engines import EngineProcess, LocalGroup, RemoteEngine
from tests.served import ServedRanks
from trainer.config import Config, RolloutConfig, TinyConfig
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.pool import EnginePool, split
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.vllm_engine import VLLMEngine
from trainer.generation.weight_sync import Adapter, Broadcast, SharedMemory, choose
from trainer.keyed import request_seed
from trainer.models.tiny import build_tiny
from trainer.parallel.batching import Batch
from trainer.parallel.packing import Packing
from trainer.workers.rank import Rank

pytestmark = pytest.mark.early

ROLLOUT = RolloutConfig(max_prompt_tokens=300, max_response_tokens=64, max_num_seqs=64, kv_cache_mb=64)
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=16, stop_token_ids=())
SAMPLED = Sampling(temperature=0.7, top_p=1.0, top_k=-1, max_tokens=16, stop_token_ids=())


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory) -> dict[bool, str]:
    """Model directories by whether the output head is tied to the embedding."""
    paths = {tied: str(tmp_path_factory.mktemp("model")) for tied in (True, False)}
    for tied, path in paths.items():
        build_tiny(TinyConfig(tie_word_embeddings=tied, seed=5), path)
        # Random weights predict nearly the same everywhere; larger ones have an opinion to sample from.
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3)
        model.save_pretrained(path)
    return paths


def build(process: EngineProcess, path: str, rollout: RolloutConfig = ROLLOUT) -> RemoteEngine:
    return process.build(VLLMEngine, path, dtype="auto", seed=1, rollout=rollout, device="cpu")


@pytest.fixture(scope="session")
def processes() -> Iterator[list[EngineProcess]]:
    processes = [EngineProcess(), EngineProcess()]
    yield processes
    for process in processes:
        process.close()


@pytest.fixture(scope="session")
def vllm_engines(processes, model_paths):
    """Two vLLM engines, each in its own process, for the tied and the untied model."""
    return {tied: [build(process, path) for process in processes] for tied, path in model_paths.items()}


@pytest.fixture(params=["vllm", "transformers"])
def engine(request, model_paths):
    """An engine of each kind with the tied model's start weights, as version 0."""
    if request.param == "transformers":
        return TransformersEngine(model_paths[True], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    engine = request.getfixturevalue("vllm_engines")[True][0]
    engine.sync_weights(SharedMemory(model_paths[True]), 0)
    return engine


@pytest.fixture(scope="module")
def trained(model_paths):
    """The tied model's start weights, as the trainer sees them."""
    return AutoModelForCausalLM.from_pretrained(model_paths[True], dtype=torch.float32).eval()


def make_requests(count: int, longest: int = 60) -> list[Request]:
    rng = random.Random(count)
    lengths = [rng.randint(3, longest) for _ in range(count)]
    return [
        Request([rng.randrange(256) for _ in range(length)], request_seed(1, 1, str(i), 0))
        for i, length in enumerate(lengths)
    ]


@torch.no_grad()
def logits_of(model, request: Request, completion: Completion) -> Tensor:
    """Logits `(tokens, V)` before each token of the completion, from one forward of the trainer's model."""
    ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
    return model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1]


def assert_agrees(model, requests: list[Request], completions: list[Completion], temperature: float) -> None:
    """Log-probs are the trainer's within 1e-4, and greedy tokens are its arg max."""
    for request, completion in zip(requests, completions, strict=True):
        logits = logits_of(model, request, completion)
        expected = (logits / (temperature or 1.0)).log_softmax(-1)
        tokens = torch.tensor(completion.token_ids)
        if temperature == 0:
            assert logits.argmax(-1).tolist() == completion.token_ids
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), expected.gather(-1, tokens[:, None])[:, 0], atol=1e-4, rtol=0
        )


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def assert_same(left: list[Completion], right: list[Completion]) -> None:
    assert tokens_of(left) == tokens_of(right)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


# --------------------------------------------------------------------------------------------------------
# The contract


def test_greedy_follows_the_trainer(engine, trained):
    requests = make_requests(8)
    completions = engine.generate(requests, GREEDY)
    assert_agrees(trained, requests, completions, temperature=0.0)
    assert {c.finish_reason for c in completions} == {"length"}
    assert {len(c.token_ids) for c in completions} == {GREEDY.max_tokens}


def test_logprobs_are_of_the_tempered_distribution(engine, trained):
    requests = make_requests(8)
    assert_agrees(trained, requests, engine.generate(requests, SAMPLED), SAMPLED.temperature)


def test_a_completion_does_not_depend_on_its_company(engine):
    requests = make_requests(12)
    together = engine.generate(requests, SAMPLED)
    order = random.Random(0).sample(range(12), 12)
    shuffled = engine.generate([requests[i] for i in order], SAMPLED)
    assert_same([together[i] for i in order], shuffled)
    assert_same(together[:5], engine.generate(requests[:5], SAMPLED))
    assert_same(together[7:8], engine.generate(requests[7:8], SAMPLED))
    assert engine.generate([], SAMPLED) == []


def test_a_new_engine_generates_the_same(engine, vllm_engines, model_paths):
    requests = make_requests(6)
    if isinstance(engine, TransformersEngine):
        other = TransformersEngine(model_paths[True], dtype="auto", seed=2, rollout=ROLLOUT, device="cpu")
    else:
        other = vllm_engines[True][1]
        other.sync_weights(SharedMemory(model_paths[True]), 0)
    assert_same(engine.generate(requests, SAMPLED), other.generate(requests, SAMPLED))


def test_another_seed_draws_other_tokens(engine):
    prompt = make_requests(1)[0].prompt_token_ids
    completions = engine.generate([Request(prompt, seed) for seed in (1, 2, 2, 2**63 - 1)], SAMPLED)
    assert completions[1] == completions[2]
    assert len({tuple(c.token_ids) for c in completions}) == 3


def test_frequencies_follow_the_distribution(engine, trained):
    draws, bins = 3000, 20
    prompt = make_requests(1)[0].prompt_token_ids
    requests = [Request(prompt, request_seed(1, 1, "prompt", j)) for j in range(draws)]
    sampling = Sampling(1.0, 1.0, -1, 1, ())
    tokens = np.array([c.token_ids[0] for c in engine.generate(requests, sampling)])

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


@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, -1), (1.0, 4), (0.8, 6)])
def test_top_p_and_top_k_cut_the_distribution(engine, trained, top_p, top_k):
    requests = make_requests(6)
    completions = engine.generate(requests, Sampling(0.9, top_p, top_k, 16, ()))
    for request, completion in zip(requests, completions, strict=True):
        for logits, token, logprob in zip(
            logits_of(trained, request, completion), completion.token_ids, completion.logprobs, strict=True
        ):
            kept = kept_tokens(logits / 0.9, top_p, top_k)
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
    free = engine.generate(requests, SAMPLED)
    stops = (free[2].token_ids[5], free[3].token_ids[9])
    stopped = engine.generate(requests, dataclasses.replace(SAMPLED, stop_token_ids=stops))
    for before, after in zip(free, stopped, strict=True):
        ends = [i + 1 for i, token in enumerate(before.token_ids) if token in stops]
        length = ends[0] if ends else 16
        assert after.token_ids == before.token_ids[:length]
        assert len(after.logprobs) == length
        assert after.finish_reason == ("stop" if ends else "length")


def test_only_the_callers_stop_tokens_stop(engine, trained):
    sampling = Sampling(2.0, 1.0, -1, 64, ())
    completions = engine.generate(make_requests(40), sampling)
    assert any(trained.config.eos_token_id in c.token_ids for c in completions), "draw more"
    assert {(c.finish_reason, len(c.token_ids)) for c in completions} == {("length", 64)}


def test_completions_carry_the_version_of_the_weights(engine, model_paths):
    request = make_requests(1)
    engine.set_version(7)
    assert engine.generate(request, GREEDY)[0].weight_version == 7
    engine.sync_weights(SharedMemory(model_paths[True]), 8)
    assert engine.generate(request, GREEDY)[0].weight_version == 8


def test_a_sleeping_engine_must_be_woken(engine, model_paths):
    requests = make_requests(3)
    before = engine.generate(requests, GREEDY)
    engine.sleep()
    with pytest.raises(AssertionError, match="wake the engine"):
        engine.generate(requests, GREEDY)
    engine.wake()
    assert engine.generate(requests, GREEDY) == before
    engine.sleep()
    engine.sync_weights(SharedMemory(model_paths[True]), 3)
    engine.wake()
    assert tokens_of(engine.generate(requests, GREEDY)) == tokens_of(before)


# --------------------------------------------------------------------------------------------------------
# What only vLLM has: a bounded cache and a scheduler


def test_more_work_than_the_engine_can_hold(processes, model_paths, vllm_engines):
    """Prefill in parts, and requests thrown out of the cache and begun again, give the same completions."""
    requests = make_requests(64, longest=300)  # more than one prefill batch
    sampling = Sampling(0.7, 1.0, -1, 64, ())
    roomy = vllm_engines[True][0]
    roomy.sync_weights(SharedMemory(model_paths[True]), 0)
    expected = roomy.generate(requests, sampling)
    cramped = build(processes[0], model_paths[True], RolloutConfig(
        max_prompt_tokens=300, max_response_tokens=64, max_num_seqs=16, kv_cache_mb=1))  # fmt: skip
    assert_same(expected, cramped.generate(requests, sampling))


@pytest.mark.parametrize(("settings", "reason"), [
    ({"max_prompt_tokens": 5000}, "4096"),
    ({"engine_args": {"no_such_setting": 1}}, "no_such_setting"),
])  # fmt: skip
def test_settings_that_vllm_refuses_are_the_users(processes, model_paths, settings, reason):
    with pytest.raises(UserError, match=f"rollout.engine=vllm .*{reason}"):
        build(processes[0], model_paths[True], RolloutConfig(**settings)).generate([], GREEDY)


# --------------------------------------------------------------------------------------------------------
# Weight sync


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def tied(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def ranks(tied, model_paths) -> Iterator[ServedRanks]:
    """Two ranks that hold a policy, sharded."""
    cfg = Config(rollout=dataclasses.replace(ROLLOUT, temperature=SAMPLED.temperature))
    cfg.trainer.mini_batch_size = 4
    cfg.trainer.policy.optimizer.lr = 3e-3  # large enough that old weights would show
    with ServedRanks(2, cfg) as ranks:
        ranks.call("build", ["policy"], model_paths[tied])
        yield ranks


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


def forward(rank: Rank, ids: np.ndarray) -> np.ndarray | None:
    """Logits of the sharded policy, from rank 0. A collective."""
    packing = Packing([ids.shape[1]] * len(ids), "cpu")
    with torch.no_grad():
        row = torch.from_numpy(ids).reshape(1, -1)
        logits = rank.roles["policy"].module(row, position_ids=packing.position_ids, packing=packing).logits
    logits = logits.view(*ids.shape, -1)
    return logits.numpy() if rank.rank == 0 else None


def as_model(ranks: ServedRanks) -> Callable[[Tensor], SimpleNamespace]:
    """The ranks' policy, to be called like a transformers model."""
    return lambda ids: SimpleNamespace(logits=torch.from_numpy(ranks.call(forward, ids.numpy())[0]))


def assert_same_as_old_logprobs(ranks: ServedRanks, requests: list[Request], completions: list[Completion]) -> None:
    """The engine's log-probs are those that the ranks compute for the update."""
    rows = [[*r.prompt_token_ids, *c.token_ids] for r, c in zip(requests, completions, strict=True)]
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), lengths.max()), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    seen = 0
    for owned, logprobs in ranks.call("call", "policy", "logprobs", {"input_ids": ids, "lengths": lengths}):
        for i, values in zip(owned, logprobs, strict=True):
            np.testing.assert_allclose(
                values[len(requests[i].prompt_token_ids) : lengths[i]], completions[i].logprobs, atol=1e-4, rtol=0
            )
            seen += 1
    assert seen == len(requests)


@pytest.mark.parametrize("way", ["shared_memory", "broadcast"])
def test_engines_follow_the_ranks_through_optimizer_steps(tied, ranks, way, vllm_engines, model_paths, tmp_path):
    """Two engines of each kind; prompts of several cache blocks, the same before and after each sync, as a
    stale cache would show."""
    pool = EnginePool(LocalGroup(vllm_engines[tied]))
    fallback = TransformersEngine(model_paths[tied], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (5, 31, 210, 230, 260, 290)]
    requests = [Request(prompt, seed) for prompt in prompts for seed in (1, 2)]
    group = Broadcast(free_address(), receivers=2, device="cpu", timeout_s=60)
    model = as_model(ranks)

    before: list[Completion] = []
    for version in (1, 2, 3):
        if before:
            ranks.call("call", "policy", "update", experience(version), version)
        if way == "shared_memory":
            ranks.call("call", "policy", "write_weights", str(tmp_path), "float32")
            pool.sync_weights(SharedMemory(str(tmp_path)), version)
            fallback.sync_weights(SharedMemory(str(tmp_path)), version)
            assert_agrees(model, requests[::4], fallback.generate(requests[::4], GREEDY), temperature=0.0)
        else:
            pool.sync_weights(group, version, ranks.start("call", "policy", "send_weights", group, "float32"))
        after = pool.generate(requests, GREEDY)
        assert_agrees(model, requests, after, temperature=0.0)
        assert tokens_of(after) != tokens_of(before), "the steps changed too little to see"
        assert_same_as_old_logprobs(ranks, requests, pool.generate(requests, SAMPLED))
        before = after


def test_weights_that_lack_a_tensor_are_refused(model_paths, tmp_path):
    engine = TransformersEngine(model_paths[False], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    save_file({"lm_head.weight": torch.zeros(320, TinyConfig().hidden_size)}, tmp_path / "model.safetensors")
    with pytest.raises(AssertionError, match="lacks"):
        engine.sync_weights(SharedMemory(str(tmp_path)), 1)


def test_transformers_engine_takes_no_broadcast(model_paths):
    engine = TransformersEngine(model_paths[True], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    with pytest.raises(UserError, match="rollout.weight_sync=broadcast"):
        engine.sync_weights(Broadcast("127.0.0.1:1", 1, "cpu", 1.0), 1)


def test_all_ranks_step_through_a_broadcast():
    """Gathering a tensor is a collective, so a rank that sends nothing must still come along."""
    seen = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for i in range(3):
            seen.append(i)
            yield f"w{i}", torch.zeros(1)

    Broadcast("127.0.0.1:1", receivers=1, device="cpu", timeout_s=1).send(weights(), rank=1)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(("setting", "engine", "same_node", "way"), [
    ("auto", "vllm", True, "shared_memory"),
    ("auto", "transformers", True, "shared_memory"),
    ("auto", "vllm", False, "broadcast"),
    ("broadcast", "vllm", True, "broadcast"),
    ("shared_memory", "vllm", True, "shared_memory"),
])  # fmt: skip
def test_way_of_the_weights(setting, engine, same_node, way):
    assert choose(setting, engine, same_node) == way


@pytest.mark.parametrize(("setting", "engine", "same_node", "colocate"), [
    ("shared_memory", "vllm", False, False),
    ("auto", "transformers", False, False),
    ("broadcast", "transformers", True, False),
    ("broadcast", "vllm", True, True),
])  # fmt: skip
def test_ways_that_cannot_work_are_refused(setting, engine, same_node, colocate):
    with pytest.raises(UserError, match="rollout.weight_sync="):
        choose(setting, engine, same_node, colocate)


# --------------------------------------------------------------------------------------------------------
# Several engines as one


class Echo:
    """An engine that answers with its prompts, and remembers what it was asked."""

    def __init__(self, version: int = 0):
        self.version = version
        self.asked: list[Request] = []

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        self.asked.extend(requests)
        return [Completion([*r.prompt_token_ids, r.seed], [], "length", self.version) for r in requests]

    def set_version(self, version: int) -> None:
        self.version = version


def test_pool_keeps_order_and_prompts_together():
    engines = [Echo(), Echo(), Echo()]
    requests = [Request([p, p + 1], seed=j) for j in range(4) for p in range(7)]
    completions = EnginePool(LocalGroup(engines)).generate(requests, SAMPLED)
    assert tokens_of(completions) == [[*r.prompt_token_ids, r.seed] for r in requests]
    homes = [{tuple(r.prompt_token_ids) for r in engine.asked} for engine in engines]
    assert sum(map(len, homes)) == 7
    assert sorted(len(home) for home in homes) == [2, 2, 3]


def test_split_balances_tokens():
    long, short = list(range(300)), [[i] for i in range(6)]
    requests = [Request(long, 0), *(Request(prompt, 0) for prompt in short)]
    shares = split(requests, 2, max_tokens=60)
    assert sorted(map(len, shares)) == [1, 6]
    assert split(requests[:1], 3, max_tokens=60) == [[0], [], []]


def test_pool_refuses_completions_of_other_weights():
    pool = EnginePool(LocalGroup([Echo(), Echo(version=1)]))
    with pytest.raises(AssertionError, match="expected 0"):
        pool.generate(make_requests(4), SAMPLED)
    pool.set_version(5)
    assert {c.weight_version for c in pool.generate(make_requests(4), SAMPLED)} == {5}


def test_a_failed_sender_is_heard_while_engines_still_wait():
    given_up = threading.Event()

    class Waiting(Echo):
        def sync_weights(self, source: object, version: int) -> None:
            given_up.wait()

    class Failing:
        def send(self) -> None:
            raise RuntimeError("out of memory")

    sending = LocalGroup([Failing()]).start("send")
    with pytest.raises(RuntimeError, match="out of memory"):
        EnginePool(LocalGroup([Waiting()])).sync_weights(SharedMemory("nowhere"), 1, sending)
    given_up.set()


def test_seeds_are_keyed_by_everything_that_names_a_completion():
    base = (1, 1, "a", 0)
    others = [(2, 1, "a", 0), (1, 2, "a", 0), (1, 1, "b", 0), (1, 1, "a", 1)]
    seeds = [request_seed(*name) for name in [base, *others]]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(*base) == seeds[0] == 2064020276072868472


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_vllm_serves_the_adapters_it_is_given_in_place(processes, model_paths, tmp_path, targets):
    """With an engine that was started for adapters, asleep in between as it would be beside ranks."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_paths[True], dtype=torch.float32),
        LoraConfig(r=5, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"),
    )
    engine = processes[0].build(VLLMEngine, model_paths[True], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu",
                                lora_rank=5)  # fmt: skip
    requests = make_requests(20)
    with model.disable_adapter():
        assert_agrees(model, requests, engine.generate(requests, SAMPLED), SAMPLED.temperature)
    completions = []
    for version, scale in ((1, 0.1), (2, 0.3), (3, 0.1)):
        torch.manual_seed(round(scale * 10))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=scale)
        model.save_pretrained(tmp_path)
        files = [tmp_path / name for name in ("adapter_config.json", "adapter_model.safetensors")]
        engine.sleep()
        engine.sync_weights(Adapter(files[0].read_text(), files[1].read_bytes()), version)
        engine.wake()
        completions.append(engine.generate(requests, SAMPLED))
        assert {c.weight_version for c in completions[-1]} == {version}
        assert_agrees(model, requests, completions[-1], SAMPLED.temperature)
    tokens = [[(c.token_ids, c.logprobs) for c in drawn] for drawn in completions]
    assert tokens[0] == tokens[2] != tokens[1]
    elsewhere = {name.replace("layers.0", "layers.7"): tensor for name, tensor in load_file(files[1]).items()}
    with pytest.raises(UserError, match=r"rollout.lora_sync: vLLM's model has no model.layers.7.*choose merged"):
        engine.sync_weights(Adapter(files[0].read_text(), save(elsewhere)), 4)
    engine.shutdown()
