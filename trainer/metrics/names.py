"""Every metric that a run logs. `python -m trainer.metrics.names` writes the table of `docs/metrics.md`."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Collection

from trainer.config.tasks import TASKS, Metric

PHASES = ("rollout", "environment", "reward", "logprob", "update", "sync", "checkpoint_blocked")
"""Parts of a step that are timed, in the order in which they happen. They do not overlap."""


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of each row of a table, `a | b | c`. A line that begins with spaces continues the one before."""
    return [row.split(" | ") for row in re.sub(r"\n +", " ", text.strip()).split("\n")]


def _metrics(table: str) -> dict[str, Metric]:
    return {name: Metric(meaning, unit) for name, unit, meaning in table_rows(table)}


_OF_SAMPLES = """
reward/mean | reward | Mean reward of the step's completions.
reward/std | reward | Standard deviation of the reward over the step's completions.
reward/zero_std_frac | share | Groups whose completions all got the same reward. They give no gradient under GRPO.
reward/<name>/mean | reward | Mean of one term of the reward, before it is weighed: of one function in `reward.name`,
    of one name in what it returns, or of one name in the `StepResult.rewards` of an environment.
player/<name>/reward/mean | reward | Mean reward of a player of an environment or an agent; in a mix
    `data/<name>/player/<player>/reward/mean`.
player/<name>/baseline | reward | With `algorithm.advantage_estimator=rae`: moving average of a player's rewards after
    the step. In a mix, `<name>` is `<source>/<player>`; `policy` is a player without a name.
reward/failures | completions | Completions whose reward, or a term of it, failed. `reward.on_failure` says what
    becomes of them.
environment/failures | episodes | Episodes whose environment failed. `environment.on_failure` says what becomes of
    them.
episode/<name>/mean | 1 | Mean over the step's episodes of a number in `StepResult.metrics` of environments, summed
    over an episode, or in `AgentResult.metrics` of agents.
episode/tool_calls/<name>/mean | calls | Mean number of calls of a tool in an episode.
episode/tool_errors/mean | calls | Mean number of calls in an episode that were answered with an error: of no known
    tool, with wrong arguments, or of a tool that raised.
episode/samples/mean | samples | Mean number of samples that an episode of an agent gave.
episode/errors/mean | 1 | Share of agents that raised after a limit of their episode.
episode/turns/mean | turns | Mean number of replies in the step's episodes.
episode/tokens/mean | tokens | Mean number of tokens that the policy sampled in an episode.
data/<name>/prompts | prompts | Rows of a source of `data.mix` used up since the run began: trained on, or left out by
    dynamic sampling.
data/<name>/epoch | epochs | Passes over the rows of a source of `data.mix`, with fractions.
data/<name>/reward/mean | reward | Mean reward of the step's completions for a source of `data.mix`.
data/<name>/reward/std | reward | Standard deviation of these rewards.
data/<name>/reward/zero_std_frac | share | Groups of the source whose completions all got the same reward (see
    `reward/zero_std_frac`).
data/<name>/reward/<term>/mean | reward | Mean of one term of these rewards (see `reward/<name>/mean`, which a run
    with `data.mix` does not log).
data/<name>/player/<player>/reward/mean | reward | Mean reward of a player in the source.
data/<name>/accuracy | share | Completions for the source that are a success: their reward is at least the source's
    `reward.success_threshold`.
data/<name>/failures | completions | Completions for the source whose reward or environment failed.
data/<name>/response_length/mean | tokens | Mean tokens that the policy sampled for the source.
data/<name>/episode/<metric>/mean | 1 | Of a source with an environment: `episode/<name>/mean`, `episode/turns/mean`
    and `episode/tokens/mean`.
sampling/batches | batches | Batches of prompts that dynamic sampling drew for the step.
sampling/filtered | prompts | Prompts that dynamic sampling left out because all their completions got the same
    reward.
response_length/mean | tokens | Mean length of the step's completions.
response_length/max | tokens | Length of the longest completion.
response_length/clip_ratio | share | Completions cut at `rollout.max_response_tokens`, and episodes that ended because
    they grew too long.
policy/loss | loss | Policy loss with all its terms, mean over the step's mini-batches.
policy/kl | nats | KL to the reference; without a reference, KL of the old policy to the new one.
policy/teacher_kl | nats | Divergence from the teacher (`algorithm.teacher.divergence`).
policy/kl_coef | 1 | Weight of the KL, with the option `kl_target`.
policy/clip_frac | share | Tokens whose gradient the clipping of the policy loss removed or changed.
policy/entropy | nats | Mean entropy of the policy's next-token distribution.
policy/grad_norm | norm | Global norm of the policy's gradient before clipping.
policy/lr | 1 | Learning rate of the policy's last optimizer step.
critic/loss | loss | Clipped value loss, mean over the step's mini-batches.
critic/clip_frac | share | Tokens whose value was clipped to the range around the old value.
critic/explained_variance | share | 1 - Var(return - value) / Var(return): 1 for a perfect critic, 0 for a constant
    one.
critic/grad_norm | norm | Global norm of the critic's gradient before clipping.
critic/lr | 1 | Learning rate of the critic's last optimizer step.
rollout/staleness_mean | versions | With `rollout.ahead` or `in_flight_updates`: by how many versions the oldest
    weights that sampled an episode are older than those that the step trains, mean over the episodes. A step makes
    one version.
rollout/staleness_max | versions | The largest such number (see `rollout/staleness_mean`).
rollout/versions_mean | versions | With `rollout.in_flight_updates`: versions of the weights that sampled an episode,
    mean over the episodes.
rollout/replayed_frac | share | Samples that another run has sampled (`data.mix.<name>.replay`).
rollout/logprob_diff_mean | nats | Mean absolute difference of the engine's and the trainer's log-prob of a sampled
    token.
rollout/logprob_diff_max | nats | Largest absolute difference of the engine's and the trainer's log-prob of a sampled
    token.
rollout/kl | nats | KL of the engine to the trainer, estimated as the mean of -log rho. rho is the trainer's
    probability of a sampled token, divided by the engine's.
rollout/k3_kl | nats | KL of the engine to the trainer, estimated as the mean of rho - 1 - log rho.
rollout/ratio_max | 1 | Largest rho (see `rollout/kl`).
rollout/ess | share | Effective sample size of the step's tokens, weighted by rho (see `rollout/kl`).
rollout/logprob_corr | 1 | Correlation of the engine's and the trainer's log-probs.
rollout_is/clip_frac | share | Tokens whose weight `algorithm.rollout_correction` has cut or set to 0.
val/reward/mean | reward | Mean reward of greedy completions of the validation prompts.
val/failures | completions | Greedy completions of the validation prompts whose reward or environment failed (see
    `reward/failures`).
val/player/<name>/reward/mean | reward | Mean reward of a player in the greedy episodes.
val/<name>/player/<player>/reward/mean | reward | Mean reward of a player in the set.
val/reward/<name>/mean | reward | Mean of one term of that reward (see `reward/<name>/mean`).
val/accuracy | share | Validation prompts whose greedy completion is a success: its reward is at least
    `reward.success_threshold`.
val/pass@<k> | share | Validation prompts for which at least one of k sampled completions is a success (see
    `val/accuracy`); k is `rollout.val_n`: `val/pass@4` with 4.
val/<name>/accuracy | share | Of the set `data.val_sets.<name>`: completions that are a success, mean over the rows.
val/<name>/avg@<k> | reward | Mean reward of its k completions of a row; k is its `n`.
val/<name>/pass@<k> | share | Probability that at least one of k of its completions of a row is a success: the
    unbiased estimate from all `n` completions, mean over the rows; for k = 2, 4, 8, … and `n`.
val/<name>/failures | completions | Its completions whose reward or environment failed.
"""
_OF_STEPS = """
time/step | s | The whole step.
time/rollout | s | Waiting for the step's completions. Rewards are computed meanwhile. With `rollout.ahead`, also
    waiting for those of a later step, before engines can take new weights.
time/environment | s | Waiting for environments while engines have nothing to do.
time/reward | s | Waiting for rewards after the last completion.
time/logprob | s | Old and reference log-probs, and values.
time/update | s | Optimizer steps of critic and policy.
time/sync | s | Bringing the new weights to the engines.
time/generation | s | With `rollout.ahead`: from the begin to the end of the generation of the step's completions,
    while earlier steps trained. With `rollout.in_flight_updates`: time in which engines had something to generate,
    from the weights before the step to those after it.
time/wait_weights | s | With `rollout.ahead` or `rollout.in_flight_updates`: engines had nothing to generate, and
    waited for the step's new weights.
time/journal | s | Waiting until the step's rollouts are on the disk.
journal/replies_sampled | replies | Replies that the engines gave for the step.
journal/replies_recorded | replies | Replies of the step that came from the journal, after a kill.
time/checkpoint_blocked | s | Time that training waited for a checkpoint.
perf/tokens_per_s | tokens/s | Prompt and completion tokens trained on, divided by `time/step`.
perf/samples_per_s | completions/s | Completions of the step, divided by `time/step`.
perf/sync_gb_per_s | GB/s | Size of the weights or adapters that engines got, divided by `time/sync`.
perf/continued_tokens | tokens | Tokens that leaving engines handed back to others, since the start.
perf/mfu | share | FLOPs of the policy, and of all models that compute log-probs, in the step, without attention and
    the repeats of shared tokens, divided by the peak of the ranks, by the data sheet of their GPU.
progress/epoch | epochs | Passes over the training prompts or examples, with fractions.
progress/prompts | prompts | Prompts trained on since the run began.
progress/samples | completions | Completions of the steps since the run began, those that a failure has left out of
    the losses included.
progress/tokens | tokens | Prompt and completion tokens trained on since the run began.
"""
METRICS: dict[str, Metric] = {
    **_metrics(_OF_SAMPLES),
    **{name: metric for task in TASKS.values() for name, metric in task.metrics.items()},
    **_metrics(_OF_STEPS),
}
"""Metrics by name, in the order of the docs; those of one task alone are from its `TaskSpec`.
`val/…` is only in the lines of steps that validated."""


COUNTERS = ("progress/prompts", "progress/samples", "progress/tokens", "data/<name>/prompts")
"""The metrics that only grow."""


def is_metric(name: str, declared: Collection[str] = ()) -> bool:
    """Return whether runs log a metric of this name, with those that the run's own task has `declared`."""
    return name in declared or any(_pattern(known).fullmatch(name) for known in METRICS)


def declared_as(name: str) -> Metric | None:
    """Return what a metric of this name is; None: it is one of a task."""
    return METRICS.get(name) or next((METRICS[known] for known in METRICS if _pattern(known).fullmatch(name)), None)


def is_counter(name: str) -> bool:
    return any(_pattern(known).fullmatch(name) for known in COUNTERS)


def pass_at(k: int | str) -> str:
    return f"val/pass@{k}"


def of_val_set(name: str, measure: str) -> str:
    return f"val/{name}/{measure}"


def set_of_metric(metric: str) -> tuple[str, str] | None:
    """Return the name of the set and the measure of a metric of a named validation set; None: it is another metric."""
    match = re.fullmatch(r"val/([^/]+)/(accuracy|failures|(?:avg|pass)@.+)", metric)
    return (match[1], match[2]) if match else None


def is_accuracy_of_set(metric: str) -> bool:
    return (set_of_metric(metric) or ("", ""))[1] == "accuracy"


@functools.cache
def _pattern(known: str) -> re.Pattern[str]:
    """Return the expression that matches the names for which a key of `METRICS` stands."""
    return re.compile(re.sub("<[a-z]+>", ".+", re.escape(known).replace("<k>", "[1-9][0-9]*")))


def with_reference(page: str) -> str:
    """Return the text of `docs/metrics.md` with a fresh table of every metric, its unit and its meaning."""
    rows = [f"| `{name}` | {metric.unit} | {metric.meaning} |\n" for name, metric in METRICS.items()]
    return re.sub(r"(?<=\n\|---\|---\|---\|\n)(\|.*\n)++", lambda _: "".join(rows), page, count=1)


if __name__ == "__main__":
    print(with_reference(sys.stdin.read()), end="")
