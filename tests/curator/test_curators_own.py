"""Curator's own tests of serving, with the parts that Rollway replaces replaced by ours.

Neither the wheel nor the sdist has these tests: $CURATOR_SOURCE names a checkout of Curator 1.4.0.
`git clone --branch v1.4.0 https://github.com/NVIDIA-NeMo/Curator`, for example.

Of its tests that need no GPU, these are about what a user sees, and ours must pass them:

    test_server      InferenceServer                  7 of 8
    test_backend     names of models                  3 of 3
    test_backend     the router that is chosen        2 of 8
    test_runtime_env the merge of environments        9 of 9

The others do not apply:

    test_server      test_dispatches_to_correct_backend asserts that `DynamoServerConfig` gets
                     Curator's own backend, which is what we replace
    test_backend     of the router's, three assert Curator's word for a mode (`round_robin`, None),
                     which Dynamo refuses or which says nothing (defect B), and three a rule against
                     KV events with a hybrid cache that vLLM 0.31 does not need; the rest mocks
                     private methods: _launch_frontend, _deploy_and_healthcheck and so on
    test_vllm        calls launch_replicas and mocks ManagedSubprocess.spawn
    test_placement   calls plan_replica_bundle_shape; test_defects.py has its cases
    test_subprocess_mgr   calls ManagedSubprocess, the actor that Rollway has no need of
    test_infra       calls private functions of Curator's backend
    test_config (two files)   pass, but run Curator's config classes only, which we do not
                     replace: they would pass without us, so they show nothing
    test_integration, ray_serve/   need two GPUs; or are about the Ray Serve backend
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = os.environ.get("CURATOR_SOURCE", "")
OURS = {
    "test_server.py::TestInferenceServer": (
        *("test_endpoint_uses_configured_port", "test_stop_before_start_is_noop"),
        *("test_init_rejects_backend_model_mismatch", "test_init_rejects_mixed_model_config_types"),
        *("test_start_stop_delegates_to_backend", "test_wait_for_healthy"),
        "test_wait_for_healthy_matches_expected_model_names",
    ),
    "dynamo/test_backend.py::TestDynamoBackendValidateUniqueModelNames": (
        *("test_accepts_distinct_names", "test_rejects_duplicate_names"),
        "test_rejects_component_slug_collision",
    ),
    "dynamo/test_backend.py::TestResolveEffectiveRouter": (
        "test_auto_picks_kv_and_auto_enables_kv_events_for_disagg",
        "test_explicit_kv_with_kv_events_false_is_honored",
    ),
    "test_runtime_env.py::TestDynamoRuntimeEnv": (
        *("test_default_runtime_env_only", "test_user_runtime_env_merges_uv_packages"),
        *("test_user_env_vars_are_preserved", "test_working_dir_is_passed_through"),
    ),
    "test_runtime_env.py::TestMergeModelRuntimeEnvs": (
        *("test_no_models_yields_default_env", "test_merges_env_vars_across_models"),
        *("test_later_model_env_var_overrides_earlier",),
        *("test_ignores_models_with_empty_runtime_env",),
        "test_user_dict_form_uv_concatenates_install_options",
    ),
}
PLUGIN = """
import nemo_curator.core.serve as serve
from nemo_curator.core.serve.dynamo.backend import DynamoBackend
from rollway.integrations.curator import InferenceServer, translate
from rollway.model_spec import merge_runtime_envs

def merge(base, over):
    return merge_runtime_envs(base or {}, over or {})

serve.BaseModelConfig.merge_runtime_envs = staticmethod(merge)
serve.InferenceServer = InferenceServer
DynamoBackend._validate_unique_model_names = staticmethod(translate.check_models)
DynamoBackend._resolve_effective_router = staticmethod(translate.choose_router)
"""


@pytest.mark.skipif(not SOURCE, reason="$CURATOR_SOURCE names no checkout of NeMo Curator 1.4.0")
def test_curators_tests_of_behaviour(tmp_path: Path) -> None:
    (tmp_path / "replaced.py").write_text(PLUGIN)
    tests = Path(SOURCE, "tests", "core", "serve")
    names = [f"{tests}/{group}::{name}" for group, names in OURS.items() for name in names]
    # `confcutdir`: Curator's top conftest starts a Ray cluster, which these tests do not use.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "replaced", f"--confcutdir={tests}"]
    command += ["-c", os.devnull, "--rootdir", SOURCE, "-p", "no:cacheprovider", *names]
    result = subprocess.run(
        command, cwd=SOURCE, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]
    assert re.search(rf"\b{len(names)} passed", result.stdout)
