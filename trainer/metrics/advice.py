"""Advisories: what the metrics of a run say about it, and the key to change; and whether it has diverged.

An advisory is a pure function of the lines of `metrics.jsonl`: the log, the report and the viewer say the same, and a
resumed run says what the uninterrupted one says. `python -m trainer.metrics.advice` writes the table of
`docs/metrics.md`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.config.tasks import ACCURACY
from trainer.metrics.names import table_rows

if TYPE_CHECKING:
    from trainer.metrics.tracker import MetricsLines

LOG = logging.getLogger(__name__)

_SOLVED = 0.95
"""Validation accuracy, or mean reward divided by `reward.success_threshold`, from which a task is solved: then the
completions of most prompts agree, and the entropy is low, because all is well."""
_START = 5  # first steps whose median is the start of a metric
_LAST_LINES = 1000  # of a long run, which mostly decide what holds after the last step
_COMPARED_TO_START = ("policy/entropy", "response_length/mean", "reward/mean")
COMPARE_NOTHING = ("gae", "reward", "zero", "reverse_kl", "reinforce_plus_plus", "remax", "rae")
"""The built-in `algorithm.advantage_estimator`s for which equal rewards of the completions of a prompt are no loss."""


@dataclass(frozen=True)
class Advice:
    """Something that a run says about itself."""

    name: str
    steps: tuple[int, int]
    """The first and the last step of which it holds. Between them there may be a few steps of which it does not."""
    text: str  # one line without the steps: what is the matter, and what to try
    key: str  # the config key to change first

    def __str__(self) -> str:
        return f"since step {self.steps[0]}, {self.text}"


class _Past:
    """What rules know of the steps before one: the first values of some metrics, and the validations."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        wanted = _finite(_value(config, "reward", "success_threshold"))
        self._solved_reward = _SOLVED * wanted if wanted is not None and wanted > 0 else math.inf
        self._first: dict[str, list[float]] = {name: [] for name in _COMPARED_TO_START}
        self._starts: dict[str, float] = {}  # medians of the first values
        self.accuracy = 0.0  # the last validation accuracy
        self.accuracy_of_start = -math.inf
        self.trained_accuracy = -math.inf  # the highest one of a step

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._first:
            for name in self._first.keys() & metrics.keys():
                self._first[name].append(metrics[name])
                if len(self._first[name]) == _START:
                    self._starts[name] = statistics.median(self._first.pop(name))
        if ACCURACY in metrics:
            self.accuracy = metrics[ACCURACY]
            if step > 0:
                self.trained_accuracy = max(self.trained_accuracy, self.accuracy)
            else:
                self.accuracy_of_start = self.accuracy

    @property
    def best_accuracy(self) -> float:
        return max(0.0, self.accuracy_of_start, self.trained_accuracy)

    def start(self, name: str, default: float = math.nan) -> float:
        """Return the median of the first steps; `default` if there are too few: NaN is neither above nor below."""
        return self._starts.get(name, default)

    def is_solved(self, metrics: Mapping[str, float]) -> bool:
        """Return whether nearly all completions succeed."""
        succeeds = metrics.get("reward/mean", 0.0) >= self._solved_reward
        return succeeds or metrics.get(ACCURACY, self.accuracy) >= _SOLVED


@dataclass(frozen=True)
class Rule:
    """When an advisory is given, and what it says."""

    name: str
    key: str
    metrics: tuple[str, ...]
    """The metrics that `holds` reads. A step without one of them does not count."""
    steps: int
    """Number of consecutive steps of which it holds before the advisory, and of which it does not before the next."""
    holds: Callable[[Mapping[str, float], _Past], bool]
    """Gets the metrics of a step that are finite, and the steps before."""
    condition: str  # the same for people, in Markdown
    advice: str  # what it means, and what to try

    def advise(self, steps: tuple[int, int]) -> Advice:
        return Advice(self.name, steps, f"{self.condition.replace('`', '')}: {self.advice}", self.key)


_TABLE = """
no_signal | rollout.n | 3 | reward/zero_std_frac | `reward/zero_std_frac` is at least 0.8 although the task is not
    solved, or 1 | little is learnt from the prompts whose completions all get the same reward (healthy runs stay
    below 0.6); try a larger rollout.n or rollout.temperature, easier or harder prompts, or a reward with finer
    grades, or algorithm.dynamic_sampling, which draws other prompts in their place
entropy_collapse | algorithm.entropy_coef | 5 | policy/entropy | `policy/entropy` is below a tenth of its start
    although the task is not solved | the policy hardly explores (healthy runs keep a third); try
    algorithm.entropy_coef, a larger algorithm.clip_high, or a lower learning rate
clipped_updates | trainer.policy.optimizer.lr | 5 | policy/clip_frac | `policy/clip_frac` is above 0.4 | the policy
    moves too far within a step (healthy runs stay below 0.1, with `gspo` below 0.35); try a lower
    trainer.policy.optimizer.lr, or a larger trainer.mini_batch_size
long_responses | algorithm.overlong_buffer | 5 | response_length/mean reward/mean | `response_length/mean` is above
    three times its start, and `reward/mean` is not above its start | length without reward is padding; try
    algorithm.overlong_buffer, which makes long completions cost reward
truncated | rollout.max_response_tokens | 3 | response_length/clip_ratio | `response_length/clip_ratio` is above 0.5 |
    a completion that is cut off seldom has its answer; try a larger rollout.max_response_tokens, with an environment
    also environment.max_tokens, or algorithm.overlong_buffer
mismatch | algorithm.rollout_correction | 3 | rollout/k3_kl | `rollout/k3_kl` is above 0.01, and the rollouts are of
    the newest weights | engines and ranks differ by more than rounding (0.001 with bfloat16); try
    algorithm.rollout_correction=tis, or the same type of numbers in rollout.dtype and in the ranks
stale_rollouts | rollout.ahead | 5 | rollout/ess rollout/staleness_mean | `rollout/ess` is below 0.5, and the rollouts
    are of older weights | less than half of the tokens count; try a smaller rollout.ahead, or a lower learning rate
falling_accuracy | trainer.policy.optimizer.lr | 1 | val/accuracy | `val/accuracy` is below half of the highest one so
    far, and more than 0.2 lower | try a lower trainer.policy.optimizer.lr or a smaller rollout.ahead, from a
    checkpoint before that (trainer.resume_path)
no_success | reward.success_threshold | 2 | val/accuracy | `val/accuracy` is 0 | no reward has reached
    reward.success_threshold yet; if that is not the reward of a success, change it, or compare by
    trainer.best_metric=val/reward/mean; otherwise try easier prompts, or examples first (trainer sft)
no_gain | trainer.policy.optimizer.lr | 3 | val/accuracy | `val/accuracy` of no step is above that of the start | what
    is learnt does not show there; look whether reward/mean rises, and try another trainer.policy.optimizer.lr
kl_explosion | trainer.policy.optimizer.lr | 3 | policy/kl | `policy/kl` is above 2 | the policy has moved far away;
    try a lower trainer.policy.optimizer.lr or a larger algorithm.kl_coef, and trainer.divergence_limits, which ends
    such a run
useless_critic | trainer.critic.optimizer.lr | 20 | critic/explained_variance | `critic/explained_variance` is at most
    0 | the critic explains nothing of the returns (a healthy one does after 10 steps); try another
    trainer.critic.optimizer.lr, or more trainer.critic.warmup_steps in a new run
silent_agents | environment.name | 1 | episode/turns/mean | `episode/turns/mean` is 0, and no episode has failed | no
    agent has asked the policy; let the agent of environment.name send its calls to endpoint.base_url
failed_environments | environment.timeout_s | 3 | environment/failures perf/samples_per_s time/step |
    `environment/failures` is above a tenth of the completions | log.txt has the errors; try a longer
    environment.timeout_s if they are timeouts
failed_rewards | reward.timeout_s | 3 | reward/failures perf/samples_per_s time/step | `reward/failures` is above a
    tenth of the completions | log.txt has the errors; try a longer reward.timeout_s if they are timeouts
ranks_wait | rollout.num_engines | 10 | time/rollout time/step | `time/rollout` is above 0.8 of `time/step` | the
    ranks wait; try more rollout.num_engines, or rollout.ahead=1, which generates while the ranks train
engines_wait | trainer.num_workers | 10 | time/wait_weights time/step | `time/wait_weights` is above 0.8 of
    `time/step` | the engines wait for new weights; try more trainer.num_workers, or fewer rollout.num_engines
"""
"""By line: the name; the config key to change first; the number of steps; the metrics that are read; when the advisory
is given, in Markdown; and what it means, and what to try. A line that begins with spaces continues the one before."""
_HOLDS: dict[str, Callable[[Mapping[str, float], _Past], bool]] = {
    "no_signal": lambda m, past: (
        m["reward/zero_std_frac"] == 1 or m["reward/zero_std_frac"] >= 0.8 and not past.is_solved(m)
    ),
    "entropy_collapse": lambda m, past: (
        m["policy/entropy"] < 0.1 * past.start("policy/entropy") and not past.is_solved(m)
    ),
    "clipped_updates": lambda m, past: m["policy/clip_frac"] > 0.4,
    "long_responses": lambda m, past: (
        m["response_length/mean"] > 3 * past.start("response_length/mean")
        and m["reward/mean"] <= past.start("reward/mean", 0.0)
    ),
    "truncated": lambda m, past: m["response_length/clip_ratio"] > 0.5,
    "mismatch": lambda m, past: m["rollout/k3_kl"] > 0.01 and not m.get("rollout/staleness_mean"),
    "stale_rollouts": lambda m, past: m["rollout/ess"] < 0.5 and m["rollout/staleness_mean"] > 0,
    "falling_accuracy": lambda m, past: m[ACCURACY] < past.best_accuracy / 2 and m[ACCURACY] < past.best_accuracy - 0.2,
    "no_success": lambda m, past: m[ACCURACY] == past.best_accuracy == 0,
    "no_gain": lambda m, past: (
        0 < past.accuracy_of_start >= max(m[ACCURACY], past.trained_accuracy) and not past.is_solved(m)
    ),
    "kl_explosion": lambda m, past: m["policy/kl"] > 2,
    "useless_critic": lambda m, past: m["critic/explained_variance"] <= 0,
    "silent_agents": lambda m, past: m["episode/turns/mean"] == 0 and not m.get("environment/failures"),
    "failed_environments": lambda m, past: m["environment/failures"] > 0.1 * m["perf/samples_per_s"] * m["time/step"],
    "failed_rewards": lambda m, past: m["reward/failures"] > 0.1 * m["perf/samples_per_s"] * m["time/step"],
    "ranks_wait": lambda m, past: m["time/rollout"] > 0.8 * m["time/step"] > 0,
    "engines_wait": lambda m, past: m["time/wait_weights"] > 0.8 * m["time/step"] > 0,
}
RULES = tuple(
    Rule(name, key, tuple(metrics.split()), int(steps), _HOLDS[name], condition, advice)
    for name, key, steps, metrics, condition, advice in table_rows(_TABLE)
)
"""The advisories, in the order of the docs."""
_READ = frozenset(name for rule in RULES for name in rule.metrics)


@dataclass
class _Counter:
    since: int = 0
    present: int = 0  # consecutive steps of which it held
    absent: int = 0  # consecutive steps of which it did not
    is_given: bool = False
    is_counting: bool = False  # a step of which it does not hold makes a difference
    found: list[tuple[int, int]] = field(default_factory=list)

    def update(self, step: int, holds: bool, steps: int) -> bool:
        """Count a step. Return whether the advisory is to be given now."""
        if not holds:
            self.present, self.absent = 0, self.absent + 1
            self.is_given &= self.absent < steps
            self.is_counting = self.is_given
            return False
        self.since = self.since if self.present or self.is_given else step
        self.present, self.absent, self.is_counting = self.present + 1, 0, True
        if self.is_given:
            self.found[-1] = self.since, step
        elif self.present >= steps:
            self.is_given = True
            self.found.append((self.since, step))
            return True
        return False


class Advisor:
    """Gives each advisory once, and again only after it did not hold for a while.

    Args:
        config: of the run, nested or with dotted keys; None: not known.
        compares_completions: the advantages compare the completions of a prompt. None: `config` says it, and without
            one they do.
        history: the lines of `metrics.jsonl` before the first `update`.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        compares_completions: bool | None = None,
        history: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._config = config if isinstance(config, Mapping) else {}
        if compares_completions is None:
            compares_completions = _value(self._config, "algorithm", "advantage_estimator") not in COMPARE_NOTHING
        self._counters = [(rule, _Counter()) for rule in RULES if compares_completions or rule.name != "no_signal"]
        self._countable: dict[frozenset[str], list[tuple[Rule, _Counter]]] = {}  # by the metrics of a step
        self._past = _Past(self._config)
        for index, row in enumerate(history):
            step = row.get("step")
            self.update(step if type(step) is int else index, row)

    def update(self, step: int, metrics: Mapping[str, Any]) -> list[Advice]:
        """Return the advisories that the metrics of a finished step give rise to."""
        logged = _READ.intersection(metrics)
        if logged not in self._countable:
            self._countable[logged] = [(rule, one) for rule, one in self._counters if logged.issuperset(rule.metrics)]
        try:
            are_finite = math.isfinite(sum([metrics[name] for name in logged]))  # quicker than each on its own
        except (TypeError, OverflowError):
            are_finite = False
        if not are_finite:  # `null` is not
            numbers = {name: _finite(metrics[name]) for name in logged}
            metrics = {name: number for name, number in numbers.items() if number is not None}
        given = []
        for rule, counter in self._countable[logged]:
            holds = (are_finite or metrics.keys() >= {*rule.metrics}) and rule.holds(metrics, self._past)
            if (holds or counter.is_counting) and counter.update(step, holds, rule.steps):
                given.append(rule.advise(counter.found[-1]))
        self._past.add(step, metrics)
        return given

    @property
    def found(self) -> list[Advice]:
        """All advisories so far, by their first step."""
        found = [rule.advise(steps) for rule, counter in self._counters for steps in counter.found]
        return sorted(found, key=lambda advice: advice.steps[0])

    @property
    def current(self) -> list[Advice]:
        """The advisories that hold after the last step."""
        current = [rule.advise(counter.found[-1]) for rule, counter in self._counters if counter.is_given]
        return sorted(current, key=lambda advice: advice.steps[0])


def current_advice(lines: MetricsLines, config: Mapping[str, Any] | None = None) -> list[Advice]:
    """Return `Advisor(config, history=lines).current`. Of many lines it reads the last ones and those of validations,
    if they decide: an advisory that has held for longer than the last lines needs all."""
    if len(lines) <= _LAST_LINES:
        return Advisor(config, history=lines).current
    advisor, last = Advisor(config), lines[-_LAST_LINES:]
    wanted = {ACCURACY: None, **dict.fromkeys(_COMPARED_TO_START, _START)}  # and how many of each
    before: dict[int, dict[str, float | None]] = {}
    for name, most in wanted.items():
        found = (row for row in lines.having(name) if name in row and (most is None or row[name] is not None))
        for row in islice(found, most):
            before[row["step"]] = {one: row[one] for one in wanted if one in row}
    for step, metrics in sorted(before.items()):
        if step < last[0]["step"]:
            advisor.update(step, metrics)
    counters = [(rule, counter) for rule, counter in advisor._counters if rule.metrics != (ACCURACY,)]
    for _, counter in counters:  # what the lines between have counted is not known: until it has been absent, it holds
        vars(counter).update(vars(_Counter(is_given=True, is_counting=True, found=[(0, 0)])))
    for row in last:
        advisor.update(row["step"], row)
    for rule, counter in counters:
        is_counted = bool(counter.present or counter.absent)
        if is_counted and counter.is_given and len(counter.found) == 1:
            return Advisor(config, history=lines).current
        if not is_counted:
            if all(any(name in row for row in lines.having(name)) for name in rule.metrics):
                return Advisor(config, history=lines).current
            counter.is_given = False
    return advisor.current


def _value(config: Mapping[str, Any], section: str, key: str) -> Any:
    """Return the value of a key of a nested config, or of one with dotted keys; None: there is none."""
    inner = config.get(section)
    return inner.get(key) if isinstance(inner, Mapping) else config.get(f"{section}.{key}")


def _finite(value: Any) -> float | None:
    """Return a number; None: it is none, or not finite."""
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Divergence:
    """A metric that has diverged."""

    metric: str
    limit: float
    first_step: int  # the first of the consecutive steps above the limit
    value: float  # the value of the last step

    def __str__(self) -> str:
        return (
            f"{self.metric} has been above {self.limit:g} since step {self.first_step}, and is {self.value:.4g} now "
            "(trainer.divergence_limits)"
        )


PATIENCE = 3  # consecutive steps above a limit after which the run has diverged


class MetricChecks:
    """Logs each advisory once, and finds metrics that stay above their limits (`trainer.divergence_limits`). The
    arguments are those of `Advisor`."""

    def __init__(self, cfg: Config, compares_completions: bool, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self._advisor = Advisor(dataclasses.asdict(cfg), compares_completions)
        self._limits = cfg.trainer.divergence_limits
        self._above: dict[str, list[int]] = {metric: [] for metric in self._limits}
        for row in history:  # of many lines: once
            self._advisor.update(row["step"], row)
            self._find_divergence(row["step"], row)

    def update(self, step: int, metrics: Mapping[str, Any]) -> Divergence | None:
        """Check the metrics of a finished step. Return the first metric that has diverged, or None."""
        for advice in self._advisor.update(step, metrics):
            LOG.info("NOTE: %s (more: docs/troubleshooting.md)", advice)
        return self._find_divergence(step, metrics)

    def _find_divergence(self, step: int, metrics: Mapping[str, Any]) -> Divergence | None:
        divergence = None
        for metric, limit in self._limits.items():
            value, above = metrics.get(metric), self._above[metric]
            if value is None:
                continue
            if value <= limit:
                above.clear()
                continue
            above.append(step)
            if len(above) >= PATIENCE:
                divergence = divergence or Divergence(metric, limit, above[0], value)
        return divergence


def with_reference(page: str) -> str:
    """Return the text of `docs/metrics.md` with a fresh table of the rules."""
    rows = [f"| `{r.name}` | {r.condition} | {r.steps} | `{r.key}` | {r.advice} |\n" for r in RULES]
    return re.sub(r"(?<=\|---\|---\|---\|---\|---\|\n)(\|.*\n)++", lambda _: "".join(rows), page)


if __name__ == "__main__":
    print(with_reference(sys.stdin.read()), end="")
