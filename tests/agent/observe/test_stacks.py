"""Stacks as py-spy and faulthandler print them."""

from __future__ import annotations

import json

import pytest

from cpulaunch.agent.observe.stacks import MAX_FILE, fit, from_faulthandler, from_py_spy, short_name


@pytest.mark.parametrize(
    ("long", "short"),
    [
        ("c10d::ProcessGroup::wait", "c10d::ProcessGroup::wait"),
        ("std::vector<int, std::allocator<int> >::push_back(int&&)", "std::vector::push_back"),
        ("void at::parallel_for<f(int)::{lambda(long)#1}>(long, long)", "at::parallel_for"),
        ("gloo::transport::(anonymous namespace)::Loop::run() const", "gloo::transport::Loop::run"),
        ("bool operator< <char>(A const&, B const&)", "operator_less"),
        ("foo(int) [clone .cold]", "foo"),
        ("clock_nanosleep", "clock_nanosleep"),
        ("0x7f07be8a71f5", "?"),
    ],
)
def test_names_of_cpp_functions_are_shortened(long: str, short: str) -> None:
    assert short_name(long) == short


def test_stacks_of_py_spy_are_parsed() -> None:
    frame = {"module": None, "is_entry": False}
    said = [
        {
            "os_thread_id": 7,
            "thread_name": None,
            "owns_gil": True,
            "active": False,
            "frames": [
                {**frame, "name": "0x7f07be8a71f5", "filename": "libc.so.6", "line": 0},
                {**frame, "name": "0x7f07be8a71f9", "filename": "libc.so.6", "line": 0},
                {**frame, "name": "<lambda>", "filename": "/" + "d" * 300 + "/t.py", "line": 3},
            ],
        }
    ]
    (thread,) = from_py_spy(json.dumps(said).encode(), 7)
    assert (thread["id"], thread["name"], thread["gil"], thread["idle"]) == (7, "MainThread", True, True)
    assert thread["frames"][0] == ("?", "libc.so.6", 0)
    (name, file, line) = thread["frames"][1]
    assert (name, len(file), line) == ("<lambda>", MAX_FILE, 3)


@pytest.mark.parametrize("text", [b"", b"Error: no", b"{}", b'[{"pid": 1}]', b'["x"]'])
def test_malformed_output_of_py_spy_is_an_error(text: bytes) -> None:
    if text == b"{}":
        assert from_py_spy(text, 1) == []
    else:
        with pytest.raises(ValueError, match="unexpected output of py-spy|Expecting value"):
            from_py_spy(text, 1)


def test_stacks_of_faulthandler_are_parsed() -> None:
    text = (
        "Thread 0x00007f01 [loader] (most recent call first):\n"
        '  File "/a b/t.py", line 3 in inner\n'
        "\n"
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "<string>", line ??? in <module>\n'
    )
    loader, main = from_faulthandler(text)
    assert (loader["name"], loader["frames"]) == ("loader", [("inner", "/a b/t.py", 3)])
    assert (main["name"], main["frames"]) == ("MainThread", [("<module>", "<string>", 0)])


def test_threads_of_cpulaunch_are_left_out() -> None:
    """They are recognized by name or, without names, by function.  A user's thread may call cpulaunch."""
    threading = '  File "/usr/lib/python3.12/threading.py", line 1002 in _bootstrap\n'
    mirror = '  File "/venv/cpulaunch/runtime/observe/mirror.py", line 122 in run\n'
    head = "Thread 0x01 (most recent call first):\n"
    users = mirror + '  File "train.py", line 3 in save\n' + threading
    text = "\n".join(
        head + frames for frames in (mirror + threading, users, '  File "train.py", line 9 in f\n')
    )
    assert [each["frames"][-1][0] for each in from_faulthandler(text)] == ["_bootstrap", "f"]
    said = {"active": False, "owns_gil": False, "frames": []}
    names = ("MainThread", "cpulaunch-ledger", "loader")
    dumped = [{**said, "os_thread_id": number, "thread_name": name} for number, name in enumerate(names)]
    found = from_py_spy(json.dumps(dumped).encode(), 0)
    assert [each["name"] for each in found] == ["MainThread", "loader"]


def test_faulthandlers_last_thread_is_the_main_thread_whatever_its_name() -> None:
    """From Python 3.14 on, its name is the process's.  A dump of more than 100 threads lacks it."""
    text = 'Thread 0x01 [{}] (most recent call first):\n  File "t.py", line 3 in f\n'
    both = text.format("loader") + "\n" + text.format("python")
    assert [each["name"] for each in from_faulthandler(both)] == ["loader", "MainThread"]
    assert [each["name"] for each in from_faulthandler(both + "...\n")] == ["loader", "python"]


def test_long_stacks_are_shortened_to_fit_into_a_message() -> None:
    def thread(name: str, idle: bool) -> dict[str, object]:
        return {
            "id": 1,
            "name": name,
            "gil": False,
            "idle": idle,
            "frames": [(f"f{n}", "x" * 200, n) for n in range(500)],
        }

    threads = [thread(f"t{n}", True) for n in range(300)] + [
        thread("busy", False),
        thread("MainThread", True),
    ]
    (small,) = fit([{"pid": 1, "threads": threads}], 1 << 16)
    assert len(json.dumps(small)) <= 1 << 16
    assert small["threads"][0]["name"] == "MainThread"
    assert small["threads"][1]["name"] == "busy"
    frames = small["threads"][0]["frames"]
    assert (frames[0][0], frames[-1][0]) == ("f0", "f499")
    assert small["threads"][0]["left_out"] == 500 - len(frames)
    assert small["left_out"] == 302 - len(small["threads"])


def test_processes_that_do_not_fit_into_a_message_are_left_out() -> None:
    processes = [{"pid": pid, "threads": [], "file": "\u6587" * 200} for pid in range(100)]
    fitting = fit(processes, 1 << 16)
    assert [each["pid"] for each in fitting] == list(range(len(fitting)))
    assert (1 << 16) - 2000 < len(json.dumps(fitting, separators=(",", ":"))) <= 1 << 16
