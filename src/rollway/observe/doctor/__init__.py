"""`rollway doctor --stack`: check a stack that runs, and say how to mend what is wrong.

    attach ──► Subject: workers, labels, state ──┬──► serving.py   what it answers: versions,
                a few short requests ◄───────────┤                 taints, caches, log-probs, proof
                                                 └──► machine.py   ports, limits, the record

No check changes a weight, a label or a taint. Requests have one to four tokens, and a salt of their
own, so that nobody else meets what they leave in the caches. A check looks only at workers that the
checks before it found sound, so that one fault has one finding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import rollway
from rollway.errors import Problem, RollwayError
from rollway.http import Http
from rollway.observe.doctor import machine, serving
from rollway.observe.doctor.subject import Findings, ModelWorkers, Subject
from rollway.stack.state import StackState

Check = Callable[[Subject], Findings]


def _each_pool(check: Callable[[Subject, ModelWorkers], Findings], *, asks: bool = False) -> Check:
    """Check every model; if the check `asks` for tokens, those that can answer."""

    async def check_pools(subject: Subject) -> Findings:
        for pool in subject.pools:
            if not asks or serving.can_generate(pool):
                async for finding in check(subject, pool):
                    yield finding

    return check_pools


def _here(check: Callable[[Subject, StackState], Findings]) -> Check:
    """Check a stack whose processes are on this machine."""

    async def check_machine(subject: Subject) -> Findings:
        if subject.local_state is not None:
            async for finding in check(subject, subject.local_state):
                yield finding

    return check_machine


CHECKS: tuple[tuple[str, Check], ...] = (
    ("workers", _each_pool(serving.check_workers)),
    ("versions", _each_pool(serving.check_versions)),
    ("pools", _each_pool(serving.check_pools)),
    ("taints", _each_pool(serving.check_taints)),
    ("other versions", _each_pool(serving.check_refusal, asks=True)),
    ("KV events", _each_pool(serving.check_events, asks=True)),
    ("cache salt", _each_pool(serving.check_salt, asks=True)),
    ("log-probs", _each_pool(serving.check_logprobs, asks=True)),
    ("generation config", _each_pool(serving.check_generation_config, asks=True)),
    ("proof", _each_pool(serving.check_proof)),
    ("admin ports", machine.check_admin_ports),
    ("listeners", machine.check_listeners),
    ("RDMA", machine.check_rdma),
    ("KV transfer", _each_pool(machine.check_transfer)),
    ("file limits", _here(machine.check_file_limits)),
    ("disk", _here(machine.check_disk)),
    ("shared memory", _here(machine.check_shared_memory)),
    ("leftovers", _here(machine.check_leftovers)),
    ("packages", _here(machine.check_packages)),
    ("record", machine.check_record),
)


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found, and what it cost the stack."""

    stack: str
    findings: list[Problem]
    requests: int
    tokens: int


async def examine_stack(target: str, rl_url: str | None = None) -> Examination:
    """Run all checks on a stack, given its name or the address of its frontend."""
    async with Http() as http, rollway.attach(target, rl_url=rl_url, watch=False) as stack:
        subject = await Subject.read(stack, http)
        findings = []
        for name, check in CHECKS:
            try:
                async for finding in check(subject):
                    findings.append(Problem(name, *finding))
            except RollwayError as error:  # the others go on
                text = f"not checked: {error.message}"
                findings.append(Problem(name, "error", text, error.hint))
        return Examination(target, findings, subject.requests, subject.tokens)
