"""Compiled segments compute what the same segments compute as they are, and cost no more for a deep network."""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch._inductor.config
from functorch.compile import make_boxed_compiler
from torch import _inductor as inductor
from torch._dynamo.utils import counters

from onward.engine.network import compilation as module
from onward.engine.network.compilation import Compilation
from onward.engine.network.forward import Forward
from onward.engine.network.network import Network
from onward.engine.network.precision import Precision
from onward.errors import NodeError, ParametersError
from onward.graph.fusion.cross_entropy import FEWEST_CLASSES
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.building.specialization import specialize
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.parameters import Recompute
from onward.plan.costs.segments import plan_segments

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")

SPEC = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
WORDS, TOKENS = 64, 16
CPU = torch.device("cpu")


def gpt2(layers: int, dropout: float = 0.0, words: int = WORDS) -> ir.Model:
    options = {"size": "tiny", "width": 32, "heads": 2, "vocab_size": words, "context_length": TOKENS, "opset": 17}
    return create_model("gpt2", **options, layers=layers, dropout=dropout)


def squeezenet() -> ir.Model:
    return create_model("squeezenet", image_size=32, classes=10, dropout=0.0)


def tokens() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, WORDS, (2, TOKENS), generator=generator) for name in ("input_ids", "labels")}


def images() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"images": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([1, 7])}


def make_forward(
    model: ir.Model, compilation: Compilation | None, recompute: bool = False, dtype: torch.dtype | None = None
) -> Forward:
    graph = make_training_graph(model, loss=SPEC)
    assert graph.loss is not None
    net = OnnxModule(graph, (graph.loss,))
    recomputed = Recompute(segments=recompute)
    plan = plan_segments(graph.model.graph, graph.weights, True, recomputed, blocks_joined=int(compilation is not None))
    network = Network(net, plan, compilation).train()
    net.train()
    return Forward(network, (graph.loss,), Precision(dtype))


def step(forward: Forward, features: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a step and its gradients."""
    torch.manual_seed(0)
    (loss,) = forward(features).values()
    loss.backward()
    gradients = {}
    for name, weight in forward.network.weights.items():
        assert weight.grad is not None
        gradients[name] = weight.grad
    return loss.detach(), gradients


def assert_same_step(expected: Any, found: Any, tolerance: float) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance, msg=name)


def refuse(sentence: str) -> None:
    raise AssertionError(sentence)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gpt2_has_the_same_loss_and_gradients(recompute: bool) -> None:
    expected = step(make_forward(gpt2(4), None), tokens())
    compilation = Compilation(True, refuse)
    forward = make_forward(gpt2(4), compilation, recompute)
    assert_same_step(expected, step(forward, tokens()), 1e-5)
    assert 0 < compilation.graph_count < forward.network.plan.count


@pytest.mark.slow
def test_depth_costs_no_compilations() -> None:
    graphs = []
    for layers in (2, 6):
        counters.clear()
        step(make_forward(gpt2(layers), Compilation(True, refuse)), tokens())
        graphs.append(counters["stats"]["unique_graphs"])
        assert not counters["graph_break"]
    assert graphs[0] == graphs[1] > 0


def segments_that_gain(device: torch.device, **options: Any) -> tuple[list[bool], list[str]]:
    """Which segments of a GPT-2 of three layers are compiled, and what the others do."""
    graph = make_training_graph(gpt2(3, words=FEWEST_CLASSES), loss=SPEC, fuse=True)
    assert graph.loss is not None
    net = OnnxModule(graph, (graph.loss,))
    network = Network(net, plan_segments(graph.model.graph, graph.weights, True, Recompute(), blocks_joined=1))
    inputs = tuple(tokens()[name] for name in net.program.inputs)
    split = network.split(specialize(net.program, CPU, inputs, net.tensors_by_name(), frozenset()))
    compiled = Compilation(True, refuse, **options).of_segments(split, device)
    gains = [segment.run is not None for segment in compiled.segments]
    left = [segment for segment, gain in zip(split.segments, gains, strict=True) if not gain]
    operators = [node.meta["onnx"].op_type for code in left for node in code.code.graph.nodes if "onnx" in node.meta]
    return gains, operators


def test_only_segments_in_which_something_can_be_joined_are_compiled() -> None:
    gains, operators = segments_that_gain(CPU)
    assert sum(gains) == 3, "the layers"
    assert {"Gather", "LayerNormalization", "LinearCrossEntropy"} <= set(operators)
    assert "Attention" not in operators
    assert sum(segments_that_gain(torch.device("cuda"))[0]) == 4, "and on a GPU the loss"


def test_all_segments_that_compute_are_recorded() -> None:
    gains, operators = segments_that_gain(torch.device("cuda"), cuda_graphs=True)
    assert all(gains)
    assert not operators


def options_chosen(capability: str, decided: bool | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with inductor.config.patch({"cpp.vec_isa_ok": decided}):
        return module.options_for_cpus()


def test_trials_of_wide_vectors_are_spared_where_torch_itself_computes_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = {"joint_custom_post_pass", "post_grad_custom_post_pass", "force_layout_optimization"}
    always = {"cpp_wrapper", "cpp_wrapper_build_separate"} | passes
    assert options_chosen("DEFAULT", None, monkeypatch).keys() == always
    assert options_chosen("AVX512", False, monkeypatch).keys() == always, "somebody has decided"
    exported = hasattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")), "Sleef_expf16_u10")
    chosen = options_chosen("AVX512", None, monkeypatch)
    assert chosen.keys() == always | ({"cpp.vec_isa_ok"} if exported else set())


@pytest.mark.slow
def test_squeezenet_has_the_same_loss_and_gradients() -> None:
    expected = step(make_forward(squeezenet(), None), images())
    assert_same_step(expected, step(make_forward(squeezenet(), Compilation(True, refuse)), images()), 1e-5)


@pytest.mark.slow
def test_bf16_under_autocast_stays_near_the_uncompiled_one() -> None:
    expected = step(make_forward(gpt2(2), None, dtype=torch.bfloat16), tokens())
    found = step(make_forward(gpt2(2), Compilation(True, refuse), dtype=torch.bfloat16), tokens())
    assert all(gradient.dtype == torch.float32 for gradient in found[1].values())
    assert_same_step(expected, found, 2e-2)  # bf16 keeps 8 bits, and compiled code rounds fewer times


@pytest.mark.slow
def test_recomputed_dropout_is_that_of_the_forward_pass() -> None:
    """With other masks in the backward pass, gradients would differ from those of the pass that keeps all."""
    kept = step(make_forward(gpt2(2, dropout=0.3), Compilation(True, refuse)), tokens())
    repeated = step(make_forward(gpt2(2, dropout=0.3), Compilation(True, refuse), recompute=True), tokens())
    assert_same_step(kept, repeated, 1e-6)


@pytest.mark.slow
def test_evaluation_has_no_dropout() -> None:
    forward = make_forward(gpt2(2, dropout=0.5), Compilation(True, refuse))
    plain = make_forward(gpt2(2, dropout=0.5), None)
    for each in (forward, plain):
        each.network.eval()
        each.network.net.eval()
    with torch.no_grad():
        (found,), (expected,) = forward(tokens()).values(), plain(tokens()).values()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Broken(torch._dynamo.exc.TorchDynamoException):
    """As a fault of the compiler."""


def break_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*arguments: Any) -> Any:
        raise Broken("no such kernel\nand much more")

    monkeypatch.setattr(torch, "compile", lambda code, **options: compiled)


def test_what_torch_cannot_compile_runs_as_it_is_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(make_forward(gpt2(1), None), tokens())
    break_compiler(monkeypatch)
    said: list[str] = []
    forward = make_forward(gpt2(1), Compilation(False, said.append))
    assert_same_step(expected, step(forward, tokens()), 0.0)
    assert set(said) == {"speed.compile: a segment runs uncompiled, since torch could not compile it: no such kernel"}


def test_what_torch_cannot_compile_is_an_error_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    break_compiler(monkeypatch)
    forward = make_forward(gpt2(1), Compilation(True, refuse))
    with pytest.raises(ParametersError, match=r"could not compile a segment of the model \(no such kernel\)"):
        forward(tokens())


def test_the_reason_of_what_compiles_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's error begins with the name of the backend alone."""
    compile_by = torch.compile

    def fail(*_: Any) -> Any:
        raise NotImplementedError("no such kernel\nand much more")

    monkeypatch.setattr(torch, "compile", lambda code, **_: compile_by(code, backend=fail))
    forward = make_forward(gpt2(1), Compilation(True, refuse))
    with pytest.raises(ParametersError, match=r"a segment of the model \(NotImplementedError: no such kernel\)"):
        forward(tokens())


def test_a_backward_pass_that_torch_cannot_compile_is_found_in_the_first_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.backends.common import aot_autograd

    expected, compile_by = step(make_forward(gpt2(1), None), tokens()), torch.compile

    def fail(*_: Any) -> Any:
        raise NotImplementedError("no such gradient")

    backend = aot_autograd(fw_compiler=lambda code, _: code, bw_compiler=fail)
    monkeypatch.setattr(torch, "compile", lambda code, **_: compile_by(code, backend=backend))
    said: list[str] = []
    assert_same_step(expected, step(make_forward(gpt2(1), Compilation(False, said.append)), tokens()), 0.0)
    assert {one.rpartition(": ")[2] for one in said} == {"no such gradient"}


def test_inputs_of_products_that_are_cheap_to_compute_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the forward pass of the layers hands to the backward pass."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    expected, compile_by = step(make_forward(gpt2(1), None), tokens()), torch.compile
    kept_elements = dict[bool, int]()
    for recomputes in (False, True):
        sizes = list[int]()

        def count(code: torch.fx.GraphModule, _: object, sizes: list[int] = sizes) -> torch.fx.GraphModule:
            sizes.extend(one.meta["val"].numel() for one in code.graph.find_nodes(op="output")[0].all_input_nodes)
            return code

        partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
        backend = aot_autograd(
            fw_compiler=make_boxed_compiler(count),
            bw_compiler=make_boxed_compiler(lambda code, _: code),
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        monkeypatch.setattr(torch, "compile", lambda code, backend=backend, **_: compile_by(code, backend=backend))
        forward = make_forward(gpt2(1), Compilation(True, refuse, recomputes_cheap=recomputes))
        assert_same_step(expected, step(forward, tokens()), 1e-5)
        kept_elements[recomputes] = sum(sizes)
    rows = 2 * TOKENS
    assert kept_elements[False] - kept_elements[True] >= rows * (32 + 32 + 4 * 32), "two norms and a GELU"


def test_an_assertion_that_fails_in_the_compiler_is_a_failure_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an LSTM on a CPU in torch 2.13: `expected all tensors_saved_with_vc_check to be Tensors`."""
    home: dict[str, Any] = {"__name__": "torch._functorch._aot_autograd.runtime_wrappers"}
    exec("def compiled(*_):\n    raise AssertionError('expected all to be Tensors')", home)
    expected = step(make_forward(gpt2(1), None), tokens())
    monkeypatch.setattr(torch, "compile", lambda code, **_: home["compiled"])
    said: list[str] = []
    assert_same_step(expected, step(make_forward(gpt2(1), Compilation(False, said.append)), tokens()), 0.0)
    assert {one.rpartition(": ")[2] for one in said} == {"expected all to be Tensors"}


def test_a_failing_node_of_compiled_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    break_compiler(monkeypatch)  # torch's own error of a wrong shape is one of the compiler, too
    forward = make_forward(gpt2(1), Compilation(False, [].append))
    wrong = tokens() | {"labels": torch.full((2, TOKENS), WORDS)}
    with pytest.raises(NodeError, match=r"node '.*' \(SoftmaxCrossEntropyLoss\) failed on inputs"):
        forward(wrong)
