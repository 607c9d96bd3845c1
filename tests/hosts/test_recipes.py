"""The recipes in examples/hosts: their shell runs with stand-ins for what a scheduler gives, their YAML has the fields
that its schema and torchrun need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

RECIPES = Path(__file__).parents[2] / "examples" / "hosts"
PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
VARIABLES = ["SHARDWISE_HANG_TIMEOUT_S", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
"""What each recipe sets."""
STAND_INS = {
    "torchrun": f"""#!{sys.executable}
import json, os, sys
with open(os.environ["SAID"], "a") as said:
    print(json.dumps([*sys.argv[1:], *(os.environ[name] for name in {VARIABLES})]), file=said)
""",
    "scontrol": '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"\n',
    "srun": '#!/bin/sh\n[ "$1" = --kill-on-bad-exit=1 ] && shift && "$@" && "$@"\n',
}


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The arguments of each torchrun that a recipe starts, a line each, and VARIABLES."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    for name in (*VARIABLES, "RANKS_PER_HOST", "RESTARTS", "PORT", "JOB"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "said"


def calls(said: Path) -> list[list[str]]:
    return [json.loads(line) for line in said.read_text().splitlines()]


def options(call: list[str]) -> dict[str, str]:
    return dict(one.removeprefix("--").split("=", 1) for one in call if one and one.startswith("--"))


def test_bare_hosts_start_the_same_line(said: Path) -> None:
    script = str(RECIPES / "torchrun.sh")
    subprocess.run(["sh", script, "first", "2:4", "run.toml", "train.steps=3"], check=True)
    [call] = calls(said)
    assert call[-8:] == ["-m", "shardwise", "train", "run.toml", "train.steps=3", "60", "280", "1"]
    wanted = {"nnodes": "2:4", "nproc-per-node": "auto", "max-restarts": "3", "rdzv-endpoint": "first:29500"}
    assert wanted.items() <= options(call).items()
    refused = subprocess.run(["sh", script, "first", "2"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr[:6]) == (2, "usage:")


def test_slurm_starts_torchrun_on_each_node(said: Path) -> None:
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "2"}
    recipe = ["bash", str(RECIPES / "slurm.sbatch"), "run.toml", "train.steps=3"]
    subprocess.run(recipe, check=True, env={**os.environ, **slurm, "SLURM_GPUS_ON_NODE": "8"})
    first, second = calls(said)
    assert first == second
    assert first[-8:] == ["-m", "shardwise", "train", "run.toml", "train.steps=3", "60", "280", "1"]
    wanted = {"nnodes": "2", "nproc-per-node": "8", "rdzv-id": "123456", "rdzv-endpoint": "node7:23456"}
    assert wanted.items() <= options(first).items()


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot_tells_torchrun_who_hosts_the_rendezvous(rank: int, said: Path) -> None:
    task = loaded("skypilot.yaml")
    assert task["num_nodes"] == 2
    assert set(task) <= {"name", "num_nodes", "resources", "workdir", "volumes", "envs", "setup", "run"}
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2"}
    sky |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-1"}
    subprocess.run(["bash", "-euc", task["run"]], check=True, env={**os.environ, **sky, **task["envs"]})
    [call] = calls(said)
    wanted = {"nnodes": "2", "nproc-per-node": "8", "rdzv-id": "sky-1", "rdzv-endpoint": "10.0.0.5:29500"}
    wanted |= {"rdzv-conf": f"is_host={1 - rank}", "local-addr": f"10.0.0.{5 + rank}"}
    assert wanted.items() <= options(call).items()
    assert call[-7:] == ["-m", "shardwise", "train", "run.toml", "60", "280", "1"]


def test_a_jobset_has_one_pod_a_host_that_all_meet_at_the_first() -> None:
    jobset = loaded("kubernetes-jobset.yaml")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    [group] = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert (group["replicas"], job["backoffLimit"]) == (1, 0)
    container = container_of(job["template"]["spec"])
    call = options(container["command"])
    assert call["nnodes"] == str(job["parallelism"]) == str(job["completions"])
    assert call["nproc-per-node"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    name = jobset["metadata"]["name"]
    assert call["rdzv-endpoint"] == f"{name}-{group['name']}-0-0.{name}:{container['ports'][0]['containerPort']}"


def test_a_pytorchjob_leaves_the_rendezvous_to_its_operator() -> None:
    job = loaded("kubernetes-pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    elastic, workers = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert elastic["minReplicas"] <= workers["replicas"] <= elastic["maxReplicas"]
    assert (elastic["rdzvBackend"], workers["restartPolicy"]) == ("c10d", "OnFailure")
    container = container_of(workers["template"]["spec"])
    assert container["name"] == "pytorch"
    assert container["command"][-1].endswith("exec torchrun -m shardwise train /config/run.toml")
    assert job["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])


def test_every_recipe_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for recipe in RECIPES.iterdir():
        assert f"(../examples/hosts/{recipe.name})" in page, recipe.name


def loaded(name: str) -> Any:
    return yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the one container, after a look at what it mounts."""
    [container] = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert [one["name"] for one in container["env"]] == VARIABLES
    return dict(container)
