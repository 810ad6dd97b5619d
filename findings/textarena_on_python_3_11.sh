#!/usr/bin/env bash
# TextArena 0.7.4 says Requires-Python >=3.10 and installs on 3.10 and 3.11, but modules of six of its games use the
# f-strings of Python 3.12: Chess, Checkers and others are a SyntaxError when they are made, though they are registered.
# Two more (ScorableGames, UsedCarNegotiation) read files that the wheel does not have, on any Python.
# Fails if that changes. Needs Python 3.11 as python3.
set -euo pipefail
python3 -c 'import sys; assert sys.version_info[:2] == (3, 11), sys.version'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check textarena==0.7.4
cd "$folder"
venv/bin/python - 2> log <<'PYTHON'
import importlib.metadata, textarena
print("textarena", importlib.metadata.version("textarena"), importlib.metadata.metadata("textarena")["Requires-Python"])
games = {"Chess-v0": SyntaxError, "Checkers-v0": SyntaxError, "ReverseTicTacToe-v0": SyntaxError,
         "IteratedStagHunt-v0": SyntaxError, "UltimateTexasHoldem-v0": SyntaxError, "Klondike-v0": SyntaxError,
         "ScorableGames-v0": FileNotFoundError, "UsedCarNegotiation-v0": FileNotFoundError, "TicTacToe-v0": None,
         "KuhnPoker-v0": None}
for game, expected in games.items():
    found = None
    try:
        textarena.make(game).reset(num_players=2, seed=7)
    except Exception as error:
        found = error
    print(game, "starts" if found is None else f"{type(found).__name__}: {str(found)[:70]}")
    assert (found is None) if expected is None else isinstance(found, expected), game
PYTHON
echo "as described"
