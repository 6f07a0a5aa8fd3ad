"""Linear layers that read the same as one function: torch's own numbers and gradients, and which become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import onward.lowering.kernels.matmuls as products
import onward.lowering.rewriting.linear_layers as linear_layers
from onward.graph.shared_inputs import layers_that_read_the_same
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program
from onward.lowering.rewriting.recomputed_inputs import with_linear_layers
from onward.models import create_model
from tests.graph.fusion.pairs import parse

B, T, W = 2, 3, 4
SIZES = {"wq": (W, 6), "wk": (W, 2), "wv": (W, 2), "wt": (2, W), "bq": (6,), "bk": (2,), "w0": (W, W), "wd": (2, W)}

NORM = "y = LayerNormalization<axis=-1>(x, scale)\n"
READERS: Mapping[str, str] = {
    "grouped heads": "q = MatMul(y, wq)\nk = MatMul(y, wk)\nv = MatMul(y, wv)",
    "differing biases": "p = MatMul(y, wq)\nq = Add(p, bq)\nk = MatMul(y, wk)\nr = MatMul(y, wv)\nv = Add(bk, r)",
    "weights both ways round": "q = MatMul(y, wq)\nk = MatMul(y, wk)\nt = Transpose<perm=[1,0]>(wt)\nv = MatMul(y, t)",
    "Gemm": "f = Reshape(y, rows)\nq = Gemm(f, wq, bq)\nk = Gemm(f, wk)\nv = Gemm<transB=1>(f, wt, bk)",
    "an activation between": "q = MatMul(y, wq)\np = MatMul(y, wk)\nk = Softplus(p)\nv = MatMul(y, wv)",
    "used between": "p = MatMul(y, wq)\nq = Reshape(p, six)\nk = MatMul(y, wk)\nr = MatMul(y, wv)\nv = Mul(r, k)",
}
"""Three layers each, of one input."""
SUMS = "sq = ReduceSum(q)\nkv = Mul(k, v)\nskv = ReduceSum(kv)\nz = Mul(sq, skv)"


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "LEAST_BYTES", 0)


def network(body: str, dtype: Any = np.float32, outputs: str = "q, k, v") -> OnnxModule:
    """Body's values by name; what it reads of the weights trains."""
    rng = np.random.default_rng(0)
    stored: dict[str, Any] = {name: rng.normal(size=size).astype(dtype) for name, size in SIZES.items()}
    stored |= {"scale": rng.normal(size=W).astype(dtype), "rows": np.array([-1, W]), "six": np.array([0, 0, 2, 3])}
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    kind = "double" if dtype is np.float64 else "float"
    results = ", ".join(f"{kind}[{''.join(f'{name}{axis},' for axis in range(2))[:-1]}] {name}"
                        for name in outputs.split(", "))  # fmt: skip
    tensors = {name: array for name, array in stored.items() if name in words}
    model = parse(f"{kind}[{B},{T},{W}] x", results, body, tensors, 18)
    return OnnxModule(make_training_graph(model, fuse=True))


def joined(net: OnnxModule, **how: bool) -> tuple[Program, list[int]]:
    """The program, and how many layers each function stands for."""
    program = with_linear_layers(net.program, **how)
    if program.run is None:
        return program, []
    calls = [node for node in program.run.graph.nodes if node.op == "call_function"]  # type: ignore[attr-defined]
    return program, [len(node.args[2]) for node in calls if node.target is linear_layers.linear_layers]


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, T, W, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()


def differentiated(net: OnnxModule, program: Program, dtype: torch.dtype, unread: Sequence[int] = ()) -> list[Tensor]:
    """Results, then the gradients of x and of the weights; results at the places of `unread` are not used."""
    x = batch(dtype)
    leaves = [x, *(weight for weight in net.weights.values() if weight.requires_grad)]
    results = program(True, net.device, (x,), net.tensors_by_name())
    shares = torch.Generator().manual_seed(2)
    total = sum(
        (
            (r * torch.randn(r.shape, generator=shares, dtype=dtype)).sum()
            for i, r in enumerate(results)
            if i not in unread
        ),
        torch.zeros((), dtype=dtype),
    )
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [*(r.detach() for r in results), *(torch.zeros(()) if g is None else g for g in found)]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> None:
    assert len(found) == len(expected)
    for one, exact in zip(found, expected, strict=True):
        assert one.dtype == exact.dtype
        assert one.stride() == exact.stride()
        torch.testing.assert_close(one, exact, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("recomputes_inputs", [True, False])
@pytest.mark.parametrize("readers", READERS)
def test_numbers_and_gradients_are_torchs(readers: str, recomputes_inputs: bool, dtype: torch.dtype) -> None:
    """Only the order of a sum differs: 1e-12 in float64, a few roundings in float32."""
    net = network(NORM + READERS[readers], np.float64 if dtype is torch.float64 else np.float32)
    program, sizes = joined(net, recomputes_inputs=recomputes_inputs)
    assert sizes == [3]
    bound = 1e-12 if dtype is torch.float64 else 2e-6
    assert_close(differentiated(net, program, dtype), differentiated(net, net.program, dtype), bound)


def test_the_gradients_are_those_of_finite_differences() -> None:
    net = network(NORM + READERS["weights both ways round"], np.float64)
    program, names = joined(net)[0], list(net.weights)

    def compute(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return program(True, net.device, (x,), {**net.tensors_by_name(), **dict(zip(names, weights, strict=True))})

    assert torch.autograd.gradcheck(compute, (batch(torch.float64), *net.weights.values()))


@pytest.mark.parametrize("frozen", [("wq",), ("wq", "wv"), ("wk", "scale")])
@pytest.mark.parametrize("unread", [(), (0,), (1, 2)])
def test_frozen_weights_and_results_that_nobody_uses(frozen: tuple[str, ...], unread: tuple[int, ...]) -> None:
    net = network(NORM + READERS["grouped heads"], np.float64)
    for name in frozen:
        net.weights[name].requires_grad_(False)
    one, other = (differentiated(net, program, torch.float64, unread) for program in (joined(net)[0], net.program))
    assert_close(one, other, 1e-12)


def test_without_a_weight_that_trains_nothing_is_kept() -> None:
    net = network(NORM + READERS["grouped heads"])
    for weight in net.weights.values():
        weight.requires_grad_(False)
    kept: list[list[torch.Size]] = []
    for program in (net.program, joined(net)[0]):
        shapes: list[torch.Size] = []
        with saved_tensors_hooks(lambda t, shapes=shapes: shapes.append(t.shape) or t, lambda t: t):  # type: ignore[misc]
            program(True, net.device, (batch(),), net.tensors_by_name())
        kept.append(shapes)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("recomputes_inputs", [True, False])
def test_bf16_is_no_further_from_float64(recomputes_inputs: bool) -> None:
    """Sums of 16-bit gradients are rounded no more often than without."""
    exact = network(NORM + READERS["grouped heads"], np.float64)
    truth = differentiated(exact, exact.program, torch.float64)
    net = network(NORM + READERS["grouped heads"])
    errors = []
    for program in (net.program, joined(net, recomputes_inputs=recomputes_inputs)[0]):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            found = differentiated(net, program, torch.float32)
        errors.append([float((one.double() - right).norm()) for one, right in zip(found, truth, strict=True)])
    for plain, together in zip(*errors, strict=True):
        assert together <= 1.2 * plain + 1e-12


def test_the_input_is_kept_in_16_bits_where_that_is_what_is_multiplied() -> None:
    """As torch's own layers keep it, which cast it each; a norm's result is float32 under autocast."""
    net = network(NORM + READERS["grouped heads"])
    kept: list[torch.dtype] = []
    x = batch()
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        saved_tensors_hooks(lambda t: kept.append(t.dtype) or t if t.shape == x.shape else t, lambda t: t),  # type: ignore[func-returns-value]
    ):
        joined(net, recomputes_inputs=False)[0](True, net.device, (x,), net.tensors_by_name())
    assert kept.count(torch.bfloat16) == 1


def test_by_onednn_the_sum_is_part_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, within float32's rounding."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "WORTHWHILE_FLOPS", 0)
    total, left, right = torch.randn(5, 7), torch.randn(5, 3), torch.randn(3, 7)
    exact = total.double() + left.double() @ right.double()
    for stored in (right, right.T.contiguous().T):
        torch.testing.assert_close(
            products.add_product(total.clone(), left, stored).double(), exact, rtol=1e-6, atol=1e-6
        )


def test_one_node_of_the_backward_pass_for_all() -> None:
    net = network(NORM + READERS["grouped heads"])
    for program, count in ((joined(net)[0], 1), (joined(net, joins=False)[0], 3)):
        results = program(True, net.device, (batch(),), net.tensors_by_name())
        assert len({result.grad_fn for result in results}) == count


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        pytest.param("q = MatMul(y, wq)\np = MatMul(x, w0)\nk = MatMul(y, wk)\nv = MatMul(y, wv)\nr = Add(p, x)",
                     [1, 2], id="another product between"),
        pytest.param("q = MatMul(y, wq)\nt = MatMul(q, q2)\nk = MatMul(y, wk)\nv = MatMul(y, wv)\nr = Add(t, t)",
                     [1, 2], id="a product without weights between"),
        pytest.param("q = MatMul(y, wq)\nc = Softmax(q)\nk = MatMul(y, wk)\nv = MatMul(y, wv)\nr = Add(c, c)",
                     [1, 2], id="something dear between"),
        pytest.param("q = MatMul(y, wq)\nk = MatMul(x, wk)\nv = MatMul(y, wv)\nr = Add(y, x)",
                     [1, 1], id="of another input"),
    ],
)  # fmt: skip
def test_layers_that_are_apart_stay_apart(body: str, sizes: list[int]) -> None:
    body = body.replace("t = MatMul(q, q2)", "q2 = Transpose<perm=[0,2,1]>(q)\nt = MatMul(q, q2)")
    net = network(NORM + body, outputs="q, k, v, r")
    program, found = joined(net)
    assert found == sizes
    assert_close(differentiated(net, program, torch.float32), differentiated(net, net.program, torch.float32), 2e-6)
    assert_told_as_joined(net)


def assert_told_as_joined(net: OnnxModule) -> int:
    """The note counts nodes of the graph, joining looks at calls of the code: two readings of one rule."""
    told = [len(group) for group in layers_that_read_the_same(net.graph.model.graph, net.graph.weights)]
    assert told == [size for size in joined(net)[1] if size > 1]
    return len(told)


@pytest.mark.parametrize("fuse", [True, False])
def test_what_the_user_is_told_is_what_is_joined(fuse: bool) -> None:
    sizes = {"size": "tiny", "layers": 2, "width": 16, "heads": 2, "vocab_size": 32, "context_length": 8}
    for name, groups in (("bert", 2), ("gpt2", 0)):
        assert assert_told_as_joined(OnnxModule(make_training_graph(create_model(name, **sizes), fuse=fuse))) == groups


@pytest.mark.parametrize("readers", READERS)
def test_layers_that_the_user_is_told_of_are_joined(readers: str) -> None:
    assert assert_told_as_joined(network(NORM + READERS[readers])) == 1


def test_inputs_that_are_not_made_again_are_shared_too() -> None:
    """The sum of residuals is kept by the norm after it."""
    net = network("q = MatMul(x, wq)\nk = MatMul(x, wk)\nv = MatMul(x, wv)")
    program, sizes = joined(net)
    assert sizes == [3]
    assert_close(differentiated(net, program, torch.float32), differentiated(net, net.program, torch.float32), 2e-6)
    assert joined(net, joins=False)[0] is net.program


def test_what_is_kept_is_unpacked_once() -> None:
    """Hooks that bring tensors back, from a host's memory or by computing them again, are asked once for each."""
    net = network(NORM + READERS["grouped heads"])
    unpacked: list[int] = []
    numbers = iter(range(100))

    def unpack(packed: tuple[int, Tensor]) -> Tensor:
        unpacked.append(packed[0])
        return packed[1]

    with saved_tensors_hooks(lambda tensor: (next(numbers), tensor), unpack):
        results = joined(net)[0](True, net.device, (batch(),), net.tensors_by_name())
    torch.autograd.backward([result.sum() for result in results])
    assert len(unpacked) == len(set(unpacked)) > 3


def test_results_can_be_written_over() -> None:
    """As those of torch's own layers, each without the others."""
    net = network(NORM + READERS["grouped heads"])
    plain, together = (
        program(True, net.device, (batch(),), net.tensors_by_name()) for program in (net.program, joined(net)[0])
    )
    for results in (plain, together):
        results[0].relu_()
    for one, other in zip(plain, together, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    found, expected = (
        torch.autograd.grad(sum(r.square().sum() for r in results), list(net.weights.values()))  # type: ignore[arg-type]
        for results in (together, plain)
    )
    assert_close(found, expected, 1e-5)
