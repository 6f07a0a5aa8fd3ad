"""Fields of a RUN.yaml that were renamed. The old name keeps working, and a warning names the new one."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from onward.errors import ParametersError, RenamedField

RENAMED_FIELDS: Mapping[str, str] = MappingProxyType({"recompute.cheap_inputs": "cheap_activations"})
"""`section.old name` -> new name; one row for each renamed field."""

OTHER_NAMES: Mapping[str, str] = MappingProxyType({"training.freeze": "weights_not_to_train"})
"""`section.other name` -> name of fields that have two; nothing warns of either."""

Section = TypeVar("Section")


def with_new_names(sections: Any, where: str = "") -> Any:
    """Sections in which every field has its new name; warns of old ones. What is no mapping is returned as given.

    Args:
        sections: to fields, as YAML gives them.
        where: in the file, before the names of sections: `next_rounds[0].`.

    Raises:
        ParametersError: a field is given by both names.
    """
    if not isinstance(sections, Mapping):
        return sections
    return {
        name: _renamed(fields, name, where) if isinstance(fields, Mapping) else fields
        for name, fields in sections.items()
    }


def accepts_old_names(section: str) -> Callable[[type[Section]], type[Section]]:
    """Decorates the dataclass of a section: it can be constructed with old names, and read by them."""

    def decorate(kind: type[Section]) -> type[Section]:
        construct: Callable[..., None] = kind.__init__

        @functools.wraps(construct)
        def __init__(self: Any, **fields: Any) -> None:
            construct(self, **_renamed(fields, section))

        setattr(kind, "__init__", __init__)  # noqa: B010  # mypy refuses the assignment
        for old, new in _of_section(section).items():
            setattr(kind, old, property(operator.attrgetter(new)))
        return kind

    return decorate


def _of_section(section: str) -> dict[str, str]:
    names = {**RENAMED_FIELDS, **OTHER_NAMES}
    return {old.partition(".")[2]: new for old, new in names.items() if old.startswith(f"{section}.")}


def _renamed(fields: Mapping[str, Any], section: str, where: str = "") -> dict[str, Any]:
    result = dict(fields)
    for old, new in _of_section(section).items():
        if old not in result:
            continue
        old_name, new_name = f"{where}{section}.{old}", f"{section}.{new}"
        is_deprecated = f"{section}.{old}" in RENAMED_FIELDS
        if new in result and not is_deprecated:
            raise ParametersError(f"{old_name} is another name of {new_name}, and both are given; remove one of them.")
        if new in result:
            raise ParametersError(f"{old_name} is the deprecated name of {new_name}, and both are given; remove {old}.")
        if is_deprecated:
            message = (
                f"{old_name} is deprecated: it was renamed to {new_name} and keeps working. Set {new_name} instead."
            )
            warnings.warn(message, RenamedField, stacklevel=4)
        result[new] = result.pop(old)
    return result
