"""Infra files and manifests for the tests of what is rendered."""

from __future__ import annotations

from typing import Any

import yaml

from rollway.kubernetes.infra import Infra, merge, parse_infra
from rollway.yaml_input import copy_plain

IMAGE = "registry/rollway-dynamo:1.6.1"

BETA = """
apiVersion: v1
kind: ConfigMap
metadata: {name: other}
---
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: policy, labels: {team: a}}
spec:
  components:
    - name: Frontend
      type: frontend
      podTemplate:
        spec: {containers: [{name: main, image: "registry/rollway-dynamo:1.6.1"}]}
    - name: worker
      type: worker
      replicas: 2
      podTemplate:
        spec:
          containers:
            - name: main
              env: [{name: A, value: "1"}]
              resources: {limits: {nvidia.com/gpu: "1"}}
"""

ALPHA = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: policy}
spec:
  services:
    Frontend: {componentType: frontend}
    worker: {componentType: worker, replicas: 2, resources: {limits: {gpu: "1"}}}
"""

OLD = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: g}
spec:
  envs: [{name: A, value: "1"}]
  services:
    Frontend:
      componentType: frontend
      extraPodSpec: {mainContainer: {image: "a:1.6.1"}}
    Prefill:
      componentType: worker
      subComponentType: prefill
      envFromSecret: hf
      envs: [{name: B, value: "1"}, {name: C, value: "1"}]
      resources: {limits: {gpu: "2", cpu: "4", custom: {rdma/ib: "1"}}}
      sharedMemory: {size: 80Gi}
      scalingAdapter: {enabled: false}
      volumeMounts: [{name: models, mountPoint: /models}]
      frontendSidecar: {image: "f:1.6.1", args: [a], envs: [{name: D, value: "1"}]}
      extraPodSpec:
        nodeSelector: {a: b}
        mainContainer: {image: "a:1.6.1", env: [{name: C, value: "2"}]}
"""

LONG = """
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: policy, labels: {a: b}, annotations: {c: d}}
spec:
  env: [{name: A, value: b}]
  topologyConstraint: {clusterTopologyName: c, packDomain: d}
  components:
    - name: worker
      type: worker
      replicas: 1
      sharedMemorySize: 8Gi
      compilationCache: {pvcName: a, mountPath: /b}
      scalingAdapter: {}
      multinode: {nodeCount: 2}
      frontendSidecar: side
      experimental:
        gpuMemoryService: {mode: IntraPod}
        failover: {mode: IntraPod}
        grove: {forceScalingGroup: true}
      podTemplate:
        metadata: {labels: {a: b}, annotations: {a: b}}
        spec:
          nodeSelector: {a: b}
          affinity:
            nodeAffinity:
              requiredDuringSchedulingIgnoredDuringExecution:
                nodeSelectorTerms: [{matchExpressions: [{key: a, operator: In, values: [b]}]}]
          tolerations: [{operator: Exists}]
          imagePullSecrets: [{name: a}]
          resourceClaims: [{name: a, resourceClaimTemplateName: b}]
          volumes: [{name: v, emptyDir: {}}]
          containers:
            - name: main
              image: a:1.6.1
              command: [a]
              args: [b]
              env: [{name: A, value: "1"}]
              envFrom: [{secretRef: {name: s}}]
              resources: {limits: {nvidia.com/gpu: "1"}, requests: {cpu: "1"}, claims: [{name: a}]}
              volumeMounts: [{name: v, mountPath: /v}]
              livenessProbe: {httpGet: {path: /, port: 1}}
            - name: side
              image: b:1
              args: [c]
              env: [{name: B, value: c}]
              envFrom: [{secretRef: {name: s}}]
"""
"""Has every field that is looked into."""

_POD = {"spec": {"containers": [{"name": "ray"}]}}
CLUSTER: dict[str, Any] = {
    "rayVersion": "2.60.0",
    "headGroupSpec": {"template": _POD},
    "workerGroupSpecs": [{"groupName": "gpu", "replicas": 2, "template": _POD}],
}

SMALL: dict[str, Any] = {
    "name": "math",
    "namespace": "rl",
    "image": IMAGE,
    "kuberay": {"training": {"spec": CLUSTER}},
    "launch": {"entrypoint": "python train.py"},
}


def make_infra(**fields: Any) -> Infra:
    """Return a small run with some fields over it."""
    return parse_infra(merge(copy_plain(SMALL), fields))


def dump(value: Any) -> str:
    return yaml.safe_dump(value)
