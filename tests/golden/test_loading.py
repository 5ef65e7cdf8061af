"""What was merged loads in transformers and peft, and computes what the trained model computed."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from golden_set import COMMITTED, GoldenCase, Run, committed_cases, larger_cases
from unshard.cli import main

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors_torch = pytest.importorskip("safetensors.torch")

from megatron.from_hf import mimo  # noqa: E402

pytestmark = pytest.mark.torch

CASES = [*committed_cases(), *larger_cases()]
_SHARDED = ["--max-shard-size", "9kB"]
_BIN = ["--format", "bin"]


def _parameters(*, adapter: bool) -> list[Any]:
    """The runs that write a model; with `adapter`, those that write a base model with an adapter beside it."""
    pairs = [(case, run) for case in CASES for run in case.runs if run.error is None and run.model is not None]
    wanted = [(case, run) for case, run in pairs if (run.adapter is not None) == adapter]
    loadable = [(case, run) for case, run in wanted if "--weights-only" not in run.options]
    return [pytest.param(case, run, id=f"{case.name}-{run.label}") for case, run in loadable]


@pytest.fixture(autouse=True)
def _quiet_and_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One thread per test worker, and custom code of checkpoints in no place that other tests see."""
    torch.set_num_threads(1)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize(("case", "run"), _parameters(adapter=False))
def test_transformers_loads_the_model(case: GoldenCase, run: Run, tmp_path: Path) -> None:
    output, truth = _merge(case, run, tmp_path)
    # Fused values may differ in their last bits, and bf16 carries those through the layers.
    tolerance = 2e-2 if run.fused else 0.0
    torch.testing.assert_close(_compute(_load(output)), _compute(_load(truth)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("case", "run"), _parameters(adapter=True))
def test_peft_loads_the_adapter(case: GoldenCase, run: Run, tmp_path: Path) -> None:
    assert run.adapter is not None
    output, truth = _merge(case, run, tmp_path)
    found = _compute(_adapt(output, output / "lora_adapter"))
    torch.testing.assert_close(found, _compute(_adapt(truth, case.directory / run.adapter)), rtol=0, atol=0)
    assert not torch.equal(found, _compute(_load(output))), "the adapter changes nothing"


@pytest.mark.parametrize("options", [_SHARDED, _BIN, _SHARDED + _BIN], ids=" ".join)
def test_transformers_loads_every_container(options: list[str], tmp_path: Path) -> None:
    case = COMMITTED / "fsdp2_w4"
    output, truth = tmp_path / "output", tmp_path / "truth"
    assert main(["merge", str(case / "ckpt"), str(output), *options]) == 0
    assert len(list(output.glob("*.bin")) + list(output.glob("*.safetensors"))) == (3 if "9kB" in options else 1)
    found = _load(output).state_dict()
    shutil.copytree(case / "ckpt" / "huggingface", truth)
    shutil.copyfile(case / "truth" / "model.safetensors", truth / "model.safetensors")
    torch.testing.assert_close(found, _load(truth).state_dict(), rtol=0, atol=0)


def test_a_rounded_model_is_what_torch_rounds(tmp_path: Path) -> None:
    case, output = COMMITTED / "fsdp2_w4", tmp_path / "output"
    assert main(["merge", str(case / "ckpt"), str(output), "--dtype", "bf16"]) == 0
    truth = safetensors_torch.load_file(case / "truth" / "model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in truth.items()}
    torch.testing.assert_close(safetensors_torch.load_file(output / "model.safetensors"), rounded, rtol=0, atol=0)
    assert _load(output).dtype == torch.bfloat16


def _merge(case: GoldenCase, run: Run, place: Path) -> tuple[Path, Path]:
    """The merged directory, and a copy of it with the truth's weights: truths lie without tokenizer and custom code."""
    assert run.model is not None
    output, truth = place / "output", place / "truth"
    assert main(case.command(run, output)) == 0
    shutil.copytree(output, truth)
    (weights,) = (case.directory / run.model).glob("*.safetensors")
    shutil.copyfile(weights, truth / "model.safetensors")
    return output, truth


def _load(directory: Path) -> Any:
    """Load with the class that the config names; every weight must be found, and none be left over.

    A value head beside a language model is TRL's to load, layers behind the last predict further tokens, and a job may
    have registered a buffer of its own: all are unexpected to transformers, and must be there.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = config["architectures"][0]
    kind = getattr(transformers, architecture, getattr(mimo, architecture, transformers.AutoModel))
    model, loading = kind.from_pretrained(directory, output_loading_info=True, dtype="auto", trust_remote_code=True)
    further_layer = f"model.layers.{config.get('num_hidden_layers')}."
    foreign = ("v_head.summary.", further_layer, "model.scale", "model.my_scale")
    left_over = {name for name in loading["unexpected_keys"] if not name.startswith(foreign)}
    assert (set(loading["missing_keys"]), left_over, set(loading["mismatched_keys"])) == (set(), set(), set())
    # The grouped kernel wants rows of whole 16 bytes, which such small experts do not have.
    model.set_experts_implementation("eager")
    return model.eval()


def _adapt(base: Path, adapter: Path) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(_load(base), adapter)
    assert not [str(warning.message) for warning in caught if "missing adapter keys" in str(warning.message)]
    return model.eval()


@torch.no_grad()
def _compute(model: Any) -> Any:
    """The logits, or the hidden states of a model without a head, of a few tokens."""
    result = model(input_ids=torch.tensor([[1, 9, 3, 16, 8, 2, 11]]))
    return result.logits if hasattr(result, "logits") else result
