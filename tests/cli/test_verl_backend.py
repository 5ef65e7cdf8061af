"""`--backend` speaks of the checkpoint; the model it is compared with has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from unshard.cli import main


@pytest.fixture
def case(committed_golden: Path) -> Path:
    return committed_golden / "lora"


def run(*words: str | Path) -> int:
    try:
        return main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)


def test_verls_test_compares_a_checkpoint_with_a_model(case: Path) -> None:
    assert run("test", "--backend", "fsdp", "--local_dir", case / "ckpt", "--test_hf_dir", case / "truth") == 0


def test_verls_test_compares_a_merged_directory_with_a_model(case: Path) -> None:
    assert run("test", "--backend", "fsdp", "--local_dir", case / "truth", "--test_hf_dir", case / "truth") == 0


def test_another_backend_is_still_contradicted(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("test", "--backend", "megatron", "--local_dir", case / "ckpt", "--test_hf_dir", case / "truth") != 0
    assert "FSDP rank files" in capsys.readouterr().err
