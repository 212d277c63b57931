"""TensorBoard, trackio, Weights & Biases and MLflow behind one interface: start or continue a run, log numbers, finish.

Every tracker works without a network and without an account, and none asks for a login. Where a person has configured
one (WANDB_API_KEY, WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID), it does as configured.

These classes run in the process of the tracker (`tracker_process.py`): whatever they raise ends that process alone.
"""

from __future__ import annotations

import netrc
import os
import secrets
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import yaml

from firth.train.tracking import TENSORBOARD_FOLDER, TrackedRun

PROJECT = "firth"  # where the environment names no other
MLFLOW_BATCH = 1_000  # metrics of one request
MLFLOW_MAX_PARAM = 500  # characters of a value
MLFLOW_PARAM_BATCH = 100  # parameters of one request


class Tracker(Protocol):
    id: str  # of the tracker's run; "" begins a new one

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def finish(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard, for `tensorboard --logdir RUN`.

    They are written without torch, whose SummaryWriter would load it into a second process.
    """

    def __init__(self, run: TrackedRun, run_id: str) -> None:
        self.id = TENSORBOARD_FOLDER
        self.event = import_module("tensorboard.compat.proto.event_pb2")
        self.summary = import_module("tensorboard.compat.proto.summary_pb2")
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self.writer = writer.EventFileWriter(str(Path(run.folder) / TENSORBOARD_FOLDER))
        if not run_id:
            # Events of an earlier attempt in this folder, before a rewind, do not count from here on.
            session = self.event.SessionLog(status=self.event.SessionLog.START)
            self.writer.add_event(self.event.Event(wall_time=time.time(), step=0, session_log=session))
            self.log_config(run.config)

    def log_config(self, config: Mapping[str, Any]) -> None:
        tensors = import_module("tensorboard.compat.proto.tensor_pb2")
        types = import_module("tensorboard.compat.proto.types_pb2")
        text = "".join(f"    {line}\n" for line in yaml.safe_dump(config, sort_keys=False).splitlines())
        metadata = self.summary.SummaryMetadata(plugin_data=self.summary.SummaryMetadata.PluginData(plugin_name="text"))
        tensor = tensors.TensorProto(dtype=types.DT_STRING, string_val=[text.encode()])
        self.add(0, self.summary.Summary.Value(tag="config", metadata=metadata, tensor=tensor))

    def add(self, step: int, *values: Any) -> None:
        summary = self.summary.Summary(value=values)
        self.writer.add_event(self.event.Event(wall_time=time.time(), step=step, summary=summary))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.add(step, *(self.summary.Summary.Value(tag=name, simple_value=x) for name, x in metrics.items()))

    def flush(self) -> None:
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class Trackio:
    """A local database, shown by `trackio show`."""

    def __init__(self, run: TrackedRun, run_id: str) -> None:
        self.id = run_id or f"{run.name}-{secrets.token_hex(3)}"  # a name that no other run has
        trackio = import_module("trackio")
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.id,
            group=run.group,
            config=run.config,  # without it, a continued run would lose the one that it has
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def flush(self) -> None: ...

    def finish(self) -> None:
        self.run.finish()


class WandB:
    """Weights & Biases; offline, in ./wandb for `wandb sync`, unless there is a key or WANDB_MODE."""

    def __init__(self, run: TrackedRun, run_id: str) -> None:
        self.id = run_id or secrets.token_hex(4)
        wandb = import_module("wandb")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.id,
            name=run.name,
            group=run.group,
            config=None if run_id else run.config,
            mode=wandb_mode(),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def flush(self) -> None: ...

    def finish(self) -> None:
        self.run.finish()


def wandb_mode() -> Any:
    """Return the mode of W&B: as the environment says, online with a key, else offline."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    return "online" if os.environ.get("WANDB_API_KEY") or has_netrc_entry(host) else "offline"


def has_netrc_entry(host: str) -> bool:
    """Whether `wandb login` has stored a key for this host."""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class MLflow:
    """MLflow; a database in the current folder, for `mlflow ui`, unless MLFLOW_TRACKING_URI names a server."""

    def __init__(self, run: TrackedRun, run_id: str) -> None:
        self.mlflow, self.pending = import_module("mlflow"), list[Any]()
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            self.mlflow.set_tracking_uri("sqlite:///mlflow.db")
        self.client = self.mlflow.MlflowClient()
        if run_id:
            self.id = run_id
            self.client.set_terminated(run_id, "RUNNING")
            return
        self.mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        experiment = self.client.get_experiment_by_name(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        created = self.client.create_run(experiment.experiment_id, run_name=run.name, tags={"group": run.group})
        self.id = created.info.run_id
        params = [self.mlflow.entities.Param(name, str(x)[:MLFLOW_MAX_PARAM]) for name, x in run.config.items()]
        for i in range(0, len(params), MLFLOW_PARAM_BATCH):
            self.client.log_batch(self.id, params=params[i : i + MLFLOW_PARAM_BATCH])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self.pending += [self.mlflow.entities.Metric(name, x, now, step) for name, x in metrics.items()]

    def flush(self) -> None:
        for i in range(0, len(self.pending), MLFLOW_BATCH):
            self.client.log_batch(self.id, metrics=self.pending[i : i + MLFLOW_BATCH])
        self.pending.clear()

    def finish(self) -> None:
        self.flush()
        self.client.set_terminated(self.id)


TRACKERS: dict[str, Callable[[TrackedRun, str], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WandB,
    "mlflow": MLflow,
}
