"""From an optimizer's name to a torch optimizer with its slots: one row for each entry of the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onward.errors import ParametersError
from onward.optim.adafactor import Adafactor
from onward.optim.adam import AdamAsAsked
from onward.optim.adamw_8bit import make_adamw_8bit
from onward.optim.lamb import Lamb
from onward.optim.lion import Lion
from onward.optim.muon import Muon
from onward.optim.schedule_free import AdamWScheduleFree
from onward.optim.slotted_optimizer import new_counts, zeros_like
from onward.optim.torch_class import group_of_torch_class, make_torch_class
from onward.optim.weight_shards import WeightShards
from onward.optimizers.registry import OPTIMIZERS

Attributes = Mapping[str, Any]
Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Maker:
    """How an optimizer is made.

    Attributes:
        group: the attributes of a group's weights -> its options.
        make: groups -> the optimizer, all slots of which are there.
    """

    group: Callable[[Attributes], dict[str, Any]]
    make: Callable[[Groups, WeightShards], torch.optim.Optimizer]


def _sgd_group(a: Attributes) -> dict[str, Any]:
    if a["nesterov"] and not a["momentum"]:
        raise ParametersError("optimizer_attributes: nesterov is true while momentum is 0; set a momentum.")
    return {"weight_decay": a["lambda"], "momentum": a["momentum"], "nesterov": bool(a["nesterov"])}


def _make_sgd(groups: Groups, shards: WeightShards) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(groups, lr=0.0, fused=True)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            slots = optimizer.state[weight]
            if group["momentum"]:
                slots["momentum_buffer"] = zeros_like(weight)
    return optimizer


def _adam_group(a: Attributes) -> dict[str, Any]:
    return {
        "betas": (a["alpha"], a["beta"]),
        "eps": a["epsilon"],
        "weight_decay": a["lambda"],
        "do_bias_correction": bool(a["do_bias_correction"]),
    }


def _adam(kind: type[torch.optim.Adam], decouples_decay: bool) -> Maker:
    """torch's own, fused, wherever all groups correct the bias."""

    def make(groups: Groups, shards: WeightShards) -> torch.optim.Optimizer:
        if not all(group["do_bias_correction"] for group in groups):
            return AdamAsAsked([{**group, "decouples_decay": decouples_decay} for group in groups], {})
        optimizer = kind(groups, lr=0.0, fused=True)
        for weights in (group["params"] for group in optimizer.param_groups):
            for weight, count in zip(weights, new_counts(weights), strict=True):
                new = {"step": count, "exp_avg": zeros_like(weight), "exp_avg_sq": zeros_like(weight)}
                optimizer.state[weight].update(new)
        return optimizer

    return Maker(_adam_group, make)


def _lamb_group(a: Attributes) -> dict[str, Any]:
    return _adam_group(a) | {key: a[key] for key in ("ratio_min", "ratio_max") if a[key] is not None}


def _adafactor_group(a: Attributes) -> dict[str, Any]:
    return {
        "eps": (a["epsilon"], a["min_scale"]),
        "beta2_decay": a["beta2_decay"],
        "d": a["clip_threshold"],
        "weight_decay": a["lambda"],
    }


def _schedule_free_group(a: Attributes) -> dict[str, Any]:
    if not a["alpha"]:
        raise ParametersError(
            "optimizer_attributes: alpha is 0, with which AdamWScheduleFree cannot average; set it above 0."
        )
    return {"betas": (a["alpha"], a["beta"]), "eps": a["epsilon"], "weight_decay": a["lambda"]}


def _muon_group(a: Attributes) -> dict[str, Any]:
    options = {"use_muon": a["use_muon"], "momentum": a["momentum"], "nesterov": a["nesterov"]}
    return _adam_group(a) | {"decouples_decay": True} | options


def _torch_class(name: str) -> Maker:
    return Maker(
        lambda a: group_of_torch_class(name, a["options"]), lambda groups, shards: make_torch_class(name, groups)
    )


MAKERS: dict[str, Maker] = {
    **{kind.name: _torch_class(kind.name) for kind in OPTIMIZERS if kind.name.startswith("torch.")},
    "SGDOptimizer": Maker(_sgd_group, _make_sgd),
    "Adam": _adam(torch.optim.Adam, decouples_decay=False),
    "AdamW": _adam(torch.optim.AdamW, decouples_decay=True),
    "Lion": Maker(
        lambda a: {"betas": (a["alpha"], a["beta"]), "weight_decay": a["lambda"]},
        lambda groups, shards: Lion(groups, {}, shards),
    ),
    "Muon": Maker(_muon_group, lambda groups, shards: Muon(groups, {}, shards)),
    "Adafactor": Maker(_adafactor_group, lambda groups, shards: Adafactor(groups, {}, shards)),
    "AdamWScheduleFree": Maker(_schedule_free_group, lambda groups, shards: AdamWScheduleFree(groups, {}, shards)),
    "AdamW8bit": Maker(
        lambda a: {"betas": (a["alpha"], a["beta"]), "eps": a["epsilon"], "weight_decay": a["lambda"]},
        lambda groups, shards: make_adamw_8bit(groups),
    ),
    "Lamb": Maker(_lamb_group, lambda groups, shards: Lamb(groups, lr=0.0, shards=shards)),
}
"""Name of an optimizer of the registry -> how it is made."""
