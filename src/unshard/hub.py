"""Upload to the Hugging Face Hub, with the `[hub]` extra."""

from __future__ import annotations

import re
from collections.abc import Sequence
from glob import escape
from pathlib import Path

from unshard.errors import OutputError, UsageError, command_line

_REPOSITORY = re.compile(r"(?:[\w.-]+/)?[\w.-]{1,96}", re.ASCII)
"""NAME or OWNER/NAME (huggingface_hub, `utils/_validators.py`)."""


def check_upload(repository: str) -> None:
    """Raise UsageError unless an upload can be tried at all: asked before anything is written."""
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise UsageError(
            f"`--hf_upload_path {repository}` is no name of a Hub repository; nothing was written",
            hint="write it as OWNER/NAME",
        )
    try:
        from huggingface_hub import HfApi  # noqa: F401
    except ImportError:
        raise UsageError(
            "`--hf_upload_path` needs huggingface_hub, which is not installed; nothing was written",
            hint="pip install 'unshard[hub]'",
        ) from None


def upload(directory: Path, repository: str, files: Sequence[str], *, private: bool) -> str:
    """Create the repository if need be and upload the files of a directory, in one commit; returns its address.

    files: paths relative to the directory: what was written and verified, and nothing that lay there before. Raises
    OutputError when the Hub refuses; the directory stays as it is.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(repo_id=repository, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=str(directory),
            repo_type="model",
            allow_patterns=[escape(file) for file in files],
        )
    except Exception as error:
        hint = command_line("hf", "upload", repository, directory, *(["--private"] if private else []))
        raise OutputError(
            f"the upload to `{repository}` failed: {error}; the model in `{directory}` is complete and verified",
            hint=hint,
        ) from error
    return f"https://huggingface.co/{repository}"
