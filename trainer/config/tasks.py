"""The tasks that `trainer.task` can name, and what must be known of each before it runs, and without torch.

Whatever depends on the kind of training asks this table, so that a new kind is one more `TaskSpec`: an entry here, or
a value in a module of the user.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.fields import value_of
from trainer.config.role_specs import (
    RoleSpec,
    check_roles,
    like_policy,
    policy_gradient_roles,
    policy_role,
    supervised_roles,
)
from trainer.errors import UserError, did_you_mean
from trainer.import_utils import import_function, import_numpy, user_code

if TYPE_CHECKING:
    from trainer.config.schema import Config

KEY = "trainer.task"
OPTIONS = "algorithm.options"
_OF_OTHER_COMMANDS = ("inference.*", "plan.*")
"""Keys of `trainer inference` and `trainer plan`, which no task reads."""
ACCURACY = "val/accuracy"


class Metric(NamedTuple):
    """What a metric is. The rest is for the metrics that a task declares."""

    meaning: str
    unit: str
    better: str = ""
    """`min` or `max`, if lower or higher values are better."""
    panel: str = ""
    """Title of the panel of the report that draws it. Metrics with one title share a panel."""
    watched: bool = False
    """The first steps after a resume, and after a failure, are compared with the steps before in this metric."""


@dataclass(frozen=True)
class TaskSpec:
    """One kind of training."""

    build: str | Callable[[Config], Any]
    """Returns the `Task` (`trainer.tasks.Task`) that a config describes; or the import path of such a function, or the
    name of a built-in task, which `trainer.tasks` builds."""
    total_steps: str = "trainer.total_steps"
    """The key with the number of steps."""
    optimizer: str = "trainer.policy.optimizer"
    """The section with the optimizer of the policy."""
    best: str = ""
    """The metric that `val/accuracy` stands for in `trainer.best_metric`, one of `metrics`. Empty: the task measures
    accuracy."""
    objective: str | type = "policy_gradient"
    """`policy_gradient`, `cross_entropy`, a class like `trainer.objectives.Objective`, or its import path. The driver
    and each rank build one."""
    roles: Callable[[Config], tuple[RoleSpec, ...]] | None = None
    """Returns the models of a run, the policy first. None: the policy alone."""
    generates: bool = False
    """Inference engines sample its episodes."""
    trains: bool = True
    """Ranks hold the models of its roles. False: no rank is started."""
    reward_functions: bool = True
    """The functions of `reward.name` give the rewards, unless there is an environment. False: a scorer of the task
    gives them, or all are 0. Then `reward.name` is not read, and no function is tried before the start."""
    unused: tuple[str, ...] = ()
    """Patterns of further keys that the task does not read. They may change when a run resumes, a section of which no
    key is read is not checked, and an override of such a key is refused."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its own, with their defaults. `+algorithm.options.NAME=VALUE` sets one, and the objective reads it in
    `Objective.options`. A resume keeps them, also where `unused` covers `algorithm.*`."""
    may_change: tuple[str, ...] = ()
    """Patterns of further keys that may change when a run resumes."""
    unused_with_path: tuple[str, ...] = ()
    """Further such patterns if `model.path` is set."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """The metrics of this task alone, by name."""

    def roles_of(self, config: Config) -> tuple[RoleSpec, ...]:
        """Return the models of the run that the config describes, the policy first."""
        if self.roles is None:
            return (policy_role(config, like_policy(config, value_of(config, self.optimizer))),)
        roles = self.roles(config)
        check_roles(roles)
        return roles

    def check_options(self, given: Mapping[str, Any]) -> None:
        """Check `algorithm.options`.

        Raises:
            UserError: an option of the task has a value of another type than its default; or neither the task nor, as
                it does not read the section `algorithm`, a function has such an option.
        """
        for name in given.keys() & self.options.keys():
            value, default = given[name], self.options[name]
            kinds = (float, int) if type(default) is float else (type(default),)
            if default is not None and type(value) not in kinds:
                raise UserError(f"{OPTIONS}.{name}={value}: must be a value like its default, {default}")
        unknown = [name for name in given if name not in self.options]
        if unknown and self.options and any(fnmatchcase("algorithm.", pattern) for pattern in self.unused):
            meant = did_you_mean(unknown[0], self.options) or f"the options are {', '.join(self.options)}"
            raise UserError(f"{OPTIONS}.{unknown[0]}={given[unknown[0]]}: the task has no such option; {meant}")

    def compared_by(self, metric: str, mode: str) -> tuple[str, str]:
        """Return the metric that steps are compared by, and its mode (`max` or `min`).

        Args:
            metric: `trainer.best_metric`.
            mode: `trainer.best_mode`.
        """
        return (self.best, self.metrics[self.best].better) if self.best and metric == ACCURACY else (metric, mode)

    @property
    def unread(self) -> tuple[str, ...]:
        """Patterns of all keys that the task never reads."""
        return (*self.unused, *_OF_OTHER_COMMANDS, *(() if self.reward_functions else ("reward.name",)))

    @property
    def watched(self) -> tuple[str, ...]:
        """Its own metrics that are watched after a resume."""
        return tuple(name for name, metric in self.metrics.items() if metric.watched)

    @property
    def shown(self) -> tuple[str, ...]:
        """The metrics of training that the display shows before those of all tasks."""
        own = dict.fromkeys((*self.watched, *([self.best] if self.best and not self.best.startswith("val/") else [])))
        has_loss = self.generates or any(name.endswith("/loss") for name in own)
        return tuple(own) if has_loss else ("policy/loss", *own)

    @property
    def families(self) -> tuple[str, ...]:
        """The beginnings of the names of its own metrics, such as `sft/`."""
        return tuple(dict.fromkeys(name.partition("/")[0] + "/" for name in self.metrics))


_LOSS = "Loss (supervised)"
TASKS: dict[str, TaskSpec] = {
    "rl": TaskSpec("rl", roles=policy_gradient_roles, generates=True, unused_with_path=("sft.*",)),
    "sft": TaskSpec(
        "sft",
        objective="cross_entropy",
        roles=supervised_roles,
        total_steps="sft.steps",
        optimizer="sft.optimizer",
        best="val/loss",
        unused=(
            "algorithm.*",
            "rollout.*",
            "reward.*",
            "environment.*",
            *(f"trainer.policy.optimizer.{name}" for name in ("lr", "scheduler", "warmup_steps", "schedule_steps")),
            "trainer.critic.*",
            "trainer.*_batch_size",
            "trainer.update_epochs",
            "trainer.total_steps",
            "trainer.val_before_train",
            "data.val_sets*",
            "data.curriculum",
            "data.mix.*.curriculum",
        ),
        may_change=("sft.steps",),
        metrics={
            "sft/loss": Metric(
                "Cross-entropy of the tokens to train on (supervised training).", "nats", "min", _LOSS, watched=True
            ),
            "sft/kl": Metric("KL of the policy that sampled the rollouts to the model, with `sft.max_weight`.", "nats"),
            "sft/clip_frac": Metric("Tokens whose importance weight was cut at `sft.max_weight`.", "share"),
            "val/loss": Metric(
                "Cross-entropy of the tokens to train on in the held-out examples (supervised training).",
                "nats",
                "min",
                _LOSS,
            ),
        },
    ),
}
"""The built-in tasks, by the name that `trainer.task` gives them."""


_added: dict[str, Callable[[], TaskSpec]] = {}


def add_task(path: str, load: Callable[[], TaskSpec]) -> None:
    """Make a task known whose module cannot be imported yet; `load` returns it."""
    _added[path] = load


@functools.cache
def find_task(name: str) -> TaskSpec:
    """Return the task that `trainer.task` names.

    Raises:
        UserError: there is none.
    """
    if name in TASKS:
        return TASKS[name]
    if name in _added:
        import_numpy()
        with user_code(f"{KEY}={name}: cannot be imported ({{}})"):
            spec: Any = _added[name]()
    else:
        spec = import_function(name, KEY, known=TASKS)
    if not isinstance(spec, TaskSpec):
        raise UserError(f"{KEY}={name}: is a {type(spec).__name__}; it must be a trainer.tasks.TaskSpec")
    problem = _problem_of(spec)
    if problem is not None:
        raise UserError(f"{KEY}={name}: {problem}")
    return spec


def _problem_of(spec: TaskSpec) -> str | None:
    if spec.best and spec.best not in spec.metrics:
        return f"its `best` is {spec.best}, which its `metrics` do not declare"
    if spec.best and spec.metrics[spec.best].better not in ("min", "max"):
        return f"its `metrics` do not say whether a high or a low {spec.best} is better"
    return None
