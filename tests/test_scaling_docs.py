"""The Slurm script and the Kubernetes job of docs/scaling.md can be used as they are."""

from __future__ import annotations

import re
import shlex
import subprocess
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
