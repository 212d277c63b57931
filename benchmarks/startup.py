"""How long the command line and `import firth` take to start, with bytecode caches, beside bare Python and torch.

python benchmarks/startup.py                 wall and CPU seconds, the best of ten starts each
python benchmarks/startup.py --imports 20    the modules that take longest in `firth --help`, by -X importtime
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time

STARTS = {
    "python": ["-c", "pass"],
    "import firth": ["-c", "import firth"],
    "firth.pretrain, not called": ["-c", "import firth; firth.pretrain"],
    "firth --help": ["-m", "firth", "--help"],
    "firth --version": ["-m", "firth", "--version"],
    "firth pretrain --help": ["-m", "firth", "pretrain", "--help"],
    "import torch": ["-c", "import torch"],
}
MAX_SECONDS = {"import firth": 1.5, "firth --help": 1.0}
IMPORT_TIME = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| +(\S+)")


def start_seconds(arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return wall and CPU seconds of one start."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


def measure(repeats: int, names: list[str], environment: dict[str, str]) -> dict[str, tuple[float, float]]:
    """Return the least wall and CPU seconds of each start; the first one, which writes bytecode, is not counted.

    On an idle machine both are equal. On a busy one only the CPU seconds say something about Firth.
    """
    found = {}
    for name in names:
        seconds = [start_seconds(STARTS[name], environment) for _ in range(repeats + 1)][1:]
        found[name] = (min(wall for wall, _ in seconds), min(cpu for _, cpu in seconds))
    return found


def slowest_imports(environment: dict[str, str]) -> list[tuple[int, str]]:
    """Return microseconds of each module of `firth --help`, without those that it imports, slowest first."""
    words = [sys.executable, "-X", "importtime", *STARTS["firth --help"]]
    told = subprocess.run(words, check=True, capture_output=True, text=True, env=environment).stderr
    return sorted(((int(own), name) for own, _, name in IMPORT_TIME.findall(told)), reverse=True)


def bytecode_environment(folder: str) -> dict[str, str]:
    """The environment in which Python keeps bytecode, in this folder."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": folder}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--imports", type=int, default=0, help="print this many modules")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = bytecode_environment(folder)
        found = measure(given.repeats, list(STARTS), environment)
        if given.json:
            print(json.dumps(found))
            return
        for name, (wall, cpu) in found.items():
            bound = f"  (at most {MAX_SECONDS[name]} s)" if name in MAX_SECONDS else ""
            print(f"{name:28} {wall:.2f} s, CPU {cpu:.2f} s{bound}")
        for microseconds, module in slowest_imports(environment)[: given.imports]:
            print(f"{microseconds / 1000:8.1f} ms  {module}")


if __name__ == "__main__":
    main()
