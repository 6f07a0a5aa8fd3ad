"""Fields of a RUN.yaml on the command line: `--section.field value`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onward.errors import ParametersError
from onward.spelling import did_you_mean

if TYPE_CHECKING:
    from onward.parameters.limits import Limits


def read_limits(arguments: Sequence[str]) -> Limits:
    """The limits that `--limits.field value` of a command without a RUN.yaml set. Raises as `read_overrides`."""
    from onward.parameters.limits import Limits

    return Limits.from_overrides(read_overrides(arguments, "limits"))


def read_overrides(arguments: Sequence[str], section: str = "*", command: str = "") -> dict[str, str]:
    """`--section.field value` and `--section.field=value` as a mapping.

    Args:
        arguments: what a command's own options left over.
        section: the one whose fields are taken; "*": all.
        command: which one, for what may have been meant.

    Raises:
        ParametersError: an argument is neither, lacks its value, or is of another section.
    """
    overrides: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--") or "." not in name:
            hint = _hint(name.partition("=")[0], command) if name.startswith("-") else ""
            raise ParametersError(f"{name!r} is not understood; set fields as --section.field value.{hint}")
        name, equals, value = name[2:].partition("=")
        if not equals:
            if not rest:
                raise ParametersError(f"--{name} has no value; pass --{name} VALUE.")
            value = rest.pop(0)
        if section not in ("*", name.partition(".")[0]):
            raise ParametersError(
                f"--{name} is a field of a RUN.yaml, which this command does not read; it takes fields of {section} "
                f"alone, as --{section}.field."
            )
        overrides[name] = value
    return overrides


def _hint(name: str, command: str) -> str:
    """Which option, or which field without its section, was meant."""
    from onward.commands.table import options_of
    from onward.parameters.fields import field_names

    plain, fields = name.lstrip("-").replace("-", "_"), field_names()
    if found := did_you_mean(name, options_of(command) if command else (), cutoff=0.7):
        return found
    if same := [f"--{field}" for field in fields if field.partition(".")[2] == plain]:
        return did_you_mean(f"--{plain}", same, most=3, cutoff=0.3)
    return did_you_mean(f"--{plain}", [f"--{field}" for field in fields], most=3)
