"""Episodes for people to read."""

from __future__ import annotations

import json
import os

import pytest

from trainer.episodes import Episode
from trainer.metrics.samples import Transcript, draw, printable, write_validation

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def transcript(text: str = "2", **values) -> Transcript:
    given = {"uid": "val:7", "number": 0, "prompt": PROMPT, "answer": "2", "reward": 1.0} | values
    return Transcript(completion=[{"role": "assistant", "content": text}], **given)


def test_a_draw_depends_on_seed_kind_and_step_alone():
    chosen = draw(1000, 3, 1, "validation", 20)
    assert chosen == draw(1000, 3, 1, "validation", 20) == sorted(set(chosen)) and len(chosen) == 3
    others = [
        draw(1000, 3, 1, "validation", 21),
        draw(1000, 3, 2, "validation", 20),
        draw(1000, 3, 1, "training", 20),
    ]
    assert all(set(chosen).isdisjoint(other) for other in others)
    assert draw(2, 3, 1, "training", 5) == [0, 1] and draw(5, 0, 1, "training", 5) == []


def test_what_controls_a_terminal_is_escaped():
    text = "a\tb\r\nc\x1b[2J\x07\r\x9b\u202e\ud800é中"
    assert printable(text) == "a    b\nc\\x1b[2J\\x07\\r\\x9b\\u202e\\ud800é中"
    block = transcript(text, answer="\x1b[31m", prompt=[{"role": "user", "content": "\x1b]0;title\x07"}]).block()
    assert all(line.isprintable() for line in block.split("\n")) and block.encode()


def test_a_block_shows_prompt_completion_answer_and_reward():
    assert transcript("two:\n2").block() == (
        "prompt      1+1?\n"
        "completion  two:\n"
        "            2\n"
        "answer      2\n"
        "reward      1"
    )  # fmt: skip
    cut = transcript(reward=0.5, rewards={"exact": 0.0, "form": 1 / 3}, finish_reason="length").block()
    assert cut.endswith("\nreward      0.5 (exact 0, form 0.3333), ended by: length")


def test_a_brief_block_keeps_the_beginning_and_the_end():
    lines = [f"line {i}" for i in range(50)]
    brief = transcript("\n".join([*lines, "x" * 250])).block(brief=True).split("\n")
    assert brief[1].endswith("line 0") and brief[4].endswith("line 3")
    assert brief[5].endswith("… (46 lines left out)")
    assert [len(line.strip()) for line in brief[6:9]] == [100, 100, 50]
    assert len(brief) == 1 + 8 + 2 and max(map(len, brief)) <= 112
    assert transcript("x " * 5000).block().count("\n") == 3, "nothing is left out of the whole block"


def test_the_turns_of_a_conversation_have_their_roles():
    shown = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]  # an example in the prompt
    chat = [*PROMPT, shown[1], shown[0]]
    played = [{"role": "assistant", "content": "5"}, {"role": "user", "content": "Again."},
              {"role": "assistant", "content": "4"}, {"role": "user", "content": "Right."}]  # fmt: skip
    prompt, completion = Episode("0:1:2", "0:1", [], messages=[*chat, *played], turns=2).split_messages()
    assert (prompt, completion) == (chat, played)
    assert Episode("0:1:2", "0:1", [], messages=chat, turns=0).split_messages() == (chat, [])
    block = Transcript("0:1", 2, prompt, completion, "4", 1.0).block()
    assert block.split("\n")[:4] == [
        "prompt      user: 1+1?",
        "            assistant: 4",
        "            user: 2+2?",
        "completion  assistant: 5",
    ]
    assert "            user: Again.\n            assistant: 4\n            user: Right.\n" in block


def test_validation_is_written_whole_and_the_same_bytes_again(tmp_path):
    some = [transcript(rewards={"exact": 1.0}), transcript("\ud800\n", number=1, reward=0.25, finish_reason="length")]
    path = tmp_path / "validation" / "step_20.jsonl"
    write_validation(str(tmp_path), 20, some)
    data = path.read_bytes()
    first, second = map(json.loads, data.splitlines())
    assert first == {
        "step": 20, "uid": "val:7", "number": 0, "prompt": PROMPT, "answer": "2", "reward": 1.0,
        "rewards": {"exact": 1.0}, "finish_reason": "stop", "failure": None, "metrics": {},
        "completion": [{"role": "assistant", "content": "2"}],
    }  # fmt: skip
    assert (second["number"], second["reward"], second["finish_reason"]) == (1, 0.25, "length")
    write_validation(str(tmp_path), 20, some)
    assert path.read_bytes() == data and os.listdir(path.parent) == ["step_20.jsonl"]

    def lost() -> None:
        raise RuntimeError("another process holds the directory")

    with pytest.raises(RuntimeError):
        write_validation(str(tmp_path), 20, [], lost)
    assert path.read_bytes() == data


def test_a_very_long_text_is_shown_without_its_middle():
    """A data set may hold answers of megabytes."""
    one = Transcript("0:1", 0, [], [{"role": "assistant", "content": "b"}], "a" * 100_000 + "z", 1.0)
    answer = one.row()[2]
    assert len(answer) < 70_000 and answer.startswith("aa") and answer.endswith("az")
    assert "\n… (34,465 characters left out)\n" in answer
