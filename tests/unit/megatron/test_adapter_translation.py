"""Adapters of Megatron-Bridge that do not fit, or that no adapter of the Hugging Face model can follow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assembled import ROOT, gather, store
from unshard.checkpoint import Checkpoint
from unshard.dtypes import F32
from unshard.errors import IncompleteError, ModelError
from unshard.families import translate
from unshard.families.translation import Translation

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 10, "hidden_size": 6, "intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
}  # fmt: skip
AT = "decoder.layers.1."
QKV, PROJ = f"{AT}self_attention.linear_qkv", f"{AT}self_attention.linear_proj"
FC1, FC2 = f"{AT}mlp.linear_fc1", f"{AT}mlp.linear_fc2"
TO = "model.layers.1."


def pair(base: str, rows: int, columns: int, rank: int = 2, part: str = "") -> dict[str, tuple[int, ...]]:
    at = f"{base}.adapter{part}.linear_"
    return {f"{at}in.weight": (rank, columns), f"{at}out.weight": (rows, rank)}


def translated(
    place: Path, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None = None
) -> Translation:
    tensors = store(place, {name: (F32, shape) for name, shape in shapes.items()})
    checkpoint = Checkpoint("megatron", "test", {ROOT: place}, tensors, dialect="megatron")
    return translate(checkpoint, QWEN3 if config is None else config)


class TestNames:
    def test_padding_of_the_vocabulary_is_cut_from_the_adapter_of_the_head(self, tmp_path: Path) -> None:
        found = translated(tmp_path, pair("output_layer", 16, 6))
        assert not found.problems
        shapes = {name: tensor.shape for name, tensor in found.tensors.items()}
        assert shapes == {"lm_head.lora_A.default.weight": (2, 6), "lm_head.lora_B.default.weight": (10, 2)}

    def test_parts_of_canonical_lora_are_taken_as_they_are(self, tmp_path: Path) -> None:
        shapes = pair(QKV, 8, 6, part=".adapter_q") | pair(QKV, 4, 6, part=".adapter_v")
        found = translated(tmp_path, shapes)
        assert not found.problems
        stored = store(tmp_path / "again", {name: (F32, shape) for name, shape in shapes.items()})
        for part in "qv":
            for side, ours in (("A", "in"), ("B", "out")):
                tensor = found.tensors[f"{TO}self_attn.{part}_proj.lora_{side}.default.weight"]
                same = stored[f"{QKV}.adapter.adapter_{part}.linear_{ours}.weight"]
                assert gather(tensor, {ROOT: tmp_path}) == gather(same, {ROOT: tmp_path / "again"})
        assert len(found.tensors) == 4

    def test_magnitudes_follow_the_rows(self, tmp_path: Path) -> None:
        shapes = {**pair(FC1, 16, 6), f"{FC1}.adapter.weight_magnitude": (16,)}
        found = translated(tmp_path, shapes)
        assert not found.problems
        values = np.frombuffer(
            b"".join(
                [
                    gather(found.tensors[f"{TO}mlp.{part}_proj.lora_magnitude_vector.default.weight"], {ROOT: tmp_path})
                    for part in ("gate", "up")
                ]
            ),
            np.float32,
        )
        whole = store(tmp_path / "again", {name: (F32, shape) for name, shape in shapes.items()})
        expected = gather(whole[f"{FC1}.adapter.weight_magnitude"], {ROOT: tmp_path / "again"})
        assert values.tobytes() == expected

    @pytest.mark.parametrize(
        "name",
        [
            f"{QKV}.adapter.linear_mid.weight",
            f"{QKV}.adapter.adapter_x.linear_in.weight",
            f"{QKV}.adapters.0.linear_in.weight",
            f"{AT}mlp.unheard_of.adapter.linear_in.weight",
            f"{QKV}.adapter.linear_in.bias",
        ],
    )
    def test_names_that_no_adapter_has_are_listed(self, name: str, tmp_path: Path) -> None:
        (problem,) = translated(tmp_path, {name: (2, 6)}).problems
        assert "unknown to the rules" in problem.message


class TestMisfits:
    @pytest.mark.parametrize("missing", ["in", "out"])
    def test_half_an_adapter(self, missing: str, tmp_path: Path) -> None:
        shapes = pair(QKV, 16, 6) | pair(PROJ, 6, 8)
        del shapes[f"{PROJ}.adapter.linear_{missing}.weight"]
        (problem,) = translated(tmp_path, shapes).problems
        assert isinstance(problem, IncompleteError)
        other = "out" if missing == "in" else "in"
        assert f"`{PROJ}.adapter` has only {PROJ}.adapter.linear_{other}.weight" in problem.message

    def test_a_magnitude_alone(self, tmp_path: Path) -> None:
        (problem,) = translated(tmp_path, {f"{QKV}.adapter.weight_magnitude": (16,)}).problems
        assert isinstance(problem, IncompleteError)

    @pytest.mark.parametrize(
        ("shapes", "why"),
        [
            (pair(QKV, 12, 6), "has 12 rows, where the config makes it"),
            (pair(PROJ, 6, 9), f"is for [6, 9], but {TO}self_attn.o_proj.weight is [6, 8]"),
            (pair(FC1, 15, 6), "does not divide by 2"),
            (pair(FC1, 12, 6), f"is for [6, 6], but {TO}mlp.gate_proj.weight is [8, 6]"),
            (pair(QKV, 4, 6, part=".adapter_q"), f"is for [4, 6], but {TO}self_attn.q_proj.weight is [8, 6]"),
            (
                {f"{FC2}.adapter.linear_in.weight": (3, 2, 8), f"{FC2}.adapter.linear_out.weight": (3, 6, 2)},
                "[3, 2, 8]",
            ),
            ({**pair(FC2, 6, 8), f"{FC2}.adapter.weight_magnitude": (5,)}, "has magnitudes [5] for 6 rows"),
            ({**pair(FC2, 6, 8), f"{FC2}.adapter.weight_magnitude": ()}, "linear_in has shape"),
            ({f"{FC2}.adapter.linear_in.weight": (), f"{FC2}.adapter.linear_out.weight": ()}, "linear_in has shape []"),
        ],
    )
    def test_shapes_that_do_not_fit_the_model(
        self, shapes: dict[str, tuple[int, ...]], why: str, tmp_path: Path
    ) -> None:
        (problem,) = translated(tmp_path, shapes).problems
        assert "adapters do not fit the matrices that they adapt" in problem.message
        assert why in problem.message
        assert "--config" in str(problem.hint)

    def test_the_base_beside_it_tells_where_the_config_is_silent(self, tmp_path: Path) -> None:
        """Here the config has no intermediate size, which the base shows."""
        config = {key: value for key, value in QWEN3.items() if key != "intermediate_size"}
        shapes = {f"{FC2}.weight": (6, 8), **pair(FC2, 6, 9)}
        (problem,) = translated(tmp_path, shapes, config).problems
        assert f"is for [6, 9], but {TO}mlp.down_proj.weight is [6, 8]" in problem.message

    def test_all_of_it_is_said_at_once(self, tmp_path: Path) -> None:
        shapes = pair(QKV, 12, 6) | pair(FC1, 12, 6) | pair(FC2, 6, 8) | {f"{AT}other.adapter.linear_in.weight": (1, 1)}
        del shapes[f"{FC2}.adapter.linear_out.weight"]
        half, misfits, unknown = translated(tmp_path, shapes).problems
        assert FC2 in half.message
        assert QKV in misfits.message
        assert FC1 in misfits.message
        assert "other" in unknown.message


class TestInexpressible:
    @pytest.mark.parametrize(
        ("config", "shapes", "why"),
        [
            (
                {"model_type": "gpt_oss", "num_local_experts": 2},
                {
                    f"{AT}mlp.experts.linear_fc1.adapter.linear_in.weight": (2, 2, 6),
                    f"{AT}mlp.experts.linear_fc1.adapter.linear_out.weight": (2, 16, 2),
                },
                "the file has all experts in one tensor",
            ),
            ({"model_type": "phi3"}, pair(QKV, 8, 6, part=".adapter_q"), "one matrix for what it adapts and for what"),
            ({"model_type": "mimo"}, pair("mtp.layers.0.eh_proj", 6, 12), "its columns rearranged"),
        ],
    )
    def test_is_refused(
        self, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], why: str, tmp_path: Path
    ) -> None:
        (problem,) = translated(tmp_path, shapes, QWEN3 | config).problems
        assert isinstance(problem, ModelError)
        assert why in problem.message
        assert "merge_lora.py" in str(problem.hint)

    def test_fused_rows_that_the_file_orders_otherwise_are_followed(self, tmp_path: Path) -> None:
        """Phi 3: queries, keys and values are one matrix in the file too, not group by group."""
        config = QWEN3 | {"model_type": "phi3", "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 2}
        found = translated(tmp_path, pair(QKV, 16, 6), config)
        assert not found.problems
        stored = store(tmp_path / "again", {name: (F32, shape) for name, shape in pair(QKV, 16, 6).items()})
        rows = np.frombuffer(
            gather(stored[f"{QKV}.adapter.linear_out.weight"], {ROOT: tmp_path / "again"}), np.float32
        ).reshape(2, 8, 2)
        expected = np.concatenate([rows[:, :4].reshape(-1, 2), rows[:, 4:6].reshape(-1, 2), rows[:, 6:].reshape(-1, 2)])
        tensor = found.tensors[f"{TO}self_attn.qkv_proj.lora_B.default.weight"]
        assert gather(tensor, {ROOT: tmp_path}) == expected.tobytes()
