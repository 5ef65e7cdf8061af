"""Torch files as containers: where the payload lies, and what is refused for which reason. No torch needed."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest

import torch_bytes as tb
from unshard import dtypes
from unshard.errors import FormatError
from unshard.formats.torch_file import UnsupportedTensor, read_torch_file


class TestArchive:
    @pytest.mark.parametrize("folder", ["archive", "model_world_size_2_rank_0", "a.b", "data", "模型"])
    def test_any_folder_name(self, tmp_path: Path, folder: str) -> None:
        tensor = tb.weight(tb.read(tmp_path, tb.archive(tb.torch_members(folder=folder))).root)
        assert tb.payload_of(tmp_path / "model.pt", tensor) == tb.PAYLOAD
        assert (tensor.shape, tensor.strides, tensor.offset, tensor.dtype) == ((2, 3), (3, 1), 0, dtypes.F32)

    @pytest.mark.parametrize("alignment", [1, 64, 4096])
    @pytest.mark.parametrize("zip64", [False, True])
    def test_payload_is_found_from_the_local_header(self, tmp_path: Path, alignment: int, zip64: bool) -> None:
        members = tb.torch_members()
        for member in members:
            member.alignment = alignment
        found = tb.read(tmp_path, tb.archive(members, zip64=zip64))
        tensor = tb.weight(found.root)
        assert found.container == "zip"
        assert tensor.storage.offset % alignment == 0
        assert tb.payload_of(tmp_path / "model.pt", tensor) == tb.PAYLOAD

    def test_item_inside_a_larger_file_has_absolute_offsets(self, tmp_path: Path) -> None:
        item = tb.archive(tb.torch_members())
        path = tmp_path / "__0_0.distcp"
        path.write_bytes(b"x" * 1177 + item + item)
        for start in (1177, 1177 + len(item)):
            found = read_torch_file(path, tb.FILE, start=start, length=len(item))
            assert tb.payload_of(path, tb.weight(found.root)) == tb.PAYLOAD
            assert tb.weight(found.root).storage.offset > start

    def test_item_outside_of_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "items"
        path.write_bytes(b"x" * 100)
        with pytest.raises(FormatError, match=r"bytes 90 to 190\): the item lies .* has only 100"):
            read_torch_file(path, tb.FILE, start=90, length=100)

    def test_globals_are_listed(self, tmp_path: Path) -> None:
        found = tb.read(tmp_path, tb.archive(tb.torch_members()))
        assert found.globals == {"torch.FloatStorage", "torch._utils._rebuild_tensor_v2", "collections.OrderedDict"}

    def test_deflated_pickle_is_read(self, tmp_path: Path) -> None:
        members = tb.torch_members()
        members[0].method = 8
        assert tb.weight(tb.read(tmp_path, tb.archive(members)).root).shape == (2, 3)

    @pytest.mark.parametrize("zip64", [False, True])
    def test_archive_packed_by_another_tool(self, tmp_path: Path, zip64: bool) -> None:
        path = tmp_path / "model.pt"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
            packed.writestr("archive/", b"")
            for member in tb.torch_members():
                with packed.open(member.name, "w", force_zip64=zip64) as opened:
                    opened.write(member.data)
        tensor = tb.weight(read_torch_file(path, tb.FILE).root)
        assert tb.payload_of(path, tensor) == tb.PAYLOAD

    def test_deflated_payload_is_refused_with_a_way_out(self, tmp_path: Path) -> None:
        members = tb.torch_members()
        members[2].method = 8
        with pytest.raises(FormatError, match="storage 0 is compressed") as caught:
            tb.read(tmp_path, tb.archive(members))
        assert "torch.save" in str(caught.value.hint)

    def test_big_endian_is_refused(self, tmp_path: Path) -> None:
        members = tb.torch_members()
        members[1].data = b"big"
        with pytest.raises(FormatError, match="big-endian"):
            tb.read(tmp_path, tb.archive(members))

    def test_no_byteorder_means_little(self, tmp_path: Path) -> None:
        members = tb.torch_members()
        del members[1]
        assert tb.weight(tb.read(tmp_path, tb.archive(members)).root).shape == (2, 3)

    @pytest.mark.parametrize("name", ["constants.pkl", "code/model.py"])
    def test_torchscript_is_refused(self, tmp_path: Path, name: str) -> None:
        members = [*tb.torch_members(), tb.Entry(f"archive/{name}", b"")]
        with pytest.raises(FormatError, match="TorchScript"):
            tb.read(tmp_path, tb.archive(members))

    def test_other_zip_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="a zip archive, but not one that"):
            tb.read(tmp_path, tb.archive([tb.Entry("word/document.xml", b"<a/>")]))

    def test_missing_storage(self, tmp_path: Path) -> None:
        members = tb.torch_members()
        del members[2]
        with pytest.raises(FormatError, match="storage 0 is missing"):
            tb.read(tmp_path, tb.archive(members))

    def test_damage_of_any_kind_has_a_way_out(self, tmp_path: Path) -> None:
        def refuse(place: int) -> FormatError | None:
            try:
                tb.read(tmp_path, whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
            except FormatError as error:
                return error
            return None

        whole = tb.archive(tb.torch_members())
        refused = [error for place in range(4, len(whole), 7) if (error := refuse(place))]
        assert len(refused) > 10
        assert [error.message for error in refused if not error.hint] == []

    def test_every_truncation_is_refused(self, tmp_path: Path) -> None:
        whole = tb.archive(tb.torch_members())
        for size in range(4, len(whole)):
            with pytest.raises(FormatError, match=r"not a complete file|does not lie|damaged"):
                tb.read(tmp_path, whole[:size])

    def test_pickle_with_bytes_after_its_end(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="3 bytes follow"):
            tb.read(tmp_path, tb.archive(tb.torch_members(tb.MODEL + b"abc")))


class TestOtherFiles:
    @pytest.mark.parametrize(
        ("data", "reason", "hint"),
        [
            (b"", "empty", "interrupted"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer", "git lfs pull"),
            (struct.pack("<Q", 2) + b"{}", "safetensors", ".safetensors"),
            (struct.pack("<Q", 128) + b'{"a":' + b" " * 130, "safetensors", ".safetensors"),
            (b"\0" * 600, "zeros only", "interrupted"),
            (b"<!DOCTYPE html>", "web page", "download"),
            (b"\x1f\x8b\x08", "gzip", "gunzip"),
            (b"\x80\x04K\x01.", "a pickle, but not one that torch.save wrote", None),
            (b"storages".ljust(257, b"\0") + b"ustar\x0000".ljust(255, b"\0"), "tar archive", None),
            (b"hello", "68 65 6c 6c 6f", None),
            (b"PK\x05\x06" + b"\0" * 18, "empty zip", "interrupted"),
        ],
    )
    def test_what_it_is_instead(self, tmp_path: Path, data: bytes, reason: str, hint: str | None) -> None:
        with pytest.raises(FormatError, match=reason) as caught:
            tb.read(tmp_path, data)
        assert str(caught.value).startswith("model.pt: ")
        assert (caught.value.hint is None) if hint is None else hint in str(caught.value.hint)

    def test_missing_file_and_directory(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"model.pt: cannot be read: No such file"):
            read_torch_file(tmp_path / "none.pt", tb.FILE)
        with pytest.raises(FormatError, match="not a regular file"):
            read_torch_file(tmp_path, tb.FILE)


class TestLegacyStream:
    def test_storages_follow_each_other(self, tmp_path: Path) -> None:
        body = tb.mapping(
            {
                "weight": tb.tensor(tb.legacy_storage("7")),
                "bias": tb.tensor(tb.legacy_storage("12", 2, "HalfStorage"), (2,), (1,)),
            }
        )
        found = tb.read(tmp_path, tb.legacy(body, {"7": (6, tb.PAYLOAD), "12": (2, b"abcd")}))
        assert found.container == "legacy"
        assert tb.payload_of(tmp_path / "model.pt", tb.weight(found.root)) == tb.PAYLOAD
        assert isinstance(found.root, dict)
        assert tb.payload_of(tmp_path / "model.pt", found.root["bias"]) == b"abcd"

    def test_view_of_a_storage(self, tmp_path: Path) -> None:
        view = tb.group(tb.text("8"), tb.integer(2), tb.integer(4))
        body = tb.mapping({"weight": tb.tensor(tb.legacy_storage(view=view), (2, 2), (2, 1))})
        found = tb.weight(tb.read(tmp_path, tb.legacy(body, {"7": (6, tb.PAYLOAD)})).root)
        assert tb.payload_of(tmp_path / "model.pt", found) == tb.PAYLOAD[8:24]

    def test_view_that_reaches_out_of_its_storage(self, tmp_path: Path) -> None:
        view = tb.group(tb.text("8"), tb.integer(3), tb.integer(4))
        body = tb.mapping({"weight": tb.tensor(tb.legacy_storage(view=view), (2, 2), (2, 1))})
        with pytest.raises(FormatError, match="has 6 elements, its view 8 ends at 7"):
            tb.read(tmp_path, tb.legacy(body, {"7": (6, tb.PAYLOAD)}))

    def test_text_of_python_2(self, tmp_path: Path) -> None:
        """There, keys and the words of a persistent id were byte strings."""
        reference = b"(U\x07storage" + tb.named("torch", "FloatStorage") + b"U\x017U\x03cpu" + tb.integer(6) + b"NtQ"
        body = b"}U\x06weight" + tb.tensor(reference) + b"s"
        data = tb.legacy(body, {"7": (6, tb.PAYLOAD)}).replace(tb.text("7") + b"e.", b"U\x017e.")
        assert tb.payload_of(tmp_path / "model.pt", tb.weight(tb.read(tmp_path, data).root)) == tb.PAYLOAD

    def test_large_pickle_is_read_in_growing_pieces(self, tmp_path: Path) -> None:
        body = tb.mapping({"notes": tb.text("x" * 3_000_000), "weight": tb.tensor(tb.legacy_storage())})
        found = tb.read(tmp_path, tb.legacy(body, {"7": (6, tb.PAYLOAD)}))
        assert tb.payload_of(tmp_path / "model.pt", tb.weight(found.root)) == tb.PAYLOAD

    def test_storages_of_types_that_we_do_not_hold_are_stepped_over(self, tmp_path: Path) -> None:
        strange = tb.tensor(tb.legacy_storage("1", 1, "ComplexDoubleStorage"), (1,), (1,))
        body = tb.mapping({"strange": strange, "weight": tb.tensor(tb.legacy_storage())})
        found = tb.read(tmp_path, tb.legacy(body, {"1": (1, b"c" * 16), "7": (6, tb.PAYLOAD)}))
        assert tb.payload_of(tmp_path / "model.pt", tb.weight(found.root)) == tb.PAYLOAD
        assert isinstance(found.root, dict)
        assert isinstance(found.root["strange"], UnsupportedTensor)

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (tb.legacy(tb.tensor(tb.legacy_storage()), {"7": (6, tb.PAYLOAD[:-1])}), "not a complete file"),
            (tb.legacy(tb.tensor(tb.legacy_storage()), {"7": (5, tb.PAYLOAD)}), "5 elements in the file, but 6"),
            (tb.legacy(tb.tensor(tb.legacy_storage()), {"7": (6, tb.PAYLOAD + b"x")}), "1 bytes follow"),
            (tb.legacy(tb.tensor(tb.legacy_storage()), {}), "not those that its object uses"),
            (tb.legacy(b"N", {}, little=False), "big-endian"),
            (tb.legacy(b"N", {}, protocol=1002), "version, 1001"),
            (tb.MAGIC, "not a complete file"),
        ],
    )
    def test_refusals(self, tmp_path: Path, data: bytes, reason: str) -> None:
        with pytest.raises(FormatError, match=reason):
            tb.read(tmp_path, data)

    def test_every_truncation_is_refused(self, tmp_path: Path) -> None:
        whole = tb.legacy(tb.mapping({"weight": tb.tensor(tb.legacy_storage())}), {"7": (6, tb.PAYLOAD)})
        for size in range(len(tb.MAGIC), len(whole)):
            with pytest.raises(FormatError):
                tb.read(tmp_path, whole[:size])
