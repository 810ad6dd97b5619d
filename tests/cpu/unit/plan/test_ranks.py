"""Memory of ranks, beside torch's own tracker of FSDP2 as the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.memory import allocator_peak
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.whole_batches import compute_batch, update_batch
from trainer.config import Config, LoraConfig, critic_role, policy_role, reference_role
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel.axes import AXES, axis_sizes
from trainer.parallel.batching import Batch
from trainer.plan.hardware import DEVICES
from trainer.plan.ranks import Phase, PlannedRole, host_bytes_of_rank, plan_role, rank_phases
from trainer.plan.workload import workload_of
from trainer.workers.host_memory import local_tensor
from trainer.workers.rank import Rank

ALONE = dict.fromkeys(AXES, 1)
PROMPT, RESPONSE, GROUPS, N = 32, 96, 4, 4
SHAPE = TinyShape(hidden_size=256, intermediate_size=768, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(SHAPE, path)
    return path


def config(path: str | None = None, **fsdp) -> Config:
    cfg = Config()
    cfg.model.path, cfg.model.tiny = path, SHAPE
    cfg.rollout.n, cfg.rollout.max_prompt_tokens, cfg.rollout.max_response_tokens = N, PROMPT, RESPONSE
    cfg.rollout.max_logprob_diff = None  # the log-probs of the batch are invented
    cfg.plan.prompt_tokens, cfg.plan.response_tokens = PROMPT, RESPONSE
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = GROUPS
    cfg.trainer.max_tokens_per_micro_batch = 2 * (PROMPT + N * RESPONSE)
    for name, value in fsdp.items():
        setattr(cfg.trainer.policy.fsdp, name, value)
    return cfg


def batch() -> Batch:
    rows, width = GROUPS * N, PROMPT + RESPONSE
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 250, (rows, width))
    ids[:, :PROMPT] = ids[::N, :PROMPT].repeat(N, axis=0)
    mask = np.zeros((rows, width), np.float32)
    mask[:, PROMPT:] = 1
    noise = rng.normal(size=(rows, width)).astype(np.float32) * mask
    return {
        "input_ids": ids,
        "mask": mask,
        "lengths": np.full(rows, width),
        "group_ids": np.arange(rows) // N,
        "old_logprobs": -5.5 * mask,
        "rollout_logprobs": -5.5 * mask,
        **dict.fromkeys(("advantages", "values", "returns"), noise),
    }


CASES: dict[int, list[tuple[str, dict]]] = {
    1: [
        ("policy", {}),
        ("policy", {"param_dtype": "bfloat16"}),
    ],
    2: [
        ("policy", {"activation_checkpointing": "selective"}),
        ("policy", {"reshard_after_forward": False}),
        ("critic", {}),
    ],
}
"""Roles and settings, by the number of ranks."""


def tracked(rank: Rank, path: str) -> list[int]:
    """The peak of an update in each case, as torch's tracker counts it."""
    return [_tracked(rank, path, role, fsdp) for role, fsdp in CASES[rank.world_size]]


def _tracked(rank: Rank, path: str, role: str, fsdp: dict) -> int:
    rank.cfg = config(path, **fsdp)
    rank.build(roles(rank.cfg, [role]), path)
    worker = rank.roles[role]
    update_batch(rank, role, batch(), 1)  # the states of the optimizer are there now
    tracker, micro_batches = FSDPMemTracker(worker.module, worker.optimizers.all[0]), worker.micro_batches

    def tracked_alone(*args):
        for rows in micro_batches(*args):
            tracker.reset_mod_stats()  # it follows one pass
            yield rows

    worker.micro_batches = tracked_alone
    tracker.track_inputs(())
    with tracker:
        update_batch(rank, role, batch(), 2)
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.release
@pytest.mark.parametrize("ranks", CASES)
def test_the_peak_of_an_update_is_that_of_the_tracker(model_path, ranks):
    """One rank has two micro-batches, each of two ranks has one."""
    measured = run_ranks(ranks, tracked, model_path, cfg=config(model_path))[0]
    for (role, fsdp), peak in zip(CASES[ranks], measured, strict=True):
        cfg, sizes = config(model_path, **fsdp), {**ALONE, "dp_shard": ranks}
        workload = workload_of(cfg, sizes)
        spec = policy_role(cfg) if role == "policy" else critic_role(cfg)
        planned = plan_role(cfg, spec, sizes, workload, "cpu")
        count = workload.micro_batches(workload.computed_in_update)
        assert count == 3 - ranks
        moments = planned.moments_of_update(count > 1)
        assert sum(planned.state) + max(sum(m.values()) for m in moments) == pytest.approx(peak, rel=0.1), (role, fsdp)


AXES_OF_TWO = [
    {"tensor_parallel_size": 2},
    {"context_parallel_size": 2, "max_tokens_per_micro_batch": PROMPT + N * RESPONSE},
]


def updated(rank: Rank, path: str) -> tuple[int, int]:
    """The bytes of the states of the policy, and the most that tensors of an update take beside them."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    update_batch(rank, "policy", batch(), 1)  # the states of the optimizer are there now
    worker = rank.roles["policy"]
    states = sum(local_tensor(parameter).nbytes for parameter in worker.module.parameters())
    states += sum(
        tensor.nbytes for tensor in map(local_tensor, worker.optimizers.tensors(worker.device)) if tensor.dim()
    )
    return states, allocator_peak(lambda: update_batch(rank, "policy", batch(), 2))


@pytest.mark.release
@pytest.mark.parametrize("axes", AXES_OF_TWO, ids=["tp", "cp"])
def test_the_peak_of_ranks_that_share_rows_is_that_of_the_allocator(model_path, axes):
    cfg = config(model_path)
    for name, value in {**axes, "num_workers": 2}.items():
        setattr(cfg.trainer, name, value)
    sizes = axis_sizes(cfg.trainer, 2)
    workload = workload_of(cfg, sizes)
    planned = plan_role(cfg, policy_role(cfg), sizes, workload, "cpu")
    states, taken = max(run_ranks(2, updated, model_path, cfg=cfg))
    assert sum(planned.state) == pytest.approx(states, rel=0.01)
    count = workload.micro_batches(workload.computed_in_update)
    moments = planned.moments_of_update(count > 1)
    peak = sum(planned.state) + max(sum(moment.values()) for moment in moments)
    assert peak == pytest.approx(states + taken, rel=0.1)


def test_the_output_layer_computes_the_slice_of_a_rank():
    cfg = config("Qwen/Qwen3-0.6B")
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = 64  # they fill the micro-batches of eight ranks
    heads, hidden = [], []
    for cp in (1, 8):  # a slice has as many tokens
        (planned,), _ = plan_of(cfg, cp=cp)
        heads.append([max(moment.get("head", 0) for moment in moments) for moments in moments_of(planned)])
        hidden.append(planned.moments_of_scores()[1]["activations"])
    assert heads[1] == pytest.approx(heads[0], rel=0.25)  # a slice may be without prompts
    assert hidden[0] == pytest.approx(hidden[1], rel=0.01)


def moments_of(planned: PlannedRole):
    return planned.moments_of_scores(), planned.moments_of_update(False)


def scored(rank: Rank, path: str) -> int:
    """The most memory of tensors in a pass without gradients, that of the weights included."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    full = batch()
    rows = {name: full[name] for name in ("input_ids", "mask", "lengths", "group_ids")}
    compute_batch(rank, "policy", "logprobs", rows)  # kernels have their workspaces
    weights = sum(parameter.nbytes for parameter in rank.roles["policy"].module.parameters())
    return weights + allocator_peak(lambda: compute_batch(rank, "policy", "logprobs", rows))


@pytest.mark.release
@pytest.mark.parametrize("vocabulary", [320, 65536])
def test_scores_take_what_a_block_or_the_output_layer_takes(tmp_path, vocabulary):
    """Whichever is more: a pass without gradients leaves nothing of its blocks."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5, "num_attention_heads": 4}
    shape = Qwen3Config(**sizes, num_key_value_heads=2, head_dim=64, vocab_size=vocabulary, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    cfg = config(str(tmp_path))
    (measured,) = run_ranks(1, scored, str(tmp_path), cfg=cfg)
    (planned,), _ = plan_of(cfg, "cpu")
    block, head = (sum(moment.values()) for moment in planned.moments_of_scores())
    assert (head > block) == (vocabulary > 320)
    assert planned.state[0] + max(block, head) == pytest.approx(measured, rel=0.1)


def test_scores_of_a_gpu_take_what_an_h100_took():
    """Qwen3-1.7B, 16,384 tokens in sequences of about 640, before the optimizer has its states: 12.5 GB.

    The logits of a chunk were there while those of the next were computed, and no gathered block stayed.
    """
    cfg = Config()
    cfg.model.path = "Qwen/Qwen3-1.7B"
    cfg.plan.prompt_tokens, cfg.plan.response_tokens = 160, 480
    cfg.trainer.max_tokens_per_micro_batch = 16384
    cfg.rollout.n, cfg.trainer.train_batch_size = 1, 512  # no row shares a prompt
    cfg.trainer.policy.fsdp.reshard_after_forward = True
    (planned,), _ = plan_of(cfg)
    taken = planned.state[0] + max(sum(moment.values()) for moment in planned.moments_of_scores())
    assert taken + 4 * 4096 * 151_936 == pytest.approx(12.5e9, rel=0.05)


def plan_of(cfg: Config, device: str = "cuda", **sizes: int):
    sizes = {**ALONE, **sizes}
    workload = workload_of(cfg, sizes)
    return [plan_role(cfg, role, sizes, workload, device) for role in cfg.roles], workload


def test_states_are_sharded_over_dp_shard_and_cp():
    (alone,), _ = plan_of(config())
    assert alone.state == (4 * alone.model.total, 8 * alone.model.total)
    for sizes in ({"dp_shard": 4}, {"dp_shard": 2, "cp": 2}):
        (sharded,), _ = plan_of(config(), **sizes)
        assert sum(sharded.state) == pytest.approx(sum(alone.state) / 4, rel=0.01)
    (copied,), _ = plan_of(config(), dp_replicate=4)
    assert copied.state == alone.state


def test_a_reference_holds_weights_alone():
    cfg = config()
    cfg.algorithm.kl_coef = 0.1
    planned, workload = plan_of(cfg)
    reference = planned[-1]
    assert reference.spec == reference_role(cfg)
    assert reference.state == (2 * reference.model.total, 0)
    names = [phase.name for phase in rank_phases(cfg, planned, workload)]
    assert names == ["rollout", "scores of the reference", "update of the policy", "weights to engines"]


@pytest.mark.parametrize(
    ("old_logprobs", "steps", "scores"), [("recompute", 2, True), ("recompute", 1, False), ("rollout", 2, False)]
)
def test_a_policy_that_scores_nothing_has_no_such_phase(old_logprobs, steps, scores):
    """The rollout gives old log-probs, or the only optimizer step computes them itself."""
    cfg = config()
    cfg.trainer.mini_batch_size = cfg.trainer.train_batch_size // steps
    cfg.algorithm.old_logprobs = old_logprobs
    planned, workload = plan_of(cfg)
    names = [phase.name for phase in rank_phases(cfg, planned, workload)]
    assert ("scores of the policy" in names) == scores


def test_offload_leaves_room_while_engines_generate():
    cfg = config()
    planned, workload = plan_of(cfg)
    totals = []
    for cfg.trainer.offload in ("none", "optimizer", "all"):
        phases = {phase.name: phase for phase in rank_phases(cfg, planned, workload)}
        totals.append(phases["rollout"].total)
        assert phases["update of the policy"].sizes["optimizer"] == planned[0].state[1]
    assert totals == [sum(planned[0].state), planned[0].state[0], 0]


def test_states_on_the_host_are_not_on_the_gpu():
    (planned,), workload = plan_of(config(cpu_offload=True))
    phases = rank_phases(config(cpu_offload=True), [planned], workload)
    assert all(phase.sizes["weights"] == phase.sizes["optimizer"] == 0 for phase in phases)
    (here,), _ = plan_of(config())
    assert (
        host_bytes_of_rank(config(cpu_offload=True), [planned])
        == host_bytes_of_rank(config(), [here]) + 16 * here.model.total
    )


def test_frozen_weights_are_not_copied_for_saves():
    cfg = config()
    cfg.trainer.policy.lora = LoraConfig(rank=4)
    (policy,), _ = plan_of(cfg)
    assert host_bytes_of_rank(cfg, [policy]) == 12 * policy.model.trained < policy.state[0]
    cfg.trainer.offload = "all"
    assert host_bytes_of_rank(cfg, [policy]) == sum(policy.state)


def test_a_gpu_has_less_room_than_its_memory():
    phase = Phase("update", {"weights": 100, "kv_cache": 50})
    reserved = phase.with_reserve(DEVICES["h100"]).sizes["reserved"]
    assert reserved > 2**29
    assert phase.with_reserve(DEVICES["h100"], 2).sizes["reserved"] > reserved


def test_what_was_reduced_last_stays_between_micro_batches():
    (planned,), _ = plan_of(config(), "cpu", dp_shard=2)
    rest = 4 * planned.model.numel(-1, trained=True)
    before, after = (planned.moments_of_update(carried)[0]["gradients"] for carried in (False, True))
    assert after - before == planned.gradients + rest
    (planned,), _ = plan_of(config(), "cpu")  # nothing is reduced
    before, after = (planned.moments_of_update(carried)[0]["gradients"] for carried in (False, True))
    assert after - before == planned.gradients
