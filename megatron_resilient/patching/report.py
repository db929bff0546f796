"""How drift is shown: diffs of installed upstream code against patches.lock, or against a copy."""

import difflib
from collections.abc import Iterable, Sequence

from megatron_resilient.errors import PatchError
from megatron_resilient.patching.fingerprint import fingerprint
from megatron_resilient.patching.lock import RELOCK
from megatron_resilient.patching.source import Definition, SourceTree, first_line
from megatron_resilient.patching.target import Target
from megatron_resilient.patching.verify import Finding

_CONTEXT = 3


def drift_message(findings: Sequence[Finding]) -> str:
    """Returns the text of a `PatchDriftError`: what drifted, how, and what to do."""
    names = ",".join(finding.name for finding in findings)
    parts = ["upstream code is not the code that was locked; nothing was patched"]
    for finding in findings:
        parts.append(summary(finding))
        parts += [diff(finding)] if has_diff(finding) else []
    parts.append(
        f"Review each change, adapt the patch, then run `{RELOCK}`; or, at your own risk, set "
        f"MEGATRON_RESILIENT_ALLOW_DRIFT={names}"
    )
    return "\n".join(part.rstrip("\n") for part in parts)


def summary(finding: Finding) -> str:
    """Returns one line: name, target, state, detail."""
    target = finding.subject.target
    name = target if finding.name == target else f"{finding.name} ({target})"
    return f"{name}: {finding.state}" + (f": {finding.detail}" if finding.detail else "")


def has_diff(finding: Finding) -> bool:
    """Whether there is changed code to show."""
    return (
        finding.locked is not None
        and finding.locked.source is not None
        and finding.fingerprint is not None
        and finding.locked.source.tokens != finding.fingerprint.tokens
    )


def diff(finding: Finding) -> str:
    """Returns a unified diff from the locked to the installed code, by logical lines.

    The lock holds no upstream text, so removed lines show only where they stood.
    """
    locked, now, definition = finding.locked, finding.fingerprint, finding.definition
    if locked is None or locked.source is None or now is None or definition is None:
        raise PatchError(f"{finding.name} has no code to compare: {finding.detail}")
    numbers = locked.source.line_numbers
    text = definition.module.lines
    matcher = difflib.SequenceMatcher(
        None, locked.source.line_hashes, [line.hash for line in now.lines], autojunk=False
    )
    output = [
        f"--- {locked.source.file} ({locked.upstream} {locked.version})",
        f"+++ {definition.module.relative_file} ({locked.upstream} {finding.version})",
    ]
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        old = numbers[group[0][1] : group[-1][2]] or [locked.source.line]
        new = now.lines[group[0][3] : group[-1][4]]
        output.append(
            f"@@ from line {old[0]} in {locked.version}, "
            f"from line {new[0].first if new else definition.first_line} now @@"
        )
        for tag, old_start, old_end, new_start, new_end in group:
            if tag != "equal":
                output += (
                    f"- <line {number} of {locked.upstream} {locked.version}, text not stored>"
                    for number in numbers[old_start:old_end]
                )
            mark = " " if tag == "equal" else "+"
            for line in now.lines[new_start:new_end]:
                output += (
                    f"{mark} {row.rstrip()}".rstrip() for row in text[line.first - 1 : line.last]
                )
    return "\n".join(output) + "\n"


def full_diff(finding: Finding, against: SourceTree) -> str:
    """Returns a unified text diff from an unpacked copy of the locked version to what is installed.

    Raises:
        PatchError: the copy lacks the name, or is not the locked version.
    """
    target, locked = finding.subject.target, finding.locked
    if locked is None or locked.source is None:
        raise PatchError(f"{target} has no locked code to compare: {finding.detail or 'a builtin'}")
    old = against.definition(Target.parse(target))
    if old is None:
        raise PatchError(f"the given directory does not hold {target}")
    if fingerprint(old).tokens != locked.source.tokens:
        raise PatchError(
            f"{target} in the given directory is not the locked code of "
            f"{locked.upstream} {locked.version}"
        )
    new = finding.definition
    return "".join(
        difflib.unified_diff(
            list(_text(old)),
            list(_text(new)) if new is not None else [],
            f"{old.module.relative_file} ({locked.upstream} {locked.version})",
            f"{new.module.relative_file if new else 'missing'} "
            f"({locked.upstream} {finding.version})",
        )
    )


def _text(definition: Definition) -> Iterable[str]:
    for statement in definition.statements:
        yield from definition.module.lines[first_line(statement) - 1 : statement.end_lineno]
