"""The scripts that complete command lines, run in the shells that are here."""

import shutil
import subprocess

import pytest

from structattn.cli import main
from structattn_lab.cli.commands import COMMANDS

# What is typed, and words among what comes; none: the names of files.
CASES = [
    ("structattn com", ("compare", "completion")),
    ("structattn mup ", ("check", "roles")),
    ("structattn compare fo", ("forecast",)),
    ("structattn compare forecast --preset ", ("demo", "ett")),
    ("structattn train text --set training.learning_r", ("training.learning_rate=",)),
    ("structattn data prepare text --tokens ", ("bytes", "model")),
    ("structattn mup check --qu", ("--quick",)),
    ("structattn generate run --no-", ("--no-cache",)),
    ("structattn bench dec", ("decode",)),
    ("structattn compare ca", ("caches",)),
    ("structattn compare caches --o", ("--out",)),
]
BASH = """
source "$1"
COMP_WORDS=($2)
[[ $2 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
compopt() { :; }
_structattn
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_words_are_completed(shell: str, tmp_path, capsys) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / f"structattn.{shell}"
    script.write_text(capsys.readouterr().out)
    assert all(name.split()[0] in script.read_text() for name in COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    assert subprocess.run([shell, "-n", str(script)], check=False).returncode == 0
    if shell == "zsh":
        return
    for typed, words in CASES:
        program = BASH if shell == "bash" else "source $argv[1]; complete -C $argv[2] | cut -f1"
        zeroth = ["bash"] if shell == "bash" else []
        run = [shell, "-c", program, *zeroth, str(script), typed]
        done = subprocess.run(run, capture_output=True, text=True, check=True)
        assert not done.stderr
        assert set(words) <= set(done.stdout.split()), typed
