"""Parse the output of ``lscpu -p`` or ``lscpu -e`` as a topology."""

from __future__ import annotations

from cpulaunch.errors import ConfigError
from cpulaunch.model.topology import Cpu, Topology, renumbered
from cpulaunch.wording import counted

HINT = "record the machine with: lscpu -p=CPU,CORE,SOCKET,NODE,MAXMHZ"
COLUMNS = ("CPU", "CORE", "SOCKET", "NODE")
CACHES = ("L1D", "L1I", "L1", "L2", "L3", "L4")


def topology_from_lscpu(text: str) -> Topology:
    """Parse the output of ``lscpu -p=CPU,CORE,SOCKET,NODE`` (or more columns) or ``lscpu -e``.

    Offline CPUs are omitted.  The topology's notes list missing columns.  Raises `ConfigError` with the
    number of a malformed line.
    """
    heading: list[str] = []
    table: list[tuple[int, dict[str, str]]] = []
    comma = False
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line.startswith("#"):
            columns = [name.strip().upper() for name in line.lstrip("# ").split(",")]
            if "CPU" in columns:
                heading, comma = columns, True
        elif line and not heading and line[0].isdigit() and "," in line:
            heading, comma = list(COLUMNS), True  # lscpu -p=CPU,CORE,SOCKET,NODE without its comments
            table.append((number, _cells(number, line, heading, comma)))
        elif line and not heading:
            heading = line.upper().split()
            if "CPU" not in heading or "CORE" not in heading:
                raise _error(number, f"is not a heading with the columns CPU and CORE: {line!r}", line)
        elif line:
            table.append((number, _cells(number, line, heading, comma)))
    if not table:
        raise ConfigError("no CPUs in the lscpu text", hint=HINT)
    if "CORE" not in heading:
        raise ConfigError(f"the lscpu text has no CORE column, but {', '.join(heading)}", hint=HINT)
    notes = tuple(
        f"the lscpu text has no {name} column: one {kind} is assumed"
        for name, kind in (("SOCKET", "socket"), ("NODE", "NUMA node"))
        if name not in heading
    )
    return Topology(renumbered(_cpus(table)), notes=notes)


def _cells(number: int, line: str, heading: list[str], comma: bool) -> dict[str, str]:
    """The cells of a row by column, without the columns of caches.

    If a CPU lacks a cache, ``lscpu -p`` omits the cell.  Therefore the columns after the caches are counted
    from the right.
    """
    cells = [cell.strip() for cell in line.split(",")] if comma else line.split()
    caches = [i for i, name in enumerate(heading) if name in CACHES] if comma else []
    least = len(heading) - len(caches)
    if not least <= len(cells) <= len(heading):
        columns = f"{len(heading)} columns ({','.join(heading)})"
        raise _error(number, f"has {counted(len(cells), 'value')} for {columns}", line)
    row = dict(zip(heading[: caches[0]] if caches else heading, cells, strict=False))
    behind = heading[caches[-1] + 1 :] if caches else []
    row.update(zip(reversed(behind), reversed(cells), strict=False))
    return {name: "" if cell == "-" else cell for name, cell in row.items()}


def _cpus(table: list[tuple[int, dict[str, str]]]) -> list[Cpu]:
    cores_known = any(row["CORE"] for _, row in table)
    seen: dict[int, int] = {}
    cpus = []
    for number, row in table:
        cpu = _whole(number, row, "CPU")
        if cpu is None:
            raise _error(number, "has no CPU number", "")
        if cpu in seen:
            raise _error(number, f"describes CPU {cpu} again (line {seen[cpu]} did before)", str(cpu))
        seen[cpu] = number
        core = _whole(number, row, "CORE")
        online = row.get("ONLINE", "").lower() not in ("no", "n")
        if not online or (core is None and cores_known):  # Linux has no topology of offline CPUs
            continue
        cpus.append(
            Cpu(
                cpu=cpu,
                core=cpu if core is None else core,
                socket=_whole(number, row, "SOCKET") or 0,
                node=_whole(number, row, "NODE") or 0,
                performance=_megahertz(number, row),
            )
        )
    return cpus


def _whole(number: int, row: dict[str, str], column: str) -> int | None:
    cell = row.get(column, "")
    if not cell:
        return None
    if not (cell.isascii() and cell.isdigit()):
        raise _error(number, f"has {cell!r} where a {column} number belongs", cell)
    return int(cell)


def _megahertz(number: int, row: dict[str, str]) -> float | None:
    cell = row.get("MAXMHZ", "").replace(",", ".")  # some languages write 5100,0000
    try:
        return float(cell) if cell else None
    except ValueError:
        raise _error(number, f"has {cell!r} where MAXMHZ belongs", cell) from None


def _error(number: int, what: str, part: str) -> ConfigError:
    return ConfigError(f"line {number} of the lscpu text {what}", hint=HINT, part=part)
