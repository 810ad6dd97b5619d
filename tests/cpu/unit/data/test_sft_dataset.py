"""Supervised examples as samples: tokens, and what of them is to be learnt."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json

import numpy as np
import pytest

from trainer.config import DataConfig, SFTConfig
from trainer.data import examples
from trainer.data.examples import Stops
from trainer.data.rollout_io import write_rollouts
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("tiny"))
    build_tiny(TinyShape(), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return load_tokenizer(model_path)


def sft(**options) -> SFTConfig:
    return SFTConfig(**{"max_length": 100, **options})


def encode(example, tokenizer, system_prompt, config) -> Sample:
    """The one sample of an example."""
    [sample] = encode_all(example, tokenizer, system_prompt, config)
    return sample


def encode_all(example, tokenizer, system_prompt, config) -> list[Sample]:
    stops = Stops(tokenizer, [tokenizer.eos_token_id])
    return examples.encode(example, tokenizer, system_prompt, config, stops)


def load_train(data, config, tokenizer, vocab_size=None) -> list[Sample]:
    return examples.load_train(data, config, tokenizer, [tokenizer.eos_token_id], vocab_size)


def load_val(data, config, tokenizer) -> list[Sample]:
    return examples.load_val(data, config, tokenizer, [tokenizer.eos_token_id])


def learnt(encoded: Sample, tokenizer) -> list[str]:
    """The runs of tokens that are learnt, as text."""
    pairs = zip(encoded.token_ids, encoded.mask, strict=True)
    runs = [(learn, [t for t, _ in run]) for learn, run in itertools.groupby(pairs, key=lambda pair: pair[1])]
    return [tokenizer.decode(ids) for learn, ids in runs if learn]


def test_loss_is_on_the_answer_and_its_end(tokenizer):
    example = {"prompt": "abc", "answer": "cba"}
    encoded = encode(example, tokenizer, None, sft())
    assert tokenizer.decode(encoded.token_ids) == "<|user|>abc<|assistant|>cba<|end|>"
    assert learnt(encoded, tokenizer) == ["cba<|end|>"]
    cut = encode(example, tokenizer, None, sft(max_length=7))
    assert cut.token_ids.tolist() == encoded.token_ids[:7].tolist() and cut.mask.tolist() == encoded.mask[:7].tolist()
    with_system = encode(example, tokenizer, "Go.", sft())
    assert tokenizer.decode(with_system.token_ids) == "<|system|>Go.<|user|>abc<|assistant|>cba<|end|>"


CHAT = [
    {"role": "user", "content": "a<b"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "ä"},
    {"role": "user", "content": " c "},
]


def test_loss_is_on_the_replies(tokenizer):
    encoded = encode({"prompt": CHAT, "answer": "x"}, tokenizer, "Go.", sft())
    whole = (
        "<|system|>Go.<|user|>a<b<|assistant|>b<|end|><|user|>b<|assistant|>ä<|end|><|user|> c <|assistant|>x<|end|>"
    )
    assert tokenizer.decode(encoded.token_ids) == whole
    assert learnt(encoded, tokenizer) == ["b<|end|>", "ä<|end|>", "x<|end|>"]


def with_template(tokenizer, template: str):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def test_a_thought_that_the_template_drops_from_replies_is_refused(tokenizer):
    changed = with_template(
        tokenizer,
        tokenizer.chat_template.replace(
            "message['content'] }}", "message['content'].split('</think>')[-1].lstrip() }}"
        ),
    )
    chat = [CHAT[0], {"role": "assistant", "content": "<think>hm</think>\n\nb"}, CHAT[2]]
    with pytest.raises(UserError, match=r"message 2.content: the chat template in use .* does not write all of it"):
        encode({"prompt": chat, "answer": "x"}, changed, None, sft())


def test_a_message_is_not_confused_with_text_of_the_template(tokenizer):
    changed = with_template(
        tokenizer,
        "You are an assistant of the user."
        "{% for m in messages %}{{ '<|user|>' + m['role'] + ': ' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|user|>assistant: {% endif %}",
    )
    chat = [
        {"role": "user", "content": "user"},
        {"role": "assistant", "content": "is"},
        {"role": "user", "content": "a"},
    ]
    assert learnt(encode({"prompt": chat, "answer": "x"}, changed, None, sft()), changed) == ["is<|end|>", "x<|end|>"]


def test_the_end_is_that_of_the_chat_template(tokenizer):
    chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}]
    whole = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)
    assert encode({"prompt": "abc", "answer": "cba"}, tokenizer, None, sft()).token_ids.tolist() == whole


def test_examples_whose_answer_is_cut_off_are_dropped(tokenizer):
    data = DataConfig(synthetic="reverse_text", train_size=50, val_size=20)
    assert len(load_train(data, sft(), tokenizer)) == 50
    short = load_train(data, sft(max_length=9), tokenizer)
    assert 0 < len(short) < 50
    assert all(e.mask.any() and len(e.token_ids) <= 9 for e in short)
    assert len(load_val(data, sft(), tokenizer)) == 20
    with pytest.raises(UserError, match="sft.max_length=3: none of 20 validation examples has anything to"):
        load_val(data, sft(max_length=3), tokenizer)


def test_all_files_are_one_data_set(tokenizer, tmp_path):
    files = []
    for name, count in (("a", 3), ("b", 5)):
        chats = [
            [{"role": "user", "content": f"{name}{i}"}, {"role": "assistant", "content": "yes"}] for i in range(count)
        ]
        files.append(str(tmp_path / f"{name}.jsonl"))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in chats))
    data = DataConfig(train_files=files, messages_key="chat")
    assert len(load_train(data, sft(), tokenizer)) == 8
    assert len(load_train(DataConfig(train_files=files, messages_key="chat", train_size=4), sft(), tokenizer)) == 4
    with pytest.raises(UserError, match=r"data.messages_key=messages: .*a.jsonl:1 must have a list of chat messages"):
        load_train(DataConfig(train_files=files, messages_key="messages"), sft(), tokenizer)


def test_episodes_of_several_turns_are_read_back_as_they_were_sampled(tokenizer, tmp_path):
    """Each sample is an example, in which the replies are learnt; a failed episode has nothing to learn."""

    def sample(*parts: tuple[str, bool]) -> Sample:
        ids = [(token, float(sampled)) for text, sampled in parts for token in tokenizer.encode(text)]
        mask = np.asarray([sampled for _, sampled in ids], np.float32)
        return Sample(np.asarray([token for token, _ in ids]), mask, -0.5 * mask, (3, 3))

    start, again = ("<|user|>ab<|assistant|>", False), ("<|user|>?<|assistant|>", False)
    two = [start, ("ab<|end|>", True), again, ("ba<|end|>", True)]
    rendered_again = [("<|user|>ab<|assistant|>ab<|end|><|user|>??<|assistant|>", False), ("b<|end|>", True)]
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ab"},
            {"role": "user", "content": "?"}, {"role": "assistant", "content": "ba"}]  # fmt: skip
    episodes = [
        Episode("0:1:0", "0:1", [sample(*two)], 1.0, messages=chat, turns=2),
        Episode(
            "0:1:1",
            "0:1",
            [sample(*two[:2]), sample(*rendered_again)],
            0.5,
            {},
            "turns",
            messages=[*chat[:3], {"role": "assistant", "content": "b"}],
            turns=2,
        ),
        Episode("0:1:2", "0:1", [sample(("<|end|>", False))], 0.0, {}, "failed", messages=chat[:1], turns=0),
    ]
    write_rollouts(str(tmp_path), 5, episodes)
    kept = str(tmp_path / "rollouts/step_5.arrow")
    data = DataConfig(train_files=[kept])
    part = load_train(data, sft(source="rollouts", max_weight=4.0), tokenizer, 320)
    assert [example.token_ids.tolist() for example in part] == [
        sample.token_ids.tolist() for episode in episodes[:2] for sample in episode.samples
    ]
    assert [example.mask.sum() for example in part] == [6, 3, 2]
    assert all((example.logprobs == -0.5 * example.mask).all() for example in part)
    right = load_train(data, sft(source="rollouts", min_reward=1.0), tokenizer)
    assert len(right) == 1 and right[0].logprobs is None
    write_rollouts(
        str(tmp_path), 6, [dataclasses.replace(episodes[0], messages=[*chat[:3], {**chat[3], "content": "x"}])]
    )
    data = DataConfig(train_files=[str(tmp_path / "rollouts/step_6.arrow")])
    with pytest.raises(UserError, match="step_6.arrow, row 1 was written with another tokenizer"):
        load_train(data, sft(source="rollouts"), tokenizer)


def test_rollouts_are_read_back_as_they_were_sampled(tokenizer, tmp_path):
    chat = [{"role": "user", "content": "ab"}]
    prompt = tokenizer.encode("<|user|>ab<|assistant|>")
    texts = ["ba", "ab"]
    start = len(prompt)
    episodes = []
    for number, (text, reward) in enumerate(zip(texts, [1.0, 0.0], strict=True)):
        tokens = [*prompt, *tokenizer.encode(text), tokenizer.eos_token_id]
        mask, logprobs = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.float32)
        mask[start:], logprobs[start:] = 1, [-0.5, -0.25, -0.125]
        sample = Sample(np.asarray(tokens), mask, logprobs, (3, 3))
        messages = [*chat, {"role": "assistant", "content": text}]
        episodes.append(Episode(f"0:7:{number}", "0:7", [sample], reward, messages=messages, answer="ba"))
    write_rollouts(str(tmp_path), 5, episodes)
    file = str(tmp_path / "rollouts/step_5.arrow")
    data = DataConfig(train_files=[file])
    both = load_train(data, sft(source="rollouts", max_weight=4.0), tokenizer)
    assert learnt(both[0], tokenizer) == ["ba<|end|>"] and len(both) == 2
    assert both[0].logprobs.tolist() == [0.0] * len(prompt) + [-0.5, -0.25, -0.125]
    right = load_train(data, sft(source="rollouts", min_reward=1.0), tokenizer)
    assert [(e.token_ids.tolist(), e.logprobs) for e in right] == [(both[0].token_ids.tolist(), None)]
    assert all(e.weight_versions is None for e in (*both, *right)), "not sampled by the policy that learns them"
    with pytest.raises(UserError, match="sft.min_reward=2: no rollout of training has that much"):
        load_train(data, sft(source="rollouts", min_reward=2), tokenizer)
    with pytest.raises(UserError, match=r"row 1 contains token \d+, and the vocabulary of model.path has 5 tokens"):
        load_train(data, sft(source="rollouts"), tokenizer, 5)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="data.train_files=.*bad.jsonl: holds no rollouts"):
        load_train(DataConfig(train_files=[str(tmp_path / "bad.jsonl")]), sft(source="rollouts"), tokenizer)
    assert len(load_train(DataConfig(train_files=[file, file], train_size=3), sft(source="rollouts"), tokenizer)) == 3
