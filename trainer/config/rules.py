"""The rules between keys: which values contradict each other, and what a resume may change because of other values.

Sections hold keys with their bounds. What must hold between keys is here, one function of the whole config for each
section, so that no section knows another.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import permutations
from typing import Any

from trainer.config import fields
from trainer.config.algorithm import CORRECTIONS, correction_of, saved_correction
from trainer.config.axes import AXES
from trainer.config.data import GENERATORS, DataConfig, NamedData, SourceConfig, ValSetConfig
from trainer.config.fields import HARMLESS, ResumeRule, changed_keys, config_error, value_of, walk_keys
from trainer.config.rollout_rules import check_environments, check_plan, check_rewards, check_rollout
from trainer.config.schema import Config, instead_of, is_name
from trainer.config.training import CriticConfig, LoraConfig
from trainer.errors import UserError
from trainer.files.uris import is_same, is_url, lies_in, problem_of

_LONGEST_NAME = 200  # bytes; file names end at 255, and some get a suffix
_MODEL_PATHS = ("model.path", "trainer.critic.path")
_WITH_TASKS = "reasoning_gym"
"""The generator whose rows `data.task` chooses."""
_NO_SETS = ("default", "loss", "reward")
"""Names of metrics `val/<name>…`, and of the rows of no named set."""


def validate(config: Config) -> None:
    """Check every value on its own, then what must hold between them.

    Sections that the task does not read are not checked.

    Raises:
        UserError: one sentence that names the key, its value and what is valid.
    """
    for key, value, constraint in walk_keys(config):
        if (problem := constraint.problem(value)) is not None:
            raise config_error(config, key, problem)
    for section, check in RULES:
        if not section or config.reads_section(section):
            check(config)
    config.task.check_options(config.algorithm.options)


def check_names(config: Config) -> None:
    """Refuse names of keys and numbers of steps that the run does not have."""
    for allowed in config.trainer.allow_config_change:
        if not is_name(allowed) and allowed not in [role.key for role in config.roles]:
            problem = f"there is no key or section {allowed}; {instead_of(allowed)}"
            raise config_error(config, "trainer.allow_config_change", problem)
    if late := [step for step in config.trainer.profile if step > config.total_steps]:
        problem = f"the run ends with step {config.total_steps}, before step {late[0]}; choose steps of the run"
        raise config_error(config, "trainer.profile", problem)


def check_trainer(config: Config) -> None:
    """Refuse a layout, paths, savings or a resume that cannot work."""
    trainer = config.trainer
    if trainer.train_batch_size % trainer.mini_batch_size:
        problem = f"must be a multiple of trainer.mini_batch_size={trainer.mini_batch_size}"
        raise config_error(config, "trainer.train_batch_size", problem)
    _check_layout(config)
    if trainer.offload != "none" and not config.rollout.colocate:
        problem = "ranks and engines do not share GPUs; set rollout.colocate=true too"
        raise config_error(config, "trainer.offload", problem)
    _check_paths(config)
    _check_saving(config)
    _check_resume(config)
    if trainer.deadline is not None:
        try:
            datetime.fromisoformat(trainer.deadline).timestamp()
        except (ValueError, OverflowError) as error:
            problem = "must be a time such as 2026-11-21T18:00"
            raise config_error(config, "trainer.deadline", problem) from error
    if trainer.hf_save_lora != "merged" and trainer.policy.lora.rank is None:
        raise config_error(config, "trainer.hf_save_lora", "needs trainer.policy.lora.rank")


def _check_layout(config: Config) -> None:
    trainer = config.trainer
    used = {axis.key: axis for axis in AXES.values() if axis.key and getattr(trainer, axis.key) > 1}
    if trainer.num_workers % trainer.layout_size:
        product = " x ".join(f"trainer.{key}={getattr(trainer, key)}" for key in used)
        raise config_error(config, "trainer.num_workers", f"must be a multiple of {product}")
    if trainer.min_world_size is not None and not trainer.layout_size <= trainer.min_world_size <= trainer.num_workers:
        problem = f"must be from {trainer.layout_size} to trainer.num_workers={trainer.num_workers}"
        raise config_error(config, "trainer.min_world_size", problem)
    for role in config.roles if trainer.deterministic else ():
        if role.sharding.compile:
            setting = f"{role.setting('sharding')}.compile=True"
            problem = "what a kernel is compiled to depends on the sizes that a process meets first; leave it out"
            raise UserError(f"{setting}: cannot be combined with trainer.deterministic=True: {problem}")
    for key, axis in used.items():
        if axis.attention not in ("", config.model.attn_implementation):
            raise config_error(config, f"trainer.{key}", f"needs model.attn_implementation={axis.attention}")
        for role in config.roles if axis.uncompilable else ():
            if role.sharding.compile:
                setting = f"{role.setting('sharding')}.compile=True"
                raise UserError(f"{setting}: cannot be combined with trainer.{key}: {axis.uncompilable}")


def _check_paths(config: Config) -> None:
    trainer, name = config.trainer, config.trainer.run_name
    plain = name not in (".", "..") and "/" not in name and name.isprintable() and name == name.strip()
    if not plain or len(name.encode()) > _LONGEST_NAME:
        raise config_error(
            config,
            "trainer.run_name",
            "must be a plain name without slashes, control characters and spaces around it, at most "
            f"{_LONGEST_NAME} bytes; trainer.run_dir takes a path",
        )
    for key in ("run_dir", "ckpt_path", "export_path", "resume_path", "ckpt_cache_dir"):
        if (getattr(trainer, key) or "").startswith("~"):
            problem = "begins with ~, which only a shell replaces; write the whole path"
            raise config_error(config, f"trainer.{key}", problem)
    for key in ("ckpt_path", "resume_path", "export_path"):
        path = getattr(trainer, key) or ""
        if is_url(path) and (problem_of_url := problem_of(path)):
            raise UserError(f"trainer.{key}: {problem_of_url}")  # without the value, which may hold a password
    if trainer.ckpt_cache_dir is not None:
        if not is_url(trainer.ckpt_path):
            raise config_error(config, "trainer.ckpt_cache_dir", "needs a trainer.ckpt_path in an object store")
        if is_url(trainer.ckpt_cache_dir) or is_same(trainer.ckpt_cache_dir, trainer.run_dir):
            raise config_error(config, "trainer.ckpt_cache_dir", "must be a directory other than trainer.run_dir")
    if config.task.trains:
        _check_apart(config)


def _check_apart(config: Config) -> None:
    """Refuse a directory that is another one, or lies inside it: what is replaced or deleted in one is lost in both.

    The directories beside each other in the run directory, which are the default, are apart.
    """
    run_dir, resume_path = config.trainer.run_dir, config.trainer.resume_path
    ckpt, export, cache, parent = (
        "trainer.ckpt_path",
        "trainer.export_path",
        "trainer.ckpt_cache_dir",
        "trainer.resume_path",
    )
    paths = {key: path for key in (ckpt, export, cache) if (path := value_of(config, key))}
    pairs = [("trainer.run_dir", key) for key in paths]
    if resume_path:
        paths[parent] = os.path.dirname(resume_path.rstrip("/"))
    pairs += [pair for pair in permutations(paths, 2) if set(pair) != {ckpt, parent}]
    paths["trainer.run_dir"] = run_dir
    # Not those of `config.roles`: a config may name a loss that cannot be imported here.
    of_models = {key: value_of(config, key) for key in _MODEL_PATHS}
    models = {key: path for key, path in of_models.items() if path and os.path.isdir(path)}  # not a name of the Hub
    pairs += [(key, other) for key in models for other in (export, cache) if other in paths]
    paths |= models
    for key, other in pairs:
        is_beside = is_same(paths[other], run_dir) and (
            key == "trainer.run_dir" or is_same(paths[key], os.path.join(run_dir, "exports"))
        )
        if lies_in(paths[key], paths[other]) and not is_beside:
            problem = f"is {other}={paths[other]}, or lies inside it; choose a directory beside it"
            raise UserError(f"{key}={paths[key]}: {problem}")


def _check_saving(config: Config) -> None:
    trainer = config.trainer
    if isinstance(trainer.ckpt_interval, str) and trainer.ckpt_interval != "auto":
        raise config_error(config, "trainer.ckpt_interval", "must be a number of steps, -1 or auto")
    for key in ("keep_best", "keep_every"):
        if getattr(trainer, key) > 0 and trainer.max_ckpts_to_keep < 0:
            problem = "all checkpoints are kept; set trainer.max_ckpts_to_keep too"
            raise config_error(config, f"trainer.{key}", problem)
    if trainer.keep_best > 0 and trainer.best_metric.startswith("val/") and not config.validates(0):
        problem = f"trainer.best_metric={trainer.best_metric} is never measured with trainer.val_interval=-1"
        raise config_error(config, "trainer.keep_best", problem)


def _check_resume(config: Config) -> None:
    trainer = config.trainer
    if trainer.resume_mode == "from_path" and not trainer.resume_path:
        raise config_error(config, "trainer.resume_mode", "needs trainer.resume_path, a global_step_N directory")
    if trainer.resume_path and trainer.resume_mode != "from_path":
        raise config_error(config, "trainer.resume_path", "needs trainer.resume_mode=from_path")
    if trainer.load_components and trainer.resume_mode != "from_path":
        problem = "needs trainer.resume_mode=from_path: a run continues with all of its state"
        raise config_error(config, "trainer.load_components", problem)


def check_policy(config: Config) -> None:
    """Refuse betas that are no pair, and settings of adapters that there are none of."""
    betas, lora, name = config.trainer.policy.optimizer.betas, config.trainer.policy.lora, "trainer.policy.lora"
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise config_error(config, "trainer.policy.optimizer.betas", "must be two numbers, each at least 0 and below 1")
    for key in changed_keys(lora, LoraConfig(), name) if lora.rank is None else ():
        raise config_error(config, key, f"needs {name}.rank")


def check_critic(config: Config) -> None:
    """Refuse keys of the critic in a run without one."""
    critic, name = config.trainer.critic, "trainer.critic"
    if critic.warmup_steps >= config.trainer.total_steps:
        problem = f"leaves no step of trainer.total_steps={config.trainer.total_steps} for the policy"
        raise config_error(config, f"{name}.warmup_steps", problem)
    changed = changed_keys(critic, CriticConfig(), name)
    if changed and not any(role.name == "critic" for role in config.roles):
        estimator = config.algorithm.advantage_estimator
        problem = f"algorithm.advantage_estimator={estimator} has no critic; choose algorithm=ppo or drop the key"
        raise config_error(config, changed[0], problem)


# --- algorithm ---


def check_algorithm(config: Config) -> None:
    """Refuse settings of functions that exclude each other."""
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.rollout_correction in CORRECTIONS and algorithm.old_logprobs == "rollout":
        problem = "corrects the engine's log-probs, and algorithm.old_logprobs=rollout takes them as they are"
        raise config_error(config, "algorithm.rollout_correction", problem)
    if algorithm.overlong_buffer > rollout.max_response_tokens:
        problem = f"exceeds rollout.max_response_tokens={rollout.max_response_tokens}"
        raise config_error(config, "algorithm.overlong_buffer", problem)
    penalised = algorithm.overlong_buffer > 0 or (algorithm.kl_in == "reward" and algorithm.kl_coef > 0)
    if algorithm.advantage_estimator == "grpo_passk" and penalised:
        problem = (
            "grpo_passk asks whether a reward reaches 1, which one with a penalty taken off does not; use "
            "algorithm.kl_in=loss and algorithm.overlong_buffer=0"
        )
        raise config_error(config, "algorithm.advantage_estimator", problem)
    _check_kl(config)
    if algorithm.dynamic_sampling:
        check_group_size(config, "algorithm.dynamic_sampling")


def _check_kl(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.kl_in == "reward" and algorithm.kl_estimator.endswith("+"):
        problem = (
            "a straight-through estimator only differs in its gradient, and a reward has none; choose k1, k2, k3 or abs"
        )
        raise config_error(config, "algorithm.kl_estimator", problem)
    if algorithm.kl_controller == "adaptive" and algorithm.kl_coef == 0:
        raise config_error(config, "algorithm.kl_controller", "needs algorithm.kl_coef above 0 to start from")
    if algorithm.ref_sync_interval > 0:
        if "ref_logprobs" not in algorithm.reads:
            problem = "there is no reference model with algorithm.kl_coef=0"
            raise config_error(config, "algorithm.ref_sync_interval", problem)
        if not config.trainer.colocate_roles:
            problem = "needs trainer.colocate_roles=true: the reference takes the weights of the policy beside it"
            raise config_error(config, "algorithm.ref_sync_interval", problem)


def check_group_size(config: Config, key: str) -> None:
    """Refuse groups whose completions cannot differ, because `key` compares the completions of a prompt.

    Raises:
        UserError: there is one completion per prompt, or all are greedy.
    """
    if config.rollout.n < 2:
        raise config_error(config, "rollout.n", f"{key} compares completions of a prompt and needs at least 2")
    if config.rollout.temperature == 0:
        problem = f"greedy completions of a prompt are all equal, and {key} compares them; use a value above 0"
        raise config_error(config, "rollout.temperature", problem)


# --- model, data, sft ---


def check_model(config: Config) -> None:
    """Refuse a shape of the built-in model that cannot exist, or is too short for the run."""
    model, tiny = config.model, config.model.tiny
    if tiny.head_dim % 2:
        raise config_error(config, "model.tiny.head_dim", "must be even: positions turn pairs of its numbers")
    if tiny.num_heads % tiny.num_kv_heads:
        raise config_error(config, "model.tiny.num_kv_heads", f"must divide model.tiny.num_heads={tiny.num_heads}")
    for variable in model.chat_template_kwargs:
        if not variable.isidentifier():
            raise config_error(config, "model.chat_template_kwargs", f"{variable!r} is no name of a variable")
    if model.path is not None or not config.task.trains:
        return
    if config.sft.max_length > tiny.max_position_embeddings:
        raise config_error(config, "sft.max_length", "exceeds model.tiny.max_position_embeddings")
    single_turn = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if tiny.max_position_embeddings < config.longest_sequence == single_turn:
        longest = tiny.max_position_embeddings
        problem = f"with rollout.max_prompt_tokens it exceeds model.tiny.max_position_embeddings={longest}"
        raise config_error(config, "rollout.max_response_tokens", problem)


def check_data(config: Config) -> None:
    """Refuse data that are named twice, or not at all."""
    data, trainer = config.data, config.trainer
    if data.mix:
        _check_mix(config)
    elif data.synthetic:
        if data.train_files or data.val_files:
            problem = (
                "data.train_files and data.val_files cannot be combined with a generator; choose data=files or drop "
                "them"
            )
            raise config_error(config, "data.synthetic", problem)
        _check_generator(config, "data", data.synthetic, ("train_size", "val_size"))
    elif not data.train_files and config.reads("data.train_files"):
        problem = "name at least one file, or choose a data group such as data=arithmetic"
        raise config_error(config, "data.train_files", problem)
    has_validation = data.synthetic or data.val_files or data.val_sets
    is_validated = config.reads("data.val_files") and config.reads("trainer.val_interval")
    if not has_validation and trainer.val_interval > 0 and is_validated:
        raise config_error(config, "trainer.val_interval", "needs data.val_files; name some or set it to -1")
    _check_generator_task(config, "data")
    _check_curriculum(config, "data.curriculum")
    for name, named in config.sections(NamedData):
        _check_named_data(config, name, named)


def _check_mix(config: Config) -> None:
    """Refuse the keys of a single source."""
    usual = DataConfig()
    for key in ("train_files", "synthetic", "train_size", "curriculum", "task"):
        if getattr(config.data, key) != getattr(usual, key):
            instead = "choose data=files" if key == "synthetic" else "drop the key"
            successor = key.removeprefix("train_")
            problem = f"data.mix names the training data; {instead}, or set data.mix.NAME.{successor}"
            raise config_error(config, f"data.{key}", problem)


def _check_named_data(config: Config, name: str, named: NamedData) -> None:
    """Check a source of `data.mix` or a set of `data.val_sets`."""
    if named.synthetic is None:
        if not named.files:
            raise config_error(config, f"{name}.files", "name at least one file, or a generator with synthetic")
    elif named.files:
        raise config_error(config, f"{name}.synthetic", "files cannot be combined with a generator; drop one")
    else:
        _check_generator(config, name, named.synthetic, ("size",))
    _check_generator_task(config, name)
    if isinstance(named, SourceConfig):
        _check_curriculum(config, f"{name}.curriculum")
    if isinstance(named, ValSetConfig):
        _check_val_set(config, name, named)


def _check_val_set(config: Config, name: str, named: ValSetConfig) -> None:
    if name.rpartition(".")[2] in _NO_SETS:
        raise UserError(f"{name}: a set cannot have this name, which stands for something else; choose another")
    if named.n > 1 and named.temperature == 0:
        problem = "greedy completions of a row are all equal; choose a temperature above 0"
        raise config_error(config, f"{name}.n", problem)
    longest = config.rollout.max_response_tokens
    if named.max_response_tokens is not None and named.max_response_tokens > longest:
        problem = f"engines complete at most rollout.max_response_tokens={longest} tokens; raise that key too"
        raise config_error(config, f"{name}.max_response_tokens", problem)


def _check_generator(config: Config, section: str, generator: str, sizes: Sequence[str]) -> None:
    for size in sizes:
        if value_of(config, f"{section}.{size}") < 1:
            raise config_error(config, f"{section}.{size}", "a generator needs a number of examples")
    options = GENERATORS[generator]
    if options is None:
        return
    key = f"{section}.synthetic_args"
    for option, value in value_of(config, key).items():
        if type(value) is not int:
            raise config_error(config, key, f"{option} must be a whole number")
        if option not in options:
            problem = f"{section}.synthetic={generator} takes {', '.join(options)}, not {option}"
            raise config_error(config, key, problem)


def _check_generator_task(config: Config, section: str) -> None:
    """Check that there is a task if, and only if, the generator has tasks."""
    task, key = value_of(config, f"{section}.task"), f"{section}.synthetic={_WITH_TASKS}"
    has_tasks = value_of(config, f"{section}.synthetic") == _WITH_TASKS
    if has_tasks and task is None:
        raise config_error(config, f"{section}.task", f"{key} needs the name of a task")
    if task is not None and not has_tasks:
        raise config_error(config, f"{section}.task", f"is read by {key} alone")


def _check_curriculum(config: Config, key: str) -> None:
    curriculum = value_of(config, key)
    if curriculum is not None and ":" not in curriculum:
        raise config_error(config, key, "must be an import path package.module:function")


def check_sft(config: Config) -> None:
    """Refuse settings of rollouts as data without rollouts, and weights that fit no files."""
    sft, data = config.sft, config.data
    files = data.train_files + [file for source in data.mix.values() for file in source.files]
    if sft.source == "rollouts" and not files:
        problem = "needs data.train_files, the files that logger.save_rollouts=true makes a run write"
        raise config_error(config, "sft.source", problem)
    for key in ("sft.min_reward", "sft.max_weight"):
        if sft.source != "rollouts" and value_of(config, key) is not None:
            raise config_error(config, key, "is for rollouts; set sft.source=rollouts or drop the key")


def check_logger(config: Config) -> None:
    """Refuse services whose package is missing."""
    for service in ("mlflow", "trackio"):  # the package and the extra have the name of the section
        if getattr(config.logger, service).enabled and importlib.util.find_spec(service) is None:
            problem = f"the package is missing; install the extra `{service}` (docs/install.md)"
            raise config_error(config, f"logger.{service}.enabled", problem)


RULES: tuple[tuple[str, Callable[[Config], None]], ...] = (
    ("", check_names),
    ("trainer", check_trainer),
    ("trainer.policy", check_policy),
    ("trainer.critic", check_critic),
    ("algorithm", check_algorithm),
    ("model", check_model),
    ("data", check_data),
    ("", check_rewards),
    ("", check_environments),
    ("rollout", check_rollout),
    ("sft", check_sft),
    ("logger", check_logger),
    ("plan", check_plan),
)
"""Each rule with the section whose keys it checks: a task that does not read the section is not checked. Empty: the
rule looks for the sections itself."""


@dataclass(frozen=True)
class SavedRun:
    """The run as a checkpoint has it."""

    config: Mapping[str, Any]
    """The nested config, under the names of today."""
    roles: Collection[str]
    """Names of the roles that the checkpoint holds."""


def resume_rules(config: Config, saved: SavedRun | None = None) -> dict[str, ResumeRule]:
    """Return what a resume may do with each key.

    Args:
        saved: the run to resume. None: only the rules of the fields.
    """
    rules = fields.resume_rules(config)
    if saved is not None:
        for of_values in (_of_critic, _of_algorithm, _of_tools):
            rules |= of_values(config, saved)
    return rules


def _of_critic(config: Config, saved: SavedRun) -> dict[str, ResumeRule]:
    if "critic" in saved.roles and any(role.name == "critic" for role in config.roles):
        return {}
    return {key: HARMLESS for key, *_ in walk_keys(config.trainer.critic, "trainer.critic")}  # no critic is restored


def _of_algorithm(config: Config, saved: SavedRun) -> dict[str, ResumeRule]:
    rules = {}
    if saved_correction(saved.config) == correction_of(config):
        rules["algorithm.rollout_correction"] = HARMLESS
    if ("critic" in saved.roles) != ("critic" in {role.name for role in config.roles}):
        rules["algorithm.advantage_estimator"] = ResumeRule("never", "only one of the two has a critic")
    before, now = saved.config.get("algorithm", {}).get("kl_controller"), config.algorithm.kl_controller
    if before == now == "adaptive":
        reason = "the adaptive controller has steered the weight since"
        rules["algorithm.kl_coef"] = ResumeRule("never", reason, ("state",))
    return rules


def _of_tools(config: Config, saved: SavedRun) -> dict[str, ResumeRule]:
    """`model.tool_format` matters where an environment writes conversations by the template of a model."""
    has_format = config.model.path is not None and any(one.name is not None for one in config.environments)
    return {} if has_format else {"model.tool_format": HARMLESS}
