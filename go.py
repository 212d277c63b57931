"""Run Firth from a bare checkout. The first run makes a virtual environment in .venv.

python3 go.py quickstart      from text to a model and a report, on the built-in corpus
python3 go.py test            format, lint, types and tests (further arguments go to pytest)
python3 go.py COMMAND ...     any other command of firth; `python3 go.py --help` lists them
"""

import sys

# This file must parse on old Pythons, so that they reach this message.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("Firth needs Python 3.11 or newer; this is %d.%d (%s)." % (sys.version_info[:2] + (sys.executable,)))  # noqa: UP031, RUF005

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
STAMP = VENV / "firth-installed"  # written last: without the right digest in it, the install is repeated
UNFINISHED = "unfinished"
COMMAND_EXTRAS = "[data,hf,web]"  # of pyproject.toml: what the commands of the README need
INTERRUPTED = 130  # exit code after Ctrl-C


def say(message: str) -> None:
    print(f"go.py: {message}", file=sys.stderr, flush=True)


def run(*command: object, cwd: "Path | None" = None) -> int:
    """Run a command and return its exit code as a shell would."""
    return wait_for(subprocess.Popen([str(word) for word in command], cwd=cwd))


def wait_for(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a command and return its exit code as a shell would.

    Ctrl-C reaches the command too: it can clean up, and the code is then 130.
    """
    interrupted = False
    while True:
        try:
            code = process.wait()
            return INTERRUPTED if interrupted else code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            interrupted = True


def run_or_exit(what: str, *command: object) -> None:
    """Run a command; exit with its code if it fails."""
    code = run(*command)
    if code:
        say(f"{what} failed (exit code {code}); see the messages above.")
        sys.exit(code)


def digest(extras: str) -> str:
    """Hash of everything that the install depends on."""
    parts = [f"{sys.version_info[0]}.{sys.version_info[1]}", str(ROOT), extras]
    parts += [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def installed(extras: str) -> bool:
    """Whether the environment has these extras; [dev] includes all others."""
    stamp = STAMP.read_text(encoding="utf-8").strip() if STAMP.is_file() else ""
    return stamp in {digest(extras), digest("[dev]")}


def usable() -> bool:
    """Whether .venv has this version of Python, and pip."""
    version = sys.version_info[:2]
    check = f"import sys, pip; sys.exit(sys.version_info[:2] != {version!r})"
    try:
        return subprocess.call([str(PYTHON), "-c", check], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def make_venv() -> None:
    """Make a new environment; an existing one is removed only if go.py made it."""
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
    """Install firth with `extras` into the environment, unless it is installed."""
    if installed(extras):
        return
    say(f"installing firth{extras} into {VENV} (once; some minutes, PyTorch is large)")
    if not usable():
        make_venv()
    STAMP.write_text(UNFINISHED, encoding="utf-8")
    # Without --no-compile pip spends half of its time on bytecode of modules that nobody imports.
    pip = [PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input", "--no-compile"]
    run_or_exit("pip", *pip, "-c", ROOT / "constraints.txt", "-e", f"{ROOT}{extras}")
    STAMP.write_text(digest(extras), encoding="utf-8")


def keep_bytecode() -> None:
    """Let Python keep bytecode in .venv where the environment forbids it, as container images do.

    Otherwise every process compiles the source of all that it imports again: 3 seconds for PyTorch. The folders of the
    sources stay as they are.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ["PYTHONPYCACHEPREFIX"] = str(VENV / "bytecode")


def test(pytest_args: "list[str]") -> int:
    """Run all checks; return the exit code of the first that failed.

    mypy uses one core, and runs beside pytest. Its messages are shown when pytest has ended. With worksteal each of the
    two workers begins with half of the files in a row, so that fixtures of a file are rarely made twice.
    """
    install("[dev]")
    pytest = ["pytest", "-n", "2", "--dist", "worksteal", *pytest_args]
    steps = [["ruff", "check", "."], ["ruff", "format", "--check", "."], pytest]
    failed = {}
    with tempfile.TemporaryFile() as messages:
        mypy = subprocess.Popen([str(PYTHON), "-m", "mypy"], cwd=ROOT, stdout=messages, stderr=subprocess.STDOUT)
        for step in steps:
            name = " ".join(step)
            say(name)
            code = run(PYTHON, "-m", *step, cwd=ROOT)
            if code == INTERRUPTED:
                mypy.kill()
                return code
            if code:
                failed[name] = code
        say("mypy")
        code = wait_for(mypy)
        messages.seek(0)
        print(messages.read().decode(), end="", flush=True)
    if code:
        failed["mypy"] = code
    say("failed: " + ", ".join(failed) if failed else "all checks passed")
    return next(iter(failed.values()), 0)


def run_command(args: "list[str]") -> int:
    """Run a command of firth in the current folder."""
    install(COMMAND_EXTRAS)
    command = [str(BIN / "firth"), *args]
    # Firth prints commands to paste: they begin as this one did.
    os.environ["FIRTH_PROGRAM"] = shlex.join([Path(sys.executable).name, sys.argv[0]])
    # Except on Windows the command replaces this process, so that signals and exit codes are its own.
    return run(*command) if os.name == "nt" else os.execv(command[0], command)


def main(args: "list[str]") -> int:
    if not args:
        print(__doc__.strip())
        return 2
    keep_bytecode()
    return test(args[1:]) if args[0] == "test" else run_command(args)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
