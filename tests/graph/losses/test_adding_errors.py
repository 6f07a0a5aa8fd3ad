"""What a loss refuses, in words: predictions, labels, axes and weights that do not fit the model."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onward.errors import ModelError
from onward.graph.losses.adding import add_loss
from onward.graph.losses.spec import LossSpec
from onward.graph.reading.model_file import read_model
from tests.graph.loss_models import MSE, pass_through

CE = "softmax_cross_entropy"


def _model(shape=("batch", 10), element_type: int = TensorProto.FLOAT) -> ir.Model:
    """Output `logits`, plus an initializer `w`, and inputs `ids` (int64 [batch]) and `soft` (float [batch, 10])."""
    model = pass_through(13, {"logits": shape, "logits_other": shape}, element_type)
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0]))
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch"]))
    model.graph.input.append(helper.make_tensor_value_info("soft", TensorProto.FLOAT, ["batch", 10]))
    model.graph.input.append(helper.make_tensor_value_info("wide", TensorProto.INT64, ["batch", 3]))
    return read_model(model)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            LossSpec(type=CE, prediction="logit", label="y"),
            "its outputs are logits, logits_other; did you mean 'logits'",
        ),
        (LossSpec(type=CE, prediction=None, label="y"), "loss.prediction is missing"),
        (LossSpec(type=CE, prediction="logits"), "loss.label is missing; it names the feature of the data"),
        (LossSpec(type=CE, prediction="logits", label="w"), "loss label 'w' is the name of an initializer"),
        (LossSpec(type=CE, prediction="logits", label="logits"), "loss label 'logits' is the name of an output"),
        (
            LossSpec(type=CE, prediction="logits", label="soft"),
            "'soft' is an input of type float; expected int64. Class labels are integers",
        ),
        (
            LossSpec(type=MSE, prediction="logits", label="ids"),
            "'ids' is an input of shape [batch]; the prediction needs [batch, 10]",
        ),
        (
            LossSpec(type=CE, prediction="logits", label="wide"),
            "'wide' is an input of shape [batch, 3]; the prediction needs [batch]",
        ),
        (
            LossSpec(type=CE, prediction="logits", label="ids", dense_labels=True),
            "'ids' is an input of type int64; expected float",
        ),
        (
            LossSpec(type=CE, prediction="logits", label="y", class_axis=2),
            "is 2, but 'logits' has 2 axes [batch, 10]; expected -2 to 1",
        ),
        (LossSpec(type=CE, prediction="logits", label="y", class_axis=-3), "class_axis is -3"),
        (
            LossSpec(type=CE, prediction="logits", label="y", class_weights=(1.0, 2.0)),
            "2 numbers, but 'logits' [batch, 10] has 10 classes",
        ),
        (
            LossSpec(type=CE, prediction="logits", label="y", dense_labels=True, ignore_index=0),
            "has no meaning for dense_labels",
        ),
        (
            LossSpec(type=CE, prediction="logits", label="y", label_type="float"),
            "label_type is 'float'; this loss takes int16, int32",
        ),
        (LossSpec(type=CE, prediction="logits", label="y", label_type="integer"), "label_type is 'integer'"),
        (
            LossSpec(type=MSE, prediction="logits", label="y", class_weights=(1.0,)),
            "do not belong to mean_squared_error",
        ),
        (
            LossSpec(type=CE, prediction="logits", label="y", reduction="none"),
            "reduction is 'none'; expected 'mean' or 'sum'",
        ),
        (
            LossSpec(type="hinge", prediction="logits", label="y"),
            "is 'hinge'; expected one of softmax_cross_entropy, mean_",
        ),
        (LossSpec(type="bert", masked_lm_prediction="logits"), "output 'logits' is [batch, 10]; expected 3 axes"),
        (LossSpec(type="bert"), "loss.masked_lm_prediction is 'output1', which is no output"),
        (LossSpec(type="output", prediction="cost"), "loss.prediction is 'cost', which is no output"),
    ],
)
def test_misfits(spec: LossSpec, words: str):
    with pytest.raises(ModelError) as raised:
        add_loss(_model(), spec)
    assert words in str(raised.value)


def test_integer_predictions_are_refused():
    with pytest.raises(ModelError, match="output 'logits' is int64; expected a float tensor"):
        add_loss(_model(element_type=TensorProto.INT64), LossSpec(type=CE, prediction="logits", label="y"))


def test_static_label_shape_conflict():
    """An existing label input whose size contradicts the prediction's."""
    model = pass_through(13, {"logits": [4, 10]})
    model.graph.input.append(helper.make_tensor_value_info("y", TensorProto.INT64, [5]))
    with pytest.raises(ModelError, match=r"'y' is an input of shape \[5\]; the prediction needs \[4\]"):
        add_loss(read_model(model), LossSpec(type=CE, prediction="logits", label="y"))


def test_old_opsets_are_refused():
    model = pass_through(7, {"logits": ["batch", 10]})
    model.opset_import[0].version = 6
    with pytest.raises(ModelError, match="cannot be added to a model of opset 6; opset 7 is the oldest"):
        add_loss(read_model(model), LossSpec(type=CE, prediction="logits", label="y"))


def test_open_class_count_before_range_existed():
    """Opset 9 has no Range: the number of classes must be known."""
    with pytest.raises(ModelError, match=r"opset 9 needs to know the size of axis 1.*mapped_dimensions"):
        add_loss(
            read_model(pass_through(9, {"logits": ["batch", "classes"]})),
            LossSpec(type=CE, prediction="logits", label="y"),
        )


def test_an_existing_input_serves_as_label():
    """An autoencoder's target is its own input: no input is added."""
    model = read_model(pass_through(13, {"y": ["batch", 3]}))
    names = add_loss(model, LossSpec(type=MSE, prediction="y", label="y_in"))
    assert names.labels == ("y_in",)
    assert [value.name for value in model.graph.inputs] == ["y_in"]


def test_label_shapes_and_types():
    """The label inputs say what is expected: the prediction's dimensions without the classes; int32 on request."""
    model = read_model(pass_through(13, {"y": ["batch", "sequence", 3]}))
    add_loss(model, LossSpec(type=CE, prediction="y", label="t", label_type="int32"))
    label = model.graph.inputs[-1]
    assert label.dtype is ir.DataType.INT32
    assert [d.value for d in label.shape] == ["batch", "sequence"]


def test_names_taken_by_the_model():
    """A model with an output `loss` of its own keeps it; the added one is `loss/loss`."""
    model = read_model(pass_through(13, {"loss": ["batch", 3]}))
    names = add_loss(model, LossSpec(type=MSE, prediction="loss", label="t"))
    assert names.loss == "loss/loss"
    assert [value.name for value in model.graph.outputs] == ["loss", "loss/loss"]
