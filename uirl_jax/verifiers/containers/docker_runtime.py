"""Containers of a Docker daemon, for `containers`: the port is published on the daemon's host.

The daemon comes from the environment (DOCKER_HOST, DOCKER_TLS_VERIFY, DOCKER_CERT_PATH), else it is
the local socket. Images are not pulled: a missing one is an error before the first episode. Uses
the low-level half of Docker's Python client, where a method is one call of the API.
"""

import contextlib
from collections.abc import Iterator

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.utils import kwargs_from_env

from uirl_jax.errors import VerifierError
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers.containers.runtime import (
    CALL_TIMEOUT_S,
    OWNER,
    SHM_MIB,
    THREADS,
    ContainerConfig,
    State,
)


class DockerRuntime:
    """A `runtime.Runtime`. Raises VerifierError: no daemon, or it does not have the image."""

    def __init__(self, cfg: ContainerConfig) -> None:
        self._cfg = cfg
        with _told("the daemon (is it running, and DOCKER_HOST right?)"):
            self._api = docker.APIClient(
                **kwargs_from_env(), timeout=int(CALL_TIMEOUT_S), max_pool_size=THREADS
            )
        with _told(f"image {cfg.image}"):
            try:
                self._api.inspect_image(cfg.image)
            except ImageNotFound:
                raise VerifierError(
                    f"Docker has no image {cfg.image!r} (verifier.containers.image): "
                    f"docker pull {cfg.image}, or build it"
                ) from None

    def create(self, name: str, labels: dict[str, str]) -> None:
        cfg = self._cfg
        with _told(f"container {name}"):
            host_config = self._api.create_host_config(
                port_bindings={cfg.port: (cfg.publish_ip, None)},  # None: a free one
                nano_cpus=int(cfg.cpus * 1e9),
                mem_limit=cfg.memory_mib * 2**20,
                shm_size=SHM_MIB * 2**20,
                init=True,  # a desktop's programs leave zombies
            )
            self._api.create_container(
                cfg.image, name=name, labels=labels, ports=[cfg.port], host_config=host_config
            )
            self._api.start(name)

    def find(self, name: str) -> State:
        with _told(f"container {name}"):
            try:
                found = self._api.inspect_container(name)
            except NotFound:
                return State(ended="is gone")
            state = found["State"]
            if state["Status"] in ("exited", "dead", "removing"):
                why = ", out of memory" if state.get("OOMKilled") else ""
                return State(ended=f"ended by itself with exit code {state['ExitCode']}{why}")
            published = (found["NetworkSettings"]["Ports"] or {}).get(f"{self._cfg.port}/tcp")
            if state["Status"] != "running" or not published:
                return State(waiting_for=f"it is {untrusted_json.printable(state['Status'])}")
            return State(self._cfg.publish_ip, int(published[0]["HostPort"]))

    def delete(self, name: str) -> None:
        with _told(f"deleting container {name}"), contextlib.suppress(NotFound):
            # 409, its removal is under way: asked again, until it is gone or that has failed.
            self._api.remove_container(name, force=True, v=True)

    def labels(self) -> dict[str, dict[str, str]]:
        with _told("listing containers"):
            found = self._api.containers(all=True, filters={"label": OWNER})
            return {each["Names"][0].removeprefix("/"): each["Labels"] for each in found}


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever the client raises becomes a VerifierError."""
    try:
        yield
    except APIError as error:
        reason = untrusted_json.printable(str(error.explanation or error), 200)
        raise VerifierError(f"Docker, {what}: HTTP {error.status_code}, {reason}") from error
    except (DockerException, requests.RequestException) as error:
        reason = untrusted_json.printable(str(error), 200)
        raise VerifierError(f"Docker, {what}: {reason}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise VerifierError(f"Docker, {what}: an answer that is none of its API's") from error
