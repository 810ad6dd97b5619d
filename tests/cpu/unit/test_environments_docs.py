"""The example of docs/environments.md, as a new user would try it: its files, and rows that fit the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.pages import files_of_page
from trainer.config import DataConfig
from trainer.data.datasets import read_examples
from trainer.environments.base import find_environment

PAGE = "docs/environments.md"


def test_the_files_of_the_page_make_rows_whose_chats_the_environment_would_answer_so(tmp_path):
    files_of_page(PAGE, tmp_path)
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "rows.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 1000 and len((tmp_path / "val.jsonl").read_text().splitlines()) == 100
    data = DataConfig(train_files=[str(tmp_path / "train.jsonl")], messages_key="messages")
    assert len(read_examples(data, "train")) == 1000
    row = next(row for row in rows if len(row["messages"]) > 2)
    play = (
        "import asyncio, json, sys; from shop import Shop; shop = Shop(); row, *replies = json.loads(sys.argv[1])\n"
        "async def play():\n"
        "    assert await shop.reset(row, 0) == row['messages'][:1]\n"
        "    return [await shop.step({'role': 'assistant', 'content': reply}) for reply in replies]\n"
        "for step in asyncio.run(play()): print(step.messages, step.reward)"
    )
    arguments = json.dumps([row, row["messages"][1]["content"], row["answer"]])
    done = subprocess.run(
        [sys.executable, "-c", play, arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [f"[{row['messages'][2]}] 0.0", "() 1.0"], done.stderr


def test_the_game_of_the_page_about_self_play_pays_who_takes_the_last_stone(tmp_path, monkeypatch):
    assert files_of_page("docs/self_play.md", tmp_path) == ["nim.py"]
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = find_environment("nim:Nim")

    def play(*moves: str) -> list[tuple[str, dict[str, float]]]:
        game = kind()
        assert game.reset({"stones": 5}, 0) == [{"role": "user", "content": "5 stones are left. Take 1, 2 or 3."}]
        steps = [game.step({"role": "assistant", "content": move}) for move in moves]
        return [(step.player, step.player_rewards) for step in steps]

    assert play("3", " 2 ") == [("second", {}), ("", {"second": 1.0, "first": -1.0})]
    assert play("1", "4") == [("second", {}), ("", {"first": 1.0, "second": -1.0})]
