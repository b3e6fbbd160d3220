"""Apply the user's changes to a job: a JSON merge patch (RFC 7386), written as YAML.

In addition to RFC 7386, lists of named items, such as containers, are merged by name.  Other lists are
replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cpulaunch.errors import UsageError

LIMIT = 1 << 20
"""The largest size of a patch in bytes."""

HINT = "a patch has the fields of the job to change, as --dry-run prints them"

FIXED = (("apiVersion",), ("metadata", "name"), ("metadata", "namespace"))
"""The fields that identify the job, which a patch must not change."""


class Patch(NamedTuple):
    """The changes to the document of a kind."""

    kind: str
    changes: dict[str, Any]


def read_patch(file: str, kinds: Sequence[str]) -> Patch:
    """Read the patch in ``file`` for a document of one of ``kinds``: the one that it names, else the first.

    Raises UsageError if it can't be read, or changes FIXED fields.
    """
    import yaml  # costs 15 ms

    where = f"--patch {file}"
    try:
        path = Path(file)
        if path.stat().st_size > LIMIT:
            raise UsageError(f"{where}: it has more than {LIMIT >> 20} MiB", hint=HINT)
        patch = yaml.safe_load(path.read_text())
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
        raise UsageError(f"{where}: it is no mapping", hint=HINT)
    for path_to in FIXED:
        if _has(patch, path_to):
            raise UsageError(
                f"{where}: it changes {'.'.join(path_to)}, which identifies the job",
                hint="--job-name and --namespace give it another name",
            )
    if (kind := patch.pop("kind", kinds[0])) not in kinds:
        raise UsageError(f"{where}: the job has no {kind}", hint=f"its kind may be {' or '.join(kinds)}")
    return Patch(kind, patch)


def merged(target: Any, patch: Any) -> Any:
    """Return ``target`` with the changes of ``patch``, in which null removes a field."""
    if isinstance(patch, list) and isinstance(target, list) and patch and _named([*patch, *target]):
        changes = {item["name"]: item for item in patch}
        there = {item["name"] for item in target}
        kept = [merged(item, changes.get(item["name"], {})) for item in target]
        return [*kept, *(merged({}, item) for name, item in changes.items() if name not in there)]
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _named(items: list[Any]) -> bool:
    return all(isinstance(item, Mapping) and isinstance(item.get("name"), str) for item in items)


def _has(patch: Any, path: tuple[str, ...]) -> bool:
    for name in path:
        if not isinstance(patch, Mapping) or name not in patch:
            return False
        patch = patch[name]
    return True
