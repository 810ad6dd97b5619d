"""Pairs of answers as tokens: where the answer begins and ends, what the columns may hold, and what is refused."""

from __future__ import annotations

import json
import logging

import pytest

from tests.support.tables import table
from trainer.config import DataConfig
from trainer.data.examples import load_pairs, read_pair
from trainer.errors import UserError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer, stop_token_ids
from trainer.sources.supervised import PairSource

NEWLINE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
JOINED = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
U, A, B = ({"role": role, "content": text} for role, text in (("user", "1?"), ("assistant", "a"), ("assistant", "b")))
V = {"role": "user", "content": "2?"}


@table(
    "row, expected",
    [
        ({"prompt": "1?", "chosen": "a", "rejected": "b"}, ([U], [A], [B])),
        ({"prompt": [U], "chosen": [A], "rejected": [B]}, ([U], [A], [B])),
        ({"prompt": [U], "chosen": [U, A], "rejected": [U, B]}, ([U], [A], [B])),
        ({"prompt": "1?", "chosen": [U, A], "rejected": [U, B]}, ([U], [A], [B])),  # UltraFeedback
        ({"chosen": [U, A], "rejected": [U, B]}, ([U], [A], [B])),
        ({"chosen": [U, A], "rejected": [U, A, V, B]}, ([U], [A], [A, V, B])),  # one begins with the other
        ({"chosen": [U, A, V, A], "rejected": [U, A, V, B]}, ([U, A, V], [A], [B])),
        ({"chosen": [U, A, V, A], "rejected": [U, A, U, A], "prompt": None}, ([U, A], [V, A], [U, A])),
    ],
)
def test_a_prompt_is_a_column_or_the_messages_that_both_chats_begin_with(row, expected):
    assert read_pair(row, lambda: "row 1", DataConfig()) == expected


@table(
    "row, words",
    [
        ({"chosen": "a", "rejected": "b"}, "data.prompt_key=prompt: row 7 must have the prompt"),
        ({"prompt": "1?", "chosen": "a"}, "data.rejected_key=rejected: row 7 has no such column; it has prompt, chos"),
        (
            {"prompt": "1?", "chosen": "a", "rejected": [B]},
            "data.rejected_key=rejected: row 7 must be of the same",
        ),
        ({"prompt": "1?", "chosen": "a", "rejected": "a"}, "data.rejected_key=rejected: row 7 has the same answer"),
        ({"prompt": "1?", "chosen": "", "rejected": "a"}, "data.chosen_key=chosen: row 7 must end with a message of"),
        ({"chosen": [U, A, V], "rejected": [U, B]}, "data.chosen_key=chosen: row 7 must end with a message of the as"),
        ({"chosen": [A], "rejected": [B]}, "data.prompt_key=prompt: row 7 must have a prompt there, or two chats"),
        ({"prompt": "1?", "chosen": 3, "rejected": "a"}, "data.chosen_key=chosen: row 7 must have a text there, or a"),
        ({"prompt": "1?", "chosen": "a", "rejected": "b", "images": ["x"]}, "data.prompt_key=prompt: row 7 has images"),
        ([], "data.chosen_key=chosen: row 7 must be an object"),
    ],
)
def test_other_rows_are_refused_by_row_and_column(row, words):
    with pytest.raises(UserError) as error:
        read_pair(row, lambda: "row 7", DataConfig())
    assert str(error.value).startswith(words)


def load(tmp_path, rows, longest=100, cuts=True, template=None, merges=(), **data):
    build_tiny(TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1), str(tmp_path / "model"))
    file = tmp_path / "model/tokenizer.json"
    saved = json.loads(file.read_text())
    saved["model"]["merges"] = [*map(list, merges)]
    saved["model"]["vocab"] |= {"".join(pair): 1000 + number for number, pair in enumerate(merges)}
    file.write_text(json.dumps(saved))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(str(tmp_path / "model"), template)
    config = DataConfig(train_files=[str(tmp_path / "rows.jsonl")], **data)
    stops = stop_token_ids(str(tmp_path / "model"), tokenizer)
    return load_pairs(config, "train", tokenizer, stops, ("dpo.max_length", longest), cuts), tokenizer


def test_an_answer_ends_with_one_stop_token_and_both_share_the_tokens_of_the_prompt(tmp_path):
    """Also with a template that writes a newline behind the stop token: rollouts never have it, so it is not learnt.

    And with a tokenizer that joins the end of the prompt and the beginning of the answer: the policy cannot do that.
    """
    rows = [
        {"prompt": "12?", "good": "yes", "bad": "no, not at all", "by": 0.5},
        {"prompt": "3", "good": "1", "bad": "2"},
    ]
    keys = {"chosen_key": "good", "rejected_key": "bad", "margin_key": "by"}
    (tmp_path / "newline.jinja").write_text(NEWLINE)
    (tmp_path / "joined.jinja").write_text(JOINED)
    merges = [(":", letter) for letter in "yn12"]
    for template in (None, str(tmp_path / "newline.jinja"), str(tmp_path / "joined.jinja")):
        pairs, tokenizer = load(tmp_path, rows, template=template, merges=merges, **keys)
        assert len(tokenizer.encode("assistant:yes")) == len("assistant:yes") - 1
        assert [pair.margin for pair in pairs] == [0.5, 0.0]
        for pair, row in zip(pairs, rows, strict=True):
            prompts = []
            for sample, answer in zip(pair.samples, (row["good"], row["bad"]), strict=True):
                said = sample.token_ids[sample.mask > 0].tolist()
                assert tokenizer.decode(said) == answer + tokenizer.eos_token and said.count(said[-1]) == 1
                first = int(sample.mask.argmax())
                assert sample.mask[first:].all(), "nothing follows the stop token"
                prompts.append(sample.token_ids[:first].tolist())
            assert prompts[0] == prompts[1] and prompts[0].count(tokenizer.bos_token_id or -1) <= 1
    with pytest.raises(UserError, match=r"data.margin_key=by: .*rows.jsonl:1 must have a number there, or null"):
        load(tmp_path, [rows[0] | {"by": "much"}], **keys)


PROVEN_KEYS = {"dpo.max_length", "rm.max_length"}
"""Keys that a resume changes with permission, and whose changes the next test proves."""


@pytest.mark.parametrize("cuts", [True, False])
def test_a_resume_may_change_the_longest_answer_unless_that_changes_a_pair(tmp_path, cuts):
    rows = [{"prompt": f"{i}?", "chosen": "a" * (8 + 4 * i), "rejected": "b"} for i in range(4)]
    saved = PairSource(2, [load(tmp_path, rows, 60, cuts)[0]], seed=1)
    state = saved.state_dict()
    PairSource(2, [load(tmp_path, rows, 80, cuts)[0]], seed=1).load_state_dict(state)
    with pytest.raises(UserError, match="data: the .* is not that of the checkpoint"):
        PairSource(2, [load(tmp_path, rows, 18, cuts)[0]], seed=1).load_state_dict(state)


def test_long_answers_are_cut_or_left_out_and_what_cannot_be_compared_is(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    same = "so begin both of these answers, whose ends are "
    rows = [
        {"prompt": "1?", "chosen": "a", "rejected": "b"},
        {"prompt": "2?", "chosen": f"{same}1", "rejected": f"{same}2"},
        {"prompt": "3?", "chosen": "c" * 50, "rejected": "d"},
        {"prompt": "5" * 80, "chosen": "c", "rejected": "d"},
    ]
    cut, _ = load(tmp_path, rows, longest=30)
    assert [len(pair.chosen.token_ids) for pair in cut][1:] == [30], "equal answers go, and those without a token"
    said = "3 of 4 train pairs have an answer longer than dpo.max_length=30, which is cut; 2 pairs are left out"
    assert said in caplog.text
    whole, _ = load(tmp_path, rows, longest=30, cuts=False)
    assert len(whole) == 1 and whole[0].chosen.token_ids.tolist() == cut[0].chosen.token_ids.tolist()
    exact, _ = load(tmp_path, rows[:1], longest=len(whole[0].chosen.token_ids), cuts=False)
    assert len(exact) == 1, "an answer of just so many tokens is not longer"
    with pytest.raises(UserError, match="dpo.max_length=3: leaves no train pair of 4; raise it"):
        load(tmp_path, rows, longest=3)
