"""The documentation: its size, its links, the options that it names, and its terms."""

from __future__ import annotations

import ast
import io
import os
import re
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest
from support.command import REPOSITORY
from test_house import RULES

from cpulaunch.cli.habits import TABLE, Refused
from cpulaunch.cli.main import COMMANDS, main
from cpulaunch.config.settings import SETTINGS
from cpulaunch.queues.slurm.options import OPTIONS

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
TEXTS = [
    *PAGES,
    REPOSITORY / "CHANGELOG.md",
    *sorted((REPOSITORY / "configs").iterdir()),
    *sorted((REPOSITORY / "hostfiles").iterdir()),
    *sorted((REPOSITORY / "examples").glob("*.py")),
]
SUBCOMMANDS = {"config": ("show", "validate", "import"), "hosts": ("check",), "ccl": ("build", "info")}

# Options on the pages that belong to other programs.
FOREIGN_OPTIONS = {
    "--fast",
    "--small",  # of examples/inference
    "--mpirun_hostfile",
    *(name for row in TABLE for name in row.names.split()),
}

# Words that only this project used, each with the field's term for it.
PRIVATE_WORDS = {
    r"keepers?": "agent",
    r"starters?": "launcher",
    r"seat(s|ed|ing)?": "placement",
    r"who sits? where": "placement",
    r"way.out": "egress interface",
    r"wire_here|bind_here": "select_interface, rebind_on_host",
    r"outlook": "preview",
    r"verdict": "failure report",
    r"twins?": "hosts that are alike",
    r"condemn(ed)?": "mark_failed",
    r"HostSum": "ShmAllreduce",
    r"sentinel": "watchdog",
    r"companion": "gloo fallback",
    r"politely|farewell|callers?.nap": "shutdown_timeout, backoff",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.fixture(scope="module")
def options_of() -> dict[str, set[str]]:
    """Return the options in the help of each command and subcommand."""
    found = {}
    for command in COMMANDS:
        for words in ([command], *([command, sub] for sub in SUBCOMMANDS.get(command, ()))):
            with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
                main([*words, "--help"])
            with redirect_stdout(printed), redirect_stderr(io.StringIO()), suppress(SystemExit):
                main([*words, "--help-all"])  # commands that take settings have this option
            found[" ".join(words)] = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", printed.getvalue()))
    found["submit"].update(option.name for option in OPTIONS)
    # No help shows options that are typed by habit.
    found["run"].update(name for row in TABLE if not isinstance(row, Refused) for name in row.spellings)
    return found


def code_of(text: str) -> list[str]:
    """Yield the lines of a page's code blocks, and its code spans."""
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`]+)`", rest)


def options_in(code: str) -> tuple[str, list[str]] | None:
    """Return the command in a line such as ``cpulaunch run -n 2 train.py``, and its own options."""
    typed = re.search(r"(?:^|[\s$])cpulaunch ((?:" + "|".join(COMMANDS) + r")\b.*)", code)
    if not typed:
        return None
    words = re.sub(r"\s#.*", "", typed[1]).split()
    command = " ".join(words[:2]) if words[1:2] and words[1] in SUBCOMMANDS.get(words[0], ()) else words[0]
    script = next((n for n, word in enumerate(words) if word.endswith(".py")), len(words))
    return command, [word.split("=")[0] for word in words[:script] if word.startswith("--")]


def test_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 120


def test_the_plan_in_the_readme_is_its_commands_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    for name in [name for name in os.environ if name.startswith("CPULAUNCH_")]:
        monkeypatch.delenv(name)
    readme = (REPOSITORY / "README.md").read_text()
    block = next(b for b in re.findall(r"^```\n(.*?)^```", readme, re.M | re.S) if "--dry-run" in b)
    command, *shown = block[block.rindex("$ cpulaunch ") :].splitlines()
    assert shown.pop() == "…"
    assert main(command.split()[2:]) == 0
    assert capsys.readouterr().out.splitlines()[: len(shown)] == shown


@pytest.mark.parametrize("page", ["ccl.md", "ccl-transport.md", "ccl-failures.md", "ccl-measured.md"])
def test_paragraphs_of_the_ccl_pages_have_at_most_six_lines(page: str) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", (REPOSITORY / "docs" / page).read_text(), flags=re.M | re.S)
    paragraphs = [p for p in re.split(r"\n\s*\n|\n(?=- )", text) if not p.strip().startswith("|")]
    assert [p for p in paragraphs if len(p.strip().splitlines()) > 6] == []


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CHANGELOG.md"], ids=name_of)
def test_lines_have_at_most_110_characters(page: Path) -> None:
    # Code and tables can't be broken, and may have longer lines.
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    assert [line for line in text.splitlines() if len(line) > 110 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_headings_lead_to_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text())
    assert [
        link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)
    ] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 250


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_that_a_page_names_exist(page: Path, options_of: dict[str, set[str]]) -> None:
    every = set().union(*options_of.values()) | FOREIGN_OPTIONS
    unknown = []
    for code in code_of(page.read_text()):
        if named := options_in(code):
            command, options = named
            unknown += [
                f"cpulaunch {command} {o}" for o in options if o.replace("_", "-") not in options_of[command]
            ]
        elif option := re.match(r"--[a-z][\w-]*", code):
            unknown += [option[0]] if option[0].replace("_", "-") not in every else []
    assert unknown == []


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_texts_use_the_fields_terms(path: Path) -> None:
    # Output of the program and names in code spans are quoted unchanged.
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    found = {word: use for word, use in PRIVATE_WORDS.items() if re.search(rf"\b(?:{word})\b", text, re.I)}
    assert found == {}, "use these words instead"


def test_each_line_on_security_names_existing_tests() -> None:
    rows = re.findall(
        r"^\| (?!attempt |event |---)(.*) \|$", (REPOSITORY / "docs" / "security.md").read_text(), re.M
    )
    assert len(rows) > 20
    missing = []
    for row_of_table in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", row_of_table.rpartition("|")[2])
        missing += [row_of_table] if not named else []
        missing += [f"{file}::{name}" for file, name in named if name not in pytest_names(REPOSITORY / file)]
    assert missing == []


def pytest_names(path: Path) -> set[str]:
    """Yield the names of a file's tests, as pytest takes them: ``test_this``, ``TestThat::test_this``."""
    body = ast.parse(path.read_text()).body if path.is_file() else []
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    groups = [("", body), *((f"{node.name}::", node.body) for node in classes)]
    return {
        prefix + node.name
        for prefix, nodes in groups
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_the_wizards_recordings_are_up_to_date() -> None:
    """If this fails, ``scripts/record_wizard.py docs/wizard.md`` records the wizard again."""
    page = (REPOSITORY / "docs" / "wizard.md").read_text()
    recordings = re.findall(r"^<!-- recording: [\w-]+ -->\n```text\n(.*?)^```", page, re.M | re.S)
    whys = {setting.ask.question: setting.ask.why for setting in SETTINGS.values() if setting.ask}
    shown = [re.findall(r"^\? (.*\?)", recording, re.M) for recording in recordings]
    assert {question for questions in shown for question in questions} == {*whys, "What next?"}
    for recording, questions in zip(recordings, shown, strict=True):
        said = " ".join(recording.split())  # lines are wrapped
        assert [q for q in questions if q in whys and " ".join(whys[q].split()) not in said] == []


def test_the_architecture_page_has_the_rules_of_packages() -> None:
    rows = [
        f"| `{name}` | {', '.join(imports.split()).replace('*', 'everything') or '–'} "
        f"| {', '.join(touches.split()) or '–'} |"
        for name, (imports, touches) in RULES.items()
    ]
    path = REPOSITORY / "docs" / "architecture.md"
    before, head, rest = path.read_text().partition("| module | may import | may touch |\n|---|---|---|\n")
    shown, blank, after = rest.partition("\n\n")
    if os.environ.get("UPDATE_GOLDEN"):
        shown = "\n".join(rows)
        path.write_text(before + head + shown + blank + after)
    assert shown.splitlines() == rows


def test_files_that_the_architecture_page_names_exist() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text().partition("## Where new things plug in")[0]
    files = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|cpp|hpp))`", text))
    roots = (REPOSITORY / "cpulaunch", REPOSITORY)
    assert {file for file in files if not any((root / file).exists() for root in roots)} == set()
