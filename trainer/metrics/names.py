"""Every metric that a run logs. `python -m trainer.metrics.names` writes the table of `docs/metrics.md`."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Collection

from trainer.config.tasks import TASKS, Metric

PHASES = ("rollout", "environment", "reward", "logprob", "update", "sync", "checkpoint_blocked")
"""Parts of a step that are timed, in the order in which they happen. They do not overlap."""

METRICS: dict[str, Metric] = {
    "reward/mean": Metric("Mean reward of the step's completions.", "reward"),
    "reward/std": Metric("Standard deviation of the reward over the step's completions.", "reward"),
    "reward/zero_std_frac": Metric(
        "Groups whose completions all got the same reward. They give no gradient under GRPO.", "share"
    ),
    "reward/<name>/mean": Metric(
        "Mean of one term of the reward, before it is weighed: of one function in `reward.name`, of one name in "
        "what it returns, or of one name in the `StepResult.rewards` of an environment.",
        "reward",
    ),
    "player/<name>/reward/mean": Metric(
        "Mean reward of a player of an environment or an agent; in a mix `data/<name>/player/<player>/reward/mean`.",
        "reward",
    ),
    "player/<name>/baseline": Metric(
        "With `algorithm.advantage_estimator=rae`: moving average of a player's rewards after the step. In a mix, "
        "`<name>` is `<source>/<player>`; `policy` is a player without a name.",
        "reward",
    ),
    "reward/failures": Metric(
        "Completions whose reward, or a term of it, failed. `reward.on_failure` says what becomes of them.",
        "completions",
    ),
    "environment/failures": Metric(
        "Episodes whose environment failed. `environment.on_failure` says what becomes of them.", "episodes"
    ),
    "episode/<name>/mean": Metric(
        "Mean over the step's episodes of a number in `StepResult.metrics` of environments, summed over an episode, or "
        "in `AgentResult.metrics` of agents.",
        "1",
    ),
    "episode/tool_calls/<name>/mean": Metric("Mean number of calls of a tool in an episode.", "calls"),
    "episode/tool_errors/mean": Metric(
        "Mean number of calls in an episode that were answered with an error: of no known tool, with wrong arguments, "
        "or of a tool that raised.",
        "calls",
    ),
    "episode/samples/mean": Metric("Mean number of samples that an episode of an agent gave.", "samples"),
    "episode/errors/mean": Metric("Share of agents that raised after a limit of their episode.", "1"),
    "episode/turns/mean": Metric("Mean number of replies in the step's episodes.", "turns"),
    "episode/tokens/mean": Metric("Mean number of tokens that the policy sampled in an episode.", "tokens"),
    "data/<name>/prompts": Metric(
        "Rows of a source of `data.mix` used up since the run began: trained on, or left out by dynamic sampling.",
        "prompts",
    ),
    "data/<name>/epoch": Metric("Passes over the rows of a source of `data.mix`, with fractions.", "epochs"),
    "data/<name>/reward/mean": Metric("Mean reward of the step's completions for a source of `data.mix`.", "reward"),
    "data/<name>/reward/std": Metric("Standard deviation of these rewards.", "reward"),
    "data/<name>/reward/zero_std_frac": Metric(
        "Groups of the source whose completions all got the same reward (see `reward/zero_std_frac`).", "share"
    ),
    "data/<name>/reward/<term>/mean": Metric(
        "Mean of one term of these rewards (see `reward/<name>/mean`, which a run with `data.mix` does not log).",
        "reward",
    ),
    "data/<name>/player/<player>/reward/mean": Metric("Mean reward of a player in the source.", "reward"),
    "data/<name>/accuracy": Metric(
        "Completions for the source that are a success: their reward is at least the source's "
        "`reward.success_threshold`.",
        "share",
    ),
    "data/<name>/failures": Metric("Completions for the source whose reward or environment failed.", "completions"),
    "data/<name>/response_length/mean": Metric("Mean tokens that the policy sampled for the source.", "tokens"),
    "data/<name>/episode/<metric>/mean": Metric(
        "Of a source with an environment: `episode/<name>/mean`, `episode/turns/mean` and `episode/tokens/mean`.", "1"
    ),
    "sampling/batches": Metric("Batches of prompts that dynamic sampling drew for the step.", "batches"),
    "sampling/filtered": Metric(
        "Prompts that dynamic sampling left out because all their completions got the same reward.", "prompts"
    ),
    "response_length/mean": Metric("Mean length of the step's completions.", "tokens"),
    "response_length/max": Metric("Length of the longest completion.", "tokens"),
    "response_length/clip_ratio": Metric(
        "Completions cut at `rollout.max_response_tokens`, and episodes that ended because they grew too long.", "share"
    ),
    "policy/loss": Metric("Policy loss with all its terms, mean over the step's mini-batches.", "loss"),
    "policy/kl": Metric("KL to the reference; without a reference, KL of the old policy to the new one.", "nats"),
    "policy/teacher_kl": Metric("Divergence from the teacher (`algorithm.teacher.divergence`).", "nats"),
    "policy/kl_coef": Metric("Weight of the KL, with the option `kl_target`.", "1"),
    "policy/clip_frac": Metric("Tokens whose gradient the clipping of the policy loss removed or changed.", "share"),
    "policy/entropy": Metric("Mean entropy of the policy's next-token distribution.", "nats"),
    "policy/grad_norm": Metric("Global norm of the policy's gradient before clipping.", "norm"),
    "policy/lr": Metric("Learning rate of the policy's last optimizer step.", "1"),
    "critic/loss": Metric("Clipped value loss, mean over the step's mini-batches.", "loss"),
    "critic/clip_frac": Metric("Tokens whose value was clipped to the range around the old value.", "share"),
    "critic/explained_variance": Metric(
        "1 - Var(return - value) / Var(return): 1 for a perfect critic, 0 for a constant one.", "share"
    ),
    "critic/grad_norm": Metric("Global norm of the critic's gradient before clipping.", "norm"),
    "critic/lr": Metric("Learning rate of the critic's last optimizer step.", "1"),
    "rollout/staleness_mean": Metric(
        "With `rollout.ahead` or `in_flight_updates`: by how many versions the oldest weights that sampled an episode "
        "are older than those that the step trains, mean over the episodes. A step makes one version.",
        "versions",
    ),
    "rollout/staleness_max": Metric("The largest such number (see `rollout/staleness_mean`).", "versions"),
    "rollout/versions_mean": Metric(
        "With `rollout.in_flight_updates`: versions of the weights that sampled an episode, mean over the episodes.",
        "versions",
    ),
    "rollout/replayed_frac": Metric("Samples that another run has sampled (`data.mix.<name>.replay`).", "share"),
    "rollout/logprob_diff_mean": Metric(
        "Mean absolute difference of the engine's and the trainer's log-prob of a sampled token.", "nats"
    ),
    "rollout/logprob_diff_max": Metric(
        "Largest absolute difference of the engine's and the trainer's log-prob of a sampled token.", "nats"
    ),
    "rollout/kl": Metric(
        "KL of the engine to the trainer, estimated as the mean of -log rho. rho is the trainer's probability of a "
        "sampled token, divided by the engine's.",
        "nats",
    ),
    "rollout/k3_kl": Metric("KL of the engine to the trainer, estimated as the mean of rho - 1 - log rho.", "nats"),
    "rollout/ratio_max": Metric("Largest rho (see `rollout/kl`).", "1"),
    "rollout/ess": Metric("Effective sample size of the step's tokens, weighted by rho (see `rollout/kl`).", "share"),
    "rollout/logprob_corr": Metric("Correlation of the engine's and the trainer's log-probs.", "1"),
    "rollout_is/clip_frac": Metric("Tokens whose weight `algorithm.rollout_correction` has cut or set to 0.", "share"),
    "val/reward/mean": Metric("Mean reward of greedy completions of the validation prompts.", "reward"),
    "val/failures": Metric(
        "Greedy completions of the validation prompts whose reward or environment failed (see `reward/failures`).",
        "completions",
    ),
    "val/player/<name>/reward/mean": Metric("Mean reward of a player in the greedy episodes.", "reward"),
    "val/<name>/player/<player>/reward/mean": Metric("Mean reward of a player in the set.", "reward"),
    "val/reward/<name>/mean": Metric("Mean of one term of that reward (see `reward/<name>/mean`).", "reward"),
    "val/accuracy": Metric(
        "Validation prompts whose greedy completion is a success: its reward is at least `reward.success_threshold`.",
        "share",
    ),
    "val/pass@<k>": Metric(
        "Validation prompts for which at least one of k sampled completions is a success (see `val/accuracy`); k is "
        "`rollout.val_n`: `val/pass@4` with 4.",
        "share",
    ),
    "val/<name>/accuracy": Metric(
        "Of the set `data.val_sets.<name>`: completions that are a success, mean over the rows.", "share"
    ),
    "val/<name>/avg@<k>": Metric("Mean reward of its k completions of a row; k is its `n`.", "reward"),
    "val/<name>/pass@<k>": Metric(
        "Probability that at least one of k of its completions of a row is a success: the unbiased estimate from all "
        "`n` completions, mean over the rows; for k = 2, 4, 8, … and `n`.",
        "share",
    ),
    "val/<name>/failures": Metric("Its completions whose reward or environment failed.", "completions"),
    **{name: metric for task in TASKS.values() for name, metric in task.metrics.items()},
    "time/step": Metric("The whole step.", "s"),
    "time/rollout": Metric(
        "Waiting for the step's completions. Rewards are computed meanwhile. With `rollout.ahead`, also waiting for "
        "those of a later step, before engines can take new weights.",
        "s",
    ),
    "time/environment": Metric("Waiting for environments while engines have nothing to do.", "s"),
    "time/reward": Metric("Waiting for rewards after the last completion.", "s"),
    "time/logprob": Metric("Old and reference log-probs, and values.", "s"),
    "time/update": Metric("Optimizer steps of critic and policy.", "s"),
    "time/sync": Metric("Bringing the new weights to the engines.", "s"),
    "time/generation": Metric(
        "With `rollout.ahead`: from the begin to the end of the generation of the step's completions, while earlier "
        "steps trained. With `rollout.in_flight_updates`: time in which engines had something to generate, from the "
        "weights before the step to those after it.",
        "s",
    ),
    "time/wait_weights": Metric(
        "With `rollout.ahead` or `rollout.in_flight_updates`: engines had nothing to generate, and waited for the "
        "step's new weights.",
        "s",
    ),
    "time/journal": Metric("Waiting until the step's rollouts are on the disk.", "s"),
    "journal/replies_sampled": Metric("Replies that the engines gave for the step.", "replies"),
    "journal/replies_recorded": Metric("Replies of the step that came from the journal, after a kill.", "replies"),
    "time/checkpoint_blocked": Metric("Time that training waited for a checkpoint.", "s"),
    "perf/tokens_per_s": Metric("Prompt and completion tokens trained on, divided by `time/step`.", "tokens/s"),
    "perf/samples_per_s": Metric("Completions of the step, divided by `time/step`.", "completions/s"),
    "perf/sync_gb_per_s": Metric("Size of the weights or adapters that engines got, divided by `time/sync`.", "GB/s"),
    "perf/mfu": Metric(
        "FLOPs of the policy, and of all models that compute log-probs, in the step, without attention and the repeats "
        "of shared tokens, divided by the peak of the ranks, by the data sheet of their GPU.",
        "share",
    ),
    "progress/epoch": Metric("Passes over the training prompts or examples, with fractions.", "epochs"),
    "progress/prompts": Metric("Prompts trained on since the run began.", "prompts"),
    "progress/samples": Metric(
        "Completions of the steps since the run began, those that a failure has left out of the losses included.",
        "completions",
    ),
    "progress/tokens": Metric("Prompt and completion tokens trained on since the run began.", "tokens"),
}
"""Metrics by name, in the order of the docs; those of one task alone are from its `TaskSpec`.
`val/…` is only in the lines of steps that validated."""


COUNTERS = ("progress/prompts", "progress/samples", "progress/tokens", "data/<name>/prompts")
"""The metrics that only grow."""


def is_metric(name: str, declared: Collection[str] = ()) -> bool:
    """Return whether runs log a metric of this name.

    Args:
        declared: the metrics of the run's own task.
    """
    return name in declared or any(_pattern(known).fullmatch(name) for known in METRICS)


def declared_as(name: str) -> Metric | None:
    """Return what a metric of this name is; None: it is one of a task."""
    return METRICS.get(name) or next((METRICS[known] for known in METRICS if _pattern(known).fullmatch(name)), None)


def is_counter(name: str) -> bool:
    """Return whether a metric only grows: it counts over the life of the run."""
    return any(_pattern(known).fullmatch(name) for known in COUNTERS)


def pass_at(k: int | str) -> str:
    """Return the name of pass@k."""
    return f"val/pass@{k}"


def of_val_set(name: str, measure: str) -> str:
    """Return the name of a metric of a named validation set."""
    return f"val/{name}/{measure}"


def set_of_metric(metric: str) -> tuple[str, str] | None:
    """Return the name of the set and the measure of a metric of a named validation set; None: it is another metric."""
    match = re.fullmatch(r"val/([^/]+)/(accuracy|failures|(?:avg|pass)@.+)", metric)
    return (match[1], match[2]) if match else None


def is_accuracy_of_set(metric: str) -> bool:
    """Return whether this is the accuracy of a named validation set."""
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
