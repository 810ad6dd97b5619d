#!/usr/bin/env bash
# reasoning-gym 0.1.25 draws question i of a data set from Random(seed + i). So question i+1 of seed 42 is question i of
# seed 43: a training set of 1000 with one seed and a test set of 1000 with the next share 999 questions.
# Five tasks also iterate over sets of texts, and give other questions in each process unless PYTHONHASHSEED is fixed,
# with the same seed. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check reasoning-gym==0.1.25
cat > "$folder/hash.py" <<'PYTHON'
import hashlib, reasoning_gym
for task in ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder",
             "chain_sum", "spell_backward"):
    data = reasoning_gym.create_dataset(task, size=5, seed=7)
    text = repr([(data[i]["question"], data[i]["answer"]) for i in range(5)])
    print(task, hashlib.sha256(text.encode()).hexdigest()[:8])
PYTHON
for seed in 0 1; do PYTHONHASHSEED=$seed "$folder/venv/bin/python" "$folder/hash.py" > "$folder/hash$seed"; done
echo "equal with PYTHONHASHSEED 0 and 1:"
comm -12 <(sort "$folder/hash0") <(sort "$folder/hash1") | tee "$folder/equal"
[ "$(cut -d' ' -f1 "$folder/equal" | xargs)" = "chain_sum spell_backward" ]
"$folder/venv/bin/python" - <<'PYTHON'
import reasoning_gym
for task in ("chain_sum", "gcd", "caesar_cipher", "binary_matrix", "family_relationships", "dice"):
    train, test = (reasoning_gym.create_dataset(task, size=1000, seed=seed) for seed in (42, 43))
    shared = sum(train[i + 1]["question"] == test[i]["question"] for i in range(999))
    print(f"{task}: {shared} of 1000 questions of seed 43 are questions of seed 42")
    assert shared == 999
PYTHON
echo "as described"
