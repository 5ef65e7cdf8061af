"""Files of a DeepSpeed checkpoint with bytes changed at random: an UnshardError, a problem, or a whole catalog."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from deepspeed_bytes import BF16, Job, weights
from unshard.errors import UnshardError
from unshard.formats.contract import Source
from unshard.formats.deepspeed import DeepSpeed
from unshard.plan.coverage import prove_coverage

ROUNDS = 150


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_changed_bytes(stage: int | None, tmp_path: Path) -> None:
    trained = weights({"embed.weight": (4, 3), "layer.weight": (3, 5), "layer.bias": (3,)})
    frozen = weights({"base.weight": (3, 3)}, dtype=BF16) if stage else {}
    place = Job(stage, 2, [trained], frozen=frozen, shared={"head.weight": "embed.weight"}).write(tmp_path / "tag")
    files = {path: path.read_bytes() for path in sorted(place.iterdir())}
    draw = random.Random(f"deepspeed {stage}")
    found = set()
    for _ in range(ROUNDS):
        path, data = draw.choice(list(files.items()))
        path.write_bytes(_change(data, draw))
        found.add(_read(place))
        path.write_bytes(data)
    assert found == {"refused", "read"}


def _change(data: bytes, draw: random.Random) -> bytes:
    """A few bytes of the pickle, most often of a number or a name, set to others; or the file cut short."""
    if draw.random() < 0.1:
        return data[: draw.randrange(len(data))]
    changed = bytearray(data)
    end = data.index(b"PK\x03\x04", 4)
    for _ in range(draw.randint(1, 3)):
        changed[draw.randrange(60, end)] = draw.choice([0, 1, 2, 0x4E, 0x7F, 0xFF, draw.randrange(256)])
    return bytes(changed)


def _read(place: Path) -> str:
    try:
        checkpoint = DeepSpeed().read(Source(place))
    except UnshardError:
        return "refused"
    if checkpoint.problems:
        return "refused"
    for tensor in checkpoint.tensors.values():
        prove_coverage(tensor)
    return "read"
