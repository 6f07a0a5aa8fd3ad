"""The sections `wandb`, `mlflow` and `aim` of RUN.yaml: experiment trackers that a run also reports to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onward.parameters.field_types import STRICT


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """Reporting to Weights & Biases; needs `pip install "onward[wandb]"`.

    Attributes:
        project: of the run; absent: nothing is reported there.
        entity: user or team of the project; absent: your default.
        name: of the run; absent: drawn by W&B.
        mode: `offline` writes files into the run's folder, for `wandb sync`; `online` needs `wandb login`.
    """

    __pydantic_config__ = STRICT
    project: str | None = None
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"


@dataclass(frozen=True, kw_only=True)
class Mlflow:
    """Reporting to MLflow; needs `pip install "onward[mlflow]"`.

    Attributes:
        experiment: made where there is none of this name; absent: nothing is reported there.
        tracking_uri: a server or a database, such as `sqlite:///mlflow.db` (a relative path is taken from the working
            folder); absent: what MLflow is configured for.
        name: of the run; absent: drawn by MLflow.
    """

    __pydantic_config__ = STRICT
    experiment: str | None = None
    tracking_uri: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Aim:
    """Reporting to Aim; needs `pip install "onward[aim]"`.

    Attributes:
        experiment: of the run; absent: nothing is reported there.
        repo: a folder (a relative path is taken from the working folder) or `aim://host:port`; absent: Aim's own
            default, `.aim` of the working folder.
        name: of the run; absent: drawn by Aim.
    """

    __pydantic_config__ = STRICT
    experiment: str | None = None
    repo: str | None = None
    name: str | None = None
