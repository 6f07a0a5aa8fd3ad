"""`onward create`: a reference model from the command line to a file, its options made from the model's dataclass."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from pathlib import Path

import onnx_ir as ir

from onward.errors import ParametersError
from onward.exclusive.lock import writing_to
from onward.graph.writing import model_saving
from onward.models import REFERENCE_MODELS, create_model
from onward.models.reference_model import option_type


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one subcommand for each reference model, with an argument for each of its options."""
    models = parser.add_subparsers(dest="model", metavar="MODEL", required=True)
    for name, model in REFERENCE_MODELS.items():
        sub = models.add_parser(name, help=model.summary, description=f"Write {model.summary} as an ONNX file.")
        sub.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the ONNX file to write")
        hints = typing.get_type_hints(model.options)
        for field in dataclasses.fields(model.options):
            _add_option(sub, field, hints[field.name])


def _add_option(parser: argparse.ArgumentParser, field: dataclasses.Field[object], hint: object) -> None:
    """An argument of an option's type; its range is checked with the other options, not by argparse."""
    flag = "--" + field.name.replace("_", "-")
    text = field.metadata["help"]
    kind, _ = option_type(hint)
    if kind is bool:
        action = argparse.BooleanOptionalAction
        parser.add_argument(flag, action=action, default=None, help=f"{text} (default: {_yes_no(field.default)})")
        return
    if field.default is not None:
        text += f" (default: {field.default})"
    choices = field.metadata["choices"]
    metavar = None if choices else kind.__name__.upper()
    parser.add_argument(flag, type=kind, choices=choices, default=None, metavar=metavar, help=text)


def _yes_no(value: object) -> str:
    return "yes" if value else "no"


def run(arguments: argparse.Namespace) -> str:
    """Builds the model that was asked for, writes it, and says in one sentence what was written.

    Raises:
        ParametersError: an option is impossible, or the output is no path for a file.
        StorageError: the file cannot be written.
    """
    names = [field.name for field in dataclasses.fields(REFERENCE_MODELS[arguments.model].options)]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    model = create_model(arguments.model, **given)
    save_model(model, arguments.output)
    weights = [value.const_value for value in model.graph.initializers.values() if _is_weight(value)]
    count = sum(tensor.size for tensor in weights if tensor is not None)
    inputs = ", ".join(_describe(value) for value in model.graph.inputs)
    outputs = ", ".join(_describe(value) for value in model.graph.outputs)
    return f"{arguments.output}: {arguments.model}, {count:,} parameters; inputs {inputs}; outputs {outputs}"


def _is_weight(value: ir.Value) -> bool:
    """Whether an initializer is a weight or a running statistic, not a constant of the arithmetic."""
    return value.dtype == ir.DataType.FLOAT and value.shape is not None and value.shape.rank() > 0


def _describe(value: ir.Value) -> str:
    return f"{value.name} {value.dtype.name.lower() if value.dtype else ''}{value.shape}"


def save_model(model: ir.Model, path: Path) -> None:
    """Writes a model, the weights of a large one to `<file>.data` next to it, never holding more than a few of them.

    Raises:
        ParametersError: the path is a directory.
        StorageError: the file cannot be written.
        FolderInUseError: another process writes it.
    """
    if path.is_dir():
        raise ParametersError(f"{str(path)!r} is a directory; give the name of a file, such as {path / 'model.onnx'}.")
    with writing_to(files=[path]):
        model_saving.save_model(model, path)
