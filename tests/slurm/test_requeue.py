"""Time limits and preemption: a job saves, is requeued, and goes on to the same end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.command import REPOSITORY, clean_environment
from support.namespaces import until
from support.slurm import Queue

from slurm.conftest import CPULAUNCH

pytestmark = pytest.mark.slow

PAGE = REPOSITORY / "docs" / "slurm.md"
TIMEOUT = 120.0
STEPS = 200


def script_of_the_page() -> str:
    """The batch script of the page that requeues itself."""
    scripts = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (found,) = (script for script in scripts if "scontrol requeue" in script)
    return found


def test_a_job_at_its_time_limit_is_requeued_and_goes_on(queue: Queue, tmp_path: Path) -> None:
    """The page's own script.  The signal is the one of --signal, sent by hand, as no limit is under a minute."""
    pytest.importorskip("sklearn")
    example = REPOSITORY / "examples" / "checkpoint.py"
    ours = f"{' '.join(CPULAUNCH)} run --launcher slurm --threads 1 --checkpoint-every 10"
    text = script_of_the_page().replace("cpulaunch run", ours)
    assert "train.py" in text
    (tmp_path / "job.sh").write_text(text.replace("train.py", f"{example} --steps {STEPS}"))
    environ = clean_environment(LC_ALL="C.UTF-8", **queue.environment)
    options = ["--nodes=2", "--time=10", "--output=out", "--error=err"]
    done = queue.run("login", ["sbatch", "--parsable", *options, "job.sh"], directory=tmp_path, env=environ)
    job = done.stdout.strip()
    assert job.isdecimal(), done.stderr

    def printed() -> str:
        return (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""

    until(lambda: "step 50:" in printed() or not queue.jobs(), "the first steps", TIMEOUT)
    queue.slurm("scancel", "--batch", "--signal=TERM", job)
    until(lambda: not queue.jobs(), "the job's end", TIMEOUT)
    errors = (tmp_path / "err").read_text()
    assert f"step {STEPS}:" in printed(), errors
    assert "weights " in printed(), errors
    assert re.search(r"resum", errors + printed()), errors
    assert printed().count("step 50:") == 1, printed()
