"""`python -m tests.conformance [--kind node] [--match softmax] [--verbose]`: counts passed cases, lists the others."""

from __future__ import annotations

import argparse
from collections import Counter

from tests.conformance.cases import KINDS, load_cases
from tests.conformance.checking import check


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--match", default="")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    for kind in options.kind or KINDS:
        count: Counter[str] = Counter()
        for case in load_cases(kind, options.match):
            try:
                check(case)
            except (Exception, AssertionError) as error:
                count["failed"] += 1
                text = str(error).strip()
                print(f"FAIL {kind} {case.name}: {type(error).__name__}: {text if options.verbose else text[:150]!r}")
            else:
                count["passed"] += 1
        print(f"{kind}: {count['passed']} passed, {count['failed']} failed")
        total.update(count)
    print(f"all: {total['passed']} passed, {total['failed']} failed")


if __name__ == "__main__":
    main()
