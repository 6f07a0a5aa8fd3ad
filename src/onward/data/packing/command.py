"""The command line of packing: every field of the options dataclasses is an option, typed and explained."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onward.data.packing.options import KINDS, PackOptions
from onward.data.packing.packer import PackSummary, pack
from onward.data.packing.source import find_source_files
from onward.data.packing.splits import find_splits
from onward.errors import DataError, ParametersError
from onward.exclusive.lock import writing_to
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.remote.copies import local_folder, uploaded
from onward.remote.files import is_folder, list_folder, shown, url_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `SOURCE DEST` and all options; what is not given is absent from the parsed namespace."""
    parser.add_argument("source", metavar="SOURCE", help="a file, or a folder that is walked in the order of names")
    parser.add_argument("dest", metavar="DEST", help="directory for the shards")
    parser.add_argument("--kind", choices=tuple(KINDS), help="what SOURCE is (default: found out from suffixes)")
    _add_options(parser, _fields(PackOptions))
    listed: set[str] = set()
    for kind, options_type in KINDS.items():
        doc = " ".join((options_type.__doc__ or "").split("\n\n")[0].split())
        fields = [field for field in _fields(options_type) if field.name not in listed]
        shared = [f"--{field.name.replace('_', '-')}" for field in _fields(options_type) if field.name in listed]
        doc += f" Also takes {', '.join(shared)}." if shared else ""
        _add_options(parser.add_argument_group(kind, doc.replace("%", "%%")), fields)
        listed |= {field.name for field in fields}


def run(
    arguments: argparse.Namespace,
    limits: Limits = DEFAULT_LIMITS,
    on_phase: Callable[[str | None], None] = lambda name: None,
) -> PackSummary:
    """Packs as a parsed command line says, files that may ask for so much of the machine; `on_phase` as of `pack`.

    Raises:
        ParametersError: an option of another kind of source was given.
        UserError: as `pack`.
    """
    given, source = vars(arguments), local_folder(Path(arguments.source))
    if "test_source" in given:
        given["test_source"] = str(local_folder(Path(given["test_source"])))
    splits = None if "pattern" in given else find_splits(source)
    place = source if splits is None else splits.train
    kind = find_source_files(place, arguments.kind, given.get("pattern", ""), given.get("exclude", ())).kind
    own = {field.name for field in _fields(KINDS[kind])}
    for other, options_type in KINDS.items():
        wrong = [field.name for field in _fields(options_type) if field.name in given and field.name not in own]
        if wrong:
            raise ParametersError(
                f"--{wrong[0].replace('_', '-')} is an option for {other}, but {arguments.source!r} is packed as "
                f"{kind}: remove it, or pass --kind {other}."
            )
    options = _make(PackOptions, given, source=_make(KINDS[kind], given), limits=limits)
    dest = Path(arguments.dest)
    if url_of(dest) is None:
        return pack(source, dest, options, on_phase)
    with writing_to([dest]), uploaded(dest) as staged:
        _check_remote_dest(dest)
        summary = pack(source, staged, options, on_phase)
    folders = {dest / folder.relative_to(staged): manifest for folder, manifest in summary.folders.items()}
    return dataclasses.replace(summary, dest=dest, folders=folders)


def _check_remote_dest(dest: Path) -> None:
    """Refuses a URL that holds shards already: what is there is not replaced, since readers may be reading it."""
    for folder in (dest, dest / "train", dest / "test"):
        if is_folder(folder) and any(entry.name.endswith(".pb") for entry in list_folder(folder)):
            raise DataError(
                f"destination {shown(folder)!r} already holds shards: pass another one, or delete them there; "
                "--overwrite replaces local ones only."
            )


def _fields(options_type: type[Any]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(options_type) if "help" in field.metadata]


def _make(options_type: type[Any], given: dict[str, Any], **others: Any) -> Any:
    values = {field.name: given[field.name] for field in _fields(options_type) if field.name in given}
    return options_type(**{name: _freeze(value) for name, value in values.items()}, **others)


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _add_options(parser: argparse._ActionsContainer, fields: Sequence[dataclasses.Field[Any]]) -> None:
    for field in fields:
        name = "--" + field.name.replace("_", "-")
        text = field.metadata["help"].replace("%", "%%") + _describe_default(field.default)
        if isinstance(field.default, bool):
            parser.add_argument(
                name, dest=field.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
            continue
        parser.add_argument(
            name,
            dest=field.name,
            type=_explain(field.metadata["parse"]),
            choices=field.metadata["choices"] or None,
            action="append" if field.metadata["repeated"] else "store",
            default=argparse.SUPPRESS,
            metavar=None if field.metadata["choices"] else field.name.upper(),
            help=text,
        )


def _describe_default(default: Any) -> str:
    if default in ("", ()):
        return ""
    if isinstance(default, bool):
        return f" (default: {'yes' if default else 'no'})"
    if isinstance(default, tuple):
        return f" (default: {'x'.join(map(str, default)) if len(default) > 1 else default[0]})"
    return f" (default: {default})"


def _explain(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse hides a ValueError's message; this keeps it."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert
