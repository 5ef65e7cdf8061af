"""Plain Hugging Face directories through `unshard merge`: what transformers loads from both sides is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model(*, tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES, tie_word_embeddings=tied)
    return transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)


def load(directory: Path) -> dict[str, Any]:
    """What transformers makes of a directory that it loads without a complaint."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, dtype="auto")
    assert not any(report.values()), report
    return model.state_dict()  # type: ignore[no-any-return]


def save_whole(model: Any, directory: Path) -> None:
    model.save_pretrained(directory)


def save_indexed(model: Any, directory: Path) -> None:
    model.save_pretrained(directory, max_shard_size=20_000)
    assert len(list(directory.glob("*.safetensors"))) > 1


def save_bin(model: Any, directory: Path, *, legacy: bool = False) -> None:
    """Tied weights lie under both names, in one storage."""
    directory.mkdir()
    model.config.save_pretrained(directory)
    state = model.state_dict()
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)


def save_legacy_bin(model: Any, directory: Path) -> None:
    save_bin(model, directory, legacy=True)


def save_indexed_bin(model: Any, directory: Path) -> None:
    directory.mkdir()
    model.config.save_pretrained(directory)
    state = model.state_dict()
    weight_map = {}
    for number, part in enumerate((list(state)[:8], list(state)[8:]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: state[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def save_in_hub_cache(model: Any, directory: Path) -> None:
    """Links to blobs, as huggingface_hub keeps what it fetched."""
    fetched = directory.parent / "fetched"
    model.save_pretrained(fetched, max_shard_size=20_000)
    blobs = directory / "blobs"
    snapshot = directory / "snapshots/0123456789abcdef0123456789abcdef01234567"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(fetched.iterdir()):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")


SAVES = [save_whole, save_indexed, save_bin, save_legacy_bin, save_indexed_bin, save_in_hub_cache]


@pytest.mark.parametrize(
    "options", [(), ("--max-shard-size", "20kB"), ("--format", "bin"), ("--dtype", "fp32", "--max-shard-size", "50kB")]
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("save", SAVES, ids=lambda save: save.__name__)
def test_a_model_stays_the_same(
    tmp_path: Path, save: Callable[[Any, Path], None], tied: bool, options: tuple[str, ...]
) -> None:
    model = make_model(tied=tied)
    save(model, tmp_path / "source")
    merged = run("merge", tmp_path / "source", tmp_path / "merged", *options)
    assert merged.code == 0, merged.stderr
    dtype = torch.float32 if "fp32" in options else torch.bfloat16
    found = load(tmp_path / "merged")
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], value.to(dtype)), name
    files = sorted(path.name for path in (tmp_path / "merged").iterdir())
    assert any(name.endswith(".bin" if "bin" in options else ".safetensors") for name in files)
    assert ("--max-shard-size" in options) == any(name.endswith(".index.json") for name in files)


def test_a_model_in_pieces_of_another_size_comes_back_byte_for_byte(tmp_path: Path) -> None:
    save_whole(make_model(tied=False), tmp_path / "source")
    before = (tmp_path / "source/model.safetensors").read_bytes()
    for place, after, options in (("source", "cut", ("--max-shard-size", "9kB")), ("cut", "bin", ("--format", "bin"))):
        assert run("merge", tmp_path / place, tmp_path / after, *options).code == 0
    assert run("merge", tmp_path / "bin", tmp_path / "back").code == 0
    assert (tmp_path / "back/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_an_adapter_stays_the_same(tmp_path: Path, safe: bool) -> None:
    peft = pytest.importorskip("peft")
    model = make_model(tied=False)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "source", safe_serialization=safe)
    merged = run("merge", tmp_path / "source", tmp_path / "merged")
    assert merged.code == 0, merged.stderr
    save_whole(make_model(tied=False), tmp_path / "base")
    sides = []
    for place in ("source", "merged"):
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
        sides.append(peft.PeftModel.from_pretrained(base, tmp_path / place).state_dict())
    assert sides[0].keys() == sides[1].keys()
    assert all(torch.equal(sides[0][name], sides[1][name]) for name in sides[0])


def test_names_of_no_family_stay_as_they_are(tmp_path: Path) -> None:
    """A transformer of diffusers: names, index and all."""
    state = {f"transformer_blocks.{n}.attn.to_q.weight": torch.randn(8, 8) for n in range(4)}
    from safetensors.torch import load_file, save_file

    (tmp_path / "source").mkdir()
    weight_map = {}
    for number, part in enumerate((list(state)[:2], list(state)[2:]), 1):
        file = f"diffusion_pytorch_model-{number:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, tmp_path / "source" / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "source/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert run("merge", tmp_path / "source", tmp_path / "merged", "--weights-only").code == 0
    found = load_file(tmp_path / "merged/model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_wrong_index_is_repaired_from_the_command_line(tmp_path: Path) -> None:
    model = make_model(tied=False)
    save_indexed(model, tmp_path / "source")
    index = tmp_path / "source/model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    refused = run("merge", tmp_path / "source", tmp_path / "merged")
    assert refused.code == 5
    assert "does not list 1 tensors that are in its files: lm_head.weight" in refused.stderr
    assert "--repair-index" in refused.stderr
    assert run("inspect", tmp_path / "source").code == 5
    assert run("inspect", tmp_path / "source", "--repair-index").code == 0
    assert run("merge", tmp_path / "source", tmp_path / "merged", "--repair-index").code == 0
    found = load(tmp_path / "merged")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    assert run("verify", tmp_path / "merged", "--against", tmp_path / "source", "--repair-index").code == 0
    assert run("verify", tmp_path / "source", "--repair-index").code == 5
