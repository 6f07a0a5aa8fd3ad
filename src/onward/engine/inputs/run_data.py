"""The data of a run, of any kind that Python programs hold, each opened once as a source of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onward.data.batches import BatchSource
from onward.data.numbering import Numbering, check_same_numbering, unseen_classes
from onward.data.sources.naming import FeatureNames
from onward.data.sources.opening import ReadingOptions, open_data
from onward.graph.training_graph import TrainingGraph
from onward.parallel.launch.process import Mesh
from onward.parameters import Parameters


class RunData:
    """Opens data as the parameters of a run say, and remembers what is open.

    Args:
        notify: called with what the user should know of the data.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._opened: list[tuple[Any, BatchSource]] = []
        self._training: Numbering | None = None
        self._reported: set[str] = set()

    def open(self, data: Any, is_test: bool, parameters: Parameters, mesh: Mesh, graph: TrainingGraph) -> BatchSource:
        """The source of batches over data; for the same data the same source.

        Raises:
            DataError: the data are of no known kind, empty, hold no numbers, or number classes or tokens otherwise
                than the training data that were opened first.
        """
        for given, source in self._opened:
            if given is data:
                return source
        settings = parameters.data
        is_shared_out = not is_test or settings.test_data == "partitioned"
        reading = ReadingOptions(
            shuffle=settings.shuffle_data and not is_test,
            seed=parameters.training.seed,
            last_batch=settings.last_batch,
            rank=mesh.reader if is_shared_out else 0,
            size=mesh.topology.reader_count if is_shared_out else 1,
            limits=parameters.limits,
        )
        source = open_data(data, feature_names(parameters, graph), reading)
        if source is not data:
            for text in getattr(source, "messages", ()):
                self._notify(text)
            self._opened.append((data, source))
        self._check_numbering(source, is_test)
        return source

    def _check_numbering(self, source: BatchSource, is_test: bool) -> None:
        found = getattr(source, "numbering", None)
        if not isinstance(found, Numbering):
            return
        if self._training is None:
            self._training = None if is_test else found
            return
        check_same_numbering(self._training, found)
        text = unseen_classes(self._training, found) if is_test else ""
        if text and text not in self._reported:
            self._reported.add(text)
            self._notify(text)

    def close(self) -> None:
        """Closes what was opened here."""
        opened, self._opened = self._opened, []
        for _, source in opened:
            source.close()


def feature_names(parameters: Parameters, graph: TrainingGraph) -> FeatureNames:
    """What the model and its loss read, for data that are not in shards."""
    labels = () if graph.loss_names is None else graph.loss_names.labels
    inputs = {
        str(value.name): None if value.shape is None else len(value.shape)
        for value in graph.model.graph.inputs
        if value.name not in labels
    }
    return FeatureNames(inputs, labels or ("label",), parameters.data.input_name_map)
