"""Tied word embeddings: one matrix under two names, of which the file holds one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unshard.errors import ModelError, UsageError
from unshard.families.naming.draft import Draft
from unshard.model_config import is_tied
from unshard.target import Claim
from unshard.tensors import Tensor

_PAIRS: Mapping[str, tuple[str, ...]] = {
    "lm_head.weight": (
        "model.embed_tokens.weight",
        "model.language_model.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "transformer.wte.weight",
        "transformer.word_embeddings.weight",
        "backbone.embeddings.weight",
        "embed_tokens.weight",
    ),
    "language_model.lm_head.weight": ("language_model.model.embed_tokens.weight",),
}
"""Head → the names that the embedding it is tied to can have in the file."""

_HINT = (
    "--tie-word-embedding keeps the embedding and leaves lm_head out; --untie-word-embedding keeps both and sets "
    "tie_word_embeddings to false in config.json"
)


def settle_ties(
    draft: Draft,
    config: Mapping[str, Any],
    wanted: bool | None,
    known: Collection[str],
    offered: Collection[str] = (),
) -> bool:
    """Leave out a head that is tied to the embedding, claim that both are equal, and answer whether they are tied.

    wanted:  what the user asked for (`MergeOptions.tie_embeddings`).
    known:   names that the architecture has, if any are known.
    offered: names that a base model gives where the checkpoint has none.
    """
    tied = is_tied(config)
    head = next((name for name in _PAIRS if name in draft.tensors), None)
    if head is None:
        return _without_head(draft, config, tied, wanted)
    embedding = next((name for name in _PAIRS[head] if name in draft.tensors), None)
    if embedding is None:
        if wanted and not tied:
            return _tie_without_embedding(draft, config, head, known, offered)
        return _without_embedding(draft, head, tied, known)
    if wanted is False or not (tied or wanted):
        if tied:
            _say_in_config(draft, config, False, f"{head} and {embedding} are both kept")
        return False
    if tied and wanted:
        draft.note(f"{head} was left out as asked, whether or not it equals {embedding}", (head,))
    else:
        _claim(draft, head, embedding, by="config.json" if tied else "--tie-word-embedding")
    if not tied:
        _say_in_config(draft, config, True, f"{head} is tied to {embedding} as asked")
    draft.drop(head, f"tied to {embedding}")
    return True


def is_tied_head(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a name of the file is that of a head that the config ties to the embedding."""
    return name in _PAIRS and is_tied(config)


def find_tied(names: Collection[str], config: Mapping[str, Any]) -> Mapping[str, str]:
    """Heads that are not among the names because the config ties them → the embedding that serves in their place."""
    if not is_tied(config):
        return {}
    pairs = {head: next((name for name in embeddings if name in names), None) for head, embeddings in _PAIRS.items()}
    return {head: name for head, name in pairs.items() if name is not None and head not in names}


def _claim(draft: Draft, head: str, embedding: str, by: str) -> None:
    """Claim that both are equal, or tell at once why they cannot be. `by` is who ties them."""
    left, right = draft.tensors[head], draft.tensors[embedding]
    message = f"{by} ties {head} to {embedding}, but their values differ"
    hint = _HINT if by == "config.json" else f"leave {by} out: config.json says that they are not tied"
    if left.shape != right.shape:
        message = f"{message}: shapes {list(left.shape)} and {list(right.shape)}"
        draft.problems.append(ModelError(message, hint=hint))
    elif isinstance(left, Tensor) and isinstance(right, Tensor):
        draft.claims.append(Claim(left, right, message, hint))
    elif left != right:
        message = f"{head} and {embedding} are tied, but an adapter changes one of them"
        draft.problems.append(ModelError(message, hint=hint))


def _without_head(draft: Draft, config: Mapping[str, Any], tied: bool, wanted: bool | None) -> bool:
    if tied and wanted is False:
        message = "there is no lm_head to keep apart from the embedding: the checkpoint stores one matrix"
        draft.problems.append(UsageError(message, hint="leave --untie-word-embedding out"))
    if wanted and not tied:
        _say_in_config(draft, config, True, "there is no lm_head, and the embedding serves as asked")
    return tied or wanted is True


def _tie_without_embedding(
    draft: Draft, config: Mapping[str, Any], head: str, known: Collection[str], offered: Collection[str]
) -> bool:
    """The same where the user alone ties them. With an embedding of the base model's there would be two matrices."""
    other = next((name for name in _PAIRS[head] if name in offered), None)
    if other is not None:
        message = f"--tie-word-embedding would put {head} in the place of {other}, which --fill-from gives"
        draft.problems.append(UsageError(message, hint="leave one of the two out: both is not one model"))
        return False
    _say_in_config(draft, config, True, f"{head} is tied to the embedding as asked")
    return _without_embedding(draft, head, True, known)


def _without_embedding(draft: Draft, head: str, tied: bool, known: Collection[str]) -> bool:
    """A tied model whose only copy lies under the head's name: it becomes the embedding."""
    names = [name for name in _PAIRS[head] if name in known] or _PAIRS[head][:1]
    if tied and (known or len(_PAIRS[head]) == 1):
        renamed = {name: (names[0] if name == head else name) for name in draft.tensors}
        tensors = {renamed[name]: value.rename(renamed[name]) for name, value in draft.tensors.items()}
        draft.replace(tensors, {renamed[name]: (name,) for name in renamed})
        draft.note(f"{head} is the only copy of the tied embedding and became {names[0]}", (names[0],))
    return tied


def _say_in_config(draft: Draft, config: Mapping[str, Any], tied: bool, why: str) -> None:
    """Set `tie_word_embeddings` wherever config.json has it, and at the top."""
    draft.config_changes["tie_word_embeddings"] = tied
    text = config.get("text_config")
    if isinstance(text, Mapping) and "tie_word_embeddings" in text:
        draft.config_changes["text_config"] = {**text, "tie_word_embeddings": tied}
    draft.note(f"config.json: tie_word_embeddings becomes {str(tied).lower()}: {why}")
