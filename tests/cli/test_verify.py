"""`verify`: what was merged holds, alone and against its source; what was damaged afterwards does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from commands import Outcome, run
from golden_set import GoldenCase, Run, committed_cases, larger_cases
from unshard.errors import VerificationError
from unshard.verify.structure import check_weights_file


def _merges() -> list[object]:
    pairs = [(case, each) for case in [*committed_cases(), *larger_cases()] for each in case.runs if not each.error]
    return [pytest.param(case, each, id=f"{case.name}-{each.label}") for case, each in pairs]


@pytest.mark.parametrize(("case", "each"), _merges())
def test_every_merge_holds(case: GoldenCase, each: Run, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert run(*case.command(each, output)).code == 0
    options = [option.format(case=case.directory) for option in each.options]
    for words in (("verify", output), ("verify", output, "--against", case.source, *options)):
        code, stdout, stderr = run(*words)
        assert code == 0, stdout + stderr


def merge(source: Path, output: Path, *options: str) -> Path:
    assert run("merge", source, output, *options).code == 0
    return output


@pytest.fixture
def source(committed_golden: Path) -> Path:
    return committed_golden / "fsdp2_w4" / "ckpt"


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 0x10
    file.write_bytes(data)


def add_tensor(file: Path, name: str) -> None:
    save_file({**load_file(file), name: np.zeros(3, np.float32)}, file)


def change_index(output: Path, change: Callable[[dict[str, object]], object], name: str = "model.safetensors") -> None:
    file = output / f"{name}.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def swap_two(index: dict[str, dict[str, str]]) -> None:
    (a, first), *_, (b, last) = index["weight_map"].items()
    index["weight_map"].update({a: last, b: first})


Damage = Callable[[Path], object]
SHARD = "model-00002-of-00007.safetensors"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a flipped byte of a header": (lambda out: flip(out / SHARD, 12), SHARD),
    "a file cut short": (lambda out: (out / SHARD).write_bytes((out / SHARD).read_bytes()[:-1]), SHARD),
    "an empty file": (lambda out: (out / SHARD).write_bytes(b""), SHARD),
    "a file that is too long": (lambda out: (out / SHARD).write_bytes((out / SHARD).read_bytes() + b"x"), SHARD),
    "a missing file": (lambda out: (out / SHARD).unlink(), SHARD),
    "a file of another model": (
        lambda out: shutil.copyfile(out / "model-00003-of-00007.safetensors", out / SHARD),
        "model-00003-of-00007.safetensors",
    ),
    "an extra tensor": (lambda out: add_tensor(out / SHARD, "surplus"), "surplus"),
    "a stale total": (
        lambda out: change_index(out, lambda index: index["metadata"].update(total_size=7)),
        "tells of 7 bytes",
    ),
    "an index that names the wrong files": (lambda out: change_index(out, swap_two), "names the wrong file"),
    "an index that names what is not there": (
        lambda out: change_index(out, lambda index: index["weight_map"].update(ghost=SHARD)),
        "ghost",
    ),
    "an index that forgets a tensor": (
        lambda out: change_index(out, lambda index: index["weight_map"].pop("model.norm.weight")),
        "model.norm.weight",
    ),
    "no index": (lambda out: (out / "model.safetensors.index.json").write_text("{"), "index"),
    "a broken config": (lambda out: (out / "config.json").write_text("{"), "config.json"),
    "another config": (
        lambda out: (out / "config.json").write_text(
            (out / "config.json").read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2')
        ),
        "model.layers.1",
    ),
    "a merge that was killed": (lambda out: (out / ".unshard-in-progress").write_text("{}"), "is not whole"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_structure_tells_of(damage: str, source: Path, tmp_path: Path) -> None:
    output = merge(source, tmp_path / "out", "--max-shard-size", "2kB")
    assert run("verify", output).code == 0
    act, named = DAMAGES[damage]
    act(output)
    code, stdout, stderr = run("verify", output)
    assert code in (4, 5, 6, 8), stderr
    assert named in stderr
    assert not stdout


@pytest.mark.parametrize("which", ["first", "last"])
def test_contents_tell_of_a_flipped_byte(which: str, source: Path, tmp_path: Path) -> None:
    output = merge(source, tmp_path / "out")
    file = output / "model.safetensors"
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    flip(file, start if which == "first" else -1)
    assert run("verify", output).code == 0  # a safetensors file has no checksum
    code, stdout, stderr = run("verify", output, "--against", source)
    assert code == 8
    assert "14 of 15 tensors identical, 1 difference" in stdout
    assert "lm_head.weight" in stdout if which == "first" else "model.norm.weight" in stdout
    assert "are not the same model" in stderr


class TestBin:
    def test_holds(self, source: Path, tmp_path: Path) -> None:
        output = merge(source, tmp_path / "out", "--format", "bin", "--max-shard-size", "2kB")
        assert run("verify", output).code == 0
        assert run("verify", output, "--against", source).code == 0
        assert run("verify", output, "--against", merge(source, tmp_path / "safetensors")).code == 0

    def test_checksums_tell_of_a_flipped_byte(self, source: Path, tmp_path: Path) -> None:
        file = merge(source, tmp_path / "out", "--format", "bin") / "pytorch_model.bin"
        flip(file, file.stat().st_size // 2)
        code, _, stderr = run("verify", tmp_path / "out")
        assert code == 8
        assert "the checksum of `pytorch_model/data/" in stderr


class TestAdapters:
    @pytest.fixture
    def case(self, committed_golden: Path) -> Path:
        return committed_golden / "lora"

    @pytest.fixture
    def output(self, case: Path, tmp_path: Path) -> Path:
        return merge(case / "ckpt", tmp_path / "out")

    def test_a_changed_adapter(self, case: Path, output: Path) -> None:
        flip(output / "lora_adapter" / "adapter_model.safetensors", -1)
        code, stdout, _ = run("verify", output, "--against", case / "ckpt")
        assert code == 8
        assert "lora_adapter/base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight" in stdout

    def test_a_changed_alpha(self, case: Path, output: Path) -> None:
        config = output / "lora_adapter" / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 99}))
        code, stdout, _ = run("verify", output, "--against", case / "ckpt")
        assert code == 8
        assert "lora_adapter/adapter_config.json  lora_alpha  99 and 8" in stdout

    def test_a_missing_adapter(self, case: Path, output: Path) -> None:
        shutil.rmtree(output / "lora_adapter")
        code, stdout, stderr = run("verify", output, "--against", case / "ckpt")
        assert code == 8
        assert "only against  6: `lora_adapter/base_model" in stdout
        assert "hint: if the model was merged with --fuse-lora, say so here, too" in stderr

    def test_a_damaged_adapter(self, output: Path) -> None:
        file = output / "lora_adapter" / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        code, _, stderr = run("verify", output)
        assert code == 4
        assert "adapter_model.safetensors" in stderr

    def test_a_model_without_adapter_is_compared_with_the_base(self, case: Path, output: Path) -> None:
        code, stdout, _ = run("verify", output, "--against", case / "truth")
        assert code == 0
        assert "was not compared" in stdout
        assert "equal: 12 of 12 tensors identical" in stdout

    def test_two_outputs_of_one_checkpoint(self, output: Path, case: Path, tmp_path: Path) -> None:
        other = merge(case / "ckpt", tmp_path / "other")
        assert "18 of 18" in run("verify", output, "--against", other).stdout
        flip(other / "lora_adapter" / "adapter_model.safetensors", -1)
        assert run("verify", output, "--against", other).code == 8

    def test_fused_weights_are_computed_anew(self, case: Path, tmp_path: Path) -> None:
        output = merge(case / "ckpt", tmp_path / "out", "--fuse-lora")
        words = ("verify", output, "--against", case / "ckpt")
        assert run(*words, "--fuse-lora").code == 0
        assert run(*words).code == 8
        tensors = load_file(output / "model.safetensors")
        tensors["model.layers.0.self_attn.q_proj.weight"][3, 5] += 1e-6
        save_file(tensors, output / "model.safetensors")
        code, stdout, _ = run(*words, "--fuse-lora")
        assert code == 8
        assert "11 of 12 tensors identical, 1 difference" in stdout
        assert run(*words, "--fuse-lora", "--atol", "1e-5").code == 0

    def test_an_adapter_directory_against_its_checkpoint(self, case: Path, tmp_path: Path) -> None:
        output = merge(case / "ckpt", tmp_path / "out", "--adapter-only")
        assert run("verify", output, "--against", case / "ckpt").code == 0
        assert run("verify", output, "--against", case / "truth_adapter").code == 0
        flip(output / "adapter_model.safetensors", -1)
        assert run("verify", output, "--against", case / "ckpt").code == 8


class TestTies:
    def test_a_head_that_one_side_stores(self, committed_golden: Path, tmp_path: Path) -> None:
        case = committed_golden / "fsdp2_bf16_tied"
        output = merge(case / "ckpt", tmp_path / "out")
        reference = tmp_path / "reference"
        shutil.copytree(output, reference)
        tensors = load_file(reference / "model.safetensors")
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        save_file(tensors, reference / "model.safetensors")
        for pair in ((output, reference), (reference, output), (reference, case / "ckpt")):
            assert run("verify", pair[0], "--against", pair[1]).code == 0
        tensors["lm_head.weight"].view(np.uint16)[0, 0] ^= 1
        save_file(tensors, reference / "model.safetensors")
        code, stdout, _ = run("verify", output, "--against", reference)
        assert code == 8
        assert "lm_head.weight" in stdout


class TestFigures:
    """Differences and cosines, from two lone files."""

    @staticmethod
    def compare(tmp_path: Path, left: np.ndarray, right: np.ndarray, *options: str) -> Outcome:
        save_file({"x": left}, tmp_path / "left.safetensors")
        save_file({"x": right}, tmp_path / "right.safetensors")
        words = ("verify", tmp_path / "left.safetensors", "--against", tmp_path / "right.safetensors")
        return run(*words, "--json", *options)

    def figures(self, tmp_path: Path, left: np.ndarray, right: np.ndarray, *options: str) -> dict[str, object]:
        outcome = self.compare(tmp_path, left, right, *options)
        verdict = next(event for event in outcome.events if event["event"] == "verdict")
        assert verdict["holds"] == (outcome.code == 0)
        (tensor,) = verdict["comparison"]["tensors"]
        return dict(tensor)

    def test_maximum_difference_and_cosine(self, tmp_path: Path) -> None:
        left, right = np.float32([3, 4, 0]), np.float32([3, 4, 12])
        found = self.figures(tmp_path, left, right)
        assert found["max_difference"] == 12
        assert found["cosine"] == pytest.approx(5 / 13)
        assert found["failure"] == "bytes differ"

    def test_other_shapes_have_no_figures(self, tmp_path: Path) -> None:
        found = self.figures(tmp_path, np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32), "--atol", "1")
        assert (found["max_difference"], found["cosine"]) == (None, None)
        assert found["failure"] == "shapes differ"

    @pytest.mark.parametrize(("value", "shown"), [(np.inf, "inf"), (np.nan, "inf")])
    def test_what_is_not_finite_is_valid_json(self, value: float, shown: str, tmp_path: Path) -> None:
        found = self.figures(tmp_path, np.float32([1, value]), np.float32([1, 2]), "--atol", "1")
        assert found["max_difference"] == shown
        assert found["failure"]

    def test_equal_nan_is_equal(self, tmp_path: Path) -> None:
        left = np.float32([1, np.nan])
        assert self.figures(tmp_path, left, left.copy())["identical"] is True

    @pytest.mark.parametrize("option", ["--atol", "--rtol"])
    def test_infinities_and_nan_are_near_to_themselves_alone(self, option: str, tmp_path: Path) -> None:
        left = np.float32([1, np.inf, -np.inf, np.nan, 5])
        right = left + np.float32([0, 0, 0, 0, 0.001])
        assert self.figures(tmp_path, left, right, option, "0.1")["failure"] is None
        for value in (np.inf, -np.inf, np.nan):
            right = np.float32([1, np.inf, -np.inf, np.nan, value])
            found = self.figures(tmp_path, left, right, option, "0.1")
            assert found["failure"] == "1 element beyond the tolerance"

    def test_zero_has_a_sign(self, tmp_path: Path) -> None:
        left, right = np.float32([0.0, 1]), np.float32([-0.0, 1])
        assert self.figures(tmp_path, left, right)["failure"] == "bytes differ"
        assert self.figures(tmp_path, left, right, "--atol", "0")["failure"] is None

    def test_relative_tolerance(self, tmp_path: Path) -> None:
        left, right = np.float32([1000, 1]), np.float32([1001, 1])
        assert self.figures(tmp_path, left, right, "--rtol", "0.01")["failure"] is None
        assert self.figures(tmp_path, left, right, "--rtol", "1e-5")["failure"]

    def test_empty_tensors_and_scalars(self, tmp_path: Path) -> None:
        assert self.figures(tmp_path, np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32))["identical"]
        assert self.figures(tmp_path, np.array(1, np.float32), np.array(2, np.float32))["max_difference"] == 1

    def test_complex_numbers(self, tmp_path: Path) -> None:
        found = self.figures(tmp_path, np.complex64([1 + 2j, 3]), np.complex64([1 + 2j, 3 - 4j]), "--atol", "5")
        assert (found["max_difference"], found["failure"]) == (4, None)

    def test_large_tensors_are_compared_in_bands(self, tmp_path: Path) -> None:
        left = np.random.default_rng(0).standard_normal((3000, 300)).astype(np.float32)
        right = left.copy()
        right[2999, 299] += 1
        found = self.figures(tmp_path, left, right)
        assert found["max_difference"] == pytest.approx(1, abs=1e-6)
        expected = np.vdot(left, right) / np.linalg.norm(left) / np.linalg.norm(right)
        assert found["cosine"] == pytest.approx(expected, abs=1e-5)


def test_whatever_byte_of_an_archive_is_damaged_is_told_and_no_bug(source: Path, tmp_path: Path) -> None:
    """Python's reader has an exception of its own for each: names that are no UTF-8, passwords, unknown methods."""
    file = merge(source, tmp_path / "out", "--format", "bin") / "pytorch_model.bin"
    data = file.read_bytes()
    start = data.index(b"PK\x01\x02")
    for place in [*range(60), *range(start, len(data))]:
        damaged = bytearray(data)
        damaged[place] ^= 0x81
        file.write_bytes(damaged)
        assert all(isinstance(problem, VerificationError) for problem in check_weights_file(file))


@pytest.mark.parametrize("words", [("--names", "stored"), ("--weights-only",)], ids=" ".join)
def test_stored_names_hold_where_they_were_asked_for(
    words: tuple[str, ...], committed_golden: Path, tmp_path: Path
) -> None:
    """Megatron's names are not those of the config that `--names stored` writes beside them."""
    case = committed_golden / "megatron_legacy_tp2"
    options = ("--config", str(case / "hf"), *words)
    output = merge(case / "ckpt", tmp_path / "out", *options)
    assert run("verify", output, *words).code == 0
    assert run("verify", output, "--against", case / "ckpt", *options).code == 0


def test_a_model_that_was_rounded_holds_against_the_model_it_was_merged_from(
    committed_golden: Path, tmp_path: Path
) -> None:
    source = committed_golden / "hf_shards_whole" / "truth"
    output = merge(source, tmp_path / "out", "--dtype", "bf16")
    assert run("verify", output, "--against", source).code == 8
    code, stdout, stderr = run("verify", output, "--against", source, "--dtype", "bf16", "-v")
    assert code == 0, stderr
    assert "12 of 12 tensors identical" in stdout
    assert "as `--dtype bf16` rounds it" in stdout
