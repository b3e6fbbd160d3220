"""Masks secrets in reports, which users share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

MASK = "…"

_NAME = (
    r"[\w.-]*(?:token|secret|password|passwd|passphrase|credential|auth|api[_-]?key|access[_-]?key"
    r"|private[_-]?key)[\w.-]*"
)
"""Matches names of options and variables whose values are secrets."""

_NAMED = re.compile(rf"(?i)\b({_NAME}\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;]+)")
_OPTION = re.compile(rf"(?i)--?{_NAME}")
_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@]+@")
_TOKENS = re.compile(
    r"\b(?:hf|gh[pousr]|github_pat|glpat|sk|pk|rk|xox[abprs]|npm|pypi|AKIA|ASIA|AIza)[-_]?[A-Za-z0-9_-]{16,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|\b(?=[A-Za-z0-9+_-]*\d)(?=[A-Za-z0-9+_-]*[A-Za-z])[A-Za-z0-9+_]{32,}\b"
)
"""Matches tokens of well-known services, JSON web tokens, and 32 or more random characters."""


def masked(text: str) -> str:
    """Mask everything in a text that looks like a secret."""
    text = _URL.sub(rf"\1{MASK}@", text)
    text = _NAMED.sub(rf"\1{MASK}", text)
    return _TOKENS.sub(MASK, text)


def masked_command(words: Sequence[str]) -> str:
    """Quote a command for a shell, with masked secrets."""
    return " ".join(word if MASK in word else shlex.quote(word) for word in masked_words(words))


def masked_words(words: Sequence[str]) -> list[str]:
    """Mask values of options with a secret's name, and words that look like a secret."""
    found: list[str] = []
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        after_option = bool(_OPTION.fullmatch(before))
        found.append(MASK if after_option and not word.startswith("-") else masked(word))
    return found
