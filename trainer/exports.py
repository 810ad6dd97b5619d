"""The policy in Hugging Face format, written by the ranks."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.durable import sync_directory, sync_tree
from trainer.failpoints import failpoint
from trainer.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, write_assets

if TYPE_CHECKING:
    from trainer.cluster.ranks import Ranks


def export_target(cfg: Config, step: int) -> str:
    """Where the policy of a step is exported to."""
    return os.path.join(cfg.trainer.export_path, f"global_step_{step}", "policy")


def export_policy(
    cfg: Config,
    ranks: Ranks,
    model_path: str,
    tokenizer: Any,
    target: str,
    dtype: str,
    fence: Callable[[], None],
) -> None:
    """Write weights, config and tokenizer to the directory `target`, whole or not at all.

    With adapters, and `trainer.hf_save_lora=adapter`, peft's files and the tokenizer instead.

    Args:
        dtype: of the weights (see `RolloutConfig.dtype`).
        fence: raises when this process no longer holds the run directory; then nothing is published.
    """
    fence()
    for left in glob.glob(f"{glob.escape(target)}.writing*"):  # by a killed export
        shutil.rmtree(left, ignore_errors=True)
    # A token of its own: a process of a killed run that still writes cannot write into this export.
    writing = f"{target}.writing-{secrets.token_hex(4)}"
    os.makedirs(writing)
    if cfg.trainer.policy.lora.rank is not None and cfg.trainer.hf_save_lora == "adapter":
        tokenizer.save_pretrained(writing)
        with open(os.path.join(writing, ADAPTER_CONFIG), "w") as file:
            file.write(ranks.adapter_config(model_path))
        with open(os.path.join(writing, ADAPTER_WEIGHTS), "wb") as weights:
            weights.write(ranks.adapter_weights())
    else:
        write_assets(model_path, writing, tokenizer, cfg.model.trust_remote_code)
        ranks.write_weights(os.path.abspath(writing), dtype)
    failpoint("export:written")
    sync_tree(writing)
    fence()
    shutil.rmtree(target, ignore_errors=True)  # of the same step, before the run was killed: the same bytes
    os.replace(writing, target)
    sync_directory(os.path.dirname(os.path.abspath(target)))
