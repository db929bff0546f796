"""Matplotlib figures as SVG elements that take their colours and letters from the page."""

import io
import re
import warnings
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Matplotlib wants a colour value, and the page has two of each, for light and dark. So figures are
# drawn in placeholders, which become references to the variables of page.css of the same name.
_NAMES = (
    *("ink", "muted", "grid", "paper"),
    *("blue", "orange", "teal", "red", "violet"),
)
INK = {name: f"#01fe{index:02d}" for index, name in enumerate(_NAMES)}
_VARIABLE = {value: f"var(--{name})" for name, value in INK.items()}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be found, copied and read aloud
    "svg.hashsalt": "megatron_resilient",  # the same events give the same page
    "text.parse_math": False,  # a dollar in the name of a node is a dollar
    "font.size": 8.5,
    "text.color": INK["ink"],
    "axes.edgecolor": INK["muted"],
    "axes.labelcolor": INK["muted"],
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.facecolor": "none",
    "axes.labelsize": 8.0,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "figure.facecolor": "none",
    "grid.color": INK["grid"],
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "patch.linewidth": 0.0,
    "xtick.color": INK["muted"],
    "xtick.major.size": 3.0,
    "xtick.major.width": 0.6,
    "ytick.color": INK["muted"],
    "ytick.major.size": 0.0,
    "hatch.linewidth": 0.6,
}

_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"#([\w.-]+)")


def to_svg(figure: "Figure", name: str, label: str) -> Markup:
    """Returns `figure` as an `<svg>` element for a page.

    Args:
        figure: Drawn with STYLE, in the colours of INK or in ones that suit light and dark.
        name: Prefix of its ids, one of its own in the page.
        label: What the picture shows, for those who do not see it.
    """
    output = io.StringIO()
    with warnings.catch_warnings():
        # The browser draws the letters; it does not matter which ones Matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(
            output, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    root = ElementTree.fromstring(output.getvalue())
    # A style element inside an SVG would hold for the whole page; page.css has its one rule.
    for defs in root.findall(f"{_SVG}defs"):
        for style in defs.findall(f"{_SVG}style"):
            defs.remove(style)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.attrib = dict(_mended(element.attrib, name))
    size = {key: root.attrib.pop(key).removesuffix("pt") for key in ("width", "height")}
    root.attrib = {
        "viewBox": f"0 0 {size['width']} {size['height']}",
        "role": "img",
        "aria-label": label,
    }
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _mended(attributes: dict[str, str], name: str) -> list[tuple[str, str]]:
    mended = []
    for key, value in attributes.items():
        if key == "id":
            value = f"{name}-{value}"
        elif key == _HREF:
            key = "href"
            value = f"#{name}-{value[1:]}" if value.startswith("#") else value
        elif key == "clip-path":
            value = _REFERENCE.sub(rf"#{name}-\1", value)
        elif key == "style":
            value = re.sub(r"font-family: [^;]*;? ?", "", value)
            value = re.sub(r"#01fe\d\d", lambda match: _VARIABLE[match[0]], value)
        mended.append((key, value))
    return mended
