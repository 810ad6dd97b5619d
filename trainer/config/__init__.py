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
from trainer.config.data import DataConfig, ValSetConfig
from trainer.config.engines import ENGINES, EngineSpec
from trainer.config.environment import EnvironmentConfig
from trainer.config.hydra import compose, conf_dir, register, to_config
from trainer.config.inference import InferenceConfig
from trainer.config.logger import LoggerConfig, MlflowConfig, SinkConfig, TrackioConfig, WandbConfig
from trainer.config.model import ModelConfig, TinyConfig
from trainer.config.reference import field_docs
from trainer.config.reward import RewardConfig
from trainer.config.role_specs import (
    LM,
    SCORE,
    VALUE,
    RoleSpec,
    critic_role,
    policy_gradient_roles,
    policy_role,
    reference_role,
)
from trainer.config.rollout import RolloutConfig
from trainer.config.rules import validate
from trainer.config.schema import OPEN_SECTIONS, Config, valid_keys
from trainer.config.supervised import SFTConfig
from trainer.config.tasks import TASKS, Metric, TaskSpec
from trainer.config.trainer import LOAD_COMPONENTS, TrainerConfig
from trainer.config.training import (
    CriticConfig,
    FSDPConfig,
    LoraConfig,
    OptimizerConfig,
)
from trainer.config.transports import TransportSpec
