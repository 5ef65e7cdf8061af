"""Value and reward models: what the tensors say of the head, and what config.json must say then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unshard.errors import ModelError
from unshard.families.architecture import LANGUAGE_MODELS, count_labels
from unshard.families.naming.draft import Draft
from unshard.model_config import class_name

CLASSIFIERS = ("ForTokenClassification", "ForSequenceClassification")


def settle_head(draft: Draft, config: Mapping[str, Any], *, required: bool) -> str | None:
    """The ending of the architecture's name that the tensors ask for, or None: the one of config.json.

    A `score` head beside a config of a language model makes it a classifier, so that the result loads with its head;
    with `required`, a model without any value head is a problem.
    """
    name = class_name(config) or ""
    if "score.weight" in draft.tensors:
        return _settle_classifier(draft, config, name)
    if has_value_head(draft):
        draft.note(
            "TRL's value head (v_head) is kept beside the language model; load it with trl's "
            "AutoModelForCausalLMWithValueHead"
        )
    elif required:
        message = "there is no value head: neither score.weight nor v_head.summary.weight is stored"
        draft.problems.append(ModelError(message, hint="leave --is-value-model out if this is a language model"))
    return None


def has_value_head(draft: Draft) -> bool:
    """Whether TRL's value head is there."""
    return any(name.startswith("v_head.") for name in draft.tensors)


def _settle_classifier(draft: Draft, config: Mapping[str, Any], name: str) -> str | None:
    rows = (*draft.tensors["score.weight"].shape, 0)[0]
    if rows != count_labels(config):
        draft.config_changes["num_labels"] = rows
        draft.config_changes |= {key: None for key in ("id2label", "label2id") if key in config}
        draft.note(f"config.json: num_labels becomes {rows}, the rows of score.weight (was {count_labels(config)})")
    if name.endswith(CLASSIFIERS):
        _settle_bias(draft, config, name)
        return None
    ending = CLASSIFIERS[0] if "score.bias" in draft.tensors else CLASSIFIERS[1]
    prefix = next((name.removesuffix(old) for old in LANGUAGE_MODELS if name.endswith(old)), None)
    if prefix is not None:
        draft.config_changes["architectures"] = [prefix + ending]
        draft.note(f"config.json: architectures becomes {prefix + ending} (was {name}): the model has a score head")
    return ending


def _settle_bias(draft: Draft, config: Mapping[str, Any], name: str) -> None:
    """A `ForTokenClassification` whose head is stored without a bias must say so: those of Megatron have none."""
    with_bias = config.get("token_classification_bias", True)
    if name.endswith(CLASSIFIERS[0]) and with_bias and "score.bias" not in draft.tensors:
        draft.config_changes["token_classification_bias"] = False
        draft.note("config.json: token_classification_bias becomes false: the head has no bias", level="warning")
