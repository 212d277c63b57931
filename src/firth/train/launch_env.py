"""The environment variables by which torchrun tells a process its rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from firth.core.console import set_quiet
from firth.core.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class LaunchEnv(NamedTuple):
    """Torchrun's environment variables of this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restart_count: int
    has_agent_store: bool  # torchrun's agent hosts the store, which survives restarts

    @property
    def store(self) -> Store:
        """Connect to the key-value store that all processes share."""
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        where = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
        serves = not self.has_agent_store and self.rank == 0
        try:
            return TCPStore(*where, self.world_size, serves, timedelta(minutes=5), wait_for_workers=False)
        except dist.DistError as e:
            reason = str(e).splitlines()[0]
            raise UserError(
                f"The processes cannot meet at {where[0]}:{where[1]} ({reason}). Start them again."
            ) from None


def read_launch_env() -> LaunchEnv | None:
    """Return torchrun's variables, None where they are not set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    if wrong := [f"{name}={value}" for name, value in variables.items() if not value.isdecimal()]:
        raise UserError(f"{wrong[0]} in the environment is not a number. torchrun sets this variable: unset yours.")
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    local = int(variables.get("LOCAL_RANK", rank)), int(variables.get("LOCAL_WORLD_SIZE", size))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return LaunchEnv(rank, size, *local, int(variables.get("TORCHELASTIC_RESTART_COUNT", 0)), agent)


def require_single_process(advice: str) -> None:
    """Raise where torchrun has started several processes."""
    launch = read_launch_env()
    if launch is not None and launch.world_size > 1:
        raise UserError(f"{launch.world_size} processes were started, and this run is for one. {advice}")


def silence_other_ranks() -> None:
    """Silence the console of all ranks but 0."""
    launch = read_launch_env()
    if launch is not None and launch.rank > 0:
        set_quiet()
