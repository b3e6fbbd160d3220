"""Runs an example of inference that computes only in its launcher's turns; inference.py starts it.

    python inference_program.py EXAMPLE [its options]

Environment variables have the directory of the turns, this launcher's number, and the number of launchers
(see `Turns`).  The example first measures itself as usual.  Then it computes batches in its launcher's
turns, and writes a line for each turn to a file in the directory: the turn, and the seconds of each batch.
"""

from __future__ import annotations

import json
import mmap
import os
import runpy
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

DIRECTORY, NUMBER, LAUNCHERS = "INFERENCE_TURNS", "INFERENCE_NUMBER", "INFERENCE_LAUNCHERS"
"""Variables of the environment."""

PAUSE, END = -1, -2
"""In place of a turn: nobody computes; all programs end."""

POLL = 0.002  # seconds


class Turns:
    """A number in a shared file: turn T belongs to launcher T modulo the number of launchers."""

    def __init__(self, directory: Path, *, create: bool = False) -> None:
        path = directory / "turn"
        if create:
            path.write_bytes(struct.pack("q", PAUSE))
        with path.open("r+b") as file:
            self._number = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    @property
    def now(self) -> int:
        return self._number[0]

    @now.setter
    def now(self, turn: int) -> None:
        self._number[0] = turn

    def own(self, number: int, launchers: int) -> Iterator[int]:
        """Yield this launcher's turns when they begin."""
        while (turn := self.now) != END:
            if turn >= 0 and turn % launchers == number:
                yield turn
                while self.now == turn:
                    time.sleep(POLL)
            else:
                time.sleep(POLL)


def main() -> None:
    directory, number, launchers = Path(os.environ[DIRECTORY]), os.environ[NUMBER], os.environ[LAUNCHERS]
    turns = Turns(directory)
    example = Path(sys.argv.pop(1))
    sys.path.insert(0, str(example.parent))
    import torch
    import ways

    measure = ways.measure

    def measure_in_turns(run: Callable[..., Any], batches: Sequence[Any], *judged: Any) -> float:
        found: float = measure(run, batches, *judged)
        with torch.inference_mode(), (directory / f"{number}.{os.getpid()}").open("w", buffering=1) as file:
            print("ready", file=file)
            inputs = cycle(inputs for inputs, _ in batches)
            for turn in turns.own(int(number), int(launchers)):
                seconds = []
                while turns.now == turn:
                    began = time.perf_counter()
                    run(*next(inputs))
                    seconds.append(time.perf_counter() - began)
                print(json.dumps([turn, seconds]), file=file)
        return found

    ways.measure = measure_in_turns
    runpy.run_path(str(example), run_name="__main__")


if __name__ == "__main__":
    main()
