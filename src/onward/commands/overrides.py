"""Fields of a RUN.yaml on the command line: `--section.field value`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onward.errors import ParametersError

if TYPE_CHECKING:
    from onward.parameters.limits import Limits


def read_limits(arguments: Sequence[str]) -> Limits:
    """The limits that `--limits.field value` of a command without a RUN.yaml set. Raises as `read_overrides`."""
    from onward.parameters.limits import Limits

    return Limits.from_overrides(read_overrides(arguments, "limits"))


def read_overrides(arguments: Sequence[str], section: str = "*") -> dict[str, str]:
    """`--section.field value` and `--section.field=value` as a mapping.

    Args:
        arguments: these alone.
        section: the one whose fields are taken; "*": all.

    Raises:
        ParametersError: an argument is neither, lacks its value, or is of another section.
    """
    overrides: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--") or "." not in name:
            raise ParametersError(f"{name!r} is not understood; set fields as --section.field value.")
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
