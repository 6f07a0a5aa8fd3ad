"""Packing options as the `onward pack` command that has them."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from onward.data.packing.options import PackOptions


def pack_command(source: Path | str, dest: Path | str, options: PackOptions, kind: str | None = None) -> str:
    """The command line that packs as `options` say; what is a default is left out, and a kind that is found out."""
    words = ["onward", "pack", str(source), str(dest), *(("--kind", kind) if kind else ())]
    for settings in (options, options.source):
        if settings is None:
            continue
        for one in dataclasses.fields(settings):
            value = getattr(settings, one.name)
            if "help" not in one.metadata or value == one.default or one.name == "progress":
                continue
            words += _option(one.name, value, one.metadata["repeated"])
    return shlex.join(words)


def _option(name: str, value: Any, repeated: bool) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if repeated:
        return [word for one in value for word in (flag, "=".join(one) if isinstance(one, tuple) else str(one))]
    if name == "image_size":
        return [flag, "x".join(map(str, value))]
    if isinstance(value, tuple):
        return [f"{flag}={','.join(map(str, value))}"]
    return [flag, str(value)]
