"""verl's command lines as they are: words, spellings, abbreviations, defaults."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commands import run
from unshard.cli import COMMANDS, compat
from unshard.cli.merge import describe as describe_merge
from unshard.cli.parser import build_parser
from unshard.cli.spelling import spell_out
from unshard.cli.test import describe as describe_test
from unshard.errors import UsageError

VERL = {
    "merge": {
        "--backend", "--local_dir", "--tie-word-embedding", "--is-value-model", "--trust-remote-code",
        "--use_cpu_initialization", "--target_dir", "--hf_upload_path", "--private", "--help",
    },
    "test": {
        "--backend", "--local_dir", "--tie-word-embedding", "--is-value-model", "--trust-remote-code",
        "--use_cpu_initialization", "--test_hf_dir", "--help",
    },
}  # fmt: skip
"""The options of `python -m verl.model_merger`."""


def spell(command: str, *words: str) -> list[str]:
    parser = build_parser(command, "", {"merge": describe_merge, "test": describe_test}[command])
    return spell_out(words, parser.spellings, compat.DIALECTS[command], parser.prog)


def unique_prefixes(options: set[str]) -> list[tuple[str, str]]:
    """Every abbreviation that argparse takes for one of the options, with that option."""
    prefixes = [(option[:end], option) for option in sorted(options) for end in range(3, len(option) + 1)]
    return [
        (prefix, option)
        for prefix, option in prefixes
        if [other for other in options if other.startswith(prefix)] == [option]
    ]


@pytest.mark.parametrize("command", ["merge", "test"])
def test_every_abbreviation_of_verls_parser_means_the_same_here(command: str) -> None:
    pairs = unique_prefixes(VERL[command])
    assert ("--hf", "--hf_upload_path") in pairs or command == "test"
    assert ("--l", "--local_dir") in pairs
    assert {prefix: spell(command, prefix)[0] for prefix, _ in pairs} == dict(pairs)


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("--hf_m", "--hf_model_path"),
        ("--hf_up", "--hf_upload_path"),
        ("--tie_word_embedding", "--tie-word-embedding"),
        ("--local-dir", "--local_dir"),
        ("--is_value_model", "--is-value-model"),
        ("--trust_remote_code", "--trust-remote-code"),
        ("--use-cpu-initialization", "--use_cpu_initialization"),
        ("--low-cpu", "--low_cpu_mem_usage"),
        ("--num_attention_heads", "--num-attention-heads"),
        ("--num-key", "--num-key-value-heads"),
        ("--hf-model-path", "--hf_model_path"),
        ("--max_shard", "--max-shard-size"),
        ("--un", "--untie-word-embedding"),
    ],
)
def test_spellings(word: str, option: str) -> None:
    assert spell("merge", word)[0] == option
    assert spell("merge", f"{word}=x")[0] == f"{option}=x"


@pytest.mark.parametrize("word", ["--t", "--n", "--c"])
def test_ambiguous_abbreviations_name_what_they_could_mean(word: str) -> None:
    with pytest.raises(UsageError, match="could mean `--"):
        spell("merge", word)


@pytest.mark.parametrize("command", COMMANDS)
def test_both_spellings_of_every_option_are_taken(command: str) -> None:
    from importlib import import_module

    parser = build_parser(command, "", import_module(f"unshard.cli.{command}").describe)
    options = [option for option in parser.spellings if option.startswith("--")]
    for option in options:
        for spelling in (option, "--" + option[2:].replace("_", "-"), "--" + option[2:].replace("-", "_")):
            assert spell_out([spelling], parser.spellings, (), parser.prog)[0] == option


def test_options_may_stand_between_and_before_paths(committed_golden: Path, tmp_path: Path) -> None:
    source = committed_golden / "fsdp2_w4" / "ckpt"
    assert run("-q", "merge", source, "--dtype", "bf16", tmp_path / "out").code == 0
    assert run("merge", "--dtype=bf16", "--", source, tmp_path / "other").code == 0


class TestMerge:
    def test_the_line_of_verls_documentation(self, committed_golden: Path, tmp_path: Path) -> None:
        source = committed_golden / "fsdp2_w4" / "ckpt"
        words = ("merge", "--backend", "fsdp", "--local_dir", source, "--target_dir", tmp_path / "merged_hf_model")
        assert run(*words).code == 0
        assert (tmp_path / "merged_hf_model" / "model.safetensors").is_file()

    def test_the_default_target_is_tmp(
        self, committed_golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        source = committed_golden / "fsdp2_w4" / "ckpt"
        assert run("merge", "--backend", "fsdp", "--local_dir", source).code == 0
        assert (tmp_path / "tmp" / "model.safetensors").is_file()

    def test_one_path_beside_local_dir_is_the_target(self, committed_golden: Path, tmp_path: Path) -> None:
        source = committed_golden / "fsdp2_w4" / "ckpt"
        assert run("merge", "--local_dir", source, tmp_path / "out").code == 0
        assert (tmp_path / "out" / "model.safetensors").is_file()

    def test_a_config_from_elsewhere(self, committed_golden: Path, tmp_path: Path) -> None:
        """Verl's old merger needed `--hf_model_path`, as its checkpoints had no config."""
        shutil.copytree(committed_golden / "fsdp2_w4" / "ckpt", tmp_path / "ckpt")
        (tmp_path / "ckpt" / "huggingface").rename(tmp_path / "hf")
        words = ("merge", "--backend", "fsdp", "--local_dir", tmp_path / "ckpt", "--target_dir", tmp_path / "out")
        assert run(*words).code == 6
        assert run(*words, "--hf_model_path", tmp_path / "hf").code == 0
        assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()

    def test_a_config_file_of_any_name_is_the_config(self, committed_golden: Path, tmp_path: Path) -> None:
        shutil.copytree(committed_golden / "fsdp2_w4" / "ckpt", tmp_path / "ckpt")
        config = tmp_path / "ckpt" / "huggingface" / "config.json"
        config.rename(tmp_path / "the_right_one.json")
        (tmp_path / "config.json").write_text('{"model_type": "a decoy"}')
        words = ("merge", tmp_path / "ckpt", tmp_path / "out", "--config", tmp_path / "the_right_one.json")
        assert run(*words).code == 0
        written = (tmp_path / "out" / "config.json").read_bytes()
        assert written == (tmp_path / "the_right_one.json").read_bytes()
        assert (tmp_path / "out" / "tokenizer.json").is_file()

    @pytest.mark.parametrize("heads", ["--num-attention-heads", "--num-key-value-heads"])
    def test_head_counts_must_agree_with_the_config(self, heads: str, committed_golden: Path, tmp_path: Path) -> None:
        source = committed_golden / "fsdp2_w4" / "ckpt"
        right = {"--num-attention-heads": 4, "--num-key-value-heads": 2}[heads]
        assert run("merge", source, tmp_path / "out", heads, str(right)).code == 0
        code, _, stderr = run("merge", source, tmp_path / "other", heads, "7")
        assert code == 2
        assert "contradicts config.json" in stderr
        assert not (tmp_path / "other").exists()


class TestTest:
    """`test --local_dir X --test_hf_dir Y`: X may be a checkpoint or a merged directory."""

    @pytest.mark.parametrize("checked", ["ckpt", "truth"])
    def test_equal_models(self, checked: str, committed_golden: Path) -> None:
        case = committed_golden / "fsdp2_w4"
        words = ("test", "--backend", "fsdp", "--local_dir", case / checked, "--test_hf_dir", case / "truth")
        code, stdout, _ = run(*words)
        assert code == 0
        assert "equal: 15 of 15 tensors identical" in stdout

    @pytest.mark.parametrize("checked", ["ckpt", "truth"])
    def test_other_models(self, checked: str, committed_golden: Path) -> None:
        case, other = committed_golden / "fsdp2_w4", committed_golden / "fsdp2_mixtral"
        code, stdout, stderr = run("test", "--local_dir", case / checked, "--test_hf_dir", other / "truth")
        assert code == 8
        assert "not equal" in stdout
        assert "error: " in stderr

    def test_a_bf16_model_against_its_fp32_checkpoint(self, committed_golden: Path, tmp_path: Path) -> None:
        case = committed_golden / "fsdp2_w4"
        assert run("merge", case / "ckpt", tmp_path / "bf16", "--dtype", "bf16").code == 0
        for local, model in ((case / "ckpt", tmp_path / "bf16"), (tmp_path / "bf16", case / "truth")):
            words = ("test", "--local_dir", local, "--test_hf_dir", model)
            assert run(*words).code == 8
            assert run(*words, "--atol", "0.01").code == 0
            assert run(*words, "--rtol", "0.01").code == 0
            assert run(*words, "--min-cosine", "0.9999").code == 0
            assert run(*words, "--atol", "1e-7").code == 8
            assert run(*words, "--min-cosine", "1").code == 8
        assert run("test", case / "ckpt", tmp_path / "bf16", "--dtype", "bf16").code == 0

    def test_a_backend_without_a_checkpoint_is_remarked_on(self, committed_golden: Path) -> None:
        case = committed_golden / "fsdp2_w4"
        code, stdout, _ = run("test", "--backend", "megatron", case / "truth", case / "truth")
        assert code == 0
        assert "`--backend megatron` says nothing here" in stdout
