"""What the README and the pages of docs/ name is there."""

import argparse
import re
from pathlib import Path

import pytest

from megatron_resilient import config
from megatron_resilient.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_paths_of_the_tree_exist():
    (tree,) = re.findall(r"^## Tree\n\n```\n(.+?)```", README, re.MULTILINE | re.DOTALL)
    top = ROOT
    for line in tree.splitlines():
        names = re.match(r"\s*(\S+(?: \S+)*)", line)[1].split()
        for name in names:
            if line.startswith(" "):
                assert (top / name).exists(), line
            else:
                top = ROOT / name
                assert top.is_dir(), line


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    assert named >= {"demo", "test"}
    assert named <= targets | {"test-fast"}


def test_commands_are_those_of_the_program():
    _, table = README.split("## Commands")
    rows = re.findall(r"^\| `([a-z-]+)", table.partition("\n## ")[0], re.MULTILINE)
    assert set(rows) - {"megatron-resilient"} == set(COMMANDS)
    assert set(re.findall(r"megatron-resilient ([a-z-]+)", README)) <= set(COMMANDS)


def test_flags_and_their_defaults_are_those_of_the_plugin():
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    flags = {option: action for action in parser._actions for option in action.option_strings}
    for page in PAGES:
        named = set(re.findall(r"--resilient-[a-z-]*[a-z]\b", page.read_text(encoding="utf-8")))
        # `--resilient-checkpoint-...` heads a table of all that begin so.
        assert {flag for flag in named if flag != "--resilient-checkpoint"} <= flags.keys(), page
    for flag, default in re.findall(r"^\| `(--resilient-[a-z-]+)` \| `?(\w+)`? \|", README, re.M):
        assert default == str(flags[flag].default)


def test_a_script_of_ones_own_gets_the_lines_of_the_example():
    """Three lines are added, and the example has the same."""
    (diff,) = re.findall(r"```diff\n(.+?)```", README, re.DOTALL)
    added = [line[1:].partition("#")[0].strip() for line in diff.splitlines() if line[0] == "+"]
    example = (ROOT / "examples" / "pretrain_moe.py").read_text(encoding="utf-8")
    marked = [line for line in example.splitlines() if re.search(r"# resilient \d/3", line)]
    assert added == [line.partition("#")[0].strip() for line in marked]
    assert len(added) == 3
