"""``cpulaunch ccl``: builds the process group and the kernels, or shows their state."""

from __future__ import annotations

from pathlib import Path

from cpulaunch.cli.backend import ccl_lines
from cpulaunch.cli.main import say
from cpulaunch.cli.options import Parser, add_settings, check_subcommand, load_config

USAGE = """cpulaunch ccl build [--oneccl] [--wheel DIR] [--force]   compile for the installed torch
       cpulaunch ccl info                                       show what is built, and what ranks load"""

EPILOG = """\
examples:
  cpulaunch ccl build                 once per machine, or per shared home directory
  cpulaunch ccl build --oneccl        also build the module for --ccl-transport oneccl and mpi
  cpulaunch ccl build --wheel .       write a wheel, for nodes without a compiler or network
"""


def main(arguments: list[str]) -> int:
    commands = {"build": _build, "info": _info}
    if arguments[:1] in (["-h"], ["--help"]):
        Parser("cpulaunch ccl", "Build the process group ccl, or show its state.", EPILOG, USAGE).print_help()
        return 0
    check_subcommand("ccl", arguments, [*commands])
    return commands[arguments[0]](arguments[1:])


def _build(arguments: list[str]) -> int:
    parser = Parser(
        "cpulaunch ccl build",
        "Compile the process group ccl, and the kernels of --engine native, for the installed torch.",
        EPILOG,
    )
    parser.add_argument(
        "--oneccl",
        action="store_true",
        help="also build the module with oneCCL; the first build downloads oneCCL",
    )
    parser.add_argument("--wheel", type=Path, metavar="DIR", help="also write a wheel into DIR")
    parser.add_argument("--force", action="store_true", help="compile even if it is already built")
    options = parser.parse(arguments)
    from cpulaunch.ccl.build import build, build_kernels
    from cpulaunch.cli.progress import BuildProgress

    with BuildProgress() as progress:
        built = build(progress, force=options.force, oneccl=options.oneccl)
    say(f"ccl is built for torch {built.torch}: {built.layer.directory}")
    with BuildProgress("kernels") as progress:
        kernels = build_kernels(progress, force=options.force)
    say(f"the kernels are built for torch {kernels.torch}: {kernels.directory}")
    if options.wheel is not None:
        from cpulaunch.ccl.wheel import write_wheel

        print(write_wheel([*built.parts, kernels], options.wheel))
    return 0


def _info(arguments: list[str]) -> int:
    what = "Show what is built, what ranks would load, and why."
    parser = Parser("cpulaunch ccl info", what, EPILOG, "cpulaunch ccl info [OPTIONS]")
    add_settings(parser, ("ccl",))
    config = load_config(parser.parse(arguments))
    for label, text in ccl_lines(config.ccl.binding):
        print(f"{label:16} {text}")
    return 0
