"""`rollway doctor --stack`: check a stack that runs, and say how to mend what is wrong.

    attach ──► Subject: workers, labels, state ──┬──► serving.py   what it answers: versions,
                a few short requests ◄───────────┤                 taints, caches, log-probs, proof
                                                 ├──► network.py   ports, clocks, transfers of KV
                                                 └──► upkeep.py    limits, leftovers, the record

No check changes a weight, a label or a taint. Requests have one to four tokens, and a salt of their
own, so that nobody else meets what they leave in the caches. A check looks only at workers that the
checks before it found sound, so that one fault has one finding.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import rollway
from rollway.errors import RollwayError
from rollway.http import Http
from rollway.observe.doctor import network, serving, upkeep
from rollway.observe.doctor.subject import Subject
from rollway.stack.doctor import Finding

Check = Callable[[Subject], AsyncIterator[Finding]]

CHECKS: tuple[tuple[str, Check], ...] = (
    ("workers", serving.check_workers),
    ("versions", serving.check_versions),
    ("pools", serving.check_pools),
    ("taints", serving.check_taints),
    ("other versions", serving.check_refusal),
    ("KV events", serving.check_events),
    ("cache salt", serving.check_salt),
    ("log-probs", serving.check_logprobs),
    ("generation config", serving.check_generation_config),
    ("proof", serving.check_proof),
    ("admin ports", network.check_admin_ports),
    ("listeners", network.check_listeners),
    ("clocks", network.check_clocks),
    ("RDMA", network.check_rdma),
    ("KV transfer", network.check_transfer),
    ("file limits", upkeep.check_file_limits),
    ("disk", upkeep.check_disk),
    ("shared memory", upkeep.check_shared_memory),
    ("leftovers", upkeep.check_leftovers),
    ("packages", upkeep.check_packages),
    ("record", upkeep.check_record),
)


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found, and what it cost the stack."""

    stack: str
    findings: list[Finding]
    requests: int
    tokens: int


async def examine_stack(target: str, rl_url: str | None = None) -> Examination:
    """Run all checks on a stack, given its name or the address of its frontend."""
    async with Http() as http, rollway.attach(target, rl_url=rl_url, watch=False) as stack:
        subject = await Subject.read(stack, http)
        findings = []
        for name, check in CHECKS:
            findings += await _run(name, check, subject)
        return Examination(target, findings, subject.requests, subject.tokens)


async def _run(name: str, check: Check, subject: Subject) -> list[Finding]:
    """Run one check; one that fails is a finding, and the others go on."""
    findings = []
    try:
        async for finding in check(subject):
            findings.append(finding)
    except RollwayError as error:
        findings.append(Finding(name, "error", f"not checked: {error.message}", error.hint))
    return findings
