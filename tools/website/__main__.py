"""``python -m tools.website``: write the generated pages, or check that they are up to date."""

from __future__ import annotations

import argparse
import sys

from kernel_pytorch.benchmarking import checkout
from kernel_pytorch.evidence import evidence_directory
from tools.website.pages import PAGES, outdated, write_pages

REMEDY = "run 'python -m tools.website --write' and commit what it changes"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.website",
        description=f"Make the generated pages: {', '.join(PAGES)}, docs/api, docs/backends.",
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the pages that are out of date")
    mode.add_argument("--check", action="store_true", help="exit 1 with a difference where one is out of date")
    wanted = parser.parse_args(arguments)
    root = checkout()
    if not (root / "pyproject.toml").is_file():
        parser.exit(2, f"no checkout of the project at {root}: the pages are made in one\n")
    if wanted.write:
        for path in write_pages(root, evidence_directory()):
            print(f"wrote {path}")
        return 0
    stale = outdated(root, evidence_directory())
    for difference in stale.values():
        print(difference)
    if stale:
        print(f"out of date: {', '.join(stale)}; {REMEDY}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
