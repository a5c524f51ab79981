"""Runs one round on one system."""

import asyncio
import time

from load.client import Answer, Endpoint, ask

from comparison.workloads import Client, Round


async def run_round(endpoint: Endpoint, asked: Round) -> tuple[list[Answer], float, float]:
    """The answers, when the round began (monotonic), and how many seconds its load lasted.

    Requests that run when the time of a load is up are awaited, and are among the answers.
    """
    start = time.monotonic()
    if asked.one_by_one:
        answers = [await ask(endpoint, question) for question in asked.one_by_one]
        return answers, start, time.monotonic() - start
    answers = []
    async with asyncio.TaskGroup() as group:
        for client in asked.clients:
            group.create_task(_ask_until(endpoint, client, start + asked.seconds, answers))
        group.create_task(_arrive(endpoint, asked, start, answers))
    return answers, start, asked.seconds


async def _ask_until(endpoint: Endpoint, client: Client, until: float, answers: list[Answer]) -> None:
    for question in client.questions:
        if time.monotonic() + client.pause_s >= until:
            return
        answers.append(await ask(endpoint, question))
        if client.pause_s:
            await asyncio.sleep(client.pause_s)


async def _arrive(endpoint: Endpoint, asked: Round, start: float, answers: list[Answer]) -> None:
    """Open loop: a question is sent at its time, whatever became of those before."""

    async def one(index: int) -> None:
        answers.append(await ask(endpoint, asked.arrivals[index][1]))

    async with asyncio.TaskGroup() as group:
        for index, (at, _) in enumerate(asked.arrivals):
            await asyncio.sleep(max(0.0, start + at - time.monotonic()))
            group.create_task(one(index))
