"""Whether frozen weights can be stored as a run asks, and equally in every layout."""

from __future__ import annotations

from onward.errors import ParametersError
from onward.graph.quantized_base.choice import StoredBase
from onward.graph.training_graph import TrainingGraph
from onward.graph.weights.frozen_weights import LARGEST_TABLE_ELEMENTS
from onward.parameters.frozen_weights import QUANTIZED_DTYPES
from onward.plan.horizontal.planning import HorizontalPlan
from onward.spelling import shortened


def check_base(base: StoredBase, horizontal: HorizontalPlan, graph: TrainingGraph) -> None:
    """Checks that there are weights to store, and that no rank's shard of one ends within a block.

    Raises:
        ParametersError: it is not so, with what to set.
    """
    if base.dtype == "as_stored":
        return
    shown = graph.known_as.shown
    if not base.axes:
        others = shortened((f"{shown(name)}: {reason}" for name, reason in base.others.items()), 5, "; ")
        small = f"no layer has a frozen weight of more than {LARGEST_TABLE_ELEMENTS:,} elements"
        why = f"none of the frozen weights can be ({others})" if others else small
        raise ParametersError(
            f"frozen_weights.dtype is {base.dtype}, but {why}. Freeze layers (training.weights_not_to_train, or an "
            "adapter), or remove frozen_weights."
        )
    if base.dtype not in QUANTIZED_DTYPES:
        return
    for name, axis in base.axes.items():
        sharding = horizontal.shardings.get(name)
        if sharding is None:
            continue
        stored = graph.model.graph.initializers[name].const_value
        assert stored is not None
        sizes = {int(stored.shape.numpy()[axis])} if base.dtype == "nf4" else set[int]()  # whose blocks cross rows
        if sharding.axis == axis:
            ranks = range(horizontal.size)
            sizes = {end - start for rank in ranks for start, end in sharding.ranges(rank, horizontal.size)}
        uneven = sorted(size for size in sizes if size % base.block_size)
        if uneven:
            raise ParametersError(
                f"frozen_weights.block_size is {base.block_size}, but with horizontal_parallel_size {horizontal.size} "
                f"a rank sums over {uneven[0]} inputs of {shown(name)!r}, which are no number of full blocks: ranks "
                f"would quantize it differently. Set frozen_weights.block_size to a divisor of {uneven[0]}."
            )
