"""The structure of a ScaledObject, strictly: nobody publishes a schema of it that could be had offline.

Written from the fields of `ScaledObjectSpec` in KEDA's apis/keda/v1alpha1/scaledobject_types.go, those of 2.20 that are
used here; the behaviour of scaling is a HorizontalPodAutoscaler's own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A part of it."""


Count = Annotated[int, msgspec.Meta(ge=0)]
Some = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class Target(Strict, frozen=True, kw_only=True):
    name: Text
    kind: Literal["Deployment"] = "Deployment"


class Fallback(Strict, frozen=True, kw_only=True):
    failure_threshold: Count
    replicas: Count
    behavior: Literal["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"] = "static"


class Modifiers(Strict, frozen=True, kw_only=True):
    formula: Text
    target: Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]*$")]
    """A whole number: with another one a fallback is refused."""
    activation_target: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+$")] = "0"
    metric_type: Literal["AverageValue"] = "AverageValue"
    """`Value` would not do for a fallback."""


class Autoscaler(Strict, frozen=True, kw_only=True):
    name: str = ""
    behavior: dict[str, Any] = {}


class Advanced(Strict, frozen=True, kw_only=True):
    scaling_modifiers: Modifiers
    horizontal_pod_autoscaler_config: Autoscaler = Autoscaler()
    restore_to_original_replica_count: bool = False


class JetStream(Strict, frozen=True, kw_only=True):
    """Metadata of the nats-jetstream scaler. All are strings in YAML."""

    nats_server_monitoring_endpoint: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9.-]+:[0-9]+$")]
    account: Text
    stream: Text
    consumer: Text
    lag_threshold: str = "10"
    activation_lag_threshold: str = "0"
    use_https: Literal["true", "false"] = "false"


class Trigger(Strict, frozen=True, kw_only=True):
    type: Literal["nats-jetstream"]
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z_]+$")]
    """A formula knows a trigger by it."""
    metadata: JetStream


class Spec(Strict, frozen=True, kw_only=True):
    scale_target_ref: Target
    min_replica_count: Count
    max_replica_count: Some
    polling_interval: Some
    cooldown_period: Count
    initial_cooldown_period: Count = 0
    fallback: Fallback
    advanced: Advanced
    triggers: list[Trigger]


class Metadata(Strict, frozen=True, kw_only=True):
    name: Text
    namespace: Text
    labels: dict[str, str] = {}


class ScaledObject(Strict, frozen=True, kw_only=True):
    api_version: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: Metadata
    spec: Spec


def parse(found: dict[str, Any]) -> ScaledObject:
    """Raises msgspec.ValidationError, naming the field."""
    return msgspec.convert(found, ScaledObject)
