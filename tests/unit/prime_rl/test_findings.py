"""What reviewers of prime-rl's own Dynamo work found, and the test that fails without the fix.

Numbers and letters are those of the contract sheet.
"""

from __future__ import annotations

import importlib

import pytest

from tests.unit.engine import test_prime_rl_broadcast
from tests.unit.prime_rl import (
    test_broadcast,
    test_deploy,
    test_directories,
    test_generate,
    test_lora,
    test_updates,
    test_virtual_worker,
)

FINDINGS = {
    "5: a missing transport was skipped silently": (
        test_updates.test_a_failed_broadcaster_is_the_answer_of_the_next_pause_once
    ),
    "8: ranks of a group followed from the device's number, and met over several machines": (
        test_prime_rl_broadcast.test_all_ranks_of_a_fleet_are_different
    ),
    "9: steps were deleted that rollouts still needed": (
        test_broadcast.test_steps_are_kept_as_long_as_rollouts_may_need_them
    ),
    "10: experts were asserted to be uint8": (
        test_generate.test_experts_have_the_dtype_of_the_model_and_begin_where_asked
    ),
    "11: the dtype of experts followed from the sample": (
        test_generate.test_experts_have_the_dtype_of_the_model_and_begin_where_asked
    ),
    "1.4: a teacher's first entry was of another token": (
        test_generate.test_a_teacher_gets_the_prompts_own_token_alone
    ),
    "3.3: experts that were not captured went to the trainer": (
        test_generate.test_experts_that_were_not_captured_are_an_error
    ),
    "a: a pause that failed half-way left engines paused": (
        test_updates.test_a_pause_touches_no_worker
    ),
    "b: a failed /init_broadcaster was ignored": (
        test_updates.test_a_failed_broadcaster_is_the_answer_of_the_next_pause_once
    ),
    "c: an update was sent twice after a timeout": (
        test_updates.test_an_update_needs_a_pause_and_calls_may_be_repeated
    ),
    "d: all engines resumed after an update that failed on some": (
        test_updates.test_a_failed_update_stays_paused_until_one_succeeds
    ),
    "e: a marker of an earlier run counted": (
        test_directories.test_an_old_marker_of_a_step_that_is_written_again_counts_for_nothing
    ),
    "f: an adapter's name that was taken kept its weights": (
        test_lora.test_every_broadcast_has_a_name_of_its_own
    ),
    "g: an engine's .npy string went to the client": (
        test_generate.test_an_engines_npy_string_becomes_what_clients_read
    ),
    "h: a floored log-prob ended the turn": (
        test_generate.test_a_floored_log_prob_is_sampled_again_and_never_passed_on
    ),
    "m: the listing named 0.0.0.0": (
        test_virtual_worker.test_the_listing_has_the_address_that_was_asked
    ),
    "l: a relative weight_dir was taken for a repository": (
        test_directories.test_paths_stay_below_their_roots
    ),
    # The deployment.
    "6: the manifests' admin_base_url was the frontend's": (
        test_deploy.test_admin_addresses_are_the_gateways
    ),
    "15: a pod had a DRA claim and nvidia.com/gpu": test_deploy.test_gpus_are_asked_for_once,
    # Found in Rollway itself.
    "c: a step that was written again got the answer of the last update": (
        test_updates.test_a_directory_that_was_written_again_is_not_taken_for_a_repeated_call
    ),
}


@pytest.mark.parametrize("finding", FINDINGS)
def test_a_finding_has_a_test_that_runs(finding: str) -> None:
    test = FINDINGS[finding]
    module = importlib.import_module(test.__module__)
    assert getattr(module, test.__name__) is test and test.__name__.startswith("test_")
