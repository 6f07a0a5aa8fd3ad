"""Element types: what a stored tensor holds, a torch tensor holds, bit by bit and in memory of its own."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from onward.errors import ModelError
from onward.lowering.kernels.dtypes import TORCH_DTYPE, is_trainable, tensor_from_ir, torch_dtype


@pytest.mark.parametrize("dtype", [d for d in TORCH_DTYPE if d.bitwidth >= 8], ids=lambda d: d.name)
def test_every_type_of_whole_bytes_keeps_its_bits(dtype: ir.DataType) -> None:
    """Random bits, as far as the type has a number for them."""
    random = np.random.default_rng(0)
    if dtype is ir.DataType.BOOL:
        array = random.random(24).reshape(2, 3, 4) > 0.5
    else:
        array = random.integers(0, 120, (2, 3, 4)).astype(dtype.numpy())
    stored = ir.Tensor(array, dtype=dtype, name="t")
    tensor = tensor_from_ir(stored, "t")
    assert tensor.dtype is TORCH_DTYPE[dtype]
    assert tensor.shape == (2, 3, 4)
    assert bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes()) == array.tobytes()


@pytest.mark.parametrize("dtype", [d for d in TORCH_DTYPE if d.bitwidth < 8], ids=lambda d: d.name)
def test_smaller_types_are_held_unpacked(dtype: ir.DataType) -> None:
    low = -2 if dtype in (ir.DataType.INT4, ir.DataType.INT2) else 0
    array = np.array([[0, 1, low], [1, 0, 1]]).astype(dtype.numpy())
    tensor = tensor_from_ir(ir.Tensor(array, dtype=dtype, name="t"), "t")
    assert tensor.dtype is TORCH_DTYPE[dtype]
    assert torch.equal(tensor.float(), torch.tensor([[0.0, 1, low], [1, 0, 1]]))


def test_fractions_of_small_floats() -> None:
    array = np.array([0.5, 1.5, -6.0], dtype=ml_dtypes.float4_e2m1fn)
    assert tensor_from_ir(ir.Tensor(array, name="t"), "t").float().tolist() == [0.5, 1.5, -6.0]


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.INT64])
def test_shapes_stay(shape: tuple[int, ...], dtype: ir.DataType) -> None:
    assert tensor_from_ir(ir.Tensor(np.ones(shape, dtype.numpy()), dtype=dtype, name="t"), "t").shape == shape


def test_the_memory_is_its_own() -> None:
    """Training must not write into the model that export needs; views and other byte orders are copied, too."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for source in (array, np.broadcast_to(array[:1], (4, 3)), array.T):
        tensor = tensor_from_ir(ir.Tensor(source, name="t"), "t")
        assert torch.equal(tensor, torch.from_numpy(source.copy()))
        tensor.zero_()
        assert array.any()


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.BFLOAT16])
def test_large_tensors_are_read_from_their_file(dtype: ir.DataType, tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((1024, 600)).astype(dtype.numpy())
    (tmp_path / "w.bin").write_bytes(bytes(100) + array.tobytes())
    stored = ir.ExternalTensor(
        "w.bin", 100, array.nbytes, dtype, name="w", shape=ir.Shape([1024, 600]), base_dir=tmp_path
    )
    tensor = tensor_from_ir(stored, "initializer 'w'")
    assert tensor.view(torch.uint8).numpy().tobytes() == array.tobytes()
    tensor.zero_()
    assert stored.numpy().any()
    os.truncate(tmp_path / "w.bin", 1000)
    with pytest.raises(
        ModelError, match=rf"initializer 'w': the file 'w.bin' now ends {array.nbytes - 900} bytes too early"
    ):
        tensor_from_ir(stored, "initializer 'w'")


def test_strings_have_no_tensor() -> None:
    with pytest.raises(ModelError, match="initializer 'names' has element type STRING, which torch cannot hold"):
        torch_dtype(ir.DataType.STRING, "initializer 'names'")


def test_what_can_train() -> None:
    trainable = {dtype for dtype in ir.DataType if is_trainable(dtype)}
    assert trainable == {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    assert not is_trainable(None)
