"""Apply the user's changes to a job: a JSON merge patch (RFC 7386) in YAML.

Unlike in RFC 7386, lists of items with names, such as containers, are merged by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cpulaunch.errors import UsageError

HINT = "a patch contains the fields to change; --dry-run prints all fields of the job"

FIXED = (("apiVersion",), ("metadata", "name"), ("metadata", "namespace"))
"""The fields that identify the job.  A patch must not change them."""


class Patch(NamedTuple):
    """Changes to a document."""

    kind: str  # of the document
    changes: dict[str, Any]


def read_patch(file: str, kinds: Sequence[str]) -> Patch:
    """Read the patch in ``file``.  It names one of ``kinds``; the default is the first kind.

    Raises UsageError if the file can't be read, or if the patch changes FIXED fields.
    """
    import yaml  # costs 15 ms

    where = f"--patch {file}"
    try:
        patch = yaml.safe_load(Path(file).read_text())
    except OSError as e:
        raise UsageError(f"{where}: cannot be read: {e.strerror}", hint=HINT) from None
    except UnicodeDecodeError:
        raise UsageError(f"{where}: not UTF-8 text", hint=HINT) from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        why = getattr(e, "problem", None) or e
        raise UsageError(f"{where}{line}: not YAML: {why}", hint=HINT) from None
    if not isinstance(patch, dict):
        raise UsageError(f"{where}: not a mapping", hint=HINT)
    for path_to in FIXED:
        if _has(patch, path_to):
            raise UsageError(
                f"{where}: it changes {'.'.join(path_to)}, which identifies the job",
                hint="use --job-name and --namespace",
            )
    if (kind := patch.pop("kind", kinds[0])) not in kinds:
        raise UsageError(f"{where}: the job has no {kind}", hint=f"valid kinds: {', '.join(kinds)}")
    return Patch(kind, patch)


def merge(target: Any, patch: Any) -> Any:
    """Return ``target`` with the changes of ``patch``.  In the patch, null removes a field."""
    if isinstance(patch, list) and isinstance(target, list) and patch and _named([*patch, *target]):
        changes = {item["name"]: item for item in patch}
        names = {item["name"] for item in target}
        items = [merge(item, changes.get(item["name"], {})) for item in target]
        return [*items, *(merge({}, item) for name, item in changes.items() if name not in names)]
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def _named(items: list[Any]) -> bool:
    return all(isinstance(item, Mapping) and isinstance(item.get("name"), str) for item in items)


def _has(patch: Any, path: tuple[str, ...]) -> bool:
    for name in path:
        if not isinstance(patch, Mapping) or name not in patch:
            return False
        patch = patch[name]
    return True
