"""Makes all figures and tables of the papers, and docs/figures.md from them: `make figures`.

    .venv/bin/python tools/reproduce/book.py [NAME ...] [--out FOLDER] [--docs FOLDER]

Each is a program beside this one, which can be run alone. Two run at a time, but those that measure
run alone, after the others. With names, only those run; the page is made of all that the folder
holds, once it has every figure.
"""

import concurrent.futures
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_resilient.commands.flag_types import folder
from tools.reproduce.figure import ROOT, Figure, flags

HERE = Path(__file__).resolve().parent
PAPERS = {
    "lazarus": ("Lazarus", "https://arxiv.org/abs/2407.04656"),
    "moc": ("MoC-System", "https://arxiv.org/abs/2408.04307"),
    "fsmoe": ("FSMoE", "https://arxiv.org/abs/2501.10714"),
}
AT_ONCE = 2
HEAD = """\
# Figures and tables of the papers

`make figures` makes this page{where}. Every section is one program of `tools/reproduce/`, which
writes a CSV and a picture, and can be run alone. In the tables *measured* means that real processes
did it on the machine that made this page, *simulated* that an event simulator or random draws did,
*computed* that a formula or an algorithm of this project gives it from its inputs alone, and
*calibrated* that it was made to fit the paper, and so is no result. Where ours differs from the
paper by more than a tenth, the reason stands below the table.

Not here, because they need the papers' clusters or training runs: times on their GPUs, accuracies
on downstream tasks, and what the papers show in bars only, without numbers.
"""


def programs() -> dict[str, list[str]]:
    """Returns names of programs that make a figure, by paper."""
    return {
        paper: sorted(
            path.stem
            for path in HERE.glob(f"{paper}_*.py")
            if "def main(" in path.read_text(encoding="utf-8")
        )
        for paper in PAPERS
    }


def measures(name: str) -> bool:
    """Returns whether a program measures something here."""
    return '"measured"' in (HERE / f"{name}.py").read_text(encoding="utf-8")


def make(name: str, out: Path) -> bool:
    """Runs one program; its output goes to NAME.log; returns whether it succeeded."""
    begin = time.monotonic()
    log = out / f"{name}.log"
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(out)]
        status = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    seconds = time.monotonic() - begin
    print(f"{name:24} {seconds:6.1f} s" + (f"  FAILED: {log}" if status else ""), flush=True)
    return status == 0


def section(figure: Figure) -> str:
    """Returns the text of a figure."""
    lines = [f"### {figure.title}", "", figure.text, ""]
    lines += [f"![{figure.title}](figures/{picture})" for picture in figure.pictures]
    lines += ["", "| | paper | ours | difference | |", "|---|--:|--:|--:|---|"]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in figure.rows]
    reasons = dict.fromkeys(row.why for row in figure.rows if row.why)
    lines += ["", *(f"- {text}" for text in (*reasons, *figure.notes))]
    lines += ["", f"`.venv/bin/python tools/reproduce/{figure.name}.py`", ""]
    return "\n".join(lines)


def page(out: Path, where: str = "") -> str:
    """Returns docs/figures.md, from what the programs wrote.

    Raises:
        FileNotFoundError: a program has not run.
    """
    parts = [HEAD.format(where=where)]
    for paper, names in programs().items():
        title, link = PAPERS[paper]
        parts.append(f"## {title} ([paper]({link}))\n")
        parts += [section(Figure.read(out / f"{name}.json")) for name in names]
    return "\n".join(parts)


def main() -> int:
    """Makes them; status 1 if one fails."""
    parser = flags(__doc__ or "")
    known = [name for names in programs().values() for name in names]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--docs", type=folder, default=ROOT / "docs", help="default: %(default)s")
    args = parser.parse_args()
    if unknown := set(args.names) - set(known):
        parser.error(f"no figure {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    wanted = list(dict.fromkeys(args.names)) or known
    absent = [
        name for name in known if name not in wanted and not (args.out / f"{name}.json").is_file()
    ]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        others = [name for name in wanted if not measures(name)]
        made = list(pool.map(make, others, [args.out] * len(others)))
    made += [make(name, args.out) for name in wanted if measures(name)]
    if not all(made):
        return 1
    if absent:
        print(f"no page: {args.out} has nothing yet of {', '.join(absent)}: make these, too")
        return 0
    minutes = (time.monotonic() - begin) / 60
    text = page(args.out, "" if args.names else f" in {minutes:.0f} minutes on two cores")
    pictures = args.docs / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    drawn = [part for name in known for part in Figure.read(args.out / f"{name}.json").pictures]
    for picture in drawn:
        shutil.copyfile(args.out / picture, pictures / picture)
    for picture in pictures.glob("*.png"):
        if picture.name not in drawn:
            picture.unlink()  # of a program that is no more
    (args.docs / "figures.md").write_text(text, encoding="utf-8")
    print(f"{args.docs / 'figures.md'}: {len(known)} figures, {minutes:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
