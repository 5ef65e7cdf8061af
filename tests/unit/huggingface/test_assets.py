"""Which files beside the weights belong to a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unshard.errors import FormatError
from unshard.formats.huggingface.assets import find_assets, find_stray_link, is_tokenizer_file

KEPT = (
    "LICENSE",
    "added_tokens.json",
    "additional_chat_templates/tool use.jinja",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "qwen.tiktoken",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)
LEFT = (
    "README.md",
    "adapter_config.json",
    "fsdp_config.json",
    "lora_train_meta.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "modeling_own.py",
    "optimizer.pt",
    "pytorch_model.bin",
    "rng_state_0.pth",
    "scheduler.pt",
    "train.log",
    "trainer_state.json",
    "training_args.bin",
    "additional_chat_templates/notes.txt",
    "checkpoint-1/config.json",
)


def write(directory: Path, *names: str, content: str = "{}") -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)


def paths(directory: Path) -> list[str]:
    return [asset.path for asset in find_assets(directory, "source")[1]]


def test_the_model_is_taken_and_the_training_is_left(tmp_path: Path) -> None:
    write(tmp_path, *KEPT, *LEFT)
    config, assets = find_assets(tmp_path, "root")
    assert [asset.path for asset in assets] == sorted(KEPT)
    assert config == {}
    assert {(asset.file.root, asset.file.path, asset.size) for asset in assets} == {("root", name, 2) for name in KEPT}


@pytest.mark.parametrize("named_in", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_code_comes_along_where_a_config_names_it(tmp_path: Path, named_in: str) -> None:
    write(tmp_path, "config.json", "modeling_own.py", "helpers.py")
    write(tmp_path, named_in, content='{"auto_map": {"AutoModel": "modeling_own.Own"}}')
    assert {"helpers.py", "modeling_own.py"} <= set(paths(tmp_path))


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer.json", content="")
    config, assets = find_assets(tmp_path, "source")
    assert config is None
    assert [(asset.path, asset.size) for asset in assets] == [("tokenizer.json", 0)]


def test_links_are_followed(tmp_path: Path) -> None:
    write(tmp_path, "blobs/1234", content='{"vocab_size": 7}')
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/config.json").symlink_to("../blobs/1234")
    config, assets = find_assets(tmp_path / "snapshot", "source")
    assert config == {"vocab_size": 7}
    assert assets[0].size == 17


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "malformed JSON"),
        (b'{"a": 1,\n "b": }', "line 2 column 7"),
        (b"[]", "found a list"),
        (b"null", "found a NoneType"),
        (b'{"a": "\xff"}', "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"[" * 100_000, "malformed JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "malformed JSON"),
    ],
)
def test_a_malformed_config_is_never_taken_for_an_absent_one(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=words):
        find_assets(tmp_path, "source")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_link_to_nothing_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("nothing")
    with pytest.raises(FormatError, match="cannot be read"):
        find_assets(tmp_path, "source")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "LICENSE"])
def test_what_is_no_file_is_told_at_once(tmp_path: Path, name: str) -> None:
    """A named pipe without a writer would be waited for."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(FormatError, match=f"{name}: not a regular file"):
        find_assets(tmp_path, "source")


def test_links_out_of_the_directory_are_found_and_those_of_a_hub_cache_are_none(tmp_path: Path) -> None:
    write(tmp_path, "model/config.json", "secret", "hub/blobs/1234", "hub/snapshots/main/LICENSE", "hub/blobs.txt")
    model, snapshot = tmp_path / "model", tmp_path / "hub/snapshots/main"
    (model / "tokenizer.json").symlink_to("../secret")
    (model / "vocab.json").symlink_to("config.json")
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    (snapshot / "vocab.json").symlink_to("../../blobs.txt")
    (tmp_path / "link").symlink_to("model")
    assert find_stray_link(tmp_path / "link", "tokenizer.json") == tmp_path / "secret"
    assert find_stray_link(snapshot, "vocab.json") == tmp_path / "hub/blobs.txt"
    inside = [(tmp_path / "link", "config.json"), (model, "vocab.json"), (snapshot, "LICENSE")]
    for place, name in [*inside, (snapshot, "config.json")]:
        assert find_stray_link(place, name) is None


def test_what_belongs_to_the_tokenizer() -> None:
    tokenizer = {name for name in KEPT if is_tokenizer_file(name)}
    assert tokenizer == set(KEPT) - {
        "LICENSE",
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
