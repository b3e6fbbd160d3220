"""The key with which the ranks of a group on several hosts authenticate their connections.

Under ``cpulaunch run``, ranks compute it from the job's secret, which is in their environment, and from
random numbers of all ranks.  So the key is never sent, and differs for each group.  Ranks of other launchers
share no secret: rank 0 generates one, and sends it to the others through the store.
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
    """A rank's data for the others.  Everyone with access to the store can read them."""

    random: str  # hexadecimal digits, different for each group
    job: str  # digest of the job's secret; empty without a job
    secret: str  # from rank 0 if there is no job, else empty


def offer_key(rank: int, environ: Mapping[str, str]) -> KeyOffer:
    """Return the offer of ``rank``, numbered in the group."""
    job_key = environ.get(variables.GROUPS_KEY, "")
    secret = secrets.token_hex(_SIZE) if rank == 0 and not job_key else ""
    return KeyOffer(secrets.token_hex(_SIZE), _name(job_key), secret)


def group_key(offers: Sequence[KeyOffer], numbers: Sequence[int], environ: Mapping[str, str]) -> bytes:
    """Compute the group's key, of 32 bytes, from the offers of all its ranks.

    ``numbers`` are the ranks' numbers in the job.  Raises torch's DistBackendError if a rank has
    another job's secret.
    """
    job_key = environ.get(variables.GROUPS_KEY, "")
    for number, offer in zip(numbers, offers, strict=True):
        if offer.job != _name(job_key):
            raise DistBackendError(
                f"ccl: rank {number} is not of the same job as this rank: its {variables.GROUPS_KEY}, which "
                "`cpulaunch run` sets for all ranks of a job, differs from this rank's"
            )
    return bytes.fromhex(proof(job_key or offers[0].secret, "group", json.dumps(offers), 0))


def _name(job_key: str) -> str:
    return proof(job_key, "name", "", 0)[: 2 * _SIZE] if job_key else ""
