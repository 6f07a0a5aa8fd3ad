"""The optimizers that `optimizer.training_optimizer_name` can name, in the order in which messages list them."""

from __future__ import annotations

from onward.optimizers.kind import OptimizerKind

_ADAM = {"alpha": 0.9, "beta": 0.999, "lambda": 0.0, "epsilon": 1e-8, "do_bias_correction": True}

_TORCH_CLASSES = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
)  # fmt: skip
"""Classes of torch.optim. All of them update element by element. Others have own names (SGD, Muon, Adafactor), or call
the network themselves (LBFGS), or need sparse gradients (SparseAdam)."""

OPTIMIZERS: tuple[OptimizerKind, ...] = (
    OptimizerKind(
        name="SGDOptimizer",
        other_names=("sgd",),
        defaults={"lambda": 0.0, "momentum": 0.0, "nesterov": False},
    ),
    OptimizerKind(name="Adam", other_names=("adamoptimizer",), defaults=_ADAM),
    OptimizerKind(name="AdamW", other_names=("adamwoptimizer",), defaults=_ADAM),
    OptimizerKind(
        name="Lamb",
        other_names=("lamboptimizer",),
        defaults={**_ADAM, "epsilon": 1e-6, "do_bias_correction": False, "ratio_min": None, "ratio_max": None},
        is_elementwise=False,
    ),
    OptimizerKind(
        name="Lion",
        defaults={"alpha": 0.9, "beta": 0.99, "lambda": 0.0},
    ),
    OptimizerKind(
        name="Muon",
        defaults={**_ADAM, "momentum": 0.95, "nesterov": True, "use_muon": False},
        is_elementwise=False,
    ),
    OptimizerKind(
        name="Adafactor",
        defaults={"lambda": 0.0, "epsilon": None, "min_scale": 1e-3, "beta2_decay": -0.8, "clip_threshold": 1.0},
        is_elementwise=False,
        replicated_slots=("row_var", "col_var", "variance"),
    ),
    OptimizerKind(
        name="AdamWScheduleFree",
        other_names=("schedulefree",),
        defaults={"alpha": 0.9, "beta": 0.999, "lambda": 0.0, "epsilon": 1e-8},
        averages_weights=True,
    ),
    OptimizerKind(
        name="AdamW8bit",
        defaults={"alpha": 0.9, "beta": 0.999, "lambda": 0.0, "epsilon": 1e-8},
        needs_full_weights="its moments are quantized in blocks of 256 elements, which shards would cut",
        replicated_slots=tuple(f"{slot}.{part}" for slot in ("exp_avg", "exp_avg_sq") for part in ("scale", "qmap")),
        why_no_graph="its moments are rounded to the nearest of 256 uneven numbers, for which ONNX has no operator; "
        "AdamW is written",
    ),
    *(OptimizerKind(name=f"torch.optim.{name}", defaults={"options": {}}) for name in _TORCH_CLASSES),
)


def optimizer_named(name: str) -> OptimizerKind:
    """The optimizer of a name in any case.

    Raises:
        KeyError: there is none.
    """
    return {known: kind for kind in OPTIMIZERS for known in (kind.name.lower(), *kind.other_names)}[name.lower()]
