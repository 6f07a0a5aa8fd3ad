"""`onward doctor`: what this machine has, whether it works, and how fast it is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from onward.errors import ParametersError
from onward.report.phases import Phases

DESCRIPTION = (
    "Checks versions, devices, disks, matmuls and communication between processes; ends with exit code 1 if something "
    "that onward needs does not work. Takes about ten seconds."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what can be chosen of the checks."""
    parser.add_argument("--folder", metavar="DIR", default=".", help="the folder to write runs to (this folder)")
    parser.add_argument("--processes", type=int, metavar="N", help="of the all-reduce test (the number of GPUs, or 2)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="duration of the matmul and all-reduce tests (5)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Prints what was found.

    Raises:
        ParametersError: an option is impossible.
        SystemExit: with 1 where there is a problem.
    """
    if options.seconds <= 0:
        raise ParametersError(f"--seconds is {options.seconds:g}; pass a number above 0.")
    if options.processes is not None and options.processes < 1:
        raise ParametersError(f"--processes is {options.processes}; pass at least 1.")
    if not Path(options.folder).is_dir():
        raise ParametersError(f"--folder {options.folder!r} is not a folder; pass the folder to write runs to.")
    from onward.diagnosis.clock import check_clock
    from onward.diagnosis.communication import check_communication
    from onward.diagnosis.devices import check_devices, check_products
    from onward.diagnosis.disks import check_disks
    from onward.diagnosis.findings import Finding, render, to_json
    from onward.diagnosis.packages import check_packages

    half = options.seconds / 2
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "checking installed packages": check_packages,
        "looking for devices": check_devices,
        "checking the clocks": check_clock,
        f"writing to {options.folder}": lambda: check_disks(Path(options.folder)),
        f"timing matmuls for {half:g} s": lambda: check_products(half),
        "timing communication between processes": lambda: check_communication(options.processes, half),
    }
    found: list[Finding] = []
    for what, check in checks.items():
        phases.begin(what)
        found += (latest := list(check()))
        if any(finding.topic == "clock" and finding.status == "problem" for finding in latest):
            break  # the remaining checks measure time, or wait for as long as it takes
    phases.end()
    print(to_json(found) if options.json else render(found))
    if any(finding.status == "problem" for finding in found):
        sys.exit(1)
