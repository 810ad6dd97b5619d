"""A loss over packed rows does not depend on how its rows are packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.architectures import ARCHITECTURES, VOCABULARY, random_model
from tests.support.tables import table
from trainer.algorithms import POLICY_LOSSES, Totals, aggregate
from trainer.models.attention import set_attention
from trainer.models.logprobs import set_head, token_logprobs, token_scores
from trainer.parallel.batching import count_shared_tokens, take_rows
from trainer.parallel.load_balancing import Rows, plan_micro_batches
from trainer.parallel.packing import Packing

LENGTHS = np.array([9, 4, 21, 4, 13, 2, 17, 8])


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shape = (len(LENGTHS), LENGTHS.max())
    columns = np.arange(shape[1])
    mask = ((columns >= 2) & (columns < LENGTHS[:, None])).astype(np.float32)
    noise = rng.normal(size=(2, *shape)).astype(np.float32) * mask
    ids = rng.integers(2, VOCABULARY, shape)
    ids[[1, 3, 4], :3], ids[[0, 2, 6, 7], :7] = ids[1, :3], ids[0, :7]
    return {
        "input_ids": ids,
        "lengths": LENGTHS,
        "group_ids": np.array([0, 1, 0, 1, 1, 2, 0, 0]),
        "mask": mask,
        "advantages": noise[0],
        "old_logprobs": -4 * mask + 0.3 * noise[1],
    }


def loss_and_gradients(
    model: torch.nn.Module, ranks: int, max_tokens: int, shares: bool = False
) -> tuple[float, list[Tensor]]:
    """Of a policy loss with an entropy bonus, over the micro-batches of all ranks."""
    batch = make_batch()
    shared = count_shared_tokens(batch) if shares else None
    assert shared is None or shared.tolist() == [7, 3, 7, 3, 3, 0, 7, 7]
    totals = Totals.of(torch.from_numpy(batch["mask"]))
    model.zero_grad()
    total = 0.0
    for plan in plan_micro_batches(Rows(LENGTHS, 0.0, batch["group_ids"], shared), ranks, max_tokens):
        for rows in plan:
            mb = take_rows(batch, rows, "cpu", shared=shared)
            logprobs, entropy, _ = token_scores(model, mb.input_ids, mb.packing, 0.7, entropy="gradient")
            loss, _ = POLICY_LOSSES["clip"](
                logprobs,
                mb["old_logprobs"],
                mb["advantages"],
                mb["mask"],
                aggregation="seq_mean_token_mean",
                totals=totals,
            )
            loss = loss - 0.1 * aggregate(entropy, mb["mask"], "token_mean", totals)
            loss.backward()
            total += loss.item()
    return total, [p.grad.clone() for p in model.parameters()]


@pytest.fixture(scope="module", params=["qwen3", "gemma2"])
def expected(request):
    model = random_model(ARCHITECTURES[request.param], "sdpa")
    set_attention(model)
    set_head(model)
    return model, *loss_and_gradients(model, 1, 10_000)


@settings(deadline=None, max_examples=10)
@given(ranks=st.integers(1, 5), max_tokens=st.integers(1, 90), shares=st.booleans())
def test_loss_and_gradients_do_not_depend_on_ranks_micro_batches_and_prefixes(expected, ranks, max_tokens, shares):
    model, loss, gradients = expected
    found, own = loss_and_gradients(model, ranks, max_tokens, shares)
    assert found == pytest.approx(loss, rel=1e-5, abs=1e-6)
    for gradient, other in zip(own, gradients, strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(gradient, other, atol=1e-5 * scale, rtol=1e-5)


def test_reinforce_with_advantage_1_is_cross_entropy():
    batch, model = make_batch(), random_model(ARCHITECTURES["qwen2"], "sdpa")
    set_attention(model)
    set_head(model)
    mb = take_rows(batch, range(len(LENGTHS)), "cpu")
    logprobs = token_logprobs(model, mb.input_ids, mb.packing)
    loss, _ = POLICY_LOSSES["reinforce"](
        logprobs, logprobs.detach(), mb["mask"], mb["mask"], aggregation="token_mean", totals=None
    )
    ids = torch.from_numpy(batch["input_ids"])
    with torch.no_grad():
        logits = random_model(ARCHITECTURES["qwen2"], "eager")(ids).logits
    labels = torch.where(torch.from_numpy(batch["mask"]) > 0, ids, -100)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@table("has_bias", [False, True])
def test_a_temperature_divides_the_logits_and_0_counts_as_1(has_bias):
    """In chunks of tokens, and for a head that is more than one matrix."""
    model = random_model(ARCHITECTURES["qwen3"], "sdpa")
    if has_bias:
        model.lm_head = torch.nn.Linear(model.config.hidden_size, VOCABULARY)
    set_attention(model)
    assert set_head(model) is not has_bias
    ids, packing = torch.arange(2, 9)[None], Packing([3, 4], "cpu")
    cold, plain, greedy = (token_logprobs(model, ids, packing, t) for t in (0.5, 1.0, 0.0))
    assert torch.equal(plain, greedy) and not torch.allclose(cold, plain)
    assert (plain[:, 0] == 0).all() and plain[0, 3] == 0
