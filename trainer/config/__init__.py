"""The config: the typed schema with its rules, how a command line becomes a config, and the generated reference.

Nothing here imports torch, so that `--help` and a refused config answer within half a second.
"""

# ruff: noqa: F401 - the names are imported for others
from trainer.config.algorithm import (
    ESTIMATOR,
    LOSS,
    AlgorithmConfig,
    aggregation_of,
    chosen_options,
    correction_of,
    named_options,
)
from trainer.config.data import DataConfig, DPOConfig, RMConfig, SFTConfig, ValSetConfig
from trainer.config.engines import ENGINES, EngineSpec
from trainer.config.hydra import compose, conf_dir, register, to_config
from trainer.config.reference import field_docs
from trainer.config.rollout import EnvironmentConfig, InferenceConfig, RewardConfig, RolloutConfig
from trainer.config.rules import validate
from trainer.config.schema import OPEN_SECTIONS, Config, valid_keys
from trainer.config.tasks import (
    LM,
    REWARD_MODEL,
    SCORE,
    TASKS,
    VALUE,
    Metric,
    RoleSpec,
    TaskSpec,
    critic_role,
    policy_gradient_roles,
    policy_role,
    reference_role,
)
from trainer.config.trainer import (
    LOAD_COMPONENTS,
    CriticConfig,
    FSDPConfig,
    LoggerConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    TinyConfig,
    TrainerConfig,
)
