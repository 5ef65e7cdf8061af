"""What a plan's JSON looks like, and the documents that are refused."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

from synthetic import RankFiles, lay_out, shard_rows
from unshard.dtypes import BF16, F32
from unshard.errors import FormatError
from unshard.plan.compiler import compile_plan
from unshard.plan.document import VERSION, from_json, to_json
from unshard.target import TargetFile


def document() -> dict:
    files = RankFiles("rank_{}.pt")
    tensors = [shard_rows("a", (64, 512), F32, [0, 1], files), shard_rows("b", (4, 4), F32, [0, 1], files).cast(BF16)]
    target = lay_out(tensors)
    header = TargetFile("header", 3, ((0, b"abc"),), last=True)
    plan = compile_plan(type(target)((*target.files, header), target.roots))
    return json.loads(json.dumps(to_json(plan)))


def test_the_document_is_readable() -> None:
    found = document()
    assert {key: found[key] for key in ("format", "version", "roots", "sources", "claims")} == {
        "format": "unshard-plan",
        "version": VERSION,
        "roots": {"checkpoint": "/nowhere"},
        "sources": [["checkpoint", "rank_0.pt"], ["checkpoint", "rank_1.pt"]],
        "claims": [],
    }
    first, second, tile = found["files"][0]["moves"]
    assert first == {"kind": "copy", "to": 0, "size": 65536, "source": 0, "from": 0}
    assert second == {"kind": "copy", "to": 65536, "size": 65536, "source": 1, "from": 0}
    assert (tile["kind"], tile["name"], tile["dtype"], tile["shape"]) == ("tile", "b", "BF16", [16])
    assert tile["pieces"][1] == {
        "offsets": [8], "sizes": [8], "source": 1, "from": 65536, "strides": [4], "dtype": "F32", "encoding": "plain",
        "rank": 1,
    }  # fmt: skip
    assert found["files"][1]["moves"] == [{"kind": "literal", "to": 0, "base64": "YWJj"}]


def wreck(path: tuple[str | int, ...], value: object) -> dict:
    found = deepcopy(document())
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


MOVES = ("files", 0, "moves")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "the plan is None, not an object"),
        ([], "not an object"),
        ({}, "the fields of the plan"),
        (wreck(("format",), "safetensors"), "no plan of version 1"),
        (wreck(("version",), 2), "version 2"),
        (wreck(("extra",), 2), "the fields of the plan"),
        (wreck(("roots",), {"checkpoint": 3}), "a root is 3, not a string"),
        (wreck(("roots",), {"other": "/"}), "which is no root of the plan"),
        (wreck(("sources", 0), ["checkpoint", "../../etc/passwd"]), "no path below the root"),
        (wreck(("sources", 0), ["checkpoint", "/etc/passwd"]), "no path below the root"),
        (wreck(("sources", 0), ["checkpoint"]), "a root and a path"),
        (wreck(("sources",), []), "the number of a source is 0, not less than 0"),
        (wreck(("files", 0, "path"), "/etc/passwd"), "no path below the output directory"),
        (wreck(("files", 1, "path"), "model-0.bin"), "written twice"),
        (wreck(("files", 0, "size"), 1 << 80), "not an integer from 0 to 2^63 - 1"),
        (wreck(("files", 0, "size"), True), "not an integer"),
        (wreck(("files", 0, "size"), 5), "past the end"),
        (wreck((*MOVES, 0, "kind"), "exec"), "not literal, copy, tile or compute"),
        (wreck((*MOVES, 0, "from"), -1), "from of a copy is -1"),
        (wreck((*MOVES, 0, "to"), 1), "nothing writes bytes 0 to 1"),
        (wreck((*MOVES, 2, "dtype"), "F99"), "not a dtype of safetensors"),
        (wreck((*MOVES, 2, "shape"), [1] * 65), "at most 64 axes"),
        (wreck((*MOVES, 2, "shape"), [4, 4]), "strides"),
        (wreck((*MOVES, 2, "pieces", 0, "offsets"), []), "1 of them"),
        (wreck((*MOVES, 2, "pieces", 0, "sizes"), [7]), "no piece holds [7:8]"),
        (wreck((*MOVES, 2, "pieces", 0, "sizes"), [9]), "pieces overlap"),
        (wreck((*MOVES, 2, "pieces", 0, "dtype"), "I32"), "I32 cannot be cast to BF16"),
        (wreck(("files", 1, "moves", 0, "base64"), "%%%"), "not base64"),
        (wreck(("files", 1, "last"), 1), "not true or false"),
        (wreck(("files", 1, "seals"), [[0, 0]]), "three numbers"),
    ],
)
def test_hostile_documents_are_refused(found: object, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        from_json(found)
    assert message in caught.value.message
