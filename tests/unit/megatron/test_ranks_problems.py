"""What is wrong with directories of ranks is said, all of it, in words that name what is missing or contradicts."""

from __future__ import annotations

import argparse
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unshard.checkpoint import Checkpoint
from unshard.errors import FormatError, NotACheckpointError
from unshard.formats.contract import Source
from unshard.formats.megatron.ranks import MegatronRanks

torch = pytest.importorskip("torch")

from megatron import random_full  # noqa: E402
from megatron.random_full import Draw  # noqa: E402
from megatron.writer import write_legacy  # noqa: E402

pytestmark = pytest.mark.torch

ARGS = {
    "hidden_size": random_full.HIDDEN,
    "num_attention_heads": random_full.HEADS,
    "kv_channels": random_full.HEAD,
    "ffn_hidden_size": random_full.FFN,
    "moe_ffn_hidden_size": random_full.EXPERT_FFN,
    "num_experts": random_full.EXPERTS,
    "padded_vocab_size": random_full.VOCABULARY,
}


def read(place: Path) -> Checkpoint:
    return MegatronRanks().read(Source(place))


def messages(place: Path) -> list[str]:
    return [problem.message for problem in read(place).problems]


def write(directory: Path, *, layers: int = 2, experts: tuple[int, ...] = (), **layout: Any) -> Path:
    full = random_full.model(layers, experts=experts)
    return write_legacy(directory, full, **{"te": False, "args": ARGS} | layout)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def edit_all(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    for file in place.glob("*/*.pt"):
        edit(file, change)


class TestMissing:
    @pytest.mark.parametrize("args", [ARGS, None])
    def test_one_rank_of_four(self, args: dict[str, Any] | None, tmp_path: Path) -> None:
        place = write(tmp_path, tp=2, pp=2, args=args)
        shutil.rmtree(place / "mp_rank_01_000")
        (message,) = messages(place)
        assert message == "1 of 4 ranks is missing: no mp_rank_01_000"

    def test_a_pipeline_stage_at_the_end(self, tmp_path: Path) -> None:
        """Args tell what names cannot. Layers of later stages keep their numbers."""
        place = write(tmp_path, layers=4, tp=2, pp=4)
        for name in ("mp_rank_00_003", "mp_rank_01_003", "mp_rank_01_001", "mp_rank_00_001"):
            shutil.rmtree(place / name)
        checkpoint = read(place)
        (problem,) = checkpoint.problems
        assert problem.message.endswith("no mp_rank_00_001, mp_rank_01_001, mp_rank_00_003, mp_rank_01_003")
        assert "decoder.layers.2.mlp.linear_fc1.weight" in checkpoint.tensors
        assert "decoder.layers.1.mlp.linear_fc1.weight" not in checkpoint.tensors

    @pytest.mark.parametrize("gone", ["mp_rank_00_000_000", "mp_rank_01_001_001"])
    def test_of_directories_that_hold_everything_between_them(self, gone: str, tmp_path: Path) -> None:
        place = write(tmp_path, experts=(0, 1), tp=2, pp=2, ep=2, etp=1)
        assert len(list(place.iterdir())) == 4
        shutil.rmtree(place / gone)
        (message,) = messages(place)
        assert message == f"1 of 4 ranks is missing: no {gone}"

    def test_an_expert_rank(self, tmp_path: Path) -> None:
        place = write(tmp_path, experts=(0,), tp=2, ep=4)
        for name in ("mp_rank_00_002", "mp_rank_01_002"):
            shutil.rmtree(place / name)
        (message,) = messages(place)
        assert message == "2 of 8 ranks are missing: no mp_rank_00_002, mp_rank_01_002"

    def test_a_directory_whose_shards_others_hold_is_not_missed(self, tmp_path: Path) -> None:
        """Experts are not cut: the second tensor rank holds the same."""
        place = write(tmp_path, experts=(0,), tp=2, ep=1, etp=1)
        assert messages(place) == []
        spare = write(tmp_path / "spare", experts=(0,), tp=4, ep=2, etp=1)
        assert messages(spare) == []

    def test_a_tensor_that_one_rank_lacks(self, tmp_path: Path) -> None:
        place = write(tmp_path, tp=4)
        name = "decoder.layers.0.mlp.linear_fc2.weight"
        for rank in (1, 2):
            edit(place / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", lambda state: state["model"].pop(name))
        (message,) = messages(place)
        assert message == f"tensor-parallel ranks 1-2 have no `{name}`, which others have"

    def test_an_expert_that_no_rank_holds(self, tmp_path: Path) -> None:
        place = write(tmp_path, experts=(0,), ep=2)
        names = [f"decoder.layers.0.mlp.experts.local_experts.1.linear_fc{n}.weight" for n in (1, 2)]
        edit(place / "mp_rank_00_001" / "model_optim_rng.pt", lambda state: [state["model"].pop(n) for n in names])
        assert any("expert 5 missing" in message for message in messages(place))


class TestContradictions:
    def test_two_iterations(self, tmp_path: Path) -> None:
        place = write(tmp_path, tp=2, pp=2)
        edit(place / "mp_rank_01_001" / "model_optim_rng.pt", lambda state: state.update(iteration=20))
        (message,) = messages(place)
        assert "different steps: iteration 10: mp_rank_00_000, mp_rank_00_001, mp_rank_01_000; iteration 20" in message
        assert "mp_rank_01_001" in message

    def test_two_worlds(self, tmp_path: Path) -> None:
        place = write(tmp_path / "two", tp=2)
        other = write(tmp_path / "four", tp=4)
        shutil.copytree(other / "mp_rank_02", place / "mp_rank_02")
        text = "\n".join(messages(place))
        assert "the ranks disagree on args.tensor_model_parallel_size: 2: mp_rank_00, mp_rank_01; 4: mp_rank_02" in text
        assert "args.tensor_model_parallel_size is 2, but the directories' names count to 3 such ranks" in text

    def test_two_layouts_of_names(self, tmp_path: Path) -> None:
        place = write(tmp_path / "two", tp=2)
        other = write(tmp_path / "four", tp=2, pp=2)
        shutil.copytree(other / "mp_rank_00_000", place / "mp_rank_00_000")
        assert any("of different layouts are mixed: mp_rank_00, mp_rank_00_000" in text for text in messages(place))

    def test_numbers_of_virtual_stages(self, tmp_path: Path) -> None:
        place = write(tmp_path, layers=4, pp=2, vpp=2)
        edit_all(place, lambda state: setattr(state["args"], "virtual_pipeline_model_parallel_size", 4))
        assert any("is 4, but the files hold 2 virtual stages" in text for text in messages(place))

    def test_a_virtual_stage_that_is_not_there(self, tmp_path: Path) -> None:
        place = write(tmp_path, layers=4, pp=2, vpp=2)
        edit(place / "mp_rank_00_000" / "model_optim_rng.pt", lambda state: state.pop("model0"))
        assert any("holds the virtual stages [1], some are missing" in text for text in messages(place))

    def test_layers_lie_otherwise_than_args_say(self, tmp_path: Path) -> None:
        place = write_legacy(tmp_path, random_full.model(4), pp=2, layers=(1, 3), te=False, args=ARGS)
        (message,) = messages(place)
        assert message == "args put [2, 2] layers on the 2 pipeline stages, but their files hold [1, 3]"

    def test_a_layer_between_others_is_missing(self, tmp_path: Path) -> None:
        place = write(tmp_path, layers=3)

        def drop(state: dict[str, Any]) -> None:
            state["model"] = {n: t for n, t in state["model"].items() if not n.startswith("decoder.layers.1.")}

        edit_all(place, drop)
        text = "\n".join(messages(place))
        assert "layers are missing between others: stage 0 holds [0, 2]" in text
        assert "args.num_layers is 3, but 2 layers are there" in text

    @pytest.mark.parametrize(
        ("argument", "value", "shape"),
        [
            ("padded_vocab_size", 128, "`embedding.word_embeddings.weight` is [96, 24]"),
            ("hidden_size", 32, "`embedding.word_embeddings.weight` is [96, 24]"),
            ("ffn_hidden_size", 80, "`decoder.layers.0.mlp.linear_fc2.weight` is [24, 40]"),
            ("num_experts", 16, "`decoder.layers.1.mlp.experts.linear_fc2.weight` is [8, 24, 16]"),
        ],
    )
    def test_args_against_shapes(self, argument: str, value: int, shape: str, tmp_path: Path) -> None:
        place = write(tmp_path, experts=(1,), tp=2, args=ARGS | {argument: value})
        (message,) = messages(place)
        assert message == f"args contradict the tensors:\n  args.{argument} is {value}, but {shape}"

    def test_expert_tensor_size_against_the_width_of_experts(self, tmp_path: Path) -> None:
        place = write(tmp_path, experts=(0,), tp=2, etp=2)
        edit_all(place, lambda state: setattr(state["args"], "expert_tensor_parallel_size", 1))
        assert any(
            "args.moe_ffn_hidden_size is 16 and args.expert_tensor_parallel_size is 1" in m for m in messages(place)
        )

    def test_shards_of_different_shapes_and_types(self, tmp_path: Path) -> None:
        place = write(tmp_path, tp=2)
        names = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"
        change = {names[0]: torch.zeros(24, 10), names[1]: torch.zeros(24, dtype=torch.float16)}
        edit(place / "mp_rank_01" / "model_optim_rng.pt", lambda state: state["model"].update(change))
        (message,) = messages(place)
        assert f"{names[0]}: F32 [24, 20] in mp_rank_00; F32 [24, 10] in mp_rank_01" in message
        assert f"{names[1]}: F32 [24] in mp_rank_00; F16 [24] in mp_rank_01" in message

    def test_more_ranks_share_an_expert_than_a_dense_layer(self, tmp_path: Path) -> None:
        """Directories are named after the tensor rank: two ranks of an expert wrote into one, and one shard is lost."""
        place = write(tmp_path, experts=(0,), ep=2)
        edit_all(place, lambda state: setattr(state["args"], "expert_tensor_parallel_size", 2))
        edit_all(place, lambda state: setattr(state["args"], "moe_ffn_hidden_size", 32))
        assert any("2 ranks share each expert, but 1 each dense layer" in message for message in messages(place))

    def test_experts_cut_over_all_ranks_at_once(self, tmp_path: Path) -> None:
        place = write(tmp_path, experts=(0,), tp=2, args=ARGS | {"moe_extended_tp": True})
        (message,) = messages(place)
        assert "args.moe_extended_tp is set" in message


class TestFiles:
    def test_a_damaged_file_is_named_and_the_others_are_read(self, tmp_path: Path) -> None:
        place = write(tmp_path, tp=2)
        file = place / "mp_rank_01" / "model_optim_rng.pt"
        file.write_bytes(file.read_bytes()[:1000])
        checkpoint = read(place)
        text = "\n".join(problem.message for problem in checkpoint.problems)
        assert "mp_rank_01/model_optim_rng.pt" in text
        assert "missing" not in text.replace("at its end is missing", "")  # its directory is there
        assert "embedding.word_embeddings.weight" in checkpoint.tensors

    def test_nothing_can_be_read(self, tmp_path: Path) -> None:
        place = write(tmp_path)
        (place / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"no torch file")
        with pytest.raises(FormatError, match="mp_rank_00"):
            read(place)

    @pytest.mark.parametrize(
        "content", [{"optimizer": {}}, [1, 2], {"model": 3}, {"model": []}, {"args": argparse.Namespace()}], ids=str
    )
    def test_no_model_in_the_file(self, content: Any, tmp_path: Path) -> None:
        place = write(tmp_path)
        torch.save(content, place / "mp_rank_00" / "model_optim_rng.pt")
        with pytest.raises(FormatError, match="holds no `model`"):
            read(place)

    def test_no_ranks_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "mp_rank_00").mkdir()
        assert MegatronRanks().detect(tmp_path) is None
        with pytest.raises(NotACheckpointError, match="no directories of Megatron ranks"):
            read(tmp_path)

    def test_a_root_without_ranks(self, tmp_path: Path) -> None:
        place = write(tmp_path / "run")
        (tmp_path / "empty").mkdir()
        (problem,) = MegatronRanks().read(Source(place, also=(tmp_path / "empty",))).problems
        assert "no directories mp_rank_* lie here" in problem.message

    def test_a_rank_that_is_there_twice(self, tmp_path: Path) -> None:
        place = write(tmp_path / "run", tp=2)
        other = tmp_path / "node1"
        shutil.copytree(place / "mp_rank_01", other / "mp_rank_01")
        (problem,) = MegatronRanks().read(Source(place, also=(other,))).problems
        assert re.match(r"mp_rank_01 is there twice: .*run.* and .*node1", problem.message)

    def test_numbers_of_experts_that_nothing_tells(self, tmp_path: Path) -> None:
        full = random_full.model(1, experts=(0,))
        place = write_legacy(tmp_path, full, te=False, args=None, experts="grouped")
        edit_all(place, lambda state: state["model"].pop("decoder.layers.0.mlp.router.weight"))
        assert any("neither a router nor args tell how many experts" in message for message in messages(place))

    def test_memory_of_grouped_experts_that_does_not_fit(self, tmp_path: Path) -> None:
        full = random_full.model(1, experts=(0,))
        place = write_legacy(tmp_path, full, te=False, args=None, experts="grouped")
        name = "decoder.layers.0.mlp.experts.weight1"
        edit_all(place, lambda state: state["model"].update({name: Draw()(24, 33)}))
        assert any(f"`{name}` of shape (24, 33) is not that of 8 experts" in message for message in messages(place))


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    """They pickle as `getattr(Float8Tensor, "_make_in_reduce_ex")(bytes, …, scale)`; the bytes are no values."""
    place = write(tmp_path)
    file = place / "mp_rank_00" / "model_optim_rng.pt"
    name = b"decoder.layers.0.mlp.linear_fc1.weight"
    made = pickle.dumps("_make_in_reduce_ex", 2)[2:-1]
    getter = b"cbuiltins\ngetattr\n(ctransformer_engine.pytorch.tensor.float8_tensor\nFloat8Tensor\n" + made + b"tR"
    data = b"\x80\x02}X\x05\0\0\0model}X" + len(name).to_bytes(4, "little") + name + getter + b"(K\x01tRss."
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/data.pkl", data)
        archive.writestr("model/version", "3\n")
    (problem,) = read(place).problems
    assert "linear_fc1.weight: a transformer_engine.pytorch.tensor.float8_tensor.Float8Tensor" in problem.message
    assert problem.hint is not None
    assert "fp8-param-gather" in problem.hint
