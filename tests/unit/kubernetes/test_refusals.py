"""Manifests in errors have no secrets, and stay readable."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollway.kubernetes.drift import compare_objects
from rollway.kubernetes.refusals import blank_secrets, show_manifest

NAMES = st.sampled_from(["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "PGPASSWORD"])
VALUES = st.from_regex(r"[A-Za-z0-9]{12,40}", fullmatch=True)


def make_job(env: list[dict[str, Any]], text: str) -> dict[str, Any]:
    container = {"name": "ray", "env": env}
    template = {"spec": {"containers": [container]}}
    spec = {"entrypoint": text, "rayClusterSpec": {"headGroupSpec": {"template": template}}}
    return {"kind": "RayJob", "metadata": {"name": "train"}, "spec": spec}


@given(NAMES, VALUES)
def test_no_secret_is_shown_wherever_it_stands(name: str, value: str) -> None:
    entry = {"name": name, "value": value}
    texts = [f"{name}={value} python run.py", f"env {name}='{value}' run", "run"]
    texts += [f"env_vars:\n  {name}: {value}\n  SEED: 17"]
    for text in texts:
        job = make_job([entry, {"name": "SEED", "value": "17"}], text)
        job["spec"]["env_vars"] = {name: value}
        shown = show_manifest(job)
        assert value not in shown and name in shown and "17" in shown
        assert yaml.safe_load(shown)["metadata"]["name"] == "train"
        assert job["spec"]["env_vars"] == {name: value}  # the caller's own stays


def test_references_to_secrets_stay_readable() -> None:
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    job = make_job([{"name": "HF_TOKEN", "valueFrom": reference}], "python run.py --key-bits=8")
    assert blank_secrets(job) == job


def test_named_parts_are_compared_by_their_names() -> None:
    def make(parts: list[dict[str, Any]], **meta: Any) -> dict[str, Any]:
        return {"metadata": {"name": "g", **meta}, "spec": {"components": parts, "n": [1]}}

    live = make([{"name": "a", "x": 1}, {"name": "b"}], resourceVersion="9", uid="u")
    wanted = make([{"name": "b"}, {"name": "a", "x": 2}])
    assert [str(drift) for drift in compare_objects(live, wanted)] == [
        "spec.components[a].x: 1 -> 2"
    ]
    assert compare_objects(live, live) == []
