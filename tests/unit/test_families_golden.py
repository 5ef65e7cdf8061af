"""Names and shapes of real checkpoints: what was stored becomes what transformers wrote beside it."""

from __future__ import annotations

import json

import pytest

import golden_set
from golden_set import GoldenCase
from unshard.checkpoint import Checkpoint
from unshard.families import FAMILIES, expected_shapes, name_model
from unshard.opening import open_checkpoint, open_reference
from unshard.options import MergeOptions
from unshard.preparing import split_adapters
from unshard.translating import translate


def is_described(case: GoldenCase) -> bool:
    """Whether the case's truth is a model of a family."""
    config = case.directory / "truth" / "config.json"
    return config.is_file() and expected_shapes(json.loads(config.read_text())) is not None


CASES = [case for case in (*golden_set.committed_cases(), *golden_set.larger_cases()) if is_described(case)]
NOT_THE_MODEL = ("excluded", "exclfrozen", "buffer", "_buf")
"""Cases that hold less than the model or more: parameters were left out, or a buffer is there that it does not know."""
WHOLE = [case for case in CASES if not any(word in case.name for word in NOT_THE_MODEL)]
OTHER_NAMES = ("lora", "value_head", "wrapped", "local_unknown", "megatron_", "mc_")
"""Cases whose stored names are not those of the running model."""
NO_ORDER = ("dcp_", "accelerate_", "acc_", "hf_shards_")
"""Cases of torch's DCP, which keeps no order."""
PLAIN = [case for case in WHOLE if not any(word in case.name for word in (*OTHER_NAMES, *NO_ORDER))]


def truth_of(case: GoldenCase) -> Checkpoint:
    return open_reference(case.directory / "truth", MergeOptions())


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_stored_names_become_those_of_the_truth(case: GoldenCase) -> None:
    options = MergeOptions(config=case.directory / "truth")
    checkpoint, translation = translate(open_checkpoint(case.source, options), options)
    split = split_adapters(checkpoint, options)
    if not split.base:
        pytest.skip("holds an adapter only")
    computed = translation.computed if translation else {}
    in_file = translation is not None
    model = name_model({**split.base, **computed}, checkpoint.config, options, in_file=in_file)
    assert not model.problems
    truth = truth_of(case)
    assert {name: value.shape for name, value in model.tensors.items()} == {
        name: tensor.shape for name, tensor in truth.tensors.items()
    }
    assert truth.config is not None
    assert model.family is not None
    assert model.family in truth.config.get("architectures", [model.family])
    for claim in model.claims:
        assert claim.left.shape == claim.right.shape


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_truth_is_followed_as_a_reference_of_itself(case: GoldenCase) -> None:
    truth = truth_of(case)
    options = MergeOptions(names=str(case.directory / "truth"))
    model = name_model(truth.tensors, truth.config, options, truth)
    assert not model.problems
    assert list(model.tensors) == list(truth.tensors)
    assert model.layout == {name: tensor.chunks[0].extent.file.path for name, tensor in truth.tensors.items()}


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_expected_shapes_follow_the_order_of_the_state_dict(case: GoldenCase) -> None:
    checkpoint = open_checkpoint(case.source, MergeOptions(config=case.directory / "truth"))
    assert checkpoint.config is not None
    expected = expected_shapes(checkpoint.config)
    assert expected is not None
    stored = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    if "lm_head.weight" not in expected:
        stored.pop("lm_head.weight", None)
    assert list(stored.items()) == list(expected.items())


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_a_config_of_another_model_is_refused(case: GoldenCase) -> None:
    truth = truth_of(case)
    config = json.loads((case.directory / "truth" / "config.json").read_text())
    section = config.get("text_config", config)
    section["hidden_size"] += 2
    model = name_model(truth.tensors, config, MergeOptions())
    assert model.problems


def test_every_case_is_of_a_described_family() -> None:
    configs = [json.loads((case.directory / "truth" / "config.json").read_text()) for case in CASES]
    assert {config["model_type"] for config in configs} <= set(FAMILIES)
