"""The commands of the library itself, as they are where structattn-lab is not installed: argparse reads
them.
"""

import shlex
import subprocess
import sys

import pytest

from structattn.cli import call, commands, main
from structattn.extras import install_lab


@pytest.fixture(autouse=True)
def _without_lab(monkeypatch) -> None:
    monkeypatch.setattr(call, "entry_points", lambda group: [])


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]], ids=str)
def test_the_help_lists_every_command_and_where_the_others_are(words, capsys) -> None:
    if words:
        with pytest.raises(SystemExit, match="0"):
            main(words)
    else:
        assert main(words) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in commands.COMMANDS)
    assert "structattn-lab" in printed


@pytest.mark.parametrize("name", ["info", "specs", "structures"])
def test_listings(name, capsys) -> None:
    assert main([name]) == 0
    expected = {"info": "backends", "specs": "mlr:32|16|8|8", "structures": "kaleidoscope"}
    printed = capsys.readouterr().out
    assert expected[name] in printed
    assert not any(line != line.rstrip() for line in printed.splitlines())


def test_commands_that_write(monkeypatch, capsys) -> None:
    monkeypatch.setattr("structattn.ops.native.library.build_native", lambda: "/a/library.so")
    monkeypatch.setattr("structattn.ops.costs.measure_costs", lambda: "/a/costs.json")
    assert main(["build-native"]) == 0
    assert "built /a/library.so" in capsys.readouterr().out
    assert main(["measure-costs"]) == 0
    assert "wrote /a/costs.json" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["compare", "text"], ["train"], ["inffo"], ["compare", "--help"]], ids=shlex.join)
def test_a_command_of_the_lab_says_what_to_install(words, capsys) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"structattn: unknown command {words[0]!r}")
    assert install_lab() in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info", "--deep"], "unrecognized arguments: --deep; structattn --help"),
        (["info", "more"], "unrecognized arguments: more"),
        (["--deep"], "unrecognized arguments: --deep"),
        (["--traceback"], ""),
    ],
    ids=str,
)
def test_mistakes_are_named_in_one_line(words, message, capsys) -> None:
    status = main(words)
    error = capsys.readouterr().err
    assert status == (2 if message else 0)
    assert message in error
    assert error.count("\n") == (1 if message else 0)


def test_the_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("structattn ")


@pytest.mark.full
def test_no_other_package_is_imported() -> None:
    code = (
        "import sys; from structattn.cli import call, main; call.entry_points = lambda group: []; "
        "from structattn import extensions; extensions.installed = lambda group: {}; "
        "status = main(['specs']) or main(['info']); "
        "heavy = {'tyro', 'tabulate', 'accelerate', 'matplotlib', 'pandas', 'structattn_lab'} & set(sys.modules); "
        "sys.exit(status or (f'imports {heavy}' if heavy else 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
