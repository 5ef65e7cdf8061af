"""What a fused model is made of, without PEFT."""

from __future__ import annotations

import numpy as np

from reference import Disk, cut_randomly, shard
from unshard.adapters.fuse import fuse, replace_rows
from unshard.dtypes import BF16, F32
from unshard.model import Adapter
from unshard.tensors import Computed, Tensor


def test_replaced_rows_are_copied_bit_for_bit() -> None:
    disk, random = Disk(), np.random.default_rng(0)
    for indices in ([0], [6, 2, 3], [6, 0, 1, 2, 3, 4, 5], [4, 1, 4]):
        weight = random.standard_normal((7, 3)).astype(np.float32)
        rows = random.standard_normal((len(indices), 3)).astype(np.float32)
        choose = lambda low, high: int(random.integers(low, high + 1))  # noqa: E731
        base = shard(disk, "w", weight, F32, cut_randomly(weight.shape, choose))
        replaced = replace_rows(base, shard(disk, "rows", rows, F32, cut_randomly(rows.shape, choose)), indices)
        weight[indices] = rows
        assert isinstance(replaced, Tensor)
        assert np.array_equal(disk.assemble(replaced), weight)


def test_rows_of_another_type_are_cast() -> None:
    disk = Disk()
    weight = shard(disk, "w", np.zeros((3, 2), BF16.numpy), BF16, cut_randomly((3, 2), lambda low, _: low))
    rows = shard(disk, "rows", np.full((1, 2), 1.5, np.float32), F32, cut_randomly((1, 2), lambda low, _: low))
    replaced = replace_rows(weight, rows, [1])
    assert replaced.dtype is BF16
    assert np.array_equal(disk.assemble(replaced).astype(np.float32), [[0, 0], [1.5, 1.5], [0, 0]])


def test_a_fused_weight_needs_whole_only_what_each_row_needs() -> None:
    """Memory does not grow with the model: weight and lora_B are cut with the rows."""
    disk = Disk()
    whole = lambda low, _: low  # noqa: E731

    def stored(name: str, *shape: int) -> Tensor:
        return shard(disk, name, np.zeros(shape, np.float32), F32, cut_randomly(shape, whole))

    name = "base_model.model.m.lora_{}.weight"
    adapter = Adapter(
        "default",
        {name.format("A"): stored(name.format("A"), 4, 6), name.format("B"): stored(name.format("B"), 8, 4)},
        {"lora_alpha": 8, "r": 4},
    )
    fused = fuse({"m.weight": stored("m.weight", 8, 6), "n.weight": stored("n.weight", 2, 2)}, adapter)
    value = fused.tensors["m.weight"]
    assert isinstance(value, Computed)
    assert value.banded == (0, 0, None)
    assert value.parameters == {"scaling": 2.0}
    assert isinstance(fused.tensors["n.weight"], Tensor)
    assert "computed in fp32 and rounded once" in fused.notes[0].text
