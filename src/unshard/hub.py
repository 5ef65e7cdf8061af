"""Upload to the Hugging Face Hub, with the `[hub]` extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from unshard.errors import OutputError, UsageError


def require_hub() -> None:
    """Raise UsageError unless an upload will be possible: asked before anything is written."""
    if find_spec("huggingface_hub") is None:
        raise UsageError(
            "`--hf_upload_path` needs the `hub` extra, which is not installed; nothing was written",
            hint="pip install 'unshard[hub]'",
        )


def upload(directory: Path, repository: str, *, private: bool) -> None:
    """Create the repository if need be and upload the whole directory, in one commit.

    Raises OutputError when the Hub refuses; the merged directory stays as it is.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(repo_id=repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=str(directory), repo_type="model")
    except Exception as error:
        raise OutputError(
            f"the model was merged into `{directory}` and verified, but the upload to `{repository}` failed: {error}",
            hint=f"hf upload {repository} {directory}",
        ) from error
