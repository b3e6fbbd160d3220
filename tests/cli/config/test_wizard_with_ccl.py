"""The wizard's questions if ccl can be used, which the tests simulate.  The answers come from a list."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support.command import needs_two_cores
from support.terminal import question_of

from cpulaunch.cli.config.machine import inspect
from cpulaunch.cli.config.questions import Question
from cpulaunch.cli.config.wizard import Draft, Wizard
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import Table

RANKS, WORKERS, BACKEND = map(question_of, ("hosts.nproc_per_node", "ccl.worker_count", "training.backend"))


class Listed:
    """Gives the listed answer to a question, or the default answer.  An invalid answer fails the test."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.answers, self.asked = answers, list[Question]()

    def ask(self, question: Question) -> Any:
        self.asked.append(question)
        answer = self.answers.get(question.text, question.default)
        valid = [option.value for option in question.options]
        assert answer in valid if valid else question.check(answer) is None
        return answer

    def question(self, text: str) -> Question:
        return next(question for question in self.asked if question.text == text)


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Listed, Draft, str]]:
    """A function that runs the wizard to its end.  ``missing`` says why ccl can't be used, if it can't."""

    def run(
        missing: str | None,
        answers: Mapping[str, str],
        old: Mapping[Setting[Any], Any] = MappingProxyType({}),
    ) -> tuple[Listed, Draft, str]:
        monkeypatch.chdir(tmp_path)
        for module in ("cli.run.facts", "cli.backend"):
            monkeypatch.setattr(f"cpulaunch.{module}.ensure_ccl", lambda *args, **kwargs: missing)
        asker, draft, said = Listed(answers), Draft(tmp_path / "cpulaunch.yaml", dict(old)), list[str]()
        environ = {"PATH": os.environ["PATH"]}
        assert Wizard(inspect(environ), asker, draft, environ, said.append).run()
        return asker, draft, "\n".join(said)

    return run


@needs_two_cores
def test_the_number_of_workers_is_a_question_and_their_cores_are_shown(finished: Callable[..., Any]) -> None:
    asker, draft, said = finished(None, {RANKS: "1", WORKERS: "1"})
    assert draft.values[Table.ccl.worker_count] == 1
    # The wizard doesn't write a number of instances if the user chose none.
    assert Table.instances.count not in draft.values
    assert "planned: ccl, " in said
    assert said.count("each number is a core's rank") == 2, "drawn again, as workers changed the binding"
    assert "* for communication" in said
    wrong = asker.question(WORKERS).check(str(len(os.sched_getaffinity(0)) + 1))
    assert wrong is not None
    assert "no compute core left" in wrong


@needs_two_cores
def test_an_old_answer_that_no_longer_fits_is_replaced_by_the_default(finished: Callable[..., Any]) -> None:
    all_cores = str(len(os.sched_getaffinity(0)))
    old = {Table.ccl.worker_count: 1}
    asker, draft, _ = finished(None, {RANKS: all_cores, WORKERS: "auto"}, old)
    assert draft.values[Table.hosts.nproc_per_node] == int(all_cores)
    asked = asker.question(WORKERS)
    assert asked.default == "auto"
    assert "1 can't be used: " in asked.why


def test_without_ccl_there_is_no_question_about_workers(finished: Callable[..., Any]) -> None:
    asker, draft, said = finished("there is no compiler", {})
    assert Table.ccl.worker_count not in draft.values
    assert "ccl can't be used: there is no compiler" in said
    about = {option.value: option.about for option in asker.question(BACKEND).options}
    assert about["ccl"] == "not usable: there is no compiler"
    assert about["auto"] == "gloo here"
