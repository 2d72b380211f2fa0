"""Review every overlay: schemas, references, probes, limits, rights and grace periods."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.kubernetes.manifests import NAMESPACE, ROOT, Overlay, Workload
from torchmoor.config.discovery import DiscoverySettings

# Kinds of optional operators: they were validated against the published schemas when they were written
# (docs/kubernetes.md describes how), and are checked here for their references.
FOREIGN_KINDS = {"ScaledObject", "PodMonitor"}
OLDEST, NEWEST = "1.30", "1.37"
COREDNS_TTL_S = 30  # how long a node-local DNS cache still names a removed pod
ENDPOINTS_S = 2  # until the endpoints no longer list a pod that ends
SPARE_S = 10  # the part of a grace period that an idle process needs to end


def ports_of(workload: Workload) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for each in workload.containers for port in each.get("ports", ())}


def is_selected(selector: Mapping[str, str], workload: Workload) -> bool:
    return selector.items() <= workload.labels.items()


def endpoints_of(overlay: Overlay) -> list[dict[str, Any]]:
    return yaml.safe_load(overlay.find_generated("ConfigMap", "torchmoor")["data"]["torchmoor.yaml"])["Endpoints"]


def find_all(node: Any, key: str) -> Iterator[Any]:
    """Return every value of this key, at any depth."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            if name == key:
                yield value
            yield from find_all(value, key)
    elif isinstance(node, list):
        for each in node:
            yield from find_all(each, key)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid_by_the_cluster_s_own_schema(overlay: Overlay, version: str) -> None:
    """The API server of every supported version accepts each object and knows each field."""
    for each in overlay.objects:
        if each["kind"] in FOREIGN_KINDS:
            with pytest.raises(kubernetes_validate.SchemaNotFoundError):
                kubernetes_validate.validate(each, version, strict=True)
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_everything_lives_in_one_namespace_that_restricts_its_pods(overlay: Overlay) -> None:
    """All objects are in one namespace, and the cluster refuses pods with more rights there."""
    assert {each["metadata"].get("namespace") for each in overlay.objects if each["kind"] != "Namespace"} == {NAMESPACE}
    namespace = overlay.get("Namespace", NAMESPACE)
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_every_pod_is_without_rights(overlay: Overlay) -> None:
    """Pods meet the `restricted` profile, write to volumes only, and have no service account token."""
    for workload in overlay.workloads():
        pod = workload.pod
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["fsGroup"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for container in workload.containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert not own.get("privileged")
        assert not any("hostPath" in volume for volume in pod.get("volumes", ()))


def test_every_container_has_probes_bounds_and_a_version(overlay: Overlay) -> None:
    """Every container has probes, limits on memory and disk, and a pinned image."""
    for workload in overlay.workloads():
        for container in workload.containers:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert container[probe]["timeoutSeconds"] >= 2
                assert container[probe]["failureThreshold"] >= 2
            asked, bound = container["resources"]["requests"], container["resources"]["limits"]
            assert {"cpu", "memory", "ephemeral-storage"} <= asked.keys()
            assert {"memory", "ephemeral-storage"} <= bound.keys()
            assert "cpu" not in bound  # a CPU limit would pause the process between tokens
            tag = container["image"].rpartition("/")[2].partition(":")[2]
            assert re.fullmatch(r"\d+\.\d+\.\d+(-\w+)?", tag), container["image"]


def test_liveness_is_slower_than_readiness(overlay: Overlay) -> None:
    """A busy pod fails readiness long before liveness, and has minutes to start."""
    for workload in overlay.workloads():
        for container in workload.containers:

            def patience(probe: str, container: Mapping[str, Any] = container) -> int:
                return int(container[probe].get("periodSeconds", 10) * container[probe]["failureThreshold"])

            assert patience("livenessProbe") >= 3 * patience("readinessProbe")
            assert patience("startupProbe") >= 60


def test_named_ports_of_probes_and_services_are_ports_of_pods(overlay: Overlay) -> None:
    """A named port of a probe or a Service exists in a container."""
    for workload in overlay.workloads():
        for container in workload.containers:
            own = {port["name"] for port in container.get("ports", ())}
            for get in find_all(container, "httpGet"):
                assert get["port"] in own
    for service in overlay.of("Service"):
        chosen = [each for each in overlay.workloads() if is_selected(service["spec"]["selector"], each)]
        assert len(chosen) == 1, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports_of(chosen[0])
            if service["spec"].get("clusterIP") == "None":  # a headless service does not translate ports
                assert port["port"] == ports_of(chosen[0])[port["targetPort"]]


def test_every_selector_matches_pods(overlay: Overlay) -> None:
    """Selectors of workloads, budgets, monitors, spreads and policies match pods; a typing error would match none."""
    workloads = list(overlay.workloads())
    for workload in workloads:
        assert is_selected(workload.spec["selector"]["matchLabels"], workload)
        for spread in workload.pod.get("topologySpreadConstraints", ()):
            assert is_selected(spread["labelSelector"]["matchLabels"], workload)
        if workload.kind == "StatefulSet":
            service = overlay.get("Service", workload.spec["serviceName"])
            assert service["spec"]["clusterIP"] == "None"
            assert is_selected(service["spec"]["selector"], workload)
    for kind, key in (
        ("PodDisruptionBudget", "selector"),
        ("PodMonitor", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        for each in overlay.of(kind):
            labels = each["spec"][key].get("matchLabels", {})
            assert any(is_selected(labels, workload) for workload in workloads), each["metadata"]["name"]
    for monitor in overlay.of("PodMonitor"):
        chosen = [each for each in workloads if is_selected(monitor["spec"]["selector"]["matchLabels"], each)]
        for end in monitor["spec"]["podMetricsEndpoints"]:
            assert all(end["port"] in ports_of(each) for each in chosen)


def test_metrics_keep_the_labels_that_queries_select(overlay: Overlay) -> None:
    """Triggers, rules, alerts and the dashboard select by `endpoint` and `instance`.

    The Prometheus operator sets `endpoint` to the scraped port's name, and `instance` to its address.
    """
    for monitor in overlay.of("PodMonitor"):
        [end] = monitor["spec"]["podMetricsEndpoints"]
        if monitor["metadata"]["name"] == "torchmoor-proxies":  # whose page has both labels
            assert end["honorLabels"] is True
        else:
            [pods] = [
                each for each in overlay.workloads() if is_selected(monitor["spec"]["selector"]["matchLabels"], each)
            ]
            label = "app.kubernetes.io/instance"
            assert pods.labels[label] in {each["EndpointName"] for each in endpoints_of(overlay)}
            source = f"__meta_kubernetes_pod_label_{re.sub('[^a-z]', '_', label)}"
            assert end["relabelings"] == [
                {"sourceLabels": [source], "targetLabel": "endpoint"},
                {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "instance"},
            ]


def test_the_documented_command_makes_a_rule_of_the_alerts() -> None:
    """The command of docs/metrics.md gives kubectl a PrometheusRule with all alerts."""
    top = ROOT.parents[1]
    page = (top / "docs" / "metrics.md").read_text()
    [command] = re.findall(r"^```\n(.*?kubectl.*?)^```", page, re.DOTALL | re.MULTILINE)
    script = f"kubectl() {{ cat; }}\n{command}"
    done = subprocess.run(["bash", "-ec", script], cwd=top, capture_output=True, check=True, timeout=60)

    rule = yaml.safe_load(done.stdout)

    assert (rule["kind"], rule["metadata"]["name"]) == ("PrometheusRule", "torchmoor")
    assert rule["spec"] == yaml.safe_load((top / "deploy" / "observability" / "alerts.yml").read_text())


def test_every_configmap_and_secret_that_is_named_exists(overlay: Overlay) -> None:
    keys = {
        (each["kind"], each["metadata"]["name"]): set(each["data"])
        for each in overlay.objects
        if each["kind"] in ("ConfigMap", "Secret")
    }
    num_found = 0
    for workload in overlay.workloads():
        for reference in find_all(workload.pod, "secretKeyRef"):
            assert reference["key"] in keys["Secret", reference["name"]]
            num_found += 1
        for volume in workload.pod.get("volumes", ()):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in keys
                num_found += 1
            if "secret" in volume:
                wanted = {item["key"] for item in volume["secret"].get("items", ())}
                assert wanted <= keys["Secret", volume["secret"]["secretName"]]
                num_found += 1
        accounts = {each["metadata"]["name"] for each in overlay.of("ServiceAccount")}
        assert workload.pod.get("serviceAccountName", "default") in accounts | {"default"}
    for monitor in overlay.of("PodMonitor"):
        for credentials in find_all(monitor, "credentials"):
            assert credentials["key"] in keys["Secret", credentials["name"]]
    assert num_found >= 7


def test_every_mounted_path_has_its_volume(overlay: Overlay) -> None:
    """Every mounted path refers to a volume of the pod or a claim of its StatefulSet."""
    for workload in overlay.workloads():
        known = {volume["name"] for volume in workload.pod.get("volumes", ())}
        known |= {claim["metadata"]["name"] for claim in workload.spec.get("volumeClaimTemplates", ())}
        mounted = {mount["name"] for each in workload.containers for mount in each["volumeMounts"]}
        assert mounted == known


def test_a_changed_configuration_replaces_the_pods(overlay: Overlay) -> None:
    """A ConfigMap's name depends on its content."""
    for each in overlay.of("ConfigMap"):
        assert re.fullmatch(r"(torchmoor|valkey)-[a-z0-9]{10}", each["metadata"]["name"])


def test_an_instance_has_time_to_drain(overlay: Overlay) -> None:
    """The grace period of an instance covers its running requests and TorchServe's own shutdown."""
    instances = overlay.workload("llava")
    environment = instances.environment()
    assert float(environment["TORCHMOOR_SETTLE_S"]) < float(environment["TORCHMOOR_DRAIN_S"])
    assert instances.pod["terminationGracePeriodSeconds"] >= float(environment["TORCHMOOR_DRAIN_S"]) + SPARE_S


def test_a_proxy_has_time_to_drain(overlay: Overlay) -> None:
    """The grace period of a proxy covers the endpoint update and its longest stream."""
    proxies = overlay.workload("torchmoor")
    configuration = yaml.safe_load(overlay.find_generated("ConfigMap", "torchmoor")["data"]["torchmoor.yaml"])
    wait_s = proxies.containers[0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace_s = configuration["timeouts"]["stop_grace_s"]
    assert proxies.pod["terminationGracePeriodSeconds"] >= wait_s + grace_s + SPARE_S
    assert grace_s >= configuration["timeouts"].get("stream_total_timeout_s", 480)


def test_an_upgrade_never_leaves_nobody(overlay: Overlay) -> None:
    """Upgrades add a proxy before they remove one and replace one instance at a time; nodes can be drained."""
    proxies, instances = overlay.workload("torchmoor"), overlay.workload("llava")
    assert proxies.spec["replicas"] >= 2
    assert proxies.spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert instances.spec["updateStrategy"] == {"type": "RollingUpdate"}
    assert instances.spec["podManagementPolicy"] == "Parallel"
    for name in ("torchmoor", "llava"):
        budget = overlay.get("PodDisruptionBudget", name)["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_proxies_hear_of_an_end_before_it_comes(overlay: Overlay) -> None:
    """DNS omits a pod that ends, and the pod waits until every proxy has asked twice through a cache."""
    assert overlay.get("Service", "llava")["spec"]["publishNotReadyAddresses"] is False
    configuration = yaml.safe_load(overlay.find_generated("ConfigMap", "torchmoor")["data"]["torchmoor.yaml"])
    (entry,) = configuration["Discovery"]
    asked = DiscoverySettings(**entry)
    settle_s = float(overlay.workload("llava").environment()["TORCHMOOR_SETTLE_S"])
    assert settle_s >= ENDPOINTS_S + COREDNS_TTL_S + 1.1 * (asked.interval_s + asked.min_interval_s)


def test_an_autoscaler_has_the_number_of_instances_to_itself(overlay: Overlay) -> None:
    """The manifest omits replicas where an autoscaler sets them, and states them otherwise."""
    has_scaler = bool(overlay.of("ScaledObject") or overlay.of("HorizontalPodAutoscaler"))
    assert has_scaler == ("replicas" not in overlay.workload("llava").spec)


@pytest.mark.parametrize("overlay", ["gpu", "gpu-hpa"], indirect=True)
def test_autoscalers_scale_what_there_is(overlay: Overlay) -> None:
    """The target of an autoscaler exists, and both autoscalers have the same bounds besides zero."""
    (scaler,) = overlay.of("ScaledObject") or overlay.of("HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]
    assert overlay.get(target["kind"], target["name"])["apiVersion"] == target["apiVersion"]
    most = scaler["spec"].get("maxReplicaCount") or scaler["spec"]["maxReplicas"]
    assert most == 8


@pytest.mark.parametrize("overlay", ["gpu"], indirect=True)
def test_keda_wakes_and_scales_by_our_metrics(overlay: Overlay) -> None:
    """KEDA scales from zero on a waiting request, up on backlog, down after 10 min; no data is not zero."""
    spec = overlay.get("ScaledObject", "llava")["spec"]
    assert (spec["minReplicaCount"], spec["cooldownPeriod"]) == (0, 600)
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
    assert spec["fallback"]["replicas"] > 0
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 600
    triggers = {trigger["name"]: trigger["metadata"] for trigger in spec["triggers"]}
    assert len(triggers) == len(spec["triggers"]) == 4
    assert triggers["backlog"]["threshold"] == "5"
    for metadata in triggers.values():
        assert all(isinstance(value, str) for value in metadata.values())
        assert (metadata["ignoreNullValues"], metadata["activationThreshold"]) == ("false", "0")


@pytest.mark.parametrize("overlay", ["gpu"], indirect=True)
def test_gpu_instances_ask_for_a_gpu_each_and_keep_their_checkpoint(overlay: Overlay) -> None:
    """A GPU pod requests one device and a node that has one, and never downloads into the same volume twice."""
    instances = overlay.workload("llava")
    resources = instances.containers[0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "1"
    assert instances.pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert instances.spec["persistentVolumeClaimRetentionPolicy"] == {"whenScaled": "Retain", "whenDeleted": "Delete"}
    mounts = {mount["name"]: mount["mountPath"] for mount in instances.containers[0]["volumeMounts"]}
    for name in ("HF_HOME", "TORCHMOOR_HANDLER_MODEL_CACHE_DIR"):
        assert instances.environment()[name].startswith(mounts["checkpoints"] + "/")


@pytest.mark.parametrize("overlay", ["gpu"], indirect=True)
def test_an_ingress_lets_streams_pass(overlay: Overlay) -> None:
    """An ingress does not buffer responses, and its time-outs are not shorter than the proxies'."""
    ingress = overlay.get("Ingress", "torchmoor")
    told = {key.rpartition("/")[2]: value for key, value in ingress["metadata"]["annotations"].items()}
    assert (told["proxy-buffering"], told["proxy-request-buffering"]) == ("off", "off")
    assert int(told["proxy-read-timeout"]) > 60
    assert int(told["proxy-send-timeout"]) > 60
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    ports = {port["name"] for port in overlay.get("Service", backend["name"])["spec"]["ports"]}
    assert backend["port"]["name"] in ports


def test_the_tree_has_no_secrets() -> None:
    """Git ignores the generator's input, and nothing else contains a Secret's value."""
    secrets = ROOT / "components" / "secrets"
    assert "generated/" in (secrets / ".gitignore").read_text().splitlines()
    for path in ROOT.rglob("*.yaml"):
        if "generated" not in path.parts:
            assert not any(each and each.get("kind") == "Secret" for each in yaml.safe_load_all(path.read_text())), path
