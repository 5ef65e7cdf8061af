"""What a person says of the ranks stands in for what nothing recorded, and must not contradict what something does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assembled import gather
from megatron_bytes import Decoder, write_legacy
from unshard.checkpoint import Checkpoint
from unshard.errors import UsageError
from unshard.opening import open_checkpoint
from unshard.options import MergeOptions
from unshard.parallel import ARGUMENTS, read_sizes

DENSE, MIXTURE = Decoder(), Decoder(experts=4)


def read(run: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(run, MergeOptions(**options))


def messages(run: Path, **sizes: int) -> list[str]:
    return [problem.message for problem in read(run, parallel=sizes).problems]


def test_sizes_as_people_write_them() -> None:
    assert read_sizes("tp=2") == {"tp": 2}
    assert read_sizes(" tp = 2,pp=4 ,vpp=2,ep=8,etp=1") == {"tp": 2, "pp": 4, "vpp": 2, "ep": 8, "etp": 1}
    assert list(ARGUMENTS) == ["tp", "pp", "vpp", "ep", "etp"]


@pytest.mark.parametrize("text", ["", "tp", "tp=", "tp=0", "tp=-1", "tp=two", "dp=2", "tp=2;pp=2", "tp=99999", "tp=²"])
def test_sizes_that_mean_nothing(text: str) -> None:
    with pytest.raises(UsageError, match="tp, pp, vpp, ep, etp") as caught:
        read_sizes(text)
    assert f"`{text.partition(',')[0]}`" in caught.value.message


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 0}, {"tp": True}, {"tp": "2"}])
def test_sizes_in_python_that_mean_nothing(sizes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="known are tp, pp"):
        MergeOptions(parallel=sizes)


@pytest.mark.parametrize(
    ("model", "layout", "sizes"),
    [
        (DENSE, {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "vpp": 1, "ep": 1}),
        (DENSE, {"pp": 2}, {"pp": 2}),
        (MIXTURE, {"tp": 2, "ep": 2}, {"ep": 2}),
        (MIXTURE, {"ep": 4}, {"ep": 4, "etp": 1}),
        (MIXTURE, {"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "pp": 2, "ep": 2, "etp": 2}),
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_sizes_that_are_right(
    recorded: bool, model: Decoder, layout: dict[str, int], sizes: dict[str, int], tmp_path: Path
) -> None:
    run = write_legacy(tmp_path, model, recorded=recorded, **layout)
    checkpoint = read(run, parallel=sizes)
    assert checkpoint.problems == ()
    assert dict(checkpoint.mesh) == layout
    assert checkpoint.tensors.keys() == read(run).tensors.keys()


@pytest.mark.parametrize(
    ("model", "layout", "sizes", "message"),
    [
        (DENSE, {"tp": 2}, {"tp": 1}, "--parallel says tp=1, but the directories' names count to 2 such ranks"),
        (DENSE, {"tp": 2}, {"tp": 4}, "2 of 4 ranks are missing: no mp_rank_02, mp_rank_03"),
        (DENSE, {"pp": 2}, {"vpp": 2}, "--parallel says vpp=2, but the files hold 1 virtual stage"),
        (DENSE, {"pp": 2}, {"ep": 2}, "--parallel says ep=2, but mp_rank_00_000, mp_rank_00_001 hold different dense"),
        (MIXTURE, {"ep": 2}, {"pp": 2}, "--parallel says pp=2, but mp_rank_00_000, mp_rank_00_001 hold the same dense"),
        (MIXTURE, {"tp": 2, "ep": 2}, {"etp": 1}, "--parallel says etp=1, but then no process has the tensor and exp"),
    ],
)
def test_sizes_against_names_and_files(
    model: Decoder, layout: dict[str, int], sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    run = write_legacy(tmp_path, model, recorded=False, **layout)
    assert messages(run) == []
    found = [problem for problem in read(run, parallel=sizes).problems if problem.message.startswith(message)]
    assert len(found) == 1
    assert "correct --parallel" in str(found[0].hint)


def test_sizes_against_args(tmp_path: Path) -> None:
    run = write_legacy(tmp_path, DENSE, tp=2, pp=2)
    first, second = messages(run, tp=4, pp=1, ep=1)
    assert first == "`--parallel tp=4` contradicts what training recorded: tensor_model_parallel_size is 2"
    assert second == "`--parallel pp=1` contradicts what training recorded: pipeline_model_parallel_size is 2"


@pytest.mark.parametrize("told", ["flag", "config", "beside"])
@pytest.mark.parametrize("version", [None, 0.0, 1.0])
def test_heads_of_old_versions(version: float | None, told: str, tmp_path: Path) -> None:
    """Rows of QKV are [3, heads, size] in version 0, which is what a file without a version has; [heads, size, 3] in 1.

    Each rank's shard is ordered for itself.
    """
    model = Decoder(groups=4, layers=1)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    whole = model.megatron()[name]
    old = [_order_as_before(shard, version) for shard in np.split(whole, 2)]
    run = write_legacy(
        tmp_path, model, tp=2, full={**model.megatron(), name: np.concatenate(old)}, version=version, recorded=False,
        rename=lambda name: name.replace("decoder.", "language_model.encoder."),
    )  # fmt: skip
    config = run / "hf" / "config.json"
    if told != "beside":
        config.rename(tmp_path / "elsewhere.json")
    options = {"flag": {"attention_heads": 4}, "config": {"config": tmp_path / "elsewhere.json"}, "beside": {}}[told]
    checkpoint = read(run, **options)
    assert checkpoint.problems == ()
    found = np.frombuffer(gather(checkpoint.tensors[name], checkpoint.roots), np.float32).reshape(whole.shape)
    assert (found == whole).all()


def _order_as_before(shard: Any, version: float | None) -> Any:
    """The rows of a rank's two heads, each query, key and value of four rows."""
    grouped = shard.reshape(2, 3, 4, -1)
    return (grouped.transpose(0, 2, 1, 3) if version == 1.0 else grouped.transpose(1, 0, 2, 3)).reshape(shard.shape)


def test_heads_against_args(tmp_path: Path) -> None:
    run = write_legacy(tmp_path, DENSE)
    (problem,) = read(run, attention_heads=8, key_value_heads=2).problems
    assert problem.message == "`--num-attention-heads 8` contradicts what training recorded: num_attention_heads is 4"
