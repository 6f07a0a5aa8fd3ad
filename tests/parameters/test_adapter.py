"""The section `adapter`: scales, and combinations that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from onward.errors import ParametersError
from onward.parameters import Adapter, Parameters


def load(adapter: dict[str, Any], **training: Any) -> Parameters:
    return Parameters.from_mapping(
        {
            "paths": {"model_path": "m.onnx"},
            "loss": {"type": "output", "prediction": "y"},
            "training": {"batch_size": 1, "num_train_steps": 1, **training},
            "learning_rate": {"initial_lr": 0.1},
            "adapter": adapter,
        }
    )


def test_a_record_of_a_checkpoint_is_read_back():
    parameters = load({"rank": 4, "alpha": 8, "targets": ["q"], "rules": [{"weights": ["k"], "rank": 2}]})
    assert Adapter.from_fields(parameters.to_mapping()["adapter"]) == parameters.adapter


@pytest.mark.parametrize(
    ("settings", "scale"),
    [({}, 1.0), ({"alpha": 8.0}, 2.0), ({"alpha": 8.0, "rslora": True}, 4.0), ({"rslora": True}, 1.0)],
)
def test_the_scale_is_alpha_over_rank(settings: dict[str, Any], scale: float):
    adapter = Adapter(rank=4, **settings)
    assert adapter.scale(4, adapter.alpha) == scale


@pytest.mark.parametrize(
    ("adapter", "training", "words"),
    [
        ({"alpha": 8}, {}, "adapter.rank is missing; set adapter.rank, for example to 8"),
        ({"rank": 8}, {"weights_to_train": ["w"]}, "name the weights to adapt in adapter.targets"),
        ({"rank": 8, "outputs": []}, {}, "adapter.outputs is empty; name at least one of 'merged'"),
        ({"rank": 8, "pissa_iterations": 4}, {}, "adapter.pissa_iterations is set, but adapter.start is 'kaiming'"),
        ({"rank": 8, "start": "pissa", "start_path": "a"}, {}, "set one of the two: how adapters begin"),
        ({"rank": 0}, {}, "adapter.rank is 0"),
        ({"rank": 8, "outputs": ["zip"]}, {}, "adapter.outputs[0] is 'zip'"),
    ],
)
def test_mistakes_are_named(adapter: dict[str, Any], training: dict[str, Any], words: str):
    with pytest.raises(ParametersError) as caught:
        load(adapter, **training)
    assert words in str(caught.value)


def test_rounds_of_a_run_share_their_adapter():
    later = {"adapter": {"rank": 4}}
    sections = load({"rank": 8}).to_mapping()
    with pytest.raises(ParametersError, match="adapter cannot change between the rounds"):
        Parameters.from_mapping({**{k: v for k, v in sections.items() if v}, "next_rounds": [later]})
