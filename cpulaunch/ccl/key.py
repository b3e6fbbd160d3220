"""The secret by which the ranks of a group on several hosts authenticate each other's connections.

Under `cpulaunch run` it is computed from a secret of the job, which ranks have in their environment, and from
random numbers of all ranks.  So it is never sent, and differs for each group. Ranks of other launchers share
no secret before they meet: rank 0 generates one, and the store passes it to the others.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.distributed import DistBackendError

from cpulaunch import variables
from cpulaunch.wire import proof

_SIZE = 16  # bytes


class KeyOffer(NamedTuple):
    """A rank's data for the others, readable by everyone with access to the store."""

    made_up: str  # at random, for this group
    job: str  # which job's secret it has; "" for none
    secret: str  # rank 0's, where there is no job


def offer_key(rank: int, environ: Mapping[str, str]) -> KeyOffer:
    """Return this rank's offer; ``rank`` is its number in the group."""
    job_key = environ.get(variables.GROUPS_KEY, "")
    secret = secrets.token_hex(_SIZE) if rank == 0 and not job_key else ""
    return KeyOffer(secrets.token_hex(_SIZE), _name(job_key), secret)


def group_key(offers: Sequence[KeyOffer], numbers: Sequence[int], environ: Mapping[str, str]) -> bytes:
    """Return the group's key, of 32 bytes, from the offers of all its ranks.

    ``numbers`` are the ranks' numbers in the job.  Raises torch's DistBackendError if another rank does not
    have the same secret of the job.
    """
    job_key = environ.get(variables.GROUPS_KEY, "")
    for number, offer in zip(numbers, offers, strict=True):
        if offer.job != _name(job_key):
            raise DistBackendError(
                f"ccl: rank {number} was not started with this one: its {variables.GROUPS_KEY}, which "
                "`cpulaunch run` sets for all ranks of a job, differs from this rank's"
            )
    return bytes.fromhex(proof(job_key or offers[0].secret, "group", json.dumps(offers), 0))


def _name(job_key: str) -> str:
    return proof(job_key, "name", "", 0)[: 2 * _SIZE] if job_key else ""
