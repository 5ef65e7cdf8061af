"""`--hf_upload_path`: refused before anything is written, or one upload after verification."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from commands import run


class Hub:
    """Stands in for huggingface_hub, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fails_at: str | None = None
        self.found: list[str] = []

    def HfApi(self) -> Hub:
        return self

    def create_repo(self, **given: Any) -> None:
        self._call("create_repo", given)

    def upload_folder(self, **given: Any) -> None:
        self.found = sorted(path.name for path in Path(given["folder_path"]).iterdir())
        self._call("upload_folder", given)

    def _call(self, name: str, given: dict[str, Any]) -> None:
        self.calls.append((name, given))
        if self.fails_at == name:
            raise RuntimeError("401 Client Error: who are you?")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub, module = Hub(), ModuleType("huggingface_hub")
    module.HfApi = hub.HfApi  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return hub


@pytest.fixture
def source(committed_golden: Path) -> Path:
    return committed_golden / "fsdp2_w4" / "ckpt"


def test_one_upload_of_the_verified_model(hub: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, stdout, stderr = run("merge", source, out, "--hf_upload_path", "me/model")
    assert code == 0
    assert "every byte went where the mapping says" in stdout
    assert "uploaded to https://huggingface.co/me/model" in stderr
    assert [name for name, _ in hub.calls] == ["create_repo", "upload_folder"]
    created, uploaded = hub.calls[0][1], hub.calls[1][1]
    assert created == {"repo_id": "me/model", "private": False, "exist_ok": True}
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("me/model", str(out))
    assert hub.found == sorted(path.name for path in out.iterdir())


def test_private_is_passed_on(hub: Hub, source: Path, tmp_path: Path) -> None:
    assert run("merge", source, tmp_path / "out", "--hf_upload_path", "me/model", "--private").code == 0
    assert hub.calls[0][1]["private"] is True


def test_only_what_was_written_is_uploaded(hub: Hub, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "passwords.txt").write_text("hunter2")
    assert run("merge", source, tmp_path / "out", "--overwrite", "--hf_upload_path", "me/model").code == 0
    patterns = hub.calls[1][1]["allow_patterns"]
    assert "model.safetensors" in patterns
    assert "passwords.txt" not in patterns


@pytest.mark.parametrize("step", ["create_repo", "upload_folder"])
def test_a_failed_upload_is_told_and_the_model_kept(step: str, hub: Hub, source: Path, tmp_path: Path) -> None:
    hub.fails_at = step
    code, stdout, stderr = run("merge", source, tmp_path / "out", "--hf_upload_path", "me/model", "--private")
    assert code == 7
    assert "Merged into" in stdout
    assert "401 Client Error" in stderr
    assert f"hint: hf upload me/model {tmp_path / 'out'} --private" in stderr
    assert run("verify", tmp_path / "out", "--against", source).code == 0


def test_nothing_is_uploaded_when_the_merge_fails(hub: Hub, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert run("merge", source, tmp_path / "out", "--hf_upload_path", "me/model").code == 7
    assert not hub.calls


@pytest.mark.parametrize("absent", ["not installed", "without HfApi"])
def test_without_huggingface_hub_nothing_is_written(
    absent: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = None if absent == "not installed" else ModuleType("huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    code, stdout, stderr = run("merge", source, tmp_path / "out", "--hf_upload_path", "me/model")
    assert code == 2
    assert not stdout
    assert "pip install 'unshard[hub]'" in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a b", "a/b/c", "../x", "a--b", "", "/", "x" * 100])
def test_names_that_no_repository_has(name: str, hub: Hub, source: Path, tmp_path: Path) -> None:
    code, _, stderr = run("merge", source, tmp_path / "out", f"--hf_upload_path={name}")
    assert code == 2
    assert "no name of a Hub repository" in stderr
    assert not (tmp_path / "out").exists()
    assert not hub.calls


def test_a_plan_uploads_nothing(hub: Hub, source: Path) -> None:
    code, _, stderr = run("plan", source, "--hf_upload_path", "me/model")
    assert code == 0
    assert "a plan uploads nothing" in stderr
    assert not hub.calls
