"""Loading settings: valid values, precedence, the source of each value, and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpulaunch.config.config import Config
from cpulaunch.config.kinds import Sinks
from cpulaunch.config.load import load
from cpulaunch.config.origin import DEFAULT, Origin, Source
from cpulaunch.config.settings import SETTINGS
from cpulaunch.config.values import HostCount, Interval, StepRange
from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str | bytes, name: str = "cpulaunch.yaml") -> Path:
    path = Path(name)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


class TestPrecedence:
    """Command line > environment > YAML > default."""

    YAML = "ccl:\n  worker_count: 4\n"

    @pytest.mark.parametrize(
        ("given", "environ", "yaml", "value", "origin"),
        [
            ([], {}, "", "auto", "default"),
            ([], {}, YAML, 4, "cpulaunch.yaml:2"),
            ([], {"CCL_WORKER_COUNT": "3"}, YAML, 3, "$CCL_WORKER_COUNT"),
            (
                [],
                {"CCL_WORKER_COUNT": "3", "CPULAUNCH_CCL_WORKER_COUNT": "2"},
                YAML,
                2,
                "$CPULAUNCH_CCL_WORKER_COUNT",
            ),
            (
                [("ccl.worker_count", "1", "--ccl-worker-count")],
                {"CCL_WORKER_COUNT": "3"},
                YAML,
                1,
                "--ccl-worker-count",
            ),
            ([("ccl.worker_count", "1", "--a"), ("ccl.worker_count", "5", "--set")], {}, YAML, 5, "--set"),
            (
                [("env", "CCL_WORKER_COUNT=7", "--env")],
                {"CCL_WORKER_COUNT": "3"},
                YAML,
                7,
                "--env CCL_WORKER_COUNT",
            ),
            ([], {"CCL_WORKER_COUNT": "3"}, "env: {CCL_WORKER_COUNT: 9}\n", 3, "$CCL_WORKER_COUNT"),
            ([], {}, "env: {CCL_WORKER_COUNT: 9}\n", 9, "cpulaunch.yaml:1 CCL_WORKER_COUNT"),
            ([], {"CCL_WORKER_COUNT": ""}, YAML, 4, "cpulaunch.yaml:2"),
        ],
    )
    def test_the_strongest_source_wins_and_is_named(self, given, environ, yaml, value, origin) -> None:
        if yaml:
            write(yaml)
        config = load(given, environ=environ)
        assert (config.ccl.worker_count, str(config.origin(Config.ccl.worker_count))) == (value, origin)

    def test_an_alternative_from_a_weaker_source_does_not_apply(self) -> None:
        write("hosts: {hostfile: four-nodes, nproc_per_node: 2}\n")
        config = load([("hosts.nproc", "6", "-n")], environ={"CPULAUNCH_HOSTS_LIST": "node0,node1"})
        assert (config.hosts.nproc, config.hosts.nproc_per_node) == (6, "auto")
        assert (config.hosts.list, config.hosts.hostfile) == ("node0,node1", "")

    @pytest.mark.parametrize("name", ["-c.yaml", "default"])
    def test_the_source_of_a_value_is_known_whatever_the_files_name(self, name) -> None:
        config = load(file=write(self.YAML, name), environ={"OMP_NUM_THREADS": "5"})
        assert config.origin(Config.ccl.worker_count) == Origin(Source.FILE, f"{name}:2")
        assert config.origin(Config.cpu.threads).source is Source.ENVIRONMENT
        assert config.origin(Config.hosts.nproc) == DEFAULT

    def test_a_merged_value_names_its_strongest_source_and_all_variables(self) -> None:
        write("env: {A: 1}\n")
        config = load([("env", "C=3", "--env")], environ={"CPULAUNCH_ENV": "B=2"})
        origin = config.origin(Config.env)
        assert (origin.source, origin.text) == (
            Source.COMMAND_LINE,
            "cpulaunch.yaml:1, $CPULAUNCH_ENV, --env",
        )
        assert origin.variables == ("CPULAUNCH_ENV",)

    def test_env_is_merged_by_name_but_lists_are_replaced(self) -> None:
        write("env: {A: 1, B: 2}\nmpi: {args: [-x]}\n")
        config = load(
            [("env", "B=3", "--env"), ("env", "C=4", "--env"), ("mpi.args", "-y z", "--mpi-args")], environ={}
        )
        assert config.env == {"A": "1", "B": "3", "C": "4"}
        assert config.mpi.args == ("-y z",)

    def test_a_variable_that_holds_several_values_is_split_as_a_shell_would(self) -> None:
        variables = {
            "CPULAUNCH_ENV": "A=1 B='2 3'",
            "CPULAUNCH_MPI_ARGS": "-y 'z z'",
            "CPULAUNCH_FORWARD": "C D",
        }
        config = load([], environ=variables)
        assert config.env == {"A": "1", "B": "2 3"}
        assert (config.mpi.args, config.forward) == (("-y", "z z"), ("C", "D"))
        with pytest.raises(ConfigError, match=r"\$CPULAUNCH_ENV: 'A=1 B' is not valid for env"):
            load([], environ={"CPULAUNCH_ENV": "A=1 B"})

    @pytest.mark.parametrize(
        ("environ", "file", "worker_count"),
        [
            ({"CPULAUNCH_CONFIG": "named.yaml"}, None, 2),
            ({"CPULAUNCH_CONFIG": "named.yaml"}, "given.yaml", 1),
            ({"XDG_CONFIG_HOME": "xdg"}, None, 3),
            ({"HOME": "home"}, None, 4),
            ({"CPULAUNCH_CONFIG": "named.yaml", "XDG_CONFIG_HOME": "xdg"}, None, 2),
        ],
    )
    def test_the_places_of_the_file_are_searched_in_order(self, environ, file, worker_count) -> None:
        for directory in ("xdg/cpulaunch", "home/.config/cpulaunch"):
            Path(directory).mkdir(parents=True)
        names = (
            "given.yaml",
            "named.yaml",
            "xdg/cpulaunch/config.yaml",
            "home/.config/cpulaunch/config.yaml",
        )
        for number, name in enumerate(names, 1):
            write(f"ccl: {{worker_count: {number}}}", name)
        assert load(file=Path(file) if file else None, environ=environ).ccl.worker_count == worker_count

    def test_the_file_in_this_directory_overrides_the_users_file(self) -> None:
        Path("xdg/cpulaunch").mkdir(parents=True)
        write("ccl: {worker_count: 3}", "xdg/cpulaunch/config.yaml")
        write("ccl: {worker_count: 8}")
        assert load(environ={"XDG_CONFIG_HOME": "xdg"}).ccl.worker_count == 8


BAD_FILES = [
    # the file's text; the position and words in the error message; words in the hint
    (
        "ccl:\n  worker_cout: 1\n",
        "cpulaunch.yaml:2: unknown key 'worker_cout' in 'ccl'; did you mean 'worker_count'?",
        "worker_count",
    ),
    (
        "launcher: local\nhosts:\n  nnodes: many\n",
        "cpulaunch.yaml:3: 'many' is not valid for hosts.nnodes: expected a whole number of at least 1, or MIN:MAX, the smaller one first, or all",
        "",
    ),
    ("hosts:\n  nnodes: 0\n", "cpulaunch.yaml:2: 0 is not valid", ""),
    ("hosts:\n  nnodes: 4:3\n", "cpulaunch.yaml:2: '4:3' is not valid for hosts.nnodes", ""),
    ("hosts:\n  nnodes: all:4\n", "cpulaunch.yaml:2: 'all:4' is not valid for hosts.nnodes", ""),
    ("hosts:\n  nnodes: 1.5\n", "cpulaunch.yaml:2: 1.5 is not valid", ""),
    (
        "training: {precision: yes}\n",
        "cpulaunch.yaml:1: yes is not valid for training.precision: expected one of auto, bf16, fp32",
        "",
    ),
    (
        "output: {tee: 0-}\n",
        "cpulaunch.yaml:1: '0-' is not valid for output.tee: expected all, none, or a list",
        "",
    ),
    ("hosts:\n  nnodes: [1]\n", "cpulaunch.yaml:2: [1] is not valid", ""),
    ("hosts:\n  nnodes:\n", "cpulaunch.yaml:2: an empty value is not valid", ""),
    (
        "cpu: {bind_numa: maybe}\n",
        "cpulaunch.yaml:1: 'maybe' is not valid for cpu.bind_numa: expected true or false",
        "",
    ),
    (
        "launcher: slurn\n",
        "cpulaunch.yaml:1: 'slurn' is not valid for launcher: expected one of auto, local, slurm, ssh, mpirun, or the "
        "name of a plug-in (an entry point of cpulaunch.launchers); installed: none",
        "",
    ),
    (
        "launcher: local\nlauncher: mpirun\n",
        "cpulaunch.yaml:2: 'launcher' is given twice, first at cpulaunch.yaml:1",
        "",
    ),
    ("ccl:\n  transport: ofi\n  transport: mpi\n", "cpulaunch.yaml:3: 'ccl.transport' is given twice", ""),
    ("env:\n  A: 1\n  A: 2\n", "cpulaunch.yaml:3: 'env.A' is given twice", ""),
    ("ccl:\n\tworker_count: 1\n", "cpulaunch.yaml:2: not valid YAML", "spaces"),
    ("ccl: {worker_count: 1\nmpi: x}\n", "cpulaunch.yaml:2: not valid YAML", ""),
    ("", "cpulaunch.yaml: is empty", "cpulaunch config"),
    ("- a\n- b\n", "cpulaunch.yaml:1: expected a mapping such as `key: value`, not a list", ""),
    ("ccl: 3\n", "cpulaunch.yaml:1: 'ccl' is a section: expected a mapping, not '3'", ""),
    (
        "launcher: local\n# a\nenv: {A: \xe9}\n".encode("latin-1"),
        "cpulaunch.yaml:3: byte 0xe9 is not UTF-8",
        "",
    ),
    ('launcher: local\nenv: {A: "\x01"}\n', "cpulaunch.yaml:2: a character that YAML does not allow", ""),
    (
        "cpulaunch: 2\n",
        "cpulaunch.yaml:1: written for schema 2; this cpulaunch knows schema 1",
        "upgrade cpulaunch",
    ),
    ("cpulaunch: one\n", "cpulaunch.yaml:1: 'one' is not a schema", ""),
    ("1: 2\n", "cpulaunch.yaml:1: a key must be text, not 1", ""),
    ("env: {A=B: 1}\n", "cpulaunch.yaml:1: 'A=B' in 'env': expected a name without =", ""),
    ("env:\n  A: 1\n  B:\n", "cpulaunch.yaml:3: 'B' in 'env': expected a name", 'B: "" sets an empty value'),
    ("env: [A=1]\n", "cpulaunch.yaml:1: a value that is not a mapping is not valid for env", ""),
    ("env: A=1\n", "cpulaunch.yaml:1: a value that is not a mapping is not valid for env", ""),
    (
        "hosts: {master_port: 65536}\n",
        "cpulaunch.yaml:1: 65536 is not valid for hosts.master_port: expected a whole number from 1 to 65535, or auto",
        "",
    ),
    ("watch: {grace_period: .nan}\n", "cpulaunch.yaml:1: .nan is not valid", ""),
    ("watch: {grace_period: .inf}\n", "cpulaunch.yaml:1: .inf is not valid", ""),
    ("a: 1\n---\nb: 2\n", "cpulaunch.yaml:2: not valid YAML", ""),
    ("launcher: !!python/name:os.system\n", "cpulaunch.yaml:1: not valid YAML", ""),
]


@pytest.mark.parametrize(("text", "message", "hint"), BAD_FILES, ids=lambda v: repr(v)[:40])
def test_the_error_of_a_bad_file_gives_the_line_and_valid_values(text, message, hint) -> None:
    write(text)
    with pytest.raises(ConfigError) as e:
        load(environ={})
    assert str(e.value).startswith(message)
    assert hint in (e.value.hint or "")
    assert e.value.exit_code == 2


@pytest.mark.parametrize(
    "env", ["{A: hunter2, B: null}", "{A: hunter2, B=C: x}", "{A: [hunter2]}", "[A=hunter2]"]
)
def test_errors_of_variables_do_not_show_values_which_may_be_secret(env) -> None:
    write(f"env: {env}\n")
    with pytest.raises(ConfigError, match="'?env'?: expected") as e:
        load(environ={})
    assert "hunter2" not in str(e.value) + str(e.value.hint)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("cpulaunch: 1\nlauncher: local\n", "launcher", "local"),
        ("hosts: {nnodes: 4}", "hosts.nnodes", HostCount(4, 4)),
        ("hosts: {nnodes: '4'}", "hosts.nnodes", HostCount(4, 4)),
        ("hosts: {nnodes: 3:4}", "hosts.nnodes", HostCount(3, 4)),
        ("hosts: {nnodes: '4:4'}", "hosts.nnodes", HostCount(4, 4)),
        ("cpu: {cores: 0-13}", "cpu.cores", CoreSet(range(14))),
        ("cpu: {cores: 7}", "cpu.cores", CoreSet([7])),
        ("cpu: {numa_nodes: auto}", "cpu.numa_nodes", "auto"),
        ("output: {tee: '0,4-7'}", "output.tee", CoreSet([0, 4, 5, 6, 7])),
        ("output: {tee: none}", "output.tee", "none"),
        ("watch: {profile: 10-14}", "watch.profile", StepRange(10, 14)),
        ("watch: {profile: 2}", "watch.profile", StepRange(2, 2)),
        ("watch: {checkpoint_every: 500}", "watch.checkpoint_every", Interval(500)),
        ("watch: {checkpoint_every: 90s}", "watch.checkpoint_every", Interval(90, "s")),
        ("watch: {telemetry: file}", "watch.telemetry", Sinks()),
        ("watch: {telemetry: 'tensorboard,file'}", "watch.telemetry", Sinks(tensorboard=True)),
        ("cpu: {bind_numa: yes}", "cpu.bind_numa", True),
        ("watch: {grace_period: 2.5}", "watch.grace_period", 2.5),
        ("watch: {grace_period: 3}", "watch.grace_period", 3),
        ("env: {A: 1, B: true, C: 'x y', D: 1.5}", "env", {"A": "1", "B": "true", "C": "x y", "D": "1.5"}),
        ("mpi: {args: [-print-rank-map, 3]}", "mpi.args", ("-print-rank-map", "3")),
        ("ccl:\n#  worker_count: 3\nlauncher: local\n", "ccl.worker_count", "auto"),
        ("\ufefflauncher: local\n", "launcher", "local"),
        ("launcher: local\r\ncpu:\r\n  threads: 2\r\n", "cpu.threads", 2),
    ],
)
def test_a_good_file_is_read(text, key, value) -> None:
    write(text)
    assert load(environ={}).value(SETTINGS[key]) == value


def test_a_missing_file_is_an_error_only_if_the_user_named_it() -> None:
    load(environ={})
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read: No such file"):
        load(file=Path("nowhere.yaml"), environ={})
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read"):
        load(environ={"CPULAUNCH_CONFIG": "nowhere.yaml"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("hosts.nnodes", "１", "--nnodes"), "--nnodes: '１' is not valid"),
        (("hosts.nnodes", "1_0", "--nnodes"), "--nnodes: '1_0' is not valid"),
        (("env", "A", "--env"), "--env: 'A' is not valid for env: expected NAME=VALUE"),
        (("ccl.workers", "1", "--set ccl.workers"), "--set ccl.workers: unknown setting 'ccl.workers'"),
        (("output.log_dir", "", "--log-dir"), "--log-dir: '' is not valid"),
        (("launcher", "slurn", "--launcher"), "--launcher: 'slurn' is not valid for launcher"),
    ],
)
def test_the_error_for_a_bad_value_names_the_command_line_option(given, message) -> None:
    with pytest.raises(ConfigError) as e:
        load([given], environ={})
    assert str(e.value).startswith(message)


def test_an_unknown_variable_with_our_prefix_gives_a_warning() -> None:
    config = load(environ={"CPULAUNCH_CCL_WORKERCOUNT": "1"})
    assert config.warnings == (
        "$CPULAUNCH_CCL_WORKERCOUNT is not a setting of cpulaunch, and is ignored; did you mean 'CPULAUNCH_CCL_WORKER_COUNT'?",
    )


@pytest.mark.parametrize(
    ("told", "setting"),
    [
        ("PRECISION", "TRAINING_PRECISION"),
        ("BACKEND", "TRAINING_BACKEND"),
        ("RANK_CCL_TRANSPORT", "CCL_TRANSPORT"),
    ],
)
def test_variables_for_ranks_are_not_settings_outside_a_job(told: str, setting: str) -> None:
    config = load(environ={f"CPULAUNCH_{told}": "gloo"})
    assert config.warnings == (
        f"$CPULAUNCH_{told} is ignored: cpulaunch sets it for the ranks; the setting is $CPULAUNCH_{setting}",
    )
    assert load(environ={f"CPULAUNCH_{told}": "gloo", "CPULAUNCH_JOB_ID": "1"}).warnings == ()


def test_variables_of_a_job_are_not_settings() -> None:
    assert load(environ={"CPULAUNCH_RANK": "0"}).warnings == ()


def test_no_two_settings_share_a_flag_or_a_variable() -> None:
    flags = [flag for setting in SETTINGS.values() for flag in setting.flags]
    variables = [setting.variable for setting in SETTINGS.values() if setting.variable]
    assert len(flags) == len(set(flags))
    assert len(variables) == len(set(variables))


def test_values_of_env_are_kept_as_written() -> None:
    write("env: {A: 010, B: off, C: 1.10, D: 12:30, E: '', F: 0x10}\n")
    assert load(environ={}).env == {
        "A": "010",
        "B": "off",
        "C": "1.10",
        "D": "12:30",
        "E": "",
        "F": "0x10",
    }


@pytest.mark.parametrize("text", ["output: {log_dir: 2024-02-30}\n", "launcher: !!timestamp x\n"])
def test_the_error_for_a_value_that_yaml_rejects_has_its_line(text: str) -> None:
    write(text)
    with pytest.raises(ConfigError, match=r"^cpulaunch.yaml:1: "):
        load(environ={})


class TestSite:
    """The configuration file of the machine's administrators."""

    @pytest.fixture
    def site(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = tmp_path / "etc" / "config.yaml"
        path.parent.mkdir()
        monkeypatch.setattr("cpulaunch.config.load.SITE", path)
        return path

    def test_the_users_file_overrides_the_sites_file(self, site: Path) -> None:
        site.write_text("ccl:\n  worker_count: 4\n  provider: psm3\n")
        write("ccl:\n  worker_count: 2\n")
        config = load(environ={})
        assert (config.ccl.worker_count, str(config.origin(Config.ccl.worker_count))) == (
            2,
            "cpulaunch.yaml:2",
        )
        assert config.ccl.provider == "psm3"
        assert config.origin(Config.ccl.provider) == Origin(Source.SITE, "etc/config.yaml:3")

    @pytest.mark.parametrize(
        ("given", "environ", "yaml", "who"),
        [
            ([("training.precision", "bf16", "--precision")], {}, "", "--precision"),
            ([], {"CPULAUNCH_TRAINING_PRECISION": "bf16"}, "", "$CPULAUNCH_TRAINING_PRECISION"),
            ([], {}, "training:\n  precision: bf16\n", "cpulaunch.yaml:2"),
        ],
    )
    def test_a_locked_setting_can_not_be_changed(
        self, site: Path, given: list[tuple[str, str, str]], environ: dict[str, str], yaml: str, who: str
    ) -> None:
        site.write_text("training:\n  precision: fp32\nlocked: [training.precision]\n")
        if yaml:
            write(yaml)
        with pytest.raises(ConfigError) as caught:
            load(given, environ=environ)
        assert str(caught.value) == f"{who}: training.precision is locked by etc/config.yaml:3"
        assert caught.value.hint == "leave it out; the site sets it to fp32"

    def test_an_alternative_to_a_locked_setting_is_refused(self, site: Path) -> None:
        site.write_text("hosts: {hostfile: four-nodes}\nlocked: [hosts.hostfile]\n")
        with pytest.raises(ConfigError) as caught:
            load([("hosts.list", "node0", "--hosts")], environ={})
        assert str(caught.value) == "--hosts: hosts.hostfile is locked by etc/config.yaml:2"

    def test_a_locked_setting_without_a_value_stays_at_its_default(self, site: Path) -> None:
        site.write_text("cpulaunch: 1\nlocked: [cpu.lenient]\n")
        assert load(environ={}).cpu.lenient is False
        with pytest.raises(ConfigError, match="locked"):
            load([("cpu.lenient", "1", "--lenient")], environ={})

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("locked: training.precision\n", "expected a list of settings, such as [training.precision]"),
            ("locked: [training.precisoin]\n", "unknown setting 'training.precisoin'; did you mean"),
        ],
    )
    def test_an_error_in_the_file_is_reported_with_its_line(
        self, site: Path, text: str, message: str
    ) -> None:
        site.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(environ={})
        assert str(caught.value).startswith(f"etc/config.yaml:1: {message}")

    def test_only_the_sites_file_can_lock_settings(self) -> None:
        write("locked: [training.precision]\n")
        with pytest.raises(ConfigError, match="unknown key 'locked'"):
            load(environ={})
