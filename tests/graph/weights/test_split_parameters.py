"""A parameter that a file holds as it is and computed with trains twice, and that is reported."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.weights.split_parameters import notes_on_split_parameters

SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"


def graph_of(folded: np.ndarray, name: str = "exp") -> ir.Graph:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g (float[3] x) => (y) {{ a = Add(x, w) y = Add(a, {name}) }}'
    )
    for key, array in (("w", np.array([0.1, 0.7, 1.3], np.float32)), (name, folded)):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, key))
    graph = ir.from_proto(proto).graph
    graph.metadata_props[SIGNATURE] = "p_w: PARAMETER target='w'"
    graph.initializers["w"].metadata_props[provenance.KIND] = "PARAMETER"
    graph.initializers[name].metadata_props[provenance.FOLDED_FROM] = "['w']"
    return graph


FOLDED = np.exp(np.array([0.1, 0.7, 1.3], np.float32))


def test_a_function_of_it_next_to_it_is_reported() -> None:
    (note,) = notes_on_split_parameters(graph_of(FOLDED))
    assert note.startswith(
        "the parameter 'w' is stored 2 times ('w', 'exp'), folded with constants at export ('exp'): each copy is "
        "trained separately"
    )


def test_rearranged_copies_zeros_and_numbers_of_sizes_are_not() -> None:
    assert notes_on_split_parameters(graph_of(FOLDED, "transpose_1")) == ()
    assert notes_on_split_parameters(graph_of(np.zeros(3, np.float32))) == ()
    assert notes_on_split_parameters(graph_of(np.array(1 / 8**0.5, np.float32))) == ()
    assert len(notes_on_split_parameters(graph_of(np.array(0.123456, np.float32)))) == 1


def test_without_the_exporters_notes_nothing_is_said() -> None:
    graph = graph_of(FOLDED)
    del graph.metadata_props[SIGNATURE]
    assert notes_on_split_parameters(graph) == ()
