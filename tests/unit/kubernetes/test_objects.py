"""Names that operators derive from ours."""

from __future__ import annotations

import pytest

from rollway.errors import SpecError
from rollway.kubernetes import objects


def test_the_service_of_a_component_is_lower_case_without_dots() -> None:
    assert objects.name_service("my.dgd", "Frontend") == "my-dgd-frontend"
    assert objects.name_service("a", "VllmDecodeWorker") == "a-vllmdecodeworker"


def test_the_frontend_is_found_by_its_type_not_its_name() -> None:
    beta = {"spec": {"components": [{"name": "worker"}, {"name": "Web", "type": "frontend"}]}}
    assert objects.find_frontend({"metadata": {"name": "g"}, **beta}) == "g-web"
    pool = {"metadata": {"name": "g"}, "spec": {"components": [{"name": "w", "type": "worker"}]}}
    assert objects.find_frontend(pool) is None


def test_an_owner_neither_controls_nor_blocks() -> None:
    """Both operators go on, and nobody needs permissions on finalizers."""
    job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "train", "uid": "u"}}
    body = {"metadata": {"name": "g", "labels": {"a": "b"}}}
    metadata = objects.add_owner(body, job)["metadata"]
    assert metadata.pop("ownerReferences") == [
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "train", "uid": "u",
         "controller": False, "blockOwnerDeletion": False}
    ]  # fmt: skip
    assert metadata == body["metadata"] and objects.add_owner(body, None) is body


@pytest.mark.parametrize(
    ("namespace", "is_ours"),
    [
        ("rl-policy", True),
        ("rl-policy-1a2b3c4d", True),
        ("rl-policy2", False),
        ("rl-policy-1a2b3c4", False),
        ("rl-policy-1a2b3c4d5", False),
        ("rl-policy-other", False),
        ("x-rl-policy", False),
    ],
)
def test_workers_register_with_and_without_a_suffix(namespace: str, is_ours: bool) -> None:
    assert objects.is_worker_namespace(namespace, "rl", "policy") is is_ours


def test_dots_of_a_name_are_dashes_in_the_dynamo_namespace() -> None:
    assert objects.name_dynamo_namespace("rl", "qwen.3") == "rl-qwen-3"
    assert not objects.is_worker_namespace("rl-qwen.3", "rl", "qwen.3")


@pytest.mark.parametrize(("kind", "longest"), [("RayJob", 47), ("RayCluster", 53)])
def test_a_name_that_kuberay_refuses_in_a_status_is_refused_here(kind: str, longest: int) -> None:
    assert objects.check_name(kind, "a" * longest, "name")
    with pytest.raises(SpecError, match=f"at most {longest}"):
        objects.check_name(kind, "a" * (longest + 1), "name")
    with pytest.raises(SpecError, match="with a letter first"):
        objects.check_name(kind, "1a", "name")


def test_a_graph_is_too_long_once_a_component_is_appended() -> None:
    objects.check_graph_name("g" * 54, ["Frontend"], "name")
    with pytest.raises(SpecError, match=r"64 characters.*at most 54"):
        objects.check_graph_name("g" * 55, ["Frontend"], "name")


@pytest.mark.parametrize(
    ("image", "tag"),
    [
        ("a", ""),
        ("host:5000/a", ""),
        ("host:5000/a:1.6.1", "1.6.1"),
        ("a:1.6.1@sha256:00", "1.6.1"),
        ("a@sha256:00", ""),
    ],
)
def test_a_port_is_no_tag(image: str, tag: str) -> None:
    assert objects.read_tag(image) == tag


def test_an_image_needs_a_tag_or_a_digest() -> None:
    objects.check_image("a@sha256:00", "image")
    with pytest.raises(SpecError, match="no tag"):
        objects.check_image("host:5000/a", "image")


@pytest.mark.parametrize("tag", ["1.6.1", "1.6.1-rc1", "0.0.1"])
def test_the_operator_reads_a_version(tag: str) -> None:
    assert objects.has_version_tag(f"host:5000/a:{tag}")


@pytest.mark.parametrize("tag", ["latest", "v1.6.1", "1.6", "my-tag", "01.6.1"])
def test_the_operator_reads_no_version(tag: str) -> None:
    assert not objects.has_version_tag(f"a:{tag}")
