"""The secret key with which ranks on several hosts authenticate each other."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from test_meeting import LIMIT
from torch.distributed import DistBackendError, HashStore

from cpulaunch import variables
from cpulaunch.ccl.key import KeyOffer, group_key, offer_key
from cpulaunch.ccl.meeting import Meeting
from cpulaunch.wire import groups_key

JOB = {variables.GROUPS_KEY: groups_key("0" * 32)}
OTHER_JOB = {variables.GROUPS_KEY: groups_key("1" * 32)}


class Watched:
    """A store whose traffic is recorded."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            answer = getattr(self._store, name)(*arguments)
            self.seen.append(repr((arguments, answer)))
            return answer

        return call


def keys_of(environments: list[dict[str, str]], store: Any) -> list[bytes]:
    """The keys that ranks with these ``environments`` agree on.  Each rank is a thread."""
    numbers = range(len(environments))

    def run(rank: int) -> bytes:
        meeting = Meeting(store, rank, numbers, LIMIT)
        offers = meeting.exchange("address", ("10.0.0.1", 1, offer_key(rank, environments[rank])))
        return group_key([KeyOffer(*each) for *_, each in offers], numbers, environments[rank])

    with ThreadPoolExecutor(len(environments)) as pool:
        return list(pool.map(run, numbers))


@pytest.mark.parametrize("environment", [JOB, {}], ids=["job", "no job"])
def test_ranks_agree_on_a_different_key_for_each_group(environment: dict[str, str]) -> None:
    groups = [keys_of([environment] * 3, HashStore()) for _ in range(2)]
    assert [len(set(keys)) for keys in groups] == [1, 1]
    assert len(groups[0][0]) == 32
    assert groups[0][0] != groups[1][0]


def test_the_secret_of_a_job_is_never_sent() -> None:
    store = Watched(HashStore())
    (key,) = set(keys_of([JOB] * 3, store))
    seen = "\n".join(store.seen)
    assert "10.0.0.1" in seen
    offers = re.findall(r'\["([0-9a-f]+)", "([0-9a-f]*)", "([0-9a-f]*)"\]', seen)
    assert len(offers) >= 3
    assert {secret for *_, secret in offers} == {""}
    for secret in (key.hex(), repr(key), JOB[variables.GROUPS_KEY], "0" * 32):
        assert secret not in seen


def test_two_jobs_with_the_same_offers_have_different_keys() -> None:
    offers = [offer_key(rank, {}) for rank in range(2)]
    keys = set()
    for job in (JOB, OTHER_JOB):
        named = [each._replace(job=offer_key(0, job).job) for each in offers]
        keys.add(group_key(named, range(2), job))
    assert len(keys) == 2


@pytest.mark.parametrize("other", [{}, OTHER_JOB], ids=["without", "of another job"])
def test_a_rank_of_another_job_is_named(other: dict[str, str]) -> None:
    offers = [offer_key(rank, environment) for rank, environment in enumerate((JOB, other))]
    with pytest.raises(
        DistBackendError, match="rank 7 is not of the same job as this rank: its CPULAUNCH_GROUPS_KEY"
    ):
        group_key(offers, (4, 7), JOB)
    with pytest.raises(DistBackendError, match="rank 4 "):
        group_key(offers, (4, 7), other)
