"""The wizard's questions, and the terminal that asks them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cpulaunch.cli.terminal import has_unicode, width

Check = Callable[[str], "str | None"]
"""Function that returns the error in a typed answer, or None."""


class BackError(Exception):
    """Raised when the user wants to go back to the previous question."""


@dataclass(frozen=True)
class Option:
    """An answer to choose; ``about`` describes it in a few words."""

    value: Any
    label: str
    about: str = ""


@dataclass(frozen=True)
class Question:
    """A question.  The user chooses one of the ``options`` or, without options, types the answer.

    ``default``: the value of an option, or the answer for Enter.  ``live``: run ``check`` at each key.
    """

    text: str
    why: str = ""
    default: Any = ""
    options: Sequence[Option] = ()
    check: Check = lambda text: None
    live: bool = False


class Asker(Protocol):
    """Asks questions, on a terminal or in a test."""

    def ask(self, question: Question) -> Any:
        """Return the value of the chosen option, or the typed text.

        Raises BackError to go back, and KeyboardInterrupt or EOFError to exit.
        """


class Terminal:
    """Asks on the terminal, by stdin and stderr.  Importing questionary takes 0.3 s, so it is delayed."""

    def __init__(self) -> None:
        self._pointer = "»" if has_unicode() else ">"

    def ask(self, question: Question) -> Any:
        from prompt_toolkit.application import create_app_session
        from prompt_toolkit.output import create_output

        _show(question.why)
        while True:
            with create_app_session(output=create_output(stdout=sys.stderr)):
                prompt = self._choice(question) if question.options else self._text(question)
                answer = self._run(prompt, is_menu=bool(question.options))
            if question.options or not (wrong := question.check(answer.strip() or question.default)):
                break
            _show(f"{answer.strip()}: {wrong}")
        if question.options:
            shown = next(option.label for option in question.options if option.value == answer)
        else:
            answer = answer.strip() or question.default
            shown = answer
        print(f"? {question.text} {shown}\n", file=sys.stderr, flush=True)
        return answer

    def _choice(self, question: Question) -> Any:
        import questionary

        room = max(len(option.label) for option in question.options)
        choices = []
        for option in question.options:
            title = f"{option.label:{room}}  {option.about}" if option.about else option.label
            choices.append(questionary.Choice(_cut(title, width() - 4), value=option.value))
        chosen = next((c for c in choices if c.value == question.default), choices[0])
        return questionary.select(question.text, choices, default=chosen, pointer=self._pointer,
                                  instruction="(arrow keys, Enter; Esc: back)")  # fmt: skip

    def _text(self, question: Question) -> Any:
        import questionary

        def valid(text: str) -> bool | str:
            return question.check(text.strip()) or True if text.strip() else True

        default = f"[{question.default}]" if question.default else None
        checking: dict[str, Any] = {"validate": valid, "validate_while_typing": True} if question.live else {}
        return questionary.text(question.text, instruction=default, **checking)

    def _run(self, prompt: Any, *, is_menu: bool) -> Any:
        """Show a prompt of questionary until it is answered, then erase it."""
        from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings

        keys = KeyBindings()

        @keys.add("escape", eager=True)
        def back(event: Any) -> None:
            event.app.exit(exception=BackError())

        if is_menu:  # a line of text does this by itself if it is empty

            @keys.add("c-d", eager=True)
            def leave(event: Any) -> None:
                event.app.exit(exception=EOFError())

        app = prompt.application
        app.key_bindings = merge_key_bindings([app.key_bindings, keys])
        app.erase_when_done = True
        app.ttimeoutlen = 0.1  # seconds to wait for the rest of an escape sequence
        return prompt.unsafe_ask()


def _show(text: str) -> None:
    for line in textwrap.wrap(text, width() - 2):
        print(f"  {line}", file=sys.stderr, flush=True)


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 3] + "..."
