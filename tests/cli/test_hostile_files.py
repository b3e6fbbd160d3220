"""Small files, lists and numbers that would expand hugely are refused quickly, using little memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT, clean_environment

MEMORY = 400 << 20
"""The bytes of address space that a refusal may use.  Python with its imports uses half of them."""


def nested_aliases(inner: str, outer: str) -> str:
    """YAML with forty levels.  Each level refers to the previous level several times."""
    return inner + "".join(outer.format(level=level, before=level - 1) for level in range(1, 40))


BOMB = "mpi:\n  args:\n" + nested_aliases(
    "  - &a0 [x, x]\n", "  - &a{level} [*a{before}, *a{before}, *a{before}]\n"
)
MERGES = "env:\n" + nested_aliases(
    "  M0: &m0 {{X: 1}}\n", "  M{level}: &m{level} {{<<: [*m{before}, *m{before}]}}\n"
)

FILES = {
    "deep.yaml": "ccl: " + "[" * 2000 + "]" * 2000,
    "bomb.yaml": BOMB,
    "merges.yaml": MERGES.replace("{{", "{").replace("}}", "}"),
    "itself.yaml": "mpi: {args: &a [*a]}\n",
    "digits.yaml": "hosts:\n  nproc: " + "1" * 5000,
    "sixties.yaml": "hosts:\n  nproc: 1" + ":59" * 5000,
    "hexadecimal.yaml": "distributed_type: NO\nnum_processes: 0x" + "f" * 5000,
    "no-date.yaml": "distributed_type: NO\nmain_training_function: 2024-02-30\n",
    "deep.json": '{"schema": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "digits.json": '{"schema": ' + "1" * 5000 + "}",
    "squares": "a\nnode[1-99999][1-99999]\n",
    "many": "".join(f"rack{rack}n[1-99999]\n" for rack in range(1000)),
    "brackets": "[1]" * 2000,
    "powers": "[1-99999]" * 2000,
    "pieces": "node[" + "1," * 5_000_000 + "1]\n",
    "empty-lines": "\n" * 16_000_000,
    "a-line": "x" * 1_000_000 + "!",
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run --config-file deep.yaml", "deep.yaml:1: more than 32 levels of nesting"),
        (
            "run --config-file bomb.yaml",
            "bomb.yaml:10: more than 10000 values, with its aliases expanded",
        ),
        ("run --config-file merges.yaml", "more than 10000 values, with its aliases expanded"),
        (
            "run --config-file itself.yaml",
            "itself.yaml:1: not valid YAML: found unconstructable recursive node",
        ),
        ("run --config-file digits.yaml", "digits.yaml:2: '1111"),
        ("run --config-file sixties.yaml", "sixties.yaml:2: the number is too large"),
        ("config import hexadecimal.yaml", "hexadecimal.yaml:2: the number is too large"),
        ("config import no-date.yaml", "no-date.yaml:2: '2024-02-30' is not a valid date or number"),
        ("run --config-file /dev/zero", "/dev/zero: cannot be read: it has more than 1 MiB"),
        ("run --dry-run --facts deep.json", "deep.json: nested too deeply"),
        ("run --dry-run --facts digits.json", "digits.json: not a facts file"),
        ("run --dry-run --facts /dev/zero", "/dev/zero: cannot be read: it has more than 256 MiB"),
        ("run -f squares", "squares:2: 'node[1-99999][1-99999]' expands to more than 100000 hosts"),
        (
            "run --hosts node[1-99999][1-99999]",
            "--hosts: 'node[1-99999][1-99999]' expands to more than 100000 hosts",
        ),
        ("run -f many", "many:2: more than 100000 hosts"),
        ("run -f brackets", "brackets:1: '[1][1]"),
        ("run -f powers", "powers:1: '[1-99999]"),
        ("run -f pieces", "pieces:1: 'node[1,1,1"),
        ("run -f empty-lines", "hostfile empty-lines: names no host"),
        ("run -f a-line", "a-line:1: 'xxxx"),
        (
            "run --hosts node[1-99999]",
            "99999 ranks are wanted: a job may have 65536",
        ),
        (f"run -n {10**23}", "expected a whole number of at least 1, or auto"),
        ("run -f /dev/zero", "/dev/zero: cannot be read: it has more than 16 MiB"),
        ("run -n 1000000000 --oversubscribe", "1000000000 ranks are wanted: a job may have 65536"),
        (f"run --hosts node[1-99] -ppn {'9' * 4299}", "-ppn: '9999"),
        ("run", "$SLURM_TASKS_PER_NODE: 1(x999999),2(x999999) is for 1999998 nodes, but a[1-2] are 2"),
    ],
    ids=lambda v: v[-40:],
)
def test_huge_expansions_are_refused_in_one_line(tmp_path: Path, arguments: str, said: str) -> None:
    for name in FILES.keys() & set(arguments.split()):
        (tmp_path / name).write_text(FILES[name])
    (tmp_path / "train.py").write_text("")
    script = ["train.py"] if arguments.startswith("run") else []
    slurm = {
        "SLURM_JOB_NODELIST": "a[1-2]",
        "SLURM_TASKS_PER_NODE": "1(x999999),2(x999999)",
        "SLURM_NTASKS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", *arguments.split(), *script],
        cwd=tmp_path,
        env=clean_environment(**(slurm if arguments == "run" else {})),
        timeout=TIMEOUT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )
    error, *hints = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert error.startswith("cpulaunch: error: ")
    assert said in error
    assert len(error) < 5000
    assert all(hint.startswith("cpulaunch: hint: ") for hint in hints)
    assert len(hints) < 2
