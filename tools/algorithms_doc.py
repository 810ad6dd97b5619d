"""Prints `docs/algorithms.md`: every function of `trainer.algorithms` that a key can choose, with its formula."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable

from trainer.algorithms import ADVANTAGES, POLICY_LOSSES, advantages, aggregation, correction, kl, losses
from trainer.config import AlgorithmConfig, LoraConfig, field_docs
from trainer.config.reference import as_written
from trainer.models import lora
from trainer.objectives.check import user_options

INTRO = """# Algorithms

Generated from the docstrings of `trainer/algorithms/` and the schema by `make docs`. Tests compare every function with
a second implementation in plain Python loops, to 1e-9 in float64.

Symbols: B completions of T positions, mask m (1 = completion token), r_t the token reward (and, in losses, the ratio
exp(logp_t - old_logp_t)), R_i the sum of completion i's token rewards, g its group (the completions of one prompt),
n the size of the group, A the advantage, V the value, sg[x] x without its gradient.

A preset is `algorithm=NAME`: a file of a few lines in `conf/algorithm/` that cites its paper. Any function below can be
combined with any other by its key. Options belong to their function: those that a preset sets for one do not follow
when another is chosen, which then has the defaults that this page names. An option that you set and that the chosen
function does not take is an error. Options that are no keys are given as `+algorithm.options.NAME=VALUE`.

An advantage estimator or policy loss of your own is given by import path, with the signature of those here:
[extending.md](extending.md) has an example of each. What it names as a further parameter is computed for it. `values`
gets a critic, `baselines` (estimators) greedy completions, `ref_logprobs` (losses) a reference. A loss with a parameter
`group_ids` sees whole groups."""

LORA = """\
`trainer.policy.lora`, for the critic too. Engines get the adapters (`rollout.lora_sync`), checkpoints hold nothing
else of the model, and exports are merged or the adapter alone (`trainer.hf_save_lora`). The policy without its
adapters is the reference. The frozen weights are held in the precision of the forward pass (bfloat16 on GPUs), and a
job's own merged export has them so; `trainer checkpoint export` merges into the files of `model.path`."""


def section(name: str, key: str, doc: str, options: Iterable[str] = (), function: Callable | None = None) -> list[str]:
    """One name with the keys it takes, and `function`'s defaults for those that are null in the schema."""
    defaults = inspect.signature(function).parameters if function else {}
    named = {f.name for f in dataclasses.fields(AlgorithmConfig)}
    shown = [
        f"`algorithm.{o if o in named else f'options.{o}'}`"
        + (f" ({as_written(defaults[o].default)})" if o in defaults else "")
        for o in options
    ]
    chosen = f"`{key}={name}`" + (f"; options, with their defaults: {', '.join(shown)}" if shown else "")
    return [f"### `{name}`", "", f"{chosen}.", "", *markdown(doc)]


def markdown(doc: str) -> list[str]:
    """A docstring as Markdown: its indented formulas as code, its argument list as it is."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        if block.startswith("    ") or re.match(r"(Args|Returns|Raises):", block):
            lines += ["```text", inspect.cleandoc(block) if block.startswith("    ") else block, "```", ""]
        else:
            lines += [block, ""]
    return lines


def module_doc(title: str, doc: str, names: Iterable[str], key: str) -> list[str]:
    lines = [f"## {title}", "", *markdown(doc)]
    for name in names:
        lines += [f"### `{name}`", "", f"`{key}={name}`, see above.", ""]
    return lines


def page() -> str:
    lines = [INTRO, "", "## Advantages", "", *markdown(inspect.getmodule(ADVANTAGES["grpo"]).__doc__ or "")]
    for name, function in ADVANTAGES.items():
        doc, options = function.__doc__ or "", user_options(function)
        lines += section(name, "algorithm.advantage_estimator", doc, options, function)
    lines += ["## Policy losses", "", *markdown(losses.__doc__ or "")]
    for name, function in POLICY_LOSSES.items():
        doc, options = function.__doc__ or "", user_options(function)
        lines += section(name, "algorithm.policy_loss", doc, options, function)
    lines += module_doc("Aggregation", aggregation.__doc__ or "", aggregation.AGGREGATIONS, "algorithm.aggregation")
    lines += module_doc("KL", kl.kl_penalty.__doc__ or "", kl.KL_ESTIMATORS, "algorithm.kl_estimator")
    for name, controller in (("fixed", kl.FixedKL), ("adaptive", kl.AdaptiveKL)):
        options = ["kl_coef"] if name == "fixed" else ["kl_coef", "kl_target", "kl_horizon"]
        lines += section(name, "algorithm.options.kl_target", controller.__doc__ or "", options)
    lines += ["## Adapters", "", *markdown(lora.__doc__ or ""), LORA, "", *keys("trainer.policy.lora", LoraConfig)]
    lines += ["## Critic", "", "`algorithm.options.value_clip`.", "", *markdown(losses.value_loss.__doc__ or "")]
    weights = f"{correction.__doc__}\n\n{inspect.cleandoc(correction.correction_weights.__doc__ or '')}"
    lines += module_doc("Rollout correction", weights, correction.CORRECTIONS, "algorithm.rollout_correction")
    lines += ["## Shaping and sampling", ""]
    for name, key, doc in (
        ("overlong_penalty", "algorithm.overlong_buffer", advantages.overlong_penalty.__doc__),
        ("informative_groups", "algorithm.options.filter_zero_variance", advantages.informative_groups.__doc__),
    ):
        lines += [f"### `{name}`", "", f"`{key}`.", "", *markdown(doc or "")]
    return "\n".join([*lines, "## Keys", "", *keys("algorithm", AlgorithmConfig)]).rstrip()


def keys(section: str, schema: type) -> list[str]:
    """The keys of a section of the schema as a table."""
    lines, defaults = ["| key | default | meaning |", "|---|---|---|"], schema()
    for name, meaning in field_docs(schema).items():
        value = getattr(defaults, name)
        lines.append(f"| `{section}.{name}` | `{as_written(value)}` | {meaning} |")
    return [*lines, ""]


if __name__ == "__main__":
    print(page())
