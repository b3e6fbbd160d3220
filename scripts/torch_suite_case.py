"""The test case of torch_suite.py."""

import multiprocessing
import os

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

_init_process_group = dist.init_process_group


def init_process_group(backend=None, *args, **kwargs):
    """The suite selects its tests by the backend's name, and knows gloo, so ccl runs under that name."""
    return _init_process_group(os.environ["SUITE_BACKEND"] if backend == "gloo" else backend, *args, **kwargs)


dist.init_process_group = init_process_group


class Suite(TestDistBackend, DistributedTest._DistTestBase):
    """The same tests as in pytorch/test/distributed/test_distributed_spawn.py."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)  # spares ranks the import of torch
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()
