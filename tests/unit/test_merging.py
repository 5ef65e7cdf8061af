"""The merge as a whole: what is left behind when the last step finds a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from golden_set import COMMITTED
from unshard.errors import VerificationError
from unshard.merging import merge
from unshard.options import MergeOptions
from unshard.run import local


@pytest.mark.parametrize("shard_size", [10**9, 20_000])
def test_an_output_that_fails_verification_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: int
) -> None:
    """A disk that returns other bytes than were written: the model must not lie there as if it were whole."""
    run = local.run_plan

    def run_on_a_bad_disk(plan: Any, output: Path, *others: Any, **options: Any) -> Any:
        result = run(plan, output, *others, **options)
        damaged = sorted(output.glob("*.safetensors"))[-1]
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        return result

    output, options = tmp_path / "out", MergeOptions(max_shard_size=shard_size)
    monkeypatch.setattr(local, "run_plan", run_on_a_bad_disk)
    source = COMMITTED / "fsdp2_w4" / "ckpt"
    with pytest.raises(VerificationError, match=r"differs from rank .*\n.*renamed"):
        merge(source, output, options)
    assert not [path.name for path in output.iterdir() if path.suffix in (".safetensors", ".bin")]
    assert not list(output.glob("*.index.json"))

    monkeypatch.setattr(local, "run_plan", run)
    merge(source, output, MergeOptions(max_shard_size=shard_size, overwrite=True))
    assert not list(output.glob("*.failed-verification"))
