"""The address of one upstream name: `package.module:name` or `package.module:Class.name`."""

import re
from dataclasses import dataclass
from typing import Self

from megatron_resilient.errors import PatchError

_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_TARGET = re.compile(rf"({_DOTTED}):({_DOTTED})", re.ASCII)


@dataclass(frozen=True)
class Target:
    """A module and the path of attributes inside it."""

    module: str
    path: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `package.module:Class.name`.

        Raises:
            PatchError: the text has another form.
        """
        match = _TARGET.fullmatch(text)
        if match is None:
            raise PatchError(
                f"malformed target {text!r}: write package.module:name or package.module:Class.name"
            )
        return cls(match[1], tuple(match[2].split(".")))

    @property
    def root(self) -> str:
        """The top-level package."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}:{'.'.join(self.path)}"
