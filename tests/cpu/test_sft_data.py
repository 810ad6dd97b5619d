"""Packed supervised examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from trainer.config import DataConfig, TinyConfig
from trainer.data.sft import PackedBatches, encode, load_encoded
from trainer.models.logprobs import token_logprobs
from trainer.models.tiny import build_tiny
from trainer.models.tokenizer import load_tokenizer

PAD = 0


def examples_of(*lengths: int) -> list[tuple[list[int], list[float]]]:
    """Examples whose tokens say whose they are; the second half of each is to be learnt."""
    return [([i + 1] * n, [0.0] * (n - n // 2) + [1.0] * (n // 2)) for i, n in enumerate(lengths)]


@settings(deadline=None)  # the machine may be busy
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    rows=st.integers(1, 5),
    step=st.integers(0, 1000),
)
def test_rows_hold_whole_examples_each_from_position_0(lengths, rows, step):
    examples = examples_of(*lengths)
    batches = PackedBatches(examples, 1, rows, 12, PAD)
    batch = batches.batch(step)
    assert {name: array.shape for name, array in batch.items()} == {
        "input_ids": (rows, 12), "position_ids": (rows, 12), "loss_mask": (rows, 12), "lengths": (rows,)}  # fmt: skip
    packed = []
    for ids, positions, mask in zip(batch["input_ids"], batch["position_ids"], batch["loss_mask"], strict=True):
        starts = [*np.flatnonzero(positions == 0), 12]
        for begin, end in zip(starts, starts[1:], strict=False):
            assert positions[begin:end].tolist() == list(range(end - begin))
            if ids[begin] == PAD:
                assert end == 12 and not ids[begin:].any() and not mask[begin:].any()
                continue
            example = ids[begin] - 1
            assert (ids[begin:end].tolist(), mask[begin:end].tolist()) == examples[example]
            packed.append(example)
    assert len(set(packed)) == len(packed)
    if sum(lengths) <= 12:
        assert len(packed) == len(lengths)
    # Each example that is missing came after all that are there, and there was no room for it.
    if len(packed) < len(lengths):
        used = sum(lengths[i] for i in packed)
        assert used + rows * max(lengths) > rows * 12


def test_a_batch_is_a_function_of_seed_and_step():
    examples = examples_of(*range(1, 12))
    batches = PackedBatches(examples, 1, 3, 12, PAD)
    ids = {(1, step): batches.batch(step)["input_ids"] for step in range(4)}
    for step in (3, 0):  # in another order, by another object
        again = PackedBatches(examples, 1, 3, 12, PAD)
        np.testing.assert_array_equal(again.batch(step)["input_ids"], ids[1, step])
    ids[2, 0] = PackedBatches(examples, 2, 3, 12, PAD).batch(0)["input_ids"]
    assert len({array.tobytes() for array in ids.values()}) == len(ids)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("tiny"))
    build_tiny(TinyConfig(), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return load_tokenizer(model_path)


def test_loss_is_on_the_answer_and_its_end(tokenizer):
    example = {"prompt": "abc", "answer": "cba"}
    ids, mask = encode(example, tokenizer, None, 100)
    assert tokenizer.decode(ids) == "<|user|>abc<|assistant|>cba<|end|>"
    learnt = [token for token, learn in zip(ids, mask, strict=True) if learn]
    assert tokenizer.decode(learnt) == "cba<|end|>"
    assert mask == sorted(mask)
    assert encode(example, tokenizer, None, 7) == (ids[:7], mask[:7])
    with_system, _ = encode(example, tokenizer, "Go.", 100)
    assert tokenizer.decode(with_system) == "<|system|>Go.<|user|>abc<|assistant|>cba<|end|>"


def test_the_end_is_that_of_the_chat_template(tokenizer):
    chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}]
    whole = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)
    assert encode({"prompt": "abc", "answer": "cba"}, tokenizer, None, 100)[0] == whole


def test_examples_without_room_for_an_answer_are_left_out(tokenizer):
    data = DataConfig(generator="reverse_text", train_size=50)
    assert len(load_encoded(data, tokenizer, 100)) == 50
    short = load_encoded(data, tokenizer, 9)
    assert 0 < len(short) < 50
    assert all(any(mask) and len(ids) <= 9 for ids, mask in short)


@pytest.mark.parametrize("rows", [1, 2])
def test_packed_examples_do_not_see_each_other(model_path, tokenizer, rows):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
    encoded = load_encoded(DataConfig(generator="reverse_text", train_size=40), tokenizer, 100)
    batch = PackedBatches(encoded, 1, rows, 100, tokenizer.pad_token_id).batch(1)
    ids, positions = torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["position_ids"])
    checked = 0
    with torch.no_grad():
        packed, _ = token_logprobs(model, ids, position_ids=positions)
        for row in range(rows):
            starts = [*torch.nonzero(positions[row] == 0).flatten().tolist(), 100]
            assert len(starts) > 4
            for begin, end in zip(starts, starts[1:], strict=False):
                alone, _ = token_logprobs(model, ids[row : row + 1, begin:end])
                torch.testing.assert_close(packed[row, begin + 1 : end], alone[0, 1:], atol=1e-5, rtol=0)
                checked += end - begin
        # The comparison can fail: without positions the examples do see each other.
        blind, _ = token_logprobs(model, ids)
    assert checked == rows * 100
    assert (blind - packed).abs().max() > 1e-2
