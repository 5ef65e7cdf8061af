"""The option that a person meant: `-` or `_`, abbreviated or not, in our words or in verl's.

argparse then sees whole option names only, options first and paths last: what an abbreviation means is settled here
alone, and paths may stand between options.
"""

from __future__ import annotations

import shlex
from argparse import Action
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from unshard.errors import UsageError


def spell_out(
    words: Sequence[str], options: Mapping[str, Action], dialects: Sequence[Iterable[str]], command: str
) -> list[str]:
    """The words of a command line as the parser knows them: options, `--`, paths.

    options:  option string → its action, as argparse keeps them.
    dialects: the options of other programs' parsers. An abbreviation that means one option in one of them means that
              here, whatever else begins so; the first dialect that knows it decides.

    Raises UsageError for options that are unknown or ambiguous, with the nearest ones.
    """
    speller = _Speller(words, options, dialects, command)
    spelled: list[str] = []
    paths: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word == "--":
            paths += words[place:]
            break
        if not word.startswith("-") or word == "-":
            paths.append(word)
            continue
        name, equals, value = word.partition("=")
        option = speller.find(place - 1) if word.startswith("--") else name
        spelled.append(f"{option}{equals}{value}")
        if not equals and option in options and options[option].nargs != 0:
            spelled += words[place : place + 1]
            place += 1
    return [*spelled, "--", *paths]


class _Speller:
    """Finds the option that each word of a line means."""

    def __init__(
        self,
        words: Sequence[str],
        options: Mapping[str, Action],
        dialects: Sequence[Iterable[str]],
        command: str,
    ) -> None:
        self._words, self._options, self._command = words, options, command
        self._known = {_plain(option): option for option in options if option.startswith("--")}
        self._dialects = [[_plain(option) for option in dialect] for dialect in dialects]

    def find(self, place: int) -> str:
        """The option string of the word at a place. Raises UsageError where there is none, or several."""
        name = _plain(self._words[place].partition("=")[0])
        if name in self._known:
            return self._known[name]
        for dialect in self._dialects:
            meant = [option for option in dialect if option.startswith(name)]
            if len(meant) == 1:
                return self._known[meant[0]]
        ours = [option for option in self._known.values() if _plain(option).startswith(name)]
        if not ours:
            raise self._unknown(place)
        if len({id(self._options[option]) for option in ours}) > 1:
            message = f"`{self._words[place]}` could mean {', '.join([f'`{option}`' for option in ours])}"
            raise UsageError(message, hint=f"{self._command} --help")
        return ours[0]

    def _unknown(self, place: int) -> UsageError:
        name, equals, value = self._words[place].partition("=")
        message = f"`{self._command}` has no option `{name}`"
        near = get_close_matches(_plain(name), self._known, 1)
        if not near:
            return UsageError(message, hint=f"{self._command} --help")
        option = self._known[near[0]]
        mended = [*self._words[:place], f"{option}{equals}{value}", *self._words[place + 1 :]]
        return UsageError(f"{message}; the nearest is `{option}`", hint=f"{self._command} {shlex.join(mended)}")


def _plain(option: str) -> str:
    return option.replace("_", "-")
