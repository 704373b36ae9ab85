"""The interface of container runtimes, and the settings that they share with their client."""

import dataclasses
from typing import Literal, Protocol

from uirl_jax.errors import ConfigError

OWNER, CLIENT, UNTIL = "uirl-jax-owner", "uirl-jax-client", "uirl-jax-until"  # labels
CALL_TIMEOUT_S = 20.0  # of a runtime's API
THREADS = 8  # calls of the runtime's API at a time
SHM_MIB = 512  # Docker's 64 are too few for a browser


@dataclasses.dataclass(frozen=True)
class ContainerConfig:
    """Where the one container of a session comes from, and what it may use."""

    # What starts them.
    runtime: Literal["none", "docker", "kubernetes"] = "none"
    # Of the verifier, such as ghcr.io/me/verifier:1.
    image: str = ""
    port: int = dataclasses.field(default=8000, metadata={"min": 1, "max": 65535})  # inside
    # {host} and {port} as the runtime says; {name} is the session's, which a g3 proxy wants.
    address: str = "http://{host}:{port}"
    publish_ip: str = "127.0.0.1"  # docker: the address of its host that the port appears on
    namespace: str = "default"  # kubernetes
    # Of one container; it is slowed down beyond it.
    cpus: float = dataclasses.field(default=1.0, metadata={"above": 0.0, "max": 1024.0})
    # Of one container; it is killed beyond it.
    memory_mib: int = dataclasses.field(default=2048, metadata={"min": 64, "max": 4_000_000})
    # Until it answers; a slower one is deleted.
    start_timeout_s: float = dataclasses.field(
        default=120.0, metadata={"above": 0.0, "max": 3600.0}
    )
    # It is deleted then at the latest, should its actor have died.
    lifetime_s: float = dataclasses.field(default=3600.0, metadata={"above": 0.0, "max": 604_800.0})

    def __post_init__(self) -> None:
        faults = []
        if (self.runtime != "none") != bool(self.image):
            faults.append(f"runtime={self.runtime!r} with image={self.image!r}: set both or none")
        try:
            self.address.format(host="h", port=1, name="n")
        except (LookupError, ValueError, AttributeError):
            faults.append(f"address={self.address!r}: it may have {{host}}, {{port}} and {{name}}")
        if self.lifetime_s <= self.start_timeout_s:
            faults.append(
                f"lifetime_s={self.lifetime_s:g} is not above start_timeout_s="
                f"{self.start_timeout_s:g}"
            )
        if faults:
            raise ConfigError("; ".join(faults))


@dataclasses.dataclass(frozen=True)
class State:
    """What a runtime knows of a container. With a host it may answer; `ended`: it never will."""

    host: str = ""
    port: int = 0
    ended: str = ""
    waiting_for: str = ""


class Runtime(Protocol):
    """Blocking calls, from several threads, each within about CALL_TIMEOUT_S. All raise
    VerifierError and nothing else; whether the call was carried out is then not known."""

    def create(self, name: str, labels: dict[str, str]) -> None:
        """Makes and starts a container."""
        ...

    def find(self, name: str) -> State:
        """How far it is."""
        ...

    def delete(self, name: str) -> None:
        """Ends and removes it; one that is gone is fine."""
        ...

    def labels(self) -> dict[str, dict[str, str]]:
        """By name, the labels of all containers that have OWNER, dead ones included."""
        ...
