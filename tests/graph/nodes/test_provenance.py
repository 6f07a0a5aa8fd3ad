"""What exporters wrote down about nodes and initializers, read; what they did not write is not known."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onward.graph.nodes import provenance

SCOPES = "pkg.torch.onnx.name_scopes"
CALL = "pkg.torch.onnx.fx_node"


def node(name: str = "n", **noted: str) -> ir.Node:
    found = ir.node("MatMul", [], name=name, num_outputs=1)
    found.metadata_props.update({{"scopes": SCOPES, "call": CALL}[key]: text for key, text in noted.items()})
    return found


@pytest.mark.parametrize("name", ["onnx::MatMul_3", "/layer/MatMul", "val_5", "_val_5", "_inlfunc_x", "42"])
def test_names_that_exporters_make_up(name: str) -> None:
    assert provenance.is_automatic_name(name)


@pytest.mark.parametrize("name", ["weight", "value", "layer.0.weight", "42nd", ""])
def test_names_of_modules(name: str) -> None:
    assert not provenance.is_automatic_name(name)


@pytest.mark.parametrize(
    ("scopes", "scope"),
    [
        ("['', 'model', 'model.layer', 'linear']", "model.layer"),
        ("['', 'model.layer@1', 'linear']", "model.layer"),
        ("['linear']", ""),
        ("[]", ""),
        ("not Python", ""),
        ("__import__('os')", ""),
    ],
)
def test_the_module_of_a_node(scopes: str, scope: str) -> None:
    assert provenance.module_scope(node(scopes=scopes)) == scope
    assert provenance.has_scope(node(scopes=scopes))
    assert not provenance.has_scope(node())


def test_nodes_are_shown_with_their_module_by_what_name_they_have() -> None:
    assert provenance.shown_node(node(scopes="['', 'model', 'x']")) == "model (n)"
    assert provenance.shown_node(node()) == "n"
    bare = ir.node("Relu", [], outputs=[ir.Value(name="y")])
    assert provenance.shown_node(bare) == "y"
    assert provenance.shown_node(ir.node("Relu", [], num_outputs=0)) == "unnamed"


def test_the_text_of_a_call() -> None:
    text = (
        "%linear : [num_users=1] = call_function[target=torch.ops.aten.linear.default](args = (%x, %p_fc_weight), kw)"
    )
    called = node(call=text)
    assert provenance.call_target(called) == "torch.ops.aten.linear.default"
    assert provenance.called_parameters(called) == ("p_fc_weight",)
    assert provenance.traced_inputs(called) == ("x", "p_fc_weight")
    assert provenance.placeholder("Block.fc-1.weight") == "p_block_fc_1_weight"
    assert (provenance.call(node()), provenance.call_target(node()), provenance.traced_inputs(node())) == ("", "", ())


def test_metadata_of_a_copy_in_another_module() -> None:
    props = provenance.of_module(node(scopes="['', 'a.fc', 'linear']", call="(%x, %p_a_fc_weight)"), "a.fc", "b.fc")
    assert props == {SCOPES: "['', 'b.fc', 'linear']", CALL: "(%x, %p_b_fc_weight)"}


def test_a_bias_that_was_dropped() -> None:
    dropped = node(call="(%x, %p_fc_weight, %p_fc_bias)")
    assert not provenance.lost_bias(dropped)
    dropped.metadata_props[provenance.REWRITTEN_BY] = "RemoveOptionalBiasFromGemm"
    assert provenance.lost_bias(dropped)


def test_kinds_that_the_signature_declares() -> None:
    graph = ir.Graph([], [], nodes=[])
    assert provenance.declared_kinds(None) == provenance.declared_kinds(graph) == {}
    graph.metadata_props["pkg.torch.export.ExportedProgram.graph_signature"] = (
        "# inputs\np_w: PARAMETER target='fc.w'\nb_m: BUFFER target='bn.m' persistent=True\nx: USER_INPUT\n"
    )
    assert provenance.declared_kinds(graph) == {"fc.w": "PARAMETER", "bn.m": "BUFFER"}


def test_what_an_initializer_was_folded_from() -> None:
    value = ir.Value(name="w")
    assert provenance.folded_sources(value) == ()
    value.metadata_props[provenance.FOLDED_FROM] = "['a.weight', 'b']"
    assert provenance.folded_sources(value) == ("a.weight", "b")


def test_paths_of_the_older_exporter() -> None:
    graph = ir.Graph([], [], nodes=[node("/layers.0/fc/MatMul"), node("/layers.0/fc_1/MatMul"), node("plain")])
    paths = provenance.ModulePaths.of(graph)
    assert paths == provenance.ModulePaths(frozenset({"layers.0", "layers.0/fc", "layers.0/fc_1"}), frozenset())
    first, again, plain = graph
    assert provenance.path_scope(first, paths) == provenance.path_scope(again, paths) == "layers.0.fc"
    assert provenance.path_scope(node("/layers.0/other_1/MatMul"), paths) == "layers.0.other_1"
    assert provenance.path_scope(plain, paths) == ""
    assert provenance.call_site(again, paths) == ("layers.0.fc", "/layers.0/fc_1")
    assert provenance.call_site(plain, paths) is None
    assert provenance.call_site(node(scopes="['', 'm@1', 'x']"), paths) == ("m", "m@1")


@pytest.mark.parametrize(
    ("name", "weight", "module"),
    [
        ("/features/features.0/Conv", "features.0.weight", "features.0"),
        ("/a/layers/layers.1/fc/MatMul", "onnx::MatMul_7", "a.layers.1.fc"),
        ("/layers/layers.0/fc/MatMul", "layers.layers.0.fc.weight", "layers.layers.0.fc"),
        ("/a/a/a/MatMul", "onnx::MatMul_7", "a.a.a"),
    ],
)
def test_elements_of_containers_have_their_names(name: str, weight: str, module: str) -> None:
    graph = ir.Graph([], [], nodes=[node(name)], initializers=[ir.Value(name=weight, const_value=ir.tensor([1.0]))])
    paths = provenance.ModulePaths.of(graph)
    assert provenance.path_scope(graph[0], paths) == module


def test_names_that_differ_in_numbers() -> None:
    assert provenance.differ_in_digits_only("h.0.w", "h.12.w")
    assert not provenance.differ_in_digits_only("h.0.w", "h.0.w")
    assert not provenance.differ_in_digits_only("h.0.w", "h.w")
    assert provenance.like("h.0.attn.1.bias", "h.7.attn.2.weight") == "h.7.attn.2.bias"
