"""`python -m tests.fake_gpu LIBRARY runs|generated|standard ANSWER [NAME ...]`: what a test asks of its own process."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    library, what, answer, *names = sys.argv[1:]
    hooks = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # torch asks once, when it is imported
    if what == "runs":
        from tests.fake_gpu import runs

        found = runs.run_all(names)
    elif what == "generated":
        from tests.fake_gpu import generated

        found = generated.run_all(names, hooks)
    else:
        from tests.fake_gpu import standard

        found = standard.run_all(*map(int, names))  # type: ignore[arg-type]
    Path(answer).write_text(json.dumps(found))
