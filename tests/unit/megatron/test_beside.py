"""What lies around Megatron's weights, in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unshard.checkpoint import Checkpoint
from unshard.formats.huggingface.assets import SideFilesError
from unshard.formats.megatron.beside import look_beside

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def write(*paths: Path) -> None:
    """Files of the names given: a config has content, a tokenizer is empty."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(CONFIG if path.name == "config.json" else {}))


class TestPlaces:
    @pytest.mark.parametrize(
        ("weights", "home"),
        [
            ("iter_0000010", "iter_0000010"),
            ("iter_0000010", "iter_0000010/hf"),
            ("iter_0000010", "."),
            ("weights", "hf_weights"),
            ("actor/dist_ckpt", "actor/huggingface"),
            ("actor/model/dist_ckpt", "actor/model/huggingface"),
            ("actor/model", "actor/huggingface"),
            ("actor/model/dist_ckpt", "actor/huggingface"),
        ],
    )
    def test_config_and_tokenizer(self, weights: str, home: str, tmp_path: Path) -> None:
        (tmp_path / weights).mkdir(parents=True)
        write(tmp_path / home / "config.json", tmp_path / home / "tokenizer.json")
        found = look_beside(tmp_path / weights).surroundings
        assert found.config == CONFIG
        assert [asset.path for asset in found.assets] == ["config.json", "tokenizer.json"]
        assert found.roots == {"assets": tmp_path / home}
        assert not found.problems

    @pytest.mark.parametrize(
        ("weights", "home"),
        [
            ("weights", "context"),
            ("weights", "context/nemo_tokenizer"),
            ("iter_0000010", "iter_0000010/tokenizer"),
        ],
    )
    @pytest.mark.parametrize("config", ["", "hf_weights"])
    def test_a_tokenizer_in_a_place_of_its_own(self, weights: str, home: str, config: str, tmp_path: Path) -> None:
        (tmp_path / weights).mkdir()
        write(tmp_path / home / "tokenizer.json", tmp_path / home / "special_tokens_map.json")
        if config:
            write(tmp_path / config / "config.json")
        found = look_beside(tmp_path / weights).surroundings
        assert found.config == (CONFIG if config else None)
        names = [asset.path for asset in found.assets]
        assert names == [*(["config.json"] if config else []), "special_tokens_map.json", "tokenizer.json"]
        assert found.roots is not None
        for asset in found.assets:
            assert (found.roots[asset.file.root] / asset.file.path).is_file()

    def test_not_from_further_up_than_the_layout_goes(self, tmp_path: Path) -> None:
        (tmp_path / "run/iter_0000001").mkdir(parents=True)
        write(tmp_path / "config.json")
        assert look_beside(tmp_path / "run/iter_0000001").surroundings.config is None

    def test_nothing(self, tmp_path: Path) -> None:
        found = look_beside(tmp_path)
        assert (found.surroundings.config, found.surroundings.assets, found.facts, found.notes) == (None, (), {}, ())


class TestDamage:
    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_a_malformed_config_is_no_absent_one(self, name: str, tmp_path: Path) -> None:
        """A damaged generation_config.json must not be taken for a missing one."""
        (tmp_path / "dist_ckpt").mkdir()
        write(tmp_path / "huggingface/config.json")
        (tmp_path / "huggingface" / name).write_text("{")
        problems = look_beside(tmp_path / "dist_ckpt").surroundings.problems
        assert [type(problem) for problem in problems] == [SideFilesError]
        assert name in problems[0].message

    def test_a_malformed_transformer_config(self, tmp_path: Path) -> None:
        (tmp_path / "dist_ckpt").mkdir()
        (tmp_path / "transformer_config.json").write_text("{")
        problems = look_beside(tmp_path / "dist_ckpt").surroundings.problems
        assert "transformer_config.json" in problems[0].message


class TestCatalog:
    def test_what_the_weights_record_goes_first(self, tmp_path: Path) -> None:
        (tmp_path / "dist_ckpt").mkdir()
        (tmp_path / "transformer_config.json").write_text('{"num_layers": 2, "hidden_size": 4}')
        write(tmp_path / "huggingface/config.json")
        weights = Checkpoint("megatron_dist", "", {"source": tmp_path}, {}, facts={"num_layers": 3})
        whole = look_beside(tmp_path / "dist_ckpt").around(weights)
        assert whole.facts["num_layers"] == 3
        assert whole.facts["hidden_size"] == 4
        assert whole.config == CONFIG
        assert whole.roots.keys() == {"source", "assets"}

    def test_rank_and_alpha_of_the_runs_settings(self, tmp_path: Path) -> None:
        pytest.importorskip("yaml")
        (tmp_path / "run_config.yaml").write_text("model: {num_layers: 2}\npeft: {dim: 8, alpha: 16}\n")
        facts = {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM", "source": "run_config.yaml"}
        assert look_beside(tmp_path).surroundings.adapter == facts

    def test_an_exported_adapter_tells_of_itself(self, tmp_path: Path) -> None:
        (tmp_path / "model/dist_ckpt").mkdir(parents=True)
        place = tmp_path / "model/huggingface/adapter"
        place.mkdir(parents=True)
        (place / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
        adapter = look_beside(tmp_path / "model/dist_ckpt").surroundings.adapter
        assert adapter == {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
