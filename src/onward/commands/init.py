"""`onward init`: its arguments; `initialization` does the work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from onward.graph.reading.garbage_collection import importing
from onward.losses.registry import losses_for_init
from onward.report.phases import Phases

DESCRIPTION = (
    "Looks at a model and at data and writes a RUN.yaml that trains, with the reason for every choice as a comment. "
    "Data that are not packed yet are packed into the folder `data` next to it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds model, data, and what can be said beforehand."""
    parser.add_argument("model", metavar="MODEL", help="an .onnx file")
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="?",
        help="a folder of shards, or what onward pack takes: .npz, .npy, CSV, TSV, Parquet, JSONL, a folder with one "
        "folder of images or recordings per class, text",
    )
    parser.add_argument("-o", "--output", default="run.yaml", metavar="RUN.yaml", help="the file to write (run.yaml)")
    parser.add_argument(
        "--force", action="store_true", help="overwrite the file, and data that were packed with other options"
    )
    parser.add_argument("--wizard", action="store_true", help="ask in the terminal, with the inferred value as default")
    parser.add_argument("--output-dir", metavar="DIR", help="where the trained model will go (trained)")
    parser.add_argument(
        "--kind", choices=("text", "arrays", "table", "images", "audio"), help="what DATA holds (by suffixes)"
    )
    parser.add_argument("--label", metavar="NAME", help="the feature or column to predict (several columns: A,B,C)")
    parser.add_argument("--inputs", metavar="COLUMN,...", help="the columns of a table that the model reads")
    parser.add_argument(
        "--prediction", metavar="OUTPUT", help="the output of the model that is compared with the label"
    )
    parser.add_argument(
        "--loss",
        choices=losses_for_init(),
        help="the loss to minimize",
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the training data")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples per batch")
    parser.add_argument("--learning-rate", type=float, metavar="RATE", help="the highest learning rate")
    parser.add_argument("--weights", metavar="PATTERN,...", help="names or *-patterns of the weights to train (all)")
    parser.add_argument(
        "--test-fraction", type=float, metavar="SHARE", help="fraction of the samples held out for testing"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="for text: a tokenizer.json, 'bytes' or 'bpe'")
    parser.add_argument("--sequence-length", type=int, metavar="N", help="for text: tokens per sample")
    parser.add_argument("--sample-rate", type=int, metavar="HZ", help="for recordings: what they are resampled to")
    parser.add_argument("--no-trial", action="store_true", help="do not run a trial step before writing the file")


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Writes a RUN.yaml.

    Raises:
        UserError: what cannot train and why, with what to do.
    """
    with importing():
        from onward.commands.initialization import initialize
    from onward.commands.overrides import read_limits

    initialize(options, phases, read_limits(rest))
