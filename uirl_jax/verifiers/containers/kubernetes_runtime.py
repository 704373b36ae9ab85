"""Pods of a Kubernetes cluster, for `containers`: one pod, one container, one session.

The cluster is the one that kubectl uses (KUBECONFIG, ~/.kube/config), or in a pod without either
the pod's own. The account needs create, get, list and delete of pods in the namespace. Pods are
reached by their own address inside the cluster, from outside through a proxy
(verifier.containers.address). A pod has no service account token, ends after its lifetime, and has
the label `session-id`, by which ui-verifiers' proxy finds it. Uses Kubernetes' Python client.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException, OpenApiException

from uirl_jax.errors import VerifierError
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers.containers.runtime import (
    CALL_TIMEOUT_S,
    OWNER,
    SHM_MIB,
    ContainerConfig,
    State,
)

_TIMEOUT_S = (5.0, CALL_TIMEOUT_S)  # to connect, of silence
_HOPELESS = frozenset(
    {
        *("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
    }
)


class KubernetesRuntime:
    """A `runtime.Runtime`. Raises VerifierError: no cluster is configured."""

    def __init__(self, cfg: ContainerConfig) -> None:
        self._cfg = cfg
        settings = client.Configuration()
        kubeconfig = os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config"))
        with _told("the configuration (KUBECONFIG, ~/.kube/config, or that of a pod)"):
            if "KUBECONFIG" in os.environ or Path(kubeconfig).exists():
                config.load_kube_config(kubeconfig, client_configuration=settings)
            else:
                config.load_incluster_config(client_configuration=settings)
        settings.retries = False  # `containers` asks again, and knows what for
        self._api = client.CoreV1Api(client.ApiClient(settings))

    def create(self, name: str, labels: dict[str, str]) -> None:
        with _told(f"pod {name}"):
            self._api.create_namespaced_pod(
                self._cfg.namespace,
                pod(self._cfg, name, labels),  # pyright: ignore[reportArgumentType]: takes a dict
                _request_timeout=_TIMEOUT_S,
            )

    def find(self, name: str) -> State:
        with _told(f"pod {name}"):
            try:
                found = self._api.read_namespaced_pod(
                    name, self._cfg.namespace, _request_timeout=_TIMEOUT_S
                )
            except ApiException as error:
                if error.status == 404:
                    return State(ended="is gone")
                raise
            status = found.status
            if found.metadata is None or status is None:
                raise ValueError("a pod without metadata or status")
            if found.metadata.deletion_timestamp is not None:
                return State(ended="is being deleted by somebody else")
            if status.phase in ("Failed", "Succeeded"):
                why = untrusted_json.printable(status.reason or status.message or "", 200)
                return State(ended=f"ended by itself: {status.phase} {why}".rstrip())
            for inside in status.container_statuses or ():
                waiting = inside.state.waiting if inside.state is not None else None
                if waiting is not None:
                    why = untrusted_json.printable(f"{waiting.reason}: {waiting.message}", 200)
                    if waiting.reason in _HOPELESS:
                        return State(ended=f"does not start: {why}")
                    return State(waiting_for=why)
            if status.phase != "Running" or not status.pod_ip:
                told = [c.message for c in status.conditions or () if c.message]
                why = untrusted_json.printable("; ".join(told), 200)
                return State(waiting_for=f"it is {status.phase} {why}".rstrip())
            return State(status.pod_ip, self._cfg.port)

    def delete(self, name: str) -> None:
        with _told(f"deleting pod {name}"):
            try:
                self._api.delete_namespaced_pod(
                    name,
                    self._cfg.namespace,
                    grace_period_seconds=0,
                    _request_timeout=_TIMEOUT_S,
                )
            except ApiException as error:
                if error.status != 404:
                    raise

    def labels(self) -> dict[str, dict[str, str]]:
        with _told(f"listing pods of the namespace {self._cfg.namespace}"):
            found = self._api.list_namespaced_pod(
                self._cfg.namespace, label_selector=OWNER, _request_timeout=_TIMEOUT_S
            )
            pods = [each.metadata for each in found.items if each.metadata is not None]
            return {pod.name or "": pod.labels or {} for pod in pods}


def pod(cfg: ContainerConfig, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """The manifest of one session's pod."""
    limits = {"cpu": f"{cfg.cpus:g}", "memory": f"{cfg.memory_mib}Mi"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {**labels, "session-id": name}},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": max(1, int(cfg.lifetime_s)),
            "automountServiceAccountToken": False,  # the policy operates what is in there
            "enableServiceLinks": False,
            "containers": [
                {
                    "name": "session",
                    "image": cfg.image,
                    "ports": [{"containerPort": cfg.port}],
                    "resources": {"limits": limits, "requests": limits},
                    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                }
            ],
            "volumes": [
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHM_MIB}Mi"}}
            ],
        },
    }


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever the client raises becomes a VerifierError."""
    try:
        yield
    except ApiException as error:
        raise VerifierError(f"Kubernetes, {what}: HTTP {error.status}{_message(error)}") from error
    except (config.ConfigException, OpenApiException, urllib3.exceptions.HTTPError) as error:
        reason = untrusted_json.printable(f"{type(error).__name__}: {error}", 200)
        raise VerifierError(f"Kubernetes, {what}: {reason}") from error
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = untrusted_json.printable(f"{type(error).__name__}: {error}", 200)
        raise VerifierError(f"Kubernetes, {what}: {reason}") from error


def _message(error: ApiException) -> str:
    try:
        message = json.loads(error.body or "")["message"]
    except (LookupError, TypeError, ValueError):
        return ""
    return f", {untrusted_json.printable(str(message), 200)}"
