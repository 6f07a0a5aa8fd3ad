"""`onward` in a process where torch's unpickling of what other ranks send fails; for `parallel/launch/launching.py`."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from torch.distributed import distributed_c10d


def forbid_unpickling() -> None:
    """Lets every collective of objects fail on the rank that receives."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a rank unpickled what another one sent")

    assert callable(distributed_c10d._tensor_to_object)
    distributed_c10d._tensor_to_object = refuse


if __name__ == "__main__":
    from onward.cli import main

    forbid_unpickling()
    sys.exit(main(sys.argv[1:]))
