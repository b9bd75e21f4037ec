"""What reviewers of prime-rl's own Dynamo work found, and the test that fails without the fix.

Numbers and letters are those of the contract sheet: a bug of the server's side and of the client's
has a test for each.
"""

from __future__ import annotations

import importlib

import pytest

from tests.unit.engine import test_prime_rl_broadcast
from tests.unit.prime_rl import (
    test_broadcast,
    test_check,
    test_client,
    test_client_admin,
    test_deploy,
    test_directories,
    test_generate,
    test_lora,
    test_per_worker,
    test_pools,
    test_updates,
    test_virtual_worker,
)

FINDINGS = {
    "1: an elastic pool asked the system port for models": (
        test_pools.test_pods_are_matched_by_address_and_by_name
    ),
    "2: an elastic pool that rebuilt its clients dropped the backend": (
        test_pools.test_rebuilt_clients_keep_the_backend
    ),
    "3: a pod without a match got the first worker": (
        test_pools.test_a_pod_that_nobody_lists_gets_nothing
    ),
    "4: pause and resume had no limit and no repetition": (
        test_client_admin.test_pause_and_resume_are_bounded_and_repeated
    ),
    "5: a group was formed by the calls of another backend": (
        test_client_admin.test_a_group_gets_all_ranks_by_the_calls_of_its_backend
    ),
    "5: a missing transport was skipped silently": (
        test_updates.test_a_failed_broadcaster_is_the_answer_of_the_next_pause_once
    ),
    "6: admin_base_url named the listing of the frontend": (
        test_client.test_admin_calls_never_go_to_the_listing_of_the_frontend
    ),
    "7: the example lacked the backend": test_check.test_the_config_of_june_names_its_backend,
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
    "12: a teacher's empty messages were refused": (
        test_generate.test_chats_with_token_ids_are_answered_where_june_looks
    ),
    "12: the client sent a teacher's empty messages": (
        test_client.test_a_teacher_is_asked_by_chat_with_a_placeholder
    ),
    "13: discovery lacked the headers of the environment": (
        test_client.test_workers_are_discovered_with_all_headers
    ),
    "14: discovery was tried once": (
        test_pools.test_discovery_is_repeated_until_the_workers_are_there
    ),
    "1.4: a client took the first entry, and an empty list for an answer": (
        test_client.test_scores_that_are_missing_are_an_error
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
    "a: a client left engines paused after a pause that failed half-way": (
        test_client_admin.test_a_pause_that_fails_is_undone_everywhere
    ),
    "b: a client ignored a failed group, and waited for ever": (
        test_client_admin.test_a_group_that_hangs_ends_with_its_timeout
    ),
    "b: a failed /init_broadcaster was ignored": (
        test_updates.test_a_failed_broadcaster_is_the_answer_of_the_next_pause_once
    ),
    "c: an update was sent twice after a timeout": (
        test_updates.test_an_update_needs_a_pause_and_calls_may_be_repeated
    ),
    "c: a client sent an update twice after a timeout": (
        test_client_admin.test_an_update_without_an_answer_is_not_sent_again
    ),
    "d: a client resumed all engines after an update that failed on some": (
        test_client_admin.test_an_update_that_fails_on_one_server_resumes_none
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
    "f: a client's adapter kept the weights of its name": (
        test_client_admin.test_an_adapter_whose_name_is_taken_is_loaded_anew
    ),
    "g: an engine's .npy string went to the client": (
        test_generate.test_an_engines_npy_string_becomes_what_clients_read
    ),
    "h: a floored log-prob ended the turn": (
        test_generate.test_a_floored_log_prob_is_sampled_again_and_never_passed_on
    ),
    "i: weight_version is sent as `step_N` and as `N`": (
        test_virtual_worker.test_a_step_has_two_spellings
    ),
    "j: heads disagreed on the names of transports": (
        test_client.test_the_transport_follows_from_the_backend_in_the_names_that_a_client_knows
    ),
    "k: an adapter's answer says `success`, others say `ok`": (
        test_virtual_worker.test_answers_have_the_words_that_clients_wait_for
    ),
    "m: the listing named 0.0.0.0": (
        test_virtual_worker.test_the_listing_has_the_address_that_was_asked
    ),
    "m: a listing with 0.0.0.0 was believed": (
        test_client.test_a_worker_that_cannot_be_called_is_never_left_out
    ),
    "m: a listing of every worker named 0.0.0.0": test_per_worker.test_no_listing_names_0_0_0_0,
    "l: a client sent a relative weight_dir": (
        test_client_admin.test_a_relative_directory_is_sent_as_an_absolute_one
    ),
    "l: a relative weight_dir was taken for a repository": (
        test_directories.test_paths_stay_below_their_roots
    ),
    # The deployment.
    "6: the manifests' admin_base_url was the frontend's": (
        test_deploy.test_admin_addresses_are_the_gateways
    ),
    "7: a config without the backend passed unnoticed": (
        test_deploy.test_a_config_of_june_names_its_backend
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
