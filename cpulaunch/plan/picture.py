"""Draws a machine and the cores of each rank in text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from cpulaunch.model.cores import CoreSet
from cpulaunch.model.topology import Core, Topology
from cpulaunch.plan.placement import RankPlan
from cpulaunch.wording import counted

BOXES = {True: "┌─┐│└┘·", False: "+-+|++."}
"""Corners, lines, and the sign of an idle core: with Unicode (True), and in ASCII (False)."""

RANK_COLOURS = (34, 32, 35, 36, 33, 31)
IDLE_COLOUR = 90


class Look(NamedTuple):
    """How a picture is drawn; ``colour`` adds ANSI escapes."""

    colour: bool = False
    unicode: bool = True


PLAIN = Look()


def picture(
    topology: Topology,
    ranks: Sequence[RankPlan],
    *,
    width: int = 80,
    look: Look = PLAIN,
    table: bool = True,
    noun: str = "rank",
) -> str:
    """Draw sockets and NUMA nodes as boxes with a cell for each core, a legend, and a table of ranks.

    A core's cell has the number of its local rank.  ``*`` marks a core for communication, ``+`` a core whose
    hyperthread sibling serves communication, and ``&`` a shared core.  Lines have at most ``width`` columns,
    which are at least 40.  ``noun`` is ``rank`` or ``instance``.
    """
    drawing = _Drawing(topology, ranks, max(width, 40), look, noun)
    rows = ["", *drawing.table()] if table else []
    return "\n".join([*drawing.heading(), *drawing.boxes(), *drawing.legend(), *rows])


class _Drawing:
    def __init__(
        self, topology: Topology, ranks: Sequence[RankPlan], width: int, look: Look, noun: str
    ) -> None:
        self.topology = topology
        self.ranks = ranks
        self.width = width
        self.colour = look.colour
        self.signs = signs = BOXES[look.unicode]
        self.noun = noun
        self.dot = "·" if signs[6] == "·" else "-"
        self.digits = len(str(max((rank.local_rank for rank in ranks), default=0)))
        self.computing: dict[int, list[int]] = {}
        self.communicating: dict[int, list[int]] = {}
        for rank in ranks:
            for cpu in rank.cores:
                self.computing.setdefault(cpu, []).append(rank.local_rank)
            for cpu in rank.comm_cores:
                self.communicating.setdefault(cpu, []).append(rank.local_rank)
        self.marks: set[str] = set()
        self.label_width = 2 * len(str(max((core.cpus[0] for core in topology.cores), default=0))) + 1

    def heading(self) -> Iterator[str]:
        cores, cpus = len(self.topology.cores), len(self.topology.cpus)
        parts = [
            counted(len(self.topology.sockets), "socket"),
            counted(len(self.topology.nodes), "NUMA node"),
            counted(cores, "core") + (f" ({cpus} CPUs)" if cpus != cores else ""),
            counted(len(self.ranks), self.noun),
        ]
        if self.topology.quota is not None:
            parts.append(f"CPU quota {self.topology.quota:g}")
        yield from _wrapped(parts, f" {self.dot} ", self.width)

    def boxes(self) -> Iterator[str]:
        for socket in self.topology.sockets:
            inside: list[str] = []
            for node in self.topology.nodes:
                cores = [c for c in self.topology.cores if c.socket == socket and c.node == node]
                if cores:
                    cpus = CoreSet(cpu for core in cores for cpu in core.cpus)
                    parts = [f"NUMA node {node}", counted(len(cores), "core"), f"CPUs {_compact(cpus)}"]
                    rows = list(self.rows(cores, self.width - 8))
                    inside += self.box(f" {self.dot} ".join(parts), rows, self.width - 4)
            yield from self.box(f"socket {socket}", inside, self.width)
        if self.topology.memory_only_nodes:
            yield f"memory only: NUMA nodes {self.topology.memory_only_nodes}"

    def box(self, title: str, lines: Sequence[str], width: int) -> Iterator[str]:
        """Draw ``lines``, which must be ``width - 4`` columns wide, in a box with a title."""
        a, line, b, side, c, d = tuple(self.signs)[:6]
        title = _shortened(title, width - 6)
        yield f"{a}{line} {title} ".ljust(width - 1, line) + b
        for text in lines:
            yield f"{side} {text} {side}"
        yield c + line * (width - 2) + d

    def rows(self, cores: Sequence[Core], width: int) -> Iterator[str]:
        """Draw cells in rows.  The numbers of its first and last CPU precede each row."""
        cell_width = self.digits + 2
        per_row = _per_row(len(cores), (width - self.label_width - 1) // cell_width)
        for start in range(0, len(cores), per_row):
            row = cores[start : start + per_row]
            first, last = row[0].cpus[0], row[-1].cpus[0]
            label = (str(first) if first == last else f"{first}-{last}").rjust(self.label_width)
            rest = " " * (width - self.label_width - 1 - cell_width * len(row))
            yield self.paint(label, IDLE_COLOUR) + " " + "".join(self.cell(core) for core in row) + rest

    def cell(self, core: Core) -> str:
        ranks = sorted({rank for cpu in core.cpus for rank in self.computing.get(cpu, ())})
        workers = sorted({rank for cpu in core.cpus for rank in self.communicating.get(cpu, ())})
        if not ranks and not workers:
            mark = "e" if core.efficient else self.signs[6]
            self.marks.add(mark)
            return self.paint(f"{mark:>{self.digits}}  ", IDLE_COLOUR)
        on_one_cpu = any(cpu in self.computing and cpu in self.communicating for cpu in core.cpus)
        if on_one_cpu or len({*ranks, *workers}) > 1:
            mark = "&"
        elif workers:
            mark = "+" if ranks else "*"
        else:
            mark = " "
        self.marks.add(mark)
        rank = min(ranks + workers)
        text = f"{rank:>{self.digits}}{mark} "
        return self.paint(text, RANK_COLOURS[rank % len(RANK_COLOURS)], strong=mark in "*+")

    def legend(self) -> Iterator[str]:
        meanings = {
            "*": "for communication",
            "+": "communication on its sibling",
            "&": "shared",
            self.signs[6]: "idle",
            "e": "idle E-core",
        }
        parts = [f"{mark} {meaning}" for mark, meaning in meanings.items() if mark in self.marks]
        yield from _wrapped([f"each number is a core's {self.noun}", *parts], ", ", self.width)

    def table(self) -> Iterator[str]:
        """Yield a line for each rank; long lists of cores take several lines."""
        rows = [(self.noun, "threads", "node", "workers", "cores")]
        for rank in self.ranks:
            texts = (rank.local_rank, rank.threads, rank.numa_nodes, rank.comm_cores, rank.cores)
            rows.append((str(texts[0]), str(texts[1]), str(texts[2]), str(texts[3]) or "-", str(texts[4])))
        comm_width = min(max(len(row[3]) for row in rows), self.width // 3)
        node_width = max(len(row[2]) for row in rows)
        for number, threads, node, comm, cores in rows:
            start = f"{number:>{len(self.noun)}}  {threads:>7}  {node:<{node_width}}  "
            comms = list(_wrapped(comm.split(","), ",", comm_width))
            wide = self.width - len(start) - comm_width - 2
            lists = list(_wrapped(cores.split(","), ",", wide))
            for i in range(max(len(comms), len(lists))):
                left = start if i == 0 else " " * len(start)
                middle = comms[i] if i < len(comms) else ""
                yield f"{left}{middle:<{comm_width}}  {lists[i] if i < len(lists) else ''}".rstrip()

    def paint(self, text: str, colour: int, strong: bool = False) -> str:
        return f"\x1b[{'1;7;' if strong else ''}{colour}m{text}\x1b[0m" if self.colour else text


def _per_row(cells: int, fit: int) -> int:
    """Return cells per row, at most ``fit``; rows of equal length if that wastes less than half a row."""
    fit = max(1, min(fit, cells))
    for per_row in range(fit, fit // 2, -1):
        if cells % per_row == 0:
            return per_row
    rows = -(-cells // fit)
    return -(-cells // rows)


def _wrapped(words: Sequence[str], between: str, width: int) -> Iterator[str]:
    """Join words to lines of at most ``width`` columns, with the separator ``between`` them."""
    line = words[0]
    for word in words[1:]:
        if len(line) + len(between) + len(word) + len(between.rstrip()) > width:
            yield line + between.rstrip()
            line = word
        else:
            line += between + word
    yield line


def _compact(cpus: CoreSet) -> str:
    """Return the folded list, or ``0-30:2`` for every second CPU: some firmware numbers sockets in turn."""
    numbers = list(cpus)
    steps = {after - before for before, after in pairwise(numbers)}
    if len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}-{numbers[-1]}:{steps.pop()}"
    return str(cpus)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
