"""Parameters that are equal at export train apart, and shared ones together; what no file can tell is reported."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import onward
from onward.graph.repair import split_weights
from onward.graph.training_graph import make_training_graph
from tests.graph.exported import export
from tests.graph.merged_parameters import (
    KINDS,
    UNDECIDED,
    Case,
    can_be_exported,
    check,
    every_case,
    export_case,
    make_module,
    train_case,
    without_metadata,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", ["fresh", "zero"])
@pytest.mark.parametrize("exporter", ["old", "old, not folded"])
def test_parameters_train_as_in_the_module(kind: str, values: str, exporter: str, tmp_path: Path) -> None:
    case = Case(kind, values, 8, exporter)
    if not can_be_exported(case):
        pytest.skip("the older exporter has no RMSNorm")
    check(case, tmp_path)


def test_a_matrix_that_is_stored_for_each_of_its_layers_is_reported_and_can_be_tied(tmp_path: Path) -> None:
    """Initializers that are inputs as well are not merged, and the names of the layers are all that differs."""
    case = Case("tied_head", "fresh", 8, "old, inputs")
    outcome = train_case(case, tmp_path)
    assert not outcome.is_right()
    (note,) = [note for note in outcome.notes if note.startswith("Tensors hold the same numbers as others")]
    (name,) = re.findall(r"bias: '(onnx::MatMul_\d+)' those of", note)
    assert train_case(case, tmp_path, tied_weights=[name]).is_right()


@pytest.mark.slow
@pytest.mark.parametrize("case", list(every_case()), ids=str)
def test_every_case_is_right_or_reported(case: Case, tmp_path: Path) -> None:
    outcome = train_case(case, tmp_path)
    assert outcome.is_right() or outcome.is_reported, (str(case), outcome)
    if case.afterwards == "kept" and case.values in ("fresh", "zero", "random"):
        assert outcome.is_right() or (case.kind, case.values, case.exporter) in UNDECIDED, (str(case), outcome)


REPORTED = [
    (Case("embeddings", "equal", 8, "new"), "'second.weight' is read where the module reads 'head.weight'"),
    (Case("embeddings", "equal", 8, "old, not folded", "no identities"), "'first.weight' (shape [5, 8]) is read by 3"),
    (Case("vectors", "equal", 8, "old", "no identities"), "'alpha' (shape [8]) is read by 3 nodes"),
    (Case("scalars", "equal", 8, "old", "no identities"), "'warm' (shape [1]) is read by 2 nodes"),
    (
        Case("norms", "equal", 8, "old", "no names"),
        "concluded from their equal numbers alone: 'onnx::Mul_32' of 'first.",
    ),
]
"""Cases in which equal layers cannot be told from shared ones, and the begin of what is said."""


@pytest.mark.parametrize(("case", "words"), REPORTED, ids=lambda one: str(one) if isinstance(one, Case) else "")
def test_what_the_file_does_not_tell_is_reported(case: Case, words: str, tmp_path: Path) -> None:
    outcome = train_case(case, tmp_path)
    assert not outcome.is_right()
    assert outcome.is_reported
    assert any(words in note for note in outcome.notes), outcome.notes


def test_untied_weights_separates_what_equal_numbers_tied(tmp_path: Path) -> None:
    case = Case("slopes", "equal", 8, "old, inputs", "no names")
    outcome = train_case(case, tmp_path)
    (note,) = [note for note in outcome.notes if note.startswith("That these are copies")]
    assert note == (
        "That these are copies is concluded from their equal numbers alone: 'onnx::PRelu_15' of 'onnx::PRelu_14'. If "
        "one is a weight of its own that was equal when exported, list it in training.untied_weights "
        "(untied_weights=[...] of onward.to_torch) to train it separately."
    )
    assert not outcome.is_right()
    assert train_case(case, tmp_path, untied_weights=["onnx::PRelu_15"]).is_right()


def test_tied_weights_keeps_what_a_file_does_not_show(tmp_path: Path) -> None:
    case = Case("tied_head", "zero", 8, "old")
    assert train_case(case, tmp_path, tied_weights=["onnx::MatMul_*"]).is_right()


def test_copies_with_other_biases_are_reported_and_can_be_tied(tmp_path: Path) -> None:
    """Two layers of one matrix, folded once for each: so are two layers that were copied from one another."""
    case = Case("tied_head", "fresh", 40, "new", "stripped")
    outcome = train_case(case, tmp_path)
    assert not outcome.is_right()
    assert (
        "Tensors hold the same numbers as others that are read with another bias: 'val_4' those of 'val_0'. The file "
        "does not say whether each pair is one weight or was equal when exported, and they are trained separately. "
        "List the first of a pair in training.tied_weights to train it as one."
    ) in outcome.notes
    assert train_case(case, tmp_path, tied_weights=["val_4"]).is_right()


@pytest.mark.parametrize("exporter", ["old", "new, not optimized"])
def test_that_equal_layers_share_no_matrix_is_told_as_a_conclusion(exporter: str, tmp_path: Path) -> None:
    """All layers start equal, and two of them share: nothing in the file tells them from three."""
    case = Case("tied_head", "equal", 8, exporter, "no names" if exporter == "old" else "stripped")
    assert train_case(case, tmp_path).is_reported


def test_untied_weights_splits_what_a_file_does_not_show(tmp_path: Path) -> None:
    case = Case("flat_linears", "equal", 8, "new", "stripped")
    outcome = train_case(case, tmp_path)
    (note, *_) = [note for note in outcome.notes if "'first.weight'" in note]
    assert note.startswith(
        "'first.weight' (shape [8, 8]) is read by 2 nodes ('node_linear', 'node_linear_1'); the file does not tell "
        "whether they share it, or were equal and merged when it was exported. It trains as one weight. If they are "
        "separate layers, list 'first.weight' in training.untied_weights (untied_weights=[...] of onward.to_torch)."
    )
    assert train_case(case, tmp_path, untied_weights=["first.*"]).is_right()


def test_each_parameter_is_exported_under_its_own_name(tmp_path: Path) -> None:
    """Also where the older exporter left an Identity instead of a parameter."""
    case = Case("encoder", "fresh", 8, "old, not folded")
    module, x = make_module(case)
    path = export(module, (x,), tmp_path / "m.onnx", 17, False, do_constant_folding=False)
    stored = {tensor.name for tensor in onnx.load(path).graph.initializer}
    names = {name for name, _ in module.named_parameters()}
    assert not names <= stored, "the exporter merged equal ones"
    onward.export(onward.to_torch(path), tmp_path / "t.onnx")
    trained = onnx.load(tmp_path / "t.onnx")
    onnx.checker.check_model(trained, full_check=True)
    assert names <= {tensor.name for tensor in trained.graph.initializer}


def test_scales_of_one_column_are_no_mask(tmp_path: Path) -> None:
    """A group norm's weights of ones are stored as [C, 1]: every column of ones is a triangle of ones, too."""
    module = nn.Sequential(nn.Conv1d(8, 8, 1), nn.GroupNorm(2, 8))
    graph = make_training_graph(export(module, (torch.randn(2, 8, 3),), tmp_path / "m.onnx", 17, False))
    assert len(graph.weights) == 4
    assert "a mask" not in graph.frozen.values()


def test_parameters_that_an_equal_layer_made_redundant_are_reported(tmp_path: Path) -> None:
    outcome = train_case(Case("own_attentions", "equal", 8, "new"), tmp_path)
    (note,) = [note for note in outcome.notes if "are not in the file" in note]
    assert note.startswith(
        "4 parameters of the module are not in the file ('second.k_proj.bias', 'second.k_proj.weight', "
        "'second.v_proj.bias', 'second.v_proj.weight'): nothing used them, or a layer with equal numbers computed the "
        "same from the same input, and the exporter kept one of the two. They cannot be trained."
    )


def test_parameters_of_one_number_without_their_identities(tmp_path: Path) -> None:
    """Two temperatures of 1 that a simplifier left as one tensor: the user is notified, and can have them apart."""
    case = Case("scalars", "fresh", 8, "old", "no identities")
    outcome = train_case(case, tmp_path)
    assert not outcome.is_right()
    (note,) = [note for note in outcome.notes if note.startswith("'warm' (shape [1]) is read by 2 nodes")]
    assert "list 'warm' in training.untied_weights" in note
    apart = train_case(case, tmp_path, untied_weights=["warm"])
    assert apart.is_right()


def test_layers_with_other_biases_are_not_searched_for_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they hold the same numbers is seen by first rows: a search for each pair took 72 s for 64 layers."""
    case = Case("linears", "random", 40, "new", "stripped")
    module, x = make_module(case)
    file = without_metadata(export_case(case, module, x, tmp_path))

    def refuse(*_: object) -> None:
        raise AssertionError("elements were searched")

    monkeypatch.setattr(split_weights, "find_rearrangement", refuse)
    assert len(make_training_graph(file).weights) == 6
