"""Log-probs and entropies from hidden states equal those from all logits, and need less memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, GraniteConfig, MixtralConfig, PhiConfig

from tests.support.architectures import ARCHITECTURES, VOCABULARY, random_model
from tests.support.tables import table
from trainer.models import logprobs as module
from trainer.models.attention import set_attention
from trainer.models.logprobs import Head, _ChunkedScores, find_head, set_head, token_logprobs, token_scores
from trainer.models.online_softmax import Vocabulary
from trainer.parallel.packing import Packing

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
HEADS = {
    "qwen3": (ARCHITECTURES["qwen3"], Head()),
    "gemma2": (ARCHITECTURES["gemma2"], Head(softcap=30.0)),
    "granite": (GraniteConfig(**SHAPE, logits_scaling=8.0), Head(scale=1 / 8)),
    "cohere": (CohereConfig(**SHAPE, logit_scale=0.25), Head(scale=0.25)),
    "a mixture of experts": (MixtralConfig(**SHAPE, num_local_experts=2), Head()),
    "a head with a bias": (PhiConfig(**SHAPE), None),
}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setitem(module._CHUNK_TOKENS, "cpu", 4)
    monkeypatch.setattr(module, "_CHUNK_LOGITS", 4 * VOCABULARY)


def expected_scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@settings(deadline=None, max_examples=20)
@given(
    tokens=st.integers(0, 11),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    head=st.sampled_from([Head(), Head(scale=0.3), Head(softcap=2.0), Head(scale=0.5, softcap=3.0)]),
)
def test_gradients_are_those_of_the_formula(tokens, temperature, head):
    check_gradients(False, tokens, temperature, head)


@pytest.mark.processes
@pytest.mark.release
def test_compiled_gradients_are_those_of_the_formula():
    """One case is enough, because the compiler takes long for each head and temperature."""
    check_gradients(True, 11, 1.7, Head(scale=0.5, softcap=3.0))


def check_gradients(compiled: bool, tokens: int, temperature: float, head: Head) -> None:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(0, 9, (tokens,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module._CHUNK_TOKENS, "cpu", 4)
        patch.setattr(module, "_CHUNK_LOGITS", 1)
        patch.setattr(torch._inductor.config, "compile_threads", 1, raising=False)  # no pool of processes that stays
        found = _ChunkedScores.apply(hidden, weight, targets, head, temperature, "gradient", Vocabulary(), compiled)
        z = head.scale * (hidden @ weight.T)
        z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
        expected = expected_scores(z, targets, temperature)
        weights = torch.randn(2, tokens, dtype=torch.float64, generator=generator)
        ours = torch.autograd.grad(sum((w * s).sum() for w, s in zip(weights, found, strict=True)), [hidden, weight])
        theirs = torch.autograd.grad(
            sum((w * s).sum() for w, s in zip(weights, expected, strict=True)), [hidden, weight]
        )
    for a, b in zip([*found, *ours], [*expected, *theirs], strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)


@table("name", HEADS)
def test_find_head_detects_scale_and_softcap(name):
    config, expected = HEADS[name]
    found = find_head(random_model(config, "eager"))
    assert (found is None) == (expected is None)
    if expected is not None:
        assert (found.scale, found.softcap) == (pytest.approx(expected.scale, rel=1e-5), expected.softcap)


@table("width", [VOCABULARY, 7])
@table("name", HEADS)
def test_scores_and_gradients_equal_those_of_the_models_own_logits(name, width, small_chunks, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_LOGITS", 4 * width)
    config, _ = HEADS[name]
    ours, theirs = random_model(config, "sdpa"), random_model(config, "eager")
    set_attention(ours)
    set_head(ours)
    ids = torch.randint(2, VOCABULARY, (1, 19), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(19) % 3 > 0).float()[None]
    logprobs, entropy, _ = token_scores(ours, ids, Packing([19], "cpu"), 0.8, mask, "gradient")
    chosen, spread = expected_scores(theirs(ids).logits[0, :-1], ids[0, 1:], 0.8)
    torch.testing.assert_close(logprobs[0, 1:], chosen * mask[0, 1:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy[0, 1:], spread * mask[0, 1:], atol=1e-5, rtol=1e-5)
    (logprobs + 0.2 * entropy).sum().backward()
    ((chosen + 0.2 * spread) * mask[0, 1:]).sum().backward()
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        scale = max(1.0, float(other.grad.abs().max()))
        torch.testing.assert_close(parameter.grad, other.grad, atol=1e-5 * scale, rtol=0, msg=name)


def test_find_head_restores_the_layers_of_the_model():
    model = random_model(ARCHITECTURES["qwen3"], "eager")
    before = dict(model.named_modules())
    find_head(model)
    assert dict(model.named_modules()) == before


class _Logits(TorchDispatchMode):
    """Records the most tokens whose logits one tensor holds, and the number of elements of the largest matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 2:
            self.elements = max(self.elements, out.numel())
            if function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out) and out.shape[1] == VOCABULARY:
                self.tokens = max(self.tokens, len(out))
        return out


@table("frozen", [False, True])
def test_no_tensor_holds_the_logits_of_more_than_a_chunk(frozen, small_chunks):
    hidden, weight = torch.randn(40, 3, requires_grad=True), nn.Parameter(torch.randn(VOCABULARY, 3), not frozen)
    with _Logits() as seen:
        logprobs, entropy = _ChunkedScores.apply(
            hidden, weight, torch.zeros(40, dtype=torch.long), Head(), 1.0, "gradient"
        )
        (logprobs + entropy).sum().backward()
    assert seen.tokens == 4 and seen.elements == 4 * VOCABULARY
    assert (weight.grad is None) == frozen and hidden.grad.abs().sum() > 0


@table("width", [VOCABULARY, 7])
def test_half_precision_gradients_are_summed_in_float32(width, small_chunks, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_LOGITS", 4 * width)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(64, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(VOCABULARY, 8, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, VOCABULARY, (64,), generator=generator)
    logprobs, _ = _ChunkedScores.apply(hidden, weight, targets, Head(), 1.0, None)
    logprobs.sum().backward()
    exact = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    expected, _ = expected_scores(exact[0] @ exact[1].T, targets, 1.0)
    expected.sum().backward()
    assert logprobs.dtype == torch.float32 and weight.grad.dtype == torch.bfloat16
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        error = (ours.grad.float() - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert error < 0.01


@table("vocabulary, tokens, widths", [(256, 16384, [256]), (8192, 512, [8192]), (20000, 512, [8192, 8192, 3616])])
def test_with_a_large_vocabulary_only_a_block_of_logits_exists_at_a_time(vocabulary, tokens, widths):
    chunks, blocks, buffer = module._pieces(2 * tokens, torch.empty(vocabulary, 1))
    assert {chunk.stop - chunk.start for chunk in chunks} == {tokens} and len(buffer) == tokens * widths[0]
    assert [block.stop - block.start for block in blocks] == widths and blocks[-1].stop == vocabulary


def test_tokens_whose_mask_is_0_cost_no_logits(small_chunks):
    model = random_model(HEADS["granite"][0], "sdpa")
    set_attention(model)
    set_head(model)
    ids, packing = torch.arange(2, 42)[None], Packing([20, 20], "cpu")
    every, mask = token_logprobs(model, ids, packing), torch.zeros(2, 20)
    for token in (None, (1, 5)):
        if token is not None:
            mask[token] = 1
        with _Logits() as seen, torch.no_grad():
            found = token_logprobs(model, ids, packing, 1.0, mask)
        assert seen.tokens == mask.sum()
        torch.testing.assert_close(found, every * mask, atol=1e-6, rtol=1e-6)
