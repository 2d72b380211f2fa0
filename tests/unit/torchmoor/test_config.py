"""The configuration file: its meaning and its errors."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.torchmoor.changed_value import with_value
from torchmoor.config.async_inference import AsyncInferenceSettings
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.config.file import MAX_FILE_BYTES, parse, read_file
from torchmoor.config.launcher import LaunchSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.notices import Webhook
from torchmoor.config.routing import LateBindingSettings, MultiModelSettings, PrefixAwareSettings
from torchmoor.config.scaling import ScalingSettings, StepScaling, TargetTracking, TrackedMetric
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.settings import GROUPS, Configuration
from torchmoor.config.up import UpSettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.launching import make_process_settings
from torchmoor.run.static_instances import make_instances

ROOT_DOCS = Path(__file__).parents[3] / "docs"
DOCS = ROOT_DOCS / "routing.md"
KEYS = "k1:" + "ab" * 16
SMALL: dict[str, Any] = {
    "Endpoints": [
        {
            "EndpointConfig": {
                "EndpointConfigName": "chat",
                "ProductionVariants": [{"VariantName": "v", "ModelName": "llava"}],
            }
        }
    ],
    "Instances": [{"name": "a", "port": 8080}],
}


SECRET = "whsec_c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"


def changed(path: str, value: object) -> dict[str, Any]:
    """SMALL with the value at a path like Endpoints.0.late_binding; None deletes it."""
    return with_value(SMALL, path, value)


def test_example_in_the_docs_is_a_configuration() -> None:
    """The example in the documentation is parsed with every value in its place."""
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)

    configuration = parse(yaml.safe_load(text), session_keys=KEYS)

    (endpoint,) = configuration.proxy.endpoints
    blue, green = endpoint.variants
    assert (endpoint.name, endpoint.late_binding) == ("chat", LateBindingSettings(max_waiting=1024, max_wait_s=30))
    assert (blue.weight, blue.routing_strategy) == (9, "PREFIX_AWARE")
    assert blue.prefix_aware == PrefixAwareSettings(prefix_length=2048, concurrency_threshold=16)
    assert (green.name, green.model, green.routing_strategy) == ("green", "llava", "KV_AWARE")
    assert green.kv_aware.bytes_per_request == 8192
    assert configuration.proxy.sessions.are_journaled
    assert list(configuration.proxy.sessions.keys) == ["k1"]
    instances = [(i.name, i.variant, i.model, i.host, i.port, i.management_port) for i in make_instances(configuration)]
    assert instances == [
        ("blue-0", "blue", "llava", "10.0.0.5", 8080, 8081),
        ("green-0", "green", "llava", "10.0.0.6", 8080, 8081),
    ]


def test_what_is_left_out_has_its_default() -> None:
    """Missing values have the service's defaults, such as RANDOM, or ours; late binding is off."""
    configuration = parse(SMALL)

    (endpoint,) = configuration.proxy.endpoints
    (instance,) = make_instances(configuration)
    assert (endpoint.name, endpoint.late_binding) == ("chat", None)
    assert endpoint.variants[0].routing_strategy == "RANDOM"
    assert (instance.endpoint, instance.variant, instance.model) == ("chat", "v", "llava")
    assert (instance.host, instance.management_port, instance.metrics_port) == ("127.0.0.1", None, None)
    assert parse(changed("Endpoints.0.late_binding", {})).proxy.endpoints[0].late_binding == LateBindingSettings()


VARIANT = "Endpoints.0.EndpointConfig.ProductionVariants.0"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("Listen", {}, "unknown key 'Listen'"),
        ("Endpoints", None, "Endpoints must be a list of one or more, not None"),
        ("Endpoints", [], "Endpoints must be a list of one or more"),
        ("Endpoints", [3], r"Endpoints\[0\] must be keys and values, not 3"),
        ("Endpoints", [*SMALL["Endpoints"] * 2], "different names"),
        ("Endpoints.0.EndpointName", "a_b", "'a_b' is not a valid endpoint name"),
        ("Endpoints.0.EndpointName", 7, "EndpointName must be text, not 7"),
        ("Endpoints.0.EndpointConfig", None, "must be what boto3's create_endpoint_config takes"),
        ("Endpoints.0.EndpointConfig.Foo", 1, 'Unknown parameter in input: "Foo"'),
        ("Endpoints.0.EndpointConfig.EndpointConfigName", None, 'Missing required parameter in input: "Endpoint'),
        ("Endpoints.0.EndpointConfig.EndpointConfigName", "a_b", "EndpointConfigName must match .* not 'a_b'"),
        (
            "Endpoints.0.EndpointConfig.EndpointConfigName",
            "a" * 64,
            "EndpointConfigName must have 63 characters at most, not 64",
        ),
        ("Endpoints.0.EndpointConfig.ProductionVariants", [], "ProductionVariants, value: 0, valid min"),
        ("Endpoints.0.EndpointConfig.ShadowProductionVariants", [{"VariantName": "s"}], "not supported"),
        (f"{VARIANT}.ServerlessConfig", {"MemorySizeInMB": 1024, "MaxConcurrency": 1}, "ServerlessConfig is not supp"),
        (f"{VARIANT}.ModelName", None, r"ProductionVariants\[0\].ModelName is missing"),
        (f"{VARIANT}.InitialVariantWeight", -1, "value: -1, valid min value: 0"),
        (f"{VARIANT}.InitialVariantWeight", 0, "weight above 0"),
        (
            f"{VARIANT}.InitialVariantWeight",
            float("nan"),
            "InitialVariantWeight must be a number of the type float, not nan",
        ),
        (f"{VARIANT}.RoutingConfig", {"RoutingStrategy": "PREFIX_AWARE"}, "PrefixLength is missing"),
        (
            f"{VARIANT}.RoutingConfig",
            {"RoutingStrategy": "PREFIX_AWARE", "PrefixAwareRoutingConfig": {"PrefixLength": 1024}},
            "ConcurrencyThreshold is missing",
        ),
        (
            f"{VARIANT}.RoutingConfig",
            {
                "RoutingStrategy": "PREFIX_AWARE",
                "PrefixAwareRoutingConfig": {"PrefixLength": 70_000, "ConcurrencyThreshold": 1},
            },
            "PrefixLength must be 65536 at most, not 70000",
        ),
        (
            f"{VARIANT}.RoutingConfig",
            {"RoutingStrategy": "RANDOM", "PrefixAwareRoutingConfig": {"PrefixLength": 1024}},
            "only for PREFIX_AWARE, not for RANDOM",
        ),
        ("Endpoints.0.late_binding", {"max_wait": 3}, r"Endpoints\[0\].late_binding: unknown key 'max_wait'"),
        ("Endpoints.0.late_binding", {"max_wait_s": 0}, "late_binding.max_wait_s must be positive, not 0"),
        ("Endpoints.0.late_binding", {"max_wait_s": float("inf")}, "max_wait_s must be a number, not inf"),
        ("Endpoints.0.late_binding", {"max_waiting": True}, "max_waiting must be a whole number, not True"),
        ("Endpoints.0.late_binding", {"max_waiting": "9"}, "max_waiting must be a whole number, not '9'"),
        ("Endpoints.0.kv_aware", {"block_bytes": 100_000}, "max_prompt_bytes must be from 100000"),
        ("Endpoints.0.MultiModelConfig", {"ModelCacheSetting": "On"}, "must be Enabled or Disabled .* not 'On'"),
        ("Endpoints.0.MultiModelConfig", {"Cache": "Enabled"}, "MultiModelConfig: unknown key 'Cache'"),
        ("Endpoints.0.ModelDataUrl", "s3://b/p", "ModelDataUrl is only for an endpoint with MultiModelConfig"),
        ("Endpoints.0.multi_model", {}, "multi_model is only for an endpoint with MultiModelConfig"),
        ("Endpoints.0.adapters", {"max_bytes": 1}, "adapters: unknown key 'max_bytes'"),
        ("container", {"serves_models": True}, "container.serves_models needs a multi-model endpoint"),
        ("Instances", None, "Instances must be a list"),
        ("Instances", [*SMALL["Instances"] * 2], r"Instances\[1\].name 'a' is given twice"),
        ("Instances.0.name", "A", r"Instances\[0\].name must be of a-z.* not 'A'"),
        (
            "Instances.0.host",
            "http://10.0.0.5",
            r"Instances\[0\].host must be a host name or an address, without scheme",
        ),
        ("Instances.0.name", None, r"Instances\[0\].name is missing"),
        ("Instances.0.port", 0, r"Instances\[0\].port must be from 1 to 65535, not 0"),
        ("Instances.0.port", "80", r"Instances\[0\].port must be a whole number, not '80'"),
        ("Instances.0.capacity", 0, r"Instances\[0\].capacity must be positive, not 0"),
        ("Instances.0.endpoint", "other", "endpoint must be one of chat, not 'other'"),
        ("Instances.0.variant", "w", "variant must be one of v, not 'w'"),
        ("Instances.0.gpu", 1, "unknown key 'gpu'"),
        ("limits", {"max_connections": -1}, "limits.max_connections must be positive, not -1"),
        ("limits", 3, "limits must be keys and values, not 3"),
        ("listen", {"port": 70_000}, "listen.port must be from 0 to 65535, not 70000"),
        ("sessions", {"keys": {}}, "sessions: unknown key 'keys'"),
        ("sessions", {"are_journaled": "yes"}, "are_journaled must be true or false, not 'yes'"),
        ("account_id", 123, "account_id must be text"),
        ("launcher", {"heap_mib": 64}, "launcher.heap_mib must be 128 or more, not 64"),
        ("launcher", {"max_body_mib": 2048}, "launcher.max_body_mib must be from 1 to 2047, not 2048"),
        ("launcher", {"cores": 4}, r"unknown key 'cores'; known are [a-z_, ]+$"),
        ("timeouts", {"model_timout_s": 60}, r"known are cancel_timeout_s, .*\. Did you mean 'model_timeout_s'\?"),
        ("launchers", {}, r"the file: unknown key 'launchers'; .*\. Did you mean 'launcher'\?"),
        ("notices", {"webhooks": ["a"]}, r"notices.webhooks\[0\] must be keys and values"),
    ],
)
def test_error_names_the_key_and_the_value(path: str, value: object, message: str) -> None:
    """Errors name the key and the value, and unknown keys are refused."""
    with pytest.raises(ConfigError, match=message):
        parse(changed(path, value))


def test_instances_that_serve_starts_have_the_heap_of_the_file(tmp_path: Path) -> None:
    """They hold bodies like the instances of torchmoor up, whose options set the same keys."""
    launch = parse(changed("launcher", {"heap_mib": 1024, "max_body_mib": 128})).launch

    torchserve = make_process_settings(launch, tmp_path).torchserve

    assert (torchserve.heap_mib, torchserve.max_body_bytes) == (1024, 128 << 20)


def test_a_key_that_is_a_number_is_unknown() -> None:
    """YAML has keys that are not texts; the error names one like any other unknown key."""
    with pytest.raises(ConfigError, match=r"the file: unknown key 3; known are [A-Za-z_, ]+$"):
        parse({**SMALL, 3: {}})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("notices", [{"webhooks": SECRET}]),
        ("notices", {"webhooks": SECRET}),
        ("notices", {"webhooks": [SECRET]}),
        ("notices", {"webhooks": {"url": "https://a/", "secret": SECRET}}),
        ("notices", {"webhooks": [{"url": "https://a/", "secret": [SECRET]}]}),
        ("notices", {"webhooks": [{"url": f"https://a:{SECRET}@a/", "secret": SECRET}]}),
        ("async_inference", {"queue": [f"redis://:{SECRET}@a/0"]}),
    ],
)
def test_errors_show_no_secret(path: str, value: object) -> None:
    """Errors, which are logged, contain no secret in any form."""
    with pytest.raises(ConfigError, match=path) as caught:
        parse(changed(path, value))

    assert SECRET not in f"{caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Credentials.read({"tokens": {"alice": [SECRET]}}),
        lambda: Credentials.read({"keys": {"alice": SECRET}}),
        lambda: SessionIdSettings.read({"keys": {"k1": SECRET}}),
    ],
)
def test_errors_about_one_of_several_keys_show_no_secret(make: Callable[[], object]) -> None:
    """An error about an item of a list of keys contains no secret."""
    with pytest.raises(ConfigError) as caught:
        make()

    assert SECRET not in str(caught.value)


def test_settings_are_shown_without_secrets() -> None:
    """The repr of a group, as in tracebacks and debug logs, contains no secret."""
    queue = AsyncInferenceSettings(queue=f"redis://:{SECRET}@a/0")
    credentials = Credentials(keys={"abc": AccessKey(secret=SECRET)}, tokens={"alice": SECRET * 2}, admin_token=SECRET)
    webhook = Webhook(url="https://a/", secret=SECRET)

    shown = repr((queue, credentials, webhook, UpSettings(journal=f"redis://:{SECRET}@a/0")))
    assert SECRET not in shown


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "https://chat.example", "http://[::1]:8000", "http://10.0.0.7", "app://obsidian.md"],
)
def test_origins_are_taken_as_browsers_send_them(origin: str) -> None:
    assert ListenSettings(allowed_origins=(origin,)).allowed_origins == (origin,)


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "localhost:3000",
        "http://a/",
        "http://A",
        "http://a:80",
        "https://a:443",
        "https://*.a",
        "http://a\n",
    ],
)
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    """Origins that no browser sends are refused, because they would never match."""
    with pytest.raises(ConfigError, match=r"listen\.allowed_origins must be origins as browsers send them.*, not '"):
        parse(changed("listen", {"allowed_origins": [origin]}))


@pytest.mark.parametrize(
    "host", ["chat.example", "Chat", "my_host", "10.1.2.3", "::1", "[fe80::1:2]", "::ffff:10.0.0.1"]
)
def test_hosts_are_taken_without_a_port(host: str) -> None:
    assert ListenSettings(allowed_hosts=(host,)).allowed_hosts == (host,)


@pytest.mark.parametrize(
    "host", ["", "*", "chat.example:8080", "abc:80", "[::1]:80", "http://a", "a/", "*.a", ".a", "a.", "bücher.example"]
)
def test_hosts_that_would_never_match_are_refused(host: str) -> None:
    """Host names are compared without the port, and a browser sends them in ASCII."""
    with pytest.raises(ConfigError, match=r"listen\.allowed_hosts must be host names or addresses without .*, not '"):
        parse(changed("listen", {"allowed_hosts": [host]}))


def test_a_strategy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    settings = parse(changed(f"{VARIANT}.RoutingConfig", {"RoutingStrategy": "BEST"})).proxy

    with pytest.raises(ConfigError, match=r"RoutingStrategy must be one of LEAST_OUTSTANDING.* not 'BEST'"):
        Registry(settings.endpoints)


def test_endpoint_with_many_models_is_declared_as_in_create_model(caplog: pytest.LogCaptureFixture) -> None:
    """MultiModelConfig declares an endpoint with many models.

    The sources are settings of the instances, as a warning says.
    """
    content = changed("Endpoints.0.MultiModelConfig", {"ModelCacheSetting": "Disabled"})
    content["Endpoints"][0]["ModelDataUrl"] = "s3://bucket/models/"
    content["Endpoints"][0]["multi_model"] = {"hot_outstanding": 4}
    with caplog.at_level(logging.WARNING):
        [endpoint] = parse(content).proxy.endpoints

    assert endpoint.multi_model == MultiModelSettings(is_cached=False, hot_outstanding=4)
    assert "TORCHMOOR_HANDLER_MANY_SOURCE" in caplog.text
    assert "TORCHMOOR_HANDLER_MANY_CACHE=disabled" in caplog.text
    assert parse(changed("Endpoints.0.MultiModelConfig", {})).proxy.endpoints[0].multi_model == MultiModelSettings()


def test_endpoint_with_adapters_has_one_model() -> None:
    content = changed("Endpoints.0.adapters", {"hot_outstanding": 4})
    [endpoint] = parse(content).proxy.endpoints
    assert endpoint.multi_model == MultiModelSettings(are_adapters=True, hot_outstanding=4)
    assert endpoint.has_adapters
    assert not endpoint.has_many
    content["Endpoints"][0]["multi_model"] = {"max_models": 5}
    with pytest.raises(ConfigError, match="multi_model is only for an endpoint with MultiModelConfig"):
        parse(content)
    content["Endpoints"][0]["MultiModelConfig"] = {}
    with pytest.raises(ConfigError, match="adapters of one model, or MultiModelConfig, but not both"):
        parse(content)


def test_keys_of_sagemakers_machines_are_without_effect_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    """Keys for SageMaker's machines are ignored with a log message, so that create_endpoint_config's file works."""
    with caplog.at_level(logging.WARNING):
        configuration = parse(changed(f"{VARIANT}.InstanceType", "ml.g5.xlarge"))

    assert isinstance(configuration, Configuration)
    assert "ProductionVariants[0].InstanceType" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("listen: {port: 1}\nlisten: {port: 2}\n", "key 'listen' is given twice"),
        ("a: [", "not valid YAML"),
        ("? [a, b]\n: 1\n", "a key must be plain text"),
        ("[" * 500, "not valid YAML"),
        ("listen: {port: !!int x}", "not valid YAML: 'x' is not a valid int"),
        ("listen: {host: 2024-13-45}", "not valid YAML: '2024-13-45' is not a valid timestamp"),  # taken for a date
        ("listen: {host: 0x_}", "not valid YAML: '0x_' is not a valid int"),
        ("listen: {host: !!timestamp x}", "not valid YAML: 'x' is not a valid timestamp"),
        ("listen: {host: !!bool x}", "not valid YAML: 'x' is not a valid bool"),
        ("!!python/object:os.system {}", "not valid YAML"),
        ("", "the file must be keys and values, not None"),
        ("#" * (MAX_FILE_BYTES + 1), "is longer than"),
    ],
)
def test_file_that_is_none_is_refused_by_its_name(tmp_path: Path, text: str, message: str) -> None:
    """A file that is not a configuration is refused by name, including duplicate keys and code in YAML tags."""
    path = tmp_path / "torchmoor.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message) as caught:
        read_file(path, session_keys="")

    assert "torchmoor.yaml" in str(caught.value)


def test_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    """The error for a missing file is the system's."""
    with pytest.raises(ConfigError, match=r"cannot read .*nothing: No such file"):
        read_file(tmp_path / "nothing", session_keys="")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda children: (
            st.lists(children, max_size=3)
            | st.dictionaries(
                st.sampled_from(["Endpoints", "Instances", "EndpointConfig", "listen", "port", "name", "sessions"]),
                children,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_anything_else_is_a_config_error_too(content: object) -> None:
    """Any other content is a configuration error without a traceback."""
    with pytest.raises(ConfigError):
        parse(content)


RESOURCE = "endpoint/chat/variant/v"


def test_autoscaling_example_in_the_docs_says_what_is_the_default() -> None:
    """The autoscaling example in the documentation has the published numbers, which are the defaults."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT_DOCS / "autoscaling.md").read_text(), re.DOTALL)

    configuration = parse(yaml.safe_load(text), session_keys=KEYS)

    assert configuration.proxy.endpoints[0].variants[0].scaling == ScalingSettings()
    assert configuration.launch == LaunchSettings()


TRACKING = {"TargetValue": 2.0, "ScaleInCooldown": 30, "ScaleOutCooldown": 20}
STEP = {
    "AdjustmentType": "ChangeInCapacity",
    "Cooldown": 10,
    "StepAdjustments": [{"MetricIntervalLowerBound": 0, "ScalingAdjustment": 2}],
}


def tracking(configuration: dict[str, Any]) -> dict[str, Any]:
    """Return a policy of target tracking."""
    return {"PolicyType": "TargetTrackingScaling", "TargetTrackingScalingPolicyConfiguration": configuration}


def predefined(metric: str) -> dict[str, Any]:
    return {"TargetValue": 70.0, "PredefinedMetricSpecification": {"PredefinedMetricType": metric}}


def scaled(**entry: object) -> dict[str, Any]:
    """Return SMALL with Autoscaling instead of instances; None deletes a key of its entry."""
    content = changed("Instances", None)
    given = {"ResourceId": RESOURCE, "MinCapacity": 0, "MaxCapacity": 3, **entry}
    content["Autoscaling"] = [{key: value for key, value in given.items() if value is not None}]
    return content


def test_autoscaling_has_the_published_policies_unless_it_says_others() -> None:
    """Autoscaling uses Application Auto Scaling's terms and default policies, and needs no instances in the file."""
    default = parse(scaled())
    own = parse(
        scaled(
            ServiceNamespace="sagemaker",
            ScalingPolicies=[
                {"PolicyType": "TargetTrackingScaling", "TargetTrackingScalingPolicyConfiguration": TRACKING},
                {"PolicyName": "wake", "PolicyType": "StepScaling", "StepScalingPolicyConfiguration": STEP},
            ],
            max_hold_s=20,
        )
    )

    assert default.instances == ()
    assert default.proxy.endpoints[0].variants[0].scaling == ScalingSettings(max_capacity=3)
    assert own.proxy.endpoints[0].variants[0].scaling == ScalingSettings(
        max_capacity=3,
        tracking=TargetTracking(target=2, scale_in_cooldown_s=30, scale_out_cooldown_s=20),
        step=StepScaling(num_instances=2, cooldown_s=10),
        max_hold_s=20,
    )


@pytest.mark.parametrize("metric", [TrackedMetric.CONCURRENCY, TrackedMetric.INVOCATIONS])
def test_predefined_metrics_of_variants_are_tracked(metric: TrackedMetric) -> None:
    """The two predefined metrics of real-time variants, which AWS's own policies use, are tracked."""
    (variant,) = (
        parse(scaled(MinCapacity=1, ScalingPolicies=[tracking(predefined(metric.value))])).proxy.endpoints[0].variants
    )

    assert variant.scaling.tracking == TargetTracking(metric=metric, target=70, scale_in_cooldown_s=300)
    assert variant.scaling.counts_invocations is (metric is TrackedMetric.INVOCATIONS)


def test_published_policy_alone_wakes_an_endpoint_at_zero(caplog: pytest.LogCaptureFixture) -> None:
    """Target tracking with MinCapacity 0, as published, gets a step out of zero, with one log message."""
    policy = {"PolicyType": "TargetTrackingScaling", "TargetTrackingScalingPolicyConfiguration": TRACKING}

    with caplog.at_level(logging.INFO):
        (variant,) = parse(scaled(MinCapacity=0, ScalingPolicies=[policy])).proxy.endpoints[0].variants

    assert variant.scaling.step == StepScaling(num_instances=1)
    assert variant.scaling.tracking is not None
    assert len([record for record in caplog.records if "is assumed" in record.message]) == 1


@pytest.mark.parametrize(("given", "least", "count"), [(0, 0, 0), (None, 0, 0), (2, 0, 2), (None, 1, 1)])
def test_initial_instance_count_may_be_none(given: int | None, least: int, count: int) -> None:
    """InitialInstanceCount may be 0, which SageMaker's model refuses; if missing, it is MinCapacity."""
    content = scaled(MinCapacity=least)
    if given is not None:
        content["Endpoints"][0]["EndpointConfig"]["ProductionVariants"][0]["InitialInstanceCount"] = given

    scaling = parse(content).proxy.endpoints[0].variants[0].scaling

    assert scaling.initial_count == count


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"ResourceId": "endpoint/other/variant/v"}, "ResourceId must be one of endpoint/chat/variant/v, not"),
        ({"MinCapacity": None}, r"Autoscaling\[0\].MinCapacity is missing"),
        ({"MaxCapacity": "3"}, "Invalid type for parameter MaxCapacity"),
        ({"MaxCapacity": 0}, "MaxCapacity must be 1 or more, not 0"),
        ({"Policies": []}, "unknown key 'Policies'"),
        ({"ScalableDimension": "ecs:service:DesiredCount"}, "ScalableDimension must be sagemaker:variant"),
        ({"max_hold_s": True}, "max_hold_s must be a number, not True"),
        ({"max_hold_s": 0}, "max_hold_s must be positive"),
        ({"ScalingPolicies": {}}, "ScalingPolicies must be a list"),
        ({"ScalingPolicies": []}, "MinCapacity 0 needs a StepScaling policy"),
        ({"ScalingPolicies": [{"PolicyType": "StepScaling"}]}, "the configuration of that name"),
        (
            {"ScalingPolicies": [{"PolicyType": "StepScaling", "TargetTrackingScalingPolicyConfiguration": TRACKING}]},
            "the configuration of that name",
        ),
        (
            {"ScalingPolicies": [{"PolicyType": "StepScaling", "StepScalingPolicyConfiguration": STEP}] * 2},
            "there is a StepScaling policy already",
        ),
        (
            {
                "ScalingPolicies": [
                    {
                        "PolicyType": "StepScaling",
                        "StepScalingPolicyConfiguration": {**STEP, "AdjustmentType": "PercentChangeInCapacity"},
                    }
                ]
            },
            "AdjustmentType must be ChangeInCapacity or ExactCapacity",
        ),
        (
            {
                "ScalingPolicies": [
                    {
                        "PolicyType": "StepScaling",
                        "StepScalingPolicyConfiguration": {
                            **STEP,
                            "StepAdjustments": [{"MetricIntervalLowerBound": 1, "ScalingAdjustment": 1}],
                        },
                    }
                ]
            },
            "StepAdjustments must have one for the interval from 0",
        ),
        (
            {
                "ScalingPolicies": [
                    {
                        "PolicyType": "TargetTrackingScaling",
                        "TargetTrackingScalingPolicyConfiguration": {
                            **TRACKING,
                            "CustomizedMetricSpecification": {"MetricName": "CPUUtilization"},
                        },
                    }
                ]
            },
            "the metric must be ApproximateBacklogSizePerInstance",
        ),
        (
            {"ScalingPolicies": [tracking(predefined("SageMakerInferenceComponentInvocationsPerCopy"))]},
            "PredefinedMetricSpecification: the metric must be SageMakerVariantConcurrentRequestsPerModelHigh.* or "
            "SageMakerVariantInvocationsPerInstance, not 'SageMakerInferenceComponentInvocationsPerCopy'",
        ),
        (
            {"ScalingPolicies": [tracking(predefined("any") | {"CustomizedMetricSpecification": {}})]},
            "give CustomizedMetricSpecification or PredefinedMetricSpecification, not both",
        ),
    ],
)
def test_autoscaling_that_cannot_work_is_refused(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(scaled(**entry))


def test_autoscaling_and_instances_of_one_variant_exclude_each_other() -> None:
    """A variant has either autoscaling or listed instances, because the autoscaler must know all of them."""
    with pytest.raises(ConfigError, match="has Autoscaling, which starts its instances"):
        parse({**scaled(), "Instances": SMALL["Instances"]})
    with pytest.raises(ConfigError, match="given twice"):
        parse({**scaled(), "Autoscaling": scaled()["Autoscaling"] * 2})
    with pytest.raises(ConfigError, match="Autoscaling must be a list of one or more"):
        parse({**scaled(), "Autoscaling": []})


def test_each_group_is_in_the_module_of_its_name() -> None:
    """Readers find `timeouts.model_timeout_s` in config/timeouts.py."""
    assert {name: kind.__module__ for name, kind in GROUPS.items()} == {
        name: f"torchmoor.config.{name}" for name in GROUPS
    }
