"""TensorBoard's event files: the course of a run as scalars, and named tensors as scalars, histograms and norms.

Every chart has the weight updates done over all rounds as its x-axis, training and evaluation alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch.utils.tensorboard import summary as summaries

from onward.engine.reports import CheckpointReport, EvaluationReport, RunSummary, StepReport
from onward.errors import ParametersError, StorageError
from onward.graph.weights.names import WeightNames
from onward.report.event_file import EventFile
from onward.spelling import shortened

HISTOGRAM_BUCKETS = 64
"""Buckets of equal width between a tensor's smallest and largest finite value; TensorBoard shows 30 of them."""


class TensorBoardWatcher:
    """Writes event files into a directory, rank 0 alone.

    Scalars: `train/` loss, learning_rate, gradient_norm, loss_scale, skipped_updates, samples_per_second,
    tokens_per_second, mfu, peak_memory_bytes and `test/<metric>`; of named tensors `train/scalar/<name>`,
    `train/histogram/<name>` and the L2 norm `train/norm/<name>`, with `train/non_finite/<name>`, the count of values a
    histogram had to leave out.

    Args:
        log_dir: the directory, made if need be.
        scalar_names: tensors of one element, by exact name or pattern (`*`, `?`, `[...]`), out of `StepReport.tensors`.
        histogram_names, norm_names: tensors of any shape, likewise; a gradient is `<weight>_grad`.
        resumed_update: the update of the checkpoint from which the run resumes; points after it, written by the run
            that was killed, are hidden. None for a fresh run, which hides every point of an earlier one.

    Raises:
        StorageError: the files cannot be written; also from every event.
        ParametersError: from the first step: a name stands for no tensor, or a scalar has several elements.
    """

    def __init__(
        self,
        log_dir: str | Path,
        scalar_names: Sequence[str] = (),
        histogram_names: Sequence[str] = (),
        norm_names: Sequence[str] = (),
        resumed_update: int | None = None,
    ) -> None:
        self.log_dir = Path(log_dir)
        self.scalar_names = tuple(scalar_names)
        self.histogram_names = tuple(histogram_names)
        self.norm_names = tuple(norm_names)
        purge_step = 0 if resumed_update is None else resumed_update + 1
        self._file: EventFile | None = None
        self._hyperparameters: dict[str, int | float | str | bool] = {}
        with _storing(self.log_dir):
            self._file = EventFile(self.log_dir)
            self._file.add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def describe(self, texts: Mapping[str, str], hyperparameters: Mapping[str, int | float | str | bool]) -> None:
        """Writes what the run is: texts by name, and hyperparameters, which get the last metrics at its end."""
        self._hyperparameters = dict(hyperparameters)
        with _storing(self.log_dir):
            for name, text in texts.items():
                lines = "\n".join(f"    {line}" for line in text.splitlines())  # a code block, in Markdown
                self._open_file.add_summary(summaries.text(f"run/{name}", lines))  # type: ignore[no-untyped-call]
            self._open_file.flush()

    def _write_hyperparameters(self, metrics: Mapping[str, float]) -> None:
        """In the same event file as the scalars: `add_hparams` would make its own run for them."""
        if self._hyperparameters:
            found = {f"hparam/{name}": value for name, value in metrics.items()}
            for summary in summaries.hparams(self._hyperparameters, found):  # type: ignore[no-untyped-call]
                self._open_file.add_summary(summary)
            for name, value in found.items():
                self._add_scalar(name, value)

    def on_step(self, report: StepReport) -> None:
        """Writes the scalars of an update, and the named tensors."""
        values = {
            "loss": report.loss,
            "learning_rate": report.learning_rate,
            "gradient_norm": report.gradient_norm,
            "loss_scale": report.loss_scale,
            "skipped_updates": report.skipped_updates,
            "samples_per_second": report.samples_per_second,
            "tokens_per_second": report.tokens_per_second,
            "mfu": report.mfu,
            "peak_memory_bytes": report.peak_memory_bytes,
        }
        with _storing(self.log_dir), torch.no_grad():
            for name, value in values.items():
                if value is not None:
                    self._add_scalar(f"train/{name}", value, report.update)
            for name, tensor in _chosen("scalar_names", self.scalar_names, report):
                self._add_scalar(f"train/scalar/{name}", _single(name, tensor), report.update)
            for name, tensor in _chosen("norm_names", self.norm_names, report):
                norm = torch.linalg.vector_norm(tensor, dtype=torch.float64 if _is_double(tensor) else torch.float32)
                self._add_scalar(f"train/norm/{name}", norm.item(), report.update)
            for name, tensor in _chosen("histogram_names", self.histogram_names, report):
                self._add_histogram(name, tensor, report.update)

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Writes the metrics."""
        with _storing(self.log_dir):
            for name, value in report.metrics.items():
                self._add_scalar(f"test/{name}", value, report.update)
            self._open_file.flush()

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Brings what was written to disk: a run resumed from this checkpoint continues after it."""
        with _storing(self.log_dir):
            self._open_file.flush()

    def on_message(self, text: str) -> None:
        """Messages are for people at the console and for `metrics.jsonl`."""

    def on_end(self, summary: RunSummary) -> None:
        """Writes the hyperparameters with the metrics they led to, and brings all to disk."""
        last = {} if summary.last_loss is None else {"train_loss": summary.last_loss}
        with _storing(self.log_dir):
            self._write_hyperparameters({**last, **summary.metrics})
            self._open_file.flush()

    def close(self) -> None:
        """Writes what is left and closes the file."""
        file, self._file = self._file, None
        if file is not None:
            with _storing(self.log_dir):
                file.close()

    @property
    def _open_file(self) -> EventFile:
        if self._file is None:
            raise StorageError(f"the event file in {self.log_dir} is closed; no event can be written to it.")
        return self._file

    def _add_scalar(self, name: str, value: float, update: int | None = None) -> None:
        self._open_file.add_summary(summaries.scalar(name, value), update)  # type: ignore[no-untyped-call]

    def _add_histogram(self, name: str, tensor: torch.Tensor, update: int) -> None:
        """Counts where the tensor is, so that only the counts travel from a GPU."""
        values = tensor.detach().flatten().to(torch.float64 if _is_double(tensor) else torch.float32)
        finite = torch.isfinite(values)
        left_out = values.numel() - int(finite.sum())
        if left_out:
            values = values[finite]
            self._add_scalar(f"train/non_finite/{name}", left_out, update)
        if not values.numel():
            return
        low, high = (float(bound) for bound in torch.aminmax(values))
        if low == high:
            limits, counts = [high], [float(values.numel())]
        else:
            counts = torch.histc(values, bins=HISTOGRAM_BUCKETS, min=low, max=high).tolist()
            limits = torch.linspace(low, high, HISTOGRAM_BUCKETS + 1, dtype=torch.float64)[1:].tolist()
        histogram = summaries.histogram_raw(  # type: ignore[no-untyped-call]
            f"train/histogram/{name}",
            min=low,
            max=high,
            num=values.numel(),
            sum=float(values.sum(dtype=torch.float64)),
            sum_squares=float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2,
            bucket_limits=limits,
            bucket_counts=counts,
        )
        self._open_file.add_summary(histogram, update)


@contextmanager
def _storing(log_dir: Path) -> Iterator[None]:
    """Turns a failing disk into a `StorageError`."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write TensorBoard events to {log_dir}: {error.strerror or error}. Expected a directory "
            "that can be made and written, with room on its disk; correct `tensorboard.log_dir` or make room."
        ) from error


def _chosen(field: str, patterns: Sequence[str], report: StepReport) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the patterns of a field name, each once, in the order of the patterns."""
    seen: set[str] = set()
    tensors, known_as = report.tensors, WeightNames(report.module_paths)
    for pattern in patterns:
        names = [pattern] if pattern in tensors else [name for name in tensors if known_as.matches(name, pattern)]
        if not names:
            listed = shortened(sorted(tensors), 8) or "none"
            raise ParametersError(
                f"tensorboard.{field}: {pattern!r} stands for no reported tensor. Expected a weight's name, "
                f"`<weight>_grad` or a pattern; reported are: {listed}. Correct or remove it."
            )
        yield from ((name, tensors[name]) for name in names if name not in seen)
        seen.update(names)


def _single(name: str, tensor: torch.Tensor) -> float:
    if tensor.numel() != 1:
        raise ParametersError(
            f"tensorboard.scalar_names: {name!r} has shape {list(tensor.shape)}; a scalar has one element. "
            "Name it in norm_names or histogram_names instead."
        )
    return float(tensor.item())


def _is_double(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float64
