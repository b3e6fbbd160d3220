"""Options of ``cpulaunch run`` that came after the script, which doesn't know them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_COMPLAINS = re.compile(
    r"unrecogni[sz]ed (?:arguments?|options?)|unknown (?:command line flag|options?|arguments?)"
    r"|no such option|option .* not recognized|could not consume arg|not used by the HfArgumentParser",
    re.IGNORECASE,
)
"""argparse, jsonargparse, tyro; click, typer, optparse; absl; getopt; fire; transformers."""


def complained_of(last_output: bytes, options: Sequence[str]) -> list[str]:
    """Those of ``options`` that the last output of a script says it doesn't know."""
    lines = [line for line in last_output.decode(errors="replace").splitlines() if _COMPLAINS.search(line)]
    return [option for option in options if any(_names(line, option) for line in lines)]


def went_astray(options: Sequence[str]) -> str:
    """What became of them."""
    got = "it" if len(options) == 1 else "them"
    came = f"{', '.join(options)} came after the script, so the script got {got}"
    return f"{came}: options of cpulaunch run come before the script"


def _names(line: str, option: str) -> bool:
    """With its dashes, or as absl and getopt do without them."""
    bare = re.escape(option.lstrip("-"))
    return bool(re.search(rf"(?<![\w-])--{bare}(?![\w-])|(?:flag '|option --?){bare}(?![\w-])", line))
