"""The contents of `adapter_config.json`: what the run recorded, completed and corrected by what the tensors show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unshard.adapters.layers import Layer
from unshard.adapters.patterns import ends_of, is_end, last_component, patterns_for, shortest_targets, value_for
from unshard.adapters.recorded import Recorded
from unshard.checkpoint import Note
from unshard.errors import ModelError, UnshardError
from unshard.words import shorten

DEFAULTS: Mapping[str, Any] = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "rank_pattern": {},
    "revision": None,
    "task_type": None,
    "use_dora": False,
    "use_rslora": False,
}
"""What PEFT writes where nothing else is known. Fields that old versions of PEFT refuse are left out until used."""

BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values (or beginnings) of `init_lora_weights` that change the base weights when training starts, and when PEFT loads
the adapter (huggingface/peft, `src/peft/tuners/lora/layer.py`, `LoraLayer.update_layer`)."""

_GATES_AND_UPS = "gate_up_proj"
"""The parameter of packed experts that transformers 5 made of `gate_proj` and `up_proj` (or `w1` and `w3`)."""

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""How an architecture's name ends → PEFT's task type."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the tensors show of an adapter.

    layers:      its low-rank layers.
    saved:       paths of the modules that were trained whole (`modules_to_save`).
    tokens:      whether rows of an embedding were trained.
    modules:     paths of all modules of the base model, containers included; empty where no base is there.
    weights:     those of them that could be adapted: they have a weight of two axes or more.
    base_stays:  the base model as training left it is written beside the adapter.
    architecture: the first of the model config's `architectures`.
    """

    layers: Sequence[Layer]
    saved: Collection[str] = ()
    tokens: bool = False
    modules: Collection[str] = ()
    weights: Collection[str] = ()
    base_stays: bool = False
    architecture: str | None = None


@dataclass(slots=True)
class Completion:
    """An adapter's whole config, and what the report must say of it."""

    config: dict[str, Any]
    notes: list[Note] = field(default_factory=list)
    problems: list[UnshardError] = field(default_factory=list)

    def correct(self, key: str, value: object, why: str) -> None:
        """Replace what was recorded, and say so; what was not recorded is filled in silently."""
        if key in self.config and self.config[key] != value:
            text = f"adapter_config.json: {key} corrected from {_shown(self.config[key])} to {_shown(value)}: {why}"
            self.notes.append(Note(text, level="warning"))
        self.config[key] = value


def complete_config(recorded: Recorded, shown: Shown) -> Completion:
    """The config of an adapter: the recorded one, with the fields that the tensors contradict corrected."""
    completion = Completion(dict(recorded.config))
    _set_ranks(completion, recorded, shown.layers)
    _set_alpha(completion, recorded)
    _set_alphas_of_packs(completion, recorded, shown.layers)
    _set_targets(completion, shown)
    _set_variants(completion, shown)
    config = completion.config
    config.pop("runtime_config", None)  # verl dumps it; PEFT never writes it, and cannot load it
    config["task_type"] = recorded.task_type or _task_type(shown.architecture)
    config["inference_mode"] = True
    for key, value in DEFAULTS.items():
        config.setdefault(key, value)
    completion.config = dict(sorted(config.items()))
    return completion


def scaling_of(layer: Layer, config: Mapping[str, Any]) -> float:
    """What a layer's product is multiplied with: alpha / r, or alpha / √r with rsLoRA (`LoraLayer.update_layer`)."""
    alpha = value_for(config.get("alpha_pattern") or {}, layer.path, config["lora_alpha"])
    rank: float = layer.rank
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)


def _set_ranks(completion: Completion, recorded: Recorded, layers: Sequence[Layer]) -> None:
    ranks = {layer.path: layer.rank for layer in layers if layer.parameter is not None}
    config = completion.config
    if not ranks:
        config.setdefault("r", recorded.rank or 8)
        return
    rank, patterns = recorded.rank, config.get("rank_pattern") or {}
    if not recorded.is_config and rank is not None and rank not in ranks.values():
        found = ", ".join(str(rank) for rank in sorted(set(ranks.values())))
        completion.problems.append(
            ModelError(
                f"{recorded.source} says r = {rank}, but the adapter's tensors have rank {found}",
                hint="the file and the shards belong to different runs: put the run's own file beside the shards",
            )
        )
        return
    if rank is not None and all(value_for(patterns, path, rank) == found for path, found in ranks.items()):
        config["r"] = rank
        return
    default = rank if rank in ranks.values() and rank is not None else Counter(ranks.values()).most_common(1)[0][0]
    completion.correct("r", default, "the tensors have that rank")
    completion.correct("rank_pattern", patterns_for(ranks, default), "the tensors have these ranks")


def _set_alpha(completion: Completion, recorded: Recorded) -> None:
    if recorded.alpha is None:
        where = f"{recorded.source} says 0, which some trainers write for unknown" if recorded.alpha_is_zero else None
        completion.problems.append(
            ModelError(
                "the adapter's alpha is not in the shards"
                + (f", and {where}" if where else " and no adapter_config.json or lora_train_meta.json tells it")
                + ": without it the adapter's strength is unknown",
                hint="give the lora_alpha of the training run: `--lora-alpha N`",
            )
        )
        return
    alpha = int(recorded.alpha) if recorded.alpha == int(recorded.alpha) else recorded.alpha
    if recorded.alpha_is_given:
        completion.correct("lora_alpha", alpha, "`--lora-alpha` was given")
    completion.config["lora_alpha"] = alpha


def _set_alphas_of_packs(completion: Completion, recorded: Recorded, layers: Sequence[Layer]) -> None:
    """The alphas of packed gates and ups, where no config tells them: PEFT adapts both by one layer of twice the rank.

    It doubles alpha as well, to keep the strength (huggingface/peft, `_convert_peft_config_moe` in
    `src/peft/utils/transformers_weight_conversion.py`).
    """
    config = completion.config
    alpha = config.get("lora_alpha")
    if recorded.is_config or alpha is None:
        return
    alphas = {
        layer.path: 2 * alpha
        for layer in layers
        if layer.bare and layer.parameter == _GATES_AND_UPS and layer.rank == 2 * config["r"]
    }
    if alphas:
        config["alpha_pattern"] = patterns_for(alphas, alpha)
        text = (
            f"packed {_GATES_AND_UPS} have rank {2 * config['r']}, as PEFT adapts gate and up together: their alpha "
            f"was taken to be {2 * alpha}, twice the {alpha} of the others, as PEFT sets it"
        )
        completion.notes.append(Note(text, tuple(alphas), level="warning"))


def _set_targets(completion: Completion, shown: Shown) -> None:
    config = completion.config
    targets = {layer.module for layer in shown.layers if not layer.bare}
    stated = config.get("target_modules")
    if not isinstance(stated, str) and not _targets_exactly(config, targets, shown.weights):
        completion.correct(
            "target_modules", shortest_targets(targets, shown.modules), "the tensors belong to these modules"
        )
    parameters = {layer.weight_name for layer in shown.layers if layer.bare and layer.parameter is not None}
    stated_parameters = config.get("target_parameters") or []
    if any(not any(is_end(end, path) for end in stated_parameters) for path in parameters):
        ends = sorted({".".join(path.rsplit(".", 3)[-2:]) for path in parameters})
        completion.correct("target_parameters", ends, "the tensors belong to these parameters")
    saved = [path for path in sorted(shown.saved) if not any(path.endswith(end) for end in _saved(config))]
    if saved:
        names = [*_saved(config), *sorted({_shortest_end(path, shown) for path in saved})]
        completion.correct("modules_to_save", names, "the checkpoint holds these modules trained whole")
    elif _saved(config) and not shown.saved:
        why = "the checkpoint does not hold them, so that what training made of these modules is not in the output"
        completion.correct("modules_to_save", None, why)
    if shown.tokens and not config.get("trainable_token_indices"):
        completion.problems.append(
            ModelError(
                "the adapter trains single rows of an embedding (trainable_token_indices), and which rows they are"
                " is not in the shards",
                hint="put the run's adapter_config.json beside the checkpoint",
            )
        )


def _targets_exactly(config: Mapping[str, Any], targets: Collection[str], weights: Collection[str]) -> bool:
    """Whether a recorded list of target modules means the modules that have tensors, as far as that can be told."""
    stated = config.get("target_modules")
    if not isinstance(stated, (list, tuple)):
        return False
    ends = frozenset(stated)
    if any(ends.isdisjoint(ends_of(target)) for target in targets):
        return False
    if any(config.get(key) for key in ("exclude_modules", "layers_to_transform", "layers_pattern")):
        return True
    saved = frozenset(_saved(config))
    unadapted = [path for path in weights if path not in targets and saved.isdisjoint(ends_of(path))]
    return all(ends.isdisjoint(ends_of(path)) for path in unadapted)


def _shortest_end(path: str, shown: Shown) -> str:
    """The last component where no other module's path ends so: PEFT compares with `endswith`, in mid-word too."""
    end = last_component(path)
    others = [module for module in shown.modules if module != path and module not in shown.saved]
    return path if any(module.endswith(end) for module in others) or not shown.modules else end


def _set_variants(completion: Completion, shown: Shown) -> None:
    modules = [layer for layer in shown.layers if not layer.bare]
    if modules:
        dora = any(layer.magnitude is not None for layer in modules)
        completion.correct("use_dora", dora, "the tensors do" + ("" if dora else " not") + " have DoRA's magnitudes")
        if "lora_bias" in completion.config or any(layer.bias for layer in modules):
            bias = any(layer.bias is not None for layer in modules)
            completion.correct("lora_bias", bias, "lora_B has " + ("a bias" if bias else "no bias"))
        plain = [layer for layer in modules if not layer.embedding and layer.weight is not None]
        if plain and all(layer.layout == "in-out" for layer in plain):
            completion.correct("fan_in_fan_out", True, "the weights lie as [in, out]")
    init = completion.config.get("init_lora_weights")
    if shown.base_stays and isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        completion.correct(
            "init_lora_weights",
            True,
            "that initialisation has changed the base weights written here already, and loading must not repeat it",
        )


def _task_type(architecture: str | None) -> str | None:
    return next((task for end, task in _TASKS.items() if architecture and architecture.endswith(end)), None)


def _saved(config: Mapping[str, Any]) -> list[str]:
    return list(config.get("modules_to_save") or [])


def _shown(value: object) -> str:
    return shorten(str(value), 80)
