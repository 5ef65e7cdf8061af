"""Every format keeps its promises on every golden checkpoint, and exactly one of them claims it.

Where a trainer saved a model beside its state, the formats of models are asked later, and claim that.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from format_contract import check_format
from golden_set import COMMITTED, GoldenCase, committed_cases
from unshard.families import expected_shapes
from unshard.formats import FORMATS
from unshard.formats.full import FullStateDict
from unshard.formats.huggingface.reader import HuggingFace
from unshard.locate import locate

WHOLE = [case for case in committed_cases() if case.runs[0].error is None]


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_checkpoints(case: GoldenCase, tmp_path: Path) -> None:
    format, place = locate(case.source)
    claims = [other.name for other in FORMATS if other.detect(place)]
    model_beside = [HuggingFace.name, FullStateDict.name] if (place / "pytorch_model.bin").is_file() else []
    assert claims == [format.name, *model_beside]
    check_format(format, place, tmp_path, expected_shapes)


@pytest.mark.parametrize("truth", ["fsdp2_w4/truth", "lora/truth_adapter", "fsdp2_w4/truth/model.safetensors"])
def test_what_comes_out_can_be_read_again(truth: str, tmp_path: Path) -> None:
    check_format(HuggingFace(), COMMITTED / truth, tmp_path)
