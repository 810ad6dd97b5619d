"""Check that the models of a run fit each other, its texts and its ranks, before one is loaded. Cheap to import."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.config import LM, SCORE, Config, RoleSpec
from trainer.config.fields import config_error
from trainer.errors import UserError, one_line
from trainer.models.files import load_config, load_trained_config, resolve_model_path, rotations_of
from trainer.models.tokenizer import token_table
from trainer.parallel.axes import AXES, axis_sizes
from trainer.process.model_server import LOGPROBS

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

COLWISE = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
"""Styles of Hugging Face plans that split the outputs of a layer, and whether the outputs are gathered."""
ROWWISE = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}
"""Styles that split the inputs of a layer, and whether the layer gets complete inputs."""
PARTIAL = {"replicated_with_grad_allreduce"}
"""Styles of replicated parameters whose gradients are summed over the ranks."""
EMBEDDING = {"embedding_rowwise"}
"""Styles of embeddings that are split by vocabulary. Embeddings are always split, even without a style."""


def check_trained_models(cfg: Config) -> None:
    """Raise a `UserError` if a model that the config names for the ranks cannot be used (see `load_trained_config`)."""
    for role in cfg.roles:
        if (path := role.path or cfg.model.path) is not None:
            path = resolve_model_path(path, role.path_key)
            config = load_trained_config(cfg.model, path, role.path_key, cfg.longest_row)
            check_head(config, role, path, cfg.model.trust_remote_code)


def check_axes(cfg: Config, model_path: str) -> None:
    """Raise a `UserError` if a model of a run cannot be split over the ranks as the config requires. `model_path`:
    directory of the initial weights of the policy, and of each role without a path of its own."""
    if not any(size > 1 and name in PROBLEMS for name, size in axis_sizes(cfg.trainer).items()):
        return
    for role in {role.path_key: role for role in reversed(cfg.roles)}.values():
        path = resolve_model_path(role.path, role.path_key) if role.path else model_path
        name = "the model" if role.path is None else f"the {role.name}"
        check_model_axes(cfg, load_config(cfg.model, path, role.path_key).get_text_config(), name)


def check_model_axes(cfg: Config, model: Any, name: str = "the model") -> None:
    """Check a model, which messages call `name`, by its Hugging Face config (see `check_axes`)."""
    sizes = axis_sizes(cfg.trainer)
    for axis, size in sizes.items():
        if size > 1 and axis in PROBLEMS and (problem := PROBLEMS[axis](model, sizes, name)) is not None:
            refuse_axis(axis, size, problem)


def _cp_problem(model: Any, sizes: Mapping[str, int], name: str) -> str | None:
    heads, tp = getattr(model, "num_attention_heads", None), sizes["tp"]
    if heads is not None and heads // tp % sizes["cp"] == 0:
        return None
    on_each = " on each rank of trainer.tensor_parallel_size" if tp > 1 else ""
    return f"must divide the number of attention heads of {name}{on_each}, {heads and heads // tp}"


def _tp_problem(model: Any, sizes: Mapping[str, int], name: str) -> str | None:
    plan, kind = getattr(model, "base_model_tp_plan", None), f"models of the type {model.model_type}"
    if not plan:
        return f"{kind} have no tensor parallel plan in transformers"
    unknown = sorted(set(plan.values()) - {*COLWISE, *ROWWISE, *PARTIAL, *EMBEDDING})
    if unknown:
        return f"{kind} need the parallel style {unknown[0]}, which is not supported"
    heads = getattr(model, "num_attention_heads", None)
    counts = {"attention heads": heads, "tokens in the vocabulary": model.vocab_size}
    counts["key and value heads"] = getattr(model, "num_key_value_heads", None) or heads
    for counted, count in counts.items():
        if count is None or count % sizes["tp"]:
            return f"must divide the number of {counted} of {name}, {count}"
    return None


PROBLEMS: dict[str, Callable[[Any, Mapping[str, int], str], str | None]] = {"cp": _cp_problem, "tp": _tp_problem}
"""Says of a Hugging Face config of a model why it cannot be used with the sizes of all axes, by axis. The name is what
messages call the model."""


def refuse_axis(axis: str, size: int, problem: str) -> NoReturn:
    raise UserError(f"trainer.{AXES[axis].key}={size}: {problem}")


def check_longest_sequence(cfg: Config, model_path: str) -> None:
    """Raise a `UserError` if the policy in `model_path` cannot read the longest sequence of a run on one source alone.
    Of the engines, vLLM alone checks it."""
    positions = positions_of(load_config(cfg.model, model_path))
    if positions is None:
        return
    reads = f"model.path={cfg.model.path} reads at most {positions} tokens (max_position_embeddings)"
    rollout, limit = cfg.rollout, cfg.environment.max_tokens if cfg.environment.name else 0
    if limit > positions:
        raise config_error(cfg, "environment.max_tokens", f"{reads}; lower it")
    if limit <= 0 and rollout.max_prompt_tokens + rollout.max_response_tokens > positions:
        prompt = f"prompt (rollout.max_prompt_tokens={rollout.max_prompt_tokens})"
        raise config_error(cfg, "rollout.max_response_tokens", f"{reads}, {prompt} and reply together; lower it")


def positions_of(config: PretrainedConfig) -> int | None:
    """Return `max_position_embeddings`. None: the config has none, or it scales its rotations for longer texts."""
    text = config.get_text_config()
    if any("factor" in rotations for rotations in rotations_of(text)):
        return None
    return getattr(text, "max_position_embeddings", None)


_MEDIA = re.compile("(image|video|audio|vision|bo[iva]|eo[iva])_.*")
"""Names of special tokens that stand for something else than text."""


def check_vocabularies(cfg: Config, model_path: str) -> None:
    """Raise a `UserError` if a model of the run lacks a token of the policy, whose weights are in `model_path`. Every
    model reads the tokens that the policy has sampled, and a rank ends at a token without an embedding."""
    for spec in cfg.servers:
        spec.server.check_length(cfg.longest_sequence)
        named, known = f"{spec.path_key}={spec.url}", spec.server.vocabulary()
        _compare_tokens(cfg, model_path, known, spec.name, named, may_have_more=spec.output == LOGPROBS)
    others = {role.path_key: role for role in cfg.roles if role.path is not None}
    if not others:
        return
    tokens = _vocab_size(load_config(cfg.model, model_path))
    for key, role in others.items():
        assert role.path is not None
        directory, named = resolve_model_path(role.path, key), f"{key}={role.path}"
        known = _vocab_size(load_config(cfg.model, directory, key))
        if tokens is not None and known is not None and known < tokens:
            raise UserError(
                f"{named}: the vocabulary of the {role.name} has {known} tokens, and that of the policy, "
                f"{cfg.model.path or model_path}, has {tokens}; choose a {role.name} with the tokenizer of the policy, "
                f"or resize its embeddings to {tokens} tokens"
            )
        if (size := axis_sizes(cfg.trainer)["tp"]) > 1 and role.read_by and known != tokens:
            problem = f"splits the {tokens} tokens of the policy and the {known} of the {role.name} unlike; choose 1"
            refuse_axis("tp", size, problem)
        if role.head in (LM, SCORE):
            known = token_table(directory, cfg.model.trust_remote_code)
            _compare_tokens(cfg, model_path, known, role.name, named, may_have_more=role.head == LM)


def _compare_tokens(
    cfg: Config, model_path: str, known: Mapping[str, int] | None, name: str, named: str, may_have_more: bool = True
) -> None:
    """Refuse a model that reads the policy's tokens as others, by the tokenizers of both, if the policy has one.
    `known`: ids of its tokens; None, or empty: it has no tokenizer. `may_have_more`: it may have further tokens."""
    own = token_table(model_path, cfg.model.trust_remote_code)
    if own is None:
        return
    if not known:
        problem = f"has no tokenizer, so nothing shows that the {name} has the tokens of the policy"
        raise UserError(f"{named}: {problem}; save the tokenizer that it was trained with there")
    others = {number: token for token, number in own.items() if known.get(token) != number}
    if not may_have_more:
        others |= {number: token for token, number in known.items() if token not in own}
    if others:
        first = min(others)
        raise UserError(
            f"{named}: {len(others)} tokens of the policy, such as {one_line(repr(others[first]))} ({first}), are "
            f"others in the tokenizer of the {name}; choose a {name} with the tokenizer of the policy"
        )


def check_tokenizer(cfg: Config, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a `UserError` if the model in `path` has no embedding of a token that its tokenizer writes. A tokenizer may
    have a token for images or sound without one, as those of Gemma 3 with text alone have."""
    rows = _vocab_size(load_config(cfg.model, path))
    if rows is None:
        return
    media = {token for name, token in tokenizer.special_tokens_map.items() if _MEDIA.match(name)}
    without = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    without = {number: token for number, token in without.items() if token not in media}
    if without:
        first = min(without)
        raise UserError(
            f"model.path={path}: the model has {rows} embeddings, and {len(without)} tokens of its tokenizer none, "
            f"such as {one_line(repr(without[first]))} ({first}); take the tokenizer that the model was trained with, "
            "or resize its embeddings (resize_token_embeddings)"
        )


def _vocab_size(config: PretrainedConfig) -> int | None:
    """Return the number of embeddings of a model. None: its config does not say it."""
    return getattr(config.get_text_config(), "vocab_size", None)


# ---------------------------------------------------------------------------------------------------
# Reward models as transformers has them: a classifier with one label, whose head is `score.weight`

VALUE_HEAD, SCORE_HEAD = "value_head.", "score."
"""Names of the head that gives one value: in the module, and in files of transformers."""
_CLASSIFIER = "ForSequenceClassification"


def is_classifier(architectures: Any) -> bool:
    """Return whether `architectures` of a config.json are those of a sequence classifier, such as a reward model."""
    return isinstance(architectures, list) and any(str(name).endswith(_CLASSIFIER) for name in architectures)


def check_head(config: PretrainedConfig, spec: RoleSpec, path: str, trust_remote_code: bool = False) -> None:
    """Refuse a role whose model in the directory `path` has another head, or whose head cannot be exported. Raises
    UserError: a language model is a reward model there; or a score head is trained on a family without a class."""
    if spec.head == LM:
        refuse_classifier(config.architectures, f"{spec.path_key}={path}")
    if spec.head == SCORE and spec.trained:
        classifier_class(config, f"{spec.path_key}={path}", trust_remote_code)


def refuse_classifier(architectures: Any, named: str) -> None:
    """Raise a `UserError` for a reward model where a language model is needed."""
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
    """Return the name of the class that reads an exported score head. Raises UserError: transformers has none for this
    family, or its head is another one."""
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
    """Return the name in the files of a weight of a `CriticModel`."""
    return name.replace(VALUE_HEAD, SCORE_HEAD, 1) if name.startswith(VALUE_HEAD) else name
