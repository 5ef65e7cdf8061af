"""Links between the documents lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def list_documents() -> list[Path]:
    """The Markdown files of the repository; outside of git, those beside the tests and in docs."""
    git = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode == 0 and git.stdout:
        return [path for name in git.stdout.splitlines() if (path := ROOT / name).exists()]
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    headings = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(_CODE.sub("", text))]
    return {heading.replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", list_documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target.read_text(encoding="utf-8")), link


def test_the_documents_are_found() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in list_documents()}
    assert {"README.md", "CONTRIBUTING.md", "docs/README.md", "docs/design.md"} <= names
