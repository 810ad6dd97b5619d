"""Packed rows compute what padded rows compute, in every architecture that we name."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import FalconConfig, Llama4TextConfig, LlamaConfig, OPTConfig, RecurrentGemmaConfig

from tests.support.architectures import ALL, ARCHITECTURES, VOCABULARY, WINDOW, random_model
from tests.support.tables import table
from trainer.errors import UserError
from trainer.models.attention import (
    PACKED,
    attend_varlen,
    can_pack,
    packed_attention,
    packing_arguments,
    quadratic_cost,
    set_attention,
    uses_varlen,
)
from trainer.models.loading import CriticModel
from trainer.models.logprobs import set_head, token_logprobs, token_scores
from trainer.parallel.packing import Packing

LENGTHS = [3, 11, 2, 7, 7, 1, 14]
ALONE = [0] * len(LENGTHS)
SHARED = [0, 0, 1, 3, 4, 0, 0]
"""How many tokens each sequence has in common with the last one that has none."""


def sequences(shared: list[int] = ALONE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    leader = tokens[0]
    for ids, count in zip(tokens, shared, strict=True):
        leader = leader if count else ids
        ids[:count] = leader[:count]
    return tokens


def padded_ids(shared: list[int] = ALONE) -> Tensor:
    return nn.utils.rnn.pad_sequence(sequences(shared), batch_first=True)


def packed_ids(shared: list[int] = ALONE) -> Tensor:
    return torch.cat([ids[count:] for ids, count in zip(sequences(shared), shared, strict=True)])[None]


def real() -> Tensor:
    """Which entries of padded rows are tokens after the first."""
    columns = torch.arange(max(LENGTHS))
    return (columns > 0) & (columns < torch.tensor(LENGTHS)[:, None])


def weights() -> Tensor:
    """A gradient for each entry."""
    return torch.randn(len(LENGTHS), max(LENGTHS), generator=torch.Generator().manual_seed(2)) * real()


def packable(name: str):
    model = random_model(ALL[name], "eager")
    set_attention(model)
    set_head(model)
    assert model.config._attn_implementation == PACKED
    return model


def padded_scores(model: nn.Module, shared: list[int] = ALONE) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of padded rows."""
    ids = padded_ids(shared)
    logp = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    chosen = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return tuple(nn.functional.pad(x, (1, 0)) * real() for x in (chosen, -(logp.exp() * logp).sum(-1)))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    found, expected = gradients(ours), gradients(theirs)
    assert found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@table("short", [64, 3])
@table("shared", [ALONE, SHARED])
@table("name", ALL)
def test_logprobs_entropies_and_gradients_equal_those_of_padded_rows(name, shared, short, monkeypatch):
    monkeypatch.setattr("trainer.parallel.packing._SHORT", short)
    packing, ids = Packing(LENGTHS, "cpu", prefix_lengths=shared), packed_ids(shared)
    assert (len(packing.buckets) == 1) == (short == 64 and shared == ALONE)
    assert ids.numel() == packing.tokens == sum(LENGTHS) - sum(shared)
    ours, theirs = packable(name), random_model(ALL[name], "eager")
    expected, expected_entropy = padded_scores(theirs, shared)
    logprobs, entropy, _ = token_scores(ours, ids, packing, entropy="gradient")
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    ((logprobs + 0.3 * entropy) * weights()).sum().backward()
    ((expected + 0.3 * expected_entropy) * weights()).sum().backward()
    assert_same_gradients(ours, theirs)


@table("shared", [ALONE, SHARED])
@table("name", ARCHITECTURES)
def test_values_and_gradients_of_a_critic_equal_those_of_padded_rows(name, shared):
    models = packable(name), random_model(ARCHITECTURES[name], "eager")
    critics = [CriticModel(model.base_model, model.base_model_prefix) for model in models]
    for critic in critics:
        critic.value_head.weight.data = torch.randn(1, 32, generator=torch.Generator().manual_seed(3))
    values = critics[0](packed_ids(shared), Packing(LENGTHS, "cpu", prefix_lengths=shared))
    hidden = models[1].base_model(padded_ids(shared), use_cache=False).last_hidden_state
    expected = nn.functional.pad(critics[1].value_head(hidden[:, :-1]).squeeze(-1), (1, 0)) * real()
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)
    (values * weights()).sum().backward()
    (expected * weights()).sum().backward()
    assert_same_gradients(*critics)


@table("name", ["qwen3", "gemma2"])
def test_recomputed_activations_use_the_boundaries_of_their_micro_batch(name):
    """The backward pass of one row comes after the forward pass of another."""
    plain, recomputing = packable(name), packable(name)
    recomputing.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (plain, recomputing):
        first = token_logprobs(model, packed_ids(), Packing(LENGTHS, "cpu"))
        token_logprobs(model, packed_ids(), Packing([sum(LENGTHS)], "cpu"))
        (first * weights()).sum().backward()
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradient, gradients(recomputing)[name]), name


@table("implementation", ["packed", "eager"])
def test_a_sequence_does_not_attend_to_its_neighbours(implementation):
    if implementation == "packed":
        model = packable("gemma2")
    else:
        model = random_model(ARCHITECTURES["gemma2"], "eager")
        set_head(model)
    ids, packing = packed_ids(), Packing(LENGTHS, "cpu")
    before = token_logprobs(model, ids, packing)
    start = LENGTHS[0]
    changed = ids.clone()
    changed[0, start : start + LENGTHS[1]] = (ids[0, start : start + LENGTHS[1]] + 1).clamp(2, VOCABULARY - 1)
    after = token_logprobs(model, changed, packing)
    others = [row for row in range(len(LENGTHS)) if row != 1]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[1], after[1])


def test_windows_and_soft_caps_change_the_result():
    """So that the comparisons above can fail."""
    for name, change in (("gemma2", {"attn_logit_softcapping": None}), ("gemma3", {"sliding_window": 99})):
        config = copy.deepcopy(ARCHITECTURES[name])
        for key, value in change.items():
            setattr(config, key, value)
        other = random_model(config, "eager")
        same = random_model(ARCHITECTURES[name], "eager")
        assert (padded_scores(other)[0] - padded_scores(same)[0]).abs().max() > 1e-3
    assert max(LENGTHS) > WINDOW


def test_values_of_a_row_depend_on_other_rows_only_by_rounding():
    model, ids = packable("qwen3"), sequences()
    together = token_logprobs(model, packed_ids(), Packing(LENGTHS, "cpu"))
    again = token_logprobs(model, packed_ids(), Packing(LENGTHS, "cpu"))
    assert torch.equal(together, again)
    for row, sequence in enumerate(ids):
        alone = token_logprobs(model, sequence[None], Packing([len(sequence)], "cpu"))
        torch.testing.assert_close(alone[0], together[row, : len(sequence)], atol=1e-5, rtol=1e-5)


SMALL = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
UNPACKED = {
    "carries a state": RecurrentGemmaConfig(**SMALL, intermediate_size=32, lru_width=32),
    "attends in chunks": Llama4TextConfig(
        **SMALL, num_key_value_heads=2, intermediate_size=32, intermediate_size_mlp=32, num_local_experts=2
    ),
    "attends by itself": FalconConfig(**SMALL),
    "attends to later tokens": LlamaConfig(**SMALL, is_causal=False),
}


@table("name", UNPACKED)
def test_other_models_get_one_sequence_at_a_time(name):
    model = random_model(UNPACKED[name], "sdpa")
    set_attention(model)
    assert not can_pack(model) and model.config._attn_implementation == "sdpa"
    assert packing_arguments(model.config, Packing([4], "cpu")) == {}


@table("name, packs", [("sinks", False), ("a window in the mask alone", True), ("gemma3", True), ("opt", False)])
def test_eager_rows_are_packed_if_the_masks_of_the_class_keep_sequences_apart(name, packs):
    """Some classes build their masks without the positions, by which transformers separates sequences."""
    opt = OPTConfig(vocab_size=VOCABULARY, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2)
    model = random_model(opt if name == "opt" else ALL[name], "eager")
    set_attention(model, "eager")
    set_head(model)
    assert can_pack(model) == packs and model.config._attn_implementation == "eager"
    ids, packing = packed_ids(), Packing(LENGTHS, "cpu")
    changed = ids.clone()
    changed[0, : LENGTHS[0]] += 1
    others = [token_logprobs(model.eval(), row, packing)[1:] for row in (ids, changed)]
    assert torch.equal(*others) == packs, "the masks are as the model tells"


def test_without_packing_a_model_keeps_its_own_attention():
    ours, theirs = random_model(ALL["gemma3"], "sdpa"), packable("gemma3")
    set_attention(ours, pack=False)
    set_head(ours)
    assert not can_pack(ours) and ours.config._attn_implementation == "sdpa"
    ids = sequences()[-1][None]
    found, expected = (token_logprobs(model, ids, Packing([ids.numel()], "cpu")) for model in (ours, theirs))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@table(
    "argument",
    [
        {"position_bias": torch.zeros(1, 2, 4, 4)},
        {"indices": torch.zeros(1, 4, 2)},
        {"is_causal": False},
        {"dropout": 0.1},
        {"attention_mask": torch.ones(1, 1, 4, 4)},
        {"softcap": 2.0, "s_aux": torch.zeros(2)},
    ],
)
def test_an_argument_that_packed_attention_does_not_know_is_refused(argument):
    heads, name = torch.randn(1, 2, 4, 8), next(iter(argument))
    arguments = {"attention_mask": None, "packing": Packing([4], "cpu")}
    neutral = {"is_causal": True, "dropout": 0.0, "position_ids": torch.arange(4), "output_attentions": False}
    expected, _ = packed_attention(SimpleNamespace(), heads, heads, heads, **arguments)
    found, _ = packed_attention(SimpleNamespace(), heads, heads, heads, **arguments | neutral | {"position_bias": None})
    assert torch.equal(found, expected)
    with pytest.raises(UserError, match=f"SimpleNamespace passes {name} to its attention, .*; set trainer.pack=false"):
        packed_attention(SimpleNamespace(), heads, heads, heads, **arguments | argument)


@table("name", ["sinks", "gemma3"])
def test_the_window_of_a_block_is_that_of_its_mask(name):
    model = packable(name)
    windows = [{module.visible_window for module in block.modules()} for block in model.model.layers]
    assert windows == [{WINDOW}, {None}]


def test_a_model_that_ignores_the_packing_is_refused():
    heads = torch.zeros(1, 2, 4, 8)
    with pytest.raises(UserError, match="choose model.attn_implementation=eager"):
        packed_attention(SimpleNamespace(), heads, heads, heads, None)


@table("tied", [False, True])
def test_the_quadratic_cost_is_the_attention_fraction_of_the_flops(tied):
    config = copy.deepcopy(ARCHITECTURES["llama"])
    config.tie_word_embeddings = tied
    model = random_model(config, "sdpa")
    set_attention(model)
    block = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32  # q, k and v, o, the MLP, the norms
    parameters = 2 * block + 32 + VOCABULARY * 32
    assert quadratic_cost(model) == pytest.approx(2 * 32 / parameters)


@torch.no_grad()
def test_packed_rows_in_bfloat16_are_near_padded_rows():
    model = packable("qwen3").bfloat16()
    packed = token_logprobs(model, packed_ids(), Packing(LENGTHS, "cpu"))
    alone = [token_logprobs(model, ids[None], Packing([len(ids)], "cpu")) for ids in sequences()]
    for row, ids, expected in zip(packed, sequences(), alone, strict=True):
        assert row[: len(ids)] == pytest.approx(expected[0], abs=0.05)
    assert packed.dtype == torch.float32


@table("shared", [ALONE, SHARED])
@table("heads", [1, 2, 4])
def test_the_variable_length_kernel_accepts_its_arguments(heads, shared):
    """Tensors without values, for which the kernel checks its arguments and says what it would return."""
    with OperatorNames() as names:
        packing = Packing(LENGTHS, "meta", prefix_lengths=None if shared == ALONE else shared)
        query, key, value = (
            torch.empty(1, n, packing.tokens, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for n in (4, heads, heads)
        )
        out = attend_varlen(query, key, value, packing, None, WINDOW)
        out.sum().backward()
    assert out.shape == (1, packing.tokens, 4, 16)
    assert key.grad is not None and key.grad.shape == key.shape
    assert {"torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"} <= names.found


@table(
    "device, dtype, width, softcap, taken",
    [
        ("cuda", torch.bfloat16, 128, None, True),
        ("cuda", torch.float16, 8, None, True),
        ("cuda", torch.float32, 128, None, False),
        ("cpu", torch.bfloat16, 128, None, False),
        ("cuda", torch.bfloat16, 288, None, False),
        ("cuda", torch.bfloat16, 20, None, False),
        ("cuda", torch.bfloat16, 128, 50.0, False),
    ],
)
def test_the_variable_length_kernel_is_used_where_it_is_supported(device, dtype, width, softcap, taken):
    assert uses_varlen(device, dtype, width, softcap) == taken


class OperatorNames(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))
