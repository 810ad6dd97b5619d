"""The rules between keys: which values contradict each other, and what a resume may change because of other values.

Sections hold keys with their bounds. What must hold between keys is here, so that no section knows another: for each
section a generator of rules, which yields whether a rule is broken, the key, and the end of the sentence about it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import permutations
from typing import Any

from trainer.config import fields
from trainer.config.algorithm import (
    CORRECTIONS,
    JSD,
    TEACHER_KEY,
    TEACHER_URL,
    TeacherConfig,
    correction_of,
    saved_correction,
)
from trainer.config.data import EXO, GENERATORS, SIMPO, SMOOTHED, DataConfig, NamedData, SourceConfig, ValSetConfig
from trainer.config.engines import engines_with
from trainer.config.fields import HARMLESS, ResumeRule, changed_keys, config_error, value_of, walk_keys
from trainer.config.rollout import MODEL, REMOTE, EnvironmentConfig, RewardConfig, RolloutConfig
from trainer.config.schema import Config, is_name, no_such_key
from trainer.config.trainer import LONGEST_OF_TINY, PROCESSES, SERVICES, THIS_PROCESS, CriticConfig, LoraConfig
from trainer.errors import UserError
from trainer.files.uris import is_same, is_url, lies_in, problem_of, split_http_url
from trainer.process.model_server import TOKEN

Rules = Iterator[tuple[Any, str, str]]
"""Whether the rule is broken, the key to name, and what is wrong. Those after a broken rule are not made."""

_LONGEST_NAME = 200  # bytes; file names end at 255, and some get a suffix
_ALL_ADDRESSES = ("", "0.0.0.0", "::")
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
    for section, rules in RULES:
        if section and not config.reads_section(section):
            continue
        for is_broken, key, problem in rules(config):
            if is_broken:
                raise config_error(config, key, problem)
    config.task.check_options(config.algorithm.options)


# --- trainer ---


def _trainer(config: Config) -> Rules:
    t = config.trainer
    is_odd = t.train_batch_size % t.mini_batch_size
    yield is_odd, "trainer.train_batch_size", f"must be a multiple of trainer.mini_batch_size={t.mini_batch_size}"
    yield from _layout(config)
    problem = "ranks and engines do not share GPUs; set rollout.colocate=true too"
    yield t.offload != "none" and not config.rollout.colocate, "trainer.offload", problem
    problem = "needs all ranks on the machine of the driver; leave trainer.ray_address at null or processes"
    yield t.copy_steps and t.ray_address not in (None, PROCESSES, THIS_PROCESS), "trainer.copy_steps", problem
    yield from _paths(config)
    keeps_some, never = t.keep_best > 0, config.compared_by[0].startswith("val/") and not config.validates(0)
    is_word = isinstance(t.ckpt_interval, str) and t.ckpt_interval != "auto"
    yield is_word, "trainer.ckpt_interval", "must be a number of steps, -1 or auto"
    problem = "all checkpoints are kept; set trainer.max_ckpts_to_keep too"
    yield keeps_some and t.max_ckpts_to_keep < 0, "trainer.keep_best", problem
    problem = f"trainer.best_metric={t.best_metric} is never measured with trainer.val_interval=-1"
    yield keeps_some and never, "trainer.keep_best", problem
    forks = t.resume_mode == "from_path"
    problem = "needs trainer.resume_path, a global_step_N directory"
    yield forks and not t.resume_path, "trainer.resume_mode", problem
    yield t.resume_path and not forks, "trainer.resume_path", "needs trainer.resume_mode=from_path"
    problem = "needs trainer.resume_mode=from_path: a run continues with all of its state"
    yield t.load_components and not forks, "trainer.load_components", problem
    is_time = t.deadline is None or _can(lambda: datetime.fromisoformat(str(t.deadline)).timestamp())
    yield not is_time, "trainer.deadline", "must be a time such as 2026-11-21T18:00"
    for name in t.allow_config_change:
        if not is_name(name) and name not in [one.path_key for one in (*config.roles, *config.servers)]:
            yield True, "trainer.allow_config_change", no_such_key(name)


def _can(call: Callable[[], Any]) -> bool:
    """Return whether a text can be read so."""
    try:
        return call() is not False
    except (ValueError, OverflowError):
        return False


def _layout(config: Config) -> Rules:
    t = config.trainer
    product = " x ".join(f"trainer.{key}={size}" for key, size in t.layout.items() if size > 1)
    yield t.num_workers % t.layout_size, "trainer.num_workers", f"must be a multiple of {product}"
    if t.ray_address == THIS_PROCESS:
        problem, r = "trainer.ray_address=this_process has one rank, and one engine that waits for it", config.rollout
        yield t.num_workers > 1, "trainer.num_workers", f"choose 1: {problem}"
        if config.task.generates:
            yield r.engine != "transformers", "rollout.engine", f"choose rollout=transformers: {problem}"
            yield r.num_engines > 1, "rollout.num_engines", f"choose 1: {problem}"
            yield r.ahead, "rollout.ahead", f"choose 0: {problem}"
            yield r.in_flight_updates, "rollout.in_flight_updates", f"choose false: {problem}"
    is_outside = t.min_world_size is not None and not t.layout_size <= t.min_world_size <= t.num_workers
    yield is_outside, "trainer.min_world_size", f"must be from {t.layout_size} to trainer.num_workers={t.num_workers}"
    is_shared = t.context_parallel_size > 1
    needs = is_shared and config.model.attn_implementation != "sdpa"
    yield needs, "trainer.context_parallel_size", "needs model.attn_implementation=sdpa"
    uncompilable = {
        "trainer.deterministic=True: what a kernel is compiled to depends on the sizes that a process meets first; "
        "leave it out": t.deterministic,
        "trainer.context_parallel_size: its ranks communicate inside a block": is_shared,
        # Sizes of their DTensors are maxima of symbols, for which Inductor has no code ("_nary_sym_max is not an
        # OpOverload").
        "trainer.tensor_parallel_size: torch 2.13 fails to compile blocks that several ranks share for any number of "
        "tokens": t.tensor_parallel_size > 1,
    }
    for other in filter(uncompilable.get, uncompilable):
        for role in config.roles:
            if role.sharding.compile:
                raise UserError(f"{role.setting('sharding')}.compile=True: cannot be combined with {other}")


def _paths(config: Config) -> Rules:
    t, name = config.trainer, config.trainer.run_name
    is_plain = name not in (".", "..") and "/" not in name and name.isprintable() and name == name.strip()
    problem = (
        "must be a plain name without slashes, control characters and spaces around it, at most "
        f"{_LONGEST_NAME} bytes; trainer.run_dir takes a path"
    )
    yield not is_plain or len(name.encode()) > _LONGEST_NAME, "trainer.run_name", problem
    for key in ("run_dir", "ckpt_path", "export_path", "resume_path", "ckpt_cache_dir"):
        problem = "begins with ~, which only a shell replaces; write the whole path"
        yield (getattr(t, key) or "").startswith("~"), f"trainer.{key}", problem
    for key in ("ckpt_path", "resume_path", "export_path"):
        path = getattr(t, key) or ""
        if is_url(path) and (problem_of_url := problem_of(path)):
            raise UserError(f"trainer.{key}: {problem_of_url}")  # without the value, which may hold a password
    if t.ckpt_cache_dir is not None:
        key = "trainer.ckpt_cache_dir"
        yield not is_url(t.ckpt_path), key, "needs a trainer.ckpt_path in an object store"
        is_same_dir = is_url(t.ckpt_cache_dir) or is_same(t.ckpt_cache_dir, t.run_dir)
        yield is_same_dir, key, "must be a directory other than trainer.run_dir"
    if config.task.trains:
        _check_apart(config)


def _check_apart(config: Config) -> None:
    """Refuse a directory that is another one, or lies inside it: what is replaced or deleted in one is lost in both.

    The directories beside each other in the run directory, which are the default, are apart.
    """
    run_dir, resume_path = config.trainer.run_dir, config.trainer.resume_path
    ckpt, parent, own = "trainer.ckpt_path", "trainer.resume_path", "trainer.run_dir"
    deleted = ("trainer.export_path", "trainer.ckpt_cache_dir")
    paths = {key: path for key in (ckpt, *deleted) if (path := value_of(config, key))}
    pairs = [(own, key) for key in paths]
    if resume_path:
        paths[parent] = os.path.dirname(resume_path.rstrip("/"))
    pairs += [pair for pair in permutations(paths, 2) if set(pair) != {ckpt, parent}]
    # Not those of `config.roles`: a config may name a loss that cannot be imported here.
    of_models = {key: value_of(config, key) for key in ("model.path", "trainer.critic.path", "reward.model.path")}
    of_models |= {f"{TEACHER_KEY}.{name}".rstrip("."): path for name, path in config.algorithm.teacher.paths.items()}
    models = {key: path for key, path in of_models.items() if path and os.path.isdir(path)}  # not a name of the Hub
    pairs += [(key, other) for key in models for other in deleted if other in paths]
    paths |= {own: run_dir, **models}
    for key, other in pairs:
        is_beside = is_same(paths[other], run_dir) and (
            key == own or is_same(paths[key], os.path.join(run_dir, "exports"))
        )
        if lies_in(paths[key], paths[other]) and not is_beside:
            problem = f"is {other}={paths[other]}, or lies inside it; choose a directory beside it"
            raise UserError(f"{key}={paths[key]}: {problem}")


def _policy(config: Config) -> Rules:
    optimizer, lora, name = config.trainer.policy.optimizer, config.trainer.policy.lora, "trainer.policy.lora"
    betas = optimizer.betas
    is_pair = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
    problem = "trains no adapters, which stay on AdamW; choose adamw, or drop trainer.policy.lora.rank"
    yield optimizer.name == "muon" and lora.rank is not None, "trainer.policy.optimizer.name", problem
    yield not is_pair, "trainer.policy.optimizer.betas", "must be two numbers, each at least 0 and below 1"
    for key in changed_keys(lora, LoraConfig(), name):
        yield lora.rank is None, key, f"needs {name}.rank"


def _critic(config: Config) -> Rules:
    critic, name = config.trainer.critic, "trainer.critic"
    problem = f"leaves no step of trainer.total_steps={config.trainer.total_steps} for the policy"
    yield critic.warmup_steps >= config.trainer.total_steps, f"{name}.warmup_steps", problem
    for key in changed_keys(critic, CriticConfig(), name):
        estimator = config.algorithm.advantage_estimator
        problem = f"algorithm.advantage_estimator={estimator} has no critic; choose algorithm=ppo or drop the key"
        yield not any(role.name == "critic" for role in config.roles), key, problem


# --- algorithm ---


def _algorithm(config: Config) -> Rules:
    a, rollout = config.algorithm, config.rollout
    problem = "corrects the engine's log-probs, and algorithm.old_logprobs=rollout takes them as they are"
    is_twice = a.rollout_correction in CORRECTIONS and a.old_logprobs == "rollout"
    yield is_twice, "algorithm.rollout_correction", problem
    is_long = a.overlong_buffer > rollout.max_response_tokens
    yield is_long, "algorithm.overlong_buffer", f"exceeds rollout.max_response_tokens={rollout.max_response_tokens}"
    is_penalised = a.overlong_buffer > 0 or (a.kl_in == "reward" and a.kl_coef > 0)
    problem = (
        "grpo_passk asks whether a reward reaches 1, which one with a penalty taken off does not; use "
        "algorithm.kl_in=loss and algorithm.overlong_buffer=0"
    )
    yield a.advantage_estimator == "grpo_passk" and is_penalised, "algorithm.advantage_estimator", problem
    problem = (
        "a straight-through estimator only differs in its gradient, and a reward has none; choose k1, k2, k3 or abs"
    )
    yield a.kl_in == "reward" and a.kl_estimator.endswith("+"), "algorithm.kl_estimator", problem
    problem = "needs algorithm.kl_coef above 0 to start from"
    yield a.adapts_kl and a.kl_coef == 0, "algorithm.options.kl_target", problem
    problem, is_copied = "there is no reference model with algorithm.kl_coef=0", a.ref_sync_interval > 0
    yield is_copied and "ref_logprobs" not in a.reads, "algorithm.ref_sync_interval", problem
    yield from _distillation(config)
    if a.dynamic_sampling:
        check_group_size(config, "algorithm.dynamic_sampling")


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


def _distillation(config: Config) -> Rules:
    a, teacher, name = config.algorithm, config.algorithm.teacher, "algorithm.teacher"
    either = f"needs {TEACHER_KEY} or {TEACHER_URL}"
    yield a.opd_kl_coef > 0 and not teacher.exists, "algorithm.opd_kl_coef", either
    problem = "trains nothing without algorithm.opd_kl_coef above 0, because all advantages are 0"
    yield a.advantage_estimator == "zero" and a.opd_kl_coef == 0, "algorithm.advantage_estimator", problem
    is_read = not teacher.exists or a.opd_kl_coef > 0 or a.reads_teacher_logprobs
    problem = "nothing reads the teacher; set algorithm.opd_kl_coef, or algorithm.advantage_estimator=reverse_kl"
    yield not is_read, TEACHER_KEY if teacher.url is None else TEACHER_URL, problem
    given = TeacherConfig(path=teacher.path, url=teacher.url, temperature=teacher.temperature)
    for key in changed_keys(teacher, given, name):
        yield a.opd_kl_coef == 0, key, "needs algorithm.opd_kl_coef above 0"
        yield key == f"{name}.beta" and teacher.divergence != JSD, key, f"needs {name}.divergence={JSD}"
        problem = f"needs {TEACHER_URL} and a divergence over the vocabulary"
        yield key == f"{name}.top_k" and (teacher.url is None or a.vocabulary_divergence is None), key, problem
    problem = f"sampled tokens show a divergence at rollout.temperature={config.rollout.temperature} alone; choose it"
    is_other = teacher.exists and teacher.temperature != config.rollout.temperature
    yield is_other and a.reads_teacher_logprobs, f"{name}.temperature", f"{problem}, or forward, reverse or jsd"
    yield not teacher.exists and teacher.temperature != 1, f"{name}.temperature", either
    mix = config.data.mix
    problem = f"the teacher is on the ranks ({TEACHER_KEY}) or on a server; drop one of the two"
    yield teacher.path is not None and teacher.url is not None, TEACHER_URL, problem
    key, by_source = (TEACHER_URL, teacher.urls) if teacher.url is not None else (TEACHER_KEY, teacher.paths)
    if "" not in by_source and teacher.exists:
        unknown, unmapped = sorted(by_source.keys() - mix.keys()), sorted(mix.keys() - by_source.keys())
        yield unknown, key, f"data.mix has no source {', '.join(unknown)}; name its sources, or give one teacher"
        yield unmapped, key, f"names no teacher for data.mix.{', data.mix.'.join(unmapped)}; name one for each source"
    problem = "several teachers on the ranks show the tokens that were sampled alone; choose sampled, or servers"
    several = teacher.path is not None and "" not in by_source
    yield several and a.vocabulary_divergence is not None, "algorithm.teacher.divergence", problem
    for url in teacher.urls.values():
        yield from _address(TEACHER_URL, url)
    if teacher.url is not None:
        problem = "a server gives the log-probs of temperature 1; choose 1, or a teacher on the ranks"
        yield teacher.temperature != 1, "algorithm.teacher.temperature", problem
        problem = f"splits the vocabulary, and {TEACHER_URL} gives its likeliest tokens; choose 1, or sampled"
        splits = config.trainer.tensor_parallel_size > 1 and a.vocabulary_divergence is not None
        yield splits, "trainer.tensor_parallel_size", problem


def _address(key: str, url: str) -> Rules:
    yield "@" in url, key, f"an address must hold no password; the token of the servers is the variable {TOKEN}"
    parts = split_http_url(url)
    is_wrong = parts is None or parts.path not in ("", "/") or parts.query or parts.fragment
    yield is_wrong, key, f"{url} is no address of a server; write http://HOST:PORT"


# --- model, data, sft ---


def _model(config: Config) -> Rules:
    model = config.model
    yield model.tiny.hidden_size % 32, "model.tiny.hidden_size", "must be a multiple of 32, the size of a head"
    for variable in model.chat_template_kwargs:
        yield not variable.isidentifier(), "model.chat_template_kwargs", f"{variable!r} is no name of a variable"
    if model.path is not None or not config.task.trains:
        return
    longest = f"{LONGEST_OF_TINY}, the longest sequence of the built-in model"
    if not config.task.generates:
        yield config.longest_row > LONGEST_OF_TINY, config.task.longest, f"exceeds {longest}"
        return
    yield config.sft.max_length > LONGEST_OF_TINY, "sft.max_length", f"exceeds {longest}"
    single_turn = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    is_long = LONGEST_OF_TINY < config.longest_sequence == single_turn
    yield is_long, "rollout.max_response_tokens", f"with rollout.max_prompt_tokens it exceeds {longest}"


def _data(config: Config) -> Rules:
    data = config.data
    if data.mix:
        for key in ("train_files", "synthetic", "train_size", "curriculum"):
            instead = "choose data=files" if key == "synthetic" else "drop the key"
            successor = key.removeprefix("train_")
            problem = f"data.mix names the training data; {instead}, or set data.mix.NAME.{successor}"
            yield getattr(data, key) != getattr(DataConfig(), key), f"data.{key}", problem
    elif data.synthetic:
        problem = (
            "data.train_files and data.val_files cannot be combined with a generator; choose data=files or drop them"
        )
        yield data.train_files or data.val_files, "data.synthetic", problem
        yield from _generator(config, "data", data.synthetic, ("train_size", "val_size"))
    else:
        problem = "name at least one file, or choose a data group such as data=arithmetic"
        yield not data.train_files and config.reads("data.train_files"), "data.train_files", problem
    has_validation = data.synthetic or data.val_files or data.val_sets
    is_validated = config.reads("data.val_files") and config.reads("trainer.val_interval")
    is_missing = not has_validation and config.trainer.val_interval > 0 and is_validated
    yield is_missing, "trainer.val_interval", "needs data.val_files; name some or set it to -1"
    yield _no_path(data.curriculum), "data.curriculum", "must be an import path package.module:function"
    for name, named in config.sections(NamedData):
        yield from _named_data(config, name, named)


def _no_path(path: str | None) -> bool:
    return path is not None and ":" not in path


def _named_data(config: Config, name: str, named: NamedData) -> Rules:
    """A source of `data.mix` or a set of `data.val_sets`."""
    if named.synthetic is None:
        yield not named.files, f"{name}.files", "name at least one file, or a generator with synthetic"
    else:
        yield named.files, f"{name}.synthetic", "files cannot be combined with a generator; drop one"
        yield from _generator(config, name, named.synthetic, ("size",))
    if isinstance(named, SourceConfig):
        yield _no_path(named.curriculum), f"{name}.curriculum", "must be an import path package.module:function"
        yield named.replay and not named.files, f"{name}.replay", "needs files of rollouts, not a generator"
    if isinstance(named, ValSetConfig):
        if name.rpartition(".")[2] in _NO_SETS:
            raise UserError(f"{name}: a set cannot have this name, which stands for something else; choose another")
        problem = "greedy completions of a row are all equal; choose a temperature above 0"
        yield named.n > 1 and named.temperature == 0, f"{name}.n", problem
        longest = config.rollout.max_response_tokens
        problem = f"engines complete at most rollout.max_response_tokens={longest} tokens; raise that key too"
        yield (named.max_response_tokens or 0) > longest, f"{name}.max_response_tokens", problem


def _generator(config: Config, section: str, generator: str, sizes: Sequence[str]) -> Rules:
    for size in sizes:
        key = f"{section}.{size}"
        yield value_of(config, key) < 1, key, "a generator needs a number of examples"
    options, key = GENERATORS[generator], f"{section}.synthetic_args"
    given = value_of(config, key)
    if options is None:
        if not given.get("task"):
            raise UserError(f"{key}.task: {section}.synthetic={generator} needs the name of a task")
        return
    for option, value in given.items():
        yield type(value) is not int, key, f"{option} must be a whole number"
        problem = f"{section}.synthetic={generator} takes {', '.join(options)}, not {option}"
        yield option not in options, key, problem


# --- rewards, environments ---


def _rewards(config: Config) -> Rules:
    models: set[str | None] = set()
    for name, reward in config.sections(RewardConfig):
        is_list = isinstance(reward.name, list) and reward.name and all(isinstance(item, str) for item in reward.name)
        problem = "must be a name, or a list of names; where an environment gives the rewards, leave reward.* out"
        yield not (isinstance(reward.name, str) or is_list), f"{name}.name", problem
        names = reward.names()
        yield len(set(names)) < len(names), f"{name}.name", "names a reward twice; give it a weight instead"
        problem = f"must have a weight for each of the {len(names)} rewards of {name}.name"
        yield reward.weights and len(reward.weights) != len(names), f"{name}.weights", problem
        yield MODEL in names and len(names) > 1, f"{name}.name", f"{MODEL} gives the whole reward; name it alone"
        is_server = reward.model.url is not None
        key, own = f"{name}.model.{'url' if is_server else 'path'}", reward.model.url or reward.model.path
        models.add(own)
        problem = f"{MODEL} needs {key}, the directory of a reward model, or {name}.model.url, a server with one"
        yield own is None and reward.is_model, f"{name}.name", problem
        problem = "a reward model is on a server or on the ranks; drop one"
        yield is_server and reward.model.path is not None, key, problem
        yield len(models - {None}) > 1, key, "is a second reward model; a run has one"
        problem = f"is read by the reward {MODEL} alone; set {name}.name={MODEL}, or leave it out"
        yield own is not None and not reward.is_model, key, problem
        if reward.model.url is not None:
            yield from _address(key, reward.model.url)
        is_lost, key = reward.url is None and REMOTE in names, f"{name}.url"
        yield is_lost, f"{name}.name", f"remote needs {key}, the address of the server"
        if reward.url is not None:
            yield REMOTE not in names, key, f"is used by the reward remote alone; add it to {name}.name"
            parts = split_http_url(reward.url)
            yield parts is None, key, "must be an address such as http://judge:8000/score"
            if parts is not None and "@" in parts.netloc:  # the value is not shown
                raise UserError(f"{key}: holds credentials, which would be saved; use {name}.authorization_env")


def _environments(config: Config) -> Rules:
    first = config.rollout.max_prompt_tokens
    for name, environment in config.sections(EnvironmentConfig):
        if environment.name is None:
            continue
        yield ":" not in environment.name, f"{name}.name", "must be an import path package.module:Class"
        if environment.max_tokens > 0:
            problem = f"must be above rollout.max_prompt_tokens={first}: the first messages may have as many"
            yield environment.max_tokens <= first, f"{name}.max_tokens", problem
            is_long = config.model.path is None and config.task.trains and environment.max_tokens > LONGEST_OF_TINY
            problem = f"exceeds {LONGEST_OF_TINY}, the longest sequence of the built-in model"
            yield is_long, f"{name}.max_tokens", problem
        problem = f"is no address that agents can use; set {name}.agent_url to one"
        host, port = environment.agent_listens
        yield host in _ALL_ADDRESSES and environment.agent_url is None, f"{name}.agent_address", problem
        yield not 0 <= port <= 65535, f"{name}.agent_address", "must be HOST or HOST:PORT"
        is_penalised = config.algorithm.overlong_buffer and not name.startswith("data.val_sets.")  # in training alone
        problem = f"is for one completion a prompt; set it to 0, or drop {name}.name"
        yield is_penalised, "algorithm.overlong_buffer", problem


# --- rollout ---


def _rollout(config: Config) -> Rules:
    rollout, engine, own = config.rollout, config.engine, f"rollout.engine={config.rollout.engine}"
    problem = f"{own} runs on one device; choose {engines_with('tensor_parallel')}"
    is_split = rollout.tensor_parallel_size > 1 and not engine.tensor_parallel
    yield is_split, "rollout.tensor_parallel_size", problem
    problem = f"{own} takes none; choose {engines_with('engine_args')}"
    yield rollout.engine_args and not engine.engine_args, "rollout.engine_args", problem
    yield from _servers(config)
    rollout.logprob_limit("float32", "cpu")
    yield rollout.colocate and not engine.gpus, "rollout.colocate", f"{own} takes no GPUs; choose false"
    shares = "engines that share the GPUs of the ranks cannot generate while these train; choose"
    yield rollout.colocate and rollout.ahead > 0, "rollout.ahead", f"{shares} 0, or rollout.colocate=false"
    key = "rollout.in_flight_updates"
    if rollout.in_flight_updates:
        instead = f"choose rollout={engines_with('streaming')}, or rollout.ahead=1 instead"
        yield not engine.streaming, key, f"{own} takes weights only when it generates nothing; {instead}"
        problem = "engines take new weights before a batch of rollout.ahead is complete; choose one of the two"
        yield rollout.ahead > 0, key, problem
        yield rollout.colocate, key, f"{shares} false, or rollout.colocate=false"
    else:
        is_changed = rollout.max_staleness != RolloutConfig().max_staleness
        yield is_changed, "rollout.max_staleness", f"needs {key}=true"
    rank, most, key = config.trainer.policy.lora.rank, engine.max_lora_rank, "rollout.lora_sync"
    yield rank is None and rollout.lora_sync != "auto", key, "needs trainer.policy.lora.rank"
    if rank is not None and rollout.lora_sync == "adapter":
        yield not most, key, f"{own} serves no adapters; choose merged or rollout={engines_with('max_lora_rank')}"
        yield rank > most, key, f"{own} serves adapters up to rank {most}; choose merged"


def _servers(config: Config) -> Rules:
    rollout, served, key = config.rollout, config.engine.served, "rollout.urls"
    own = f"rollout.engine={rollout.engine}"
    yield rollout.urls and not served, key, f"{own} uses no servers; choose server"
    yield served and not rollout.urls, key, f"{own} needs the addresses of servers"
    for url in rollout.urls:
        yield from _address(key, url)
    yield len({url.rstrip("/") for url in rollout.urls}) < len(rollout.urls), key, "names a server twice"
    problem = f"there is one engine for each of the {len(rollout.urls)} rollout.urls; leave this key out"
    yield rollout.urls and rollout.num_engines != len(rollout.urls), "rollout.num_engines", problem


def _fleet(config: Config) -> Rules:
    rollout, key = config.rollout, "rollout.fleet"
    if not rollout.fleet:
        yield rollout.num_engines == 0, "rollout.num_engines", f"without engines of its own the job needs {key}=true"
        return
    own = f"rollout.engine={rollout.engine}"
    yield config.engine.served, key, f"{own} speaks to servers that were there before; choose another engine"
    yield "shared_memory" not in config.engine.transports, key, f"{own} takes no weights from files"
    problem = f"{key} needs delta or shared_memory"
    yield rollout.weight_sync not in ("auto", "delta", "shared_memory"), "rollout.weight_sync", problem
    yield rollout.colocate, key, "engines that join share no GPU with ranks; set rollout.colocate=false"
    problem = "engines that join get whole weights; choose merged, or leave this key out"
    yield rollout.lora_sync == "adapter", "rollout.lora_sync", problem


def _sft(config: Config) -> Rules:
    data, are_rollouts = config.data, config.sft.source == "rollouts"
    files = data.train_files + [file for source in data.mix.values() for file in source.files]
    problem = "needs data.train_files, the files that logger.save_rollouts=true makes a run write"
    yield are_rollouts and not files, "sft.source", problem
    for key in ("sft.min_reward", "sft.max_weight"):
        problem = "is for rollouts; set sft.source=rollouts or drop the key"
        yield not are_rollouts and value_of(config, key) is not None, key, problem


def _dpo(config: Config) -> Rules:
    dpo = config.dpo
    problem = f"dpo.loss_type={dpo.loss_type} does not read it; set it to 0, or choose {' or '.join(SMOOTHED)}"
    yield dpo.label_smoothing > 0 and dpo.loss_type not in SMOOTHED, "dpo.label_smoothing", problem
    yield dpo.label_smoothing == 0 and dpo.loss_type == EXO, "dpo.label_smoothing", f"{EXO} needs it; try 0.001"
    problem = f"dpo.loss_type={dpo.loss_type} does not read it; drop the key, or choose {SIMPO}"
    yield dpo.simpo_gamma is not None and dpo.loss_type != SIMPO, "dpo.simpo_gamma", problem


def _logger(config: Config) -> Rules:
    for service in config.logger.services:
        problem = f"choose from {', '.join(SERVICES)}, or an import path package.module:Class"
        yield service not in (*SERVICES, *config.logger.sinks), "logger.services", problem
    if config.logger.prometheus is not None:
        problem = "must be a port from 1 to 65535, or HOST:PORT"
        is_port = _can(lambda: 1 <= config.logger.prometheus_address[1] <= 65535)
        yield not is_port, "logger.prometheus", problem
    for service in ("mlflow", "trackio"):  # the package and the extra have the name of the service
        is_missing = service in config.logger.services and importlib.util.find_spec(service) is None
        problem = f"the package {service} is missing; install the extra `{service}` (docs/install.md)"
        yield is_missing, "logger.services", problem


def _plan(config: Config) -> Rules:
    prompt, response = config.plan.prompt_tokens or 0, config.plan.response_tokens or 0
    key = "plan.response_tokens" if response else "plan.prompt_tokens"
    problem = f"makes the mean sequence longer than the longest, which has {config.longest_row} tokens"
    yield prompt + response > config.longest_row, key, problem


RULES: list[tuple[str, Callable[[Config], Rules]]] = [
    ("trainer", _trainer),
    ("trainer.policy", _policy),
    ("trainer.critic", _critic),
    ("algorithm", _algorithm),
    ("model", _model),
    ("data", _data),
    ("", _rewards),
    ("", _environments),
    ("rollout", _rollout),
    ("rollout", _fleet),
    ("sft", _sft),
    ("dpo", _dpo),
    ("logger", _logger),
    ("plan", _plan),
]
"""Rules with the section whose keys they check: a task that does not read the section is not checked. Empty: the rules
look for the sections themselves."""


# --- What a resume may change ---


@dataclass(frozen=True)
class SavedRun:
    """The run as a checkpoint has it."""

    config: Mapping[str, Any]
    """The nested config."""
    roles: Collection[str]
    """Names of the roles that the checkpoint holds."""


def resume_rules(config: Config, saved: SavedRun | None = None) -> dict[str, ResumeRule]:
    """Return what a resume may do with each key. Without a saved run: the rules of the fields."""
    rules = fields.resume_rules(config)
    if saved is None:
        return rules
    had_critic, has_critic = "critic" in saved.roles, any(role.name == "critic" for role in config.roles)
    if not (had_critic and has_critic):  # no critic is restored
        rules |= {key: HARMLESS for key, *_ in walk_keys(config.trainer.critic, "trainer.critic")}
    if saved_correction(saved.config) == correction_of(config):
        rules["algorithm.rollout_correction"] = HARMLESS
    if had_critic != has_critic:
        rules["algorithm.advantage_estimator"] = ResumeRule("never", "only one of the two has a critic")
    if config.algorithm.adapts_kl and "kl_target" in saved.config.get("algorithm", {}).get("options", {}):
        reason = "the adaptive controller has steered the weight since"
        rules["algorithm.kl_coef"] = ResumeRule("never", reason, ("state",))
    return rules
