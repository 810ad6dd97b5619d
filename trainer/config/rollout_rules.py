"""Rules between keys of rollouts: rewards, environments, engines, and the workload that `trainer plan` computes."""

from __future__ import annotations

from collections.abc import Collection

from trainer.config.engines import engines_with
from trainer.config.environment import EnvironmentConfig
from trainer.config.fields import config_error
from trainer.config.inference import TOKEN
from trainer.config.reward import REMOTE, RewardConfig
from trainer.config.rollout import RolloutConfig
from trainer.config.schema import Config
from trainer.config.transports import find_transport
from trainer.errors import UserError
from trainer.files.uris import split_http_url

_ALL_ADDRESSES = ("", "0.0.0.0", "::")


def check_rewards(config: Config) -> None:
    """Refuse rewards that contradict their weights, or whose server is missing."""
    for name, reward in config.sections(RewardConfig):
        is_list = isinstance(reward.name, list) and reward.name and all(isinstance(item, str) for item in reward.name)
        if not (isinstance(reward.name, str) or is_list):
            problem = "must be a name, or a list of names; where an environment gives the rewards, leave reward.* out"
            raise config_error(config, f"{name}.name", problem)
        names = reward.names()
        if len(set(names)) < len(names):
            raise config_error(config, f"{name}.name", "names a reward twice; give it a weight instead")
        if reward.weights and len(reward.weights) != len(names):
            problem = f"must have a weight for each of the {len(names)} rewards of {name}.name"
            raise config_error(config, f"{name}.weights", problem)
        if reward.url is None and REMOTE in names:
            raise config_error(config, f"{name}.name", f"remote needs {name}.url, the address of the server")
        if reward.url is not None:
            _check_reward_url(config, name, reward.url, names)


def _check_reward_url(config: Config, name: str, url: str, rewards: Collection[str]) -> None:
    if REMOTE not in rewards:
        raise config_error(config, f"{name}.url", f"is used by the reward remote alone; add it to {name}.name")
    if (parts := split_http_url(url)) is None:
        raise config_error(config, f"{name}.url", "must be an address such as http://judge:8000/score")
    if "@" in parts.netloc:
        # The value is not shown.
        raise UserError(f"{name}.url: holds credentials, which would be saved; use {name}.remote.header_env")


def check_environments(config: Config) -> None:
    """Refuse environments that cannot play the episodes of the run."""
    if config.environment.python is not None and config.environment.name is None:
        problem = "is the interpreter of environment.name, which is not set"
        raise config_error(config, "environment.python", problem)
    for name, environment in config.sections(EnvironmentConfig):
        if environment.name is None:
            continue
        if ":" not in environment.name:
            raise config_error(config, f"{name}.name", "must be an import path package.module:Class")
        _check_episode_length(config, name, environment)
        if environment.agent_host in _ALL_ADDRESSES and environment.agent_url is None:
            problem = f"is no address that agents can use; set {name}.agent_url to one"
            raise config_error(config, f"{name}.agent_host", problem)
        if config.algorithm.overlong_buffer and not name.startswith("data.val_sets."):  # training alone has penalties
            problem = f"is for one completion a prompt; set it to 0, or drop {name}.name"
            raise config_error(config, "algorithm.overlong_buffer", problem)


def _check_episode_length(config: Config, name: str, environment: EnvironmentConfig) -> None:
    if environment.max_tokens < 0:
        return
    first, longest = config.rollout.max_prompt_tokens, config.model.tiny.max_position_embeddings
    if environment.max_tokens <= first:
        problem = f"must be above rollout.max_prompt_tokens={first}: the first messages may have as many"
        raise config_error(config, f"{name}.max_tokens", problem)
    if config.model.path is None and config.task.trains and environment.max_tokens > longest:
        problem = f"exceeds model.tiny.max_position_embeddings={longest}"
        raise config_error(config, f"{name}.max_tokens", problem)


def check_rollout(config: Config) -> None:
    """Refuse what the engine cannot do."""
    rollout, engine = config.rollout, config.engine
    if rollout.tensor_parallel_size > 1 and not engine.tensor_parallel:
        problem = f"rollout.engine={rollout.engine} runs on one device; choose {engines_with('tensor_parallel')}"
        raise config_error(config, "rollout.tensor_parallel_size", problem)
    if rollout.engine_args and not engine.engine_args:
        problem = f"rollout.engine={rollout.engine} takes none; choose {engines_with('engine_args')}"
        raise config_error(config, "rollout.engine_args", problem)
    _check_servers(config)
    rollout.logprob_limit("float32", "cpu")
    if rollout.weight_sync != "auto":
        find_transport(rollout.weight_sync)
    if rollout.colocate and not engine.gpus:
        raise config_error(config, "rollout.colocate", f"rollout.engine={rollout.engine} takes no GPUs; choose false")
    if rollout.colocate and rollout.ahead > 0:
        problem = "engines that share the GPUs of the ranks cannot generate while these train; choose 0"
        raise config_error(config, "rollout.ahead", f"{problem}, or rollout.colocate=false")
    _check_in_flight(config)
    _check_lora_sync(config)


def _check_servers(config: Config) -> None:
    rollout, served = config.rollout, config.engine.served
    if rollout.urls and not served:
        raise config_error(config, "rollout.urls", f"rollout.engine={rollout.engine} uses no servers; choose server")
    if served and not rollout.urls:
        raise config_error(config, "rollout.urls", f"rollout.engine={rollout.engine} needs the addresses of servers")
    for url in rollout.urls:
        if "@" in url:
            problem = f"an address must hold no password; the token of the servers is the variable {TOKEN}"
            raise config_error(config, "rollout.urls", problem)
        parts = split_http_url(url)
        if parts is None or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise config_error(config, "rollout.urls", f"{url} is no address of a server; write http://HOST:PORT")
    if len({url.rstrip("/") for url in rollout.urls}) < len(rollout.urls):
        raise config_error(config, "rollout.urls", "names a server twice")
    if rollout.urls and rollout.num_engines != len(rollout.urls):
        problem = f"there is one engine for each of the {len(rollout.urls)} rollout.urls; leave this key out"
        raise config_error(config, "rollout.num_engines", problem)
    hang = config.trainer.hang_timeout_s
    if served and rollout.server_timeout_s >= hang:
        problem = f"must be below trainer.hang_timeout_s={hang:g}, or the wait is a hang"
        raise config_error(config, "rollout.server_timeout_s", problem)


def _check_in_flight(config: Config) -> None:
    rollout, key = config.rollout, "rollout.in_flight_updates"
    if not rollout.in_flight_updates:
        if rollout.max_staleness != RolloutConfig().max_staleness:
            raise config_error(config, "rollout.max_staleness", f"needs {key}=true")
        return
    if not config.engine.in_flight:
        able = engines_with("in_flight")
        problem = f"rollout.engine={rollout.engine} takes weights only when it generates nothing"
        raise config_error(config, key, f"{problem}; choose rollout={able}, or rollout.ahead=1 instead")
    if rollout.ahead > 0:
        problem = "engines take new weights before a batch of rollout.ahead is complete"
        raise config_error(config, key, f"{problem}; choose one of the two")
    if rollout.colocate:
        problem = "engines that share the GPUs of the ranks cannot generate while these train"
        raise config_error(config, key, f"{problem}; choose false, or rollout.colocate=false")


def _check_lora_sync(config: Config) -> None:
    rollout, rank, most = config.rollout, config.trainer.policy.lora.rank, config.engine.max_lora_rank
    if rank is None and rollout.lora_sync != "auto":
        raise config_error(config, "rollout.lora_sync", "needs trainer.policy.lora.rank")
    if rank is None or rollout.lora_sync != "adapter":
        return
    if not most:
        problem = f"rollout.engine={rollout.engine} serves no adapters; choose merged or "
        raise config_error(config, "rollout.lora_sync", f"{problem}rollout={engines_with('max_lora_rank')}")
    if rank > most:
        problem = f"rollout.engine={rollout.engine} serves adapters up to rank {most}; choose merged"
        raise config_error(config, "rollout.lora_sync", problem)


def check_plan(config: Config) -> None:
    """Refuse a workload that the config excludes."""
    plan = config.plan
    if not config.task.generates:
        _check_planned_examples(config)
        return
    if (plan.prompt_tokens or 0) > (most := config.rollout.max_prompt_tokens):
        problem = f"is above the longest, rollout.max_prompt_tokens={most}"
        raise config_error(config, "plan.prompt_tokens", problem)
    if (plan.response_tokens or 0) > (most := config.plan.most_response_tokens(config)):
        longest = f"the longest, rollout.max_response_tokens={most}"
        if any(environment.name for environment in config.environments):
            longest = f"what the prompt leaves of the longest episode, {most}"
        raise config_error(config, "plan.response_tokens", f"is above {longest}")


def _check_planned_examples(config: Config) -> None:
    """Refuse examples of supervised training that are longer than the longest."""
    most, used = config.sft.max_length, 0
    for key in ("prompt_tokens", "response_tokens"):
        tokens = getattr(config.plan, key) or 0
        used += tokens
        if tokens and used > most:
            raise config_error(config, f"plan.{key}", f"makes examples longer than sft.max_length={most}")
