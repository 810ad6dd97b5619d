"""Plants one small fault after another, and checks that a test fails for each.

    python -m tools.slips            # all, some minutes
    python -m tools.slips gae k3     # those with these names

Run it after tests have been deleted or merged: a slip that no test notices says that too much went. Each is planted in
a copy of the checkout, where the tests run that ought to notice it. Ends with status 1 if one is missed, or if its text
is no longer in the code: then give it a new place.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_COPIED = ("trainer", "tests", "tools", "benchmarks", "examples", "conf", "docs", "deploy", "pyproject.toml")


class Slip(NamedTuple):
    """A fault: `right`, which the file has once, becomes `wrong`."""

    file: str
    right: str
    wrong: str
    tests: str
    """A file below tests/cpu."""


SLIPS = {
    # The algorithms
    "gae": Slip(
        "algorithms/advantages.py",
        "gamma * lam * next_advantage",
        "gamma * next_advantage",
        "unit/algorithms/test_advantages.py",
    ),
    "overlong": Slip(
        "algorithms/advantages.py",
        "(lengths.double() - (max_length - buffer)) / buffer",
        "(lengths.double() - max_length) / buffer",
        "unit/algorithms/test_reward_shaping.py",
    ),
    "clip_range": Slip(
        "algorithms/losses.py",
        "+ clip_high) * advantages\n    losses, is_clipped = ",
        "+ clip_low) * advantages\n    losses, is_clipped = ",
        "unit/algorithms/test_losses.py",
    ),
    "k3": Slip(
        "algorithms/kl.py",
        "torch.expm1((-d).clamp(max=max_log_ratio(d.dtype))) + d",
        "torch.expm1((-d).clamp(max=max_log_ratio(d.dtype))) - d",
        "unit/algorithms/test_kl.py",
    ),
    "token_mean": Slip(
        "algorithms/aggregation.py",
        "active.sum() / max(totals.tokens, 1.0)",
        "active.sum() / max(totals.sequences, 1.0)",
        "unit/algorithms/test_aggregation.py",
    ),
    "masked_importance": Slip(
        "algorithms/correction.py",
        "(ratio < low) | (ratio > high)",
        "ratio > high",
        "unit/algorithms/test_correction.py",
    ),
    # Order and randomness
    "seed_of_completion": Slip(
        "seeding.py",
        'derive_seed(run_seed, "completion", step, prompt_uid, completion)\n',
        'derive_seed(run_seed, "completion", step, prompt_uid)\n',
        "unit/test_seeding.py",
    ),
    "mix_share": Slip(
        "data/mix_ledger.py",
        "weights[name] * drawn - counts[name] * total",
        "weights[name] * drawn",
        "unit/data/test_mix_ledger.py",
    ),
    # Rows for the model
    "positions": Slip(
        "parallel/packing.py",
        "np.repeat(self._starts - self.prefix_lengths, self.suffix_lengths)",
        "np.repeat(0 * self._starts, self.suffix_lengths)",
        "unit/parallel/test_packing.py",
    ),
    "next_token": Slip(
        "parallel/packing.py",
        "np.where(inside, self._token_indices[:, :-1], self.tokens)",
        "np.where(inside, self._token_indices[:, 1:], self.tokens)",
        "unit/parallel/test_packing.py",
    ),
    # Updates
    "foreign_rows": Slip(
        "episodes.py",
        "return is_sampled and (self.weight_versions is None or self.weight_versions[0] == 0)",
        "return is_sampled and self.weight_versions is None",
        "unit/objectives/test_batches.py",
    ),
    # Text and rewards
    "special_tokens": Slip(
        "data/replies.py",
        "tokenizer.batch_decode(kept, skip_special_tokens=False)",
        "tokenizer.batch_decode(kept, skip_special_tokens=True)",
        "unit/data/test_replies.py",
    ),
    "reward_nan": Slip(
        "rewards/parsing.py",
        "if not math.isfinite(number):",
        "if math.isinf(number):",
        "unit/rewards/test_parsing.py",
    ),
    # What a kill leaves
    "deadline": Slip(
        "run/stopping.py",
        "time.time() + seconds_needed > self._deadline",
        "time.time() > self._deadline",
        "unit/run/test_stopping.py",
    ),
    # What people read
    "pass_at_k": Slip(
        "metrics/estimates.py",
        "1.0 - math.comb(n - successes, k) / math.comb(n, k)",
        "1.0 - (1 - successes / n) ** k",
        "unit/metrics/test_estimates.py",
    ),
    "key_bounds": Slip(
        "config/fields.py",
        "value < self.at_least:",
        "value < self.at_least - 1:",
        "unit/config/test_fields.py",
    ),
}


def copy_of(target: Path) -> None:
    """Copy what tests need of this checkout."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
        else:
            shutil.copy2(source, target / name)


def is_noticed(slip: Slip, checkout: Path) -> bool:
    """Plant `slip` in a copy of the checkout, run its tests, and take it back. Returns whether a test failed.

    Raises:
        ValueError: the code has no such place, or the tests do not run.
    """
    file = checkout / "trainer" / slip.file
    text = file.read_text()
    if text.count(slip.right) != 1:
        raise ValueError(f"trainer/{slip.file} has {text.count(slip.right)} times {slip.right!r}")
    file.write_text(text.replace(slip.right, slip.wrong))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/cpu/{slip.tests}"]
    env = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=900)
    finally:
        file.write_text(text)
    if done.returncode not in (0, 1):
        raise ValueError(f"{slip.tests} ended with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.returncode == 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.slips", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of slips; without, all")
    names = parser.parse_args().names
    if unknown := set(names) - SLIPS.keys():
        parser.error(f"there is no slip {', '.join(sorted(unknown))}; there are {', '.join(SLIPS)}")
    missed = []
    with tempfile.TemporaryDirectory() as directory:
        copy_of(Path(directory))
        for name in names or SLIPS:
            try:
                noticed = is_noticed(SLIPS[name], Path(directory))
                print(f"{name:24} {'noticed' if noticed else 'MISSED'}", flush=True)
            except ValueError as error:
                noticed = False
                print(f"{name:24} {error}", flush=True)
            missed += [] if noticed else [name]
    sys.exit(f"not noticed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
