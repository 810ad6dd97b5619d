"""Plants one small fault after another, and checks that a test fails for each.

    python -m tools.slips            # all, some minutes
    python -m tools.slips gae k3     # those with these names

Run it after tests have been deleted or merged: a slip that no test notices says that too much went. Each is planted in
a copy of the checkout, where the tests run that ought to notice it. Ends with status 1 if one is missed, or if its text
is no longer in the code: then give it a new place.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
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
    "group_std": Slip(
        "algorithms/advantages.py",
        "(self.size.to(centered) - 1).clamp(min=1)).sqrt()",
        "self.size.to(centered)).sqrt()",
        "unit/algorithms/test_advantages.py",
    ),
    "rloo": Slip(
        "algorithms/advantages.py",
        "* size / (size - 1).clamp(min=1), mask)",
        "* size / size, mask)",
        "unit/algorithms/test_advantages.py",
    ),
    "whitening": Slip(
        "algorithms/advantages.py",
        "torch.rsqrt(active.var() + eps)",
        "torch.rsqrt(active.var(unbiased=False) + eps)",
        "unit/algorithms/test_advantages.py",
    ),
    "equal_groups": Slip(
        "algorithms/advantages.py",
        "return (low == high)[self.index]",
        "return (low > high)[self.index]",
        "unit/algorithms/test_reward_shaping.py",
    ),
    "gspo": Slip(
        "algorithms/losses.py",
        "ratio = clamp_log_ratio(mean).exp() * (logprobs - logprobs.detach()).exp()",
        "ratio = clamp_log_ratio(log_r).exp()",
        "unit/algorithms/test_losses.py",
    ),
    "cispo": Slip(
        "algorithms/losses.py",
        "weight = ratio.clamp(1 - clip_low, 1 + clip_high)",
        "weight = ratio.clamp(1 - clip_low, 1 + clip_low)",
        "unit/algorithms/test_losses.py",
    ),
    "value_clip": Slip(
        "algorithms/losses.py",
        "loss = 0.5 * aggregate(torch.maximum(plain_error, clipped_error)",
        "loss = 0.5 * aggregate(torch.minimum(plain_error, clipped_error)",
        "unit/algorithms/test_losses.py",
    ),
    "adaptive_kl": Slip(
        "algorithms/kl.py",
        "min(max(kl / self.target - 1, -0.2), 0.2)",
        "min(max(1 - kl / self.target, -0.2), 0.2)",
        "unit/algorithms/test_kl.py",
    ),
    "truncated_importance": Slip(
        "algorithms/correction.py",
        "ratio.clamp(max=high), ratio > high",
        "ratio.clamp(min=low), ratio > high",
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
        "data/ledger.py",
        "weights[name] * drawn - counts[name] * total",
        "weights[name] * drawn",
        "unit/data/test_mix_ledger.py",
    ),
    "epoch_order": Slip(
        "data/ledger.py",
        "self._seed, *name, epoch)",
        "self._seed, *name, 0)",
        "unit/data/test_ledger.py",
    ),
    "row_twice": Slip(
        "data/ledger.py",
        "left_out = self._trained_ahead.union(in_flight)",
        "left_out = set(in_flight)",
        "unit/data/test_ledger.py",
    ),
    "other_data": Slip(
        "data/ledger.py",
        "if saved != own:",
        'if saved != own and name != "fingerprint":',
        "unit/data/test_ledger.py",
    ),
    "staleness": Slip(
        "sources/in_flight.py",
        "self._most = (max_staleness + 1) * batch",
        "self._most = (max_staleness + 2) * batch",
        "unit/sources/test_flight.py",
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
    "temperature": Slip(
        "models/logprobs.py",
        "logp = (logits / targets.temperature).log_softmax(dim=-1)\n    logprobs",
        "logp = logits.log_softmax(dim=-1)\n    logprobs",
        "unit/models/test_logprobs.py",
    ),
    "attention_cost": Slip(
        "parallel/load_balancing.py",
        "return tokens + self.quadratic * tokens**2",
        "return tokens",
        "unit/parallel/test_load_balancing.py",
    ),
    "prompt_learnt": Slip(
        "data/examples.py",
        "[0.0] * len(before) + [1.0] * len(said)",
        "[1.0] * len(before) + [1.0] * len(said)",
        "unit/data/test_turns.py",
    ),
    "end_token": Slip(
        "data/examples.py",
        "if not self._stops.last(reply):",
        "if reply is None:",
        "unit/data/test_turns.py",
    ),
    # Updates
    "foreign_rows": Slip(
        "episodes.py",
        "bool(self.sampled_by or self.weight_versions is None or self.weight_versions[0] == 0)",
        "bool(self.sampled_by or self.weight_versions is None)",
        "unit/objectives/test_batches.py",
    ),
    # Text and rewards
    "special_tokens": Slip(
        "data/tokens.py",
        "if token not in unseen], skip_special_tokens=False)",
        "if token not in unseen], skip_special_tokens=True)",
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
        "run/state.py",
        "time.time() + seconds_needed > self._deadline",
        "time.time() > self._deadline",
        "unit/run/test_stopping.py",
    ),
    "wrong_hash": Slip(
        "checkpoint/manifest.py",
        "if digest != entry.hash:",
        "if digest is None:",
        "unit/checkpoint/test_manifest.py",
    ),
    "path_outside": Slip(
        "checkpoint/manifest.py",
        "if not files.contains(entry.path):",
        "if not entry.path:",
        "unit/checkpoint/test_manifest.py",
    ),
    "other_manifest": Slip(
        "checkpoint/manifest.py",
        'if manifest.get("self") != digest_of(',
        'if not manifest.get("self") and digest_of(',
        "unit/checkpoint/test_manifest.py",
    ),
    "permission": Slip(
        "checkpoint/manifest.py",
        "if not is_unrelated_to_content(error):",
        "if error is not None:",
        "unit/checkpoint/test_manager.py",
    ),
    "kept_newest": Slip(
        "checkpoint/manager.py",
        "keep = set(protected) | set(steps[-max(1, self.newest) :])",
        "keep = set(steps[-max(1, self.newest) :])",
        "unit/checkpoint/test_manager.py",
    ),
    "changed_key": Slip(
        "run/resume.py",
        'if rule.change == "never":',
        'if rule.change == "ever":',
        "unit/run/test_compatibility.py",
    ),
    "restart_limit": Slip(
        "process/failures.py",
        "if len(times) >= restarts.limit:",
        "if len(times) > restarts.limit:",
        "unit/process/test_failures.py",
    ),
    "same_fault": Slip(
        "process/failures.py",
        "faults = {(step, cause)} if failure_class == JOB else set()",
        "faults = {(step, failure_class)} if failure_class == JOB else set()",
        "unit/process/test_failures.py",
    ),
    # What people read
    "pass_at_k": Slip(
        "metrics/estimates.py",
        "1.0 - math.comb(n - successes, k) / math.comb(n, k)",
        "1.0 - (1 - successes / n) ** k",
        "unit/metrics/test_estimates.py",
    ),
    "divergence": Slip(
        "metrics/advice.py",
        "if len(above) >= PATIENCE:",
        "if len(above) > PATIENCE:",
        "unit/metrics/test_health.py",
    ),
    "secret": Slip(
        "files/redaction.py",
        "if is_secret(name) and not isinstance(value, bool):",
        'if name == "password" and not isinstance(value, bool):',
        "unit/files/test_redaction.py",
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
    write(file, text.replace(slip.right, slip.wrong))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/cpu/{slip.tests}"]
    env = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # or each run would compile all tests and the code again
    try:
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=900)
    finally:
        write(file, text)
    if done.returncode not in (0, 1):
        raise ValueError(f"{slip.tests} ended with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.returncode == 1


_moments = itertools.count(int(time.time()), 2)


def write(file: Path, text: str) -> None:
    """Write a file of the code, dated so that Python takes no version that it has compiled before for this one."""
    file.write_text(text)
    moment = next(_moments)
    os.utime(file, (moment, moment))


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
