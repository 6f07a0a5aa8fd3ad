"""What `onward report` does: reads runs, plans them again for their pictures, and writes the page."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from onward.errors import OnwardError, StorageError
from onward.exclusive.lock import writing_to
from onward.exclusive.temporary import replacing
from onward.report.page.page import PlanPicture, render_page
from onward.report.page.run_record import RecordedRun, read_run
from onward.report.phases import Phases

PAGE_NAME = "report.html"


def write_report(
    folders: Sequence[Path],
    output: Path | None = None,
    phases: Phases | None = None,
    *,
    with_plan: bool = True,
    overrides: Mapping[str, str] | None = None,
) -> Path:
    """Writes the report of one run or several; returns its path.

    Args:
        folders: of runs.
        output: the page; None: `report.html` in the folder of a single run, in the working folder for several.
        phases: announce what takes long.
        with_plan: plan every run again, which reads its model.
        overrides: fields of the runs for their plans, `limits` of the models above all.

    Raises:
        DataError: a folder holds no run, or a file of it is damaged.
        StorageError: the page cannot be written.
    """
    phases = phases or Phases.silent()
    runs = []
    for folder, name in zip(folders, _names(folders), strict=True):
        phases.begin(f"reading {folder}")
        runs.append(read_run(folder, name))
    plans = {run.name: _plan_of(run, overrides or {}, phases) for run in runs} if with_plan else {}
    phases.begin("writing the page")
    path = output or (folders[0] / PAGE_NAME if len(folders) == 1 else Path(PAGE_NAME))
    try:
        with writing_to(files=[path]), replacing(path) as unfinished:
            unfinished.write_text(render_page(runs, plans), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"the report {str(path)!r} cannot be written: {error.strerror or error}. Name another file with -o."
        ) from error
    return path


def _names(folders: Sequence[Path]) -> list[str]:
    """Short names that differ: the last parts of the folders' paths, as many as are needed."""
    paths = [folder.resolve() for folder in folders]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]


def _plan_of(run: RecordedRun, overrides: Mapping[str, str], phases: Phases) -> PlanPicture:
    if not run.settings:
        return PlanPicture(missing="There is no plan: the run's parameters are not in its folder.")
    phases.begin("importing torch")
    from onward.commands.planning import plan

    with tempfile.TemporaryDirectory(prefix="onward_") as folder:
        file, image = Path(folder) / "run.yaml", Path(folder) / "plan.svg"
        file.write_text(yaml.safe_dump(dict(run.settings)), encoding="utf-8")
        try:
            text = plan(file, overrides, image=image, phases=phases)
        except OnwardError as error:
            return PlanPicture(missing=f"There is no plan: {error}")
        return PlanPicture(text.rpartition("\nwrote ")[0], image.read_text(encoding="utf-8"))
