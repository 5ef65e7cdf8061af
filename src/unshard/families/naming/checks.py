"""What the architecture must have against what is there: unknown, missing and misshapen names, all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from unshard.checkpoint import Shape
from unshard.errors import ModelError
from unshard.families.naming.lists import nearest, outline, summarize
from unshard.tensors import Value
from unshard.words import count_in_words

_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


def compare(
    tensors: Mapping[str, Value],
    expected: Mapping[str, Shape],
    against: str,
    *,
    explained: Collection[str] = (),
    ways_out: Mapping[str, str],
) -> Iterator[ModelError]:
    """One error per kind of trouble.

    against:   what the names were compared with, for people.
    explained: names whose absence another problem tells already.
    ways_out:  hints for "unknown", "missing" and "misshapen".
    """
    unknown = [name for name in tensors if name not in expected]
    missing = [name for name in expected if name not in tensors and name not in explained]
    if unknown:
        outlines = {outline(name): name for name in missing}
        lines = [_with_count(line, count, nearest(line, outlines)) for line, count in summarize(unknown).items()]
        yield _error(f"{count_in_words(len(unknown), 'tensor')} unknown to {against}", lines, ways_out["unknown"])
    if missing:
        lines = [_with_count(line, count) for line, count in summarize(missing).items()]
        yield _error(f"{count_in_words(len(missing), 'tensor')} of {against} missing", lines, ways_out["missing"])
    yield from _misshapen(tensors, expected, against, ways_out["misshapen"])


def _misshapen(
    tensors: Mapping[str, Value], expected: Mapping[str, Shape], against: str, hint: str
) -> Iterator[ModelError]:
    wrong: dict[tuple[Shape, Shape], list[str]] = {}
    for name, value in tensors.items():
        if name in expected and value.shape != expected[name]:
            wrong.setdefault((value.shape, expected[name]), []).append(name)
    if not wrong:
        return
    lines = [
        f"{_with_count(line, count)}: shape {list(found)}, expected {list(right)}"
        for (found, right), names in wrong.items()
        for line, count in summarize(names).items()
    ]
    total = sum([len(names) for names in wrong.values()])
    yield _error(f"{count_in_words(total, 'tensor')} with other shapes than {against} has", lines, hint)


def check_vocabulary(
    tensors: Mapping[str, Value], expected: dict[str, Shape], vocabulary: int | None
) -> ModelError | None:
    """An embedding or head whose rows are not the vocabulary that config.json names.

    What it tells is taken out of `expected`, so that it is not told twice.
    """
    found = []
    for name, value in tensors.items():
        shape = value.shape
        if (
            name.endswith(_VOCABULARY)
            and shape[1:] == expected.get(name, ())[1:]
            and shape[:1] not in ((), (vocabulary,))
        ):
            expected[name] = shape
            found.append(f"{name} has {shape[0]} rows")
    if vocabulary is None or not found:
        return None
    return ModelError(
        f"config.json says vocab_size {vocabulary}, but {' and '.join(found)}",
        hint="the vocabulary was resized in training: give the config.json of the resized model with --config DIR",
    )


def _with_count(line: str, count: int, guess: str | None = None) -> str:
    text = line if count == 1 else f"{line} ({count_in_words(count, 'tensor')})"
    return f"{text}, close to {guess}" if guess else text


def _error(head: str, lines: list[str], hint: str) -> ModelError:
    return ModelError(head + ":\n  " + "\n  ".join(lines), hint=hint)
