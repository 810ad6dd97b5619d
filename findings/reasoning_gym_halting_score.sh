#!/usr/bin/env bash
# reasoning-gym 0.1.25, task game_of_life_halting ("answer True or False"): the score compares bool(answer) with
# bool("True") or bool("False"), both of which are True. Every text that is not empty is a right answer, so a policy is
# rewarded for anything. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check reasoning-gym==0.1.25
"$folder/venv/bin/python" - <<'PYTHON'
import reasoning_gym
data = reasoning_gym.create_dataset("game_of_life_halting", size=40, seed=3)
entries = [data[i] for i in range(40)]
scores = {text: sum(data.score_answer(text, entry) for entry in entries) / 40
          for text in ("True", "False", "I do not know", "")}
print({str(entry["answer"]) for entry in entries}, scores)
assert {str(entry["answer"]) for entry in entries} == {"True", "False"}
assert scores == {"True": 1.0, "False": 1.0, "I do not know": 1.0, "": 0.0}
PYTHON
echo "as described"
