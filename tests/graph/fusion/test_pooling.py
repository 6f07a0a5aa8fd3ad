"""ReLU and max pooling change places: same values, same gradients, fewer elements kept."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from tests.graph.fusion.pairs import assert_fused, kinds, parse

IMAGE = torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.7
WINDOWS = {
    "plain": "kernel_shape=[2,2]",
    "strided and padded": "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]",
    "reaching over": "kernel_shape=[3,3], strides=[2,2], ceil_mode=1",
    "padded by name": 'kernel_shape=[3,2], auto_pad="SAME_UPPER"',
}


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_maxima_are_rectified_afterwards(windows: str) -> None:
    body = f"p = Relu(x)\nq = MaxPool<{windows}>(p)\nz = Mul(q, q)"
    model = parse("double[2,3,7,6] x", "double[s,t,u,v] z", body)
    assert_fused(model, {"x": IMAGE}, {"pooled_relu": 1})
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": IMAGE.numpy()})
    found = OnnxModule(make_training_graph(model, fuse=True))(IMAGE)
    assert (np.asarray(expected) == 0).any()
    np.testing.assert_array_equal(found.detach().numpy(), expected)


def test_relu_of_joined_parts_goes_behind_the_pooling() -> None:
    body = "p = Relu(x)\nq = Relu(y)\nc = Concat<axis=1>(p, q)\nz = MaxPool<kernel_shape=[2,2]>(c)"
    model = parse("double[2,3,7,6] x, double[2,3,7,6] y", "double[s,t,u,v] z", body)
    assert_fused(model, {"x": IMAGE, "y": IMAGE.flip(0)}, {"joined_relu": 1, "pooled_relu": 1})


def test_what_is_kept_has_the_size_of_the_pooled_image() -> None:
    body = "p = Relu(y)\nz = MaxPool<kernel_shape=[2,2], strides=[2,2]>(p)"
    model = parse(
        "float[2,16,128,128] x", "float[s,t,u,v] z", f"y = Mul(x, c)\n{body}", {"c": np.float32(2.0)}, opset=20
    )
    net, kept = OnnxModule(make_training_graph(model, fuse=True)), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        net(torch.randn(2, 16, 128, 128, requires_grad=True))
    elements = 2 * 16 * 64 * 64
    large = sorted(t.untyped_storage().nbytes() for t in kept.values() if t.numel() > 1)
    assert large == [elements, 4 * elements]  # a byte for a place, and the result


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("p = Relu(x)\nq = MaxPool<kernel_shape=[2,2]>(p)\nr = ReduceSum<keepdims=0>(p)\nz = Add(q, r)",
                     id="a ReLU that is read elsewhere"),
        pytest.param("p = Relu(x)\nz, i = MaxPool<kernel_shape=[2,2]>(p)\nj = Cast<to=11>(i)", id="places"),
        pytest.param("p = Relu(x)\nz = AveragePool<kernel_shape=[2,2]>(p)", id="means"),
        pytest.param("p = Relu(x)\nz = MaxPool<kernel_shape=[2,2], dilations=[9,9], pads=[9,9,9,9]>(p)",
                     id="windows that may read padding alone"),
    ],
)  # fmt: skip
def test_what_stays(body: str) -> None:
    outputs = "double[s,t,u,v] z" + (", double[a,b,c,d] j" if "j =" in body else "")
    graph = make_training_graph(parse("double[2,3,7,6] x", outputs, body), fuse=True)
    assert kinds(graph) == {}


def test_a_result_that_is_asked_for_keeps_its_name() -> None:
    model = parse(
        "double[2,3,7,6] x", "double[s,t,u,v] z", "p = Relu(x)\nq = MaxPool<kernel_shape=[2,2]>(p)\nz = Mul(q, q)"
    )
    for name in ("p", "q"):
        assert kinds(make_training_graph(model, fuse=True, keep=(name,))) == {}
    assert kinds(make_training_graph(model, fuse=True, fusions_off=("pooled_relu",))) == {}
