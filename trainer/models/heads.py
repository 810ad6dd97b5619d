"""Reward models as transformers has them: a classifier with one label, whose head is `score.weight`."""

from __future__ import annotations

import copy
import json
import os
from typing import TYPE_CHECKING, Any

from trainer.config import LM, SCORE, RoleSpec
from trainer.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VALUE_HEAD, SCORE_HEAD = "value_head.", "score."
"""Names of the head that gives one value: in the module, and in files of transformers."""
_CLASSIFIER = "ForSequenceClassification"


def is_classifier(architectures: Any) -> bool:
    """Return whether a config.json with this field describes a sequence classifier, such as a reward model."""
    return isinstance(architectures, list) and any(str(name).endswith(_CLASSIFIER) for name in architectures)


def check_head(config: PretrainedConfig, spec: RoleSpec, path: str, trust_remote_code: bool = False) -> None:
    """Refuse a role whose model in the directory `path` has another head, or whose head cannot be exported.

    Raises:
        UserError: a language model is a reward model there; or a score head is trained on a family without a class.
    """
    if spec.head == LM:
        refuse_classifier(config.architectures, f"{spec.path_key}={path}")
    if spec.head == SCORE and spec.trained:
        classifier_class(config, f"{spec.path_key}={path}", trust_remote_code)


def refuse_classifier(architectures: Any, named: str) -> None:
    """Refuse a reward model where a language model is needed.

    Raises:
        UserError: it is one.
    """
    if is_classifier(architectures):
        raise UserError(
            f"{named}: {architectures[0]} is a reward model, which scores texts and writes none; name a language "
            "model, or give the role the head score"
        )


def refuse_classifier_in(path: str, key: str) -> None:
    """Refuse the directory of a reward model where a language model is needed (see `refuse_classifier`)."""
    with open(os.path.join(path, "config.json"), "rb") as file:
        refuse_classifier(json.load(file).get("architectures"), f"{key}={path}")


def classifier_class(config: PretrainedConfig, named: str, trust_remote_code: bool = False) -> str:
    """Return the name of the class that reads an exported score head.

    Raises:
        UserError: transformers has none for this family, or its head is another one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    own = copy.deepcopy(config)
    own.num_labels = 1
    try:
        with torch.device("meta"):
            options = {"attn_implementation": "eager", "trust_remote_code": trust_remote_code}
            model = AutoModelForSequenceClassification.from_config(own, **options)
            prefix = AutoModelForCausalLM.from_config(own, **options).base_model_prefix
    except ValueError as error:
        raise UserError(
            f"{named}: transformers has no sequence classifier for models of the type {config.model_type}, so a score "
            "head that is trained on one could not be exported; name a model of another family"
        ) from error
    head = {name for name in model.state_dict() if not name.startswith(f"{prefix}.")}
    if head != {f"{SCORE_HEAD}weight"}:
        raise UserError(
            f"{named}: {type(model).__name__} has the head {', '.join(sorted(head))}, and a role with the head score "
            f"trains {SCORE_HEAD}weight; name a model of another family"
        )
    return type(model).__name__


def classifier_fields(config: PretrainedConfig, tokenizer: Any, named: str, trust_remote_code: bool) -> dict[str, Any]:
    """Return the fields of the config.json of an exported reward model.

    `pad_token_id` tells transformers which token of a text is the last one. None where the tokenizer pads with its end
    token: then transformers scores single texts at their last token, and refuses several at once.
    """
    pads_with_end = tokenizer.pad_token_id == tokenizer.eos_token_id
    return {
        "architectures": [classifier_class(config, named, trust_remote_code)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": None if pads_with_end else tokenizer.pad_token_id,
    }


def score_name(name: str) -> str:
    """Return the name in the files of a weight of a value model (see `trainer.models.loading.CriticModel`)."""
    return name.replace(VALUE_HEAD, SCORE_HEAD, 1) if name.startswith(VALUE_HEAD) else name
