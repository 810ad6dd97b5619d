"""Pairs for examples/preferences/run.sh: `python -m examples.preferences.pairs FILE`.

Better is the word backwards, worse is that with two letters swapped.
"""

from __future__ import annotations

import json
import os
import random
import sys

from trainer.data.generators import generate


def main(file: str) -> None:
    rng = random.Random(0)
    with open(f"{file}.part", "w", encoding="utf-8") as handle:
        for row in generate("reverse_text", {}, 1024, "train"):
            wrong = list(row["answer"])
            i, j = rng.sample(range(len(wrong)), 2)
            wrong[i], wrong[j] = wrong[j], wrong[i]
            pair = {"prompt": row["prompt"], "chosen": row["answer"], "rejected": "".join(wrong)}
            if pair["chosen"] != pair["rejected"]:
                handle.write(json.dumps(pair) + "\n")
    os.replace(f"{file}.part", file)


if __name__ == "__main__":
    main(sys.argv[1])
