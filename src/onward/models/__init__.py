"""Reference models as ONNX graphs: GPT-2, BERT, SqueezeNet 1.1 and MNIST, each with typed options and fresh weights."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from onward.errors import ParametersError
from onward.models.bert import BertOptions, build_bert
from onward.models.gpt2 import GPT2Options, build_gpt2
from onward.models.mnist import MnistOptions, build_mnist
from onward.models.reference_model import ModelOptions, ReferenceModel, make_options
from onward.models.squeezenet import SqueezeNetOptions, build_squeezenet

REFERENCE_MODELS: Mapping[str, ReferenceModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            ReferenceModel("gpt2", "GPT-2: a transformer that continues text", GPT2Options, build_gpt2),
            ReferenceModel("bert", "BERT with both pretraining heads", BertOptions, build_bert),
            ReferenceModel("squeezenet", "SqueezeNet 1.1: classifies images", SqueezeNetOptions, build_squeezenet),
            ReferenceModel("mnist", "a small classifier of handwritten digits", MnistOptions, build_mnist),
        )
    }
)
"""Name -> model."""


def create_model(name: str, **options: Any) -> ir.Model:
    """Builds a reference model as an onnx-ir model with fresh weights.

    Weights are drawn when they are read, one at a time, so a large model costs memory only where it is stored:
    `onward.models.create.save_model` writes it to disk weight by weight.

    Raises:
        ParametersError: the model or an option is unknown, or an option is of the wrong type or out of range.
    """
    if name not in REFERENCE_MODELS:
        near = difflib.get_close_matches(name, REFERENCE_MODELS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ParametersError(f"there is no reference model {name!r}; {hint}Choose {', '.join(REFERENCE_MODELS)}.")
    model = REFERENCE_MODELS[name]
    return model.build(make_options(model, options))


__all__ = [
    "REFERENCE_MODELS",
    "BertOptions",
    "GPT2Options",
    "MnistOptions",
    "ModelOptions",
    "ReferenceModel",
    "SqueezeNetOptions",
    "create_model",
]
