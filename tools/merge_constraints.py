"""Merges pip constraint files: of two pins of one package the first named file's counts.

The container build uses it to keep everything that the base image has, and to pin the rest as CI
does: `python merge_constraints.py image.txt constraints.txt > merged.txt`.
"""

import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def merge(*texts: str) -> list[str]:
    """Returns one requirement line per package, sorted by name.

    Args:
        texts: contents of constraint files, the one that wins first.

    Raises:
        packaging.requirements.InvalidRequirement: a line that is no requirement.
    """
    pins: dict[str, str] = {}
    for text in texts:
        for line in text.splitlines():
            line = line.partition("#")[0].strip()
            if line:
                pins.setdefault(canonicalize_name(Requirement(line).name), line)
    return [line for _, line in sorted(pins.items())]


if __name__ == "__main__":
    print("\n".join(merge(*(Path(path).read_text(encoding="utf-8") for path in sys.argv[1:]))))
