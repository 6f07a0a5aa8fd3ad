"""Features that pick rows of tables: found through casts and reshapes, refused with their place in the batch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser

import onward
from onward.engine.inputs.index_ranges import IndexRange, index_ranges
from onward.errors import DataError

TABLES = """
<ir_version: 8, opset_import: ["" : 18]>
tables (int64[batch, 2] tokens, int64[batch] position, float[batch, 5] x, int64[batch, 1] last, int64[batch] mask) =>
(float[n, m] y)
<int64[1] flat = {-1}>
{
  narrow = Cast<to = 6>(tokens)
  line = Reshape(narrow, flat)
  rows = Gather(table, line)
  turned = Transpose<perm = [1, 0]>(wide)
  other = Gather<axis = 1>(wide, tokens)
  more = Gather(turned, position)
  chosen = Gather<axis = 1>(x, last)
  is_seen = Cast<to = 9>(mask)
  kind = Cast<to = 7>(is_seen)
  of_two = Gather(table, kind)
  y = Identity(rows)
}
"""


def test_tables_are_found_and_what_is_computed_is_none() -> None:
    model = parser.parse_model(TABLES)
    for name, shape in (("table", (7, 5)), ("wide", (4, 7))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    inferred = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    assert index_ranges(inferred) == {"tokens": IndexRange(7, "table"), "position": IndexRange(7, "turned")}


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([[0, 6], [7, 9]], ["index 7; expected 0 to 6", "'table', which has 7", "2 of the 4", "[1, 0]", "vocabulary"]),
        ([[0, 6], [-1, 1]], ["index -1", "1 of the 4", "first at [1, 0] (sample first)", "if that is meant, write 6"]),
        ([[0, -100]], ["index -100", "If it marks padding, write the padding's own index", "by labels."]),
        (np.array([[0, np.inf]]), ["index inf", "another tokenizer"]),
        (np.array([[0, -3]], np.int8), ["index -3", "write 4."]),
    ],
)
def test_what_is_out_of_range_is_refused(indices: object, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        IndexRange(7, "table").check("tokens", np.array(indices))
    assert all(word in str(caught.value) for word in ["feature 'tokens'", *words]), caught.value


def test_all_rows_may_be_picked_and_none() -> None:
    IndexRange(7, "table").check("tokens", np.array([[0, 6]], np.uint8))
    IndexRange(7, "table").check("tokens", np.empty((2, 0), np.int64))
    IndexRange(7, "table").check("tokens", np.array([[-0.5, 6.9]], np.float32))


CLASSIFIER = """
<ir_version: 8, opset_import: ["" : 18]>
words (int64[batch, 2] tokens) => (float[batch, 3] scores)
<int64[1] time = {1}>
{
  rows = Gather(table, tokens)
  mean = ReduceMean<keepdims = 0>(rows, time)
  scores = MatMul(mean, weight)
}
"""


@pytest.mark.parametrize(("token", "words"), [(7, "index 7; expected 0 to 6"), (-1, "if that is meant, write 6")])
def test_a_run_names_the_sample_whose_token_has_no_row(token: int, words: str) -> None:
    model = parser.parse_model(CLASSIFIER)
    for name, shape in (("table", (7, 5)), ("weight", (5, 3))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    tokens = np.zeros((8, 2), np.int64)
    tokens[5, 1] = token
    with pytest.raises(DataError, match=words) as caught:
        onward.fit(model, (tokens, np.arange(8) % 3), epochs=1, batch_size=4, shuffle=False, progress=False)
    assert "feature 'tokens'" in str(caught.value)
    assert "the first at [1, 1] (sample first), sample 5 of the data in memory." in str(caught.value)
