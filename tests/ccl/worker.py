"""A rank of `ranks.Ranks`: reads calls from stdin, answers on stdout, one JSON document a line."""

import ctypes
import json
import os
import signal
import sys
import traceback

PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(
    PR_SET_PDEATHSIG, signal.SIGKILL
)  # a rank that waits for others doesn't read stdin's end

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import programs  # noqa: E402  (imports torch, which must not write to the answers)
import programs_coalesced  # noqa: E402
import programs_compiled  # noqa: E402
import programs_compressed  # noqa: E402
import programs_mixed  # noqa: E402
import programs_shared  # noqa: E402
import programs_state  # noqa: E402
import programs_store  # noqa: E402
import programs_sums  # noqa: E402
import programs_threads  # noqa: E402
import programs_torch  # noqa: E402

from cpulaunch.agent.program.gloo import let_gloo_finish  # noqa: E402

MODULES = (
    programs_torch, programs_coalesced, programs_compiled, programs_state, programs_store, programs_mixed,
    programs_compressed, programs_shared, programs_sums, programs_threads, programs,
)  # fmt: skip
KNOWN = {name: value for module in MODULES for name, value in vars(module).items()}

if cores := int(os.environ.get("PRETENDED_CORES", "0")):
    first = cores * int(os.environ["RANK"])
    os.sched_getaffinity = lambda _: set(range(first, first + cores))

programs.start()
for line in sys.stdin:
    function, args, kwargs = json.loads(line)
    try:
        answer = {"result": KNOWN[function](*args, **kwargs)}
    except Exception:
        answer = {"error": traceback.format_exc()}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
programs.stop()
let_gloo_finish()  # otherwise, a late thread of gloo aborts the process
