"""Vega's program, to be put into a page: the package vl-convert-python brings it."""

from __future__ import annotations

from cpulaunch.errors import UsageError


def vega_bundle() -> str:
    """JavaScript that defines ``vegaEmbed``.  UsageError where it isn't installed."""
    try:
        import vl_convert
    except ImportError:
        hint = "pip install vl-convert-python"
        raise UsageError("a report takes the package vl-convert-python", hint=hint) from None
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle
