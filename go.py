"""Firth in one command, from a bare checkout: a private environment is made beside this file on the first run.

python3 go.py quickstart      the whole way, from text to a model and a report
python3 go.py test            format, lint, types and tests (more words are passed to pytest)
python3 go.py VERB ...        any other verb of firth; `python3 go.py --help` lists them
"""

import sys

# This file must parse on old Pythons, so that they can be told what is wrong.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("Firth needs Python 3.11 or newer; this is %d.%d (%s)." % (sys.version_info[:2] + (sys.executable,)))  # noqa: UP031, RUF005

import hashlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
STAMP = VENV / "firth-installed"  # written last: without the right words in it, the install is done again
UNFINISHED = "unfinished"
INTERRUPTED = 130  # the exit code after Ctrl-C


def say(message: str) -> None:
    print(f"go.py: {message}", file=sys.stderr, flush=True)


def run(*command: object, cwd: "Path | None" = None) -> int:
    """Run a command to its end and give its exit code as a shell would.

    Ctrl-C reaches the command too: it may tidy up before it ends, and the code is then 130.
    """
    process = subprocess.Popen([str(word) for word in command], cwd=cwd)
    interrupted = False
    while True:
        try:
            code = process.wait()
            return INTERRUPTED if interrupted else code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            interrupted = True


def run_or_exit(what: str, *command: object) -> None:
    """Run a step that the rest depends on."""
    code = run(*command)
    if code:
        say(f"{what} failed (exit code {code}); what went wrong is written above.")
        sys.exit(code)


def digest(extras: str) -> str:
    """Everything an install depends on, in one word."""
    parts = [f"{sys.version_info[0]}.{sys.version_info[1]}", str(ROOT), extras]
    parts += [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def installed(extras: str) -> bool:
    """Whether the environment holds what is asked for; one with the tools of developers also serves those without."""
    stamp = STAMP.read_text(encoding="utf-8").strip() if STAMP.is_file() else ""
    return stamp in {digest(extras), digest("[dev]")}


def usable() -> bool:
    """Whether there is an environment of this version of Python, with pip."""
    version = sys.version_info[:2]
    check = f"import sys, pip; sys.exit(sys.version_info[:2] != {version!r})"
    try:
        return subprocess.call([str(PYTHON), "-c", check], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def make_venv() -> None:
    """A new environment; an old one is thrown away only if this program made it."""
    if any(importlib.util.find_spec(module) is None for module in ("venv", "ensurepip")):
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        say(f"{sys.executable} has no venv or no ensurepip. On Debian or Ubuntu: sudo apt install {package}")
        sys.exit(1)
    if VENV.exists():
        if not STAMP.is_file():
            say(f"{VENV} is not usable with {sys.executable}, and was not made by go.py. Move it away and try again.")
            sys.exit(1)
        shutil.rmtree(VENV)
    VENV.mkdir()
    STAMP.write_text(UNFINISHED, encoding="utf-8")
    run_or_exit("making .venv", sys.executable, "-m", "venv", VENV)


def install(extras: str) -> None:
    """Bring the environment to what `extras` asks for; does nothing when it is there already."""
    if installed(extras):
        return
    say(f"installing firth{extras} into {VENV} (once; some minutes, PyTorch is large)")
    if not usable():
        make_venv()
    STAMP.write_text(UNFINISHED, encoding="utf-8")
    pip = [PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input"]
    run_or_exit("pip", *pip, "-c", ROOT / "constraints.txt", "-e", f"{ROOT}{extras}")
    STAMP.write_text(digest(extras), encoding="utf-8")


def test(pytest_args: "list[str]") -> int:
    """Every check, each by its name; the code of the first that failed."""
    install("[dev]")
    steps = [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["pytest", "-n", "2", *pytest_args],
    ]
    failed = {}
    for step in steps:
        name = " ".join(step)
        say(name)
        code = run(PYTHON, "-m", *step, cwd=ROOT)
        if code == INTERRUPTED:
            return code
        if code:
            failed[name] = code
    say("failed: " + ", ".join(failed) if failed else "all checks passed")
    return next(iter(failed.values()), 0)


def verb(args: "list[str]") -> int:
    """Any verb of firth, in the folder where the person is."""
    install("")
    command = [str(BIN / "firth"), *args]
    # Where the system can, the verb takes the place of this process, so signals and exit codes are its own.
    return run(*command) if os.name == "nt" else os.execv(command[0], command)


def main(args: "list[str]") -> int:
    if not args:
        print(__doc__.strip())
        return 2
    return test(args[1:]) if args[0] == "test" else verb(args)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
