"""What a page of `trainer view` costs: `python -m benchmarks.view [--episodes N] [--tokens N]`.

Writes a run with that many episodes over ten steps, and prints how long the page takes to write, its size, and, where
Chromium is installed, how long it takes to open it, to show a step, to sort and to search it, and to show an episode.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from trainer.data.rollout_io import write_rollouts
from trainer.episodes import Episode, Sample, TokenScores
from trainer.errors import format_size
from trainer.view.build import Builder, Limits

STEPS, GROUP = 10, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=512, help="of an episode")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        kept = write_run(run, args.episodes, args.tokens)
        page = run / "view.html"
        with timed(f"write the page of {args.episodes:,} episodes of {args.tokens} tokens"):
            builder = Builder([str(run)], Limits(args.episodes, args.episodes * args.tokens))
            size = builder.write(str(page))
        with timed("write it again, nothing has changed"):
            builder.write(str(page))
        print(f"{'size of the page':60} {format_size(size):>12}")
        print(f"{'size of the rollouts on the disk':60} {format_size(kept):>12}")
        look(page, Path(directory, "profile"))


def write_run(run: Path, episodes: int, tokens: int) -> int:
    """Write a run directory with episodes of random words; return the size of its rollouts in bytes."""
    run.mkdir()
    rng = np.random.default_rng(0)
    words = np.asarray([f"word{i}" for i in range(2000)])
    lines = []
    for step in range(1, STEPS + 1):
        made, scores = [], []
        for i in range(episodes // STEPS):
            group, number = divmod(i, GROUP)
            mask = (np.arange(tokens) >= tokens // 8).astype(np.float32)
            logprobs = (-rng.exponential(0.3, tokens) * mask).astype(np.float32)
            entropy = (rng.exponential(0.4, tokens) * mask).astype(np.float32)
            ids = np.minimum(rng.zipf(1.3, tokens), 150_000).astype(np.int32)
            asked = f"question {step} {group} " + " ".join(words[(group * 31 + np.arange(tokens // 10)) % 2000])
            said = " ".join(words[rng.integers(0, 2000, tokens * 2 // 3)])
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            sample = Sample(ids, mask, logprobs, (step, step))
            uid = f"0:{step * 10_000 + group}"
            made.append(Episode(f"{uid}:{number}", uid, [sample], float(rng.integers(0, 2)), messages=messages))
            trained = (logprobs + rng.normal(0, 0.01, tokens) * mask).astype(np.float32)
            scores.append(TokenScores(trained, entropy, mask * np.float32(rng.normal())))
        write_rollouts(str(run), step, made, scores=scores)
        lines.append(f'{{"step": {step}, "reward/mean": 0.5}}\n')
    (run / "metrics.jsonl").write_text("".join(lines))
    return sum(os.path.getsize(run / f"rollouts/step_{step}.arrow") for step in range(1, STEPS + 1))


def look(page: Path, profile: Path) -> None:
    """Open the page in Chromium, and print how long things take."""
    from tests.support.browser import is_installed, open_browser

    if not is_installed():
        print("Chromium or selenium is not installed: the page is not opened")
        return
    with open_browser(profile) as browser:

        def measure(name: str, act: Callable[[], object], done: Callable[[], object]) -> None:
            with timed(name):
                act()
                browser.until(done)

        def count(text: str) -> Callable[[], bool]:
            return lambda: browser.texts("#count") == [text]

        total = count_episodes(page)
        measure("open it", lambda: browser.open(page), lambda: browser.all("figure"))
        tab, box = "[data-tab='episodes']", "#all"
        measure("show the episodes of a step", lambda: browser.click(tab), count(f"{total // STEPS:,} shown"))
        measure("show those of all steps", lambda: browser.click(box), count(f"{total:,} shown"))
        sort = ".head [data-key='reward']"
        measure("sort them", lambda: browser.click(sort), lambda: "▼" in browser.texts(sort)[0])
        measure("search their texts", lambda: browser.type("#search", "question 3 7 "), count(f"{GROUP} shown"))
        show = "document.querySelector('.row').click()"
        measure("show an episode", lambda: browser.run(show), lambda: browser.all("#conversation .t"))


def count_episodes(page: Path) -> int:
    """Return the number of episodes in the page."""
    match = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert match is not None
    return sum(step["count"] for step in json.loads(match[1])["runs"][0]["steps"])


@contextmanager
def timed(name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    print(f"{name:60} {time.perf_counter() - started:10.2f} s")


if __name__ == "__main__":
    main()
