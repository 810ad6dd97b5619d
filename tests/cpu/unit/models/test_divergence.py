"""Divergences over the vocabulary: their formulas, and in chunks what the logits of two whole models give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import Gemma2Config, PhiConfig

from tests.cpu.unit.models.test_chunked_logprobs import _Logits
from tests.support.architectures import ARCHITECTURES, SHAPE, VOCABULARY, random_model
from trainer.config.algorithm import TeacherConfig
from trainer.models import logprobs as module
from trainer.models.attention import set_attention
from trainer.models.logprobs import Distributions, Head, _ChunkedDivergence, distributions, set_head, token_scores
from trainer.models.online_softmax import LikeliestTokens, Vocabulary, divergence
from trainer.parallel.packing import Packing

POLICY, TEACHER = [2, 1, 0.3, -1, 0, -0.5], [0, 1, 2, 0.5, -1, 0.2]  # logits
ENDS = {"forward": 0.0, "reverse": 1.0}


def by_trl(teacher: Tensor, policy: Tensor, beta: float) -> Tensor:
    """`generalized_jsd_loss` of TRL 1.16's GKD trainer, for each token, of log-probs."""
    if beta == 0:
        parts = kl_div(policy, teacher, reduction="none", log_target=True)
    elif beta == 1:
        parts = kl_div(teacher, policy, reduction="none", log_target=True)
    else:
        b = torch.tensor(beta, dtype=policy.dtype)
        mixture = torch.logsumexp(torch.stack([policy + torch.log(1 - b), teacher + torch.log(b)]), dim=0)
        of_teacher, of_policy = (kl_div(mixture, p, reduction="none", log_target=True) for p in (teacher, policy))
        parts = b * of_teacher + (1 - b) * of_policy
    return parts.sum(-1)


def test_divergences_are_those_of_the_formulas_and_of_trl():
    """Values of the formulas in float64, by kind, beta and temperature."""
    for kind, beta, temperature, expected in [
        ("forward", 0.5, 1, 0.876761766),
        ("reverse", 0.5, 1, 0.996973600),
        ("jsd", 0.1, 1, 0.076334052),
        ("jsd", 0.5, 1, 0.206115792),
        ("jsd", 0.9, 1, 0.083414883),
        ("forward", 0.5, 2, 0.226727817),
        ("jsd", 0.5, 2, 0.057042440),
    ]:
        q, p = (torch.tensor([z], dtype=torch.float64).div(temperature).log_softmax(-1) for z in (POLICY, TEACHER))
        assert divergence(p, q, kind, beta).item() == pytest.approx(expected, abs=1e-9), (kind, beta, temperature)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        generator = torch.Generator().manual_seed(1)
        p, z = (3 * torch.randn(40, 50, generator=generator, dtype=torch.float64) for _ in range(2))
        p, z = p.log_softmax(-1).to(dtype), z.to(dtype).requires_grad_()
        # float32 leaves few digits of a small difference
        ends = (0.05, 0.95) if dtype == torch.float64 else (0.25, 0.75)
        for kind, beta in [("forward", 0.5), ("reverse", 0.5), ("jsd", ends[0]), ("jsd", 0.5), ("jsd", ends[1])]:
            ours = divergence(p, z.log_softmax(-1), kind, beta)
            theirs = by_trl(p, z.log_softmax(-1), ENDS.get(kind, beta))
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
            slopes = [torch.autograd.grad(result.sum(), z)[0] for result in (ours, theirs)]
            assert (slopes[0] - slopes[1]).norm() <= tolerance * slopes[1].norm()


def test_likeliest_tokens_and_one_outcome_for_the_rest_are_a_lower_bound():
    """By the teacher's two likeliest tokens; by all tokens, the divergence itself. A token that the policy lacks counts
    nothing."""
    q = torch.tensor([POLICY], dtype=torch.float64).log_softmax(-1)
    p = torch.tensor([TEACHER], dtype=torch.float64).log_softmax(-1)
    for kind, beta, expected in [("forward", 0.5, 0.575636250), ("reverse", 0.5, None), ("jsd", 0.3, None)]:
        settings = TeacherConfig(divergence=kind, beta=beta)
        top, ids = p.topk(2)
        given = LikeliestTokens(ids, top, settings)
        found = given.divergence(q).item()
        kept = [
            torch.cat([x.gather(1, ids), (1 - x.gather(1, ids).exp().sum(1, keepdim=True)).log()], 1) for x in (p, q)
        ]
        assert found == pytest.approx(divergence(*kept, kind, beta).item(), abs=1e-9)
        assert expected is None or found == pytest.approx(expected, abs=1e-9)
        whole = LikeliestTokens(torch.arange(6)[None], p, settings).divergence(q).item()
        assert found < whole == pytest.approx(divergence(p, q, kind, beta).item(), abs=1e-4)
        beyond = LikeliestTokens(torch.cat([ids, torch.tensor([[6]])], 1), torch.cat([top, top[:, :1]], 1), settings)
        assert beyond.divergence(q).item() == pytest.approx(found, abs=1e-9)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_chunks_in_float64_are_the_plain_formula(kind, monkeypatch):
    """With a soft cap and a scale, and a teacher with two more columns."""
    monkeypatch.setitem(module._DIVERGENCE_LOGITS, "cpu", 3 * 10)
    generator = torch.Generator().manual_seed(3)
    sizes = ((11, 6), (10, 6), (11, 4), (12, 4))
    hidden, weight, states, other = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
    hidden.requires_grad_(), weight.requires_grad_()
    given = Distributions(states, other, Head(scale=0.5), TeacherConfig(divergence=kind, beta=0.2, temperature=2.0))
    found = _ChunkedDivergence.apply(hidden, weight, Head(softcap=3.0), given, Vocabulary())
    q = (3 * torch.tanh(hidden @ weight.T / 3) / 2).softmax(-1)
    p = (0.5 * (states @ other.T)[:, :10] / 2).softmax(-1)
    m = 0.2 * p + 0.8 * q
    terms = {"forward": p * (p / q).log(), "reverse": q * (q / p).log(),
             "jsd": 0.2 * p * (p / m).log() + 0.8 * q * (q / m).log()}  # fmt: skip
    expected, upstream = terms[kind].sum(-1), torch.rand(11, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(
        *(torch.autograd.grad(r, (hidden, weight), upstream) for r in (found, expected)), strict=True
    ):
        assert (ours - theirs).norm() <= 1e-9 * theirs.norm()


@pytest.mark.parametrize("kind", ["reverse", "jsd"])
@pytest.mark.parametrize("pair", ["another head", "more columns", "no chunks"])
def test_packed_rows_in_chunks_give_what_the_logits_of_whole_models_give(pair, kind, monkeypatch):
    """With another teacher, whose head has a soft cap, or more columns than the policy's, or is not known."""
    monkeypatch.setitem(module._DIVERGENCE_LOGITS, "cpu", 3 * VOCABULARY)
    teachers = {
        "another head": ARCHITECTURES["gemma2"],
        "more columns": Gemma2Config(**{**SHAPE, "vocab_size": VOCABULARY + 4}, query_pre_attn_scalar=16),
        "no chunks": PhiConfig(**{**SHAPE, "num_key_value_heads": 4}),
    }
    policy_config = teachers[pair] if pair == "no chunks" else ARCHITECTURES["gemma2" if kind == "jsd" else "qwen3"]
    policy, teacher = (random_model(one, "sdpa").double() for one in (policy_config, teachers[pair]))
    plain = [random_model(one, "eager").double().eval() for one in (policy_config, teachers[pair])]
    for parameter in teacher.parameters():  # else it is the policy where both have one class
        parameter.data.mul_(1.1)
    plain[1].load_state_dict(teacher.state_dict())
    rows = [[3, 7, 9, 4, 11, 30, 2], [5, 6, 8, 21, 40], [9, 2, 2]]
    settings = TeacherConfig(divergence=kind, beta=0.3, temperature=1.5)
    for lm in (policy, teacher):
        lm.eval()
        set_attention(lm)
        assert set_head(lm) is (pair != "no chunks")
    packing = Packing([len(row) for row in rows], "cpu")
    mask = torch.zeros(3, 7)
    for i, row in enumerate(rows):
        mask[i, 2 : len(row)] = 1
    ids = torch.tensor([sum(rows, [])])
    given = distributions(teacher, ids, packing, mask, settings)
    logprobs, entropies, found = token_scores(policy, ids, packing, 1.0, mask, "value", given)
    expected = torch.zeros_like(found)
    for i, row in enumerate(rows):
        z, of_teacher = (lm(input_ids=torch.tensor([row])).logits[0, 1:-1] for lm in plain)
        p = (of_teacher[:, : z.shape[1]] / 1.5).log_softmax(-1).detach()
        expected[i, 2 : len(row)] = by_trl(p, (z / 1.5).log_softmax(-1), ENDS.get(kind, 0.3))
        assert logprobs[i, 2].item() == pytest.approx(z[0].log_softmax(-1)[row[2]].item(), abs=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # norms are float32 in any model
    weights = torch.rand(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, ours), theirs in zip(policy.named_parameters(), plain[0].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_divergence_is_0_for_equal_models_and_needs_no_memory_for_all_logits(monkeypatch):
    config = ARCHITECTURES["qwen3"]
    model = random_model(config, "sdpa").eval()
    set_attention(model)
    set_head(model)
    ids, packing, mask = torch.arange(2, 12)[None], Packing([6, 4], "cpu"), torch.ones(2, 6)
    for kind in ("forward", "reverse"):
        given = distributions(model, ids, packing, mask, TeacherConfig(divergence=kind))
        *_, found = token_scores(model, ids, packing, 1.0, mask, None, given)
        assert torch.equal(found, torch.zeros_like(found))
    monkeypatch.setitem(module._DIVERGENCE_LOGITS, "cpu", 4 * VOCABULARY)
    states, weight = torch.randn(40, 3), torch.randn(VOCABULARY, 3)
    hidden = torch.randn(40, 3, requires_grad=True)
    with _Logits() as seen:
        given = Distributions(states, weight, Head(), TeacherConfig(divergence="jsd"))
        _ChunkedDivergence.apply(hidden, weight, Head(), given, Vocabulary()).sum().backward()
    assert seen.tokens == 4 and seen.elements == 4 * VOCABULARY and hidden.grad.abs().sum() > 0
