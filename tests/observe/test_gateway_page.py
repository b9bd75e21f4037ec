"""The page of a stack with a gateway before it, each started as its users start them: what an
OpenAI client talks about stands there by session, token by token, with the version of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

import rollway
from rollway.http import Http
from tests.children import run_server
from tests.light.spec import light
from tests.observe.browser import needs_chromium, open_browser
from tests.stack.policies import Policy

pytestmark = [pytest.mark.stack, needs_chromium]


async def say(client: openai.AsyncOpenAI, messages: list[Any]) -> None:
    """Ask for another answer, and add it to the messages."""
    answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=6)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})


async def test_conversations_of_a_live_gateway_are_shown_as_they_go_on(
    base_model: Path, policies: list[Policy]
) -> None:
    """One session before a refit and after it, and another that begins later."""
    async with (
        rollway.up({**light(base_model, "spoken"), "observe": {"interval_seconds": 0.5}}) as stack,
        open_browser() as browser,
    ):
        with run_server("gateway", "spoken") as gateway, run_server("dash", "spoken") as dash:
            page = await browser.open(dash["url"])
            await page.wait_for("document.body?.dataset.ready === 'yes'")
            await page.run("document.querySelector('#conversations summary').click()")
            options = "[...document.querySelectorAll('#session-list [role=option]')]"

            clients = {
                name: openai.AsyncOpenAI(base_url=gateway["url"], api_key=name, max_retries=0)
                for name in ("first", "second")
            }
            messages: list[Any] = [{"role": "user", "content": "count: 1"}]
            await say(clients["first"], messages)
            await page.wait_for(f"{options}.length === 1")  # the page comes to know by itself
            await page.run(f"{options}[0].click()")
            await page.wait_for("document.querySelectorAll('.turn').length === 1")
            await page.run("document.querySelector('.turn details').open = true")

            await stack.refit(1, policies[1].path)
            messages.append({"role": "user", "content": "and on: 2"})
            await say(clients["first"], messages)
            await page.wait_for("document.querySelectorAll('.turn').length === 2")
            assert await page.run("document.querySelector('.turn details').open")  # as it was left
            await say(clients["second"], [{"role": "user", "content": "count: 5"}])
            await page.wait_for(f"{options}.length === 2")
            assert await page.run("document.querySelectorAll('.turn').length") == 2

            (trajectory,) = await read_trajectories(gateway["url"], "first")
            sampled = [i for i, counts in enumerate(trajectory["loss_mask"]) if counts]
            tokens = "[...document.querySelectorAll('.token')]"
            shown = await page.run(f"{tokens}.map((each) => each.innerText)")
            assert shown == [str(trajectory["token_ids"][place]) for place in sampled]
            titles = await page.run(f"{tokens}.map((each) => each.title)")
            assert {title.rpartition("version ")[2] for title in titles} == {"0", "1"}
            for title, place in zip(titles, sampled, strict=True):
                logprob = float(title.split("log-prob ")[1].split(",")[0])
                assert logprob == pytest.approx(trajectory["logprobs"][place], abs=1e-4)
            assert page.problems == [] and page.list_foreign_requests() == []
            counts = "[...document.querySelectorAll('#exact-facts dd')].map((e) => e.innerText)"
            await page.wait_for(f"{counts}.slice(-2).join() === '2 sessions,3'")


async def read_trajectories(url: str, session: str) -> list[dict[str, Any]]:
    """Return what the gateway itself says of a session."""
    async with Http() as http:
        answer = await http.get(f"{url}/rollway/trajectories/{session}", timeout=30.0)
    trajectories: list[dict[str, Any]] = answer["trajectories"]
    return trajectories
