"""Every golden checkpoint, through the command that a person types: the result equals the truth bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tensor_files import Stored, assert_equal, assert_fused, read_tensors

from golden_set import COMMITTED, GoldenCase, Run, committed_cases, larger_cases
from unshard.cli import main
from unshard.errors import IncompleteError

CASES = [*committed_cases(), *larger_cases()]
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}
CHECKPOINT_FILES = re.compile(
    r"(.*\.(pt|bin|pkl|distcp|safetensors|metadata)|latest|(fsdp_config|lora_train_meta|adapter_config|.*\.index)\.json)"
)
"""What lies beside config and tokenizer, and is the checkpoint's own."""

OWN_WORDS = (2, 3, 4, 5, 6, 7, 8)
"""Exit codes of refusals; 1 and 70 would be accidents."""


def _parameters() -> list[Any]:
    pairs = [(case, run) for case in CASES for run in case.runs]
    return [pytest.param(case, run, id=f"{case.name}-{run.label}") for case, run in pairs]


@pytest.mark.parametrize(("case", "run"), _parameters())
def test_merge(case: GoldenCase, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "output"
    code = main(case.command(run, output))
    printed = capsys.readouterr()
    if run.error is not None:
        assert code in OWN_WORDS
        assert re.search(run.error, printed.err, re.DOTALL), printed.err
        assert not output.exists() or not list(output.iterdir())
        return
    assert code == 0, printed.err
    expected_files = set()
    if run.model is not None:
        _check_model(case, run, output)
        expected_files |= {"model.safetensors"} | _check_side_files(case, run, output)
    elif run.adapter is not None:  # an adapter comes with the tokenizer it was trained with, but with no model's config
        expected_files |= _check_side_files(case, run, output)
    if run.adapter is not None:
        where = output / "lora_adapter" if run.model is not None else output
        _check_adapter(where, case.directory / run.adapter, case.directory / "truth")
        expected_files |= {str((where / name).relative_to(output)) for name in ADAPTER_FILES}
    found_files = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    assert found_files == expected_files


def _check_model(case: GoldenCase, run: Run, output: Path) -> None:
    assert run.model is not None
    found, truth = read_tensors(output), read_tensors(case.directory / run.model, foreign=True)
    if run.fused:
        assert_fused(found, truth, read_tensors(case.directory / "truth"))
    else:
        assert_equal(found, truth)


def _check_side_files(case: GoldenCase, run: Run, output: Path) -> set[str]:
    """Config, tokenizer and code come out as they lie in the source, byte for byte; returns their names."""
    source = case.side_files(run)
    if source is None or "--weights-only" in run.options:
        return set()
    names = {path.name for path in source.iterdir() if path.is_file() and not CHECKPOINT_FILES.fullmatch(path.name)}
    if run.model is None:
        names -= {"config.json", "generation_config.json"}
    for name in names:
        config = _expected_config(case, run, source / name) if name == "config.json" else None
        if config is not None and config != json.loads((source / name).read_text()):
            assert json.loads((output / name).read_text()) == config
        else:
            assert (output / name).read_bytes() == (source / name).read_bytes(), name
    return names


def _expected_config(case: GoldenCase, run: Run, source: Path) -> dict[str, Any]:
    """The config of the source, with what must differ: whether embeddings are tied, and the precision of the model."""
    config: dict[str, Any] = json.loads(source.read_text())
    if "--untie-word-embedding" in run.options:
        config["tie_word_embeddings"] = False
    truth = case.directory / (run.model or "").removesuffix("_raw") / "config.json"
    if "dtype" in config and truth.is_file():
        config["dtype"] = json.loads(truth.read_text())["dtype"]
    return config


def _check_adapter(found: Path, truth: Path, base: Path) -> None:
    assert_equal(read_tensors(found), read_tensors(truth))
    configs = [json.loads((place / "adapter_config.json").read_text()) for place in (found, truth)]
    modules = [name.removesuffix(".weight") for name in read_tensors(base) if name.endswith(".weight")]
    meanings = [_meaning(config, modules) for config in configs]
    assert meanings[0] == meanings[1]


def _meaning(config: dict[str, Any], modules: list[str]) -> dict[str, Any]:
    """What PEFT makes of an adapter_config.json, module by module: rank and alpha of each target, and the variant."""
    targets = [module for module in modules if any(_ends_with(module, end) for end in config["target_modules"])]
    return {
        "rank": {module: _by_pattern(config.get("rank_pattern"), module, config["r"]) for module in targets},
        "alpha": {module: _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]) for module in targets},
        "saved": set(config.get("modules_to_save") or ()),
        "variant": [bool(config.get(key)) for key in ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out")],
        "kind": (config["peft_type"], config["task_type"]),
    }


def _ends_with(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that matches the end of the module's path, after a dot."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


class TestAnyLevel:
    """A run's directory, a step's, or the one with the files: whichever is named, the same model comes of it."""

    @pytest.mark.parametrize(
        ("name", "below"),
        [
            ("accelerate_fsdp2", "."),
            ("accelerate_fsdp2", "checkpoint-1"),
            ("accelerate_fsdp2", "checkpoint-1/pytorch_model_fsdp_0"),
            ("accelerate_fsdp2_run", "checkpoint-1/pytorch_model_fsdp_0"),
            ("hf_shards_consolidated", "."),
            ("hf_shards_consolidated", "sharded"),
            ("deepspeed_z2_trainer", "."),
            ("deepspeed_z2_trainer", "checkpoint-1"),
            ("deepspeed_z2_trainer", "checkpoint-1/global_step1"),
            ("deepspeed_z3_bf16", "global_step1"),
        ],
    )
    def test_the_same_model(self, name: str, below: str, tmp_path: Path) -> None:
        assert main(["merge", str(COMMITTED / name / "ckpt" / below), str(tmp_path)]) == 0
        assert_equal(read_tensors(tmp_path), read_tensors(COMMITTED / name / "truth"))
        assert (tmp_path / "tokenizer.json").is_file()


class TestMissingRanks:
    """HSDP over two replicas of two pieces: ranks 0 and 2 hold the same, and so do 1 and 3."""

    CASE = COMMITTED / "fsdp2_hsdp"

    def test_replicas_stand_in(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self._merge_without((0, 3), tmp_path) == 0
        assert re.search(r"rank.*0.*3", capsys.readouterr().out)
        assert_equal(read_tensors(tmp_path / "output"), read_tensors(self.CASE / "truth"))

    def test_a_piece_without_replica_is_missed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self._merge_without((1, 3), tmp_path) == IncompleteError.exit_code
        assert re.search(r"rank.*1.*3", capsys.readouterr().err, re.DOTALL)

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [([], "? not proven: that all replicas hold"), (["--check-replicas"], "+ all replicas hold")],
    )
    def test_the_report_says_whether_replicas_were_compared(
        self, options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["merge", str(self.CASE / "ckpt"), str(tmp_path / "output"), *options]) == 0
        assert f" {sentence} the same bytes" in capsys.readouterr().out

    def test_a_checkpoint_without_replicas_says_nothing_of_them(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["merge", str(COMMITTED / "fsdp2_w4" / "ckpt"), str(tmp_path / "output")]) == 0
        assert "replicas" not in capsys.readouterr().out

    def _merge_without(self, ranks: tuple[int, ...], place: Path) -> int:
        shutil.copytree(self.CASE / "ckpt", place / "ckpt")
        for rank in ranks:
            (place / "ckpt" / f"model_world_size_4_rank_{rank}.pt").unlink()
        return main(["merge", str(place / "ckpt"), str(place / "output")])


class TestFlatParametersWithoutConfig:
    """Shapes come from the config that `--config` brings as well as from one beside the ranks."""

    def test_a_given_config_unflattens(self, tmp_path: Path) -> None:
        case, source = COMMITTED / "fsdp1_local", self._without_config(tmp_path)
        for given in (case / "truth", case / "truth" / "config.json"):
            output = tmp_path / f"output_of_{given.name}"
            assert main(["merge", str(source), str(output), "--config", str(given)]) == 0
            assert_equal(read_tensors(output), read_tensors(case / "truth"))

    def test_without_any_the_hint_names_both_ways(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["merge", str(self._without_config(tmp_path)), str(tmp_path / "output")]) != 0
        assert re.search(r"--config DIR, or .* --shapes-from DIR", capsys.readouterr().err)

    def _without_config(self, place: Path) -> Path:
        source = place / "ckpt"
        shutil.copytree(COMMITTED / "fsdp1_local" / "ckpt", source, ignore=shutil.ignore_patterns("huggingface"))
        return source


class TestOldTorch:
    """Files of torch 2.1 and 2.4, whose classes have other names and states."""

    @pytest.mark.parametrize(("version", "names"), [("2.1.2", "ar"), ("2.4.1", "ahr")])
    def test_dtensors_of_old_torch(self, version: str, names: str, larger_golden: Path, tmp_path: Path) -> None:
        output = tmp_path / "output"
        source = larger_golden / "old_torch" / f"torch-{version}"
        assert main(["merge", str(source), str(output), "--weights-only"]) == 0
        values = {name: tensor.values().tolist() for name, tensor in read_tensors(output).items()}
        pairs = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]
        truth = {"a": pairs, "h": pairs, "r": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}
        assert values == {name: truth[name] for name in names}

    def test_three_flavours_of_fsdp1(self, larger_golden: Path, tmp_path: Path) -> None:
        """Sharded and flat state dicts of one model agree; the DTensors are of a model of other values."""
        sharded = self._merge(larger_golden, "st", tmp_path)
        flat = self._merge(larger_golden, "st_local", tmp_path, "--shapes-from", str(tmp_path / "st_output"))
        assert_equal(flat, sharded)
        dtensors = self._merge(larger_golden, "dt", tmp_path)
        assert {name: tensor.shape for name, tensor in dtensors.items()} == {
            name: tensor.shape for name, tensor in sharded.items()
        }
        assert dtensors["head.weight"].data == dtensors["embed.weight"].data != sharded["embed.weight"].data

    @pytest.mark.parametrize("flavour", ["st", "dt"])
    def test_distributed_checkpoints(self, flavour: str, larger_golden: Path, tmp_path: Path) -> None:
        """DCP of torch 2.4 holds what the ranks' own files hold."""
        directory = larger_golden / "old_torch" / "torch-2.4.1-fsdp1" / f"dcp_{flavour}"
        assert main(["merge", str(directory), str(tmp_path / "merged"), "--weights-only"]) == 0
        assert_equal(read_tensors(tmp_path / "merged"), self._merge(larger_golden, flavour, tmp_path))

    @classmethod
    def _merge(cls, larger_golden: Path, flavour: str, place: Path, *options: str) -> dict[str, Stored]:
        cls._lay_out(larger_golden, flavour, place / flavour)
        output = place / f"{flavour}_output"
        assert main(["merge", str(place / flavour), str(output), "--weights-only", *options]) == 0
        return read_tensors(output)

    @staticmethod
    def _lay_out(larger_golden: Path, flavour: str, place: Path) -> None:
        place.mkdir()
        for rank in range(2):
            file = larger_golden / "old_torch" / "torch-2.4.1-fsdp1" / f"{flavour}_r{rank}.pt"
            shutil.copyfile(file, place / f"model_world_size_2_rank_{rank}.pt")
