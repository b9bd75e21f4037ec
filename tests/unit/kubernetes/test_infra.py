"""The infra file: layers, unknown keys, paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollway.errors import SpecError, UsageError
from rollway.kubernetes.infra import DEFAULTS_VARIABLE, load_infra, parse_infra
from tests.unit.kubernetes.objects import SMALL, dump


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(DEFAULTS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(value))
    return path


def test_layers_are_merged_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = {"namespace": "mine", "image": "u:1", "labels": {"team": "a", "cost": "1"}}
    monkeypatch.setenv(DEFAULTS_VARIABLE, str(write(tmp_path / "user.yaml", user)))
    file = write(tmp_path / "infra.yaml", {"namespace": "file", "labels": {"team": "b"}})
    infra = load_infra(infra=file, overrides=["labels.cost=2", "scheduler.kind=default"])
    assert (infra.namespace, infra.image) == ("file", "u:1")
    assert infra.labels == {"team": "b", "cost": "2"}


def test_a_file_of_defaults_that_is_named_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEFAULTS_VARIABLE, str(tmp_path / "none.yaml"))
    with pytest.raises(UsageError, match="cannot be read"):
        load_infra(infra=write(tmp_path / "infra.yaml", SMALL))


def test_a_recipe_may_hold_it(tmp_path: Path) -> None:
    recipe = write(tmp_path / "GRPO_Math.yaml", {"grpo": {}, "infra": {"namespace": "rl"}})
    infra = load_infra(recipe)
    assert (infra.name, infra.namespace) == ("grpo-math", "rl")


def test_a_toml_recipe_may_hold_it(tmp_path: Path) -> None:
    recipe = tmp_path / "rl.toml"
    recipe.write_text('max_steps = 3\n[infra]\nnamespace = "rl"\n')
    assert load_infra(recipe).namespace == "rl"


def test_two_descriptions_are_refused(tmp_path: Path) -> None:
    recipe = write(tmp_path / "recipe.yaml", {"infra": {"namespace": "rl"}})
    with pytest.raises(UsageError, match="Keep one of the two"):
        load_infra(recipe, write(tmp_path / "infra.yaml", SMALL))


def test_a_recipe_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no `infra:` section"):
        load_infra(write(tmp_path / "recipe.yaml", {"grpo": {}}))
    with pytest.raises(UsageError, match="no description"):
        load_infra()


def test_a_recipe_beside_it_must_agree_on_the_namespace(tmp_path: Path) -> None:
    generation = {"dynamo_cfg": {"dgd_name": "policy", "namespace": "other"}}
    recipe = write(tmp_path / "recipe.yaml", {"policy": {"generation": generation}})
    with pytest.raises(SpecError, match=r"in the namespace other.*namespace: rl"):
        load_infra(recipe, write(tmp_path / "infra.yaml", SMALL))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"namspace": "rl"}, "`namspace`: there is no such field. Did you mean `namespace`"),
        ({"placement": {"nodeselector": {}}}, "Did you mean `nodeSelector`"),
        ({"dynamo": {"policy": {"manifst": "x"}}}, "Did you mean `manifest`"),
        ({"dynamo": {"stack": {"manifst": "x"}}}, "Did you mean `manifest`"),
        ({"kuberay": {"training": {"specs": {}}}}, "Did you mean `spec`"),
        ({"launch": {"code": {"pth": "/a"}}}, "Did you mean `path`"),
        ({"dynamo": {"policy": {}}}, "one of `manifest` and `stack`"),
        ({"dynamo": {"policy": {"manifest": "a", "stack": "b"}}}, "one of `manifest` and"),
        ({"dynamo": {"Policy!": {"manifest": "a"}}}, "cannot be a key"),
        ({"scheduler": {"kind": "kai"}}, "`queue` goes with"),
        ({"scheduler": {"queue": "a"}}, "`queue` goes with"),
        ({"workspace": {"mountPath": "/w"}}, "give one of `existingClaim`"),
        ({"workspace": {"mountPath": "w", "hostPath": "/a"}}, "workspace.mountPath"),
        ({"launch": {"code": {"source": "volume"}}}, "needs `path`"),
        ({"launch": {"code": {"path": "rel"}}}, "must begin with /"),
        ({"kuberay": {"training": {}}}, "give one of `spec` and `existing`"),
        ({"image": "host:5000/a"}, "no tag"),
        ({"name": "a" * 48}, "at most 47"),
        ({"namespace": "Rl"}, "cannot be the name"),
        ({"labels": {"a": "b c"}}, "labels.a"),
    ],
)
def test_bad_input_is_named_with_its_path(data: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_infra({"name": "math", **data})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("launch: python t.py", "`launch`: .*got 'python t.py'"),
        ("launch: [a]", "`launch`: "),
        ("dynamo: x", "`dynamo`: .*got 'x'"),
        ("dynamo: [a]", "`dynamo`: "),
        ("a: 1\n---\nb: 2", "has 2 YAML documents"),
        ("", "is not a mapping of fields"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "infra.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=message):
        load_infra(infra=file)


def test_an_override_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="`launch`: "):
        load_infra(infra=write(tmp_path / "infra.yaml", SMALL), overrides=["launch=x"])


def test_two_volumes_have_two_places() -> None:
    volume = {"hostPath": "/a", "mountPath": "/data"}
    with pytest.raises(SpecError, match="one `mountPath`"):
        parse_infra({"name": "m", "workspace": volume, "checkpoints": volume})


def test_paths_are_relative_to_the_file_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a" / "infra.yaml", {"dynamo": {"policy": {"manifest": "b/p.yaml"}}})
    monkeypatch.chdir(tmp_path)
    infra = load_infra(infra=Path("a/infra.yaml"))
    assert infra.dynamo["policy"].manifest == tmp_path / "a" / "b" / "p.yaml"
    override = "dynamo.policy.manifest=other/q.yaml"
    infra = load_infra(infra=file, overrides=[override])
    assert infra.dynamo["policy"].manifest == tmp_path / "other" / "q.yaml"


@pytest.mark.parametrize("path", ["../p.yaml", "/etc/passwd", "a/../../p.yaml", "link/p.yaml"])
def test_a_path_out_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    file = write(tmp_path / "a" / "infra.yaml", {"dynamo": {"policy": {"manifest": path}}})
    (tmp_path / "a" / "link").symlink_to(tmp_path)
    with pytest.raises(SpecError, match="is outside of"):
        load_infra(infra=file)


def test_uploaded_code_is_beside_the_file(tmp_path: Path) -> None:
    code = {"source": "upload", "path": "code"}
    file = write(tmp_path / "a" / "infra.yaml", {"launch": {"code": code}})
    assert load_infra(infra=file).launch.code.path == str(tmp_path / "a" / "code")
    file = write(tmp_path / "a" / "infra.yaml", {"launch": {"code": {**code, "path": ".."}}})
    with pytest.raises(SpecError, match=r"launch.code.path.*is outside of"):
        load_infra(infra=file)
    code = {"source": "volume", "path": "/code"}  # of the pods
    file = write(tmp_path / "a" / "infra.yaml", {"launch": {"code": code}})
    assert load_infra(infra=file).launch.code.path == "/code"


def test_targets_name_the_parts() -> None:
    data = {"dynamo": {"policy": {"manifest": "a"}}, "deployments": {"gym": {"spec": {"a": 1}}}}
    infra = parse_infra({**SMALL, **data})
    assert infra.targets == ["dynamo.policy", "kuberay.training", "deployments.gym"]


def test_a_label_that_kubernetes_would_refuse_is_named() -> None:
    parse_infra({**SMALL, "labels": {"a/b": "c.d_e"}, "annotations": {"a/b": "any text"}})
    for labels in ({"a b": "c"}, {"a": "c d"}, {"a": "x" * 64}):
        with pytest.raises(SpecError, match="labels"):
            parse_infra({**SMALL, "labels": labels})
