"""What a fit refuses."""

from __future__ import annotations

from typing import Any

import pytest

from onward.engine.callbacks import Callback
from onward.engine.reports import StepReport
from onward.errors import DataError, ModelError, ParametersError
from tests.fitting.pairs import DATA, PAIR, Original, fit, torch_loader


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"loss": None, "given": iter([PAIR]), "steps": 1},
            ParametersError,
            r"loss is missing. The outputs of the model are 'logits'; the data hold 'x', 'label'. Pass loss='softmax",
        ),
        ({"loss": "hinge"}, ParametersError, r"loss is 'hinge'; expected one of softmax_cross_entropy.*cross_entropy"),
        ({"loss": 3}, ParametersError, r"loss is 3; expected a name, a Loss, or a function"),
        ({"loss": "bert"}, ParametersError, r"loss 'bert' needs further fields; pass loss=Loss"),
        ({"epochs": 2, "steps": 3}, ParametersError, r"epochs is 2 and steps is 3; pass one of the two"),
        ({"epochs": 0}, ParametersError, r"epochs is 0; expected a number above 0"),
        ({"validation_data": PAIR, "validation_fraction": 0.1}, ParametersError, r"both set; pass one of the two"),
        ({"parameters": {"training": 3}}, ParametersError, r"parameters\['training'\] is 3; expected a dictionary"),
        ({"parameters": {"training": {"bath": 3}}}, ParametersError, r"training.bath"),
        ({"given": iter([PAIR]), "epochs": 2}, DataError, r"epochs is 2, but the data are an iterator.*Pass a list"),
        ({"given": iter([PAIR])}, DataError, r"the data are an iterator of unknown length.*Pass steps="),
        (
            {"given": torch_loader(), "validation_fraction": 0.1},
            DataError,
            r"IteratedDataLoader cannot be split.*Pass validation_data",
        ),
        (
            {"given": {"x": DATA["x"], "a": DATA["label"], "b": DATA["label"]}},
            ParametersError,
            r"the loss needs one feature that is no input, and there are 2.*'x', 'a', 'b'. Pass label=",
        ),
        ({"given": {"x": DATA["x"]}}, ParametersError, r"the loss needs one feature .* there are 0.*the data hold 'x'"),
        ({"model": Original()}, ModelError, r"model is a torch module \(Original\).*torch.onnx.export"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fit(options.pop("given", PAIR), **options)


class _Misspelt(Callback):
    def on_evaluaton(self, report: StepReport) -> None:
        """Almost a hook."""


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        (
            [_Misspelt()],
            r"_Misspelt\.on_evaluaton is never called, .* Did you mean on_evaluation\? The hooks are on_run_",
        ),
        ([Callback], r"callbacks holds the class Callback; pass an object of it: callbacks=\[Callback\(\)\]"),
        (
            Callback(),
            r"callbacks is a Callback; expected a list of onward\.Callback objects: callbacks=\[Callback\(\)\]",
        ),
        ([print], r"which is no callback\. Derive a class from onward\.Callback, override hooks such as on_evaluation"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks: Any, words: str) -> None:
    with pytest.raises(ParametersError, match=words):
        fit(callbacks=callbacks)
