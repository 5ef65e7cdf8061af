"""How much a file may ask of us. Every bound stands here."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is read from one file, so that the most hostile one costs seconds and less than 1 GiB.

    A rank's file may hold 70 000 DTensors (375 bytes of pickle, 133 operations, 160 units of `objects` each).

    pickle_bytes:    size of a pickle.
    directory_bytes: size of a zip directory; an entry takes about 70 bytes.
    operations:      opcodes executed.
    objects:         units of about 64 bytes: a container, number or text costs 1, a memo entry 2, an entry of a dict 1
                     and the first one 3 more, a record 4, a storage 8, a copied entry 1.
    integer_bytes:   size of one integer; `number_digits` is the same for numbers written as text.
    key_length:      characters of a dict key, so that comparing keys stays cheap.
    key_parts:       nodes of a tuple that is a dict key: hashing a tuple walks all of it, on the C stack.
    tuple_keys:      dict keys that are tuples, in the whole file: their hashes are not salted, so that collisions
                     can be forged.
    name_length:     characters of a class name or module name.
    dimensions:      axes of a tensor (torch itself allows 64).
    """

    pickle_bytes: int = 128 * MIB
    directory_bytes: int = 32 * MIB
    operations: int = 32_000_000
    objects: int = 12_000_000
    integer_bytes: int = 256
    number_digits: int = 600
    key_length: int = 4096
    key_parts: int = 64
    tuple_keys: int = 10_000
    name_length: int = 1024
    dimensions: int = 64


DEFAULT_LIMITS = Limits()
