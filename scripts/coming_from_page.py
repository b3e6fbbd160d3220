"""Write docs/coming-from.md from the table of other programs' options.  A test compares the two."""

from __future__ import annotations

import sys
from pathlib import Path

from cpulaunch.cli.habits import DIFFERENT, TABLE, ForHosts, Ignored, Means, Refused
from cpulaunch.config.settings import SETTINGS

PAGE = Path(__file__).parent.parent / "docs" / "coming-from.md"

HEAD = """\
# Coming from torchrun, accelerate, mpirun or ipexrun

Leave out the other launcher and `python`; most options work unchanged:

```
instead of                                          now type
torchrun --nproc-per-node 4 train.py --lr 0.1       cpulaunch run --nproc-per-node 4 train.py --lr 0.1
torchrun --nnodes 2 --node-rank 0 … train.py        cpulaunch run --hosts a,b train.py     (on one host only)
accelerate launch --cpu --num_processes 4 train.py  cpulaunch run --num_processes 4 train.py
mpirun -f hosts -n 8 -genv A 1 python train.py      cpulaunch run -f hosts -n 8 -genv A 1 train.py
```

`cpulaunch config import F -o cpulaunch.yaml` converts accelerate's configuration file
([config.md](config.md#from-accelerate)).

Hyphens and underscores are interchangeable in an option's name, and so are one leading dash and two.
Everything after the script is passed to it, and `-m` may come before other options.
`scripts/coming_from_page.py` generates the tables from `cpulaunch/cli/habits.py`.
"""

PROCESSES = """\
## Scripts that start processes themselves

A script gets `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` as under torchrun, and joins
the other ranks with `init_process_group()`.

- A script that reads its local rank from an argument, as torch.distributed.launch passes it without
  `--use-env`, has to read `LOCAL_RANK` instead.
- A script that reads its rank from an MPI's variables, such as `os.environ["PMI_RANK"]`, needs
  `--launcher mpirun`: cpulaunch itself sets only torchrun's variables.
- [slurm.md](slurm.md#coming-from-an-sbatch-script-for-torchrun-or-accelerate) says what to change in a batch
  script of Slurm.
- `cpulaunch run` within a rank, or under mpirun or srun, is an error: each process would start a job.
- If each of several ranks starts processes by torchrun, `torch.multiprocessing.spawn` or accelerate's
  `notebook_launcher`, each rank trains a separate model, and a message on stderr says so. Start such a script
  with `-n 1`, or let `cpulaunch run -n N` start the processes instead of the script.
"""


def page() -> str:
    """Return the page's text."""
    rows = {kind: [row for row in TABLE if type(row) is kind] for kind in (Means, Ignored, Refused, ForHosts)}
    parts = [HEAD, "## Options that work\n", "| option | from | setting here |\n|---|---|---|"]
    for row in rows[Means]:
        setting = SETTINGS[row.key]
        flags = " ".join(f"`{flag}`" for flag in setting.flags)
        parts.append(f"| {_names(row.names)} | {row.programs} | `{setting.key}`: {flags} |")
    parts.append("| `-x NAME=VALUE` | Open MPI | `env`: `--env` |")
    parts += [
        "",
        "These options have the same name here, but do something else:\n",
        "| option | from | here it |\n|---|---|---|",
    ]
    parts += [f"| `{name}` | {programs} | {what} |" for name, (programs, what) in DIFFERENT.items()]
    parts += [
        "",
        "## Options that are ignored\n",
        "A message names them, with the reason.\n",
        "| option | from | why |\n|---|---|---|",
    ]
    parts += [f"| {_names(row.names)} | {row.programs} | {row.why} |" for row in rows[Ignored]]
    parts += ["", "## Options that are refused\n", "| option | from | why | instead |\n|---|---|---|---|"]
    parts += [
        f"| {_names(row.names)} | {row.programs} | {row.why} | {row.instead} |" for row in rows[Refused]
    ]
    for row in rows[ForHosts]:
        but = f"a value other than {row.only}, or several hosts" if row.only else "several hosts"
        parts.append(f"| {_names(row.names)} with {but} | {row.programs} | {row.why} | {row.instead} |")
    return "\n".join([*parts, "", PROCESSES])


def _names(names: str) -> str:
    return " ".join(f"`{name}`" for name in names.split())


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
