"""The style of the page and of its figures, in a light and a dark theme."""

from __future__ import annotations

from typing import Any

LIGHT = {
    "ink": "#1c2733", "soft": "#5d6b7a", "line": "#e3e8ee", "paper": "#f6f8fa", "card": "#ffffff",
    "good": "#11734b", "bad": "#b42318", "neutral": "#3b5b82", "stall": "#b25e00", "restart": "#6b46c1",
}  # fmt: skip
DARK = {
    "ink": "#e6edf3", "soft": "#93a1b0", "line": "#2b3542", "paper": "#0f151c", "card": "#18212b",
    "good": "#4cc38a", "bad": "#ff7b6b", "neutral": "#8ab4e8", "stall": "#f2a65a", "restart": "#b79cf5",
}  # fmt: skip

SERIES = {
    "light": ["#2f6fde", "#e08a00", "#0f9d77", "#c2467d", "#7a5af0", "#5b7083", "#b5542b", "#3aa0c9"],
    "dark": ["#6ea8ff", "#f5b04d", "#3ecf9f", "#f07fb0", "#a993ff", "#9fb3c8", "#ec9068", "#6fd0f2"],
}
HEAT = {
    "light": ["#eef4fd", "#a9c7f5", "#4c86e0", "#1d4fa8", "#0b2559"],
    "dark": ["#14202e", "#1f4378", "#3a78d0", "#86b8fb", "#f3f8ff"],
}


def _theme(name: str, colours: dict[str, str]) -> dict[str, Any]:
    """Return the configuration of Vega-Lite for a theme."""
    text = {"labelColor": colours["soft"], "titleColor": colours["soft"]}
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None},
        "axis": {
            **text,
            "gridColor": colours["line"],
            "domainColor": colours["line"],
            "tickColor": colours["line"],
            "titleFontWeight": "normal",
            "labelFontSize": 11,
            "titleFontSize": 11,
        },
        "legend": {**text, "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"},
        "line": {"strokeWidth": 1.8, "color": SERIES[name][0]},
        "range": {"category": SERIES[name], "heatmap": HEAT[name]},
        "style": {
            "mark-failure": {"color": colours["bad"]},
            "mark-stall": {"color": colours["stall"], "strokeDash": [5, 3]},
            "mark-restart": {"color": colours["restart"], "strokeDash": [2, 2]},
        },
    }


THEMES = {"light": _theme("light", LIGHT), "dark": _theme("dark", DARK)}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


STYLE = (
    f":root{{color-scheme:light dark;{_variables(LIGHT)}}}"
    f"@media (prefers-color-scheme: dark){{:root{{{_variables(DARK)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 48px}
header{margin-bottom:20px}
h1{font-size:22px;line-height:1.3;margin:2px 0 8px;overflow-wrap:anywhere}
h2{font-size:15px;margin:0 0 4px}
p{margin:0 0 10px;color:var(--soft)}
.job{font-size:13px;margin:0}
.state{display:inline-block;padding:1px 10px;border-radius:99px;border:1px solid currentColor;
 font-weight:600;font-size:13px;margin-right:6px}
.good{color:var(--good)}.bad{color:var(--bad)}.neutral{color:var(--neutral)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(180px,1fr));gap:10px;margin:0 0 16px}
.cards div,section{background:var(--card);border:1px solid var(--line);border-radius:10px}
.cards div{padding:10px 14px}
dt{font-size:12px;color:var(--soft)}
dd{margin:0;font-size:18px;font-weight:600;font-variant-numeric:tabular-nums}
section{padding:16px 18px;margin:0 0 16px}
.figure{width:100%;min-height:60px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid var(--line);vertical-align:top;
 overflow-wrap:anywhere}
th{color:var(--soft);font-weight:500}
.figures td:not(:first-child){font-weight:600}
.findings{margin:4px 0 0;padding-left:20px}
.marks{margin:4px 0 0;padding-left:18px}
.marks .failure b{color:var(--bad)}.marks .stall b{color:var(--stall)}.marks .restart b{color:var(--restart)}
.marks li{white-space:pre-line;overflow-wrap:anywhere}
pre{margin:4px 0 0;font-size:12.5px;line-height:1.45;overflow-x:auto}
.words{white-space:pre-wrap;overflow-wrap:anywhere}
details{margin-top:10px}summary{cursor:pointer;color:var(--soft);font-size:13px}
.empty{padding:10px 0}
footer{color:var(--soft);font-size:12px}
.vega-embed{width:100%}
#vg-tooltip-element{font-family:inherit}
@media print{section,.cards div{break-inside:avoid}}
"""
)

MAX_SVG = 8000
"""Maximum number of values in a figure that is drawn as SVG; larger figures use a canvas."""

SCRIPT = (
    f"const MAX_SVG={MAX_SVG};"
    """
const dark = matchMedia('(prefers-color-scheme: dark)');
async function draw() {
  const name = dark.matches ? 'dark' : 'light';
  for (const [id, spec] of Object.entries(SPECS)) {
    const values = (spec.data && spec.data.values || []).length;
    await vegaEmbed('#' + id, spec, {
      actions: false, config: THEMES[name], renderer: values > MAX_SVG ? 'canvas' : 'svg',
      tooltip: {theme: name}
    });
  }
  document.documentElement.dataset.drawn = name;
}
dark.addEventListener('change', draw);
draw();
"""
)
