"""Convert a rendered overlay's pods for Debian's podman 4.3, with as few and as mechanical changes as possible.

The changes and their reasons:

* A StatefulSet or Deployment becomes its pods, NAME-0 and so on: podman does not support StatefulSets.
* Probes and hooks are removed: podman would run probes with systemd, and does not support hooks. The test runs them as
  a kubelet does.
* Ports are removed: podman would listen on them on the host.
* A Secret's files come from a directory, with the mode and the group that the kubelet would give them: podman writes
  them undecoded and world-readable.
* A claim's volume belongs to the pod's user: podman does not support fsGroup. An emptyDir's name includes the pod's:
  podman would share one of the same name among all pods.
* An instance that ends waits for proxies as long as this DNS server requires, instead of a cluster's.
* The test's DNS server resolves names. Images are local. A process that ends is not restarted as a kubelet would do,
  so that the test sees its end.
"""

import base64
import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kubernetes.manifests import Overlay, Workload

SETTLE_S = "8"  # of an instance that ends: the test's DNS server has no 30 s cache in front of it
UNPLAYED = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports")


def make_pod(
    overlay: Overlay, workload: Workload, name: str, dns_servers: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    """Return the objects that podman plays for one pod. folder: receives the Secrets' files."""
    pod: dict[str, Any] = copy.deepcopy(dict(workload.pod))
    context = pod["securityContext"]
    for container in pod["containers"]:
        for key in UNPLAYED:
            container.pop(key, None)
        container["imagePullPolicy"] = "Never"
        for variable in container.get("env", ()):
            if variable["name"] == "TORCHMOOR_SETTLE_S":
                variable["value"] = SETTLE_S
    pod["dnsPolicy"] = "None"
    pod["dnsConfig"] = {"nameservers": list(dns_servers)}
    pod["hostname"] = name
    pod["restartPolicy"] = "Never"
    objects: list[dict[str, Any]] = [_make_configmap(overlay, each) for each in _config_maps(pod)]
    for claim in workload.spec.get("volumeClaimTemplates", ()):
        claim_name = f"{claim['metadata']['name']}-{name}"
        objects.append(_make_claim(claim, claim_name, context))
        volume = {"name": claim["metadata"]["name"], "persistentVolumeClaim": {"claimName": claim_name}}
        pod["volumes"].append(volume)
    for volume in pod["volumes"]:
        if "emptyDir" in volume:
            _rename(pod, volume, f"{volume['name']}-{name}")
        if "secret" in volume:
            source = volume.pop("secret")
            path = folder / name / volume["name"]
            _write_secret(overlay.get("Secret", source["secretName"]), source, path, context["fsGroup"])
            volume["hostPath"] = {"path": str(path), "type": "Directory"}
    metadata = {"name": name, "labels": dict(workload.labels)}
    return [*objects, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}]


def volumes_of(overlay: Overlay, pods: Iterable[str]) -> Iterator[str]:
    """Return the volumes that podman creates for claims, empty directories and ConfigMaps, and keeps."""
    for pod in pods:
        workload = overlay.workload(pod.rpartition("-")[0])
        claims = [each["metadata"]["name"] for each in workload.spec.get("volumeClaimTemplates", ())]
        for name in [*claims, *(each["name"] for each in workload.pod["volumes"] if "emptyDir" in each)]:
            yield f"{name}-{pod}"
    for each in overlay.of("ConfigMap"):
        yield each["metadata"]["name"]


def secrets_of_environment(overlay: Overlay) -> Iterator[tuple[str, str]]:
    """Return Secrets by name, in the format that podman 4.3 reads for a container's environment."""
    for secret in overlay.of("Secret"):
        yield secret["metadata"]["name"], json.dumps(secret["data"])


def _rename(pod: Mapping[str, Any], volume: dict[str, Any], name: str) -> None:
    for container in pod["containers"]:
        for mount in container["volumeMounts"]:
            if mount["name"] == volume["name"]:
                mount["name"] = name
    volume["name"] = name


def _config_maps(pod: Mapping[str, Any]) -> list[str]:
    return [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]


def _make_configmap(overlay: Overlay, name: str) -> dict[str, Any]:
    return dict(overlay.get("ConfigMap", name))


def _make_claim(claim: Mapping[str, Any], name: str, context: Mapping[str, Any]) -> dict[str, Any]:
    annotations = {"volume.podman.io/uid": str(context["runAsUser"]), "volume.podman.io/gid": str(context["fsGroup"])}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "annotations": annotations},
        "spec": claim["spec"],
    }


def _write_secret(secret: Mapping[str, Any], source: Mapping[str, Any], path: Path, group: int) -> None:
    """Write a Secret's files as the kubelet mounts them."""
    path.mkdir(parents=True, exist_ok=True)
    items = source.get("items") or [{"key": key, "path": key} for key in secret["data"]]
    for item in items:
        file = path / item["path"]
        file.write_bytes(base64.b64decode(secret["data"][item["key"]]))
        file.chmod(source["defaultMode"])
        os.chown(file, 0, group)
