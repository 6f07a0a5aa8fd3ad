"""Fields of a RUN.yaml on the command line: `--section.field value`."""

from __future__ import annotations

from collections.abc import Sequence

from onward.errors import ParametersError


def read_overrides(arguments: Sequence[str]) -> dict[str, str]:
    """`--section.field value` and `--section.field=value` as a mapping.

    Raises:
        ParametersError: an argument is neither, or lacks its value.
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
        overrides[name] = value
    return overrides
