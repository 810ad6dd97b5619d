"""The episodes of a run directory, as the page gets them."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.viewed_runs import HOSTILE, encode, make_debate, make_episode, make_run
from trainer.checkpoint.storage import JOURNAL
from trainer.data.records import encode_groups
from trainer.data.rollout_io import write_rollouts
from trainer.episodes import Episode, Sample, TokenScores
from trainer.files.atomic_io import digest_bytes
from trainer.view.episodes import find_steps, pack_tokens, read_step


def unpacked(data: bytes) -> dict[str, Any]:
    """Read what `pack_tokens` has written, as its docstring says."""
    size = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + size])
    total, at = sum(length for _, length in header["samples"]), 4 + size
    assert at % 4 == 0
    arrays = {}
    for name, kind in [("ids", "<u4"), *((name, "<i2") for name in header["scores"]), ("mask", "u1")]:
        array = np.frombuffer(data, kind, total, at)
        at += array.nbytes
        known = np.where(array == -32768, np.nan, array / header["scores"].get(name, 1))
        arrays[name] = known if name in header["scores"] else array
    assert at == len(data)
    return {**arrays, "samples": header["samples"]}


def test_kept_rollouts_are_read(tmp_path):
    run = str(make_run(tmp_path / "run", steps=2))
    found = find_steps(run)
    assert [(one.split, one.step) for one in found] == [("training", 1), ("training", 2), ("validation", 0)]
    data = read_step(found[1])
    assert data.count == 16 and data.left_out == 0
    assert data.rows["uid"][:2] == ["0:8:0", "0:8:1"] and data.rows["reward"][4:6] == [0.0, 0.5]
    assert data.rows["terms"][0] == {"right": 1.0, "brief": 0.5} and data.rows["status"][3] == "length"
    assert data.rows["advantage"][:1] == [0.5] and data.rows["turns"][0] == 1
    first = [data.texts["messages"][i] for i in data.texts["episodes"][0]]
    assert first == [["user", "question 0", ""], ["assistant", "reply 0 of step 2 naïve 👋", ""]]
    assert len(data.texts["messages"]) < 2 * data.count, "the prompt of a group is there once"
    tokens = unpacked(data.tokens)
    assert data.num_tokens == len(tokens["ids"]) and data.token_ids == {*tokens["ids"].tolist()}
    length = tokens["samples"][0][1]
    assert tokens["mask"][:length].sum() == data.rows["length"][0]


def test_tokens_have_the_numbers_of_engine_and_trainer(tmp_path):
    episode, scores = make_episode("0:1:0", [("two", "turns"), ("of", "talk")], 1.0)
    tokens = unpacked(pack_tokens([(episode, [scores])])[0])
    (sample,) = episode.samples
    assert tokens["ids"].tolist() == sample.token_ids.tolist() and tokens["mask"].tolist() == sample.mask.tolist()
    np.testing.assert_allclose(tokens["logprob"], sample.logprobs, atol=5.1e-4)
    np.testing.assert_allclose(tokens["difference"], sample.logprobs - scores.logprobs, atol=5.1e-6)
    np.testing.assert_allclose(tokens["entropy"], scores.entropy, atol=5.1e-4)
    np.testing.assert_allclose(tokens["advantage"], scores.advantages, atol=5.1e-6)
    alone = unpacked(pack_tokens([(episode, [])])[0])
    assert {*alone} == {"ids", "mask", "samples", "logprob"}, "what was not recorded is not there"


def test_each_player_has_its_reward_and_its_advantage(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    (debate, scores), (alone, own) = make_debate("0:0:0"), make_episode("0:1:0", [("who?", "me")], 1.0)
    write_rollouts(str(run), 1, [debate, alone], scores=[*scores, own])
    files = find_steps(str(run))[0]
    assert read_step(files).rows["players"] == [[["pro", 1.0, 0.5], ["con", -1.0, -1.5]], None]
    write_rollouts(str(run), 1, [debate, alone])
    assert read_step(files).rows["players"] == [[["pro", 1.0, None], ["con", -1.0, None]], None]


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=8))
def test_any_number_is_packed(values):
    array = np.asarray(values, np.float32)
    sample = Sample(np.arange(len(values), dtype=np.int32), np.ones(len(values), np.float32), array)
    scores = TokenScores(advantages=array)
    packed = unpacked(pack_tokens([(Episode("0:0:0", "0:0", [sample]), [scores])])[0])
    finite = np.abs(array[np.isfinite(array)])
    largest = float(finite.max()) if len(finite) else 0.0
    for name, finest in (("logprob", 1e3), ("advantage", 1e3 if np.isinf(array).any() else 1e6)):
        for value, got in zip(array.astype(float), packed[name], strict=True):
            if np.isnan(value):
                assert np.isnan(got)
            elif abs(value) > 32767:
                assert np.sign(got) == np.sign(value) and abs(got) >= 32.767
            else:
                assert got == pytest.approx(
                    value, abs=max(0.51 / finest, largest * 1.6e-4) if largest < 32767 else 0.51
                )


def test_the_journal_serves_where_no_rollouts_are_kept(tmp_path):
    def add(step: int, groups: dict[str, list[Episode]], number: int) -> None:
        data = encode_groups(step, groups, {})
        path = tmp_path / JOURNAL / f"step_{step}-{number}-{digest_bytes(data)}.arrow"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (0, 0))  # it came from the store

    def group(prompt: int, reply: str, kind: str = "0") -> list[Episode]:
        return [make_episode(f"{kind}:{prompt}:{n}", [("q", f"{reply} {n}")], 1.0)[0] for n in range(2)]

    add(4, {"a": group(1, "old"), "b": group(2, "kept"), "d:1": group(3, "first")[1:]}, number=9)
    add(4, {"c": group(1, "new"), "v": group(9, "evaluated", "val"), "d:0": group(3, "then")[:1]}, number=10)
    add(4, {"e:-1": [make_episode("0:2:-1", [("q", "baseline")], 1.0)[0]]}, number=11)
    (files,) = find_steps(str(tmp_path))
    assert (files.step, files.origin) == (4, "journal")
    data = read_step(files)
    assert sorted(data.rows["preview"]) == ["first 1", "kept 0", "kept 1", "new 0", "new 1", "then 0"]
    assert data.texts["messages"][0][0] == "user", "without a tokenizer, the messages that were meant"
    seen = read_step(files, None, lambda ids: f"decoded {len(ids)}")
    assert {seen.texts["messages"][first][0] for first, *_ in seen.texts["episodes"]} == {"prompt"}
    assert any(text.startswith("decoded ") for _, text, _ in seen.texts["messages"])
    os.remove(files.paths[0])  # by a commit of the running job
    assert read_step(files).count in (3, 5)


def test_episodes_with_any_text_and_without_numbers_are_read(tmp_path):
    run = str(make_run(tmp_path / "run", steps=1, hostile=HOSTILE))
    data = read_step(find_steps(run)[0])
    assert any(HOSTILE in message[1] for message in data.texts["messages"])
    json.dumps([data.rows, data.texts], allow_nan=False).encode("ascii")
    empty = Episode("0:0:0", "0:0", [], None, failure="it failed", messages=[{"role": "tool", "content": [{"a": 1}]}])
    odd, _ = make_episode("0:0:1", [("q", "x" * 5000)], float("nan"), rewards={"a": float("inf")})
    path = tmp_path / "odd/rollouts/step_1.arrow"
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_groups(1, {"g": [empty, odd]}, {}))
    data = read_step(find_steps(str(tmp_path / "odd"))[0])
    json.dumps([data.rows, data.texts], allow_nan=False)
    assert data.rows["reward"] == [None, None] and data.rows["terms"][1] == {"a": None}
    assert len(data.rows["preview"][1]) < 200 and data.rows["length"] == [0, len(encode("x" * 5000)) + 1]


def test_a_limit_keeps_whole_groups(tmp_path):
    run = str(make_run(tmp_path / "run", steps=1))
    training, validation = find_steps(run)
    for most, count in ((100, 16), (16, 16), (15, 12), (4, 4), (1, 4)):
        data = read_step(training, most)
        assert (data.count, data.left_out) == (count, 16 - count)
        assert len(data.texts["episodes"]) == count
        assert {episode for episode, _ in unpacked(data.tokens)["samples"]} == {*range(count)}
    data = read_step(validation, 2)
    assert (data.count, data.left_out, len(data.texts["episodes"])) == (2, 1, 2)


def test_validations_are_read(tmp_path):
    data = read_step(find_steps(str(make_run(tmp_path / "run")))[-1])
    assert data.rows["uid"] == ["val:0:0", "val:1:0", "val:2:0"] and data.rows["reward"] == [0.0, 0.5, 1.0]
    assert data.rows["preview"] == ["validated"] * 3 and data.tokens == b""


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"x" * 1000])
def test_a_damaged_file_of_rollouts_is_named(tmp_path, content):
    run = make_run(tmp_path / "run", steps=1)
    (run / "rollouts/step_1.arrow").write_bytes(content)
    with pytest.raises(ValueError, match=r"step_1\.arrow: "):
        read_step(find_steps(str(run))[0])


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": 1}'])
def test_a_damaged_line_of_a_validation_is_named(tmp_path, line):
    run = make_run(tmp_path / "run", steps=1)
    (run / "validation/step_0.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"step_0\.jsonl:1 is no episode of a validation"):
        read_step(find_steps(str(run))[-1])
