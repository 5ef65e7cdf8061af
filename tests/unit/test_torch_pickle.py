"""What the pickles of torch files become: tensors, values, records. No torch needed."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import pytest

import torch_bytes as tb
from unshard import dtypes
from unshard.errors import FormatError
from unshard.formats.torch_file import Global, Opaque, Storage, StoredTensor, UnsupportedTensor, WrapperSubclass


class TestTensors:
    @pytest.mark.parametrize(
        ("kind", "dtype"),
        [
            ("DoubleStorage", dtypes.F64),
            ("BFloat16Storage", dtypes.BF16),
            ("BoolStorage", dtypes.BOOL),
            ("CharStorage", dtypes.I8),
            ("ComplexFloatStorage", dtypes.C64),
        ],
    )
    def test_typed_storages(self, tmp_path: Path, kind: str, dtype: dtypes.DType) -> None:
        body = tb.mapping({"weight": tb.tensor(tb.storage(numel=24 // dtype.itemsize, kind=kind), (1,), (1,))})
        assert tb.weight(tb.read_pickle(tmp_path, body)).dtype is dtype

    @pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
    def test_every_dtype_on_untyped_storages(self, tmp_path: Path, dtype: dtypes.DType) -> None:
        args = (
            tb.storage(numel=24, kind="UntypedStorage", module="torch.storage"),
            tb.integer(1),
            tb.counts([2]),
            tb.counts([1]),
        )
        function = tb.named("torch._utils", "_rebuild_tensor_v3")
        body = tb.call(function, *args, b"\x89", b"N", tb.named("torch", dtype.torch_name))
        tensor = tb.read_pickle(tmp_path, body)
        assert isinstance(tensor, StoredTensor)
        assert (tensor.dtype, tensor.offset, tensor.storage.numel) == (dtype, 1, 24)

    @pytest.mark.parametrize(
        ("shape", "strides", "offset"),
        [
            ((3, 2), (1, 3), 0),
            ((5, 2), (0, 1), 4),
            ((2,), (3,), 2),
            ((), (), 5),
            ((0, 9), (9, 1), 0),
            ((1, 6), (99, 1), 0),
        ],
    )
    def test_views_inside_their_storage(
        self, tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> None:
        body = tb.mapping({"weight": tb.tensor(tb.storage(), shape, strides, offset)})
        found = tb.weight(tb.read_pickle(tmp_path, body))
        assert (found.shape, found.strides, found.offset) == (shape, strides, offset)

    @pytest.mark.parametrize(
        ("shape", "strides", "offset", "reason"),
        [
            ((2, 3), (3, 1), 1, "reaches out of storage 0 of 24 bytes"),
            ((2, 3), (4, 1), 0, "reaches out"),
            ((), (), 6, "reaches out"),
            ((-2, 3), (3, 1), 0, "no count: -2"),
            ((2, 3), (-3, 1), 0, "no count: -3"),
            ((2, 3), (3, 1), -1, "offset -1"),
            ((2, 3), (1,), 0, r"strides \(1,\)"),
            ((1 << 40, 1 << 40), (0, 0), 0, "too many elements"),
            ((1,) * 65, (1,) * 65, 0, "arguments that torch never writes"),
        ],
    )
    def test_views_that_are_refused(
        self, tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, reason: str
    ) -> None:
        with pytest.raises(FormatError, match=reason):
            tb.read_pickle(tmp_path, tb.tensor(tb.storage(), shape, strides, offset))

    def test_storages_are_shared(self, tmp_path: Path) -> None:
        body = tb.mapping({"a": tb.tensor(tb.storage()), "b": tb.tensor(tb.storage(), (3,), (1,), 3)})
        root = tb.read_pickle(tmp_path, body)
        assert isinstance(root, dict)
        assert root["a"].storage is root["b"].storage

    @pytest.mark.parametrize("other", [tb.storage(kind="IntStorage"), tb.storage(numel=5)])
    def test_one_key_with_two_meanings(self, tmp_path: Path, other: bytes) -> None:
        with pytest.raises(FormatError, match="storage 0 is both a FloatStorage of 6 and a"):
            tb.read_pickle(tmp_path, tb.group(tb.storage(), other))

    @pytest.mark.parametrize("numel", [5, 7, 1 << 62])
    def test_storage_that_does_not_fit_its_member(self, tmp_path: Path, numel: int) -> None:
        with pytest.raises(FormatError, match=r"storage 0 has 24 bytes in the archive, but \d+ in its pickle"):
            tb.read_pickle(tmp_path, tb.storage(numel=numel))

    def test_attributes_of_a_parameter(self, tmp_path: Path) -> None:
        function = tb.named("torch._utils", "_rebuild_parameter_with_state")
        state = tb.mapping({"partition_dim": tb.integer(0)})
        body = tb.mapping({"weight": tb.call(function, tb.tensor(tb.storage()), b"\x88", b"N", state)})
        assert tb.weight(tb.read_pickle(tmp_path, body)).attributes == {"partition_dim": 0}

    @pytest.mark.parametrize(("dtype", "readable"), [("float32", True), ("float16", False)])
    def test_tensor_of_a_foreign_device(self, tmp_path: Path, dtype: str, readable: bool) -> None:
        function = tb.named("torch._utils", "_rebuild_device_tensor_from_cpu_tensor")
        body = tb.call(function, tb.tensor(tb.storage()), tb.named("torch", dtype), tb.text("xla:0"), b"\x89")
        found = tb.read_pickle(tmp_path, body)
        assert isinstance(found, StoredTensor if readable else UnsupportedTensor)
        assert found.shape == (2, 3)

    def test_dtensor_of_protocol_2(self, tmp_path: Path) -> None:
        cls = tb.named("torch.distributed.tensor", "DTensor")
        size, strides = tb.counts([4, 3]), tb.counts([3, 1])
        args = (cls, tb.named("torch", "float32"), size, strides, b"K\x00", b"N", b"N", b"\x89")
        state = tb.group(b"N", tb.mapping({"_local_tensor": tb.tensor(tb.storage())}))
        rebuild = tb.named("torch._utils", "_rebuild_wrapper_subclass")
        body = tb.call(tb.named("torch._tensor", "_rebuild_from_type_v2"), rebuild, cls, tb.group(*args), state)
        found = tb.read_pickle(tmp_path, body)
        assert isinstance(found, WrapperSubclass)
        assert (found.cls.name, found.shape, found.dtype) == ("DTensor", (4, 3), dtypes.F32)
        assert found.state["_local_tensor"].shape == (2, 3)

    def test_subclass_with_a_plain_storage(self, tmp_path: Path) -> None:
        inner = tb.group(tb.storage(), tb.integer(0), tb.counts([6]), tb.counts([1]), b"\x89", b"N")
        function = tb.named("torch._tensor", "_rebuild_from_type_v2")
        rebuild = tb.named("torch._utils", "_rebuild_tensor_v2")
        state = tb.mapping({"quant_state": tb.integer(4)})
        body = tb.call(function, rebuild, tb.named("bitsandbytes.nn", "Params4bit"), inner, state)
        found = tb.read_pickle(tmp_path, body)
        assert isinstance(found, StoredTensor)
        assert found.cls == Global("bitsandbytes.nn", "Params4bit")
        assert found.attributes == {"quant_state": 4}

    @pytest.mark.parametrize(
        ("function", "args", "reason", "shape"),
        [
            ("_rebuild_meta_tensor_no_storage", (tb.named("torch", "float32"), tb.counts([3])), "meta device", (3,)),
            ("_rebuild_sparse_tensor", (b"N", b"N"), "sparse", None),
            ("_rebuild_qtensor", (tb.storage(), tb.integer(0), tb.counts([6])), "quantised", (6,)),
            ("_rebuild_nested_tensor", (b"N",), "nested", None),
            ("_rebuild_device_tensor_from_numpy", (b"N",), "numpy", None),
        ],
    )
    def test_tensors_without_plain_bytes(
        self, tmp_path: Path, function: str, args: tuple[bytes, ...], reason: str, shape: tuple[int, ...] | None
    ) -> None:
        found = tb.read_pickle(tmp_path, tb.call(tb.named("torch._utils", function), *args))
        assert isinstance(found, UnsupportedTensor)
        assert reason in found.reason
        assert found.shape == shape

    def test_lazy_conjugate_is_not_taken_for_its_bytes(self, tmp_path: Path) -> None:
        body = tb.tensor(tb.storage(), (2, 3), (3, 1), 0, tb.mapping({"conj": b"\x88"}))
        found = tb.read_pickle(tmp_path, body)
        assert isinstance(found, UnsupportedTensor)
        assert "conj" in found.reason


class TestValues:
    @pytest.mark.parametrize(
        ("body", "value"),
        [
            (b"I01\n", True), (b"I42\n", 42), (b"L-7L\n", -7), (b"F1.5\n", 1.5), (b"V\\u00e9\n", "é"),
            (b"S'a\\x62'\n", "ab"), (b"J\xff\xff\xff\xff", -1), (b"M\x00\x01", 256), (b"G?\xf8\0\0\0\0\0\0", 1.5),
            (b"\x8c\x01a", "a"), (b"U\x01\xff", b"\xff"), (b"C\x02ab", b"ab"), (b"\x96\x02\0\0\0\0\0\0\0ab", b"ab"),
            (b"(lN0", []), (b"(K\x01NdN0", {1: None}), (b"]K\x01a", [1]), (b"](K\x01K\x02e", [1, 2]),
            (b"N\x85", (None,)), (b"K\x01K\x02K\x03\x87", (1, 2, 3)),
            (b"K\x05q\x05h\x05\x86", (5, 5)), (b"K\x05\x94h\x00\x86", (5, 5)),
            (b"K\x05p9\ng9\n\x86", (5, 5)), (b"K\x05r\0\0\1\0j\0\0\1\0\x86", (5, 5)), (b"K\x052\x86", (5, 5)),
            (b"K\x01(NN1", 1), (b"K\x01(0", 1),
        ],
    )  # fmt: skip
    def test_opcodes(self, tmp_path: Path, body: bytes, value: object) -> None:
        assert tb.read_pickle(tmp_path, body) == value

    @pytest.mark.parametrize("body", [b"NN", b"N(", b"(", b""])
    def test_pickle_that_leaves_other_than_one_object(self, tmp_path: Path, body: bytes) -> None:
        with pytest.raises(FormatError, match="other than one object"):
            tb.read_pickle(tmp_path, body)

    def test_lone_surrogates_are_shown_as_escapes(self, tmp_path: Path) -> None:
        assert tb.read_pickle(tmp_path, b"X\x03\0\0\0\xed\xa0\x80") == "\\xed\\xa0\\x80"

    @pytest.mark.parametrize(
        ("kind", "data", "value"),
        [
            ("f4", struct.pack("<f", 1.5), 1.5),
            ("i8", struct.pack("<q", -3), -3),
            ("b1", b"\x01", True),
            ("f8", struct.pack("<d", 2), 2.0),
        ],
    )
    def test_numpy_scalars_are_numbers(self, tmp_path: Path, kind: str, data: bytes, value: object) -> None:
        dtype = tb.call(tb.named("numpy", "dtype"), tb.text(kind), b"\x89", b"\x88")
        dtype += tb.group(tb.integer(3), tb.text("<"), b"N", b"N") + b"b"
        body = tb.call(tb.named("numpy._core.multiarray", "scalar"), dtype, b"C" + bytes([len(data)]) + data)
        assert tb.read_pickle(tmp_path, body) == value

    def test_unknown_classes_become_records(self, tmp_path: Path) -> None:
        body = tb.named("argparse", "Namespace") + b")\x81" + tb.mapping({"lr": tb.integer(3)}) + b"b"
        found = tb.read_pickle(tmp_path, body)
        assert isinstance(found, Opaque)
        assert found.cls == Global("argparse", "Namespace")
        assert found.get("lr") == 3

    def test_state_with_slots_is_one_dict(self, tmp_path: Path) -> None:
        slots = tb.mapping({"tensor": tb.integer(1)})
        plain = tb.mapping({"more": tb.integer(2)})
        for first, expected in ((b"N", {"tensor": 1}), (plain, {"tensor": 1, "more": 2})):
            found = tb.read_pickle(tmp_path, tb.named("m", "Shard") + b")\x81" + tb.group(first, slots) + b"b")
            assert isinstance(found, Opaque)
            assert found.state == expected

    def test_nested_class_by_getattr(self, tmp_path: Path) -> None:
        outer = tb.named("torch.distributed", "ShardedTensor")
        body = tb.call(tb.named("__builtin__", "getattr"), outer, tb.text("ProcessGroupState"))
        assert tb.read_pickle(tmp_path, body) == Global("torch.distributed", "ShardedTensor.ProcessGroupState")

    def test_bytes_of_protocol_2(self, tmp_path: Path) -> None:
        body = tb.call(tb.named("_codecs", "encode"), tb.text("a\xff"), tb.text("latin1"))
        assert tb.read_pickle(tmp_path, body) == b"a\xff"

    @pytest.mark.parametrize("name", ["OrderedDict", "defaultdict"])
    def test_dicts_of_collections(self, tmp_path: Path, name: str) -> None:
        args = [tb.named("builtins", "list")] if name == "defaultdict" else []
        body = tb.call(tb.named("collections", name), *args) + b"(" + tb.text("a") + tb.integer(1) + b"u"
        assert tb.read_pickle(tmp_path, body) == {"a": 1}

    @pytest.mark.parametrize("content", [tb.mapping({"a": b"K\x01"}), b"](" + tb.text("a") + b"K\x01\x86e"])
    def test_dict_of_a_dict_and_of_pairs(self, tmp_path: Path, content: bytes) -> None:
        assert tb.read_pickle(tmp_path, tb.call(tb.named("builtins", "dict"), content)) == {"a": 1}

    def test_instance_of_protocol_0(self, tmp_path: Path) -> None:
        args = (tb.named("argparse", "Namespace"), tb.named("builtins", "object"), b"N")
        found = tb.read_pickle(tmp_path, tb.call(tb.named("copyreg", "_reconstructor"), *args) + b"}b")
        assert isinstance(found, Opaque)
        assert found.cls.path == "argparse.Namespace"

    def test_call_with_keywords(self, tmp_path: Path) -> None:
        found = tb.read_pickle(tmp_path, tb.named("m", "C") + b")" + tb.mapping({"a": b"K\x01"}) + b"\x92", 4)
        assert isinstance(found, Opaque)
        assert found.kwargs == {"a": 1}

    def test_state_that_is_set_twice_is_merged(self, tmp_path: Path) -> None:
        body = tb.named("m", "C") + b")\x81" + tb.mapping({"a": b"K\x01"}) + b"b" + tb.mapping({"b": b"K\x02"}) + b"b"
        found = tb.read_pickle(tmp_path, body)
        assert isinstance(found, Opaque)
        assert found.state == {"a": 1, "b": 2}

    def test_attributes_of_a_state_dict_are_let_go(self, tmp_path: Path) -> None:
        body = tb.call(tb.named("collections", "OrderedDict")) + tb.mapping({"_metadata": b"}"}) + b"b"
        assert tb.read_pickle(tmp_path, body) == {}

    def test_sets_are_records_with_items(self, tmp_path: Path) -> None:
        found = tb.read_pickle(tmp_path, b"\x8f(K\x01K\x02\x90", 4)
        assert isinstance(found, Opaque)
        assert (found.cls.name, found.items) == ("set", [1, 2])

    def test_storage_outside_of_a_tensor(self, tmp_path: Path) -> None:
        found = tb.read_pickle(tmp_path, tb.storage())
        assert isinstance(found, Storage)
        assert (found.dtype, found.numel, found.nbytes) == (dtypes.F32, 6, 24)


MEMOS = {
    "in order": b"](K\x01q\x00K\x02q\x01h\x00h\x01e",
    "out of order": b"](K\x01q\x05K\x02q\x00K\x03\x94h\x05h\x00h\x02e",
    "grown over a far place": b"](K\x01q\x02K\x02q\x00K\x03q\x01K\x04q\x02K\x05\x94h\x02h\x03e",
    "a far place that becomes near": b"](K\x01q\x01K\x02\x94h\x01K\x03q\x00h\x01h\x00e",
    "put again": b"](K\x01q\x00K\x02q\x00h\x00e",
    "beyond a byte": b"](K\x01r\x00\x10\x00\x00K\x02\x94j\x00\x10\x00\x00h\x01e",
}
"""Lists of numbers that are put into the memo and got from it; protocol 4."""


@pytest.mark.parametrize("name", MEMOS)
def test_the_memo_is_that_of_pickle(tmp_path: Path, name: str) -> None:
    assert tb.read_pickle(tmp_path, MEMOS[name], 4) == pickle.loads(tb.finish(MEMOS[name], 4))
