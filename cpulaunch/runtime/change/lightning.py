"""Lightning: Trainer and Fabric train in the planned precision if the script doesn't set one."""

from __future__ import annotations

import functools
from typing import Any

from cpulaunch.runtime.change.base import announce, precision_owners
from cpulaunch.runtime.hooks import Change
from cpulaunch.runtime.settings import TrainingSettings

TRIED = ("2.6.6",)


def _choose_precision(kind: str, flag: str, plugin: str, module: Any, settings: TrainingSettings) -> None:
    """Set ``flag`` of objects of the class ``kind``, unless the script has set a precision or ``plugin``."""
    import torch

    connector = getattr(module, kind)
    original = connector._check_config_and_set_final_flags

    @functools.wraps(original)
    def check(self: Any, *args: Any, precision: Any = None, **kwargs: Any) -> None:
        original(self, *args, precision=precision, **kwargs)
        if _owns not in precision_owners:
            precision_owners.append(_owns)
        named = precision is not None or getattr(self, plugin) is not None
        # FSDP's strategy has a separate parameter for this.
        named = named or getattr(kwargs.get("strategy"), "mixed_precision", None) is not None
        if settings.precision == "bf16" and not named and not torch.cuda.is_available():
            setattr(self, flag, "bf16-mixed")
            announce("Lightning's precision bf16-mixed, because the script names none")

    connector._check_config_and_set_final_flags = check


def _owns(model: Any) -> bool:
    """Return True: Lightning sets the precision of all models of its script."""
    return True


_WHAT = "trains in the planned precision if the script names none"
_WITHOUT = "its models are in the planned bf16, whatever precision the script names"


def _change(kind: str, flag: str, plugin: str) -> Change:
    apply = functools.partial(_choose_precision, kind, flag, plugin)
    return Change((f"{kind}._check_config_and_set_final_flags",), (), _WHAT, _WITHOUT, apply)


OF_FABRIC = (_change("_Connector", "_precision_input", "_precision_instance"),)
OF_TRAINER = (_change("_AcceleratorConnector", "_precision_flag", "_precision_plugin_flag"),)
