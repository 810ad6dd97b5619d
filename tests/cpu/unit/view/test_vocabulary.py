"""The text of single tokens."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.support.viewed_runs import END, TOKENIZER, encode, make_run
from trainer.view.vocabulary import Vocabulary, find_tokenizer


@pytest.fixture
def file(tmp_path):
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def texts_of(vocabulary: Vocabulary, ids: list[int]) -> dict[int, object]:
    known = vocabulary.texts(ids)
    return dict(zip(known["ids"], known["texts"], strict=True))


def test_tokens_that_are_characters_are_texts_and_others_are_bytes(file):
    vocabulary = Vocabulary(file)
    ids = encode(f"a ï\n{END}")
    texts = texts_of(vocabulary, ids)
    assert [texts[i] for i in ids] == ["a", " ", [0xC3], [0xAF], "\n", END]
    assert vocabulary.texts(ids)["special"] == [ids[-1]]


def test_every_text_comes_back_from_its_bytes(file):
    text = "naïve 👋 \x00\x1b\u202e 漢字"
    vocabulary, ids = Vocabulary(file), encode(text)
    texts = texts_of(vocabulary, ids)
    data = b"".join(bytes(one) if isinstance(one, list) else one.encode() for one in (texts[i] for i in ids))
    assert data.decode() == text


def test_tokens_of_sentencepiece_have_spaces_and_bytes(tmp_path):
    tokenizer = Tokenizer(models.BPE(vocab={"▁the": 0, "<0xE2>": 1, "re": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(str(tmp_path / "tokenizer.json"))
    assert texts_of(vocabulary, [0, 1, 2]) == {0: " the", 1: [0xE2], 2: "re"}


def test_an_unknown_token_has_no_text(file):
    assert texts_of(Vocabulary(file), [5_000_000]) == {}
    assert texts_of(Vocabulary(None), [1]) == {}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"added_tokens": []}', '{"added_tokens": [{}]}', "\ud83d"])
def test_a_damaged_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content, errors="surrogatepass")
    with pytest.raises(ValueError, match="tokenizer.json: "):
        Vocabulary(str(path))


def test_the_tokenizer_of_the_newest_checkpoint_is_found(tmp_path):
    run = make_run(tmp_path / "run")
    model = str(run / "model")
    assert find_tokenizer(str(run), model) == f"{model}/tokenizer.json"
    assert find_tokenizer(str(run), None) is None
    for step in (1, 3):
        assets = run / f"checkpoints/global_step_{step}/policy/huggingface"
        assets.mkdir(parents=True)
        (assets / "tokenizer.json").write_text(json.dumps({"step": step}))
    assert find_tokenizer(str(run), model) == str(assets / "tokenizer.json")
